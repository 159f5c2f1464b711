//! A damaged or forged run store: bytes of a valid file or values of its rows are changed. The store must be opened,
//! listed and loaded or refused, in bounded memory. A loaded run is displayed, and storing it again gives the same run.
#![no_main]

#[path = "../../runs/tests/suite/store/support.rs"]
#[allow(dead_code)]
mod support;

use gpumem_fuzz::{memory, number, shown, tamed};
use gpumem_model::run::{Run, State};
use gpumem_runs::store::{Filter, Sort, Store, StoreError};
use libfuzzer_sys::fuzz_target;
use rusqlite::types::{ToSqlOutput, Value, ValueRef};
use rusqlite::{Connection, ffi};
use std::cell::LazyCell;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use support::{TempDir, run_at};

/// Maximum of live bytes while a file is read: separately for Rust's allocator and for SQLite.
const MOST: usize = 16 << 20;

/// A valid store.
struct Good {
    dir: TempDir,
    bytes: Vec<u8>,
    /// One entry for each column: table, column, and the table's key columns.
    columns: Vec<(String, String, String)>,
}

thread_local! {
    static GOOD: LazyCell<Good> = LazyCell::new(Good::new);
}

impl Good {
    fn new() -> Good {
        // In memory if /dev/shm exists.
        let place = ["/dev/shm", "/tmp"].map(PathBuf::from).into_iter().find(|place| place.is_dir());
        let name = format!("gpumem-fuzz-store-{}", std::process::id());
        let dir = TempDir::at(place.expect("a folder").join(name));
        let path = dir.store();
        let mut store = Store::open(&path).expect("it is new");
        store.insert(&run_at(3), "one").expect("room");
        let life = store.begin(&run_at(1), "two").expect("room");
        store.checkpoint(life, &run_at(2)).expect("room");
        drop(store);
        let db = Connection::open(&path).expect("it is there");
        // A write-ahead log would need two more files for each input.
        let _: String =
            db.query_row("PRAGMA journal_mode = DELETE", [], |row| row.get(0)).expect("exclusive access");
        let sql = "SELECT t.name, c.name, (SELECT group_concat(name) FROM pragma_table_info(t.name) WHERE pk > 0)
            FROM sqlite_schema AS t, pragma_table_info(t.name) AS c WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite%'";
        let columns = {
            let mut statement = db.prepare(sql).expect("sql");
            let rows =
                statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).expect("rows");
            rows.collect::<Result<Vec<_>, _>>().expect("texts")
        };
        assert!(columns.len() > 70);
        drop(db);
        let bytes = fs::read(&path).expect("it is there");
        Good { dir, bytes, columns }
    }

    /// Writes the file, changed as the input describes, and returns its path.
    fn changed(&self, how: u8, bytes: &[u8]) -> PathBuf {
        let path = self.dir.store();
        fs::write(&path, &self.bytes).expect("room");
        for suffix in ["db-wal", "db-shm", "db-journal", "db-deltas"] {
            let _ = fs::remove_file(path.with_extension(suffix));
        }
        if how & 1 == 0 {
            self.bytes_of(&path, bytes);
        } else {
            let db = Connection::open(&path).expect("a good file");
            db.execute_batch(
                "PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY; PRAGMA ignore_check_constraints = ON",
            )
            .expect("sql");
            let transaction = db.unchecked_transaction().expect("a good file");
            self.values(&db, bytes);
            transaction.commit().expect("room");
        }
        path
    }

    /// Replaces pieces of the file: offset, length, new bytes. A piece without a length truncates the file.
    fn bytes_of(&self, path: &Path, mut bytes: &[u8]) {
        let file = File::options().write(true).open(path).expect("it is there");
        while !bytes.is_empty() {
            let at = number(&mut bytes, 3) % self.bytes.len() as u64;
            let len = number(&mut bytes, 1) as usize % 32;
            let (piece, rest) = bytes.split_at(len.min(bytes.len()));
            bytes = rest;
            match len {
                0 => file.set_len(at).expect("room"),
                _ => file.write_all_at(piece, at).expect("room"),
            }
        }
    }

    /// Replaces values of rows: column, row, new value. Values that the column's type forbids are skipped.
    fn values(&self, db: &Connection, mut bytes: &[u8]) {
        for _ in 0..8 {
            let Some((&column, rest)) = bytes.split_first() else { return };
            bytes = rest;
            let (row, kind) = (number(&mut bytes, 1), number(&mut bytes, 1));
            let (table, column, key) = &self.columns[usize::from(column) % self.columns.len()];
            let this = format!("({key}) IN (SELECT {key} FROM {table} LIMIT 1 OFFSET {row})");
            let set = |value: ToSqlOutput<'_>| {
                let _ =
                    db.execute(&format!("UPDATE OR REPLACE {table} SET {column} = ? WHERE {this}"), [value]);
            };
            match kind % 8 {
                0 => set(ToSqlOutput::Owned(Value::Null)),
                1 => set(ToSqlOutput::Owned(Value::Integer(number(&mut bytes, 8).cast_signed()))),
                2 => drop(db.execute(&format!("DELETE FROM {table} WHERE {this}"), [])),
                3 | 4 => {
                    let len = number(&mut bytes, 1) as usize;
                    let (piece, rest) = bytes.split_at(len.min(bytes.len()));
                    bytes = rest;
                    set(ToSqlOutput::Borrowed(if kind % 8 == 3 {
                        ValueRef::Text(piece)
                    } else {
                        ValueRef::Blob(piece)
                    }));
                }
                _ => {
                    // Part of the current value.
                    let sql = format!("SELECT {column} FROM {table} WHERE {this}");
                    let Ok(old) = db.query_row(&sql, [], |row| row.get::<_, Value>(0)) else { continue };
                    let (mut text, is_text) = match old {
                        Value::Text(text) => (text.into_bytes(), true),
                        Value::Blob(blob) => (blob, false),
                        _ => continue,
                    };
                    let from = number(&mut bytes, 2) as usize % (text.len() + 1);
                    let to = (from + number(&mut bytes, 1) as usize % 16).min(text.len());
                    let len = number(&mut bytes, 1) as usize % 16;
                    let (piece, rest) = bytes.split_at(len.min(bytes.len()));
                    bytes = rest;
                    text.splice(from..to, piece.iter().copied());
                    set(ToSqlOutput::Borrowed(if is_text {
                        ValueRef::Text(&text)
                    } else {
                        ValueRef::Blob(&text)
                    }));
                }
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&how, bytes)) = bytes.split_first() else { return };
    let path = GOOD.with(|good| good.changed(how, bytes));
    // SAFETY: no pointers.
    unsafe { ffi::sqlite3_memory_highwater(1) };
    let read = memory::bounded(MOST, || read(&path, how));
    // SAFETY: as above.
    let most = unsafe { ffi::sqlite3_memory_highwater(0) };
    assert!(most < MOST as i64, "SQLite took {most} bytes");
    let runs = told(&path, read).unwrap_or_default();
    for run in &runs {
        let text = serde_json::to_vec(run).expect("strings and numbers");
        assert_eq!(&serde_json::from_slice::<Run>(&text).expect("it was written"), run);
        // Rendering views takes ten times as long as everything else, so only some inputs do it.
        if how & 14 == 2 {
            let told = tamed(serde_json::from_slice(&text).expect("JSON"));
            // A reduced number may be outside of its field's type, which makes parsing fail.
            if let Ok(run) = serde_json::from_value::<Run>(told) {
                shown(&run);
            }
        }
    }
    // Storing another run must work only if SQLite finds the file intact.
    if how & 5 == 5 {
        told(&path, again(&path, &runs));
    }
});

/// Returns the value, and asserts that an error names the file.
fn told<T>(path: &Path, read: Result<T, StoreError>) -> Option<T> {
    let wrong =
        |error: &StoreError| assert!(error.to_string().starts_with(&*path.to_string_lossy()), "{error}");
    read.inspect_err(wrong).ok()
}

/// Loads up to four runs, each independent of errors in the others.
fn read(path: &Path, how: u8) -> Result<Vec<Run>, StoreError> {
    let store = Store::open_read_only(path)?;
    let sort = [Sort::Stored, Sort::Started, Sort::Peak, Sort::Label][usize::from(how >> 4 & 3)];
    let filter = Filter {
        oom: how & 64 != 0,
        device: (how & 128 != 0).then(|| "GPU".to_owned()),
        sort,
        ..Filter::default()
    };
    told(path, store.select(&filter));
    told(path, store.latest());
    let listed = told(path, store.list()).unwrap_or_default();
    assert!(listed.is_sorted_by(|one, other| one.id > other.id), "each once, the newest first");
    let mut runs = Vec::new();
    for run in listed.into_iter().take(4) {
        let whole = told(path, store.load(run.id));
        assert!(whole.is_none() || told(path, store.load_head(run.id)).is_some());
        runs.extend(whole);
    }
    Ok(runs)
}

fn again(path: &Path, runs: &[Run]) -> Result<(), StoreError> {
    let mut store = Store::open(path)?;
    for (number, run) in runs.iter().enumerate() {
        let (id, is_new) = store.insert(run, &format!("again {number}"))?;
        assert!(is_new);
        let mut read = store.load(id)?;
        // An open run without a writing process is loaded as interrupted.
        if run.state == State::Open && read.state == State::Interrupted {
            read.state = State::Open;
        }
        assert_eq!(&read, run, "the stored run is loaded unchanged");
    }
    Ok(())
}
