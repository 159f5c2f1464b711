//! A single HTTP request and its reply, with limits for time and size.

use super::search::Candidate;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// Largest reply in bytes; about five times that of a daemon with a hundred runs of ten thousand tags each.
const LARGEST: usize = 256 << 20;
/// Timeout for connecting to a local socket. The kernel accepts connections at once, even for a stopped process.
const CONNECT: Duration = Duration::from_secs(1);
/// Timeout for connecting to a server on the network.
const REACH: Duration = Duration::from_secs(5);

/// Checks that a process listens on the socket.
pub(crate) fn reach(socket: &Candidate) -> Result<(), String> {
    block_on(async { connect(socket).await.map(drop) })
}

/// Sends a request without a body. Returns the status and the body.
pub(crate) fn request(
    socket: &Candidate,
    method: Method,
    path: &str,
    within: Duration,
) -> Result<(StatusCode, Bytes), String> {
    block_on(async {
        let stream = connect(socket).await?;
        let server = stream.peer_cred().ok().and_then(|server| server.pid());
        match timeout(within, exchange(stream, method, path, "gpumemd", "a daemon's control socket")).await {
            Ok(answer) => answer,
            Err(_) => Err(format!(
                "takes connections but has not answered for {} s: {}",
                within.as_secs(),
                why_silent(server)
            )),
        }
    })
}

/// Gets a path from a server on the network.
pub(crate) fn ask(authority: &str, path: &str, within: Duration) -> Result<(StatusCode, Bytes), String> {
    block_on(async {
        let stream = match timeout(REACH, TcpStream::connect(authority)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(format!("cannot be reached: {error}")),
            Err(_) => return Err(format!("cannot be reached: no answer for {} s", REACH.as_secs())),
        };
        let asked = exchange(stream, Method::GET, path, authority, "the address of a Prometheus");
        match timeout(within, asked).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("takes connections but has not answered for {} s", within.as_secs())),
        }
    })
}

/// Returns why the listening process may not answer, according to /proc.
fn why_silent(pid: Option<i32>) -> String {
    let Some(pid) = pid.filter(|pid| *pid > 0) else { return "is its process stopped?".into() };
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    // The command's name before the state is in parentheses and may contain any character.
    if read("stat").rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 't'])) {
        return format!("process {pid} is stopped; kill -CONT {pid} lets it go on");
    }
    let limits = read("limits");
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let limit = limit.and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    match limit {
        Some(limit) if open >= limit => format!(
            "process {pid} has no file descriptor left, {open} of {limit} are open; raise the limit: LimitNOFILE= of its unit, or ulimit -n"
        ),
        _ => format!("process {pid} runs, but is it busy or hanging?"),
    }
}

fn block_on<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| error.to_string())?.block_on(work)
}

async fn connect(socket: &Candidate) -> Result<UnixStream, String> {
    match timeout(CONNECT, UnixStream::connect(&socket.path)).await {
        Ok(Ok(stream)) => {
            let server = stream.peer_cred().map_err(|error| error.to_string())?;
            socket.believes(server.uid())?;
            Ok(stream)
        }
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

/// Sends the request on a connection. `what` describes the expected server, for the error if it does not use HTTP.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    method: Method,
    path: &str,
    host: &str,
    what: &str,
) -> Result<(StatusCode, Bytes), String> {
    let no_http = |error: hyper::Error| {
        if error.is_parse() {
            format!("does not speak HTTP: is it {what}?")
        } else if error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
            "closed the connection without an answer".to_owned()
        } else {
            error.to_string()
        }
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(no_http)?;
    // The task ends with the runtime. Its errors are also returned to the request.
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, host)
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
