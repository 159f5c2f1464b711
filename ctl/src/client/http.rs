//! A single HTTP request and its reply, with limits for time and size.

use super::search::Socket;
use crate::proc::Stat;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use std::io::ErrorKind;
use std::process::{Command, Stdio};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// Largest reply in bytes; about five times that of a daemon with a hundred runs of ten thousand tags each.
const LARGEST: usize = 256 << 20;
/// Timeout for connecting to a local socket. The kernel accepts connections at once, even for a stopped process.
const CONNECT_LOCAL: Duration = Duration::from_secs(1);
/// Timeout for connecting to a server by TCP.
const CONNECT_REMOTE: Duration = Duration::from_secs(5);

const USER_AGENT: &str = concat!("gpumemctl/", env!("CARGO_PKG_VERSION"));

/// Status and body of a reply, or the reason why there is none.
pub(super) type Reply = Result<(StatusCode, Bytes), String>;

/// Checks that the socket accepts a connection, and that its server can be trusted.
pub(crate) fn check_connection(socket: &Socket) -> Result<(), String> {
    block_on(async { connect(socket).await.map(drop) })
}

/// Sends a request without a body to a daemon, and returns the reply. `within` is the timeout.
pub(crate) fn request(socket: &Socket, method: Method, path: &str, within: Duration) -> Reply {
    block_on(async {
        let stream = connect(socket).await?;
        let server = stream.peer_cred().ok().and_then(|server| server.pid());
        let exchange = exchange(stream, method, path, "gpumemd", "a daemon's control socket");
        timeout(within, exchange)
            .await
            .unwrap_or_else(|_| Err(not_answered(within) + ": " + &why_silent(server)))
    })
}

fn not_answered(within: Duration) -> String {
    format!("accepts connections but has not answered for {} s", within.as_secs())
}

/// Gets a path of a Prometheus by http. `authority` is `host:port`.
pub(crate) fn get(authority: &str, path: &str, within: Duration) -> Reply {
    block_on(async {
        let stream = match timeout(CONNECT_REMOTE, TcpStream::connect(authority)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(format!("cannot be reached: {error}")),
            Err(_) => return Err(format!("cannot be reached: no answer for {} s", CONNECT_REMOTE.as_secs())),
        };
        let exchange = exchange(stream, Method::GET, path, authority, "the address of a Prometheus");
        timeout(within, exchange).await.unwrap_or_else(|_| Err(not_answered(within)))
    })
}

/// Gets an https address by the program `curl`, which also reads `CURL_CA_BUNDLE`, proxies, ~/.curlrc and ~/.netrc.
pub(crate) fn get_by_curl(url: &str, within: Duration) -> Reply {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--globoff", "--netrc-optional", "--proto", "=https"]);
    curl.args(["--write-out", "\n%{http_code}", "--header", "Accept: application/json"]);
    curl.args(["--connect-timeout", &CONNECT_REMOTE.as_secs().to_string()]);
    curl.args(["--max-time", &within.as_secs().to_string(), "--max-filesize", &LARGEST.to_string()]);
    curl.args(["--user-agent", USER_AGENT, "--url", url]);
    let output = curl.stdin(Stdio::null()).output().map_err(|error| match error.kind() {
        ErrorKind::NotFound => "https needs the program curl, which is not in PATH: install curl".to_owned(),
        _ => format!("cannot start curl: {error}"),
    })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let reason = text.lines().next().unwrap_or("it ended without a message").trim_start_matches("curl: ");
        return Err(match output.status.code() {
            // curl's exit codes for certificates that it does not accept. curl's texts depend on its TLS library.
            Some(51 | 58 | 60 | 77 | 83 | 90 | 91) => format!(
                "the certificate is not accepted: curl {reason}; name the file of its authority: CURL_CA_BUNDLE=FILE"
            ),
            _ => format!("curl {reason}"),
        });
    }
    let (body, status) = output.stdout.split_at(output.stdout.len().saturating_sub(4));
    let status = str::from_utf8(status).ok().and_then(|status| status.trim().parse::<u16>().ok());
    let status = status.and_then(|status| StatusCode::from_u16(status).ok());
    Ok((status.ok_or("curl printed no status")?, Bytes::copy_from_slice(body)))
}

/// Returns why the listening process may not answer, as far as /proc shows it.
fn why_silent(pid: Option<i32>) -> String {
    let Some(pid) = pid.filter(|pid| *pid > 0) else { return "is its process stopped?".into() };
    let stat = u32::try_from(pid).ok().and_then(Stat::of_pid);
    if stat.is_some_and(|stat| ['T', 't'].contains(&stat.state)) {
        return format!("process {pid} is stopped; kill -CONT {pid} continues it");
    }
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let limit = limit.and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    match limit {
        Some(limit) if open >= limit => format!(
            "process {pid} has no file descriptor left, {open} of {limit} are open; raise the limit: LimitNOFILE= of its unit, or ulimit -n"
        ),
        _ => format!("process {pid} runs, and may be busy or hanging"),
    }
}

fn block_on<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| error.to_string())?.block_on(work)
}

async fn connect(socket: &Socket) -> Result<UnixStream, String> {
    match timeout(CONNECT_LOCAL, UnixStream::connect(&socket.path)).await {
        Ok(Ok(stream)) => {
            let server = stream.peer_cred().map_err(|error| error.to_string())?;
            socket.check_server(server.uid())?;
            Ok(stream)
        }
        Ok(Err(error)) => Err(match error.kind() {
            ErrorKind::ConnectionRefused => {
                "no process listens: a daemon that has ended left the socket".into()
            }
            ErrorKind::PermissionDenied => "no permission to connect".into(),
            ErrorKind::NotFound => "is not there".into(),
            _ => error.to_string(),
        }),
        Err(_) => Err("accepts no connections: too many callers are waiting".into()),
    }
}

/// Sends a request on a connection. `what` describes the expected server, for the error if it does not use HTTP.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    method: Method,
    path: &str,
    host: &str,
    what: &str,
) -> Reply {
    let no_http = |error: hyper::Error| {
        if error.is_parse() {
            format!("does not answer in HTTP: check that it is {what}")
        } else if error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
            "closed the connection without an answer".to_owned()
        } else {
            error.to_string()
        }
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(no_http)?;
    // The task ends with the runtime. `send_request` returns the task's errors too.
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, host)
        .header(header::USER_AGENT, USER_AGENT)
        .header(header::ACCEPT, "application/json")
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let answer = sender.send_request(request).await.map_err(no_http)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), LARGEST).collect().await;
    let body = body.map_err(|error| format!("interrupted its answer: {error}"))?;
    Ok((status, body.to_bytes()))
}
