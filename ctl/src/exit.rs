//! Exit codes, and which error is which.

use gpumem_report::rules;
use gpumem_runs::input;
use gpumem_runs::store::StoreError;

/// Done.
pub(crate) const OK: u8 = 0;
/// Anything without a number of its own.
pub(crate) const FAILURE: u8 = 1;
/// The command line is wrong.
pub(crate) const USAGE: u8 = 2;
/// There is no such file, run or process.
pub(crate) const NOT_FOUND: u8 = 3;
/// The file is there, and is not what it should be.
pub(crate) const BAD_INPUT: u8 = 4;
/// The run store cannot be read or written.
pub(crate) const STORE: u8 = 5;

/// No daemon answers, or one of another version.
pub(crate) const DAEMON: u8 = 6;
/// The daemon does not allow it.
pub(crate) const REFUSED: u8 = 7;

/// Of `diff --fail-above`: B exceeds A by more than it may.
pub(crate) const ABOVE: u8 = 8;
/// Of `diff --fail-above`: what is known does not tell.
pub(crate) const UNJUDGED: u8 = 9;

/// Of `doctor`: something is bad.
pub(crate) const SICK: u8 = 10;

/// Of `run`: what it should do for the command it could not do. As env(1), timeout(1) and nohup(1) have it.
pub(crate) const RUN_OWN: u8 = 125;
/// Of `run`: the command is there and cannot be executed.
pub(crate) const RUN_CANNOT_EXECUTE: u8 = 126;
/// Of `run`: there is no such command.
pub(crate) const RUN_NOT_FOUND: u8 = 127;
/// Of `run`: the command was ended by a signal; its number is added.
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

/// Nobody said where runs are kept.
#[derive(Debug)]
pub(crate) struct NoStore;

impl std::fmt::Display for NoStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no run store: neither HOME nor XDG_STATE_HOME is set; give --store FILE")
    }
}

impl std::error::Error for NoStore {}

/// A file of the right kind in which no process speaks.
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

/// Something that does not exist.
#[derive(Debug)]
pub(crate) struct NotFound(pub String);

impl std::fmt::Display for NotFound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotFound {}

/// Words that mean nothing together.
#[derive(Debug)]
pub(crate) struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// No daemon could be asked.
#[derive(Debug)]
pub(crate) struct Unreachable {
    /// Sockets, in the order in which they were looked at, and what was there.
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

/// A daemon that was found and says nothing.
#[derive(Debug)]
pub(crate) struct NoAnswer(pub String);

impl std::fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoAnswer {}

/// A daemon of another version.
#[derive(Debug)]
pub(crate) struct TooOld(pub String);

impl std::fmt::Display for TooOld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TooOld {}

/// What the daemon does not allow.
#[derive(Debug)]
pub(crate) struct Refused(pub String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// A limit of `diff --fail-above` that does not hold, or of which nobody knows whether it does.
#[derive(Debug)]
pub(crate) struct Gate {
    /// It does not hold.
    pub is_above: bool,
    /// What, and by how much.
    pub text: String,
}

impl std::fmt::Display for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Gate {}

/// The code of an error: that of the first cause that has one.
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
