//! Cost of the report of a run with 10 million events, from its recording, which is replayed, and from the run store. The floor
//! reads the same recording without decoding it.

use super::memory::peak_bytes;
use super::programs::gpumemctl;
use super::rounds::{Contestant, Per, print_table};
use crate::browser::{Browser, chromium};
use gpumem_import::{read_file, read_with_blocks};
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::run::Run;
use gpumem_report::rules::Groupings;
use gpumem_report::text::{Layout, text};
use gpumem_report::{Report, html, json};
use gpumem_runs::input::Input;
use gpumem_runs::recording::Writer;
use gpumem_runs::store::Store;
use gpumem_wire::{
    Absence, Body, ByeReason, DeviceIdKind, FreeState, MemoryKind, Phase, Reading, Record, Role, Stamp,
};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const EVENTS: u64 = 10_000_000;
const TAGS: u32 = 1_000;
const LIVE_BLOCKS: u64 = 100_000;
const BLOCK_BYTES: u64 = 1 << 19;
const ROUNDS: usize = 3;

pub fn run() {
    let folder = Folder::new();
    let recording = folder.0.join("ten-million.gpumem");
    write(&recording);
    let bytes = std::fs::metadata(&recording).expect("a recording").len();
    println!("{EVENTS} events, {TAGS} tags, {LIVE_BLOCKS} live blocks, {} MB\n", bytes / 1_000_000);

    let run = one_run(&recording);
    assert_eq!(run.coverage.events, EVENTS);
    assert_eq!((run.coverage.lost, run.coverage.odd), (0, 0));
    let store = folder.0.join("runs.sqlite");
    let (id, _) = Store::open(&store).expect("a store").insert(&run, "bench").expect("stored");

    let mut from_recording = Contestant::new("recording -> report");
    let mut from_store = Contestant::new("store -> report");
    let mut floor = Contestant::new("read the recording");
    for _ in 0..=ROUNDS {
        let mut told = (String::new(), String::new());
        from_recording.round(1, || told.0 = tell(&one_run(&recording)));
        let load = || Store::open_read_only(&store).and_then(|store| store.load(id)).expect("a run");
        from_store.round(1, || told.1 = tell(&load()));
        assert_eq!(told.0, told.1, "a stored run reads like its recording");
        floor.round(1, || assert_eq!(read(&recording), bytes));
    }
    let mut contestants = [from_recording, from_store, floor];
    contestants.iter_mut().for_each(Contestant::forget_warm_up);
    print_table("a whole report", Per::Round, &contestants.iter().collect::<Vec<_>>());
    let size = json::json(&Report::new(&run, Groupings::load("default").expect("preset"), None)).len();
    if let Some(gpumemctl) = gpumemctl() {
        for form in [&[][..], &["--chrome-trace"]] {
            let peak = peak_bytes(Command::new(&gpumemctl).arg("report").arg(&recording).args(form));
            println!("most memory of gpumemctl report RECORDING {}: {} MiB", form.join(" "), peak >> 20);
        }
    }
    println!("as JSON: {} kB; store: {} kB\n", size / 1000, file_kb(&store));
    let input = Input::open(&recording).expect("a recording");
    page(&read_with_blocks(input, None).expect("a recording")[0], &folder.0);
}

/// Makes the page of the report and opens it in a browser. Its file has at most 3 MB.
fn page(run: &Run, folder: &Path) {
    let began = Instant::now();
    let page = html::html(&Report::new(run, Groupings::load("default").expect("preset"), None));
    println!("as a page: {} kB, made in {} ms", page.len() / 1000, began.elapsed().as_millis());
    assert!(page.len() <= 3_000_000, "{}", page.len());
    let Some(program) = chromium() else { return };
    let file = folder.join("page.html");
    std::fs::write(&file, page).expect("written");
    let mut browser = Browser::start(&program, folder.join("browser"));
    browser.show(1280, 800, false);
    browser.open(&file);
    browser.settle();
    // The entry comes some time after the picture.
    let paint = "new Promise((done) => new PerformanceObserver((list) => {
        const first = list.getEntriesByName('first-contentful-paint')[0];
        if (first) done(Math.round(first.startTime));
    }).observe({ type: 'paint', buffered: true }))";
    println!("first paint after {} ms\n", browser.eval(paint));
}

fn one_run(path: &Path) -> Run {
    read_file(path, None).expect("a recording").remove(0)
}

fn tell(run: &Run) -> String {
    text(&Report::new(run, Groupings::load("default").expect("preset"), None), Layout::default())
}

fn read(path: &Path) -> u64 {
    let (mut file, mut buffer, mut total) = (File::open(path).expect("a file"), vec![0; 1 << 20], 0);
    loop {
        match file.read(&mut buffer).expect("bytes") {
            0 => return total,
            read => total += read as u64,
        }
    }
}

fn file_kb(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |file| file.len() / 1000)
}

/// Writes a small training run: one pool, blocks by tag and role, a sample every 100,000 events.
fn write(path: &Path) {
    let mut writer = Writer::new(File::create(path).expect("a file")).expect("a header");
    let process = ProcessKey { pid: 4242, start_ticks: 99 };
    let mut say =
        |origin, stamp, body: Body<'_>| writer.write(origin, &Record { stamp, body }).expect("written");
    let (ours, host) = (Origin::Process(process), Origin::Host);
    let device = Body::Device {
        uuid_high: 1,
        uuid_low: 2,
        total_bytes: Reading::of(80 << 30),
        ordinal: 0,
        id: DeviceIdKind::Gpu,
        name: "bench",
    };
    let plain = Stamp { device: 0, ..Stamp::default() };
    say(host, plain, device);
    say(ours, plain, device);
    for tag in 1..=TAGS {
        let path = format!("model/layers.{}/part.{}", tag / 10, tag % 10);
        say(ours, Stamp { tag, ..plain }, Body::Tag { path: &path });
    }
    let pool_bytes = LIVE_BLOCKS * BLOCK_BYTES;
    let mut seq = 0;
    let mut next = |tag: u32| {
        seq += 1;
        Stamp { seq, time_ns: seq * 1000, tag, ..plain }
    };
    let pool = 7;
    let memory = MemoryKind::Device;
    say(ours, next(0), Body::AllocEnd { address: 1 << 40, bytes: pool_bytes, pool, took_us: 0, memory });
    let mut sample = 0;
    for event in 1..EVENTS {
        // Every slot is filled first; then each in turn is freed and allocated again.
        let (slot, frees) = match event.checked_sub(LIVE_BLOCKS + 1) {
            None => (event - 1, false),
            Some(step) => (step / 2 % LIVE_BLOCKS, step % 2 == 0),
        };
        let address = (1 << 40) + slot * BLOCK_BYTES;
        let tag = (event % u64::from(TAGS)) as u32 + 1;
        let role = [Role::Parameter, Role::Gradient, Role::Activation, Role::Unknown][(event % 4) as usize];
        let stamp = next(tag);
        if frees {
            say(ours, stamp, Body::BlockFree { address, pool, state: FreeState::Done });
        } else {
            let use_as = (role, Phase::Unknown);
            say(ours, stamp, Body::BlockAlloc { address, bytes: BLOCK_BYTES, pool, use_as });
        }
        if event % 100_000 == 0 {
            sample += 1;
            let at = Stamp { time_ns: stamp.time_ns, ..plain };
            say(ours, at, Body::Watermark { last_seq: stamp.seq, in_flight_since_ns: 0 });
            say(host, at, Body::SampleBegin { number: sample });
            let used_bytes = Reading::of(pool_bytes + (600 << 20));
            let absence = Absence::Unknown;
            let listed =
                Body::ProcessSample { start_ticks: process.start_ticks, used_bytes, absence, lists: 1 };
            say(host, Stamp { thread: process.pid, ..at }, listed);
            say(host, at, Body::SampleEnd { number: sample, result: 0 });
        }
    }
    say(ours, plain, Body::Bye { reason: ByeReason::Exit });
    writer.flush().expect("flushed");
}

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("gpumem-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
