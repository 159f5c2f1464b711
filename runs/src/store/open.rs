//! Opens a store file, for the writer and for readers.

use super::delta_log;
use super::error::{Result, StoreError};
use super::schema::{self, FileState};
use rusqlite::{Connection, ErrorCode, OpenFlags};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{DirBuilder, Metadata, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Timeout of a statement that waits for a lock of another process: a second writer or a backup tool. Readers never block a
/// writer.
const BUSY: Duration = Duration::from_secs(5);

/// Size to which SQLite truncates its write-ahead log (WAL) after a merge. Without a limit, the log would keep its largest size.
const WAL_BYTES: i64 = 4 << 20;

/// Capacity of the cache of prepared statements: more than the store has, so that none is prepared twice.
const STATEMENTS: usize = 48;

/// Opens a store for reading and writing, and brings its schema up to date.
pub(super) fn writable(path: &Path) -> Result<Connection> {
    create(path)?;
    let db = connect(path, &absolute(path)?, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    let error = |error| StoreError::sqlite(path, error);
    // This check precedes all settings, because a file of another program must stay unchanged.
    if recognise(&db, path)? == FileState::Fresh {
        // This setting only has an effect before the first page is written. The switch to WAL writes it.
        db.pragma_update(None, "auto_vacuum", "INCREMENTAL").map_err(error)?;
    }
    use_wal(&db).map_err(error)?;
    db.pragma_update(None, "synchronous", "NORMAL").map_err(error)?;
    db.pragma_update_and_check(None, "journal_size_limit", WAL_BYTES, |_| Ok(())).map_err(error)?;
    schema::migrate(&db, path)?;
    Ok(db)
}

/// Switches a new file to SQLite's write-ahead log (WAL). On a file system without shared memory, the switch has no effect: the
/// store is then slower but correct.
fn use_wal(db: &Connection) -> rusqlite::Result<()> {
    let started = Instant::now();
    loop {
        // The switch fails at once if another process opens the same new file: SQLite's busy timeout does not apply to it.
        match db.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())) {
            Err(error)
                if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) && started.elapsed() < BUSY =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            done => return done,
        }
    }
}

/// Creates directory and file with restricted permissions. SQLite gives its side files the permissions of the main file.
fn create(path: &Path) -> Result<()> {
    reject_planted_files(path)?;
    if let Ok(found) = path.metadata() {
        require_regular_file(path, &found)?;
    }
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.map_err(|error| StoreError::io(parent, error))?;
    }
    // `create_new` opens no existing file. If this process has the store open already, closing a second descriptor would release
    // SQLite's locks on it.
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(StoreError::io(path, error)),
        _ => Ok(()),
    }
}

/// In a directory that all users may write to, rejects links, files of other users, and files with several names: they may be an
/// attempt to redirect the store's writes. SQLite follows links of its side files too, so these are checked as well.
fn reject_planted_files(path: &Path) -> Result<()> {
    let place = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !place.metadata().is_ok_and(|place| place.mode() & 0o002 != 0) {
        return Ok(());
    }
    let user = Path::new("/proc/self").metadata().map(|own| own.uid()).ok();
    for suffix in ["", "-wal", "-shm", "-journal", delta_log::SUFFIX] {
        let file = side_file(path, suffix);
        let Ok(found) = file.symlink_metadata() else { continue };
        // A directory or special file at the store's path is rejected later, with a message of its own.
        if suffix.is_empty() && !found.is_file() && !found.is_symlink() {
            continue;
        }
        if !found.is_file() || found.nlink() != 1 || Some(found.uid()) != user {
            let what = "a link or another user's file, in a directory that others may write to";
            return Err(StoreError::not_a_store(&file, what));
        }
    }
    Ok(())
}

/// Rejects directories and special files. SQLite would give no clear message for a directory, and block forever on a pipe.
fn require_regular_file(path: &Path, found: &Metadata) -> Result<()> {
    match found.file_type() {
        kind if kind.is_file() => Ok(()),
        kind if kind.is_dir() => Err(StoreError::not_a_store(path, "a directory")),
        _ => Err(StoreError::not_a_store(path, "neither a file nor a directory")),
    }
}

pub(super) fn read_only(path: &Path) -> Result<Connection> {
    match path.metadata() {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Err(StoreError::NotFound { path: path.to_owned() });
        }
        Err(error) => return Err(StoreError::io(path, error)),
        Ok(found) => {
            require_regular_file(path, &found)?;
            if found.len() == 0 {
                return Err(StoreError::not_a_store(path, "an empty file"));
            }
        }
    }
    let name = absolute(path)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
    let opened = connect(path, &name, flags).and_then(|db| require_version(db, path));
    match opened {
        // SQLite reads a store with WAL through side files. After a clean close there are none, and SQLite fails if it may not
        // create them. The store's file then has all data, so it is read as a file that does not change.
        Err(StoreError::Sqlite { source, .. }) if needs_write_access(&source) => {
            let wal = side_file(path, "-wal");
            if wal.metadata().is_ok_and(|wal| wal.is_file() && wal.len() > 0) {
                return Err(StoreError::UnmergedLog { path: path.to_owned() });
            }
            let uri = immutable(&name);
            require_version(connect(path, Path::new(&uri), flags | OpenFlags::SQLITE_OPEN_URI)?, path)
        }
        opened => opened,
    }
}

fn require_version(db: Connection, path: &Path) -> Result<Connection> {
    match recognise(&db, path)? {
        FileState::Version(schema::VERSION) => Ok(db),
        FileState::Version(found) => {
            Err(StoreError::OlderVersion { path: path.to_owned(), found, supported: schema::VERSION })
        }
        // A writer ended while it created the store; the next writer completes it.
        FileState::Fresh => Err(StoreError::NotFound { path: path.to_owned() }),
    }
}

fn recognise(db: &Connection, path: &Path) -> Result<FileState> {
    let transaction = db.unchecked_transaction().map_err(|error| StoreError::sqlite(path, error))?;
    schema::recognise(&transaction, path)
}

fn needs_write_access(error: &rusqlite::Error) -> bool {
    let code = error.sqlite_error_code();
    matches!(code, Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied))
}

/// Opens `name`, which refers to `path`.
fn connect(path: &Path, name: &Path, flags: OpenFlags) -> Result<Connection> {
    let open = || {
        let db = Connection::open_with_flags(name, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
        db.busy_timeout(BUSY)?;
        db.pragma_update(None, "foreign_keys", true)?;
        db.set_prepared_statement_cache_capacity(STATEMENTS);
        Ok(db)
    };
    open().map_err(|error| StoreError::sqlite(path, error))
}

/// Returns the absolute path. SQLite takes a name that begins with `file:` for a URI, which an absolute path is not.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| StoreError::io(path, error))
}

/// Returns a URI with `immutable=1`: SQLite assumes that no process writes the file, and takes no locks.
fn immutable(path: &Path) -> String {
    let mut uri = String::from("file://");
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b'/' | b'-' | b'_' | b'.' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => uri.push(byte.into()),
            _ => write!(uri, "%{byte:02x}").unwrap_or_default(),
        }
    }
    uri.push_str("?immutable=1");
    uri
}

pub(super) fn side_file(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}
