//! Serves metrics and the live page over HTTP: GET /metrics, GET /healthz and the paths of [`page`]. Clients are untrusted: the
//! head of a request must arrive within a second, and connections are limited. When all slots are taken, the connection that has
//! been idle longest is closed.

use super::page::{self, ResponseCache};
use super::{ViewContext, prometheus};
use crate::limits::connection_slots::ConnectionSlots;
use crate::stats::{Count, Stats};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use tokio::net::TcpListener;

/// Time limit for the head of a request, and for the next request on the connection.
pub(super) const HEADER: Duration = Duration::from_secs(1);
/// Time after which an idle connection may be closed for a new one.
const GRACE: Duration = Duration::from_millis(25);
/// Time limit for a connection, because a client may read very slowly.
const LONGEST: Duration = Duration::from_secs(30);

const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns an accepted connection. Counts a failure, such as a lack of descriptors, and waits before the next attempt.
pub(super) async fn accepted<S, A>(stats: &Stats, view: &str, result: io::Result<(S, A)>) -> Option<S> {
    match result {
        Ok((stream, _)) => Some(stream),
        Err(error) => {
            stats.add(Count::AcceptFailures, 1);
            tracing::debug!(%error, "no connection for {view}");
            tokio::time::sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

/// Returns an HTTP/1 server with the limits of all sockets: time and bytes of a request's head.
pub(super) fn server() -> http1::Builder {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER).max_buf_size(16 << 10);
    server
}

/// Serves connections until the future is dropped. `max_connections`: limit of connections at one time.
pub(crate) async fn serve(
    listener: TcpListener,
    context: Arc<ViewContext>,
    max_connections: Arc<AtomicUsize>,
) {
    let slots = Arc::new(ConnectionSlots::<()>::default());
    let cache = Arc::new(ResponseCache::default());
    loop {
        let Some(stream) = accepted(&context.stats, "metrics", listener.accept().await).await else {
            continue;
        };
        let (slot, evicted) = slots.take_or_evict(&max_connections, GRACE).await;
        if evicted > 0 {
            context.stats.add(Count::HttpFull, evicted);
        }
        let (context, cache) = (Arc::clone(&context), Arc::clone(&cache));
        tokio::spawn(async move {
            let slot = Arc::new(slot);
            let (stats, evicted) = (Arc::clone(&context.stats), slot.evicted());
            let service = service_fn(|request| {
                let (context, cache, slot) = (Arc::clone(&context), Arc::clone(&cache), Arc::clone(&slot));
                async move {
                    slot.mark_active();
                    let response = answer(&context, &cache, &request).await;
                    slot.mark_idle(HEADER);
                    Ok::<_, Infallible>(response)
                }
            });
            let connection = server().serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                served = tokio::time::timeout(LONGEST, connection) => {
                    if !matches!(served, Ok(Ok(()))) {
                        stats.add(Count::HttpBad, 1);
                    }
                }
                () = evicted.notified() => {}
            }
        });
    }
}

async fn answer(
    context: &Arc<ViewContext>,
    cache: &ResponseCache,
    request: &Request<Incoming>,
) -> Response<Full<Bytes>> {
    context.stats.add(Count::HttpRequests, 1);
    if request.method() != Method::GET {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET is supported\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return response;
    }
    // A request for /healthz may name any host, because the answer has nothing confidential.
    let path = request.uri().path();
    if path != "/healthz" && !page::is_for_this_machine(request, &context.shown().hosts) {
        let text = "use the address of this machine, localhost, its name, or a name in metrics.hosts of the configuration\n";
        return plain(StatusCode::MISDIRECTED_REQUEST, text);
    }
    match path {
        "/metrics" => full(StatusCode::OK, TEXT, prometheus::scrape(context)),
        "/healthz" => plain(StatusCode::OK, "ok\n"),
        _ => match page::answer(context, cache, request).await {
            Some(response) => response,
            None => {
                plain(StatusCode::NOT_FOUND, "unknown path; known: /metrics, /healthz and / (the page)\n")
            }
        },
    }
}

pub(super) fn plain(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    full(status, "text/plain; charset=utf-8", text.to_owned())
}

pub(super) fn full(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    response(status, kind, Full::new(body.into()))
}

pub(super) fn response<B>(status: StatusCode, kind: &'static str, body: B) -> Response<B> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
