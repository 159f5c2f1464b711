//! Samples as live sources produce them: watermarks that close them, records of several threads, calls that were entered before
//! and return after, readings whose records arrive late, losses.
use crate::common::joined::*;
use crate::common::*;
use gpumem_ledger::STALE_AFTER_NS;
use gpumem_wire::*;

fn took(s: &mut Script, address: u64, bytes: u64, took_us: u16) {
    s.say(Body::AllocEnd { address, bytes, pool: 0, took_us, memory: DEV });
}

#[test]
fn allocation_that_was_entered_in_the_reading_and_returned_after_it_tears_it() {
    for spoke_before in [false, true] {
        let mut s = with_hundred();
        if spoke_before {
            s.at(500).watermark(0); // samples of such an agent are closed by watermarks
        }
        s.sample(10_000, 11_000, 150);
        took(s.at(12_000), 0x2000, 7, 2); // entered at 10,010
        took(s.at(13_000), 0x3000, 9, 1); // entered at 12,010: after the reading
        s.at(14_000).watermark(0);
        assert_eq!(join(&s.only_sample()), torn(100, 100, 107), "{spoke_before}");
    }
}

#[test]
fn allocation_that_took_longer_than_can_be_said_may_be_in_any_reading() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.sample(10_000, 11_000, 150);
    took(s.at(90_000_000), 0x2000, 7, u16::MAX);
    s.watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 107));
}

#[test]
fn allocation_entered_before_the_end_of_the_reading_is_known() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.sample_begin(10_000);
    took(s.at(12_000), 0x2000, 7, 2); // returned at 12,010, entered at 10,010; the reading ends between
    s.listed(KEY.pid, Some(150));
    s.sample_end(10_000, 11_000);
    s.at(14_000).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 107));
}

#[test]
fn allocation_may_be_charged_before_a_free_that_was_recorded_earlier() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.sample(10_000, 20_000, 207);
    s.at(11_990).free(0x1000); // one thread, from 12,000 to 12,010
    took(s.at(15_990), 0x2000, 7, 5); // another: entered at 11,000, returned at 16,000
    took(s.at(18_000), 0x3000, 9, 1); // entered after the others had returned
    s.at(21_000).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 0, 107));
}

#[test]
fn reading_that_is_told_of_late_has_what_overtaking_threads_did() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.at(1_990).alloc(0x2000, 7); // numbered before the reading, but its thread saw the clock at 2000
    s.at(1_090).alloc(0x3000, 11); // at 1100
    s.at(2_000).watermark(0);
    s.sample(1_150, 1_200, 268);
    s.at(2_100).watermark(0);
    let sample = s.only_sample();
    let (low, high) = sample.tracked_range.expect("covered");
    assert!(sample.torn && low == 100 && high == 118, "{low} {high}");
}

#[test]
fn sample_waits_for_a_call_that_is_under_way_but_not_for_ever() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.sample(10_000, 11_000, 150);
    s.at(14_000).watermark(10_500);
    assert!(s.ledger.take_samples().next().is_none(), "its record is going to say how much");
    took(s.at(18_000), 0x2000, 7, 8); // entered at 10,000
    s.at(19_000).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 107));
    s.sample(30_000, 31_000, 157);
    s.at(40_000).watermark(32_000); // entered after the reading
    assert_eq!(join(&s.only_sample()), exactly(107));
    s.sample(50_000, 51_000, 157);
    s.at(400_000_000).watermark(50_500);
    assert_eq!(join(&s.only_sample()), torn(107, 107, 107), "how much is not known");
}

#[test]
fn vmm_handle_that_was_being_made_tears_too() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.sample(10_000, 11_000, 150);
    s.at(12_000).stamp.context = 2;
    s.create(0xabc, 7);
    s.watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 107));
}

#[test]
fn what_a_pool_grew_by_may_be_charged_since_the_call_that_made_it_grow() {
    let memory = MemoryKind::StreamOrdered;
    for told_late in [false, true] {
        let mut s = with_hundred();
        s.pool(5, 0, false, PoolOwner::Driver);
        s.state(5, 50);
        s.at(500).watermark(0);
        if !told_late {
            s.sample(10_000, 11_500, 250);
        }
        s.at(10_990).say(Body::AllocEnd { address: 0x2000, bytes: 7, pool: 5, took_us: 1, memory });
        s.at(11_990).alloc_as(0x3000, 60, memory, 5); // grows by 17, as far as known
        s.at(13_990).say(Body::PoolState { pool: 5, reserved_bytes: 114, used_bytes: 67, took_us: 4 }); // grows by 47 more
        if told_late {
            s.sample(10_000, 11_500, 250);
        }
        s.at(15_000).watermark(0);
        assert_eq!(join(&s.only_sample()), torn(150, 150, 197), "{told_late}");
        s.sample(16_000, 17_000, 250);
        s.at(17_500).say(Body::PoolState { pool: 5, reserved_bytes: 80, used_bytes: 67, took_us: 3 });
        s.at(18_000).watermark(0);
        assert_eq!(join(&s.only_sample()), torn(214, 180, 214), "nor may what it has lost be there still");
        s.sample(20_000, 21_000, 250);
        s.at(22_990).say(Body::AllocEnd { address: 0x4000, bytes: 13, pool: 5, took_us: 3, memory }); // it fits
        s.at(24_000).watermark(0);
        assert_eq!(join(&s.only_sample()), exactly(180));
    }
}

#[test]
fn record_that_another_thread_overtook_counts_at_its_own_time() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.sample(1000, 1100, 150);
    s.at(1190).alloc(0x2000, 7); // at 1200, after the reading
    s.at(1040).alloc(0x3000, 11); // at 1050, during the reading
    assert!(s.closed().is_empty(), "only a watermark says that nothing older will come");
    s.at(1300).watermark(0);
    let sample = s.only_sample();
    assert_eq!((sample.tracked_bytes, sample.torn), (Some(100), true));
    let (low, high) = sample.tracked_range.expect("covered");
    assert!(low == 100 && high >= 111, "{low} {high}");
}

#[test]
fn forgotten_process_leaves_the_others_as_they_were() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    for pid in [900, 901, 902] {
        let other = gpumem_ledger::ProcessKey { pid, start_ticks: 7 };
        let stamp = Stamp { time_ns: 500, device: 0, ..Stamp::default() };
        let body = Body::Watermark { last_seq: 0, in_flight_since_ns: 0 };
        s.ledger.observe(gpumem_ledger::Origin::Process(other), &Record { stamp, body });
    }
    s.sample_begin(1000);
    for pid in [KEY.pid, 900, 901, 902] {
        s.listed(pid, Some(150));
    }
    s.sample_end(1000, 1100);
    let keys = |s: &Script| -> Vec<u32> {
        s.ledger.snapshot().processes.iter().map(|process| process.key.pid).collect()
    };
    s.ledger.remove_process(gpumem_ledger::ProcessKey { pid: 901, start_ticks: 7 });
    s.ledger.remove_process(gpumem_ledger::ProcessKey { pid: 4, start_ticks: 4 });
    let mut left = vec![KEY.pid, 900, 902];
    left.sort_unstable();
    assert_eq!(keys(&s), left);
    // Waiting samples are still closed as stale, the moved one too.
    s.at(1100 + STALE_AFTER_NS + 1).host(Body::Tick {});
    let mut closed: Vec<u32> = s.ledger.take_samples().map(|(key, ..)| key.pid).collect();
    closed.sort_unstable();
    assert_eq!(closed, left);
}

#[test]
fn reading_that_is_told_of_late_has_the_book_of_its_own_time() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.at(1490).tag("b").alloc(0x2000, 7); // at 1500
    s.at(1590).free(0x1000); // entered at 1600, returned at 1610
    s.at(1690).tag("c").alloc(0x3000, 11); // at 1700
    s.at(1790).watermark(0);
    for (t0, t1, expected) in [
        (1400, 1450, exactly(100)),
        (1550, 1599, exactly(107)),
        (1605, 1606, torn(107, 7, 107)), // the free was in flight
        (1450, 1650, torn(100, 7, 107)),
        (1620, 1690, exactly(7)),
        (1650, 1750, torn(7, 7, 18)),
    ] {
        s.at(1800);
        let now = s.time_ns;
        s.sample_begin(t0);
        s.listed(KEY.pid, Some(150));
        s.sample_end(t0, t1);
        s.at(now + 1).watermark(0);
        let sample = s.only_sample();
        assert_eq!(join(&sample), expected, "[{t0}, {t1}]");
        assert_eq!(sum(&sample.amounts), sample.tracked_bytes.expect("covered"));
    }
}

#[test]
fn reading_of_long_ago_is_partial() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.at(1_000_000_000).alloc(0x2000, 7);
    s.at(2_000_000_000).alloc(0x3000, 11);
    s.sample(900_000_000, 900_000_100, 150);
    s.at(2_000_000_100).watermark(0);
    let sample = s.only_sample();
    assert!(sample.torn && sample.partial, "118 were not there then, and nobody knows how much was");
}

#[test]
fn reading_of_long_ago_does_not_claim_blocks_that_came_later() {
    let mut s = with_hundred();
    s.pool(9, 0, true, PoolOwner::Framework);
    s.segment(0x1000, 100, 9);
    s.at(500).watermark(0);
    s.at(1_000_000_000).block(0x1000, 7, 9);
    s.at(2_000_000_000).block(0x1010, 11, 9);
    s.sample(900_000_000, 900_000_100, 150);
    s.at(2_000_000_100).watermark(0);
    let sample = s.only_sample();
    assert_eq!(sample.tracked_bytes, Some(100), "blocks lie in it");
    assert!(sample.partial, "how much of it was idle then, nobody knows: {sample:?}");
}

#[test]
fn sample_that_the_lost_records_may_belong_into_is_partial() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.sample(1000, 1100, 150);
    s.seq += 4; // four lost records
    s.at(1200).watermark(0);
    let sample = s.only_sample();
    assert!(sample.partial, "{sample:?}");
}

#[test]
fn agent_that_was_never_let_in_knows_nothing_of_tracked() {
    let mut s = Script::new();
    let agent = |state| Body::Agent { result: 39, state, detail: "nsys" };
    s.at(10).control(agent(AgentState::Blocked));
    s.at(500).watermark(0);
    s.sample(1000, 1100, 150);
    let sample = s.only_sample();
    assert_eq!((sample.tracked_bytes, sample.gap_bytes(), sample.used_bytes), (None, None, Ok(150)));
    let coverage = s.process().coverage;
    assert!(!coverage.covered && coverage.blocked.is_some());
    // If its agent can use CUPTI only later, the process is late: older memory predates the agent.
    s.at(1200).control(agent(AgentState::Late));
    s.at(1300).alloc(0x1000, 100);
    s.at(1400).watermark(0);
    s.sample(1500, 1600, 250);
    s.at(1700).watermark(0);
    let sample = s.only_sample();
    assert_eq!((sample.tracked_bytes, sample.predates_bytes), (Some(100), 150));
}

#[test]
fn frees_of_what_was_lost_are_no_contradiction() {
    let mut s = with_hundred();
    s.seq += 5;
    s.free(0x9000); // its allocation was lost
    assert!(s.process().coverage.partial_state);
    assert_eq!(s.process().odd, Default::default());
}

#[test]
fn reading_that_began_before_the_agent_said_anything_has_its_beginning() {
    let mut s = Script::new();
    s.at(1000).control(Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance: 1, claims: "" });
    s.at(1090).alloc(0x1000, 100); // at 1100
    s.at(1190).alloc(0x2000, 7); // at 1200
    s.at(1300);
    s.sample(1150, 1250, 200); // its begin arrives now
    s.at(1400).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(100, 100, 107));
}

#[test]
fn what_an_agent_says_of_itself_closes_no_sample() {
    // The agent's first round: it sends Hello before its first watermark, and an allocation is in flight.
    let mut s = Script::new();
    s.at(1000).control(Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance: 1, claims: "" });
    s.sample(2000, 3000, 200);
    let (layer, state, reason) = (Layer::Nvtx, LayerState::Absent, "");
    s.at(4000).control(Body::Layer { layer, state, reason });
    s.at(4010).watermark(1500);
    assert_eq!(s.closed(), []);
    took(s.at(5000), 0x1000, 100, 4); // entered at 1010
    s.at(6000).watermark(0);
    assert_eq!(join(&s.only_sample()), torn(0, 0, 100));
}

#[test]
fn sample_from_before_the_end_of_a_resync_is_partial_however_late_it_is_heard_of() {
    let mut s = with_hundred();
    s.at(500).watermark(0);
    s.seq += 4; // lost: their times are unknown
    let missed = s.seq;
    s.at(2000).watermark(0);
    s.sample(1000, 1100, 150); // arrives before the state is restored
    s.at(3000).resync(1, |s| {
        s.restate(missed, Body::AllocEnd { address: 0x2000, bytes: 7, pool: 0, took_us: 0, memory: DEV });
    });
    s.sample(1200, 1300, 150); // arrives after that
    s.sample(2900, 3000, 150);
    s.sample(3100, 3200, 150);
    s.at(4000).watermark(0);
    let closed = s.closed();
    let said: Vec<(u64, bool)> = closed.iter().map(|sample| (sample.number, sample.partial)).collect();
    assert_eq!(said, [(1000, true), (1200, true), (2900, true), (3100, false)]);
    assert_eq!(closed[3].tracked_bytes, Some(7));
}
