//! Serves the control API: the requests of `gpumem_model::control`, as HTTP and JSON over a Unix socket. The kernel reports
//! which user has connected. Users see their own processes; root and members of the group `gpumemd` see all.

mod commands;
mod doctor;
mod request;
mod runs;

use super::http::{accepted, response, server};
use super::rows::RowMaker;
use super::{Refused, ViewContext, Viewer};
use crate::config::ControlLimits;
use crate::limits::connection_slots::{ConnectionSlot, ConnectionSlots, SlotsFull};
use crate::limits::user_share::{AnswerSlot, CpuCharge};
use crate::stats::Count;
use gpumem_model::control::{Ps, Refusal, Released};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use request::{SMALL, json, query_number};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};

/// Time limit for a connection, because a client may read very slowly.
const LONGEST: Duration = Duration::from_secs(60);
/// Longest time for which NVML is closed by one request, in seconds.
const LONGEST_RELEASE_S: u64 = 3600;

/// Takes a connection slot for a user. Root always gets one, because root must be able to find the cause of a problem. An error
/// is the counter of the limit that was reached.
fn take_slot(
    slots: &Arc<ConnectionSlots>,
    uid: u32,
    limits: &ControlLimits,
) -> Result<ConnectionSlot, Count> {
    let (in_total, for_user) = match uid {
        0 => (usize::MAX, usize::MAX),
        _ => (limits.connections, limits.connections_per_uid),
    };
    let full = |full: SlotsFull| if full.user { Count::ControlOfUid } else { Count::ControlFull };
    slots.take(uid, in_total, for_user).map_err(full)
}

pub(crate) async fn serve(listener: UnixListener, context: Arc<ViewContext>) {
    let slots = Arc::default();
    loop {
        let Some(stream) = accepted(&context.stats, "control", listener.accept().await).await else {
            continue;
        };
        let Ok(uid) = stream.peer_cred().map(|peer| peer.uid()) else { continue };
        let slot = match take_slot(&slots, uid, &context.shown().control) {
            Ok(slot) => slot,
            // The connection is closed, and the client reports it.
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
            let connection = server().serve_connection(TokioIo::new(stream), service);
            // Errors need no handling: for example, the client has disconnected.
            let _ = tokio::time::timeout(LONGEST, connection).await;
        });
    }
}

/// Returns the viewer of a connection. Waits for an answer slot of the user, because finding their groups reads files.
async fn viewer(context: &ViewContext, stream: &UnixStream) -> std::io::Result<Viewer> {
    let peer = stream.peer_cred()?;
    let slot = context.answer_slot(peer.uid(), is_free(peer.uid())).await;
    Ok(slot.charge.run(|| Viewer::of(peer.uid(), peer.gid())))
}

/// Returns whether a user has no rate limit: root and the user who runs the daemon.
fn is_free(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

async fn respond(context: &ViewContext, viewer: Viewer, request: &Request<Incoming>) -> Response<Answer> {
    context.stats.add(Count::ControlRequests, 1);
    let mut slot = context.answer_slot(viewer.uid, is_free(viewer.uid)).await;
    if request.uri().path() == "/v1/record" {
        // This request waits for an agent, so the user's other requests must not wait for it.
        slot.release();
    }
    let charge = slot.charge.clone();
    let (status, body) = charge.run_future(answer(context, viewer, request, &charge)).await;
    response(status, "application/json", Answer::new(body, slot))
}

const GET: [&str; 5] = ["/v1/ps", "/v1/runs", "/v1/hidden", "/v1/doctor", "/v1/metrics"];
const POST: [&str; 3] = ["/v1/nvml/release", "/v1/record", "/v1/mark"];

async fn answer(
    context: &ViewContext,
    viewer: Viewer,
    request: &Request<Incoming>,
    charge: &CpuCharge,
) -> (StatusCode, Vec<u8>) {
    let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
    let refuse = |text| Err(Refused::new(StatusCode::METHOD_NOT_ALLOWED, text));
    let answer = match path {
        _ if GET.contains(&path) && request.method() != Method::GET => refuse("this path needs GET"),
        _ if POST.contains(&path) && request.method() != Method::POST => refuse("this path needs POST"),
        "/v1/ps" => Ok(json(ps(context, viewer))),
        "/v1/runs" => runs::runs(context, viewer, query, charge).await,
        "/v1/hidden" => runs::hidden(context, viewer, query, charge).await.map(json),
        "/v1/metrics" if viewer.all => Ok(json(super::prometheus::scrape_named(context))),
        "/v1/metrics" => Ok(json(super::prometheus::scrape(context))),
        "/v1/doctor" => doctor::doctor(context, viewer, query).map(json),
        "/v1/nvml/release" => release(context, viewer, query).map(json),
        "/v1/record" => commands::record(context, viewer, query).await.map(json),
        "/v1/mark" => commands::mark(context, viewer, query).await.map(json),
        _ => Err(Refused::new(
            StatusCode::NOT_FOUND,
            format!(
                "unknown path {path:?}; known: GET /v1/ps, /v1/runs, /v1/hidden, /v1/doctor, /v1/metrics, POST /v1/nvml/release?for_s=N, \
                 /v1/record?pid=N&do=VERB and /v1/mark?name=NAME"
            ),
        )),
    };
    match answer {
        Ok(body) => (StatusCode::OK, body),
        Err(Refused(status, error)) => (status, json(Refusal { error })),
    }
}

fn ps(context: &ViewContext, viewer: Viewer) -> Ps {
    let (published, health) = (context.reader.read(), context.sources.health());
    let tenants = context.shown().tenants;
    let rows = RowMaker { published: &published, health: &health, viewer, tenants }.rows();
    Ps {
        findings: rows.findings(context.run_writer.findings(), true),
        devices: rows.devices.into_iter().map(|(row, _)| row).collect(),
        processes: rows.processes.into_iter().map(|(row, ..)| row).collect(),
        claims: rows.claims,
        ended: context.run_writer.ended().rows(|uid| viewer.sees(uid)),
    }
}

fn release(context: &ViewContext, viewer: Viewer, query: &str) -> Result<Released, Refused> {
    if !viewer.all {
        let text = "only root, the daemon's user and members of the group gpumemd may close NVML";
        return Err(Refused::new(StatusCode::FORBIDDEN, text));
    }
    let for_s = query_number(query, "for_s")?.filter(|for_s| (1..=LONGEST_RELEASE_S).contains(for_s));
    let for_s = for_s.ok_or_else(|| {
        Refused::bad_request(format!("for_s=N must be from 1 to {LONGEST_RELEASE_S} seconds"))
    })?;
    context.sources.release(Duration::from_secs(for_s));
    Ok(Released { for_s })
}

/// For fuzz/: returns whether the parsers of process filters and of recording limits accept a query, and the query without
/// percent escapes.
#[doc(hidden)]
pub fn fuzz_query(query: &str) -> (bool, bool, Option<String>) {
    (runs::ProcessFilter::of(query).is_ok(), commands::limits(query).is_ok(), request::unescape(query).ok())
}

/// Body of an answer, which is sent in pieces. A large answer keeps its user's answer slot until the client has read it. So each
/// user has at most one unread large answer.
struct Answer {
    rest: Bytes,
    _slot: Option<AnswerSlot>,
}

impl Answer {
    fn new(body: Vec<u8>, slot: AnswerSlot) -> Self {
        let slot = (body.len() > SMALL).then_some(slot);
        Answer { rest: body.into(), _slot: slot }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_always_gets_a_slot() {
        let (slots, limits) = (Arc::default(), ControlLimits::default());
        let take = |uid| take_slot(&slots, uid, &limits);
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
