//! Out-of-memory errors: the three kinds are distinguished, and each entry lists the holders.

use crate::common::*;
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::oom::{Fate, Oom, OomDevice, OomKind};
use gpumem_model::run::Named;
use gpumem_wire::*;

const SECOND: u64 = 1_000_000_000;
const POOL: u64 = 0x77;

/// A process with a pool named `torch`: 100 MiB of segments, 60 MiB of blocks in three pieces.
fn script() -> Script {
    let mut s = Script::new();
    s.tag("torch");
    s.say(Body::PoolCreate { pool: POOL, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework });
    s.alloc_as(0x1000_0000, 100 * MIB, DEV, POOL);
    for (at, bytes) in [(0, 10), (30, 20), (60, 30)] {
        s.tag("GPT/h.0/mlp");
        let address = 0x1000_0000 + at * MIB;
        s.say(Body::BlockAlloc { address, bytes: bytes * MIB, pool: POOL, use_as: NOTHING });
    }
    s
}

fn refuse(s: &mut Script, bytes: u64) {
    let (device_free_bytes, memory) = (Reading::of(7 * MIB), DEV);
    s.say(Body::AllocFailed { bytes, pool: 0, device_free_bytes, result: 2, memory });
}

fn give_up(s: &mut Script, tag: &str, bytes: u64) {
    gave_up(s, tag, bytes, 0);
}

fn gave_up(s: &mut Script, tag: &str, bytes: u64, result: u16) {
    s.tag(tag);
    let (pool_used_bytes, pool_reserved_bytes) = (Reading::of(60 * MIB), Reading::of(100 * MIB));
    let outcome = OomOutcome::Fatal;
    s.say(Body::Oom { bytes, pool_used_bytes, pool_reserved_bytes, outcome, result });
}

fn ooms(s: &Script) -> Vec<Oom> {
    s.process()
        .ooms
        .iter()
        .map(|(account, oom)| {
            assert_eq!(*account, 0);
            oom.clone()
        })
        .collect()
}

#[test]
fn a_refusal_that_the_pool_survives_is_pressure() {
    let mut s = script();
    s.control(Body::Layer { layer: Layer::OutOfMemory, state: LayerState::Active, reason: "" });
    refuse(&mut s, 40 * MIB);
    s.say(Body::Pressure { bytes: 40 * MIB, device_free_bytes: Reading::of(7 * MIB) });
    s.alloc_as(0x9000_0000, 40 * MIB, DEV, POOL);
    let found = ooms(&s);
    let [one] = &found[..] else { panic!("{found:?}") };
    assert_eq!((one.kind, one.refusals, one.count), (OomKind::Pressure, 1, 1));
    assert_eq!((one.asked_bytes, one.device_free_bytes, one.is_unheard), (40 * MIB, Some(7 * MIB), false));
}

#[test]
fn a_limit_of_the_pool_needs_no_driver_call() {
    let mut s = script();
    s.control(Body::PhaseBegin { phase: Phase::Backward });
    s.say(Body::Step { number: 18_221 });
    give_up(&mut s, "GPT/h.1", 45 * MIB);
    let found = ooms(&s);
    let [one] = &found[..] else { panic!("{found:?}") };
    assert_eq!((one.kind, one.refusals, one.tag.as_deref()), (OomKind::Pool, 0, Some("GPT/h.1")));
    assert_eq!((one.phase.as_deref(), one.step), (Some("backward"), Some(18_221)));
    assert_eq!((one.pool_used_bytes, one.pool_reserved_bytes), (Some(60 * MIB), Some(100 * MIB)));
    let idle = (one.idle_bytes, one.idle_pieces, one.largest_idle_bytes, one.is_expandable);
    let expected = (Some(40 * MIB), Some(3), Some(20 * MIB), false);
    assert_eq!(idle, expected, "between the blocks and behind them");
    assert_eq!(one.tracked_bytes, 100 << 20);
    assert_eq!(one.amounts.iter().map(|(_, bytes)| bytes).sum::<i64>(), 100 << 20);
    assert_eq!(one.device, None, "NVML was not read");
}

#[test]
fn refusals_and_the_word_are_one_entry_and_said_again_it_is_counted() {
    let mut s = script();
    for _ in 0..3 {
        refuse(&mut s, 2048 * MIB);
        refuse(&mut s, 2048 * MIB);
        gave_up(&mut s, "GPT/h.1", 2000 * MIB, 2);
        s.time_ns += SECOND;
    }
    let found = ooms(&s);
    let [one] = &found[..] else { panic!("{found:?}") };
    assert_eq!((one.kind, one.refusals, one.count), (OomKind::Device, 6, 3));
    assert_eq!((one.asked_bytes, one.driver_asked_bytes), (2000 * MIB, Some(2048 * MIB)));
    assert_eq!(one.last_ns - one.time_ns, 2 * SECOND + 60);
    give_up(&mut s, "GPT/h.2", 2000 * MIB);
    assert_eq!(ooms(&s).len(), 2, "another place is another entry");
    s.time_ns += 60 * SECOND;
    give_up(&mut s, "GPT/h.2", 2000 * MIB);
    assert_eq!(ooms(&s).len(), 3, "long after is another one");
}

#[test]
fn entries_are_capped_and_the_first_and_latest_stay() {
    let mut s = script();
    for number in 0..100 {
        s.time_ns += 60 * SECOND;
        give_up(&mut s, &format!("m/{number}"), 1000);
    }
    let found = ooms(&s);
    assert_eq!((found.len(), s.process().coverage.ooms_dropped), (32, 68));
    let tags: Vec<&str> = found.iter().filter_map(|oom| oom.tag.as_deref()).collect();
    assert_eq!((tags[0], tags[15], tags[16], tags[31]), ("m/0", "m/15", "m/84", "m/99"));
}

#[test]
fn a_flood_costs_no_more_than_what_lies_between() {
    let mut s = Script::new();
    for block in 0..2_000 {
        s.alloc((block + 1) << 32, MIB);
    }
    for number in 0..50 {
        s.tag(&format!("m/{number}"));
        s.say(Body::Oom {
            bytes: number,
            pool_used_bytes: Reading::ABSENT,
            pool_reserved_bytes: Reading::ABSENT,
            outcome: OomOutcome::Unknown,
            result: 0,
        });
    }
    let found = ooms(&s);
    assert!(found.len() < 3, "{}", found.len());
    assert_eq!(found.iter().map(|oom| oom.count).sum::<u64>(), 50, "and all are counted");
}

const BOB: ProcessKey = ProcessKey { pid: 52, start_ticks: 3 };

/// Bob has no agent.
fn bob(s: &mut Script) {
    let facts = "user=bob\ncomm=secret";
    s.host_as(52, Body::ProcessFacts { start_ticks: 3, uid: Reading::of(7), parent_pid: 1, facts });
}

/// A reading of a device of 16 GiB.
fn sample(s: &mut Script, at_ns: u64, own: u64, bob: u64) {
    listed(s, at_ns, &[(KEY, own), (BOB, bob)], own + bob);
}

fn listed(s: &mut Script, at_ns: u64, processes: &[(ProcessKey, u64)], sum: u64) {
    s.time_ns = at_ns;
    let used_bytes = sum + 64 * MIB;
    let free_bytes = 16 * 1024 * MIB - used_bytes - 623 * MIB;
    let device =
        Body::DeviceSample { used_bytes, free_bytes, reserved_bytes: Reading::of(623 * MIB), unified: false };
    s.host(Body::SampleBegin { number: at_ns });
    s.host(device);
    for &(key, used) in processes {
        let (used_bytes, start_ticks) = (Reading::of(used), key.start_ticks);
        s.host_as(
            key.pid,
            Body::ProcessSample { start_ticks, used_bytes, absence: Absence::Unknown, lists: 1 },
        );
    }
    s.host(device);
    s.host(Body::SampleEnd { number: at_ns, result: 0 });
    s.ledger.observe(
        Origin::Process(KEY),
        &Record {
            stamp: Stamp { time_ns: at_ns + 5, ..s.stamp },
            body: Body::Watermark { last_seq: s.seq, in_flight_since_ns: 0 },
        },
    );
}

fn sum(device: &OomDevice) -> i64 {
    let holders = device.holders.iter().map(|holder| holder.used_bytes);
    let beside = device.others.1 + device.unaccounted_bytes + device.free_bytes;
    holders.sum::<i64>() + beside + device.system_bytes.unwrap_or(0) as i64
}

#[test]
fn the_holders_and_what_is_free_are_the_device() {
    let mut s = script();
    bob(&mut s);
    sample(&mut s, 100 * SECOND, 500 * MIB, 1000 * MIB);
    sample(&mut s, 140 * SECOND, 500 * MIB, 4334 * MIB);
    s.alloc(0xa_0000_0000, 50 * MIB);
    give_up(&mut s, "GPT/h.1", 45 * MIB);
    let found = ooms(&s);
    let device = found[0].device.as_ref().expect("it was read");
    let holders: Vec<_> =
        device.holders.iter().map(|h| (h.pid, h.used_bytes >> 20, h.user.as_deref())).collect();
    assert_eq!(holders, [(42, 550, None), (52, 4334, Some("bob"))], "its own with what came since");
    let growth = |index: usize| (device.holders[index].growth_bytes, device.holders[index].growth_ns);
    assert_eq!(growth(0), (Some(50 << 20), Some(40 * SECOND)));
    assert_eq!(growth(1), (Some(3334 << 20), Some(40 * SECOND)));
    assert_eq!(device.holders[1].since_ns, Some(100 * SECOND));
    assert_eq!(device.unaccounted_bytes, 64 << 20);
    assert_eq!(sum(device), device.total_bytes as i64);
    assert_eq!((found[0].untrackable_bytes, found[0].predates_bytes), (Some(400 << 20), Some(0)));
}

#[test]
fn the_text_of_the_stack_is_kept_if_there_is_one() {
    let mut s = script();
    let stamp = Stamp { stack: 5, ..Stamp::default() };
    s.push(stamp, Body::Stack { format: FrameFormat::Text, frames: b"forward\ttrain.py\t212\n" });
    s.stamp.stack = 5;
    give_up(&mut s, "GPT/h.1", 45 * MIB);
    assert_eq!(ooms(&s)[0].stack.as_deref(), Some("forward\ttrain.py\t212\n"));
}

#[test]
fn layers_are_the_last_that_were_said_and_bounded() {
    let mut s = Script::new();
    s.control(Body::Layer { layer: Layer::ModulePath, state: LayerState::Failed, reason: &"x".repeat(5000) });
    s.control(Body::Layer { layer: Layer::Blocks, state: LayerState::Active, reason: "" });
    s.control(Body::Layer { layer: Layer::Unknown, state: LayerState::Active, reason: "of the future" });
    let layers = &s.process().coverage.run.layers;
    assert_eq!((layers.len(), layers[0].layer.as_str(), layers[1].reason.len()), (2, "blocks", 200));
    s.control(Body::Layer { layer: Layer::ModulePath, state: LayerState::Active, reason: "" });
    assert_eq!(s.process().coverage.layers[1].state, "active");
}

#[test]
fn what_was_survived_is_no_part_of_what_was_not() {
    let mut s = script();
    refuse(&mut s, 40 * MIB);
    s.alloc_as(0x9000_0000, 40 * MIB, DEV, POOL);
    refuse(&mut s, 80 * MIB);
    refuse(&mut s, 80 * MIB);
    gave_up(&mut s, "GPT/h.1", 70 * MIB, 2);
    // A limit of the pool itself is separate from refusals of the driver.
    refuse(&mut s, 20 * MIB);
    give_up(&mut s, "GPT/h.1", 10 * MIB);
    let found: Vec<_> =
        ooms(&s).iter().map(|oom| (oom.kind, oom.asked_bytes / MIB, oom.refusals, oom.count)).collect();
    assert_eq!(
        found,
        [(OomKind::Pressure, 20, 2, 2), (OomKind::Device, 70, 2, 1), (OomKind::Pool, 10, 0, 1)]
    );
    // Refusals of another thread are separate.
    let mut s = script();
    refuse(&mut s, 40 * MIB);
    s.stamp.thread = 7;
    gave_up(&mut s, "GPT/h.1", 30 * MIB, 2);
    assert_eq!(ooms(&s).iter().map(|oom| oom.kind).collect::<Vec<_>>(), [OomKind::Pressure, OomKind::Device]);
}

#[test]
fn a_refusal_of_which_nobody_knows_the_end_says_so() {
    let mut s = script();
    s.control(Body::Layer { layer: Layer::OutOfMemory, state: LayerState::Active, reason: "" });
    refuse(&mut s, 40 * MIB);
    let unknown = Reading::ABSENT;
    s.say(Body::Oom {
        bytes: 40 * MIB,
        pool_used_bytes: unknown,
        pool_reserved_bytes: unknown,
        outcome: OomOutcome::Unknown,
        result: 2,
    });
    let found = ooms(&s);
    let [one] = &found[..] else { panic!("{found:?}") };
    assert_eq!((one.kind, one.refusals, one.is_unheard), (OomKind::Pressure, 1, true));
}

/// Recording a composition costs time, so not every one of several refusals gets one; the final failure does.
#[test]
fn the_end_has_its_composition_however_much_there_is() {
    let mut s = script();
    for at in 0..20_000 {
        let (address, bytes) = (0x1000_0000 + 90 * MIB + at * 512, 512);
        s.say(Body::BlockAlloc { address, bytes, pool: POOL, use_as: NOTHING });
    }
    refuse(&mut s, 40 * MIB);
    refuse(&mut s, 40 * MIB);
    gave_up(&mut s, "GPT/h.1", 40 * MIB, 2);
    let found = ooms(&s);
    let [one] = &found[..] else { panic!("{found:?}") };
    assert_eq!((one.kind, one.refusals, one.tracked_bytes), (OomKind::Device, 2, 100 << 20));
    assert_eq!(one.amounts.iter().map(|(_, bytes)| bytes).sum::<i64>(), 100 << 20);
}

/// A refusal that was survived, another one soon after, and the end: the entry of the end has its own composition.
#[test]
fn an_end_soon_after_another_entry_has_its_own_composition() {
    let mut s = script();
    for at in 0..20_000 {
        let (address, bytes) = (0x1000_0000 + 90 * MIB + at * 512, 512);
        s.say(Body::BlockAlloc { address, bytes, pool: POOL, use_as: NOTHING });
    }
    refuse(&mut s, 40 * MIB);
    s.alloc_as(0x9000_0000, MIB, DEV, POOL);
    refuse(&mut s, 80 * MIB);
    gave_up(&mut s, "GPT/h.1", 80 * MIB, 2);
    let found = ooms(&s);
    let [first, end] = &found[..] else { panic!("{found:?}") };
    assert_eq!((first.kind, end.kind), (OomKind::Pressure, OomKind::Device));
    assert_eq!(end.amounts.iter().map(|(_, bytes)| bytes).sum::<i64>(), end.tracked_bytes);
    assert_eq!(end.tracked_bytes, first.tracked_bytes + MIB as i64);
    assert!(end.tracked_bytes >= 100 << 20, "{end:?}");
}

#[test]
fn who_gets_memory_afterwards_went_on() {
    let mut s = script();
    let block = |s: &mut Script, at: u64| {
        let address = 0x1000_0000 + at * MIB;
        s.say(Body::BlockAlloc { address, bytes: MIB, pool: POOL, use_as: NOTHING });
    };
    let went_on = |s: &Script| ooms(s).iter().map(|oom| oom.fate == Fate::Survived).collect::<Vec<_>>();
    give_up(&mut s, "GPT/h.1", 45 * MIB);
    assert_eq!(went_on(&s), [false]);
    s.say(Body::BlockFree { address: 0x1000_0000, pool: POOL, state: FreeState::Done });
    assert_eq!(went_on(&s), [false], "what is freed while the error is passed on says nothing");
    block(&mut s, 0);
    assert_eq!(went_on(&s), [true]);
    // The same again, without a record after it.
    give_up(&mut s, "GPT/h.1", 45 * MIB);
    assert_eq!(went_on(&s), [false]);
}

#[test]
fn the_reading_that_is_nearest_tells_who_had_the_device() {
    let mut s = script();
    bob(&mut s);
    sample(&mut s, 100 * SECOND, 500 * MIB, 1000 * MIB);
    s.time_ns = 101 * SECOND;
    give_up(&mut s, "GPT/h.1", 45 * MIB);
    let bobs = |s: &Script| {
        let device = ooms(s)[0].device.clone().expect("it was read");
        assert_eq!(sum(&device), device.total_bytes as i64);
        (device.read_ns / SECOND, device.holders[0].used_bytes >> 20, device.holders[1].used_bytes >> 20)
    };
    assert_eq!(bobs(&s), (100, 500, 1000));
    sample(&mut s, 101 * SECOND + 1000, 500 * MIB, 9000 * MIB);
    assert_eq!(bobs(&s), (101, 500, 9000), "a moment after it");
    sample(&mut s, 102 * SECOND, 500 * MIB, 50 * MIB);
    assert_eq!(bobs(&s), (101, 500, 9000), "once");
    // A reading that no longer lists the process is of another time.
    let mut s = script();
    sample(&mut s, 100 * SECOND, 500 * MIB, 1000 * MIB);
    s.time_ns = 101 * SECOND;
    give_up(&mut s, "GPT/h.1", 45 * MIB);
    listed(&mut s, 101 * SECOND + 1000, &[(BOB, 9000 * MIB)], 9000 * MIB);
    assert_eq!(bobs(&s), (100, 500, 1000));
}

/// Bob's bytes at the last two readings, and his exit status; returns the entries found.
fn suspected(before: u64, last: u64, status: Reading) -> Vec<Oom> {
    let mut s = script();
    bob(&mut s);
    sample(&mut s, 100 * SECOND, 500 * MIB, before * MIB);
    sample(&mut s, 140 * SECOND, 3500 * MIB, last * MIB);
    // Later lists of others, without him.
    listed(&mut s, 141 * SECOND, &[(KEY, 3500 * MIB)], 3500 * MIB);
    s.time_ns = 141 * SECOND;
    s.host_as(52, Body::ProcessGone { start_ticks: 3, status });
    s.process_of(BOB).ooms.iter().map(|(_, oom)| oom.clone()).collect()
}

#[test]
fn who_ends_without_a_word_near_a_full_device_is_suspected() {
    let found = suspected(1000, 12_000, Reading::ABSENT);
    let [one] = &found[..] else { panic!("{found:?}") };
    assert_eq!((one.kind, one.asked_bytes, one.is_unheard), (OomKind::Suspected, 0, true));
    assert_eq!(one.time_ns, 141 * SECOND);
    let device = one.device.as_ref().expect("it was listed");
    let holders: Vec<_> = device
        .holders
        .iter()
        .map(|holder| (holder.pid, holder.used_bytes >> 20, holder.growth_bytes.map(|bytes| bytes >> 20)))
        .collect();
    assert_eq!(holders, [(52, 12_000, Some(11_000)), (42, 3500, Some(3000))]);
    assert_eq!(sum(device), device.total_bytes as i64);
    assert_eq!(one.device_free_bytes, Some((16 * 1024 - 15_500 - 64 - 623) * MIB));
    assert_eq!(suspected(1000, 12_000, Reading::of(256)).len(), 1, "a failure");
    assert_eq!(suspected(1000, 12_000, Reading::of(0)).len(), 0, "a good end");
    assert_eq!(suspected(1000, 5000, Reading::ABSENT).len(), 0, "there was room");
}

#[test]
fn what_is_not_kept_is_counted_in_times() {
    let mut s = script();
    for number in 0..50 {
        s.time_ns += 60 * SECOND;
        give_up(&mut s, &format!("m/{number}"), 1000);
        give_up(&mut s, &format!("m/{number}"), 1000);
    }
    let kept: u64 = ooms(&s).iter().map(|oom| oom.count).sum();
    assert_eq!((ooms(&s).len(), kept + s.process().coverage.ooms_dropped), (32, 100));
}

/// An OOM caused by the pool's own limit, on a thread that reports its phase.
fn gave_up_in(s: &mut Script, phase: Phase, thread: u32, bytes: u64) {
    let before = s.stamp;
    (s.stamp.context, s.stamp.thread) = (PHASE_FLAG | u32::from(phase.to_code()), thread);
    give_up(s, "at", bytes);
    s.stamp = before;
}

/// A block that a thread allocates in a phase.
fn born(s: &mut Script, phase: Phase, thread: u32, at: u64) {
    let before = s.stamp.thread;
    s.stamp.thread = thread;
    let (address, use_as) = (0x1000_0000 + 90 * MIB + at * 512, (Role::Unknown, phase));
    s.say(Body::BlockAlloc { address, bytes: 512, pool: POOL, use_as });
    s.stamp.thread = before;
}

#[test]
fn phase_is_that_of_the_thread_or_of_the_pass_under_way() {
    const MAIN: u32 = 1;
    const ENGINE: u32 = 2;
    let mut s = script();
    gave_up_in(&mut s, Phase::Unknown, MAIN, 1); // nothing was trained so far
    born(&mut s, Phase::Forward, MAIN, 1);
    gave_up_in(&mut s, Phase::Unknown, MAIN, 2); // the loss
    gave_up_in(&mut s, Phase::Evaluation, MAIN, 3);
    gave_up_in(&mut s, Phase::Backward, ENGINE, 4); // before its first block
    born(&mut s, Phase::Backward, ENGINE, 2);
    gave_up_in(&mut s, Phase::Unknown, ENGINE, 5); // the end of a backward pass is in no node
    gave_up_in(&mut s, Phase::Unknown, MAIN, 6); // gradients are clipped
    s.control(Body::PhaseBegin { phase: Phase::Optimizer });
    gave_up_in(&mut s, Phase::Unknown, MAIN, 7);
    born(&mut s, Phase::Optimizer, MAIN, 3);
    s.control(Body::PhaseBegin { phase: Phase::Forward });
    gave_up_in(&mut s, Phase::Unknown, MAIN, 8); // the next batch
    gave_up_in(&mut s, Phase::Optimizer, MAIN, 9); // zero_grad
    give_up(&mut s, "an older agent", 10);
    let found: Vec<_> = ooms(&s).into_iter().map(|oom| oom.phase).collect();
    use Phase::*;
    let expected =
        [Unknown, Forward, Evaluation, Backward, Backward, Between, Optimizer, Between, Optimizer, Between];
    assert_eq!(found, expected.map(|phase| phase.name().map(str::to_owned)));
}

/// The context's number in a record of an older agent is not a phase.
#[test]
fn older_agents_say_no_phase() {
    let mut s = script();
    s.control(Body::PhaseBegin { phase: Phase::Forward });
    refuse(&mut s, 40 * MIB);
    s.stamp.context = u32::from(Phase::Backward.to_code());
    s.say(Body::Pressure { bytes: 40 * MIB, device_free_bytes: Reading::of(7 * MIB) });
    assert_eq!(ooms(&s)[0].phase.as_deref(), Some("forward"));
}

/// The refusal before an OOM has a composition, too: that does not make the OOM part of an earlier entry.
#[test]
fn requests_that_follow_each_other_closely_are_entries_of_their_own() {
    let mut s = script();
    for at in 0..2_000 {
        born(&mut s, Phase::Unknown, 1, at);
    }
    for number in 1..=4 {
        refuse(&mut s, number * 1000 * MIB);
        refuse(&mut s, number * 1000 * MIB);
        gave_up(&mut s, &format!("m/{number}"), number * 1000 * MIB, 2);
        for at in 0..200 {
            born(&mut s, Phase::Unknown, 1, 2_000 + number * 200 + at);
        }
    }
    let found: Vec<(u64, u64)> = ooms(&s).iter().map(|oom| (oom.asked_bytes / MIB, oom.count)).collect();
    assert_eq!(found, [(1000, 1), (2000, 1), (3000, 1), (4000, 1)]);
}

/// Returns whether the entry counts as out of memory if the process fails one second later.
fn is_fatal(s: &Script, oom: &Oom) -> bool {
    let mut oom = oom.clone();
    oom.decide(Some((s.time_ns + SECOND, Some(1 << 8))), s.time_ns + SECOND);
    oom.is_out_of_memory()
}

/// A refused driver call of an extension: PyTorch reports its own failures, and this is not one of them.
#[test]
fn refusal_outside_of_the_framework_may_be_fatal() {
    let mut s = script();
    s.control(Body::Layer { layer: Layer::OutOfMemory, state: LayerState::Active, reason: "" });
    let thread = s.stamp.thread;
    born(&mut s, Phase::Forward, thread, 1);
    refuse(&mut s, 40 * MIB);
    let found = ooms(&s);
    let [one] = &found[..] else { panic!("{found:?}") };
    assert_eq!((one.is_unheard, one.phase.as_deref(), is_fatal(&s, one)), (true, None, true));
    // The thread gets memory afterwards.
    born(&mut s, Phase::Forward, thread, 2);
    assert!(!is_fatal(&s, &ooms(&s)[0]));
    // A later call fails; then one of the framework, which it survives.
    refuse(&mut s, 40 * MIB);
    assert!(is_fatal(&s, &ooms(&s)[0]));
    s.say(Body::Pressure { bytes: 40 * MIB, device_free_bytes: Reading::of(7 * MIB) });
    assert!(!is_fatal(&s, &ooms(&s)[0]));
}

#[test]
fn failure_has_the_number_of_forward_passes_without_a_backward_pass() {
    const MAIN: u32 = 1;
    const ENGINE: u32 = 2;
    let mut s = script();
    let mut at = 0;
    let mut next = |s: &mut Script, phase, thread| {
        at += 1;
        born(s, phase, thread, at);
    };
    let passes = |s: &Script| ooms(s).last().and_then(|oom| oom.passes_without_backward);
    next(&mut s, Phase::Forward, MAIN);
    next(&mut s, Phase::Backward, ENGINE);
    for _ in 0..4 {
        next(&mut s, Phase::Unknown, MAIN);
        next(&mut s, Phase::Forward, MAIN);
        next(&mut s, Phase::Forward, MAIN);
    }
    give_up(&mut s, "GPT/h.1", 40 * MIB);
    assert_eq!(passes(&s), Some(4));
    next(&mut s, Phase::Backward, ENGINE);
    give_up(&mut s, "GPT/h.2", 80 * MIB);
    assert_eq!(passes(&s), Some(0));
    assert_eq!(ooms(&s).last().and_then(|oom| oom.passes_after_first), Some(4));
}

/// A process with many rows has few records between two failed requests, but much time.
#[test]
fn late_failure_has_its_own_composition() {
    let mut s = script();
    for at in 0..20_000 {
        born(&mut s, Phase::Unknown, 1, at);
    }
    give_up(&mut s, "GPT/h.1", 40 * MIB);
    s.time_ns += 2 * SECOND;
    s.alloc_as(0x9000_0000, MIB, DEV, POOL);
    give_up(&mut s, "GPT/h.2", 80 * MIB);
    let held: Vec<i64> = ooms(&s).iter().map(|oom| oom.tracked_bytes >> 20).collect();
    assert_eq!(held, [100, 101]);
}

/// A new daemon: the agent has not restated its earlier memory when memory runs out.
#[test]
fn composition_without_the_earlier_memory_is_partial() {
    let mut s = Script::new();
    s.seq = 100;
    give_up(&mut s, "GPT/h.1", 40 * MIB);
    assert!(ooms(&s)[0].is_partial);
    let mut s = script();
    give_up(&mut s, "GPT/h.1", 40 * MIB);
    assert!(!ooms(&s)[0].is_partial);
}
