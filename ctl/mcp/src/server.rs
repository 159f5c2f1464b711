//! The server: lists the tools, and runs gpumemctl for a call.

use crate::shorten::shorten;
use crate::tools::{COMMANDS, Command, UNTRUSTED, shown};
use rmcp::ServerHandler;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation, ListToolsResult,
    PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use std::ffi::{OsStr, OsString};
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::Semaphore;

/// Longest output of gpumemctl that is read, in bytes; a report of a large recording has a few million.
const OUTPUT_BYTES: u64 = 8 << 20;
/// Longest error of gpumemctl that is passed on, in bytes.
const ERROR_BYTES: u64 = 4000;
/// Number of gpumemctl processes at a time. Further calls wait.
const PROCESSES: usize = 2;
/// Longest time that a gpumemctl process may take.
const TIME_LIMIT: Duration = Duration::from_secs(120);

pub(crate) struct Server {
    running: Semaphore,
}

impl Server {
    pub(crate) fn new() -> Self {
        Server { running: Semaphore::new(PROCESSES) }
    }

    /// Runs gpumemctl for a call. The error is text for the client.
    async fn call(&self, request: CallToolRequestParams) -> Result<Vec<ContentBlock>, String> {
        let known = || COMMANDS.iter().map(|command| command.name).collect::<Vec<_>>().join(", ");
        let command = COMMANDS.iter().find(|command| command.name == request.name);
        let command = command.ok_or_else(|| {
            format!("no tool has the name \"{}\"; the tools: {}", shown(&request.name), known())
        })?;
        let words = command.words(&request.arguments.unwrap_or_default())?;
        let _turn = self.running.acquire().await.map_err(|error| error.to_string())?;
        let ran = run(&gpumemctl(), &words, TIME_LIMIT).await?;
        let answer = tokio::task::spawn_blocking(move || answer(ran, &words)).await;
        answer.map_err(|error| error.to_string())?
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let about = format!(
            "Where the memory of NVIDIA GPUs goes, and what to change. Find a name with processes or runs; then ask report, oom \
             or why. Amounts are in bytes unless a field's name has another unit. {UNTRUSTED}"
        );
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("gpumem-mcp", env!("CARGO_PKG_VERSION")))
            .with_instructions(about)
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        COMMANDS.iter().find(|command| command.name == name).map(Command::tool)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, rmcp::ErrorData> {
        Ok(ListToolsResult::with_all_items(COMMANDS.iter().map(Command::tool).collect()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, rmcp::ErrorData> {
        let result = tokio::select! {
            result = self.call(request) => result,
            () = context.ct.cancelled() => Err("the client cancelled the call".to_owned()),
        };
        Ok(match result {
            Ok(content) => CallToolResult::success(content),
            Err(text) => CallToolResult::error(vec![ContentBlock::text(text)]),
        }
        .into())
    }
}

/// What a gpumemctl process printed.
struct Ran {
    status: ExitStatus,
    output: Vec<u8>,
    error: Vec<u8>,
}

/// Runs gpumemctl, which is killed at the time limit or if the call is cancelled. The error is text for the client.
async fn run(program: &OsStr, words: &[String], limit: Duration) -> Result<Ran, String> {
    let ran = tokio::time::timeout(limit, outcome(program, words)).await.map_err(|_| {
        format!(
            "gpumemctl {} took longer than {} s and was ended; select less, such as one process or device",
            asked(words),
            limit.as_secs()
        )
    })?;
    ran.map_err(|error| {
        format!(
            "gpumemctl did not run: {error}; install it beside gpumem-mcp or in PATH (gpumemctl --version)"
        )
    })
}

async fn outcome(program: &OsStr, words: &[String]) -> io::Result<Ran> {
    let mut command = tokio::process::Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn()?;
    let (output, error) = (child.stdout.take(), child.stderr.take());
    let (output, error) = tokio::try_join!(read(output, OUTPUT_BYTES), read(error, ERROR_BYTES))?;
    Ok(Ran { status: child.wait().await?, output, error })
}

/// Returns the command of gpumemctl in a command line.
fn asked(words: &[String]) -> &str {
    words.first().map_or("", String::as_str)
}

/// Returns gpumemctl's path: beside this program, or else a name to be found in PATH.
fn gpumemctl() -> OsString {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name("gpumemctl"));
    beside.filter(|path| path.is_file()).map_or_else(|| "gpumemctl".into(), Into::into)
}

/// Reads a stream to its end, or to one byte above the limit.
async fn read(from: Option<impl AsyncRead + Unpin>, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(limit + 1).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

/// Returns the answer from what gpumemctl printed. The error is text for the client.
fn answer(ran: Ran, words: &[String]) -> Result<Vec<ContentBlock>, String> {
    let mut error = String::from_utf8_lossy(&ran.error).trim().to_owned();
    if ran.error.len() as u64 > ERROR_BYTES {
        error.push_str("...");
    }
    let asked = asked(words);
    if ran.output.len() as u64 > OUTPUT_BYTES {
        return Err(format!(
            "gpumemctl {asked} printed more than {OUTPUT_BYTES} bytes; select less, such as one process, device or job"
        ));
    }
    if !ran.status.success() {
        return Err(match error.is_empty() {
            true => format!(
                "gpumemctl {asked} failed ({}) without a message; gpumemctl doctor checks the installation",
                ran.status
            ),
            false => error,
        });
    }
    let document = String::from_utf8_lossy(&ran.output).into_owned();
    let (document, note) = shorten(document).ok_or_else(|| {
        format!("the answer is too long for this protocol; select less, or run gpumemctl {asked} --json in a terminal")
    })?;
    let notes = note.into_iter().chain(Some(error).filter(|error| !error.is_empty()));
    Ok([document].into_iter().chain(notes).map(ContentBlock::text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_does_not_end_is_an_error() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let words = ["600".to_owned()];
        let ran = runtime.block_on(run(OsStr::new("sleep"), &words, Duration::from_millis(1)));
        assert!(ran.is_err_and(|error| error.contains("took longer than")));
    }
}
