//! Streams of requests that are kept with runs.

use super::support::{TempDir, run_at};
use gpumem_model::run::{Run, State};
use gpumem_runs::requests::Piece;
use gpumem_runs::store::Store;
use rusqlite::Connection;

fn piece(number: u64, first: u64) -> Piece {
    Piece { number, first, bytes: vec![number as u8; 100] }
}

fn table_rows(path: &std::path::Path) -> i64 {
    let db = Connection::open(path).unwrap();
    db.query_row("SELECT count(*) FROM request", [], |row| row.get(0)).unwrap()
}

#[test]
fn pieces_are_kept_while_they_are_needed_and_without_holes() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    let run = Run { state: State::Closed { time_ns: 1, status: None }, ..run_at(1) };
    let (id, _) = store.insert(&run, "a").unwrap();
    let weight = store.deletable_runs().unwrap()[0].bytes.unwrap();
    let mut kept = |pieces: &[Piece]| -> Vec<u8> {
        store.add_requests(id, pieces).unwrap();
        store.requests(id).unwrap().iter().map(|piece| piece[0]).collect()
    };
    assert_eq!(kept(&[piece(0, 0), piece(1, 0)]), [0, 1]);
    assert_eq!(kept(&[piece(1, 0), piece(2, 0)]), [0, 1, 2], "a piece that is written again");
    assert_eq!(kept(&[piece(3, 2)]), [2, 3]);
    assert_eq!(kept(&[piece(6, 2)]), [6], "pieces before a hole are of no use");
    assert_eq!(kept(&[piece(0, 0)]), [0], "of a daemon that was restarted");
    let deletable = store.deletable_runs().unwrap()[0];
    assert!(deletable.bytes.unwrap() > weight, "the stream counts");
    assert!(store.delete(deletable).unwrap());
    assert_eq!(table_rows(&dir.store()), 0);
}

#[test]
fn store_of_an_earlier_version_has_no_requests() {
    let dir = TempDir::new();
    let (id, _) = Store::open(dir.store()).unwrap().insert(&run_at(1), "a").unwrap();
    Connection::open(dir.store()).unwrap().execute("DROP TABLE request", []).unwrap();
    let store = Store::open_read_only(dir.store()).unwrap();
    assert_eq!(store.requests(id).unwrap(), Vec::<Vec<u8>>::new());
    assert_eq!(store.load(id).unwrap().coverage, run_at(1).coverage);
    let mut store = Store::open(dir.store()).unwrap();
    store.add_requests(id, &[piece(0, 0)]).unwrap();
    assert_eq!(store.requests(id).unwrap().len(), 1);
}
