//! What can go wrong with a store, each with the file it happened to; and what messages name: ids of runs and of the file's kind.

use rusqlite::ErrorCode;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// `gpmd`: SQLite's field for which program a file belongs to.
pub(super) const APPLICATION_ID: i64 = 0x6770_6d64;

pub(super) type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Names a run of one store. Never used again for another, even when the run is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(pub i64);

/// A text that names no run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a run: runs are named r1, r2, ...")]
pub struct ParseRunIdError(String);

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}", self.0)
    }
}

impl FromStr for RunId {
    type Err = ParseRunIdError;

    fn from_str(text: &str) -> Result<Self, ParseRunIdError> {
        let digits = text.strip_prefix('r').filter(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()));
        let id = digits.and_then(|digits| digits.parse().ok()).filter(|&id| id > 0);
        id.map(RunId).ok_or_else(|| ParseRunIdError(text.to_owned()))
    }
}

/// Why the store did not do what was asked. A write that failed has changed nothing.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the messages name
pub enum StoreError {
    /// There is no file, and opening for reading never makes one.
    #[error("{}: there is no run store yet: gpumemctl run -- COMMAND makes one, and so do the daemon and gpumemctl import", path.display())]
    NotFound { path: PathBuf },
    /// The file is something else; it was not touched.
    #[error(
        "{}: not a run store: found {found}, expected an SQLite file with application id {APPLICATION_ID:#x}",
        path.display()
    )]
    NotAStore { path: PathBuf, found: String },
    /// A later version of the program wrote it; it was not touched.
    #[error(
        "{}: the store has schema version {found}, this program knows up to {supported}: use the newer program",
        path.display()
    )]
    NewerVersion { path: PathBuf, found: i64, supported: i64 },
    /// The file has an older schema, and only a writer changes that.
    #[error(
        "{}: schema version {found}, this program reads {supported}: gpumemd brings it up to date when it starts",
        path.display()
    )]
    OlderVersion { path: PathBuf, found: i64, supported: i64 },
    /// Its write-ahead log holds checkpoints that cannot be read from here.
    #[error(
        "{}: its -wal file holds data that cannot be read without write access to the directory: \
         ask the daemon, or copy the store together with its -wal file elsewhere",
        path.display()
    )]
    UnmergedLog { path: PathBuf },
    /// No run has that id.
    #[error("{}: there is no run {id}", path.display())]
    UnknownRun { path: PathBuf, id: RunId },
    /// [`Store::begin`](super::Store::begin) of a uid that is stored already.
    #[error("{}: a run with uid {uid:?} is stored already, as {id}", path.display())]
    KnownUid { path: PathBuf, uid: String, id: RunId },
    /// The run breaks its own rules; nothing of it was stored.
    #[error("{}: this run cannot be stored: {what}", path.display())]
    InvalidRun { path: PathBuf, what: String },
    /// The file's content contradicts itself.
    #[error("{}: the store is damaged: {what}; move it away and a new one is made", path.display())]
    Damaged { path: PathBuf, what: String },
    /// The file system failed below SQLite. It may be a hiccup, or the file.
    #[error("{}: the file system failed: {source}", path.display())]
    Unreadable { path: PathBuf, source: rusqlite::Error },
    /// No room. The store works again as soon as there is room; it need not be reopened.
    #[error("{}: no room for the run: the disk is full or the store's size limit is reached", path.display())]
    DiskFull { path: PathBuf },
    /// The file system said no.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// Anything else that SQLite reports.
    #[error("{}: {source}", path.display())]
    Sqlite { path: PathBuf, source: rusqlite::Error },
}

impl StoreError {
    pub(super) fn io(path: &Path, source: std::io::Error) -> Self {
        StoreError::Io { path: path.to_owned(), source }
    }

    pub(super) fn not_a_store(path: &Path, found: impl Into<String>) -> Self {
        StoreError::NotAStore { path: path.to_owned(), found: found.into() }
    }

    /// SQLite's error by what it means for a store.
    pub(super) fn sqlite(path: &Path, source: rusqlite::Error) -> Self {
        use rusqlite::Error as E;
        let path = path.to_owned();
        match &source {
            E::SqliteFailure(failure, _) => match failure.code {
                ErrorCode::DiskFull => StoreError::DiskFull { path },
                ErrorCode::NotADatabase => StoreError::not_a_store(&path, "a file that is not SQLite's"),
                ErrorCode::DatabaseCorrupt => StoreError::Damaged { path, what: source.to_string() },
                ErrorCode::SystemIoFailure
                    if failure.extended_code == rusqlite::ffi::SQLITE_IOERR_SHORT_READ =>
                {
                    StoreError::Damaged { path, what: "the file is shorter than it says".into() }
                }
                ErrorCode::SystemIoFailure => StoreError::Unreadable { path, source },
                _ => StoreError::Sqlite { path, source },
            },
            // Rows that this program did not write like that.
            E::FromSqlConversionFailure(..)
            | E::IntegralValueOutOfRange(..)
            | E::InvalidColumnType(..)
            | E::Utf8Error(..) => StoreError::Damaged { path, what: source.to_string() },
            _ => StoreError::Sqlite { path, source },
        }
    }
}
