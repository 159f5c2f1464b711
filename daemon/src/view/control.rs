//! Control API: the requests of `gpumem_model::control`, as HTTP and JSON over a Unix socket. The kernel names the caller's user.
//! A caller sees the processes of their own user; root and the group `gpumemd` see all.

mod commands;
mod doctor;
mod request;
mod runs;

use super::ViewContext;
use super::rows::rows;
use crate::limits::ControlLimits;
use crate::limits::connection_slots::{ConnectionSlot, ConnectionSlots, SlotsFull};
use crate::limits::user_share::{AnswerSlot, CpuCharge};
use crate::stats::Count;
use crate::view::visibility::Viewer;
use gpumem_model::control::{Ps, Refusal, Released};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use request::{Refused, SMALL, json, number};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};

/// Time limit for the head of a request.
const HEADER: Duration = Duration::from_secs(1);
/// Time limit for a connection.
const LONGEST: Duration = Duration::from_secs(60);
/// Longest time for which NVML is closed by one request, in seconds.
const LONGEST_RELEASE_S: u64 = 3600;

/// Takes a connection slot. Root always gets one, because it must be able to find the cause of a problem.
fn take_slot(slots: &Arc<ConnectionSlots>, uid: u32, limits: ControlLimits) -> Result<ConnectionSlot, Count> {
    let (most, most_of_user) = match uid {
        0 => (usize::MAX, usize::MAX),
        _ => (limits.connections, limits.connections_per_uid),
    };
    let full = |full: SlotsFull| if full.user { Count::ControlOfUid } else { Count::ControlFull };
    slots.take(uid, most, most_of_user).map_err(full)
}

pub(crate) async fn serve(listener: UnixListener, context: Arc<ViewContext>) {
    let slots = Arc::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                context.stats.add(Count::AcceptFailures, 1);
                tracing::debug!(%error, "no connection for control");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // All slots are taken: the connection is closed, and the client reports it.
        let Ok(uid) = stream.peer_cred().map(|peer| peer.uid()) else { continue };
        let slot = match take_slot(&slots, uid, context.shown().control) {
            Ok(slot) => slot,
            Err(full) => {
                context.stats.add(full, 1);
                continue;
            }
        };
        let context = Arc::clone(&context);
        tokio::spawn(async move {
            let _slot = slot;
            let Ok(viewer) = viewer(&context, &stream).await else { return };
            let service = service_fn(|request: Request<Incoming>| {
                let context = Arc::clone(&context);
                async move { Ok::<_, Infallible>(respond(&context, viewer, &request).await) }
            });
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(HEADER).max_buf_size(16 << 10);
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            // An error of the connection, for example a client that goes away, needs no handling.
            let _ = tokio::time::timeout(LONGEST, connection).await;
        });
    }
}

/// Returns the viewer of a connection. Waits for the user's turn, because finding their groups reads files.
async fn viewer(context: &ViewContext, stream: &UnixStream) -> std::io::Result<Viewer> {
    let peer = stream.peer_cred()?;
    let turn = context.turn(peer.uid(), is_free(peer.uid())).await;
    Ok(turn.charge.run(|| Viewer::of(peer.uid(), peer.gid())))
}

/// Returns whether a user has no rate limit: root and the user who runs the daemon.
fn is_free(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

async fn respond(context: &ViewContext, viewer: Viewer, request: &Request<Incoming>) -> Response<Answer> {
    context.stats.add(Count::ControlRequests, 1);
    let mut turn = context.turn(viewer.uid, is_free(viewer.uid)).await;
    if request.uri().path() == "/v1/record" {
        // The request waits for an agent; the user may make other requests meanwhile.
        turn.release();
    }
    let charge = turn.charge.clone();
    let (status, body) = charge.run_future(answer(context, viewer, request, &charge)).await;
    with(status, Answer::new(body, turn))
}

async fn answer(
    context: &ViewContext,
    viewer: Viewer,
    request: &Request<Incoming>,
    charge: &CpuCharge,
) -> (StatusCode, Vec<u8>) {
    let query = request.uri().query().unwrap_or_default();
    let get = request.method() == Method::GET;
    let answer = match (request.uri().path(), get, request.method() == Method::POST) {
        ("/v1/ps", true, _) => Ok(json(&ps(context, viewer))),
        ("/v1/runs", true, _) => runs::runs(context, viewer, query, charge).await,
        ("/v1/hidden", true, _) => {
            runs::hidden(context, viewer, query, charge).await.map(|hidden| json(&hidden))
        }
        ("/v1/metrics", true, _) if viewer.all => Ok(json(&super::prometheus::scrape_named(context))),
        ("/v1/metrics", true, _) => Ok(json(&super::prometheus::scrape(context))),
        ("/v1/doctor", true, _) => doctor::doctor(context, viewer, query).map(|doctor| json(&doctor)),
        ("/v1/nvml/release", _, true) => release(context, viewer, query).map(|released| json(&released)),
        ("/v1/record", _, true) => {
            commands::record(context, viewer, query).await.map(|recorded| json(&recorded))
        }
        ("/v1/mark", _, true) => commands::mark(context, viewer, query).await.map(|marked| json(&marked)),
        ("/v1/ps" | "/v1/runs" | "/v1/hidden" | "/v1/doctor" | "/v1/metrics", ..) => {
            Err(Refused::new(StatusCode::METHOD_NOT_ALLOWED, "this path needs GET"))
        }
        ("/v1/nvml/release" | "/v1/record" | "/v1/mark", ..) => {
            Err(Refused::new(StatusCode::METHOD_NOT_ALLOWED, "this path needs POST"))
        }
        (path, ..) => Err(Refused::new(
            StatusCode::NOT_FOUND,
            format!(
                "unknown path {path:?}; known: GET /v1/ps, /v1/runs, /v1/hidden, /v1/doctor, /v1/metrics, POST /v1/nvml/release?for_s=N, \
                 /v1/record?pid=N&do=VERB and /v1/mark?name=NAME"
            ),
        )),
    };
    match answer {
        Ok(body) => (StatusCode::OK, body),
        Err(Refused(status, error)) => (status, json(&Refusal { error })),
    }
}

fn ps(context: &ViewContext, viewer: Viewer) -> Ps {
    let published = context.board.read();
    let rows = rows(&published, &context.sources.health(), viewer, context.shown().tenants);
    Ps {
        devices: rows.devices.into_iter().map(|(row, _)| row).collect(),
        processes: rows.processes.into_iter().map(|(row, ..)| row).collect(),
        claims: rows.claims,
    }
}

fn release(context: &ViewContext, viewer: Viewer, query: &str) -> Result<Released, Refused> {
    if !viewer.all {
        let text = "only root, the daemon's user and members of the group gpumemd may close NVML";
        return Err(Refused::new(StatusCode::FORBIDDEN, text));
    }
    let for_s = number(query, "for_s")?.filter(|for_s| (1..=LONGEST_RELEASE_S).contains(for_s));
    let for_s = for_s.ok_or_else(|| {
        let text = format!("for_s=N must be from 1 to {LONGEST_RELEASE_S} seconds");
        Refused::new(StatusCode::BAD_REQUEST, text)
    })?;
    context.sources.release(Duration::from_secs(for_s));
    Ok(Released { for_s })
}

/// For fuzz/: returns whether each parser of queries accepts this one, and the value with its escapes decoded.
#[doc(hidden)]
pub fn understood(query: &str) -> (bool, bool, Option<String>) {
    (runs::Which::of(query).is_ok(), commands::limits(query).is_ok(), request::unescaped(query).ok())
}

/// A body sent in pieces. A large answer keeps its user's answer slot until it has been read, so a user has at most one unread
/// large answer.
struct Answer {
    rest: Bytes,
    _turn: Option<AnswerSlot>,
}

impl Answer {
    fn new(body: Vec<u8>, turn: AnswerSlot) -> Self {
        let turn = (body.len() > SMALL).then_some(turn);
        Answer { rest: body.into(), _turn: turn }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let len = self.rest.len().min(SMALL);
        Poll::Ready((len > 0).then(|| Ok(Frame::data(self.rest.split_to(len)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

fn with(status: StatusCode, body: Answer) -> Response<Answer> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_always_gets_a_slot() {
        let (slots, limits) = (Arc::default(), ControlLimits::default());
        let take = |uid| take_slot(&slots, uid, limits);
        let mut held: Vec<_> = (0..100).filter_map(|_| take(1000).ok()).collect();
        assert_eq!(held.len(), limits.connections_per_uid);
        assert_eq!(take(1000).err(), Some(Count::ControlOfUid));
        assert!(take(1001).is_ok());
        for uid in 1001..1010 {
            held.extend((0..100).filter_map(|_| take(uid).ok()));
        }
        assert_eq!(held.len(), limits.connections);
        assert_eq!(take(1000).err(), Some(Count::ControlOfUid), "the user's own limit is named first");
        assert_eq!(take(2000).err(), Some(Count::ControlFull));
        assert!(take(0).is_ok());
    }
}
