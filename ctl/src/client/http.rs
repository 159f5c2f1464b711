//! One request and its answer, within a time and a size.

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The answer of a daemon with a hundred runs of ten thousand tags is a fifth of this.
const LARGEST: usize = 256 << 20;
/// A listening socket takes a connection at once, also that of a process that is stopped.
const CONNECT: Duration = Duration::from_secs(1);

/// Whether somebody listens.
pub fn reach(socket: &Path) -> Result<(), String> {
    block_on(async { connect(socket).await.map(drop) })
}

/// Sends a request without a body.
pub fn request(
    socket: &Path,
    method: Method,
    path: &str,
    within: Duration,
) -> Result<(StatusCode, Bytes), String> {
    block_on(async {
        let stream = connect(socket).await?;
        match timeout(within, exchange(stream, method, path)).await {
            Ok(answer) => answer,
            Err(_) => Err(format!(
                "takes connections but has not answered for {} s: is its process stopped?",
                within.as_secs()
            )),
        }
    })
}

fn block_on<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| error.to_string())?.block_on(work)
}

async fn connect(socket: &Path) -> Result<UnixStream, String> {
    match timeout(CONNECT, UnixStream::connect(socket)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => Err(match error.kind() {
            std::io::ErrorKind::ConnectionRefused => {
                "nobody listens (left by a daemon that has ended)".into()
            }
            std::io::ErrorKind::PermissionDenied => "no permission to connect".into(),
            std::io::ErrorKind::NotFound => "is not there".into(),
            _ => error.to_string(),
        }),
        Err(_) => Err("does not take connections: too many are waiting".into()),
    }
}

async fn exchange(stream: UnixStream, method: Method, path: &str) -> Result<(StatusCode, Bytes), String> {
    let no_http = |error: hyper::Error| {
        if error.is_parse() {
            "does not speak HTTP: is it a daemon's control socket?".to_owned()
        } else if error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
            "closed the connection without an answer".to_owned()
        } else {
            error.to_string()
        }
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(no_http)?;
    // Ends with the runtime; what goes wrong in it, the request hears too.
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "gpumemd")
        .header(header::USER_AGENT, concat!("gpumemctl/", env!("CARGO_PKG_VERSION")))
        .header(header::ACCEPT, "application/json")
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let answer = sender.send_request(request).await.map_err(no_http)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), LARGEST).collect().await;
    let body = body.map_err(|error| format!("broke off its answer: {error}"))?;
    Ok((status, body.to_bytes()))
}
