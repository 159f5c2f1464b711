//! Exit codes, and the mapping of errors to them.

use gpumem_report::rules;
use gpumem_runs::input;
use gpumem_runs::store::StoreError;

pub(crate) const OK: u8 = 0;
/// Failure without its own code.
pub(crate) const FAILURE: u8 = 1;
pub(crate) const USAGE: u8 = 2;
/// `doctor`: at least one check failed.
pub(crate) const SICK: u8 = 10;

/// `run`: gpumemctl itself failed. The codes of `run` are those of env(1), timeout(1) and nohup(1).
pub(crate) const RUN_OWN: u8 = 125;
/// `run`: the command exists but cannot be executed.
pub(crate) const RUN_CANNOT_EXECUTE: u8 = 126;
pub(crate) const RUN_NOT_FOUND: u8 = 127;
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

/// Kinds of errors, each with its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Other,
    /// The requested file, run, process or device does not exist.
    NotFound,
    /// Arguments that contradict each other.
    Usage,
    /// The input has the wrong format, is damaged, or has no process.
    BadInput,
    Store,
    /// A server was found but does not answer.
    NoAnswer,
    OtherVersion,
    Refused,
    /// `diff --fail-above`: the limit is exceeded.
    Above,
    /// `diff --fail-above`: the comparison is undecided.
    Undecided,
}

impl Kind {
    /// Returns an error of this kind with its whole message.
    pub(crate) fn error(self, text: impl Into<String>) -> anyhow::Error {
        Failure { kind: self, text: text.into() }.into()
    }

    pub(crate) fn is_of(self, error: &anyhow::Error) -> bool {
        error.downcast_ref::<Failure>().is_some_and(|failure| failure.kind == self)
    }

    fn code(self) -> u8 {
        match self {
            Kind::Other => FAILURE,
            Kind::Usage => USAGE,
            Kind::NotFound => 3,
            Kind::BadInput => 4,
            Kind::Store => 5,
            Kind::NoAnswer | Kind::OtherVersion => 6,
            Kind::Refused => 7,
            Kind::Above => 8,
            Kind::Undecided => 9,
        }
    }
}

#[derive(Debug)]
struct Failure {
    kind: Kind,
    text: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Failure {}

#[derive(Debug)]
pub(crate) struct Unreachable {
    /// The sockets that were tried, in order, each with the reason why it failed.
    pub tried: Vec<(std::path::PathBuf, String)>,
}

impl std::fmt::Display for Unreachable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no daemon answers; looked at:")?;
        for (path, why) in &self.tried {
            write!(f, "\n  {}: {why}", path.display())?;
        }
        f.write_str(
            "\nstart one (gpumemctl run -- COMMAND starts a private one; systemctl start gpumemd the system's), \
             or name its socket: --socket",
        )
    }
}

impl std::error::Error for Unreachable {}

/// Returns the exit code of an error: that of the first cause that has one.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(known).unwrap_or(Kind::Other).code()
}

/// Returns the kind of a cause; `None` if the next cause decides.
fn known(cause: &(dyn std::error::Error + 'static)) -> Option<Kind> {
    use std::io::ErrorKind;
    let missing =
        |source: &std::io::Error| matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
    if let Some(failure) = cause.downcast_ref::<Failure>() {
        return Some(failure.kind);
    }
    if let Some(error) = cause.downcast_ref::<input::Error>() {
        return Some(match error {
            input::Error::Open { source, .. } if missing(source) => Kind::NotFound,
            input::Error::Open { .. } | input::Error::Read { .. } => Kind::Other,
            _ => Kind::BadInput,
        });
    }
    if let Some(error) = cause.downcast_ref::<StoreError>() {
        return Some(match error {
            StoreError::NotFound { .. } | StoreError::UnknownRun { .. } => Kind::NotFound,
            _ => Kind::Store,
        });
    }
    if let Some(error) = cause.downcast_ref::<rules::Error>() {
        return Some(match error {
            rules::Error::Open { source, .. } if missing(source) => Kind::NotFound,
            rules::Error::Open { source, .. } if source.kind() == ErrorKind::PermissionDenied => Kind::Other,
            _ => Kind::BadInput,
        });
    }
    cause.is::<Unreachable>().then_some(Kind::NoAnswer)
}
