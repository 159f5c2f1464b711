//! PyTorch memory snapshots: from `torch.cuda.memory._dump_snapshot()`, pickled `_snapshot()`, and files of its observers.
//!
//! The pickle is executed by a machine that cannot name or call code (opcode.rs, pickle.rs). Its values are converted to
//! segments, blocks and history (model.rs). The history is undone back to its start and then replayed (heap.rs, replay.rs):
//!
//! ```text
//! bytes -> opcode, pickle -> arena -> model -> heap (back), replay (forward) -> records
//!                                     stack: frames -> tags      rounding: requested bytes -> bytes of a block
//! ```
//!
//! Caveats name what the file does not contain: NVML's used bytes and thus the gap, and all memory outside PyTorch's
//! allocator (CUDA contexts, NCCL, cuBLAS's own).

mod arena;
mod bytes;
mod heap;
mod model;
mod opcode;
mod pickle;
mod replay;
mod rounding;
mod stack;

use bytes::Fault;
use gpumem_model::program_data::SnapshotFigures;
use gpumem_model::units::{plural, thousands};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use model::{Snapshot, Unfit};
use pickle::{MAX_MEMORY_BYTES, Unpickled, unpickle};
use replay::Told;

/// Returns whether a file begins with a pickle that contains a snapshot's names.
pub fn looks_like(head: &[u8]) -> bool {
    // Protocols 2 to 5 have a header; 0 and 1 begin with an empty dict or list.
    let is_pickle = matches!(
        head,
        [0x80, 0..=5, ..] | [b'}' | b']', b'q' | b'(' | b'.', ..] | [b'(', b'd' | b'l', b'p', ..]
    );
    let names: [&[u8]; 3] = [b"segments", b"device_traces", b"segment_type"];
    is_pickle && names.iter().any(|name| head.windows(name.len()).any(|window| window == *name))
}

/// Reads a snapshot.
///
/// # Errors
/// [`Error::Malformed`] with the place if the file is not a pickle of plain containers; [`Error::Unfit`] if it is a pickle of
/// something else; [`Error::Read`] if reading fails.
pub fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let unpickled = unpickle(input.into_reader(), MAX_MEMORY_BYTES).map_err(|fault| match fault {
        Fault::Bad { offset, what } => Error::Malformed { path: path.clone(), offset, what },
        Fault::Io { offset, source } => Error::Read { path: path.clone(), offset, source },
    })?;
    let snapshot = model::read(&unpickled.arena, unpickled.root);
    let snapshot = snapshot.and_then(|snapshot| match snapshot.is_empty() {
        true => {
            Err(Unfit("is a snapshot without a segment and without history: nothing was allocated".into()))
        }
        false => Ok(snapshot),
    });
    let snapshot = snapshot.map_err(|Unfit(what)| Error::Unfit { path, what })?;
    let told = replay::replay(sink, &unpickled.arena, &snapshot);
    sink.reject(snapshot.rejects.count);
    let figures = figures(&snapshot, &told);
    sink.figures(figures);
    for (code, text) in caveats(&unpickled, &snapshot, &told, &figures) {
        sink.caveat(code, text);
    }
    Ok(())
}

impl Snapshot {
    fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.rejects.count == 0 && self.traces.iter().all(Vec::is_empty)
    }

    fn entries(&self) -> u64 {
        self.traces.iter().map(|trace| trace.len() as u64).sum()
    }
}

fn caveats(
    unpickled: &Unpickled,
    snapshot: &Snapshot,
    told: &Told,
    figures: &SnapshotFigures,
) -> Vec<(&'static str, String)> {
    let mut caveats = vec![
        (
            "only_the_allocator",
            "a snapshot covers only PyTorch's allocator: it has neither the memory of CUDA, NCCL and other libraries nor \
             NVML's readings, so used and Untrackable are unknown"
                .to_owned(),
        ),
        ("snapshot_figures", in_words(figures)),
    ];
    let mut add = |code, text: String| caveats.push((code, text));
    match snapshot.entries() {
        0 => add(
            "no_history",
            "the snapshot has no history: its peak is its last moment, and there is no time \
             (torch.cuda.memory._record_memory_history() records one)"
                .into(),
        ),
        _ if told.start_bytes == 0 => {}
        _ => add(
            "partial_history",
            format!(
                "the history begins in the middle of the run, with {} bytes in use, and covers {} s: earlier peaks are unknown",
                thousands(told.start_bytes),
                seconds(told.history_ns)
            ),
        ),
    }
    if told.unnamed.0 > 0 {
        let (blocks, bytes) = (plural(told.unnamed.0, "block"), thousands(told.unnamed.1));
        let why = "allocated before stacks were recorded";
        add("no_stack", format!("{blocks} in use ({bytes} bytes) without a stack: {why}"));
    }
    add("roles_from_stacks", "roles and phases come from the stacks and the order of the history".into());
    let private = snapshot.segments.iter().filter(|segment| segment.is_private);
    let (count, bytes) = sums(private.map(|segment| segment.bytes));
    if count > 0 {
        let (segments, bytes) = (plural(count, "segment"), thousands(bytes));
        add("private_pools", format!("{segments} ({bytes} bytes) of private pools: CUDA graphs or MemPool"));
    }
    if told.contradictions + told.corrected > 0 {
        add(
            "contradictions",
            format!(
                "{} entries or rows contradict others and were skipped; {} blocks or segments were corrected at the end to \
                 match the snapshot",
                thousands(told.contradictions),
                thousands(told.corrected)
            ),
        );
    }
    let rejects = &snapshot.rejects;
    if rejects.count > 0 {
        let more = if rejects.count > rejects.named.len() as u64 { ", ..." } else { "" };
        let text =
            format!("{} rows cannot be used: {}{more}", thousands(rejects.count), rejects.named.join(", "));
        add("rejected_rows", text);
    }
    let unknown = |what: &str, (count, name): &(u64, String)| {
        format!("{} {what} that this version does not know (the first: `{name}`)", thousands(*count))
    };
    if snapshot.unknown_actions.0 > 0 {
        add("unknown_actions", unknown("trace entries have an action", &snapshot.unknown_actions));
    }
    if snapshot.unknown_states.0 > 0 {
        add("unknown_states", unknown("blocks have a state", &snapshot.unknown_states) + ": counted as used");
    }
    if snapshot.host_entries > 0 {
        let text = format!(
            "{} entries of the history of pinned host memory are not replayed: only its last state is shown",
            thousands(snapshot.host_entries)
        );
        add("host_history", text);
    }
    if unpickled.has_more {
        let text = format!(
            "the file continues after the pickle's end at byte {}: the rest was not read",
            unpickled.bytes
        );
        add("trailing_bytes", text);
    }
    caveats
}

fn sums(bytes: impl Iterator<Item = u64>) -> (u64, u64) {
    bytes.fold((0, 0_u64), |(count, sum), bytes| (count + 1, sum.saturating_add(bytes)))
}

fn figures(snapshot: &Snapshot, told: &Told) -> SnapshotFigures {
    let (segments, reserved_bytes) =
        sums(snapshot.segments.iter().filter(|segment| !segment.is_host).map(|segment| segment.bytes));
    let own = || snapshot.blocks.iter().filter(|block| !block.is_host);
    let (blocks, allocated_bytes) = sums(own().map(|block| block.bytes));
    let (_, requested_bytes) = sums(own().map(|block| block.requested));
    let (pending_blocks, _) = sums(own().filter(|block| block.is_pending).map(|block| block.bytes));
    SnapshotFigures {
        reserved_bytes,
        segments,
        allocated_bytes,
        blocks,
        pending_blocks,
        requested_bytes,
        idle_blocks: snapshot.idle_blocks,
        trace_entries: snapshot.entries(),
        peak_requested_bytes: told.peak_requested,
        peak_allocated_bytes: told.peak_allocated,
    }
}

/// Describes the totals for people, exact to the byte.
fn in_words(figures: &SnapshotFigures) -> String {
    let waiting = match figures.pending_blocks {
        0 => String::new(),
        waiting => format!(", {waiting} of them waiting for a stream"),
    };
    format!(
        "reserved {} bytes in {}; allocated {} in {}{waiting}; requested {}; {} idle; {} trace entries, \
         in which at most {} bytes were requested and {} allocated",
        thousands(figures.reserved_bytes),
        plural(figures.segments, "segment"),
        thousands(figures.allocated_bytes),
        plural(figures.blocks, "block"),
        thousands(figures.requested_bytes),
        plural(figures.idle_blocks, "block"),
        thousands(figures.trace_entries),
        thousands(figures.peak_requested_bytes),
        thousands(figures.peak_allocated_bytes),
    )
}

fn seconds(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e9)
}
