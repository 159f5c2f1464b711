//! Files that are not stores, unreadable, incomplete, or too large.

use super::support::{TempDir, assert_consistent, refused, run_at, scatter};
use gpumem_model::run::{Run, State};
use gpumem_runs::store::{Store, StoreError, VERSION};
use gpumem_test_support::SharedCopy;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const CHILD: &str = "GPUMEM_TEST_STORE_READER";

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// A store with one finished run, closed.
fn finished(dir: &TempDir) -> Run {
    let run = Run { state: State::Interrupted, ..run_at(60) };
    Store::open(dir.store()).unwrap().insert(&run, "a").unwrap();
    run
}

#[test]
fn a_new_store_is_private_and_says_what_it_is() {
    let dir = TempDir::new();
    let path = dir.path().join("state/gpumemd/runs.db");
    let mut store = Store::open(&path).unwrap();
    store.insert(&run_at(1), "a").unwrap();
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(&path.with_extension("db-wal")), 0o600);
    let db = rusqlite::Connection::open(&path).unwrap();
    let pragma = |name| db.pragma_query_value(None, name, |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(pragma("application_id"), 0x6770_6d64);
    assert_eq!(pragma("user_version"), VERSION);
    assert_eq!(pragma("auto_vacuum"), 2, "incremental");
    let journal: String = db.pragma_query_value(None, "journal_mode", |row| row.get(0)).unwrap();
    assert_eq!(journal, "wal");
}

/// `.cargo/config.toml` leaves out the parts of SQLite that the store does not use.
#[test]
fn sqlite_has_only_what_the_store_uses() {
    let db = rusqlite::Connection::open_in_memory().unwrap();
    let mut statement = db.prepare("PRAGMA compile_options").unwrap();
    let options: Vec<String> =
        statement.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap();
    for unused in ["ENABLE_FTS3", "ENABLE_FTS5", "ENABLE_RTREE", "ENABLE_DBSTAT_VTAB", "SOUNDEX"] {
        assert!(!options.iter().any(|option| option.starts_with(unused)), "{unused}: {options:?}");
    }
    assert!(options.iter().any(|option| option == "OMIT_LOAD_EXTENSION"), "{options:?}");
    assert!(options.iter().any(|option| option == "THREADSAFE=1"), "{options:?}");
}

#[test]
fn nothing_is_made_by_reading() {
    let dir = TempDir::new();
    for path in [dir.store(), dir.path().join("no/such/runs.db")] {
        let error = refused(Store::open_read_only(&path));
        assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
        assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn what_is_not_a_store_is_refused_and_left_alone() {
    let dir = TempDir::new();
    let text = dir.path().join("text.db");
    fs::write(&text, "a text that is longer than the header of an SQLite file, ".repeat(20)).unwrap();
    let short = dir.path().join("short.db");
    fs::write(&short, "short").unwrap();
    let other = dir.path().join("other.db");
    rusqlite::Connection::open(&other).unwrap().execute_batch("CREATE TABLE theirs (a)").unwrap();
    let owned = dir.path().join("owned.db");
    rusqlite::Connection::open(&owned).unwrap().execute_batch("PRAGMA application_id = 77").unwrap();
    for (path, found) in [
        (&text, "not an SQLite file"),
        (&short, "not an SQLite file"),
        (&other, "an SQLite file with application id 0x0 and 1 tables"),
        (&owned, "an SQLite file with application id 0x4d and 0 tables"),
    ] {
        let before = fs::read(path).unwrap();
        for error in [refused(Store::open(path)), refused(Store::open_read_only(path))] {
            assert!(matches!(error, StoreError::NotAStore { .. }), "{error:?}");
            assert!(error.to_string().contains(found), "{error}");
        }
        assert!(fs::read(path).unwrap() == before);
    }
    for error in [refused(Store::open(dir.path())), refused(Store::open_read_only(dir.path()))] {
        assert!(error.to_string().contains("found a directory"), "{error}");
    }
    let error = refused(Store::open("/dev/null"));
    assert!(error.to_string().contains("neither a file nor a directory"), "{error}");
}

#[test]
fn an_empty_file_is_a_store_to_be_for_a_writer_only() {
    let dir = TempDir::new();
    fs::write(dir.store(), "").unwrap();
    let error = refused(Store::open_read_only(dir.store()));
    assert!(error.to_string().contains("found an empty file"), "{error}");
    // The state after a writer died between creating the file and its tables.
    Store::open(dir.store()).unwrap().insert(&run_at(1), "a").unwrap();
}

#[test]
fn a_newer_store_is_refused() {
    let dir = TempDir::new();
    finished(&dir);
    let db = rusqlite::Connection::open(dir.store()).unwrap();
    db.pragma_update(None, "user_version", VERSION + 1).unwrap();
    drop(db);
    for error in [refused(Store::open(dir.store())), refused(Store::open_read_only(dir.store()))] {
        let StoreError::NewerVersion { found, supported, .. } = error else { panic!("{error:?}") };
        assert_eq!((found, supported), (VERSION + 1, VERSION));
    }
}

#[test]
fn places_where_nothing_can_be_made() {
    let dir = TempDir::new();
    fs::write(dir.path().join("file"), "").unwrap();
    // /proc refuses even root.
    for path in [dir.path().join("file/runs.db"), "/proc/gpumem/runs.db".into(), "/proc/runs.db".into()] {
        let error = refused(Store::open(&path));
        assert!(matches!(error, StoreError::Io { .. }), "{error:?}");
        assert!(error.to_string().contains("file") || error.to_string().contains("/proc"), "{error}");
    }
}

/// Truncation after every page, and many flipped bits: the result is an error or a run, never a panic.
#[test]
fn damaged_files() {
    const PAGE: usize = 4096;
    let dir = TempDir::new();
    let run = finished(&dir);
    let whole = fs::read(dir.store()).unwrap();
    let path = dir.path().join("damaged.db");
    let look = |bytes: &[u8]| -> Result<Option<Run>, StoreError> {
        for side in ["db-wal", "db-shm"] {
            let _ = fs::remove_file(path.with_extension(side));
        }
        fs::write(&path, bytes).unwrap();
        let store = Store::open_read_only(&path)?;
        let loaded = store.list()?.first().map(|line| store.load(line.id)).transpose();
        drop(store);
        // Writing must not panic either, whatever is wrong with an existing run.
        Store::open(&path)?.insert(&run_at(2), "b").and(loaded)
    };
    assert_eq!(look(&whole).unwrap(), Some(run));
    for length in (PAGE..whole.len()).step_by(PAGE).chain([50, 100, 101, 1000, PAGE - 1, PAGE + 1]) {
        let error = look(&whole[..length]).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { .. }), "{length}: {error:?}");
    }
    let mut refused = 0;
    for flip in 0..300 {
        let mut bytes = whole.clone();
        for each in 0..8 {
            let at = scatter(flip * 8 + each) as usize % bytes.len();
            bytes[at] ^= 1 << (flip % 8);
        }
        refused += u32::from(look(&bytes).is_err());
    }
    println!("{refused} of 300 damaged files were refused");
}

#[test]
fn rows_that_contradict_each_other_are_damage() {
    for damage in [
        "UPDATE run SET coverage = 'no json'",
        "UPDATE run SET facts = '[1]'",
        "UPDATE run SET pid = -1",
        "UPDATE run SET uid = CAST(x'ff' AS TEXT), source_kind = CAST(x'ff' AS TEXT)",
        "DELETE FROM moment WHERE kind = 'peak'",
        "DELETE FROM cell WHERE idx = 3",
        "DELETE FROM cell WHERE idx > 3",
        "DELETE FROM bucket WHERE seq = 3",
        "DELETE FROM detail WHERE name = 'timeline' AND seq = 0",
        "UPDATE detail SET body = x'ff' WHERE name = 'timeline' AND seq = 1",
        "UPDATE detail SET body = '[' WHERE name = 'rest'",
        "UPDATE detail SET body = 7 WHERE name = 'growth'",
        "UPDATE bucket SET samples = -1",
        "UPDATE bucket SET tracked_max = NULL",
    ] {
        let dir = TempDir::new();
        finished(&dir);
        rusqlite::Connection::open(dir.store()).unwrap().execute_batch(damage).unwrap();
        let store = Store::open_read_only(dir.store()).unwrap();
        let error = store.load(store.latest().unwrap().unwrap()).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { .. }), "{damage}: {error:?}");
    }
}

/// Views and generated columns of a foreign file may return endless rows, and its triggers may alter written rows.
#[test]
fn code_in_place_of_a_table_is_refused_at_once() {
    let endless = "WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n)";
    for (made_up, found) in [
        (
            format!("ALTER TABLE run RENAME TO old; CREATE VIEW Run AS {endless} SELECT old.* FROM old, n"),
            "a view 'Run'",
        ),
        (format!("DROP TABLE cell; CREATE VIEW cell AS {endless} SELECT i AS idx FROM n"), "a view 'cell'"),
        (
            "CREATE TRIGGER t BEFORE UPDATE ON run BEGIN SELECT hex(zeroblob(400000000)); END".into(),
            "a trigger 't'",
        ),
        (
            "ALTER TABLE device ADD COLUMN x TEXT AS (hex(zeroblob(400000000)))".into(),
            "a generated column 'x'",
        ),
    ] {
        let dir = TempDir::new();
        finished(&dir);
        rusqlite::Connection::open(dir.store()).unwrap().execute_batch(&made_up).unwrap();
        for error in [refused(Store::open(dir.store())), refused(Store::open_read_only(dir.store()))] {
            assert!(matches!(error, StoreError::NotAStore { .. }), "{error:?}");
            assert!(error.to_string().contains(found), "{error}");
        }
    }
    let dir = TempDir::new();
    finished(&dir);
    let own = "CREATE VIEW theirs AS SELECT * FROM run; CREATE INDEX quick ON run (label); CREATE TABLE notes (run, note)";
    rusqlite::Connection::open(dir.store()).unwrap().execute_batch(own).unwrap();
    assert_eq!(
        Store::open_read_only(dir.store()).unwrap().list().unwrap().len(),
        1,
        "what people add for themselves"
    );
}

#[test]
fn deleting_a_run_deletes_all_of_it() {
    let dir = TempDir::new();
    finished(&dir);
    let db = rusqlite::Connection::open(dir.store()).unwrap();
    db.execute_batch("PRAGMA foreign_keys = ON; DELETE FROM run").unwrap();
    for table in ["cell", "device", "moment", "amount", "bucket", "detail"] {
        let rows: i64 = db.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap();
        assert_eq!(rows, 0, "{table}");
    }
    drop(db);
    let (id, _) = Store::open(dir.store()).unwrap().insert(&run_at(1), "a").unwrap();
    assert_eq!(id.to_string(), "r2", "the name of a deleted run is not used again");
}

#[test]
fn a_full_disk_costs_one_checkpoint_and_not_the_store() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    let id = store.begin(&run_at(1), "a").unwrap();
    store.limit_size(1).unwrap();
    let mut full = 0;
    for n in 1..=300 {
        match store.checkpoint(id, &run_at(n * 2)) {
            Ok(()) => assert_eq!(store.load(id).unwrap(), run_at(n * 2)),
            Err(StoreError::DiskFull { .. }) => full += 1,
            Err(error) => panic!("{error:?}"),
        }
    }
    assert!(full > 0);
    assert!(matches!(store.insert(&run_at(999), "b"), Err(StoreError::DiskFull { .. })));
    assert_consistent(&store.load(id).unwrap());
    assert_eq!(store.list().unwrap().len(), 1, "nothing of the run that did not fit");
    store.limit_size(1 << 30).unwrap();
    store.checkpoint(id, &run_at(999)).unwrap();
    assert_eq!(store.load(id).unwrap(), run_at(999));
}

#[test]
fn a_reader_cannot_write() {
    let dir = TempDir::new();
    let run = finished(&dir);
    let mut store = Store::open_read_only(dir.store()).unwrap();
    let error = store.insert(&run, "b").unwrap_err();
    assert!(error.to_string().contains("readonly"), "{error}");
}

/// Side files cannot be created, as in a read-only directory, but for root too.
#[test]
fn side_files_that_cannot_be_made() {
    let dir = TempDir::new();
    // Characters with a meaning in URIs.
    let odd = TempDir::at(dir.path().join("a?b#c%20 d"));
    let run = finished(&odd);
    // SQLite does not follow links there.
    std::os::unix::fs::symlink("nowhere", odd.path().join("runs.db-shm")).unwrap();
    let store = Store::open_read_only(odd.store()).unwrap();
    assert_eq!(store.load(store.latest().unwrap().unwrap()).unwrap(), run);
    drop(store);

    fs::write(odd.path().join("runs.db-wal"), "what a killed writer left").unwrap();
    let error = refused(Store::open_read_only(odd.store()));
    assert!(matches!(error, StoreError::UnmergedLog { .. }), "{error:?}");
}

/// Result for a reader who may read the file but write neither it nor its directory.
pub fn read_without_rights(dir: &TempDir) -> std::io::Result<String> {
    let of_all = |name: &str, mode| {
        let path = dir.path().join(name);
        if path.exists() {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    ["runs.db", "runs.db-wal", "runs.db-shm", "runs.db-deltas"].iter().for_each(|name| of_all(name, 0o644));
    of_all("", 0o555);
    let program = SharedCopy::of_this_program();
    let mut reader = Command::new(program.path());
    reader
        .args(["--exact", "store::files::a_reader_without_rights_to_the_directory", "--nocapture"])
        .env(CHILD, dir.store());
    if fs::metadata("/proc/self").unwrap().uid() == 0 {
        // Reads as user 65534, because root may write everywhere.
        reader.uid(65534).gid(65534);
    }
    let output = reader.output();
    of_all("", 0o755);
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads as a user who may read the file but write neither it nor its directory: after a clean close, and while a writer is
/// alive.
#[test]
fn a_reader_without_rights_to_the_directory() {
    if let Some(path) = std::env::var_os(CHILD) {
        let store = Store::open_read_only(path).unwrap();
        let run = store.load(store.latest().unwrap().unwrap()).unwrap();
        println!("\nevents {}", run.coverage.events);
        return;
    }
    let dir = TempDir::new();
    finished(&dir);
    match read_without_rights(&dir) {
        Ok(said) => assert!(said.contains("events 60\n"), "{said}"),
        // As root without permission to switch users, or the other user may not run this program.
        Err(error) => {
            return gpumem_test_support::skip(&format!("cannot start a reader as another user: {error}"), "");
        }
    }
    let mut writer = Store::open(dir.store()).unwrap();
    writer.insert(&run_at(61), "b").unwrap();
    let said = read_without_rights(&dir).unwrap();
    assert!(said.contains("events 61\n"), "{said}");
}
