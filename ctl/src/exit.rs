//! Exit codes, and the kind of an error, which decides the exit code.

use gpumem_report::rules;
use gpumem_runs::input;
use gpumem_runs::store::StoreError;
use std::path::PathBuf;

pub(crate) const OK: u8 = 0;
pub(crate) const USAGE: u8 = Kind::Usage as u8;
/// `doctor`: at least one check failed.
pub(crate) const CHECK_FAILED: u8 = 10;
/// `run`: gpumemctl itself failed. The exit codes of `run` are those of env(1), timeout(1) and nohup(1).
pub(crate) const RUN_FAILED: u8 = Kind::RunFailed as u8;
/// `run`: added to the number of the signal that ended the command.
pub(crate) const RUN_SIGNAL: u8 = 128;

pub(crate) const HELP: &str = "Exit codes: 0 done, 1 failure, 2 wrong command line, 3 nothing found by that name, \
4 invalid input, 5 run store unusable, 6 no daemon answers, 7 daemon refuses";
pub(crate) const DOCTOR_HELP: &str = "Exit codes: 0 no problem, 10 problems were found, 1 failure, 2 wrong command line, 3 no such process. \
Meaning of each line: docs/troubleshooting.md";
pub(crate) const DIFF_HELP: &str = "Exit codes: 0 within the limit, 8 B exceeds A by more than --fail-above allows, \
9 undecided for lack of data. The others: 1 failure, 2 wrong command line, 3 nothing found by that name, 4 invalid \
input, 5 run store unusable, 6 no daemon answers, 7 daemon refuses";
pub(crate) const RUN_HELP: &str = "Exit codes: that of the command, 128+N if signal N ended it. The others: 125 failure of \
gpumemctl, 126 the command cannot be executed, 127 the command was not found";

/// Kinds of errors. The number of a kind is its exit code, except for `OtherVersion`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Other = 1,
    /// Arguments that contradict each other.
    Usage = 2,
    /// The requested file, run, process or device does not exist.
    NotFound = 3,
    /// The input has the wrong format, is damaged, or has no process.
    BadInput = 4,
    Store = 5,
    /// No daemon was found, or the server that was found does not answer.
    NoAnswer = 6,
    Refused = 7,
    /// `diff --fail-above`: the limit is exceeded.
    Above = 8,
    /// `diff --fail-above`: the comparison is undecided.
    Undecided = 9,
    /// The daemon has another version than gpumemctl. The exit code is that of `NoAnswer`.
    OtherVersion,
    RunFailed = 125,
    /// `run`: the command exists but cannot be executed.
    RunCannotExecute = 126,
    RunNotFound = 127,
}

impl Kind {
    /// Returns an error of this kind with its whole message.
    pub(crate) fn error(self, text: impl Into<String>) -> anyhow::Error {
        Failure { kind: self, text: text.into() }.into()
    }

    /// Returns whether an error was made by [`Kind::error`] of this kind.
    pub(crate) fn matches(self, error: &anyhow::Error) -> bool {
        error.downcast_ref::<Failure>().is_some_and(|failure| failure.kind == self)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct Failure {
    kind: Kind,
    text: String,
}

/// No daemon answers at any of its usual or given sockets.
#[derive(Debug, thiserror::Error)]
#[error(
    "no daemon answers; looked at:{}\nstart one (gpumemctl run -- COMMAND starts a private one; systemctl start gpumemd \
     the system's), or name its socket: --socket",
    .tried.iter().map(|(path, why)| format!("\n  {}: {why}", path.display())).collect::<String>()
)]
pub(crate) struct Unreachable {
    /// The sockets that were tried, in order, each with the reason why it failed.
    pub tried: Vec<(PathBuf, String)>,
}

/// Returns the exit code of an error: that of the first cause that has one.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    match error.chain().find_map(kind_of).unwrap_or(Kind::Other) {
        Kind::OtherVersion => Kind::NoAnswer as u8,
        kind => kind as u8,
    }
}

/// Returns the kind of an error in a chain of causes; `None` if the next cause decides.
fn kind_of(error: &(dyn std::error::Error + 'static)) -> Option<Kind> {
    use std::io::ErrorKind;
    let missing =
        |source: &std::io::Error| matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return Some(failure.kind);
    }
    if let Some(error) = error.downcast_ref::<input::Error>() {
        return Some(match error {
            input::Error::Open { source, .. } if missing(source) => Kind::NotFound,
            input::Error::Open { .. } | input::Error::Read { .. } => Kind::Other,
            _ => Kind::BadInput,
        });
    }
    if let Some(error) = error.downcast_ref::<StoreError>() {
        return Some(match error {
            StoreError::NotFound { .. } | StoreError::UnknownRun { .. } => Kind::NotFound,
            _ => Kind::Store,
        });
    }
    if let Some(error) = error.downcast_ref::<rules::Error>() {
        return Some(match error {
            rules::Error::Open { source, .. } if missing(source) => Kind::NotFound,
            rules::Error::Open { source, .. } if source.kind() == ErrorKind::PermissionDenied => Kind::Other,
            _ => Kind::BadInput,
        });
    }
    error.is::<Unreachable>().then_some(Kind::NoAnswer)
}
