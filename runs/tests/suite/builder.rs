//! Runs built from observations: nothing is left out, and every number has its own time.
use gpumem_ledger::{Origin, ProcessKey, WINDOW_NS};
use gpumem_model::run::{Device, Level, MAX_TENANTS, Moment, Run, Source};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_wire::*;
use proptest::prelude::*;

const KEY: ProcessKey = ProcessKey { pid: 41, start_ticks: 1 };
const MIB: u64 = 1 << 20;

struct Said {
    builder: RunBuilder,
    seq: u64,
}

fn device(number: u64) -> Body<'static> {
    let id = DeviceIdKind::Gpu;
    let total_bytes = Reading::of(80 << 30);
    Body::Device { uuid_high: 7, uuid_low: number, total_bytes, ordinal: number as u16, id, name: "H100" }
}

impl Said {
    fn new() -> Self {
        let source = Source { kind: "recording".into(), origin: "test".into(), preset: None };
        let mut said = Said { builder: RunBuilder::new(source), seq: 0 };
        said.host(0, 0, device(0));
        said
    }
    fn host(&mut self, time_ns: u64, pid: u32, body: Body<'_>) {
        let stamp = Stamp { time_ns, thread: pid, device: 0, ..Stamp::default() };
        self.builder.observe(Origin::Host, &Record { stamp, body });
    }
    fn agent(&mut self, key: ProcessKey, time_ns: u64, slot: u8, body: Body<'_>) {
        let stamp = Stamp { time_ns, device: slot, ..Stamp::default() };
        self.builder.observe(Origin::Process(key), &Record { stamp, body });
    }
    fn alloc(&mut self, time_ns: u64, slot: u8, bytes: u64) {
        self.seq += 1;
        let stamp = Stamp { time_ns, device: slot, seq: self.seq, ..Stamp::default() };
        let body = Body::AllocEnd {
            address: self.seq << 40,
            bytes,
            pool: 0,
            took_us: 0,
            memory: MemoryKind::Device,
        };
        self.builder.observe(Origin::Process(KEY), &Record { stamp, body });
    }
    fn watermark(&mut self, time_ns: u64) {
        self.agent(KEY, time_ns, 0, Body::Watermark { last_seq: self.seq, in_flight_since_ns: 0 });
    }
    fn sample(&mut self, time_ns: u64, listed: &[(u32, Result<u64, Absence>)], result: u16) {
        let number = time_ns;
        self.host(time_ns, 0, Body::SampleBegin { number });
        for &(pid, used) in listed {
            let (used_bytes, absence) = (Reading(used.ok()), used.err().unwrap_or(Absence::Unknown));
            self.host(time_ns, pid, Body::ProcessSample { start_ticks: 1, used_bytes, absence, lists: 1 });
        }
        self.host(time_ns, 0, Body::SampleEnd { number, result });
    }
    fn run(&mut self) -> Run {
        self.builder.runs(false).into_iter().find(|run| run.process.pid == KEY.pid).expect("the run")
    }
    fn last(&mut self) -> Moment {
        self.run().devices[0].last.clone()
    }
}

fn max_of(device: &Device) -> i64 {
    let tracked = device.series.buckets.iter().filter_map(|bucket| bucket.tracked);
    tracked.map(|extremes| extremes.max).max().expect("a bucket")
}

#[test]
fn bytes_on_a_slot_without_a_name_are_a_device_of_the_run() {
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    said.alloc(5, 0, 100 * MIB);
    said.alloc(6, 3, 900 * MIB);
    let run = said.run();
    let names: Vec<&str> = run.devices.iter().map(|device| &*device.name).collect();
    assert_eq!(names[1..], ["unnamed-1"]);
    assert_eq!(run.devices[1].last.tracked_bytes, Some(900 << 20));
    assert_eq!(run.devices[1].peak.tracked_bytes, Some(900 << 20));
    assert_eq!(max_of(&run.devices[1]), 900 << 20);
    assert_eq!(run.caveats[0].code, "unnamed_device");
    assert_eq!(
        run.caveats[0].text,
        "unnamed-1 is a device that the process never named: tracked 943718400 bytes"
    );
    // Once named, the device gets the data kept while it had no name.
    said.agent(KEY, 7, 3, device(1));
    said.alloc(50 * WINDOW_NS, 3, MIB);
    let run = said.run();
    assert_eq!((run.devices.len(), run.caveats.len()), (2, 0));
    assert_eq!(run.devices[1].series.buckets.len(), 2);
    assert_eq!(run.devices[1].series.buckets[0].tracked.map(|tracked| tracked.max), Some(900 << 20));
}

#[test]
fn a_slot_without_bytes_is_no_device() {
    let mut said = Said::new();
    said.agent(KEY, 0, 255, Body::ContextDestroy { scope: DestroyScope::Context });
    assert_eq!((said.run().devices.len(), said.run().caveats.len()), (0, 0));
}

#[test]
fn devices_beyond_the_table_are_told() {
    let mut said = Said::new();
    for slot in 0..70 {
        said.agent(KEY, 0, slot, device(slot.into()));
        said.alloc(5, slot, MIB);
    }
    let run = said.run();
    assert_eq!((run.devices.len(), run.coverage.odd), (64, 7));
    assert_eq!(run.devices[63].last.tracked_bytes, Some(7 << 20));
    assert_eq!(run.caveats[0].code, "devices_beyond");
    assert_eq!(run.devices[62].last.tracked_bytes, Some(1 << 20));
}

#[test]
fn last_is_the_latest_moment_at_which_everything_was_known() {
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    said.alloc(5, 0, 100 * MIB);
    said.sample(100, &[(41, Err(Absence::NotSupported))], 0);
    said.watermark(150);
    let before = said.last();
    assert_eq!((before.tracked_bytes, before.used_bytes()), (Some(100 << 20), None));
    assert_eq!(before.used_absence.as_deref(), Some("not supported"));

    said.sample(200, &[(41, Ok(500 * MIB))], 0);
    said.watermark(300);
    assert_eq!(said.last().used_absence, None);
    said.alloc(350, 0, 50 * MIB);
    for (time_ns, absence, result, name) in [
        (400, Some(Absence::GpuLost), 0, "gpu lost"),
        (500, Some(Absence::Timeout), 0, "timeout"),
        (600, Some(Absence::NoPermission), 0, "no permission"),
        (700, None, 0, "not listed"),
        (800, None, 4, "list failed"),
        (900, Some(Absence::Unknown), 0, "unknown"),
    ] {
        let listed: Vec<_> = absence.map(|absence| (41, Err(absence))).into_iter().collect();
        said.sample(time_ns, &listed, result);
        said.watermark(time_ns + 50);
        let last = said.last();
        assert_eq!(last.used_absence.as_deref(), Some(name));
        assert_eq!((last.time_ns, last.used_bytes()), (200, Some(500 << 20)), "{name}");
        assert_eq!((last.tracked_bytes, last.untrackable_bytes), (Some(100 << 20), Some(400 << 20)));
    }
}

#[test]
fn a_reading_that_does_not_list_an_ended_process_is_no_doubt() {
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    said.alloc(5, 0, 100 * MIB);
    said.sample(100, &[(41, Ok(500 * MIB))], 0);
    said.watermark(150);
    said.sample(200, &[], 0);
    said.watermark(250);
    assert_eq!(said.last().used_absence.as_deref(), Some("not listed"));
    said.host(300, KEY.pid, Body::ProcessGone { start_ticks: KEY.start_ticks, status: Reading::ABSENT });
    let last = said.last();
    assert_eq!((last.used_absence, last.time_ns), (None, 100));
}

#[test]
fn what_predates_a_late_agent_is_not_known_before_something_tells_it() {
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    said.agent(KEY, 0, 0, Body::Agent { result: 0, state: AgentState::Late, detail: "" });
    said.alloc(5, 0, 100 * MIB);
    let last = said.last();
    assert_eq!((last.predates_bytes, last.used_bytes(), last.tracked_bytes), (None, None, Some(100 << 20)));
    said.sample(100, &[(41, Ok(500 * MIB))], 0);
    said.watermark(150);
    let last = said.last();
    assert_eq!((last.predates_bytes, last.used_bytes()), (Some(400 << 20), Some(500 << 20)));
}

#[test]
fn the_largest_other_processes_are_named_and_the_rest_is_summed() {
    let mut said = Said::new();
    let listed: Vec<(u32, Result<u64, Absence>)> = (1..=100_u32)
        .map(|pid| (pid, if pid == 7 { Err(Absence::Timeout) } else { Ok(u64::from(pid)) }))
        .collect();
    said.sample(100, &listed, 0);
    for run in said.builder.runs(false) {
        let device = &run.devices[0];
        let own = device.last.used_bytes().unwrap_or(0) as u64;
        let named: u64 = device.tenants.iter().filter_map(|(_, used)| *used).sum();
        if run.process.pid == 7 {
            assert_eq!(device.tenants, [], "it was not read together with any value of its own");
            continue;
        }
        assert_eq!((device.tenants.len(), device.other_tenants.0), (MAX_TENANTS, 100 - 1 - 16));
        assert_eq!(own + named + device.other_tenants.1, 5050 - 7);
        assert!(device.tenants.is_sorted_by_key(|&(_, used)| std::cmp::Reverse(used)));
        assert!(device.tenants.iter().all(|&(pid, _)| pid != run.process.pid));
    }
}

#[test]
fn others_that_have_ended_and_are_forgotten_are_still_named_beside_what_was_read_with_them() {
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    said.alloc(5, 0, 100 * MIB);
    said.sample(100, &[(41, Ok(500 * MIB)), (42, Ok(300 * MIB))], 0);
    said.watermark(150);
    let of = |builder: &gpumem_runs::builder::RunBuilder, pid| {
        builder.ledger().processes().map(|(key, _)| key).find(|key| key.pid == pid).expect("known")
    };
    let other = of(&said.builder, 42);
    said.builder.forget(other);
    said.sample(200, &[(41, Err(Absence::Timeout))], 0);
    said.watermark(250);
    let (_, run) = said.builder.runs_of(&[KEY], false).remove(0);
    let device = &run.devices[0];
    assert_eq!((device.last.time_ns, &device.tenants[..]), (100, &[(42, Some(300 << 20))][..]));
}

/// The sample of a process is open until its agent has reached that time; the other processes that NVML listed are known at once.
#[test]
fn device_line_has_others_whose_samples_are_still_open() {
    let other = ProcessKey { pid: 42, start_ticks: 1 };
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    said.agent(other, 0, 0, device(0));
    said.alloc(5, 0, 100 * MIB);
    let watermark = |said: &mut Said, key, time_ns| {
        said.agent(key, time_ns, 0, Body::Watermark { last_seq: 0, in_flight_since_ns: 0 });
    };
    let memory = |said: &mut Said, time_ns| {
        let (used_bytes, free_bytes) = (900 * MIB, 124 * MIB);
        let body =
            Body::DeviceSample { used_bytes, free_bytes, reserved_bytes: Reading::ABSENT, unified: false };
        said.host(time_ns, 0, body);
    };
    for time_ns in [100, 200] {
        said.host(time_ns, 0, Body::SampleBegin { number: time_ns });
        memory(&mut said, time_ns);
        for pid in [KEY.pid, other.pid] {
            let used_bytes = Reading::of(if pid == KEY.pid { 500 } else { 300 } * MIB);
            let absence = Absence::Unknown;
            said.host(time_ns, pid, Body::ProcessSample { start_ticks: 1, used_bytes, absence, lists: 1 });
        }
        memory(&mut said, time_ns);
        said.host(time_ns, 0, Body::SampleEnd { number: time_ns, result: 0 });
        said.watermark(time_ns + 50);
        if time_ns == 100 {
            watermark(&mut said, other, 150);
        }
    }
    let run = said.run();
    let here = &run.devices[0];
    assert_eq!((here.last.time_ns, here.last.used_bytes()), (200, Some(500 << 20)));
    assert_eq!(here.tenants, [(42, Some(300 << 20))], "its own sample ends later");
    assert_eq!(here.unaccounted_bytes, Some(100 << 20));
}

#[test]
fn a_sample_that_closes_late_is_in_the_bucket_of_its_own_time() {
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    said.alloc(5, 0, MIB);
    said.sample(2 * WINDOW_NS, &[(41, Ok(3 * MIB))], 0);
    said.alloc(9 * WINDOW_NS, 0, 5 * MIB);
    let series = said.run().devices[0].series.clone();
    let used = series.buckets.iter().filter(|bucket| bucket.used.is_some());
    assert_eq!(used.map(|bucket| bucket.time_ns).collect::<Vec<_>>(), [2 * WINDOW_NS]);
    assert_eq!(series.buckets.iter().map(|bucket| bucket.time_ns / WINDOW_NS).collect::<Vec<_>>(), [0, 2, 9]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    /// Two processes send records in batches, far apart or dense. Each peak is in the bucket of its time. That bucket has the
    /// highest `tracked`; nothing in the series exceeds it.
    #[test]
    fn the_peak_lies_in_the_bucket_that_has_its_maximum(
        steps in prop::collection::vec((0..2_usize, 0..3 * WINDOW_NS, any::<bool>(), 1..1000_u64), 1..3000),
        far in prop::sample::select(vec![1_u64, 1, 100]),
        asked in 1..500_usize,
    ) {
        let mut said = Said::new();
        let keys = [KEY, ProcessKey { pid: 42, start_ticks: 1 }];
        let (mut times, mut seqs, mut live) = ([0_u64; 2], [0_u64; 2], [vec![], vec![]]);
        for (step, (who, gap, grow, bytes)) in steps.into_iter().enumerate() {
            times[who] += gap * far;
            let mut say = |body| {
                seqs[who] += 1;
                let stamp = Stamp { seq: seqs[who], time_ns: times[who], device: 0, ..Stamp::default() };
                said.builder.observe(Origin::Process(keys[who]), &Record { stamp, body });
                seqs[who]
            };
            if grow || live[who].is_empty() {
                let address = (step as u64 + 1) << 20;
                say(Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device });
                live[who].push(address);
            } else if let Some(address) = live[who].pop() {
                let begin_seq = say(Body::FreeBegin { address });
                say(Body::FreeEnd { begin_seq, result: 0 });
            }
            if step % asked == 0 {
                said.builder.runs(true);
            }
        }
        for run in said.builder.runs(false) {
            let device = &run.devices[0];
            let (peak, series) = (&device.peak, &device.series);
            prop_assert!(series.buckets.is_sorted_by(|a, b| a.time_ns < b.time_ns));
            prop_assert_eq!(Some(max_of(device)), peak.tracked_bytes);
            let start_ns = peak.time_ns - peak.time_ns % series.width_ns;
            let at = series.buckets.iter().find(|bucket| bucket.time_ns == start_ns).expect("its bucket");
            prop_assert_eq!(at.tracked.map(|tracked| tracked.max), peak.tracked_bytes);
            let last = series.buckets.last().and_then(|bucket| bucket.tracked).expect("tracked");
            prop_assert_eq!(Some(last.last), device.last.tracked_bytes);
        }
    }
}

fn head_of(run: &Run) -> String {
    use gpumem_report::text::{Layout, text};
    let groupings = gpumem_report::rules::Groupings::load("default").expect("built in");
    let report = gpumem_report::Report::new(run, groupings, None);
    text(&report, Layout::default())
}

#[test]
fn times_in_which_the_agent_was_blind_are_told() {
    let s = 1_000_000_000;
    let agent = |state, result, detail| Body::Agent { result, state, detail };
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    said.agent(KEY, s, 0, agent(AgentState::Covered, 0, ""));
    said.alloc(2 * s, 0, 100 * MIB);
    said.agent(KEY, 3 * s, 0, agent(AgentState::Paused, 0, "paused by the program"));
    said.agent(KEY, 4 * s, 0, agent(AgentState::Blocked, 39, "torch.profiler"));
    let text = head_of(&said.run());
    assert!(
        text.contains("BLOCKED by torch.profiler: allocations are not seen while it holds CUPTI"),
        "{text}"
    );
    assert!(text.contains("the longest +4.0 s to now: torch.profiler held CUPTI"), "{text}");
    said.agent(KEY, 16 * s, 0, agent(AgentState::Late, 0, ""));
    let run = said.run();
    assert_eq!((run.coverage.blind.len(), run.coverage.blind_count, run.coverage.blind_ns), (2, 2, 13 * s));
    assert!(run.coverage.blind_doubt && run.coverage.partial_state && !run.coverage.late);
    let text = head_of(&run);
    let told = "covered since start, 1 allocation of 104,857,600 bytes, 0 events lost, 0 records rejected, no NVML sample, \
                blind for 13.0 s in 2 intervals, the longest +4.0 s to +16.0 s: torch.profiler held CUPTI";
    assert!(text.contains(told) && !text.contains("BLOCKED"), "{text}");
    assert!(text.contains("PARTIAL: sums and peak are not exact"), "{text}");

    // The reason of a refusal without another client; unsafe characters in it are escaped.
    said.agent(KEY, 20 * s, 0, agent(AgentState::Blocked, 15, "no fit\u{1b}[2J"));
    let text = head_of(&said.run());
    assert!(text.contains("BLOCKED, allocations are not seen: no fit"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
}

#[test]
fn where_nothing_was_ever_tracked_the_peak_is_at_no_time_before_the_process() {
    let s = 1_000_000_000;
    for is_blocked in [false, true] {
        let mut said = Said::new();
        said.agent(KEY, 40 * s, 0, device(0));
        if is_blocked {
            let state = AgentState::Blocked;
            said.agent(KEY, 40 * s, 0, Body::Agent { result: 39, state, detail: "nsys" });
            // A pool that the program reports itself is not a driver allocation: the agent has seen none.
            said.agent(
                KEY,
                40 * s,
                0,
                Body::PoolCreate { pool: 1, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework },
            );
        }
        for step in 0..20 {
            said.agent(KEY, (41 + step) * s, 0, Body::Step { number: step });
        }
        for second in 0..3 {
            said.sample((62 + 2 * second) * s, &[(KEY.pid, Ok(900 * MIB))], 0);
            said.watermark((63 + 2 * second) * s);
        }
        let run = said.run();
        let device = &run.devices[0];
        assert_eq!(run.coverage.covered, !is_blocked);
        assert_eq!(device.last.used_bytes(), Some(900 << 20));
        assert!(device.peak.time_ns >= 62 * s, "{:?}", device.peak);
        let text = head_of(&run);
        assert!(!is_blocked || !text.contains("tracked flat"), "what nobody saw is not flat: {text}");
    }
}

#[test]
fn numbers_of_a_broken_driver_are_told_in_the_right_direction() {
    for (theirs, side) in [(u64::MAX, "more"), (0, "less")] {
        let mut said = Said::new();
        said.agent(KEY, 0, 0, device(0));
        said.alloc(5, 0, 100 * MIB);
        said.sample(10, &[(KEY.pid, Ok(600 * MIB))], 0);
        said.watermark(50);
        said.host(60, KEY.pid, Body::AccountedPeak { start_ticks: 1, peak_bytes: theirs });
        let run = said.run();
        let told = run.caveats.iter().find(|caveat| caveat.code == "accounting_disagrees");
        let text = &told.expect("a caveat").text;
        assert!(
            text.contains(&format!("bytes {side} than the one shown, on ")) && text.contains(','),
            "{text}"
        );
        head_of(&run);
    }
}

#[test]
fn the_largest_numbers_of_a_hostile_agent_become_a_report() {
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    for (index, number) in
        [u64::MAX, u64::MAX - 1, 1 << 63, (1 << 63) - 1, 0].into_iter().cycle().take(200).enumerate()
    {
        for code in 0..=15 {
            let event = DriverEventKind::from_code(code);
            let time_ns = 10 + index as u64 * 1_000;
            for context in [0, 1, u32::MAX - index as u32] {
                let stamp = Stamp { time_ns, device: (index % 256) as u8, context, ..Stamp::default() };
                let body = Body::DriverEvent { bytes: number, value: number, event };
                said.builder.observe(Origin::Process(KEY), &Record { stamp, body });
            }
        }
        said.sample(500 + index as u64 * 1_000, &[(KEY.pid, Ok(number))], 0);
        said.watermark(900 + index as u64 * 1_000);
    }
    let run = said.run();
    head_of(&run);
    let groupings = gpumem_report::rules::Groupings::load("default").expect("built in");
    let report = gpumem_report::Report::new(&run, groupings, None);
    assert!(gpumem_report::json::json(&report).contains("steps"));
    gpumem_report::steps::text(&report);
    report_sums(&run);
}

/// The parts of each moment sum to its untrackable bytes, within the range of the numbers.
fn report_sums(run: &Run) {
    for moment in run.devices.iter().flat_map(|device| [&device.last, &device.peak]) {
        if let (Some(parts), Some(untrackable)) = (&moment.parts, moment.untrackable_bytes) {
            assert_eq!(parts.sum(), untrackable, "{moment:?}");
        }
    }
}

#[test]
fn steps_and_pools_are_told_with_the_run() {
    let mut said = Said::new();
    said.agent(KEY, 0, 0, device(0));
    let mut seq = 0;
    let mut say = |said: &mut Said, tag: u32, body: Body<'_>| {
        seq += 1;
        let stamp = Stamp { time_ns: 100 * seq, device: 0, seq, tag, thread: 1, ..Stamp::default() };
        said.builder.observe(Origin::Process(KEY), &Record { stamp, body });
    };
    said.agent(
        KEY,
        0,
        0,
        Body::Hello { start_ticks: 1, versions: 0, capabilities: 0, instance: 1, claims: "" },
    );
    said.builder.observe(
        Origin::Process(KEY),
        &Record { stamp: Stamp { tag: 1, ..Stamp::default() }, body: Body::Tag { path: "torch" } },
    );
    let owner = PoolOwner::Framework;
    say(&mut said, 1, Body::PoolCreate { pool: 5, parent: 0, reports_blocks: 1, owner });
    let memory = MemoryKind::Device;
    say(&mut said, 0, Body::AllocEnd { address: 1 << 40, bytes: 8 * MIB, pool: 5, took_us: 0, memory });
    let block = |at: u64, bytes: u64, phase: Phase| Body::BlockAlloc {
        address: (1 << 40) + at,
        bytes,
        pool: 5,
        use_as: (Role::Unknown, phase),
    };
    let free = |at: u64, state: FreeState| Body::BlockFree { address: (1 << 40) + at, pool: 5, state };
    for step in 0..3 {
        say(&mut said, 0, Body::Step { number: step });
        say(&mut said, 0, block(0, 4096, Phase::Forward));
        say(&mut said, 0, block(4096, 1024, Phase::Backward));
        say(&mut said, 0, block(8192, 512, Phase::Backward));
        say(&mut said, 0, free(0, FreeState::Done));
        say(&mut said, 0, free(8192, FreeState::Done));
        say(&mut said, 0, Body::PhaseBegin { phase: Phase::Optimizer });
        say(&mut said, 0, Body::PhaseBegin { phase: Phase::Forward });
        say(&mut said, 0, free(4096, if step == 2 { FreeState::Pending } else { FreeState::Done }));
    }
    say(&mut said, 0, Body::PoolState { pool: 5, reserved_bytes: 8 * MIB, used_bytes: 0, took_us: 0 });
    say(&mut said, 0, Body::PoolCheck { pool: 5, total_bytes: 7 });
    let run = said.run();
    let details = &run.devices[0].details;
    let rows = &details.iterations.rows;
    assert_eq!(
        rows.iter().map(|row| (row.first, row.last, row.count)).collect::<Vec<_>>(),
        [(0, 0, 1), (1, 1, 1)]
    );
    for row in rows {
        let level = |peak_bytes, last_bytes| Level { peak_bytes, last_bytes };
        assert_eq!((row.activations, row.gradients), (level(4096, 0), level(1024, 0)));
        assert_eq!(row.intermediate_gradients, level(512, 0));
        assert_eq!(row.pool_reserved, level(8 * MIB as i64, 8 * MIB as i64));
    }
    assert_eq!(details.iterations.open.map(|open| open.first), Some(2));
    let pool = &details.pools[0];
    assert_eq!((pool.name.as_deref(), pool.owner.as_deref()), (Some("torch"), Some("framework")));
    assert_eq!((pool.block_bytes, pool.pending_bytes, pool.allocated_bytes()), (1024, 1024, 0));
    assert_eq!((pool.idle_bytes(), pool.own), (8 * MIB as i64 - 1024, Some((8 * MIB, 0))));
    assert_eq!(pool.disagreement(), Some(7), "theirs and ours without what waits");
    let json = serde_json::to_value(&details.iterations).expect("plain data");
    assert_eq!(json["rows"][0]["gradients"], serde_json::json!([1024, 0]));
    assert!(json["rows"][0].get("inputs").is_none(), "what is nothing is left out");
}
