//! NVML samples joined with `tracked` at their own time, as short scripts.
use crate::common::joined::*;
use crate::common::*;
use gpumem_ledger::{ClosedSample, PeakGap, ProcessView, STALE_AFTER_NS};
use gpumem_wire::*;
use std::sync::Arc;

/// The gap of the peak. Its parts, which sum to it, are tested elsewhere.
fn peak_gap(s: &Script) -> Option<PeakGap> {
    let gap = s.account().peak.gap?;
    assert_eq!(gap.parts.map(|parts| parts.sum()), Some(gap.untrackable_bytes));
    Some(PeakGap { parts: None, ..gap })
}

#[test]
fn sample_is_closed_by_the_watermark_with_the_tracked_of_its_time() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    assert!(s.closed().is_empty(), "the agent has not spoken up to it");
    s.at(1200).watermark(0);
    let sample = s.only_sample();
    assert_eq!(join(&sample), exactly(100));
    assert_eq!((sample.gap_bytes(), sample.untrackable_bytes()), (Some(50), Some(50)));
    assert_eq!((sample.t0_ns, sample.t1_ns, sample.used_bytes), (1000, 1100, Ok(150)));
    assert_eq!(sum(&sample.amounts), 100);
}

#[test]
fn records_after_the_reading_do_not_count() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.at(1200).alloc(0x2000, 7);
    assert_eq!(join(&s.only_sample()), exactly(100));
}

#[test]
fn records_before_the_reading_that_come_after_it_count() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.at(500).alloc(0x2000, 7);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), exactly(107));
}

#[test]
fn change_inside_the_reading_tears_it() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.at(1040).alloc(0x2000, 7);
    s.at(1060).free(0x1000);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 7, 107));
}

#[test]
fn change_before_the_end_of_the_reading_is_told() {
    let mut s = with_hundred();
    s.sample_begin(1000);
    s.listed(KEY.pid, Some(150));
    s.at(1040).alloc(0x2000, 7); // at 1050
    s.at(1140).alloc(0x3000, 30);
    s.sample_end(1000, 1100);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 107));
}

#[test]
fn more_changes_than_are_remembered_still_bound_the_truth() {
    let mut s = with_hundred();
    s.sample_begin(1000);
    for n in 0..5000 {
        s.seq += 1;
        let stamp = Stamp { seq: s.seq, time_ns: 1001, device: 0, ..Stamp::default() };
        let body = Body::AllocEnd { address: 0x10000 + n, bytes: 1, pool: 0, took_us: 0, memory: DEV };
        s.push(stamp, body);
    }
    s.sample_end(1000, 1100);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 5100));
}

#[test]
fn block_events_do_not_tear_a_reading() {
    let mut s = with_hundred();
    s.segment(0x1000, 100, 3);
    s.sample(1000, 1100, 150);
    s.at(1040).block(0x1000, 50, 3);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), exactly(100));
}

#[test]
fn free_in_flight_through_the_whole_reading_tears_it() {
    let mut s = with_hundred();
    let begin = s.begin(0x1000);
    s.sample(1000, 1100, 150);
    s.at(1200).end(begin, 0);
    assert_eq!(join(&s.only_sample()), torn(100, 0, 100));
}

#[test]
fn free_entered_inside_the_reading_tears_it() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 50);
    s.at(1040);
    let begin = s.begin(0x1000);
    s.at(1200).end(begin, 0);
    assert_eq!(join(&s.only_sample()), torn(100, 0, 100));
}

#[test]
fn frees_that_cannot_change_tracked_do_not_tear() {
    let mut s = with_hundred();
    s.alloc_as(0x2000, 5, MemoryKind::Pinned, 0);
    s.alloc_as(0x3000, 6, MemoryKind::StreamOrdered, 5);
    s.begin(0x2000);
    s.begin(0x3000);
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), exactly(106));
}

#[test]
fn last_release_in_flight_tears_but_one_of_two_does_not() {
    let mut s = with_hundred();
    s.create(1, 30);
    s.map(0x10_0000, 30, 1);
    let release = s.say(Body::VmmRelease { handle: 1 });
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), exactly(130), "the mapping holds it");
    let unmap = s.at(1210).say(Body::VmmUnmap { address: 0x10_0000, bytes: 30 });
    s.sample(2000, 2100, 150);
    s.at(2200).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(130, 100, 130));
    s.end(unmap, 0);
    expect(&s, &["tracked 130 = direct:- 30 + direct:a 100"]);
    s.end(release, 0);
    expect(&s, &["tracked 100 = direct:a 100"]);
}

#[test]
fn call_in_flight_that_the_watermark_tells_tears() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(1050);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 100));
    s.sample(2000, 2100, 150);
    s.at(2200).watermark(2150);
    assert_eq!(join(&s.only_sample()), exactly(100), "entered after the reading");
}

#[test]
fn call_in_flight_told_before_the_reading_ended_tears() {
    let mut s = with_hundred();
    s.sample_begin(1000);
    s.listed(KEY.pid, Some(150));
    s.at(1050).watermark(900);
    s.sample_end(1000, 1100);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 100));
}

#[test]
fn call_in_flight_told_before_the_reading_began_says_nothing() {
    let mut s = with_hundred();
    s.sample_begin(1000);
    s.at(990).watermark(900);
    s.at(1000).listed(KEY.pid, Some(150));
    s.sample_end(1000, 1100);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), exactly(100));
}

#[test]
fn silent_agent_makes_the_sample_stale_after_half_a_second() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.at(1100 + STALE_AFTER_NS - 1).host(Body::Tick {});
    assert!(s.closed().is_empty());
    s.at(1100 + STALE_AFTER_NS).host(Body::Tick {});
    let sample = s.only_sample();
    assert_eq!(join(&sample), (Some(100), Some((100, 100)), false, true));
    assert_eq!(s.process().coverage.stale_samples, 1);
}

#[test]
fn process_without_agent_has_used_only() {
    let mut s = Script::new();
    s.sample_begin(1000);
    s.listed(77, Some(150));
    s.sample_end(1000, 1100);
    let mut taken = s.ledger.take_samples();
    let (key, _, sample) = taken.find(|(key, ..)| key.pid == 77).expect("closed at once");
    drop(taken);
    assert_eq!((key.pid, sample.used_bytes, sample.stale), (77, Ok(150), false));
    assert_eq!((sample.tracked_bytes, sample.gap_bytes()), (None, None));
    let snapshot = s.ledger.snapshot();
    let process = snapshot.processes.iter().find(|process| process.key.pid == 77).expect("it is known");
    assert!(!process.coverage.covered);
    assert_eq!(process.accounts[0].peak_used, Some((150, 1000)));
}

#[test]
fn reading_told_after_records_that_went_past_it_is_torn_if_tracked_had_changed() {
    let mut s = with_hundred();
    s.at(1040).alloc(0x2000, 7);
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(0);
    let sample = s.only_sample();
    assert!(sample.torn);
}

#[test]
fn reading_told_after_records_that_changed_nothing_is_exact() {
    let mut s = with_hundred();
    s.at(1040).say(Body::Step { number: 1 });
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(0);
    assert_eq!(join(&s.only_sample()), exactly(100));
}

#[test]
fn process_that_is_in_no_list_has_an_absent_reading() {
    let mut s = with_hundred();
    s.sample_begin(1000);
    s.sample_end(1000, 1100);
    s.at(1200).watermark(0);
    let sample = s.only_sample();
    assert_eq!((sample.used_bytes, sample.gap_bytes()), (Err(Absence::NotListed), None));
    assert_eq!(sample.tracked_bytes, Some(100));
}

#[test]
fn lists_that_failed_do_not_say_that_the_process_was_in_none() {
    let mut s = with_hundred();
    s.sample_begin(1000);
    s.at(1100).host(Body::SampleEnd { number: 1000, result: 999 });
    s.at(1200).watermark(0);
    assert_eq!(s.only_sample().used_bytes, Err(Absence::Unknown));
}

#[test]
fn reading_that_is_refused_keeps_its_reason() {
    let mut s = with_hundred();
    s.sample_begin(1000);
    s.listed(KEY.pid, None);
    s.sample_end(1000, 1100);
    s.at(1200).watermark(0);
    assert_eq!(s.only_sample().used_bytes, Err(Absence::NoPermission));
}

#[test]
fn readings_that_never_end_are_given_up() {
    let mut s = with_hundred();
    for t0 in 1..=100 {
        s.sample_begin(t0 * 1000);
    }
    s.listed(KEY.pid, Some(150));
    s.sample_end(100_000, 100_100);
    s.at(200_000).watermark(0);
    assert_eq!(s.only_sample().t0_ns, 100_000);
}

#[test]
fn several_readings_wait_for_one_watermark() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.sample(2000, 2100, 151);
    s.at(1500).alloc(0x2000, 7);
    s.at(2500).watermark(0);
    let closed = s.closed();
    assert_eq!(closed.iter().map(join).collect::<Vec<_>>(), [exactly(100), exactly(107)]);
}

#[test]
fn sample_after_a_loss_is_partial_until_a_resync() {
    let mut s = with_hundred();
    s.seq += 1;
    s.at(500).watermark(0);
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(0);
    assert!(s.only_sample().partial);
    s.resync(1, |s| {
        s.tag("a")
            .restate(1, Body::AllocEnd { address: 0x1000, bytes: 100, pool: 0, took_us: 0, memory: DEV });
    });
    s.sample(2000, 2100, 150);
    s.at(2200).watermark(0);
    assert!(!s.only_sample().partial);
}

#[test]
fn baseline_is_what_predates_the_agent() {
    let mut s = with_hundred();
    s.say(Body::Baseline { bytes: 30 });
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(0);
    let sample = s.only_sample();
    assert_eq!((sample.predates_bytes, sample.untrackable_bytes()), (30, Some(20)));
    expect(&s, &["tracked 100 = direct:a 100", "flags late"]);
    assert_eq!(s.account().predates_bytes, Some(30));
}

#[test]
fn late_agent_without_baseline_takes_its_first_gap_for_what_predates_it() {
    let mut s = with_hundred();
    s.control(Body::Agent { result: 0, state: AgentState::Late, detail: "" });
    assert_eq!(s.account().predates_bytes, None, "not known is not zero");
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(0);
    s.sample(2000, 2100, 155);
    s.at(2200).watermark(0);
    let untrackable: Vec<_> = s.closed().iter().map(ClosedSample::untrackable_bytes).collect();
    assert_eq!(untrackable, [Some(0), Some(5)]);
    assert_eq!(s.account().predates_bytes, Some(50));
}

#[test]
fn blocked_agent_names_its_blocker() {
    let mut s = with_hundred();
    let blocked = |detail| Body::Agent { result: 39, state: AgentState::Blocked, detail };
    s.at(500).control(blocked("nsys"));
    s.at(600).control(blocked("somebody else"));
    let by = s.process().coverage.blocked.clone().expect("blocked");
    assert_eq!((by.since_ns, by.result, by.by.as_str()), (500, 39, "somebody else"));
    s.control(Body::Agent { result: 0, state: AgentState::Covered, detail: "" });
    expect(&s, &["tracked 100 = direct:a 100"]);
}

#[test]
fn peak_gap_is_exact_when_a_sample_saw_the_peak() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(0);
    let exact =
        PeakGap { untrackable_bytes: 50, predates_bytes: 0, distance_ns: 990, exact: true, parts: None };
    assert_eq!(peak_gap(&s), Some(exact));
}

#[test]
fn peak_gap_is_carried_from_the_nearest_sample() {
    let mut s = with_hundred();
    for (t0, used) in [(1000, 150), (2000, 151), (3000, 152)] {
        s.sample(t0, t0 + 100, used);
        s.at(t0 + 200).watermark(0);
    }
    s.at(3390).alloc(0x2000, 7); // peak at 3400
    s.at(3490).free(0x2000);
    let carried =
        PeakGap { untrackable_bytes: 52, predates_bytes: 0, distance_ns: -400, exact: false, parts: None };
    assert_eq!(peak_gap(&s), Some(carried), "the last sample before the peak, not the first");
    s.sample(9000, 9100, 160);
    s.at(9200).watermark(0);
    assert_eq!(peak_gap(&s), Some(carried), "still the nearest");
    s.at(9300).alloc(0x2000, 8);
    s.sample(9400, 9500, 170);
    s.at(9600).watermark(0);
    let exact =
        PeakGap { untrackable_bytes: 62, predates_bytes: 0, distance_ns: 90, exact: true, parts: None };
    assert_eq!(peak_gap(&s), Some(exact));
}

#[test]
fn peak_gap_takes_a_later_exact_sample_over_a_torn_one() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.at(1200).watermark(1050);
    s.sample(2000, 2100, 151);
    s.at(2200).watermark(0);
    let exact =
        PeakGap { untrackable_bytes: 51, predates_bytes: 0, distance_ns: 1990, exact: true, parts: None };
    assert_eq!(peak_gap(&s), Some(exact));
}

#[test]
fn peak_gap_stays_exact_when_the_peak_moves_among_equals() {
    let mut s = with_hundred();
    s.segment(0x1000, 100, 3);
    s.sample(1000, 1100, 150);
    s.at(1190).block(0x1000, 60, 3); // equally high, but with less idle bytes
    let gap =
        PeakGap { untrackable_bytes: 50, predates_bytes: 0, distance_ns: -200, exact: true, parts: None };
    assert_eq!(peak_gap(&s), Some(gap));
}

#[test]
fn process_that_is_gone_waits_for_nobody() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.at(1200).host_as(KEY.pid, Body::ProcessGone { start_ticks: 7, status: Reading::of(9) });
    assert_eq!(join(&s.only_sample()), exactly(100));
    assert_eq!(s.process().ended, Some((1200, Some(9))));
    s.sample_begin(2000);
    s.sample_end(2000, 2100);
    assert!(s.closed().is_empty(), "it is not there any more");
}

#[test]
fn samples_after_the_agent_said_bye_are_stale() {
    let mut s = with_hundred();
    s.at(900).control(Body::Bye { reason: ByeReason::Requested });
    s.sample(1000, 1100, 150);
    let sample = s.only_sample();
    assert_eq!(join(&sample), (Some(100), Some((100, 100)), false, true));
    // It is allocated again and waits again.
    s.at(1200).control(Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance: 0, claims: "" });
    s.sample(2000, 2100, 150);
    assert!(s.closed().is_empty());
    s.at(2040).alloc(0x2000, 7);
    s.at(2200).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 107));
}

#[test]
fn sample_that_ended_before_the_bye_is_not_stale() {
    let mut s = with_hundred();
    s.sample(1000, 1100, 150);
    s.at(1200).control(Body::Bye { reason: ByeReason::Exit });
    assert_eq!(join(&s.only_sample()), exactly(100));
}

/// A reading with device memory `before` and `after` the list, which lists this process with 150 bytes.
fn device_reading(s: &mut Script, t0: u64, before: u64, after: u64, used: Option<u64>, result: u16) {
    memory_reading(s, t0, (before, after), used, result, false);
}

fn memory_reading(
    s: &mut Script,
    t0: u64,
    (before, after): (u64, u64),
    used: Option<u64>,
    result: u16,
    unified: bool,
) {
    let reserved_bytes = Reading(None);
    let memory = |used_bytes| Body::DeviceSample { used_bytes, free_bytes: 0, reserved_bytes, unified };
    s.sample_begin(t0);
    s.host(memory(before));
    s.listed(KEY.pid, used);
    s.host(memory(after));
    s.at(t0 + 100).host(Body::SampleEnd { number: t0, result });
}

#[test]
fn unaccounted_needs_readings_that_agree() {
    let mut s = with_hundred();
    let unaccounted =
        |s: &Script| s.ledger.snapshot().devices[0].agreed.map(|agreed| agreed.unaccounted_bytes);
    device_reading(&mut s, 1000, 500, 500, Some(150), 0);
    assert_eq!(unaccounted(&s), Some(350));
    device_reading(&mut s, 2000, 500, 501, Some(150), 0);
    assert_eq!(unaccounted(&s), None);
    device_reading(&mut s, 3000, 100, 100, Some(150), 0);
    assert_eq!(unaccounted(&s), Some(-50), "signed");
    device_reading(&mut s, 4000, 500, 500, None, 0);
    assert_eq!(unaccounted(&s), None, "a reading is missing");
    device_reading(&mut s, 5000, 500, 500, Some(150), 7);
    assert_eq!(unaccounted(&s), None, "the list failed");
}

#[test]
fn readings_share_the_list_of_processes_while_it_does_not_change() {
    let mut s = with_hundred();
    let mut list = |t0, used| {
        device_reading(&mut s, t0, 500, 500, Some(used), 0);
        let listed = s.ledger.listed(0, t0).expect("no memory changed");
        Arc::clone(listed)
    };
    let [first, equal, changed] = [(1000, 150), (2000, 150), (3000, 160)].map(|(t0, used)| list(t0, used));
    assert!(Arc::ptr_eq(&first, &equal));
    assert_eq!((&*first, &*changed), (&[(KEY, 150)][..], &[(KEY, 160)][..]));
}

#[test]
fn view_of_a_process_without_an_agent_takes_the_memory_of_an_unused_one() {
    let (mut s, mut t0_ns) = (Script::new(), 0);
    let mut view = |used| {
        t0_ns += 1000;
        s.sample_begin(t0_ns);
        s.listed(77, Some(used));
        s.sample_end(t0_ns, t0_ns + 100);
        let processes = s.ledger.snapshot().processes;
        Arc::clone(processes.iter().find(|process| process.key.pid == 77).expect("listed"))
    };
    let used = |view: &Arc<ProcessView>| view.accounts[0].latest.as_ref().map(|sample| sample.used_bytes);
    let kept: Vec<_> = (1..=5).map(&mut view).collect();
    assert!(kept.iter().zip(1..).all(|(view, bytes)| used(view) == Some(Ok(bytes))), "a view never changes");
    drop(kept);
    let places = [6, 7, 8, 9].map(|bytes| {
        let view = view(bytes);
        assert_eq!(used(&view), Some(Ok(bytes)));
        Arc::as_ptr(&view)
    });
    assert_eq!(places[..2], places[2..], "two places, in turn");
}

#[test]
fn snapshots_share_the_cells_of_a_process_until_they_change() {
    let mut s = with_hundred();
    let view = |s: &Script| Arc::clone(&s.ledger.snapshot().processes[0]);
    let first = view(&s);
    s.watermark(0);
    let heard = view(&s);
    assert!(!Arc::ptr_eq(&first, &heard) && Arc::ptr_eq(&first.cells, &heard.cells));
    s.tag = 7;
    s.alloc(0x2000, 50);
    let unnamed = view(&s);
    assert_eq!(unnamed.cells.len(), first.cells.len() + 1);
    s.push(Stamp { tag: 7, ..Stamp::default() }, Body::Tag { path: "late" });
    let tags = |view: &ProcessView| view.cells.last().and_then(|cell| cell.tag.as_deref().map(str::to_owned));
    assert_eq!(tags(&unnamed).as_deref(), Some("(tag 7, its name was lost)"));
    assert_eq!(tags(&view(&s)).as_deref(), Some("late"));
}

#[test]
fn unified_memory_that_moved_during_the_list_is_compared_as_it_was_after_it() {
    let mut s = with_hundred();
    let rest_of_host =
        |s: &Script| s.ledger.snapshot().devices[0].agreed.map(|agreed| agreed.unaccounted_bytes);
    memory_reading(&mut s, 1000, (500, 503), Some(150), 0, true);
    assert_eq!(rest_of_host(&s), Some(353));
    let reading = s.ledger.snapshot().devices[0].latest.expect("a reading");
    assert!(reading.unified && reading.used_bytes == 503);
    memory_reading(&mut s, 2000, (500, 503), None, 0, true);
    assert_eq!(rest_of_host(&s), None, "a process has no number");
    memory_reading(&mut s, 3000, (500, 503), Some(150), 7, true);
    assert_eq!(rest_of_host(&s), None, "the list failed");
}

#[test]
fn readings_without_a_device_or_a_begin_are_ignored() {
    let mut s = with_hundred();
    let stamp = Stamp { device: 200, time_ns: 5, ..Stamp::default() };
    for body in [
        Body::SampleBegin { number: 1 },
        Body::DeviceSample { used_bytes: 1, free_bytes: 1, reserved_bytes: Reading(None), unified: false },
        Body::SampleEnd { number: 1, result: 0 },
    ] {
        s.ledger.observe(gpumem_ledger::Origin::Host, &Record { stamp, body });
    }
    s.listed(KEY.pid, Some(1));
    s.sample_end(77, 100);
    s.at(1000).watermark(0);
    assert!(s.closed().is_empty());
    expect(&s, &["tracked 100 = direct:a 100"]);
}
