//! Parts and steps of the gap sum exactly, whatever a process reports and NVML charges.
use crate::common::gap::*;
use crate::common::*;
use gpumem_wire::*;

/// One action of a driver, an agent or NVML.
#[derive(Debug, Clone)]
enum Op {
    Context(u32),
    End(u32, bool),
    Load(u32, u64, u64),
    Unload(u32, u64),
    Limit(u32, u8, u64),
    Other(u8),
    Alloc(u64, u64),
    Free(u64),
    /// NVML's charge, in units that match no model, and its distance from the last event.
    Used(u64, bool),
    Lose,
    Pause(bool),
    Exec,
}

fn op() -> impl proptest::strategy::Strategy<Value = Op> {
    use proptest::prelude::*;
    let bytes = || prop_oneof![4 => 0..200 * MIB, 1 => any::<u64>()];
    prop_oneof![
        2 => (0..4u32).prop_map(Op::Context),
        1 => (0..4u32, any::<bool>()).prop_map(|(context, all)| Op::End(context, all)),
        3 => (0..4u32, 0..4u64, bytes()).prop_map(|(context, id, bytes)| Op::Load(context, id, bytes)),
        2 => (0..4u32, 0..4u64).prop_map(|(context, id)| Op::Unload(context, id)),
        2 => (0..4u32, 0..3u8, prop_oneof![0..8192u64, bytes()]).prop_map(|(context, which, limit)| Op::Limit(context, which, limit)),
        1 => (7..13u8).prop_map(Op::Other),
        2 => (1..9u64, 0..9 * MIB).prop_map(|(address, bytes)| Op::Alloc(address, bytes)),
        1 => (1..9u64).prop_map(Op::Free),
        6 => (prop_oneof![0..2000 * MIB, Just(0), Just(u64::MAX >> 1)], any::<bool>()).prop_map(|(used, far)| Op::Used(used, far)),
        1 => Just(Op::Lose),
        1 => any::<bool>().prop_map(Op::Pause),
        1 => Just(Op::Exec),
    ]
}

fn sums_hold(ops: &[Op]) {
    let mut s = Gap::new();
    let hello = |instance| Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance, claims: "" };
    s.0.control(hello(0));
    let (mut ms, mut instance, mut boundaries) = (100, 0, 0);
    // The last certain sample: its gap without rounding, and the sum of all steps until then.
    let mut last = Some((0_i64, 0_i64));
    for op in ops {
        ms += 1;
        match *op {
            Op::Context(context) => s.context(ms, "c", context),
            Op::End(context, all) => {
                s.end(ms, context, if all { DestroyScope::Device } else { DestroyScope::Context })
            }
            Op::Load(context, id, bytes) => {
                s.event(ms, "m", context, DriverEventKind::ModuleLoaded, bytes, id)
            }
            Op::Unload(context, id) => s.event(ms, "m", context, DriverEventKind::ModuleUnloaded, 0, id),
            Op::Limit(context, which, limit) => {
                let kinds =
                    [DriverEventKind::StackLimit, DriverEventKind::PrintfLimit, DriverEventKind::HeapLimit];
                s.event(ms, "l", context, kinds[usize::from(which)], 0, limit);
            }
            Op::Other(code) => s.event(ms, "o", 1, DriverEventKind::from_code(code), 0, 0),
            Op::Alloc(address, bytes) => s.alloc(ms, address << 40, bytes),
            Op::Free(address) => {
                s.0.at(ms * MS).free(address << 40);
            }
            Op::Lose => {
                s.0.seq += 3;
                if boundaries == 0 {
                    last = None;
                }
                s.0.resync(0, |_| {});
            }
            Op::Pause(on) => {
                let state = if on { AgentState::Paused } else { AgentState::Covered };
                s.0.at(ms * MS).control(Body::Agent { result: 0, state, detail: "" });
            }
            Op::Exec => {
                instance += 1;
                s.0.at(ms * MS).control(hello(instance));
                s.0.seq = 0;
                s.0.push(Stamp { device: 0, context: H100, ..Stamp::default() }, device(9));
            }
            Op::Used(used, far) => {
                ms += if far { 600 } else { 5 };
                s.0.sample(ms * MS, ms * MS + MS / 10, used);
                ms += if far { 600 } else { 5 };
                s.0.at(ms * MS).watermark(0);
                let account = s.0.account();
                let sample = account.latest.as_ref().expect("a sample");
                if !far || sample.torn || sample.stale || sample.partial {
                    continue;
                }
                // No event is in progress: a boundary.
                let parts = sample.parts.expect("parts");
                let x = parts.sum().wrapping_sub(parts.rounding_bytes);
                let stepped = account.steps.iter().fold(0_i64, |sum, step| sum.wrapping_add(step.bytes));
                boundaries += 1;
                if let Some((x_before, stepped_before)) = last.replace((x, stepped)) {
                    let (step, told) = (x.wrapping_sub(x_before), stepped.wrapping_sub(stepped_before));
                    assert_eq!(told, step, "steps sum to what the gap has changed by: {ops:?}");
                }
            }
        }
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn parts_and_steps_sum_exactly_whatever_happens(ops in proptest::collection::vec(op(), 1..60)) {
        sums_hold(&ops);
    }
}
