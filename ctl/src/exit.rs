//! Exit codes, and the mapping of errors to them.

use gpumem_report::rules;
use gpumem_runs::input;
use gpumem_runs::store::StoreError;

/// Success.
pub(crate) const OK: u8 = 0;
/// Failure without its own code.
pub(crate) const FAILURE: u8 = 1;
/// Wrong command line.
pub(crate) const USAGE: u8 = 2;
/// File, run or process not found.
pub(crate) const NOT_FOUND: u8 = 3;
/// The input has the wrong format or is damaged.
pub(crate) const BAD_INPUT: u8 = 4;
/// The run store cannot be read or written.
pub(crate) const STORE: u8 = 5;

/// No daemon answers, or its version differs.
pub(crate) const DAEMON: u8 = 6;
/// The daemon refused the request.
pub(crate) const REFUSED: u8 = 7;

/// `diff --fail-above`: B exceeds A by more than the limit.
pub(crate) const ABOVE: u8 = 8;
/// `diff --fail-above`: the known values do not suffice for a decision.
pub(crate) const UNJUDGED: u8 = 9;

/// `doctor`: at least one check failed.
pub(crate) const SICK: u8 = 10;

/// `run`: gpumemctl itself failed. The codes of `run` are those of env(1), timeout(1) and nohup(1).
pub(crate) const RUN_OWN: u8 = 125;
/// `run`: the command exists but cannot be executed.
pub(crate) const RUN_CANNOT_EXECUTE: u8 = 126;
/// `run`: the command was not found.
pub(crate) const RUN_NOT_FOUND: u8 = 127;
/// `run`: added to the number of the signal that ended the command.
pub(crate) const RUN_SIGNAL: u8 = 128;

/// Exit codes in --help.
pub(crate) const HELP: &str = "Exit codes: 0 done, 1 failure, 2 wrong command line, 3 no such file, run or process, \
4 invalid input, 5 run store cannot be read or written, 6 no daemon answers, 7 the daemon refuses";
/// Exit codes in `doctor --help`.
pub(crate) const DOCTOR_HELP: &str = "Exit codes: 0 no problem, 10 problems were found; 1 failure, 2 wrong command line, 3 no such process. \
Meaning of each line: docs/troubleshooting.md";
/// Exit codes in `diff --help`.
pub(crate) const DIFF_HELP: &str = "Exit codes: 0 done, and within the limit; 8 B exceeds A by more than --fail-above allows, \
9 undecided for lack of data; 1 failure, 2 wrong command line, 3 no such file, run, process or category, 4 invalid \
input, 5 run store cannot be read, 6 no daemon answers, 7 the daemon refuses";
/// Exit codes in `run --help`.
pub(crate) const RUN_HELP: &str = "Exit codes: that of the command, 128+N if signal N ended it; 125 failure of \
gpumemctl, 126 the command cannot be executed, 127 the command was not found";

/// No path of the run store is known.
#[derive(Debug)]
pub(crate) struct NoStore;

impl std::fmt::Display for NoStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no run store: neither HOME nor XDG_STATE_HOME is set; give --store FILE")
    }
}

impl std::error::Error for NoStore {}

/// A file of the right format that contains no process.
#[derive(Debug)]
pub(crate) struct NoProcess(pub std::path::PathBuf);

impl std::fmt::Display for NoProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: no process speaks in it; a recording of an agent or a daemon has at least one",
            self.0.display()
        )
    }
}

impl std::error::Error for NoProcess {}

/// Something that was requested does not exist.
#[derive(Debug)]
pub(crate) struct NotFound(pub String);

impl std::fmt::Display for NotFound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotFound {}

/// Arguments that contradict each other.
#[derive(Debug)]
pub(crate) struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// No daemon could be reached.
#[derive(Debug)]
pub(crate) struct Unreachable {
    /// The sockets that were tried, in order, each with the reason of failure.
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

/// A daemon was found but does not answer.
#[derive(Debug)]
pub(crate) struct NoAnswer(pub String);

impl std::fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoAnswer {}

/// The daemon has another version.
#[derive(Debug)]
pub(crate) struct TooOld(pub String);

impl std::fmt::Display for TooOld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TooOld {}

/// The daemon refused a request.
#[derive(Debug)]
pub(crate) struct Refused(pub String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// `diff --fail-above` failed: the limit is exceeded, or the comparison is undecided.
#[derive(Debug)]
pub(crate) struct Gate {
    /// The limit is exceeded.
    pub is_above: bool,
    /// The judgement as a sentence.
    pub text: String,
}

impl std::fmt::Display for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Gate {}

/// Returns the exit code of an error: that of the first cause that has one.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(known).unwrap_or(FAILURE)
}

fn known(cause: &(dyn std::error::Error + 'static)) -> Option<u8> {
    use std::io::ErrorKind;
    let missing =
        |source: &std::io::Error| matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
    if let Some(error) = cause.downcast_ref::<input::Error>() {
        return Some(match error {
            input::Error::Open { source, .. } if missing(source) => NOT_FOUND,
            input::Error::Open { .. } | input::Error::Read { .. } => FAILURE,
            _ => BAD_INPUT,
        });
    }
    if let Some(error) = cause.downcast_ref::<StoreError>() {
        return Some(match error {
            StoreError::NotFound { .. } | StoreError::UnknownRun { .. } => NOT_FOUND,
            _ => STORE,
        });
    }
    if let Some(error) = cause.downcast_ref::<rules::Error>() {
        return Some(match error {
            rules::Error::Open { source, .. } if missing(source) => NOT_FOUND,
            rules::Error::Open { source, .. } if source.kind() == ErrorKind::PermissionDenied => FAILURE,
            _ => BAD_INPUT,
        });
    }
    if let Some(gate) = cause.downcast_ref::<Gate>() {
        return Some(if gate.is_above { ABOVE } else { UNJUDGED });
    }
    let is = [
        (cause.is::<NotFound>(), NOT_FOUND),
        (cause.is::<Usage>(), USAGE),
        (cause.is::<NoProcess>(), BAD_INPUT),
        (cause.is::<NoStore>(), STORE),
        (cause.is::<Unreachable>() || cause.is::<NoAnswer>() || cause.is::<TooOld>(), DAEMON),
        (cause.is::<Refused>(), REFUSED),
    ];
    is.into_iter().find_map(|(is, code)| is.then_some(code))
}
