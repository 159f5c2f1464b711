//! Parts and steps of the gap when records are lost, late, torn or too many.
use crate::common::gap::*;
use crate::common::*;
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_wire::*;

#[test]
fn a_sample_that_is_not_sharp_has_parts_and_books_no_step() {
    let torn = |s: &mut Gap| {
        s.context(100, "", 1);
        s.used(200, 498);
        s.load(300, "net", 7, 10);
        s.0.sample(400 * MS, 401 * MS, 510 * MIB);
        s.0.at(400 * MS + 1000).alloc(0x1000, 2 << 20);
        s.0.at(402 * MS).watermark(0);
    };
    check_gap(
        torn,
        &["parts 512 = context 498 + unexplained 12", "at 100: 498 = context 498, context created measured"]
            .map(
                |line| {
                    if line.starts_with("parts") { "parts 510 = context 498 + unexplained 12" } else { line }
                },
            ),
    );
    check_gap(
        |s| {
            torn(s);
            s.used(500, 512);
        },
        &[
            "parts 510 = context 498 + modules 10 + unexplained 2",
            "at 100: 498 = context 498, context created measured",
            "at 300: 12 = modules 10 + unexplained 2, module loaded bound @net, expected 10",
        ],
    );
}

#[test]
fn a_load_that_may_have_been_under_way_is_not_cut_in_two() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.0.sample(395 * MS, 396 * MS, 505 * MIB);
            s.load(400, "net", 7, 10); // the call may have been entered before 395
            s.0.at(410 * MS).watermark(0);
            s.used(500, 508);
        },
        &[
            "parts 508 = context 498 + modules 10",
            "at 100: 498 = context 498, context created measured",
            "at 400: 10 = modules 10, module loaded bound @net",
        ],
    );
}

#[test]
fn what_a_late_agent_finds_has_no_cause() {
    check_gap(
        |s| {
            s.0.control(Body::Agent { result: 0, state: AgentState::Late, detail: "" });
            s.0.say(Body::ContextCreate { handle: 1 });
            s.alloc(50, 0x1000, 3 << 20);
            s.used(100, 600);
            s.load(200, "net", 7, 10);
            s.used(300, 610);
            s.0.at(400 * MS).free(0x1000);
            s.used(500, 606);
        },
        &["parts 9 = modules 10 + rounding -1", "at 200: 10 = modules 10, module loaded bound @net"],
    );
}

#[test]
fn a_baseline_that_is_told_later_is_no_step() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 598);
            s.0.control(Body::Baseline { bytes: 100 << 20 });
            s.used(300, 598);
            s.used(400, 600);
        },
        &[
            "parts 500 = context 598 + unexplained -98",
            "at 100: 598 = context 598, context created measured",
            "at 400: 2 = unexplained 2, between events",
        ],
    );
}

/// Memory that is adopted from a program's own list is tracked from then on, and causes no step of the gap.
#[test]
fn what_is_taken_over_is_no_step() {
    let older = |s: &mut Gap, ms: u64, body: Body<'_>| {
        s.0.at(ms * MS - 10).stamp.flags = Flags::OLDER;
        let seq = s.0.say(body);
        s.0.stamp.flags = Flags::default();
        seq
    };
    let taken = |mib: u64| Body::AllocEnd {
        address: mib << 32,
        bytes: mib << 20,
        pool: 0,
        took_us: 0,
        memory: MemoryKind::Device,
    };
    let mapped = |mib: u64| {
        let (address, bytes) = (mib << 32, mib << 20);
        [
            Body::VmmCreate { handle: address, bytes, references: 0, memory: MemoryKind::Vmm },
            Body::VmmMap { address, bytes, handle: address },
        ]
    };
    let late = |s: &mut Gap| s.0.control(Body::Agent { result: 0, state: AgentState::Late, detail: "" });
    // Adopted between two samples; before the first one; while the first one waits for the agent's records.
    for (over, samples) in [(150, [100, 200]), (50, [100, 200]), (100, [99, 200])] {
        check_gap(
            |s| {
                late(s);
                s.0.say(Body::ContextCreate { handle: 1 });
                s.0.sample(samples[0] * MS, samples[0] * MS + MS / 2, 600 << 20);
                older(s, over, taken(40));
                for body in mapped(30) {
                    older(s, over, body);
                }
                s.0.at((over.max(samples[0]) + 1) * MS).watermark(0);
                s.used(samples[1], 600);
                let account = s.0.account();
                assert_eq!((account.predates_bytes, account.tracked_bytes), (Some(530 << 20), 70 << 20));
                let closed = s.0.closed();
                let gaps: Vec<_> = closed.iter().map(|sample| sample.untrackable_bytes()).collect();
                assert_eq!(gaps, [Some(0), Some(0)], "taken over at {over}");
                s.0.at(250 * MS).free(40 << 32);
                s.used(300, 560);
                // The adoption of the other allocation is revoked when it is unmapped.
                let begin_seq = older(s, 350, Body::VmmUnmap { address: 30 << 32, bytes: 30 << 20 });
                s.0.say(Body::FreeEnd { begin_seq, result: 0 });
                s.used(400, 560);
                s.load(500, "net", 7, 10);
                s.used(600, 570);
                let account = s.0.account();
                assert_eq!((account.predates_bytes, account.tracked_bytes), (Some(560 << 20), 0));
            },
            &["parts 10 = modules 10", "at 500: 10 = modules 10, module loaded bound @net"],
        );
    }
}

/// Only NVML shows the size of freed memory that is older than the agent.
#[test]
fn what_is_older_than_a_late_agent_may_go() {
    check_gap(
        |s| {
            s.0.control(Body::Agent { result: 0, state: AgentState::Late, detail: "" });
            s.0.say(Body::ContextCreate { handle: 1 });
            s.used(100, 600);
            s.alloc(150, 0x1000, 20 << 20);
            s.used(200, 620);
            s.0.at(250 * MS).free(0x9000);
            s.used(300, 580);
            let account = s.0.account();
            assert_eq!((account.predates_bytes, account.tracked_bytes), (Some(560 << 20), 20 << 20));
            // Other events that reduce the gap keep their causes.
            s.load(400, "net", 7, 10);
            s.used(450, 590);
            s.unload(500, 7);
            s.used(550, 580);
            // Two frees between two samples, one of known memory.
            s.0.at(600 * MS).free(0x1000);
            s.0.at(601 * MS).free(0xa000);
            s.used(650, 500);
            let account = s.0.account();
            assert_eq!((account.predates_bytes, account.tracked_bytes), (Some(500 << 20), 0));
            // Unknown mapped memory, too.
            let unmap = s.0.at(700 * MS).say(Body::VmmUnmap { address: 0xb000, bytes: 20 << 20 });
            s.0.say(Body::FreeEnd { begin_seq: unmap, result: 0 });
            let release = s.0.say(Body::VmmRelease { handle: 9 });
            s.0.say(Body::FreeEnd { begin_seq: release, result: 0 });
            s.used(750, 480);
            assert_eq!(s.0.account().predates_bytes, Some(480 << 20));
            assert_eq!(s.0.process().odd, Default::default(), "nothing odd");
        },
        &[
            "parts 0 = 0",
            "at 400: 10 = modules 10, module loaded bound @net",
            "at 500: -10 = modules -10, module unloaded bound",
        ],
    );
}

#[test]
fn nothing_is_booked_across_a_loss() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.0.seq += 5;
            s.load(300, "net", 7, 10);
            s.used(400, 520);
            s.0.resync(0, |_| {});
            s.used(500, 520);
            s.load(600, "net", 8, 4);
            s.used(700, 524);
        },
        &[
            "parts 524 = context 498 + modules 4 + unexplained 22",
            "at 100: 498 = context 498, context created measured",
            "at 500: 22 = unexplained 22, history lost @net",
            "at 600: 4 = modules 4, module loaded bound @net",
        ],
    );
}

#[test]
fn nothing_is_booked_for_a_process_whose_beginning_is_lost() {
    check_gap(
        |s| {
            s.0.seq = 5;
            s.context(100, "", 1);
            s.0.resync(0, |_| {});
            s.used(200, 498);
            s.used(300, 500);
        },
        &["parts 500 = unexplained 500", "at 300: 2 = unexplained 2, between events"],
    );
}

#[test]
fn a_device_that_is_named_after_a_loss_has_lost_its_beginning() {
    let mut s = Script::new();
    let other = ProcessKey { pid: 7, start_ticks: 7 };
    let mut say =
        |stamp: Stamp, body: Body<'_>| s.ledger.observe(Origin::Process(other), &Record { stamp, body });
    let at = |time_ns| Stamp { device: 0, time_ns, ..Stamp::default() };
    say(at(10), Body::ResyncBegin { epoch: 1, after_seq: 5 });
    say(at(20), device(9));
    say(at(30), Body::ResyncEnd { epoch: 1, head_seq: 5, rows: 0 });
    say(at(40), Body::Watermark { last_seq: 5, in_flight_since_ns: 0 });
    for ms in [100, 200] {
        s.sample_begin(ms * MS);
        s.listed(other.pid, Some((400 + ms) * MIB));
        s.sample_end(ms * MS, ms * MS + 10);
        let done = Stamp { time_ns: (ms + 10) * MS, ..Stamp::default() };
        let body = Body::Watermark { last_seq: 5, in_flight_since_ns: 0 };
        s.ledger.observe(Origin::Process(other), &Record { stamp: done, body });
    }
    let snapshot = s.ledger.snapshot();
    let account =
        &snapshot.processes.iter().find(|process| process.key == other).expect("it spoke").accounts[0];
    let steps: Vec<String> = account.steps.iter().map(step_line).collect();
    assert_eq!(steps, ["at 200: 100 = unexplained 100, between events"]);
}

#[test]
fn nothing_is_booked_while_the_agent_was_blind() {
    check_gap(
        |s| {
            s.context(100, "", 1);
            s.used(200, 498);
            s.0.at(300 * MS).control(Body::Agent { result: 0, state: AgentState::Paused, detail: "" });
            s.used(400, 600);
            s.0.at(450 * MS).control(Body::Agent { result: 0, state: AgentState::Covered, detail: "" });
            s.load(460, "net", 7, 10);
            s.used(500, 610);
            s.used(600, 611);
            s.end(700, 1, DestroyScope::Context);
            s.used(1300, 113);
        },
        &[
            "parts 113 = unexplained 113",
            "at 100: 498 = context 498, context created measured",
            "at 400: 102 = unexplained 102, blind",
            "at 500: 10 = unexplained 10, blind @net",
            "at 600: 1 = unexplained 1, between events @net, unseen modules 10",
            "at 700: -498 = context -498, context destroyed measured",
        ],
    );
}

#[test]
fn another_program_in_the_process_takes_its_contexts_with_it() {
    check_gap(
        |s| {
            let hello =
                |instance| Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance, claims: "" };
            s.0.control(hello(1));
            s.context(100, "", 1);
            s.load(110, "", 7, 2);
            s.used(200, 500);
            s.0.at(300 * MS).control(hello(2));
            s.0.seq = 0;
            s.0.push(Stamp { device: 0, context: H100, ..Stamp::default() }, device(9));
            s.used(350, 0);
            s.context(400, "", 1);
            s.used(500, 498);
        },
        &[
            "parts 498 = context 498",
            "at 100: 500 = context 498 + modules 2, context created measured",
            "at 350: -500 = context -498 + modules -2, history lost",
            "at 400: 498 = context 498, context created measured",
        ],
    );
}

#[test]
fn an_unknown_device_has_no_model_of_stacks() {
    let mut s = Script::new();
    s.say(Body::ContextCreate { handle: 1 });
    s.sample(100 * MS, 101 * MS, 498 * MIB);
    s.at(200 * MS).say(Body::DriverEvent { bytes: 0, value: 4096, event: DriverEventKind::StackLimit });
    s.sample(300 * MS, 301 * MS, 600 * MIB);
    s.at(310 * MS).watermark(0);
    let account = s.account();
    assert_eq!(step_line(&account.steps[1]), "at 200: 102 = unexplained 102, stack limit, expected 0");
}

#[test]
fn the_gap_of_the_peak_has_the_parts_of_its_sample() {
    let mut s = Gap::new();
    s.context(100, "", 1);
    s.used(200, 498);
    s.alloc(210, 0x1000, 64 << 20);
    s.0.at(220 * MS).free(0x1000);
    s.load(300, "", 7, 10);
    s.used(1000, 508);
    let gap = s.0.account().peak.gap.expect("a gap");
    let parts = gap.parts.expect("parts");
    assert_eq!(parts_line(&parts), "498 = context 498");
    assert_eq!(parts_line(&s.0.account().parts.expect("parts")), "508 = context 498 + modules 10");
}

/// A process without an agent has no parts.
#[test]
fn without_an_agent_nothing_is_split() {
    let mut s = Script::new();
    s.sample_begin(1000);
    s.listed(77, Some(500));
    s.sample_end(1000, 1100);
    let snapshot = s.ledger.snapshot();
    let other = snapshot.processes.iter().find(|process| process.key.pid == 77).expect("listed");
    assert_eq!((other.accounts[0].parts, other.accounts[0].steps.len()), (None, 0));
}

#[test]
fn small_steps_are_one_and_all_still_sum_to_the_gap() {
    let mut s = Gap::new();
    let mut mib = 0;
    for n in 0..700 {
        mib += 1 + (n * 37) % 101;
        s.used(100 + n * 100, mib);
    }
    let account = s.0.account();
    assert_eq!(account.steps.len(), 257);
    let (smaller, large) = account.steps.split_first().expect("steps");
    assert_eq!((smaller.cause.as_str(), smaller.events), ("smaller steps", 700 - 256));
    assert!(large.iter().all(|step| step.bytes >= 64 << 20), "the largest stay");
    assert!(large.is_sorted_by_key(|step| step.time_ns));
    let sum: i64 = account.steps.iter().map(|step| step.bytes).sum();
    assert_eq!(sum, (mib * MIB) as i64);
}

#[test]
fn more_events_than_are_kept_leave_their_step_unexplained() {
    let mut s = Gap::new();
    s.context(1, "", 1);
    s.used(100, 498);
    for n in 0..1100 {
        s.load(200 + n, "", n, 2);
    }
    s.used(2000, 498 + 2200);
    s.load(2100, "", 5000, 2);
    s.used(2200, 498 + 2202);
    let account = s.0.account();
    let lines: Vec<String> = account.steps.iter().skip(1).map(step_line).collect();
    assert_eq!(
        lines,
        ["at 2000: 2200 = unexplained 2200, events lost", "at 2100: 2 = modules 2, module loaded bound"]
    );
}

fn is_late(s: &mut Gap) {
    s.0.control(Body::Agent { result: 0, state: AgentState::Late, detail: "" });
    s.0.say(Body::ContextCreate { handle: 1 });
}

/// Adopts memory that PyTorch had before, booked at `ms`.
fn is_taken_over(s: &mut Gap, ms: u64, mib: u64) {
    s.0.at(ms * MS - 10).stamp.flags = Flags::OLDER;
    s.0.alloc(mib << 32, mib * MIB);
    s.0.stamp.flags = Flags::default();
}

/// Booking a list takes some ms, and a reading may begin meanwhile: the first one, or a later one.
#[test]
fn a_reading_may_begin_while_a_list_is_taken_over() {
    for has_one_before in [false, true] {
        let mut s = Gap::new();
        is_late(&mut s);
        if has_one_before {
            s.used(50, 600);
        }
        is_taken_over(&mut s, 90, 40);
        s.0.sample_begin(100 * MS);
        s.0.listed(KEY.pid, Some(600 * MIB));
        is_taken_over(&mut s, 101, 30);
        s.0.sample_end(100 * MS, 102 * MS);
        s.0.at(103 * MS).watermark(0);
        s.used(200, 600);
        let account = s.0.account();
        let told = (account.predates_bytes, account.tracked_bytes);
        assert_eq!(told, (Some(530 << 20), 70 << 20), "one before: {has_one_before}");
        let gaps: Vec<_> = s.0.closed().iter().map(|sample| sample.untrackable_bytes()).collect();
        assert!(gaps.iter().all(|gap| *gap == Some(0)), "one before: {has_one_before}: {gaps:?}");
        assert!(account.steps.is_empty(), "{:?}", account.steps);
    }
}

/// Memory that is allocated during the first reading may or may not be in NVML's number.
#[test]
fn what_predates_is_taken_from_a_sample_that_is_certain() {
    let mut s = Gap::new();
    is_late(&mut s);
    s.0.sample_begin(100 * MS);
    s.0.listed(KEY.pid, Some(620 * MIB));
    s.alloc(101, 0x1000, 20 << 20);
    s.0.sample_end(100 * MS, 102 * MS);
    s.0.at(103 * MS).watermark(0);
    assert!(s.0.only_sample().torn);
    s.used(200, 620);
    let account = s.0.account();
    assert_eq!((account.predates_bytes, account.tracked_bytes), (Some(600 << 20), 20 << 20));
    assert_eq!(s.0.only_sample().untrackable_bytes(), Some(0));
}

/// Lost rows of the list that a resync restates are tracked from then on like the others.
#[test]
fn what_was_taken_over_and_lost_is_taken_over_by_a_resync() {
    let mut s = Gap::new();
    is_late(&mut s);
    s.used(100, 600);
    is_taken_over(&mut s, 150, 40);
    let first = s.0.seq;
    s.0.seq += 1; // lost: an allocation of 30 MiB
    s.0.at(151 * MS).watermark(0);
    let flags = Flags::RESTATED.with(Flags::OLDER);
    let body = |mib: u64| Body::AllocEnd {
        address: mib << 32,
        bytes: mib << 20,
        pool: 0,
        took_us: 0,
        memory: MemoryKind::Device,
    };
    let device = s.0.stamp.device;
    for _ in 0..2 {
        s.0.resync(2, |s| {
            let stamp = Stamp { device, flags, ..Stamp::default() };
            s.push(Stamp { seq: first, time_ns: 150 * MS, ..stamp }, body(40));
            s.push(Stamp { seq: first + 1, time_ns: 150 * MS + 10, ..stamp }, body(30));
        });
    }
    s.used(200, 600);
    let account = s.0.account();
    assert_eq!((account.predates_bytes, account.tracked_bytes), (Some(530 << 20), 70 << 20));
}

/// The agent reports that all of PyTorch's memory was adopted. Its handles, and memory of other allocators, are still unknown.
#[test]
fn what_is_older_and_not_pytorchs_is_not_odd() {
    let mut s = Gap::new();
    is_late(&mut s);
    s.used(100, 600);
    s.0.at(150 * MS).say(Body::Baseline { bytes: 0 });
    let release = s.0.at(200 * MS).say(Body::VmmRelease { handle: 9 });
    s.0.say(Body::FreeEnd { begin_seq: release, result: 0 });
    s.0.free(0xd000);
    // Old memory may also be mapped or retained: NCCL does that to register a buffer.
    s.0.say(Body::VmmRetain { handle: 8, address: 0xb000 });
    s.0.say(Body::VmmMap { address: 0xc000, bytes: 20 << 20, handle: 7 });
    assert_eq!(s.0.process().odd, Default::default());
}
