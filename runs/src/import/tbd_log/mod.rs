//! Training logs with the annotations of the TBD suite's MXNet memory profiler, inside ordinary output.
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
//! There is no clock: time is the number of the line. Progress bars end lines with a carriage return, which
//! ends them here too. A tag `in_arg:encoder_weight` becomes the path
//! `in_arg/encoder_weight`, and its prefix gives the role. The allocator that writes these lines keeps
//! what it frees, so allocations are what the process holds from the driver.

mod line;

use crate::builder::Sink;
use crate::input::{Error, Input, Line, Lines};
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_wire::{
    Absence, Body, ByeReason, ClockKind, DeviceIdKind, Flags, MAX_TAG_BYTES, MemoryKind, Phase, Reading,
    Record, Role, Stamp,
};
use line::{Annotation, MIB, ProcessReading, annotations, batch, readings};
use std::collections::HashMap;

/// Where made-up addresses begin: the format has none.
const FIRST_ADDRESS: u64 = 1 << 40;
/// Bad lines that are named; all are counted.
const NAMED_LINES: usize = 5;
const EXAMPLE: &str = "[mem] Allocate 1024 bytes GPU memory (in_arg:fc_weight).";

/// Whether the beginning of a file has a line of this format.
pub fn looks_like(head: &[u8]) -> bool {
    let has = |needle: &[u8]| head.windows(needle.len()).any(|window| window == needle);
    has(b"[mem] Allocate ") || has(b" bytes GPU memory (") || has(b" MB GPU global memory free, total ")
}

/// Role that a tag's prefix tells.
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

/// Turns annotations into records.
struct Reader<'s> {
    sink: &'s mut dyn Sink,
    line: u64,
    seq: u64,
    address: u64,
    tags: HashMap<String, u32>,
    /// The pid whose readings are this process's.
    pid: Option<u32>,
    sample: u64,
    has_device: bool,
    allocations: u64,
    cut_tags: u64,
    estimated: u64,
    /// Readings that name other processes too.
    neighbours: bool,
    /// Readings of a process that have no one number.
    ambiguous: u64,
    releases: u64,
    rejected: Vec<u64>,
    rejects: u64,
}

/// The process that wrote the log; its pid is known only from the first reading on.
const SELF: ProcessKey = ProcessKey { pid: 0, start_ticks: 0 };

impl Reader<'_> {
    fn stamp(&self) -> Stamp {
        Stamp { time_ns: self.line, device: 0, ..Stamp::default() }
    }

    fn say(&mut self, origin: Origin, stamp: Stamp, body: Body<'_>) {
        self.sink.observe(origin, &Record { stamp, body });
    }

    fn ours(&mut self, stamp: Stamp, body: Body<'_>) {
        self.say(Origin::Process(SELF), stamp, body);
    }

    fn ordered(&mut self) -> Stamp {
        self.seq += 1;
        Stamp { seq: self.seq, ..self.stamp() }
    }

    fn name_device(&mut self, total_mib: Option<u64>) {
        if self.has_device && total_mib.is_none() {
            return;
        }
        self.has_device = true;
        let body = Body::Device {
            uuid_high: 0,
            uuid_low: 0,
            total_bytes: Reading(total_mib.map(|mib| mib * MIB)),
            ordinal: 0,
            id: DeviceIdKind::Ordinal,
            name: "",
        };
        let stamp = self.stamp();
        self.say(Origin::Host, stamp, body);
        self.ours(stamp, body);
    }

    fn tag(&mut self, text: &str) -> u32 {
        let mut end = text.len().min(MAX_TAG_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.cut_tags += u64::from(end < text.len());
        let text = &text[..end];
        if let Some(&id) = self.tags.get(text) {
            return id;
        }
        let path = text.replace(':', "/");
        let id = self.tags.len() as u32 + 1;
        let stamp = Stamp { tag: id, ..self.stamp() };
        self.ours(stamp, Body::Tag { path: &path });
        self.tags.insert(text.to_owned(), id);
        id
    }

    fn allocate(&mut self, bytes: u64, tag: &str, estimated: bool) {
        self.name_device(None);
        self.allocations += 1;
        self.estimated += u64::from(estimated);
        let id = self.tag(tag);
        let address = self.address;
        self.address = self.address.wrapping_add(bytes.max(1).next_multiple_of(512));
        let flags = if estimated { Flags::ESTIMATED } else { Flags::default() };
        let stamp = Stamp { tag: id, flags, ..self.ordered() };
        let birth = stamp.seq;
        self.ours(stamp, Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device });
        let role = role(tag);
        if role != Role::Unknown {
            let stamp = self.ordered();
            let use_as = (role, Phase::Unknown);
            self.ours(stamp, Body::Retag { address, block_seq: birth, pool: 0, use_as });
        }
    }

    fn reading(&mut self, readings: &[ProcessReading<'_>]) {
        self.name_device(None);
        if self.pid.is_none() {
            // The log does not say which process wrote it; it is the one that holds what is allocated.
            let largest = readings.iter().max_by_key(|reading| reading.mib);
            if let Some(ProcessReading { name, pid, .. }) = largest {
                self.pid = Some(*pid);
                let facts = format!("pid={pid}\ncomm={name}");
                self.facts(&facts);
            }
        }
        self.neighbours |= readings.len() > 1;
        self.ambiguous += readings.iter().filter(|reading| reading.mib.is_none()).count() as u64;
        self.sample += 1;
        let (stamp, number, last_seq) = (self.stamp(), self.sample, self.seq);
        self.ours(stamp, Body::Watermark { last_seq, in_flight_since_ns: 0 });
        self.say(Origin::Host, stamp, Body::SampleBegin { number });
        for &ProcessReading { pid, mib, .. } in readings {
            let thread = if Some(pid) == self.pid { SELF.pid } else { pid };
            let body = Body::ProcessSample {
                start_ticks: SELF.start_ticks,
                used_bytes: Reading(mib.map(|mib| mib * MIB)),
                absence: Absence::NotAvailable,
                lists: 0,
            };
            self.say(Origin::Host, Stamp { thread, ..stamp }, body);
        }
        self.say(Origin::Host, stamp, Body::SampleEnd { number, result: 0 });
    }

    fn facts(&mut self, facts: &str) {
        let stamp = Stamp { thread: SELF.pid, ..self.stamp() };
        let body =
            Body::ProcessFacts { start_ticks: SELF.start_ticks, uid: Reading::ABSENT, parent_pid: 0, facts };
        self.say(Origin::Host, stamp, body);
    }

    fn reject(&mut self) {
        self.rejects += 1;
        self.sink.reject(1);
        if self.rejected.len() < NAMED_LINES {
            self.rejected.push(self.line);
        }
    }

    fn line(&mut self, line: &str) {
        for annotation in annotations(line) {
            match annotation {
                Annotation::Allocation { bytes, tag, estimated } => self.allocate(bytes, tag, estimated),
                Annotation::Device { free_mib, total_mib } => {
                    self.name_device(Some(total_mib));
                    let body = Body::DeviceSample {
                        used_bytes: (total_mib - free_mib) * MIB,
                        free_bytes: free_mib * MIB,
                        reserved_bytes: Reading::ABSENT,
                    };
                    let stamp = self.stamp();
                    self.say(Origin::Host, stamp, body);
                }
                Annotation::Release => self.releases += 1,
                Annotation::Unreadable => self.reject(),
            }
        }
        if let Some(number) = batch(line) {
            let stamp = self.ordered();
            self.ours(stamp, Body::Step { number });
        }
        let (readings, unreadable) = readings(line);
        (0..unreadable).for_each(|_| self.reject());
        if !readings.is_empty() {
            self.reading(&readings);
        }
        if let Some((_, command)) = line.split_once("] Command: ") {
            let facts = format!("command={}", command.chars().take(4096).collect::<String>());
            self.facts(&facts);
        }
    }

    fn caveats(&mut self) {
        self.sink.caveat("no_clock", "the log has no clock: times are its line numbers".into());
        self.sink.caveat(
            "no_frees",
            "the log records no frees: its allocator keeps what it takes, so tracked only grows".into(),
        );
        if self.releases > 0 {
            let text =
                format!("{} releases without size or address: tracked is an upper bound", self.releases);
            self.sink.caveat("releases", text);
        }
        if self.rejects > 0 {
            let named: Vec<String> = self.rejected.iter().map(u64::to_string).collect();
            let more = if self.rejects > named.len() as u64 { ", ..." } else { "" };
            let text = format!(
                "{} records cannot be read (line {}{more}); right is: {EXAMPLE}",
                self.rejects,
                named.join(", "),
            );
            self.sink.caveat("rejected_lines", text);
        }
        if self.neighbours {
            let text =
                "nvidia-smi names several processes: the one with most memory at the first reading is taken";
            self.sink.caveat("several_processes", format!("{text} for the log's own"));
        }
        if self.ambiguous > 0 {
            let text = "a process stands in a reading without one number: unreadable, or on several GPUs";
            self.sink.caveat("ambiguous_readings", format!("{} times {text}", self.ambiguous));
        }
        if self.estimated > 0 {
            let text = format!("{} allocations are given in whole MiB only", self.estimated);
            self.sink.caveat("estimated", text);
        }
        if self.cut_tags > 0 {
            let text = format!("{} tags are longer than {MAX_TAG_BYTES} bytes and were cut", self.cut_tags);
            self.sink.caveat("cut_tags", text);
        }
    }
}

/// Reads a log.
///
/// # Errors
/// [`Error::NothingFound`] if no line is an annotation, [`Error::Read`] if reading fails.
pub fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let mut lines = Lines::new(input.into_reader());
    let mut reader = Reader {
        sink,
        line: 0,
        seq: 0,
        address: FIRST_ADDRESS,
        tags: HashMap::new(),
        pid: None,
        sample: 0,
        has_device: false,
        allocations: 0,
        cut_tags: 0,
        estimated: 0,
        neighbours: false,
        ambiguous: 0,
        releases: 0,
        rejected: Vec::new(),
        rejects: 0,
    };
    let anchor = Body::ClockAnchor { realtime_ns: 0, boottime_ns: 0, clock: ClockKind::Ordinal };
    reader.say(Origin::Host, Stamp::default(), anchor);
    let (mut too_long, mut not_utf8) = (0_u64, 0_u64);
    loop {
        let offset = lines.offset;
        let line = lines.next_line().map_err(|source| Error::Read { path: path.clone(), offset, source })?;
        match line {
            None => break,
            Some(Line::Text(text)) => {
                not_utf8 += u64::from(matches!(text, std::borrow::Cow::Owned(_)));
                reader.line += 1;
                text.split('\r').for_each(|part| reader.line(part));
            }
            Some(Line::Endless) => {
                reader.line += 1;
                reader.reject();
                let text =
                    format!("line {} (byte {offset}) has no end: nothing after it was read", reader.line);
                reader.sink.caveat("endless_line", text);
                break;
            }
            Some(Line::TooLong) => {
                reader.line += 1;
                reader.reject();
                let text =
                    format!("line {} (byte {offset}) is longer than 1 MiB and was skipped", reader.line);
                if too_long == 0 {
                    reader.sink.caveat("long_lines", text);
                }
                too_long += 1;
            }
        }
    }
    if reader.allocations == 0 && reader.sample == 0 {
        return Err(Error::NothingFound { path, format: "tbd-log", lines: reader.line, example: EXAMPLE });
    }
    reader.caveats();
    if not_utf8 > 0 {
        let text = format!("{not_utf8} lines are not UTF-8: their bytes are shown as \\x..");
        reader.sink.caveat("not_utf8", text);
    }
    let stamp = reader.stamp();
    reader.ours(stamp, Body::Bye { reason: ByeReason::Exit });
    let gone = Body::ProcessGone { start_ticks: SELF.start_ticks, status: Reading::ABSENT };
    reader.say(Origin::Host, Stamp { thread: SELF.pid, ..stamp }, gone);
    Ok(())
}
