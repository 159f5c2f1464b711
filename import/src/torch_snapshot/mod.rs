//! Reads PyTorch memory snapshots: files of `torch.cuda.memory._dump_snapshot()` or of OOM observers, and pickled `_snapshot()`.
//!
//! A pickle is a program for a stack machine. The machine of this module cannot name or call code (opcode.rs, pickle.rs). The
//! resulting values are converted to segments, blocks and history (model.rs). The history is undone back to its start, then
//! replayed (heap.rs, replay.rs):
//!
//! ```text
//! bytes -> opcode, pickle -> arena -> model -> heap (back), replay (forward) -> records
//!                                     stack: frames -> tags
//! ```
//!
//! A snapshot does not contain NVML's used bytes, and no memory outside PyTorch's allocator (CUDA contexts, NCCL, cuBLAS's own
//! memory). Caveats of the run state this.

mod arena;
mod bytes;
mod heap;
pub(crate) mod model;
mod opcode;
mod pickle;
mod replay;
mod requests;
mod stack;

use super::feed::Feed;
use bytes::Fault;
use gpumem_model::program_data::SnapshotFigures;
use gpumem_model::units::{plural, thousands};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use model::{Snapshot, Unfit, Unknown};
use pickle::{MAX_MEMORY_BYTES, Unpickled, unpickle};
use replay::ReplayTotals;
pub(crate) use requests::History;
pub use requests::Requests;
use std::sync::Arc;

/// Returns whether a file begins with a pickle that contains names of a snapshot's fields.
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
/// [`Error::Malformed`] with the place if the file is not a pickle of plain containers. [`Error::Unsuitable`] if it is a pickle
/// but not a snapshot. [`Error::Read`] if reading fails.
pub fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let (unpickled, snapshot) = open(input)?;
    let totals = replay::replay(sink, &unpickled.arena, &snapshot);
    sink.reject(snapshot.rejects.count);
    let figures = figures(&snapshot, &totals);
    sink.figures(figures);
    Feed::new(sink).caveats(caveats(&unpickled, &snapshot, &totals, &figures));
    Ok(())
}

/// Reads the program's requests to PyTorch's allocator, for each device with history, the one with the most requests first; with
/// `device`, for this one only.
///
/// Errors are those of [`read`], and [`Error::Unsuitable`] if the snapshot has no history of a device.
pub fn requests(input: Input, device: Option<u8>) -> Result<Vec<Requests>, Error> {
    let path = input.path.clone();
    let (unpickled, snapshot) = open(input)?;
    let arena = Arc::new(unpickled.arena);
    let traces = (0..=u8::MAX).zip(&snapshot.traces);
    let traced =
        traces.filter(|(number, trace)| !trace.is_empty() && device.is_none_or(|device| device == *number));
    let mut devices: Vec<Requests> =
        traced.map(|(number, _)| requests::of(Arc::clone(&arena), &snapshot, number)).collect();
    Requests::sort(&mut devices);
    if devices.is_empty() {
        let what = "has no history of this GPU's allocations: call torch.cuda.memory._record_memory_history() before the \
                    program allocates, and then torch.cuda.memory._dump_snapshot()";
        return Err(Error::Unsuitable { path, what: what.into() });
    }
    Ok(devices)
}

fn open(input: Input) -> Result<(Unpickled, Snapshot), Error> {
    let path = input.path.clone();
    let unpickled = unpickle(input.into_reader(), MAX_MEMORY_BYTES).map_err(|fault| match fault {
        Fault::Bad { offset, what } => Error::Malformed { path: path.clone(), offset, what },
        Fault::Io { offset, source } => Error::Read { path: path.clone(), offset, source },
    })?;
    let unfit = |Unfit(what)| Error::Unsuitable { path: path.clone(), what };
    let snapshot = model::read(&unpickled.arena, unpickled.root).map_err(unfit)?;
    if snapshot.is_empty() {
        let what = "is a snapshot without a segment and without history: nothing was allocated";
        return Err(unfit(Unfit(what.into())));
    }
    Ok((unpickled, snapshot))
}

impl Snapshot {
    fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.rejects.count == 0 && self.traces.iter().all(Vec::is_empty)
    }

    fn entries(&self) -> u64 {
        self.traces.iter().map(|trace| trace.len() as u64).sum()
    }
}

/// Returns the caveats of a snapshot, each as (code, condition, text).
fn caveats(
    unpickled: &Unpickled,
    snapshot: &Snapshot,
    totals: &ReplayTotals,
    figures: &SnapshotFigures,
) -> [(&'static str, bool, String); 13] {
    let only = "a snapshot covers only PyTorch's allocator: it has neither the memory of CUDA, NCCL and other libraries nor \
                NVML's readings, so used and Untrackable are unknown";
    let no_history = "the snapshot has no history: its peak is its last moment, and there is no time \
                      (torch.cuda.memory._record_memory_history() records one)";
    let has_history = snapshot.entries() > 0;
    let partial = format!(
        "the history begins in the middle of the run, with {} bytes in use, and covers {} s: earlier peaks are unknown",
        thousands(totals.start_bytes),
        seconds(totals.history_ns)
    );
    let (blocks, bytes) = (plural(totals.unnamed.0, "block"), thousands(totals.unnamed.1));
    let why = "allocated before stacks were recorded";
    let no_stack = format!("{blocks} in use ({bytes} bytes) without a stack: {why}");
    let roles = "roles and phases come from the stacks and the order of the history";
    let private = snapshot.segments.iter().filter(|segment| segment.is_private);
    let (count, bytes) = sums(private.map(|segment| segment.bytes));
    let (segments, bytes) = (plural(count, "segment"), thousands(bytes));
    let private = format!("{segments} ({bytes} bytes) of private pools: CUDA graphs or MemPool");
    let contradictions = format!(
        "{} entries or rows contradict others and were skipped; {} blocks or segments were corrected at the end to \
         match the snapshot",
        thousands(totals.contradictions),
        thousands(totals.corrected)
    );
    let rejects = &snapshot.rejects;
    let rejected = format!("{} rows cannot be used: {}", thousands(rejects.count), rejects.listed());
    let unknown = |what: &str, Unknown { count, first }: &Unknown| {
        format!("{what} that this version does not know: {} (the first: `{first}`)", thousands(*count))
    };
    let (actions, states) = (&snapshot.unknown_actions, &snapshot.unknown_states);
    let host = format!(
        "{} entries of the history of pinned host memory are not replayed: only its last state is shown",
        thousands(snapshot.host_entries)
    );
    let end = unpickled.bytes;
    let trailing = format!("the file continues after the pickle's end at byte {end}: the rest was not read");
    [
        ("only_the_allocator", true, only.to_owned()),
        ("snapshot_figures", true, in_words(figures)),
        ("no_history", !has_history, no_history.to_owned()),
        ("partial_history", has_history && totals.start_bytes > 0, partial),
        ("no_stack", totals.unnamed.0 > 0, no_stack),
        ("roles_from_stacks", true, roles.to_owned()),
        ("private_pools", count > 0, private),
        ("contradictions", totals.contradictions + totals.corrected > 0, contradictions),
        ("rejected_rows", rejects.count > 0, rejected),
        ("unknown_actions", actions.count > 0, unknown("trace entries with an action", actions)),
        ("unknown_states", states.count > 0, unknown("blocks in a state", states) + ", which count as used"),
        ("host_history", snapshot.host_entries > 0, host),
        ("trailing_bytes", unpickled.has_more, trailing),
    ]
}

fn sums(bytes: impl Iterator<Item = u64>) -> (u64, u64) {
    bytes.fold((0, 0_u64), |(count, sum), bytes| (count + 1, sum.saturating_add(bytes)))
}

fn figures(snapshot: &Snapshot, totals: &ReplayTotals) -> SnapshotFigures {
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
        peak_requested_bytes: totals.peak_requested,
        peak_allocated_bytes: totals.peak_allocated,
    }
}

fn in_words(figures: &SnapshotFigures) -> String {
    let waiting = match figures.pending_blocks {
        0 => String::new(),
        pending => format!(", {pending} of them waiting for a stream"),
    };
    let history = match figures.trace_entries {
        0 => "no history".to_owned(),
        entries => format!(
            "history of {}, with at most {} bytes requested and {} allocated",
            if entries == 1 { "1 entry".to_owned() } else { thousands(entries) + " entries" },
            thousands(figures.peak_requested_bytes),
            thousands(figures.peak_allocated_bytes),
        ),
    };
    format!(
        "reserved {} bytes in {}; allocated {} in {}{waiting}; requested {}; {} idle; {history}",
        thousands(figures.reserved_bytes),
        plural(figures.segments, "segment"),
        thousands(figures.allocated_bytes),
        plural(figures.blocks, "block"),
        thousands(figures.requested_bytes),
        plural(figures.idle_blocks, "block"),
    )
}

fn seconds(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e9)
}
