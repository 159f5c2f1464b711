//! Errors of a run store, and ids: of its runs, and of its file format.

use rusqlite::ErrorCode;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// `gpmd`: SQLite's application id, which identifies the program that a file belongs to.
pub(super) const APPLICATION_ID: i64 = 0x6770_6d64;

pub(super) type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Id of a run in one store. It is never used again, even after the run is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(pub i64);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a run: runs are named r1, r2, ...; gpumemctl runs lists them")]
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

/// Why a request to the store failed. A write that failed has changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file does not exist; opening for reading does not create it.
    #[error(
        "{path}: there is no run store yet: gpumemctl run -- COMMAND makes one, and so do the daemon and gpumemctl import"
    )]
    NotFound { path: PathBuf },
    /// The file is not a run store; it was not changed.
    #[error(
        "{path}: not a run store: found {found}, expected an SQLite file with application id {APPLICATION_ID:#x}"
    )]
    NotAStore { path: PathBuf, found: String },
    /// The store was written by a newer version of the program; it was not changed.
    #[error(
        "{path}: the store has schema version {found}, this program knows up to {supported}: use the newer program"
    )]
    NewerVersion { path: PathBuf, found: i64, supported: i64 },
    /// The store has an older schema; only a writer migrates it.
    #[error(
        "{path}: schema version {found}, this program reads {supported}: gpumemd brings it up to date when it starts"
    )]
    OlderVersion { path: PathBuf, found: i64, supported: i64 },
    /// SQLite's write-ahead log (`-wal`) has data that cannot be read without write access to the directory.
    #[error(
        "{path}: its -wal file holds data that cannot be read without write access to the directory: \
         ask the daemon, or copy the store together with its -wal file elsewhere"
    )]
    UnmergedLog { path: PathBuf },
    #[error(
        "{path}: there is no run {id}: it was never stored here, or was deleted for room; gpumemctl runs lists the runs"
    )]
    UnknownRun { path: PathBuf, id: RunId },
    /// [`Store::begin`](super::Store::begin) was called with a uid that is already stored.
    #[error("{path}: a run with uid {uid:?} is stored already, as {id}: gpumemctl report {id} shows it")]
    KnownUid { path: PathBuf, uid: String, id: RunId },
    /// The run contradicts itself and was not stored.
    #[error("{path}: this run cannot be stored: {what}")]
    InvalidRun { path: PathBuf, what: String },
    #[error("{path}: the store is damaged: {what}; move it away, and a new one is created")]
    Damaged { path: PathBuf, what: String },
    /// The file system reported an I/O error. It may be temporary, or the file is unreadable.
    #[error("{path}: the file system failed: {source}; check the disk and the permissions of the folder")]
    Unreadable { path: PathBuf, source: rusqlite::Error },
    /// The disk is full or the size limit is reached. The store works again once there is space, without being reopened.
    #[error(
        "{path}: no room for the run: the disk is full or the store's size limit (runs.max_size_mib of the daemon) is reached"
    )]
    DiskFull { path: PathBuf },
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path}: {source}")]
    Sqlite { path: PathBuf, source: rusqlite::Error },
}

impl StoreError {
    pub(super) fn io(path: &Path, source: std::io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            std::io::ErrorKind::StorageFull => StoreError::DiskFull { path },
            _ => StoreError::Io { path, source },
        }
    }

    pub(super) fn not_a_store(path: &Path, found: impl Into<String>) -> Self {
        StoreError::NotAStore { path: path.to_owned(), found: found.into() }
    }

    /// Maps an SQLite error to its meaning for a store.
    pub(super) fn sqlite(path: &Path, source: rusqlite::Error) -> Self {
        use rusqlite::Error as E;
        let path = path.to_owned();
        match &source {
            E::SqliteFailure(failure, _) => match failure.code {
                ErrorCode::DiskFull => StoreError::DiskFull { path },
                ErrorCode::NotADatabase => StoreError::not_a_store(&path, "not an SQLite file"),
                ErrorCode::DatabaseCorrupt => StoreError::Damaged { path, what: source.to_string() },
                ErrorCode::SystemIoFailure
                    if failure.extended_code == rusqlite::ffi::SQLITE_IOERR_SHORT_READ =>
                {
                    StoreError::Damaged { path, what: "the file is shorter than its header states".into() }
                }
                ErrorCode::SystemIoFailure => StoreError::Unreadable { path, source },
                _ => StoreError::Sqlite { path, source },
            },
            // Columns with values that this program never writes.
            E::FromSqlConversionFailure(..)
            | E::IntegralValueOutOfRange(..)
            | E::InvalidColumnType(..)
            | E::Utf8Error(..) => StoreError::Damaged { path, what: source.to_string() },
            _ => StoreError::Sqlite { path, source },
        }
    }
}
