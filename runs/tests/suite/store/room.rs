//! Runs that may be deleted, and what happens to their space.

use super::support::{TempDir, run_at};
use gpumem_model::run::{Part, Run, State};
use gpumem_runs::store::{DeletableRun, RunId, Store};

fn ended(n: u64) -> Run {
    Run { state: State::Closed { time_ns: n, status: None }, ..run_at(n) }
}

/// This process, in the daemon's notation.
fn own_life() -> (Run, String) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let start = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let mut run = run_at(5);
    (run.process.pid, run.process.start_ticks) = (std::process::id(), start);
    let life = format!("{}:{}:{start}", boot.trim_end(), run.process.pid);
    (run, life)
}

#[test]
fn what_lives_is_never_offered() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    let (over, _) = store.insert(&ended(1), "over").unwrap();
    // A live process writes it; the run's own process may be unknown.
    store.begin(&run_at(2), "open").unwrap();
    // A run of a live process is kept, also without a live writer.
    let (run, life) = own_life();
    store.insert(&run, &life).unwrap();
    // An import belongs to its owner and is never deleted.
    let mut import = ended(3);
    import.source.kind = "tbd-log".into();
    store.insert(&import, "import").unwrap();
    let offered = store.deletable_runs().unwrap();
    assert_eq!(offered.iter().map(|over| over.id).collect::<Vec<_>>(), [over]);
    assert!(store.delete(offered[0]).unwrap());
    assert!(!store.delete(offered[0]).unwrap(), "it is gone");
    assert_eq!(store.list().unwrap().len(), 3);
}

#[test]
fn a_run_that_was_written_again_stays() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    let (id, _) = store.insert(&ended(1), "a").unwrap();
    let offered = store.deletable_runs().unwrap()[0];
    assert!(!store.delete(DeletableRun { written_s: offered.written_s - 1, ..offered }).unwrap());
    store.checkpoint(id, &run_at(2)).unwrap();
    assert!(!store.delete(offered).unwrap(), "it has a writer now");
    assert_eq!(store.list().unwrap().len(), 1);
}

#[test]
fn the_file_shrinks_in_bounded_pieces() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    for n in 0..100 {
        store.insert(&ended(300 + n), &n.to_string()).unwrap();
    }
    store.merge().unwrap();
    let full = std::fs::metadata(dir.store()).unwrap().len();
    assert_eq!(store.room().unwrap().file_bytes, full);
    let reader = Store::open_read_only(dir.store()).unwrap();
    let offered = store.deletable_runs().unwrap();
    for over in &offered[..90] {
        assert!(store.delete(*over).unwrap());
    }
    let free = store.room().unwrap().free_bytes;
    assert!(free > full / 2, "{free} of {full}");
    let mut before = store.room().unwrap();
    while before.free_bytes > 0 {
        store.shrink(64).unwrap();
        let now = store.room().unwrap();
        assert!(
            now.free_bytes < before.free_bytes && before.file_bytes - now.file_bytes <= (64 + 2) * 4096,
            "{now:?}"
        );
        before = now;
    }
    store.merge().unwrap();
    let small = std::fs::metadata(dir.store()).unwrap().len();
    assert!(small < full / 5, "{small} of {full}");
    assert_eq!(store.room().unwrap().file_bytes, small);
    for over in &offered[90..] {
        let run = store.load(over.id).unwrap();
        assert_eq!(run, ended(run.coverage.events));
        assert_eq!(reader.load(over.id).unwrap(), run);
    }
}

#[test]
fn parts_of_a_life_are_linked() {
    let dir = TempDir::new();
    let mut store = Store::open(dir.store()).unwrap();
    assert_eq!(store.newest("life").unwrap(), None);
    let first = store.begin(&run_at(1), "life").unwrap();
    store.begin(&run_at(1), "life2").unwrap();
    let newest = store.newest("life").unwrap().unwrap();
    assert_eq!((newest.id, newest.part, newest.is_rolled), (first, 1, false));
    let rolled = Run { state: State::Rolled { time_ns: 77 }, ..run_at(2) };
    store.close(first, &rolled).unwrap();
    assert!(store.newest("life").unwrap().unwrap().is_rolled);
    assert_eq!(store.load(first).unwrap(), rolled);
    let mut next = run_at(3);
    next.coverage.part = Some(Part { number: 2, began_ns: 77, events_before: 2 });
    let second = store.begin_part(&next, "life", 2).unwrap();
    assert!(store.begin_part(&next, "life", 2).unwrap_err().to_string().contains("\"life/2\""));
    let list = store.list().unwrap();
    let line = |id: RunId| list.iter().find(|line| line.id == id).unwrap();
    assert_eq!((line(first).part, line(first).continues), (1, None));
    assert_eq!((line(second).part, line(second).continues), (2, Some(first)));
    assert_eq!(line(first).state, State::Rolled { time_ns: 77 });
    // The first part is deleted, the life continues.
    let first = store.deletable_runs().unwrap()[0];
    assert!(store.delete(first).unwrap());
    assert_eq!(store.newest("life").unwrap().unwrap().part, 2);
    assert_eq!(store.list().unwrap().iter().find(|line| line.id == second).unwrap().continues, None);
}
