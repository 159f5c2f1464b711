//! Controls of the agent for the program: recordings independent of the daemon, dumps, muting, counters, reports.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, Peer, agent};
use gpumem_ledger::{Ledger, Origin, ProcessKey};
use gpumem_test_support::alone;
use gpumem_wire::{Body, Record, frame};
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;

/// Reads a recording into a ledger; returns it with the kinds of records in order.
fn read(path: &Path) -> (Ledger, Vec<String>) {
    let bytes = std::fs::read(path).expect("a recording");
    assert!(frame::read_header(&bytes).is_some());
    let (mut ledger, mut kinds) = (Ledger::new(), Vec::new());
    let key = ProcessKey { pid: std::process::id(), start_ticks: 1 };
    for record in frame::records(&bytes[frame::HEADER_BYTES..]) {
        let record: Record<'_> = record.expect("whole frames").expect("known kinds");
        kinds.push(
            Body::KINDS.iter().find(|(_, kind)| *kind == record.body.kind()).expect("a kind").0.to_owned(),
        );
        let origin =
            if matches!(record.body, Body::ClockAnchor { .. }) { Origin::Host } else { Origin::Process(key) };
        ledger.observe(origin, &record);
    }
    (ledger, kinds)
}

fn tracked(ledger: &Ledger) -> i64 {
    let snapshot = ledger.snapshot();
    snapshot.processes.iter().flat_map(|process| &process.accounts).map(|account| account.tracked_bytes).sum()
}

fn set(key: &str, value: &str) -> i32 {
    let (key, value) = (CString::new(key).expect("no 0"), CString::new(value).expect("no 0"));
    // SAFETY: C strings.
    unsafe { gpumem::gpumem_configure(key.as_ptr(), value.as_ptr()) }
}

fn dump(path: Option<&Path>, finished: i32) -> i32 {
    let path = path.map(|path| CString::new(path.to_str().expect("UTF-8")).expect("no 0"));
    // SAFETY: a C string or null.
    unsafe { gpumem::gpumem_dump(path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr()), finished) }
}

macro_rules! calls {
    ($($name:ident = $call:ident -> $result:ty;)*) => {
        $(fn $name() -> $result {
            // SAFETY: takes no arguments.
            unsafe { gpumem::$call() }
        })*
    };
}
calls! {
    start = gpumem_start -> i32;
    stop = gpumem_stop -> i32;
    mute = gpumem_mute -> ();
    unmute = gpumem_unmute -> ();
}

fn dumps(format: &CStr, sort: &CStr, ascending: i32, reset: i32) -> Option<String> {
    // SAFETY: C strings; the result is null or a text of the agent.
    unsafe {
        let text = gpumem::gpumem_dumps(format.as_ptr(), sort.as_ptr(), ascending, reset);
        let told = (!text.is_null()).then(|| CStr::from_ptr(text).to_str().expect("UTF-8").to_owned());
        libc::free(text.cast());
        told
    }
}

fn recordings(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|file| file.extension().is_some_and(|end| end == "gpumem"));
    files.sort();
    files
}

fn told(peer: &mut Peer, command: Body<'_>) -> (u16, String) {
    let kind = command.kind();
    peer.send(command);
    peer.until("what became of it", |peer| peer.done.iter().any(|(done, ..)| *done == kind));
    let at = peer.done.iter().position(|(done, ..)| *done == kind).expect("one");
    let (_, result, told) = peer.done.remove(at);
    (result, told)
}

/// A process has one agent, so this is one test.
#[test]
fn what_a_program_wants_is_done() {
    alone(|| {
        let folder = Folder::new("control");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        agent(&socket, |_| ());
        let mut peer = daemon.accept();
        peer.resync(1);
        context(CONTEXT, 0);
        alloc(0x7000_0000, MIB);

        // An additional recording, which begins with the state.
        let first = folder.0.join("first.gpumem");
        assert_eq!(set("record_file", first.to_str().expect("UTF-8")), 1);
        assert_eq!(start(), 1);
        assert_eq!(start(), 1, "it goes on");
        alloc(0x7100_0000, 2 * MIB);
        assert_eq!(dump(None, 0), 1);
        let (ledger, kinds) = read(&first);
        assert_eq!(tracked(&ledger), 3 * MIB as i64, "while it goes on: {kinds:?}");
        free(0x7000_0000);
        assert_eq!(stop(), 1);
        assert_eq!(stop(), 1, "there is none");
        let (ledger, kinds) = read(&first);
        assert_eq!((tracked(&ledger), kinds.last().map(String::as_str)), (2 * MIB as i64, Some("Bye")));
        let process = ledger.snapshot().processes[0].clone();
        // It contains nothing from before its start: sums are exact, peaks are lower bounds.
        let coverage = &process.coverage;
        assert!(coverage.lost == 4 && coverage.partial_history && !coverage.partial_state, "{coverage:?}");
        assert_eq!(process.odd, Default::default());
        assert_eq!(start(), 0, "nothing is overwritten");
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(&first).expect("a file").permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);

        // Into a folder: the name has host, rank and pid, and differs each time.
        assert_eq!(set("record_file", folder.0.to_str().expect("UTF-8")), 1);
        for _ in 0..2 {
            assert_eq!(start(), 1);
            assert_eq!(dump(None, 1), 1, "and ends it");
        }
        let named: Vec<String> = recordings(&folder.0)
            .iter()
            .map(|path| path.file_name().expect("a name").to_string_lossy().into_owned())
            .collect();
        let end = |number: u32| format!("-r3-p{}-{number}.gpumem", std::process::id());
        assert!(named.len() == 3 && named[1].ends_with(&end(1)) && named[2].ends_with(&end(2)), "{named:?}");
        assert!(named[1].starts_with("gpumem-"), "{named:?}");

        // The state alone.
        let state = folder.0.join("state.gpumem");
        assert_eq!((dump(Some(&state), 0), dump(Some(&state), 0)), (1, 0));
        assert_eq!(dump(Some(Path::new("/proc/none/x")), 0), 0);
        let (ledger, _) = read(&state);
        assert_eq!(tracked(&ledger), 2 * MIB as i64);
        assert!(
            ledger.snapshot().processes[0].coverage.partial_history
                && !ledger.snapshot().processes[0].coverage.partial_state
        );
        let live = folder.0.join("live");
        std::fs::create_dir(&live).expect("a folder");
        assert_eq!((set("dump_file", live.to_str().expect("UTF-8")), set("dump_period", "0.1")), (1, 1));
        peer.until("dumps by themselves", |_| recordings(&live).len() >= 3);
        assert_eq!(set("dump_period", "0"), 1);
        assert_eq!(tracked(&read(&recordings(&live)[0]).0), 2 * MIB as i64);

        // Muted: the daemon gets nothing; afterwards it gets the withheld amount and the state. Calls nest. The daemon and
        // `memory` mute, too.
        let heard = |peer: &Peer| peer.account().tracked_bytes;
        peer.catch_up();
        assert_eq!(heard(&peer), 2 * MIB as i64);
        mute();
        mute();
        let before = peer.view().coverage.events;
        alloc(0x7200_0000, 4 * MIB);
        alloc(0x7300_0000, 8 * MIB);
        free(0x7300_0000);
        unmute();
        alloc(0x7400_0000, 16 * MIB);
        assert_eq!(dump(Some(&folder.0.join("muted.gpumem")), 0), 1);
        assert_eq!(tracked(&read(&folder.0.join("muted.gpumem")).0), 22 * MIB as i64, "a dump knows");
        while peer.take(std::time::Duration::from_millis(30)) {}
        assert_eq!((peer.view().coverage.events, heard(&peer)), (before, 2 * MIB as i64));
        let resyncs = peer.resyncs;
        unmute();
        peer.until("the state", |peer| peer.resyncs > resyncs);
        peer.catch_up();
        assert_eq!(heard(&peer), 22 * MIB as i64);
        let coverage = peer.view().coverage;
        assert_eq!((coverage.lost, coverage.withheld), (0, 5), "what was kept back is not lost");
        assert!(coverage.partial_history && !coverage.partial_state, "{coverage:?}");
        unmute(); // one too many

        assert_eq!(set("memory", "off"), 1);
        alloc(0x7500_0000, 32 * MIB);
        let resyncs = peer.resyncs;
        assert_eq!(set("memory", "on"), 1);
        peer.until("the state", |peer| peer.resyncs > resyncs);
        peer.catch_up();
        assert_eq!(heard(&peer), 54 * MIB as i64);

        assert_eq!(told(&mut peer, Body::Pause {}), (0, String::new()));
        alloc(0x7600_0000, 64 * MIB);
        let resyncs = peer.resyncs;
        assert_eq!(told(&mut peer, Body::Resume {}), (0, String::new()));
        peer.until("the state", |peer| peer.resyncs > resyncs);
        peer.catch_up();
        assert_eq!(heard(&peer), 118 * MIB as i64);

        // Recordings requested by the daemon.
        let path = folder.0.join("told.gpumem");
        let text = path.to_str().expect("UTF-8").to_owned();
        assert_eq!(told(&mut peer, Body::RecordControl { on: true, path: &text }), (0, text.clone()));
        free(0x7600_0000);
        assert_eq!(told(&mut peer, Body::RecordControl { on: false, path: "" }), (0, text.clone()));
        assert_eq!(tracked(&read(&path).0), 54 * MIB as i64);
        let (errno, why) = told(&mut peer, Body::Dump { path: &text });
        assert!(errno == libc::EEXIST as u16 && why.contains("told.gpumem"), "{errno} {why}");

        // Classes of records.
        assert_eq!(
            (set("marks", "no"), set("ranges", "true"), set("colour", "1"), set("marks", "maybe")),
            (1, 1, 0, 0)
        );
        assert_eq!(
            (set("dump_period", "-1"), set("dump_period", "0.01"), set("dump_period", "soon")),
            (0, 0, 0)
        );
        peer.seen.clear();
        // SAFETY: C strings.
        unsafe {
            gpumem::gpumem_step(1);
            gpumem::gpumem_mark(c"here".as_ptr());
            gpumem::gpumem_push(c"range".as_ptr());
            gpumem::gpumem_pop();
        }
        peer.catch_up();
        let of = |peer: &Peer, kind: &str| peer.seen.iter().filter(|seen| *seen == kind).count();
        assert_eq!((of(&peer, "Step"), of(&peer, "Marker"), of(&peer, "Scope")), (0, 0, 2));
        assert_eq!((set("marks", "on"), set("ranges", "off")), (1, 1));

        // Counters.
        // SAFETY: C strings.
        unsafe {
            gpumem::gpumem_counter_set(c"cache/hits".as_ptr(), 5);
            gpumem::gpumem_counter_add(c"cache/hits".as_ptr(), -7);
            gpumem::gpumem_counter_add(c"cache/misses".as_ptr(), 3);
        }
        peer.catch_up();
        assert_eq!(of(&peer, "Counter"), 3);
        let own = peer.ledger.own(peer.key);
        let told =
            |at: usize| (own.counters[at].name.as_deref(), own.counters[at].value, own.counters[at].changes);
        assert_eq!((told(0), told(1)), ((Some("cache/hits"), -2, 2), (Some("cache/misses"), 3, 1)));

        // The peak inside of a range.
        let high = |ordinal: i32| {
            let (mut bytes, mut blocks) = (7_u64, 7_u64);
            // SAFETY: two valid pointers.
            let known = unsafe { gpumem::gpumem_peak_bytes(ordinal, &mut bytes, &mut blocks) };
            (known, bytes, blocks)
        };
        // SAFETY: takes a number.
        let peak = |verb: i32| unsafe { gpumem::gpumem_peak(verb) };
        assert_eq!(high(0), (0, 7, 7), "none is open");
        assert_eq!(peak(1), 1);
        alloc(0x7900_0000, 128 * MIB);
        free(0x7900_0000);
        assert_eq!((high(0), high(99)), ((1, 182 * MIB, 0), (0, 7, 7)));
        assert_eq!((peak(2), high(0)), (1, (1, 54 * MIB, 0)));
        assert_eq!((peak(0), high(0).0), (1, 0));

        // Without a daemon that answers (this one never does), the agent's own report.
        drop(peer);
        drop(daemon);
        std::fs::remove_file(&socket).expect("the socket");
        // SAFETY: a C string.
        unsafe { gpumem::gpumem_push(c"small".as_ptr()) };
        alloc(0x7700_0000, 100);
        alloc(0x7700_1000, 300);
        let json = dumps(c"json", c"", 0, 1).expect("a report");
        assert!(
            json.contains(
                r#""tag":"small","role":null,"count":2,"bytes":400,"min_bytes":100,"max_bytes":300"#
            ),
            "{json}"
        );
        assert!(json.contains(r#"{"name":"cache/hits","value":-2,"changes":2,"min":-2,"max":5,"#), "{json}");
        let json = dumps(c"json", c"", 0, 0).expect("a report");
        assert!(
            json.contains(r#"{"name":"cache/hits","value":-2,"changes":0,"min":-2,"max":-2,"#),
            "after the reset: {json}"
        );
        let text = dumps(c"text", c"count", 1, 0).expect("a report");
        assert!(text.contains("device 0, allocations: 54.00 MiB"), "{text}");
        let at = |name: &str| text.find(name).unwrap_or_else(|| panic!("{name} in {text}"));
        assert!(at("small") < at("(no tag)") && at("(no tag)") < at("cache/hits"), "{text}");
        assert_eq!((dumps(c"xml", c"", 0, 0), dumps(c"json", c"colour", 0, 0)), (None, None));
        // SAFETY: a C string and null.
        assert!(unsafe { gpumem::gpumem_report(c"text".as_ptr(), std::ptr::null()) }.is_null());
        // SAFETY: null is allowed.
        let info = unsafe { gpumem::gpumem_memory_info(0, std::ptr::null_mut(), std::ptr::null_mut()) };
        assert_eq!(info, 0, "no driver");
        // A recording without a daemon.
        assert_eq!(set("record_file", folder.0.join("alone.gpumem").to_str().expect("UTF-8")), 1);
        assert_eq!(start(), 1);
        alloc(0x7800_0000, MIB);
        assert_eq!(dump(None, 1), 1);
        assert_eq!(tracked(&read(&folder.0.join("alone.gpumem")).0), 55 * MIB as i64 + 400);
    });
}
