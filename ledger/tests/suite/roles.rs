//! Roles of blocks by phase and lifetime, as short training runs.
use crate::common::*;
use gpumem_ledger::Class;
use gpumem_model::iterations::{Iteration, Level};
use gpumem_wire::Phase::{Backward, Between, Evaluation, Forward, Optimizer, Setup, Unknown};
use gpumem_wire::*;
use std::collections::BTreeMap;

const POOL: u64 = 3;
const HOPPER: u64 = 33_554_432;
const OTHERS: u64 = 8_519_680;
const LT: u64 = 1_048_576;
/// The main thread, and the one that runs backward passes.
const MAIN: u32 = 1;
const AUTOGRAD: u32 = 2;
/// Other threads of the program.
const PREFETCH: u32 = 3;
const ACTOR: u32 = 4;

/// A program that trains, with one segment and named blocks.
struct Train {
    s: Script,
    live: BTreeMap<&'static str, (u64, u64)>,
    next: u64,
}

impl Train {
    fn new() -> Self {
        let mut s = Script::new();
        s.pool(POOL, 0, true, PoolOwner::Framework);
        s.alloc(1 << 40, 1 << 34);
        s.segment(1 << 40, 1 << 34, POOL);
        Train { s, live: BTreeMap::new(), next: 1 << 40 }
    }

    fn born_on(&mut self, thread: u32, name: &'static str, bytes: u64, phase: Phase) -> &mut Self {
        self.s.stamp.thread = thread;
        let address = self.next;
        self.next += bytes.next_multiple_of(512);
        let use_as = (Role::Unknown, phase);
        let seq = self.s.say(Body::BlockAlloc { address, bytes, pool: POOL, use_as });
        assert_eq!(self.live.insert(name, (address, seq)), None, "{name} lives");
        self
    }

    /// Allocates on the thread that runs the phase.
    fn born(&mut self, name: &'static str, bytes: u64, phase: Phase) -> &mut Self {
        self.born_on(if phase == Backward { AUTOGRAD } else { MAIN }, name, bytes, phase)
    }

    /// Makes a request fail.
    fn fail(&mut self, bytes: u64) -> &mut Self {
        let (pool_used_bytes, pool_reserved_bytes) = (Reading(None), Reading(None));
        let outcome = OomOutcome::Unknown;
        self.s.say(Body::Oom { bytes, pool_used_bytes, pool_reserved_bytes, outcome, result: 2 });
        self
    }

    fn free(&mut self, name: &'static str) -> &mut Self {
        let (address, _) = self.live.remove(name).expect("it lives");
        self.s.unblock(address, POOL);
        self
    }

    fn pending(&mut self, name: &'static str) -> &mut Self {
        let (address, _) = self.live[name];
        self.s.say(Body::BlockFree { address, pool: POOL, state: FreeState::Pending });
        self
    }

    fn retag(&mut self, name: &'static str, role: Role) -> &mut Self {
        let (address, seq) = self.live[name];
        self.s.retag(address, POOL, seq, role);
        self
    }

    /// Restates all live memory, with a gradient whose record was the last but one and did not arrive.
    fn restate_with_lost_gradient(&mut self, bytes: u64) {
        let block = |address: u64, bytes: u64| Body::BlockAlloc {
            address,
            bytes,
            pool: POOL,
            use_as: (Role::Unknown, Backward),
        };
        let (live, lost) = (self.live.values().copied().collect::<Vec<_>>(), self.s.seq - 1);
        self.s.resync(live.len() as u64 + 4, |s| {
            let (memory, owner) = (MemoryKind::Device, PoolOwner::Framework);
            s.restate(1, Body::PoolCreate { pool: POOL, parent: 0, reports_blocks: 1, owner });
            s.restate(2, Body::AllocEnd { address: 1 << 40, bytes: 1 << 34, pool: 0, took_us: 0, memory });
            s.restate(3, Body::SegmentAdd { address: 1 << 40, bytes: 1 << 34, pool: POOL });
            // The ledger knows these blocks, so their bytes do not matter.
            live.iter().for_each(|(address, seq)| s.restate(*seq, block(*address, 1)));
            s.restate(lost, block((1 << 40) + (1 << 33), bytes));
        });
    }

    fn phase(&mut self, phase: Phase) -> &mut Self {
        self.s.stamp.thread = MAIN;
        self.s.say(Body::PhaseBegin { phase });
        self
    }

    /// Runs an optimizer step, with the records of its hooks.
    fn optimize(&mut self, inside: impl FnOnce(&mut Self)) -> &mut Self {
        self.phase(Optimizer);
        inside(self);
        self.phase(Forward)
    }

    fn step(&mut self, number: u64) -> &mut Self {
        self.s.say(Body::Step { number });
        self
    }

    fn sums(&self, amounts: impl Fn(&gpumem_ledger::AccountView) -> Vec<i64>) -> String {
        let process = self.s.process();
        let mut sums = BTreeMap::new();
        for (cell, bytes) in process.cells.iter().zip(amounts(&process.accounts[0])) {
            if cell.class == Class::Block && bytes != 0 {
                *sums.entry(cell.role).or_insert(0) += bytes;
            }
        }
        let sums: Vec<String> = sums.iter().map(|(role, bytes)| format!("{role:?} {bytes}")).collect();
        sums.join(" ")
    }

    fn now(&self) -> String {
        self.sums(|account| account.amounts.clone())
    }

    fn at_peak(&self) -> String {
        self.sums(|account| account.peak.amounts.clone())
    }

    fn rows(&self) -> Vec<Iteration> {
        self.s.ledger.iterations(KEY, 0).rows
    }

    /// One iteration: forward keeps 100 and frees 10. Backward frees the 100, allocates and frees 20, and keeps 1000. The
    /// optimizer uses 7 temporarily and frees the gradients at the end.
    fn iterate(&mut self) -> &mut Self {
        self.born("x", 5, Unknown).born("tmp", 10, Forward).born("act", 100, Forward).free("tmp");
        self.born("grad", 1000, Backward).born("inner", 20, Backward).free("act").free("inner");
        self.optimize(|t| _ = t.born("o", 7, Optimizer).free("o"));
        self.free("grad").free("x")
    }
}

#[test]
fn a_step_of_training() {
    let mut t = Train::new();
    t.born("w", 3000, Setup).retag("w", Role::Parameter);
    t.born("tmp", 10, Forward).born("act", 100, Forward).free("tmp");
    assert_eq!(t.now(), "Unknown 100 Parameter 3000", "nobody knows yet that this is training");
    t.born("inner", 20, Backward);
    assert_eq!(t.now(), "Parameter 3000 Activation 100 Temporary 20");
    t.born("grad", 1000, Backward).free("inner").free("act");
    assert_eq!(t.now(), "Parameter 3000 Temporary 1000");
    t.phase(Optimizer);
    assert_eq!(t.now(), "Parameter 3000 Gradient 1000");
    t.born("m", 6000, Optimizer).born("o", 7, Optimizer).free("o");
    t.phase(Forward);
    assert_eq!(t.now(), "Parameter 3000 Gradient 1000 OptimizerState 6000");
    t.free("grad").born("x", 5, Unknown);
    assert_eq!(t.now(), "Unknown 5 Parameter 3000 OptimizerState 6000");
    t.born("act", 100, Forward);
    assert_eq!(t.now(), "Parameter 3000 OptimizerState 6000 Activation 100 Input 5");
}

#[test]
fn blocks_have_the_steps_of_a_program_that_reports_none() {
    let mut t = Train::new();
    t.iterate().iterate().iterate();
    let steps = t.s.ledger.blocks(KEY, 0).steps;
    let rows: Vec<(u64, u64)> = t.rows().iter().map(|row| (row.start_ns, row.first)).collect();
    assert_eq!((&steps[..2], steps.len()), (rows.as_slice(), 3));
}

#[test]
fn the_peak_learns_what_was_temporary() {
    let mut t = Train::new();
    t.iterate();
    // A higher peak in the next forward, with its temporaries, which are distinguished once they are freed.
    t.born("act", 5000, Forward).born("tmp", 4000, Forward);
    assert_eq!(t.at_peak(), "Activation 9000");
    t.free("tmp");
    assert_eq!(t.at_peak(), "Activation 5000 Temporary 4000");
    t.born("grad", 1000, Backward).free("act");
    assert_eq!(t.at_peak(), "Activation 5000 Temporary 4000");
    // And one in backward, with gradients that are known only when the optimizer begins.
    t.born("inner", 20_000, Backward).free("inner");
    assert_eq!(t.at_peak(), "Temporary 21000");
    t.phase(Optimizer);
    assert_eq!(t.at_peak(), "Gradient 1000 Temporary 20000");
}

/// The peak of many programs is in the first `step()` of Adam, which makes its state.
#[test]
fn state_of_the_first_step_is_state_at_the_peak() {
    let mut t = Train::new();
    t.born("act", 100, Forward).born("grad", 1000, Backward).free("act");
    t.optimize(|t| {
        t.born("m", 1000, Optimizer).born("v", 1000, Optimizer);
        assert_eq!(t.at_peak(), "Gradient 1000 OptimizerState 2000", "in the step");
        t.born("tmp", 500, Optimizer).free("tmp");
    });
    t.free("grad");
    assert_eq!(t.at_peak(), "Gradient 1000 OptimizerState 2000 Temporary 500");
    assert_eq!(t.now(), "OptimizerState 2000");
}

#[test]
fn gradients_are_accumulated_over_micro_batches() {
    let mut t = Train::new();
    t.iterate();
    t.born("a1", 100, Forward).born("g", 1000, Backward).born("i1", 30, Backward).free("a1").free("i1");
    t.born("a2", 100, Forward);
    assert_eq!(t.now(), "Gradient 1000 Activation 100", "it outlives the next forward pass");
    t.born("i2", 40, Backward).free("a2").free("i2");
    t.born("a3", 100, Forward).born("i3", 40, Backward).free("a3").free("i3");
    t.optimize(|t| _ = t.born("o", 1, Optimizer).free("o"));
    assert_eq!(t.now(), "Gradient 1000");
    t.free("g");
}

#[test]
fn gradients_that_are_set_to_zero_stay_gradients() {
    let mut t = Train::new();
    t.born("a", 100, Forward).born("g", 1000, Backward).free("a");
    for _ in 0..6 {
        t.optimize(|_| ());
        t.born("a", 100, Forward).born("i", 20, Backward).free("i").free("a");
        assert_eq!(t.now(), "Gradient 1000");
    }
    // The same before backward instead of after the optimizer.
    t.free("g").born("a", 100, Forward).born("g", 1000, Backward).free("a").optimize(|_| ());
    assert_eq!(t.now(), "Gradient 1000");
}

#[test]
fn a_graph_that_is_retained_keeps_its_activations() {
    let mut t = Train::new();
    t.iterate();
    t.born("a", 100, Forward).born("g", 10, Backward).born("i", 20, Backward).free("i");
    t.born("j", 20, Backward).free("j"); // backward again, through the same graph
    t.optimize(|_| ());
    assert_eq!(t.now(), "Gradient 10 Activation 100");
    t.free("a").free("g");
}

#[test]
fn several_optimizers_have_a_state_each_and_it_may_come_late() {
    let mut t = Train::new();
    t.born("a", 100, Forward).born("g", 10, Backward).free("a");
    t.optimize(|t| _ = t.born("m1", 1, Optimizer));
    t.optimize(|t| _ = t.born("m2", 2, Optimizer).born("o", 50, Optimizer).free("o"));
    assert_eq!(t.now(), "Gradient 10 OptimizerState 3");
    t.free("g").iterate();
    t.born("a", 100, Forward).born("g", 10, Backward).free("a");
    t.optimize(|t| _ = t.born("late", 4, Optimizer));
    assert_eq!(t.now(), "Gradient 10 OptimizerState 7");
    // Two networks alternate: the graph of the first is kept for the second.
    t.free("g").born("a", 100, Forward).born("g", 10, Backward);
    t.optimize(|_| ());
    t.born("b", 200, Forward).born("h", 20, Backward);
    t.optimize(|_| ());
    assert_eq!(t.now(), "Gradient 30 OptimizerState 7 Activation 300");
}

#[test]
fn a_closure_runs_forward_and_backward_inside_the_optimizer() {
    let mut t = Train::new();
    t.iterate();
    t.optimize(|t| {
        t.born("d", 3, Optimizer).born("a", 100, Forward).born("g", 10, Backward).free("a");
        t.born("o", 5, Optimizer).free("o");
    });
    assert_eq!(t.now(), "Gradient 10 OptimizerState 3");
}

/// A program without modules: its own optimizer keeps a history, and reads gradients that `torch.autograd.grad` returns.
#[test]
fn history_of_a_program_without_modules_is_not_temporary() {
    let mut t = Train::new();
    for (entry, scratch, gradient) in [("a", "s", "g"), ("b", "t", "h"), ("c", "u", "i"), ("d", "v", "j")] {
        // The thread that calls `backward()` makes the first gradient.
        t.born(scratch, 5, Unknown)
            .born_on(MAIN, "one", 1, Backward)
            .born(gradient, 10, Backward)
            .free("one");
        t.born(entry, 1000, Unknown).free(scratch).free(gradient);
    }
    t.born("k", 10, Backward);
    // Blocks of the last three steps may still be temporary.
    for entry in ["a", "b", "c", "d"] {
        t.free(entry);
    }
    assert_eq!(t.at_peak(), "Unknown 2000 Temporary 2015");
}

#[test]
fn gradients_that_no_optimizer_takes_are_gradients() {
    let mut t = Train::new();
    let pass = |t: &mut Train, names: [&'static str; 3]| {
        let [activation, gradient, inner] = names;
        t.born(activation, 100, Forward).born(gradient, 1000, Backward).born(inner, 20, Backward);
        t.free(activation).free(inner);
    };
    pass(&mut t, ["a", "g", "i"]);
    // The program scales and adds up the gradients of each sample, and drops them before the next pass.
    t.born("sum", 1, Unknown).free("g").free("sum");
    assert_eq!(t.at_peak(), "Gradient 1000 Activation 100 Temporary 20");
    // Memory runs out in a larger pass: its oldest blocks may be gradients, which has no role yet.
    t.born("b", 200, Forward).born("h", 2000, Backward).born("j", 20, Backward);
    t.fail(5000);
    assert_eq!(t.now(), "Unknown 2000 Activation 200 Temporary 20");
}

/// Another thread copies the next batches to the device while the backward pass runs.
#[test]
fn batches_that_are_prefetched_in_a_backward_pass_are_inputs() {
    let mut t = Train::new();
    t.iterate();
    t.born("a", 100, Forward).born("g", 1, Backward);
    for (batch, gradient) in [("x1", "g1"), ("x2", "g2"), ("x3", "g3"), ("x4", "g4")] {
        t.born_on(PREFETCH, batch, 5, Unknown).born(gradient, 10, Backward);
    }
    t.free("a").optimize(|_| ());
    t.born("a", 100, Forward);
    assert_eq!(t.now(), "Gradient 41 Activation 100 Input 20");
    // The same in a program without modules: only the thread that calls `backward()` waits for it.
    let mut t = Train::new();
    t.born_on(MAIN, "one", 1, Backward).born("g", 10, Backward).free("one").born("log", 1000, Unknown);
    for (batch, inner) in [("x1", "i1"), ("x2", "i2"), ("x3", "i3"), ("x4", "i4")] {
        t.born_on(PREFETCH, batch, 5, Unknown).born(inner, 10, Backward).free(inner);
    }
    t.free("log");
    assert_eq!(t.at_peak(), "Unknown 20 Temporary 1020", "one backward pass has followed it");
}

/// Two threads run passes: one collects samples, the other one learns from them.
#[test]
fn a_block_of_another_thread_ends_no_backward_pass() {
    let mut t = Train::new();
    t.iterate();
    t.born_on(ACTOR, "s", 5, Unknown).born_on(ACTOR, "out", 50, Forward).free("out").free("s");
    t.born("a", 100, Forward).born("inner", 2000, Backward);
    t.born_on(ACTOR, "s", 5, Unknown).born("g", 10, Backward).free("inner").free("a");
    assert_eq!(t.at_peak(), "Unknown 5 Activation 100 Temporary 2010");
    t.optimize(|_| ());
    assert_eq!(t.now(), "Unknown 5 Gradient 10");
}

#[test]
fn memory_that_a_closure_keeps_is_no_optimizer_state() {
    let mut t = Train::new();
    t.iterate();
    for (clone, activation, gradient) in [("c", "a", "g"), ("d", "b", "h"), ("e", "f", "i")] {
        t.optimize(|t| {
            t.born(activation, 100, Forward).born_on(MAIN, "loss", 4, Between).born(gradient, 10, Backward);
            t.free(activation)
                .free("loss")
                .born_on(MAIN, clone, 1000, Between)
                .born("o", 5, Optimizer)
                .free("o");
        });
        t.free(gradient);
        assert!(!t.now().contains("OptimizerState"), "{}", t.now());
    }
}

#[test]
fn gradients_of_an_earlier_iteration_are_measured_when_forward_begins() {
    let mut t = Train::new();
    for is_kept in [false, true] {
        t.born("a", 100, Forward).born("g", 10, Backward).free("a").optimize(|_| ());
        if !is_kept {
            t.free("g");
        }
        t.born("b", 100, Forward);
        let open = t.s.ledger.iterations(KEY, 0).open.expect("an iteration");
        assert_eq!(open.kept_gradients.last_bytes, if is_kept { 10 } else { 0 });
        t.born("h", 10, Backward).free("b").free("h").optimize(|_| ());
    }
}

#[test]
fn graphs_that_live_when_a_pass_begins_are_measured() {
    let mut t = Train::new();
    let measured = |t: &Train| {
        let open = t.s.ledger.iterations(KEY, 0).open.expect("an iteration");
        (open.passes_at_once, open.kept_activations.peak_bytes)
    };
    t.born("w", 1, Between).born("a", 100, Forward);
    assert_eq!(measured(&t), (1, 0));
    // The loss of a pass is computed outside of modules.
    t.born("loss", 8, Between).born("b", 100, Forward);
    assert_eq!(measured(&t), (2, 108));
    t.born("f", 8, Between).born("e", 70, Evaluation).free("e");
    assert_eq!(measured(&t), (2, 108), "a pass without gradients has no graph");
    t.born("g", 10, Backward).free("a").free("b").free("loss").free("f").optimize(|_| ());
    for name in ["c", "d"] {
        t.born("y", 8, Between)
            .born(name, 100, Forward)
            .born("h", 10, Backward)
            .free(name)
            .free("y")
            .free("h");
    }
    assert_eq!(measured(&t), (1, 0), "a backward pass follows each pass");
}

#[test]
fn what_checkpointing_computes_again_is_part_of_backward() {
    // Stamped as backward, or as forward on the thread that runs backward.
    for phase in [Backward, Forward] {
        let mut t = Train::new();
        t.iterate();
        t.born("keep", 10, Forward).born("g", 1000, Backward).born("out", 64, Backward);
        t.born_on(AUTOGRAD, "re", 500, phase)
            .born("inner", 50, Backward)
            .free("out")
            .free("re")
            .free("inner");
        assert_eq!(t.now(), "Activation 10 Temporary 1000");
        t.free("keep").optimize(|_| ());
        assert_eq!(t.now(), "Gradient 1000");
    }
}

#[test]
fn one_storage_of_many_gradients_counts_once_and_unsharded_parameters_are_told() {
    let mut t = Train::new();
    t.iterate();
    // A bucket that holds 20 gradients: one block, reported 20 times.
    t.born("bucket", 4096, Forward);
    (0..20).for_each(|_| _ = t.retag("bucket", Role::Gradient));
    // Gathered for forward and again for backward; a shard's gradient stays.
    t.born("full", 800, Forward).retag("full", Role::Parameter);
    assert_eq!(t.now(), "Parameter 800 Gradient 4096");
    t.free("full").born("gather", 800, Forward).free("gather");
    t.born("again", 800, Backward).born("shard", 100, Backward).free("again");
    t.optimize(|_| ());
    assert_eq!(t.now(), "Gradient 4196");
    // A bucket that is never reported does not stay an activation.
    t.born("buffer", 99, Forward).born("i", 20, Backward).free("i");
    for _ in 0..4 {
        t.optimize(|_| ());
        t.born("a", 10, Forward).born("i", 20, Backward).free("i").free("a");
    }
    assert_eq!(t.now(), "Unknown 99 Gradient 4196");
}

#[test]
fn evaluation_is_not_training() {
    let mut t = Train::new();
    t.iterate();
    for phase in [Evaluation, Forward] {
        t.born("batch", 5, Unknown).born("e1", 70, phase).born("e2", 80, phase).free("e1").free("e2");
        assert_eq!(t.now(), "Input 5");
        t.free("batch");
    }
    t.born("scores", 9, Evaluation).born("a", 100, Forward);
    assert_eq!(t.now(), "Unknown 9 Activation 100");
}

#[test]
fn without_training_nothing_is_guessed() {
    let mut t = Train::new();
    t.born("w", 3000, Setup).born("made in place", 50, Unknown);
    for _ in 0..3 {
        t.born("cache", 500, Forward).born("tmp", 20, Forward).free("tmp");
        assert_eq!(t.now(), "Unknown 3550");
        t.free("cache").born("cache", 500, Forward).free("cache");
    }
    assert_eq!(t.at_peak(), "Unknown 3570");
}

#[test]
fn loss_and_glue_belong_to_forward_and_copies_are_no_inputs() {
    let mut t = Train::new();
    t.iterate();
    t.born("a", 100, Forward).born("logits", 30, Unknown).born("glue", 6, Unknown).free("glue");
    t.born("g", 10, Backward);
    assert_eq!(t.now(), "Activation 130 Temporary 10");
    t.free("a").free("logits").born("norm", 2, Unknown).free("norm").optimize(|_| ());
    // An average of the weights, made between two steps: taken for an input at first, but not for long.
    t.free("g").born("average", 3000, Unknown).born("a", 1, Forward);
    assert_eq!(t.now(), "Activation 1 Input 3000");
    t.free("a");
    for _ in 0..3 {
        t.born("i", 20, Backward).free("i").optimize(|_| ());
        t.born("i", 20, Forward).free("i");
    }
    assert_eq!(t.now(), "Unknown 3000");
}

#[test]
fn a_workspace_is_known_by_its_size_and_its_age() {
    for bytes in [HOPPER, OTHERS, LT] {
        let mut t = Train::new();
        // An activation of this size in each step, and two workspaces.
        t.born("forward's", bytes, Forward).born("a", bytes, Forward);
        t.born("w", 100, Setup).retag("w", Role::Parameter);
        t.born("backward's", bytes, Backward).born("g", 100, Backward).free("a");
        for steps in 0..4 {
            t.optimize(|_| ());
            // No parameter has a gradient of that size.
            assert!(t.now().contains("Gradient 100 "), "after {steps}: {}", t.now());
            t.free("g").born("a", bytes, Forward).born("g", 100, Backward).free("a");
        }
        t.optimize(|_| ());
        assert_eq!(t.now(), format!("Parameter 100 Gradient 100 Workspace {}", 2 * bytes));
        assert!(t.at_peak().contains(&format!("Activation {bytes} ")), "{}", t.at_peak());
        assert!(t.at_peak().contains(&format!("Workspace {}", 2 * bytes)), "{}", t.at_peak());
    }
}

#[test]
fn each_stream_has_workspaces_of_its_own() {
    for loses_a_record in [false, true] {
        let mut t = Train::new();
        t.born("w", 100, Setup).retag("w", Role::Parameter);
        t.s.stamp.flags = Flags::REQUEST;
        for (stream, [forward, backward]) in
            [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"], ["i", "j"]].iter().enumerate()
        {
            t.s.stamp.context = stream as u32;
            t.born(forward, HOPPER, Forward).born(backward, HOPPER, Backward);
        }
        t.s.stamp.flags = Flags::default();
        if loses_a_record {
            t.s.seq += 1;
        }
        t.born("grad", 100, Backward);
        if loses_a_record {
            t.restate_with_lost_gradient(50);
        }
        for _ in 0..4 {
            t.optimize(|_| ());
            t.free("grad").born("act", 10, Forward).born("grad", 100, Backward).free("act");
        }
        t.optimize(|_| ());
        let gradients = if loses_a_record { 150 } else { 100 };
        assert_eq!(t.now(), format!("Parameter 100 Gradient {gradients} Workspace {}", 10 * HOPPER));
    }
}

/// Runs one request on each of three threads and three streams; each request keeps a block of this size.
fn serve(t: &mut Train, bytes: u64, phase: Phase, keeps: bool) {
    for (thread, stream) in (20..23).flat_map(|thread| (1..4).map(move |stream| (thread, stream))) {
        (t.s.stamp.flags, t.s.stamp.context) = (Flags::REQUEST, stream);
        t.born_on(thread, "input", 10, Unknown).born_on(thread, "temporary", bytes, phase);
        if keeps {
            t.born_on(thread, "kept", bytes, phase).live.remove("kept");
        }
        t.free("temporary").free("input");
        t.s.stamp.flags = Flags::default();
    }
}

#[test]
fn each_thread_of_a_server_has_workspaces_for_each_stream() {
    for (bytes, phase) in [(HOPPER, Evaluation), (OTHERS, Forward), (LT, Forward)] {
        let mut t = Train::new();
        serve(&mut t, bytes, phase, true);
        serve(&mut t, bytes, phase, false);
        assert_eq!(t.now(), format!("Workspace {}", 9 * bytes));
        // Results that each request keeps are soon too many.
        (0..4).for_each(|_| serve(&mut t, bytes, phase, true));
        serve(&mut t, bytes, phase, false);
        assert_eq!(t.now(), format!("Unknown {}", 5 * 9 * bytes));
    }
}

/// Two networks run before the first backward pass, and their activations have the size of a workspace.
#[test]
fn passes_before_the_first_backward_have_activations() {
    for activations in [2, 6] {
        let mut t = Train::new();
        for input in ["first", "second", "third"] {
            t.born(input, 10, Unknown);
            (0..activations).for_each(|_| _ = t.born("kept", HOPPER, Forward).live.remove("kept"));
            t.free(input);
        }
        t.born("g", 100, Backward);
        assert_eq!(t.now(), format!("Activation {} Temporary 100", 3 * activations * HOPPER));
    }
}

#[test]
fn setting_of_a_process_gives_the_size_of_its_workspaces() {
    const KIB: u64 = 1024;
    for (claims, bytes) in [("cublas_workspace=:16:8\n", 128 * KIB), ("cublas_workspace=off\n", HOPPER)] {
        let mut t = Train::new();
        let hello = Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance: 0, claims };
        t.s.control(hello);
        serve(&mut t, bytes, Forward, true);
        serve(&mut t, bytes, Forward, false);
        assert_eq!(t.now(), format!("Workspace {}", 9 * bytes));
    }
    let mut t = Train::new();
    let claims = "cublas_workspace=:16:8\n";
    t.s.control(Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance: 0, claims });
    serve(&mut t, HOPPER, Forward, true);
    serve(&mut t, HOPPER, Forward, false);
    assert_eq!(t.now(), format!("Unknown {}", 9 * HOPPER));
}

/// The list of a late agent may come in the middle of a pass.
#[test]
fn what_is_older_than_the_agent_is_of_no_phase() {
    for phase in [Forward, Backward, Optimizer] {
        let mut t = Train::new();
        t.born("act", 100, Forward).born("grad", 1000, Backward).free("act");
        match phase {
            Forward => _ = t.born("act", 100, Forward),
            Optimizer => _ = t.phase(Optimizer),
            _ => {}
        }
        t.s.stamp.flags = Flags::OLDER;
        t.born("older", 5000, Unknown);
        t.s.stamp.flags = Flags::default();
        for _ in 0..2 {
            t.born("inner", 20, Backward).free("inner").optimize(|_| ());
            t.born("next", 7, Forward);
            assert!(t.now().starts_with("Unknown 5000 "), "in {phase:?}: {}", t.now());
            t.free("next");
        }
    }
}

/// A whole parameter (FSDP2's) is reported with its allocation, by the frame that creates it.
#[test]
fn a_parameter_that_is_born_as_one_has_a_gradient_of_its_size() {
    let mut t = Train::new();
    t.born("shard", 100, Setup).retag("shard", Role::Parameter);
    let (address, use_as) = (t.next, (Role::Parameter, Forward));
    t.next += HOPPER;
    t.s.say(Body::BlockAlloc { address, bytes: HOPPER, pool: POOL, use_as });
    for _ in 0..2 {
        t.born("a", 10, Forward).born("g", HOPPER, Backward).free("a").optimize(|_| ());
        assert_eq!(t.now(), format!("Parameter {} Gradient {HOPPER}", HOPPER + 100));
        t.free("g");
    }
}

#[test]
fn what_ends_a_backward_pass_is_part_of_it() {
    let mut t = Train::new();
    t.iterate();
    // Shards of gradients are made after the last node, on its thread. Another thread loads the next input meanwhile.
    t.born("a", 1, Forward).born("inner", 20, Backward).free("inner");
    t.born_on(AUTOGRAD, "shards", 300, Unknown).born_on(AUTOGRAD, "copy", 40, Unknown);
    t.born_on(3, "x", 5, Unknown).free("copy").free("a");
    t.optimize(|_| ());
    assert_eq!(t.now(), "Unknown 5 Gradient 300");
    t.born("b", 2, Forward);
    assert_eq!(t.now(), "Gradient 300 Activation 2 Input 5");
    assert_eq!(t.rows()[1].intermediate_gradients.peak_bytes, 40);
}

#[test]
fn what_a_captured_graph_keeps_stays_what_it_is() {
    let mut t = Train::new();
    t.iterate();
    t.step(1);
    t.born("out", 50, Forward).born("w", HOPPER, Forward).born("g", 100, Backward);
    // A replayed graph allocates no more blocks.
    for number in 2..8 {
        t.optimize(|_| ()).step(number);
    }
    assert_eq!(t.now(), format!("Gradient 100 Activation 50 Workspace {HOPPER}"));
    for number in 8..12 {
        t.born("i", 20, Forward).free("i").optimize(|_| ()).step(number);
    }
    assert_eq!(t.now(), format!("Unknown 50 Gradient 100 Workspace {HOPPER}"));
}

#[test]
fn what_only_has_the_size_of_a_workspace_is_none() {
    let grow_old = |t: &mut Train| {
        for _ in 0..5 {
            t.optimize(|_| ());
            t.born("i", 20, Forward).born("j", 20, Backward).free("i").free("j");
        }
    };
    // The gradient of a parameter of that size, and one while parameters are unknown.
    for told in [Some(HOPPER), None] {
        let mut t = Train::new();
        if let Some(bytes) = told {
            t.born("w", bytes, Setup).retag("w", Role::Parameter);
        }
        t.born("a", 1, Forward).born("g", HOPPER, Backward).free("a");
        grow_old(&mut t);
        assert!(t.now().contains(&format!("Gradient {HOPPER}")), "{}", t.now());
    }
    // A cache of keys and values has too many blocks of that size for workspaces.
    let mut t = Train::new();
    for name in ["k0", "v0", "k1", "v1", "k2", "v2", "k3", "v3", "k4", "v4"] {
        t.born(name, OTHERS, Forward);
    }
    t.born("j", 20, Backward).free("j");
    grow_old(&mut t);
    assert_eq!(t.now(), format!("Unknown {}", 10 * OTHERS));
    // Reported otherwise.
    let mut t = Train::new();
    t.born("k", OTHERS, Forward).retag("k", Role::Buffer).born("j", 20, Backward).free("j");
    grow_old(&mut t);
    assert_eq!(t.now(), format!("Buffer {OTHERS}"));
}

#[test]
fn driver_allocations_of_libraries_are_scratch() {
    check(
        |s| {
            for (module, path) in
                [(1, "/opt/x/libnccl.so.2"), (2, "/usr/lib/libcudnn.so.9"), (3, "libcublasLt.so.13")]
            {
                s.push(Stamp { module, ..Stamp::default() }, Body::Module { base: 0, bytes: 0, path });
            }
            for module in 0..4 {
                s.stamp.module = module;
                s.alloc(0x1000 * u64::from(module + 1), 10);
            }
            s.stamp.module = 1;
            let seq = s.alloc(0x9000, 7);
            s.retag(0x9000, 0, seq, Role::Buffer);
        },
        &["tracked 47 = direct:- 20 + direct:-@Buffer 7 + direct:-@Workspace 20"],
    );
}

#[test]
fn what_is_told_wins_for_ever() {
    let mut t = Train::new();
    t.iterate();
    t.born("a", 100, Forward).retag("a", Role::Buffer).born("g", 10, Backward).retag("g", Role::Parameter);
    t.optimize(|t| _ = t.born("m", 5, Optimizer).retag("m", Role::Workspace));
    assert_eq!(t.now(), "Parameter 10 Workspace 5 Buffer 100");
    // The role of a freed block is reported: the peak uses it instead of the phase's.
    let mut t = Train::new();
    t.iterate();
    t.born("tmp", 9000, Forward);
    let (address, seq) = t.live["tmp"];
    t.free("tmp");
    assert_eq!(t.at_peak(), "Temporary 9000");
    t.s.retag(address, POOL, seq, Role::Parameter);
    assert_eq!(t.at_peak(), "Parameter 9000");
}

#[test]
fn a_later_tag_keeps_the_role_and_the_origin() {
    let mut t = Train::new();
    t.iterate();
    t.s.tag("first");
    t.born("a", 100, Forward);
    let (address, seq) = t.live["a"];
    t.s.tag("second").retag(address, POOL, seq, Role::Unknown);
    t.born("i", 1, Backward).free("i").optimize(|_| ());
    let process = t.s.process();
    let text = composition(&process.cells, &process.accounts[0].amounts);
    assert!(text.contains("block:second<first@Activation%Forward 100"), "{text}");
}

#[test]
fn what_waits_for_a_stream_has_ended_its_use() {
    let mut t = Train::new();
    t.iterate();
    t.born("a", 100, Forward).born("sent", 40, Forward).pending("sent");
    assert_eq!(t.now(), "Activation 100 Temporary 40");
    t.born("g", 10, Backward);
    assert_eq!(t.now(), "Activation 100 Temporary 50", "it is not an activation, though it is there");
    assert_eq!(t.s.account().pools[0].pending_bytes, 40);
    t.free("sent");
}

#[test]
fn another_try_in_the_middle_of_a_phase_changes_nothing() {
    let mut t = Train::new();
    t.iterate();
    t.born("a", 100, Forward);
    // The pool frees its other segments and retries.
    let reading = Reading::ABSENT;
    t.s.alloc(1 << 36, 4096);
    t.s.segment(1 << 36, 4096, POOL);
    t.s.say(Body::Pressure { bytes: 1 << 30, device_free_bytes: reading });
    t.s.unsegment(1 << 36, 4096, POOL);
    t.s.free(1 << 36);
    t.born("b", 50, Forward).born("i", 1, Backward).free("i");
    assert_eq!(t.now(), "Activation 150");
}

#[test]
fn programs_without_stamps_say_their_phases() {
    let mut t = Train::new();
    t.phase(Setup).born("w", 3000, Unknown);
    for _ in 0..3 {
        t.phase(Forward).born("a", 100, Unknown).born("tmp", 5, Unknown).free("tmp");
        t.phase(Backward).born("g", 10, Unknown).born("i", 5, Unknown).free("i").free("a");
        t.phase(Optimizer).born("o", 5, Unknown).free("o");
        assert_eq!(t.now(), "Unknown 3000 Gradient 10");
        t.free("g");
    }
}

#[test]
fn an_optimizer_without_marks_ends_with_what_comes_next() {
    let mut t = Train::new();
    for _ in 0..2 {
        t.born("a", 100, Forward).born("g", 10, Backward).free("a");
        t.born("m", 20, Optimizer).born("o", 5, Optimizer).free("o").free("g");
        t.born("x", 5, Unknown);
        assert_eq!(t.now(), "Unknown 5 OptimizerState 20");
        t.free("x").free("m");
    }
}

#[test]
fn roles_are_there_again_for_a_ledger_that_was_not_there() {
    let mut t = Train::new();
    // All blocks that are live in the middle of a second forward pass, in arbitrary order.
    let rows = [
        (11, 3000, Setup),
        (40, 60, Forward),    // a buffer that is never reported
        (50, 1000, Backward), // zeroed instead of freed
        (60, 6000, Optimizer),
        (70, 5, Unknown),
        (80, 100, Forward),
        (90, 200, Forward),
    ];
    let said = |at: usize| {
        let (seq, bytes, phase) = rows[at];
        let use_as = (Role::Unknown, phase);
        (seq, Body::BlockAlloc { address: (1 << 40) + 8192 * seq, bytes, pool: POOL, use_as })
    };
    t.s.seq = 100;
    let segment = Body::SegmentAdd { address: 1 << 40, bytes: 1 << 34, pool: POOL };
    let alloc =
        Body::AllocEnd { address: 1 << 40, bytes: 1 << 34, pool: 0, took_us: 0, memory: MemoryKind::Device };
    let pool = Body::PoolCreate { pool: POOL, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework };
    t.s.resync(12, |s| {
        s.restate(1, pool);
        s.restate(2, alloc);
        s.restate(3, segment);
        for at in [5, 2, 0, 6, 3, 1, 4] {
            let (seq, body) = said(at);
            s.restate(seq, body);
        }
        for (seq, role) in [(11, Role::Parameter), (90, Role::Buffer)] {
            let use_as = (role, Unknown);
            s.restate(
                seq,
                Body::Retag { address: (1 << 40) + 8192 * seq, block_seq: seq, pool: POOL, use_as },
            );
        }
    });
    let kept = "Parameter 3000 Gradient 1000 OptimizerState 6000";
    assert_eq!(t.now(), format!("Unknown 5 {kept} Activation 160 Buffer 200"));
    t.next = (1 << 40) + (1 << 30);
    t.born("i", 20, Backward);
    assert_eq!(t.now(), format!("Unknown 5 {kept} Activation 160 Temporary 20 Buffer 200"));
}

#[test]
fn blocks_that_were_lost_join_those_that_were_not() {
    let mut t = Train::new();
    t.iterate();
    t.born("a", 100, Forward);
    t.s.seq += 3; // lost: an activation, the first block of backward, a gradient
    t.born("i", 20, Backward);
    let after = t.s.seq;
    let restated = |seq: u64, bytes: u64, phase: Phase| {
        let use_as = (Role::Unknown, phase);
        (seq, Body::BlockAlloc { address: (1 << 40) + (1 << 30) + 8192 * seq, bytes, pool: POOL, use_as })
    };
    let known: Vec<(u64, Body<'static>)> = ["a", "i"]
        .iter()
        .map(|name| {
            let (address, seq) = t.live[name];
            let (bytes, phase) = if *name == "a" { (100, Forward) } else { (20, Backward) };
            (seq, Body::BlockAlloc { address, bytes, pool: POOL, use_as: (Role::Unknown, phase) })
        })
        .collect();
    let lost = [restated(after - 2, 1000, Backward), restated(after - 3, 200, Forward)];
    t.s.resync(7, |s| {
        let memory = MemoryKind::Device;
        s.restate(
            1,
            Body::PoolCreate { pool: POOL, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework },
        );
        s.restate(2, Body::AllocEnd { address: 1 << 40, bytes: 1 << 34, pool: 0, took_us: 0, memory });
        s.restate(3, Body::SegmentAdd { address: 1 << 40, bytes: 1 << 34, pool: POOL });
        lost.iter().chain(&known).for_each(|(seq, body)| s.restate(*seq, *body));
    });
    assert_eq!(t.now(), "Activation 300 Temporary 1020");
    t.free("i").free("a").optimize(|_| ());
    assert_eq!(t.now(), "Gradient 1000 Activation 200");
}

#[test]
fn devices_have_their_own_phases() {
    let mut t = Train::new();
    t.iterate();
    t.born("a", 100, Forward);
    let other = Stamp { device: 1, ..t.s.stamp };
    t.s.push(Stamp { seq: 0, ..other }, device(10));
    t.s.stamp.device = 1;
    t.s.pool(9, 0, true, PoolOwner::Framework);
    t.s.say(Body::BlockAlloc { address: 1 << 42, bytes: 64, pool: 9, use_as: (Role::Unknown, Backward) });
    t.s.stamp.device = 0;
    t.born("tmp", 10, Forward).free("tmp");
    assert_eq!(t.now(), "Activation 100", "backward on the other device settles nothing here");
}

fn level(peak: i64, last: i64) -> Level {
    Level { peak_bytes: peak, last_bytes: last }
}

#[test]
fn iterations_hold_what_each_of_them_was_made_of() {
    let mut t = Train::new();
    t.born("w", 3000, Setup).retag("w", Role::Parameter);
    for _ in 0..4 {
        t.iterate();
    }
    t.born("a", 1, Forward);
    let rows = t.rows();
    assert_eq!(rows.len(), 4);
    for (number, row) in rows.iter().enumerate() {
        assert_eq!((row.first, row.last, row.count), (number as u64, number as u64, 1));
        let mut copy = *row;
        let mut of = |role: Role| *copy.role_mut(role).expect("an amount");
        assert_eq!(of(Role::Parameter), level(3000, 3000));
        assert_eq!(of(Role::Gradient), level(1000, 0));
        assert_eq!(of(Role::Activation), level(100, 0));
        assert_eq!(row.intermediate_gradients, level(20, 0), "without the gradient that was born first");
        assert_eq!(row.temporaries, level(10, 0));
        assert_eq!(row.tracked, level(1 << 34, 1 << 34));
        assert_eq!(row.pool_reserved, level(1 << 34, 1 << 34));
        assert_eq!(
            of(Role::Input).peak_bytes,
            if number == 0 { 0 } else { 5 },
            "there is no step before the first"
        );
    }
    assert!(rows.windows(2).all(|pair| pair[0].end_ns == pair[1].start_ns));
    let open = t.s.ledger.iterations(KEY, 0).open.expect("another one");
    assert_eq!((open.first, open.parameters), (4, level(3000, 3000)));
}

#[test]
fn steps_that_the_program_says_are_its_iterations() {
    let mut t = Train::new();
    for number in [7, 8, 9, 3] {
        t.step(number);
        t.iterate().iterate();
    }
    t.s.seq += 1; // lost
    t.step(4).step(5);
    let rows = t.rows();
    assert_eq!(rows.iter().map(|row| row.first).collect::<Vec<_>>(), [7, 8, 9, 3, 4]);
    assert_eq!(rows.iter().map(|row| row.partial).collect::<Vec<_>>(), [false, false, false, true, false]);
    assert_eq!(rows[1].gradients, level(1000, 0));
}

#[test]
fn another_program_of_the_process_begins_anew() {
    let mut t = Train::new();
    t.iterate().born("a", 100, Forward);
    let hello = |instance| Body::Hello { start_ticks: 7, versions: 0, capabilities: 0, instance, claims: "" };
    t.s.control(hello(1));
    t.s.control(hello(2));
    t.s.control(device(9));
    t.s.seq = 0;
    assert_eq!(t.now(), "");
    t.live.clear();
    t.s.pool(POOL, 0, true, PoolOwner::Framework);
    t.s.alloc(1 << 40, 1 << 34);
    t.s.segment(1 << 40, 1 << 34, POOL);
    t.born("w", 5, Unknown).born("a", 100, Forward);
    assert_eq!(t.now(), "Unknown 105", "it has not trained yet");
    assert_eq!(t.rows().len(), 2, "what it had begun is over");
}

#[test]
fn blocks_keep_their_roles_when_an_error_frees_them() {
    let mut t = Train::new();
    t.iterate();
    // Another optimizer allocates its state, and a request fails.
    t.born("x", 5, Unknown).born("act", 100, Forward).born("grad", 1000, Backward);
    t.phase(Optimizer).born("m", 2000, Optimizer).born("v", 2000, Optimizer).born("t", 7, Optimizer);
    t.fail(2000);
    let at_failure = t.now();
    assert_eq!(at_failure, "Gradient 1000 OptimizerState 4000 Activation 100 Input 5 Temporary 7");
    t.free("t").free("v").free("m").free("grad").free("act");
    assert_eq!(t.at_peak(), at_failure, "both surfaces agree");
}

#[test]
fn blocks_of_the_first_forward_pass_are_activations_when_a_request_fails() {
    let mut t = Train::new();
    t.born("w", 5, Setup).born("x", 5, Unknown).born("a", 100, Forward).born("loss", 7, Unknown).fail(2000);
    assert_eq!(t.now(), "Unknown 10 Activation 107");
    t.free("a").free("loss");
    assert_eq!(t.at_peak(), "Unknown 10 Activation 107", "the error frees them");
    // Blocks that the first of several passes keeps may be results.
    let mut t = Train::new();
    t.born("x", 5, Unknown).born("a", 100, Forward).born("y", 5, Unknown).born("b", 100, Forward).fail(2000);
    assert_eq!(t.now(), "Unknown 210");
}

#[test]
fn results_of_earlier_evaluation_passes_are_not_temporary() {
    let mut t = Train::new();
    t.iterate();
    for name in ["a", "b", "c"] {
        t.born("batch", 5, Unknown).born("tmp", 10, Evaluation).born(name, 100, Evaluation);
        t.free("tmp").free("batch");
    }
    t.born("more", 1 << 20, Unknown);
    t.free("a").free("b").free("c");
    assert_eq!(t.at_peak(), "Unknown 1048776 Temporary 100", "only of the last pass it is not known");
}

#[test]
fn without_an_optimizer_passes_count_as_steps() {
    let mut t = Train::new();
    for name in ["a", "b", "c", "d", "e"] {
        t.born("x", 5, Unknown)
            .born("act", 100, Forward)
            .born("grad", 1000, Backward)
            .free("act")
            .free("grad");
        t.free("x").born(name, 70, Unknown);
    }
    t.born("x", 5, Unknown).born("act", 100, Forward);
    assert_eq!(t.now(), "Unknown 140 Activation 100 Input 215", "a log, not inputs");
}

/// Logits that an evaluation under `no_grad` keeps are not activations.
#[test]
fn results_of_passes_without_backward_are_not_activations() {
    let mut t = Train::new();
    for _ in 0..3 {
        t.born("x", 5, Unknown);
        for name in ["a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8"] {
            t.born(name, 100, Forward);
        }
        t.born("grad", 1000, Backward);
        for name in ["a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "x"] {
            t.free(name);
        }
        t.optimize(|t| _ = t.born("o", 7, Optimizer).free("o")).free("grad");
    }
    for name in ["a", "b", "c", "d"] {
        t.born("x", 5, Unknown).born("tmp", 10, Forward).born(name, 100, Forward).free("tmp").free("x");
    }
    assert_eq!(t.now(), "Unknown 300 Activation 100", "only of the last pass it is not known");
}
