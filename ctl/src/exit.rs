//! Exit codes, and which error is which.

use gpumem_runs::input;
use gpumem_runs::rules;
use gpumem_runs::store::StoreError;

/// Done.
pub const OK: u8 = 0;
/// Anything without a number of its own.
pub const FAILURE: u8 = 1;
/// The command line is wrong.
pub const USAGE: u8 = 2;
/// There is no such file, run or process.
pub const NOT_FOUND: u8 = 3;
/// The file is there, and is not what it should be.
pub const BAD_INPUT: u8 = 4;
/// The run store cannot be read or written.
pub const STORE: u8 = 5;

/// Shown by --help.
pub const HELP: &str = "Exit codes: 0 done, 1 failure, 2 wrong command line, 3 no such file or run, \
4 input is not what it should be, 5 run store cannot be read or written";

/// Nobody said where runs are kept.
#[derive(Debug)]
pub struct NoStore;

impl std::fmt::Display for NoStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no run store: neither HOME nor XDG_STATE_HOME is set; give --store FILE")
    }
}

impl std::error::Error for NoStore {}

/// A file of the right kind in which no process speaks.
#[derive(Debug)]
pub struct NoProcess(pub std::path::PathBuf);

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
pub struct NotFound(pub String);

impl std::fmt::Display for NotFound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotFound {}

/// The code of an error: that of the first cause that has one.
pub fn code(error: &anyhow::Error) -> u8 {
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
    let is = [
        (cause.is::<NotFound>(), NOT_FOUND),
        (cause.is::<NoProcess>(), BAD_INPUT),
        (cause.is::<NoStore>(), STORE),
    ];
    is.into_iter().find_map(|(is, code)| is.then_some(code))
}
