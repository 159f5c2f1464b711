//! Opens a store file, for the writer and for readers.

use super::delta_log;
use super::error::{Result, StoreError};
use super::schema::{self, Found};
use rusqlite::{Connection, ErrorCode, OpenFlags};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{DirBuilder, Metadata, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Timeout of a statement that waits for another process's lock. Readers never block a writer, but a second writer or a backup
/// tool may.
const BUSY: Duration = Duration::from_secs(5);

/// Size to which the write-ahead log is truncated after a merge; otherwise it would keep its largest size.
const LOG_BYTES: i64 = 4 << 20;

/// Capacity of the statement cache: more than all statements of this module, so that none is prepared twice.
const STATEMENTS: usize = 48;

pub(super) fn writable(path: &Path) -> Result<Connection> {
    make(path)?;
    let db = connect(path, &absolute(path)?, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    let error = |error| StoreError::sqlite(path, error);
    // Before any setting is changed: a file of another program must stay unchanged.
    if recognise(&db, path)? == Found::Fresh {
        // Only effective before the first page is written, which the switch to WAL does.
        db.pragma_update(None, "auto_vacuum", "INCREMENTAL").map_err(error)?;
    }
    use_log(&db).map_err(error)?;
    db.pragma_update(None, "synchronous", "NORMAL").map_err(error)?;
    db.pragma_update_and_check(None, "journal_size_limit", LOG_BYTES, |_| Ok(())).map_err(error)?;
    schema::migrate(&db, path)?;
    Ok(db)
}

/// Switches a new file to WAL; no effect if it already uses WAL. A file system without shared memory refuses WAL; the journal
/// mode then stays as it was, which is slower but correct.
fn use_log(db: &Connection) -> rusqlite::Result<()> {
    let started = Instant::now();
    loop {
        // The switch needs exclusive access, and SQLite's busy timeout does not apply to it: if another process opens the same
        // new file, it fails at once.
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
fn make(path: &Path) -> Result<()> {
    planted(path)?;
    if let Ok(found) = path.metadata() {
        regular(path, &found)?;
    }
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.map_err(|error| StoreError::io(parent, error))?;
    }
    // Opens only a new file. Closing a descriptor of a file that this process has open elsewhere would release that
    // descriptor's locks.
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(StoreError::io(path, error)),
        _ => Ok(()),
    }
}

/// Rejects planted files in a directory that others may write to. A link, another user's file or a file with several names may
/// be an attempt to redirect our writes. The side files are checked too, because SQLite follows links to them.
fn planted(path: &Path) -> Result<()> {
    let place = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !place.metadata().is_ok_and(|place| place.mode() & 0o002 != 0) {
        return Ok(());
    }
    let user = Path::new("/proc/self").metadata().map(|own| own.uid()).ok();
    for suffix in ["", "-wal", "-shm", "-journal", delta_log::SUFFIX] {
        let file = side_file(path, suffix);
        let Ok(found) = file.symlink_metadata() else { continue };
        // Other kinds of file at the main path are rejected later, with a separate message.
        if suffix.is_empty() && !found.is_file() && !found.is_symlink() {
            continue;
        }
        if !found.is_file() || found.nlink() != 1 || Some(found.uid()) != user {
            let what = "a link or somebody else's, in a directory that others may write to";
            return Err(StoreError::not_a_store(&file, what));
        }
    }
    Ok(())
}

/// Rejects directories and special files. A directory gets a clear message; a pipe would block SQLite forever.
fn regular(path: &Path, found: &Metadata) -> Result<()> {
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
            regular(path, &found)?;
            if found.len() == 0 {
                return Err(StoreError::not_a_store(path, "an empty file"));
            }
        }
    }
    let name = absolute(path)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
    let opened = connect(path, &name, flags).and_then(|db| recognised(db, path));
    match opened {
        // A WAL file is read through side files. After a clean close there are none, and a reader who may not create them
        // gets an error, although the main file then holds all data.
        Err(StoreError::Sqlite { source, .. }) if wants_to_write(&source) => {
            let log = side_file(path, "-wal");
            if log.metadata().is_ok_and(|log| log.is_file() && log.len() > 0) {
                return Err(StoreError::UnmergedLog { path: path.to_owned() });
            }
            let uri = immutable(&name);
            recognised(connect(path, Path::new(&uri), flags | OpenFlags::SQLITE_OPEN_URI)?, path)
        }
        opened => opened,
    }
}

fn recognised(db: Connection, path: &Path) -> Result<Connection> {
    match recognise(&db, path)? {
        Found::Version(schema::VERSION) => Ok(db),
        Found::Version(found) => {
            Err(StoreError::OlderVersion { path: path.to_owned(), found, supported: schema::VERSION })
        }
        // A writer died while it created the file; the next writer completes it.
        Found::Fresh => Err(StoreError::NotFound { path: path.to_owned() }),
    }
}

fn recognise(db: &Connection, path: &Path) -> Result<Found> {
    let transaction = db.unchecked_transaction().map_err(|error| StoreError::sqlite(path, error))?;
    schema::recognise(&transaction, path)
}

fn wants_to_write(error: &rusqlite::Error) -> bool {
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

/// Returns the absolute path. SQLite is built to treat names that begin with `file:` as URIs, which an absolute path does not.
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

/// Returns the path of a file with this suffix in the store's folder.
pub(super) fn side_file(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}
