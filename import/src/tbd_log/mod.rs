//! Reads training logs that contain annotations of the TBD suite's MXNet memory profiler among other output.
//!
//! ```text
//! [mem] Allocate N bytes GPU memory (TAG).            one device allocation; N in bytes
//! [mem] F MB GPU global memory free, total T MB.      device memory after it; whole MiB, labelled MB
//! ... Allocate N MB GPU memory (TAG).                 the same from some operators, whole MiB
//! ... Memory Usage: NAME-pid_PID=M ...                nvidia-smi's reading for the process, MiB
//! ... Batch [K] ...                                   a step
//! [mem] Release GPU memory.                           a free, without size or address
//! ```
//!
//! The file has no clock, so times are line numbers. A carriage return, as in progress bars, also ends a line. A tag
//! `in_arg:encoder_weight` becomes the path `in_arg/encoder_weight`, and its prefix gives the role. The allocator that writes
//! these lines keeps freed memory. Therefore the sum of all allocations is the memory that the process holds from the driver.

mod line;

use super::feed::{Feed, MIB, Piece, ProcessFeed};
use super::lines::{contains, lines};
use gpumem_ledger::ProcessKey;
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_wire::{Absence, Role};
use line::{Annotation, ProcessReading, annotations, batch, readings};
use std::collections::BTreeSet;

const FORMAT: &str = "tbd-log";
/// Maximum number of processes in NVML readings. Every reading takes time for each process.
const MAX_PIDS: usize = 256;
const EXAMPLE: &str = "[mem] Allocate 1024 bytes GPU memory (in_arg:fc_weight).";

/// Returns whether a file begins with lines of this format.
pub fn looks_like(head: &[u8]) -> bool {
    let has = |needle: &[u8]| contains(head, needle);
    has(b"[mem] Allocate ") || has(b" bytes GPU memory (") || has(b" MB GPU global memory free, total ")
}

pub(super) fn role(tag: &str) -> Role {
    let prefixes = [
        ("in_arg:", Role::Parameter),
        ("arg_grad:", Role::Gradient),
        ("aux_state", Role::Buffer),
        ("_optimizer_weight_update_", Role::OptimizerState),
        ("forward_features:", Role::Activation),
        ("workspace:", Role::Workspace),
        ("cpu_workspace:", Role::Workspace),
        ("reserved_space:", Role::Workspace),
        ("temporal_space:", Role::Temporary),
    ];
    let inputs = ["source", "target", "target_label", "data"];
    match prefixes.iter().find(|(prefix, _)| tag.starts_with(prefix)) {
        Some((_, role)) => *role,
        None if inputs.contains(&tag) => Role::Input,
        None => Role::Unknown,
    }
}

#[derive(Default)]
struct Reader {
    /// The process that wrote the log.
    own: ProcessFeed,
    /// Pid of the process that wrote the log; unknown until the first nvidia-smi reading.
    pid: Option<u32>,
    /// Pids in all readings so far.
    pids: BTreeSet<u32>,
    allocations: u64,
    readings: u64,
    /// Number of allocations with sizes in whole MiB.
    estimated: u64,
    /// Whether some reading lists several processes.
    neighbours: bool,
    /// Number of readings of a process without MiB, see [`ProcessReading`].
    ambiguous: u64,
    releases: u64,
}

impl Reader {
    fn allocate(&mut self, feed: &mut Feed<'_>, bytes: u64, tag: &str, estimated: bool) {
        self.allocations += 1;
        self.estimated += u64::from(estimated);
        let role = role(tag);
        let tag = self.own.tag(feed, &tag.replace(':', "/"));
        self.own.allocate(feed, Piece { estimated, ..Piece::new(0, bytes, tag, role) });
    }

    fn reading(&mut self, feed: &mut Feed<'_>, number: u64, readings: &[ProcessReading<'_>]) {
        self.own.device(feed, 0);
        if self.pid.is_none() {
            // The log does not name its own process. It is assumed to be the process with the most memory.
            let largest = readings.iter().max_by_key(|reading| reading.mib);
            if let Some(ProcessReading { name, pid, .. }) = largest {
                self.pid = Some(*pid);
                feed.fact(self.own.key, "pid", &pid.to_string());
                feed.fact(self.own.key, "comm", name);
            }
        }
        self.readings += 1;
        self.neighbours |= readings.len() > 1;
        self.ambiguous += readings.iter().filter(|reading| reading.mib.is_none()).count() as u64;
        self.pids.extend(self.pid);
        let charged = readings.iter().filter_map(|&ProcessReading { pid, mib, .. }| {
            if self.pids.len() >= MAX_PIDS && !self.pids.contains(&pid) {
                feed.reject(number);
                return None;
            }
            self.pids.insert(pid);
            let key = if Some(pid) == self.pid { self.own.key } else { ProcessKey { pid, start_ticks: 0 } };
            Some((key, mib.map(|mib| mib * MIB).ok_or(Absence::NotAvailable)))
        });
        let charged: Vec<_> = charged.collect();
        self.own.watermark(feed);
        feed.reading(0, &charged);
    }

    fn line(&mut self, feed: &mut Feed<'_>, number: u64, line: &str) {
        for annotation in annotations(line) {
            match annotation {
                Annotation::Allocation { bytes, tag, estimated } => {
                    self.allocate(feed, bytes, tag, estimated)
                }
                Annotation::Device { free_mib, total_mib } => {
                    self.own.device(feed, 0);
                    feed.device(0, Some(total_mib * MIB));
                    feed.device_memory(0, total_mib * MIB, free_mib * MIB);
                }
                Annotation::Release => self.releases += 1,
                Annotation::Unreadable => feed.reject(number),
            }
        }
        if let Some(number) = batch(line) {
            self.own.step(feed, number);
        }
        let (readings, unreadable) = readings(line);
        (0..unreadable).for_each(|_| feed.reject(number));
        if !readings.is_empty() {
            self.reading(feed, number, &readings);
        }
        if let Some((_, command)) = line.split_once("] Command: ") {
            feed.fact(self.own.key, "command", command);
        }
    }

    fn caveats(&self, feed: &mut Feed<'_>) {
        let Reader { neighbours, ambiguous, estimated, releases, .. } = *self;
        feed.caveat("no_clock", "the log has no clock: times are its line numbers");
        let no_frees = "the log records no frees: its allocator keeps freed memory, so tracked only grows";
        feed.caveat("no_frees", no_frees);
        let unsized_releases =
            format!("{releases} releases without size or address: tracked is an upper bound");
        feed.caveats([("releases", releases > 0, unsized_releases)]);
        feed.caveat_rejects("record", "line", EXAMPLE);
        let several = "nvidia-smi lists several processes: the log is attributed to the one with the most memory at the first reading";
        let unclear = format!(
            "{ambiguous} readings without a number for a process: unreadable, or it uses several GPUs"
        );
        feed.caveats([
            ("several_processes", neighbours, several.to_owned()),
            ("ambiguous_readings", ambiguous > 0, unclear),
            ("estimated", estimated > 0, format!("{estimated} allocations have sizes in whole MiB only")),
        ]);
    }
}

/// Reads a log.
///
/// # Errors
/// [`Error::NothingFound`] if no line is an annotation, [`Error::Read`] if reading fails.
pub fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let mut feed = Feed::without_clock(sink);
    let mut reader = Reader::default();
    let read = lines(input, &mut feed, |feed, number, text| {
        feed.time_ns = number;
        text.split('\r').for_each(|part| reader.line(feed, number, part));
    })?;
    if reader.allocations == 0 && reader.readings == 0 {
        return Err(Error::NothingFound { path, format: FORMAT, lines: read, example: EXAMPLE });
    }
    reader.caveats(&mut feed);
    reader.own.end(&mut feed);
    Ok(())
}
