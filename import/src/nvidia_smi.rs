//! Reads CSV output of nvidia-smi about processes: the bytes that the driver charges to each process, without names.
//!
//! ```text
//! Wall time,Step,Value                             a scalar as TensorBoard exports it: seconds since 1970, MiB
//! 1543210121.2513301,50,4031.0
//!
//! timestamp, gpu_uuid, pid, process_name, used_gpu_memory [MiB]        nvidia-smi --query-compute-apps=... --format=csv,
//! 2018/11/26 05:28:41.251, GPU-..., 12898, python3, 4031 MiB           with any of its columns, once or with -l
//! ```
//!
//! Rows with the same time are one reading of all processes. Without times, a reading ends where a process appears again.

use super::feed::{Feed, MAX_BYTES, MIB};
use super::lines::{fields, first_line, lines};
use gpumem_ledger::ProcessKey;
use gpumem_model::units::plural;
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_wire::{Absence, ClockKind};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

const FORMAT: &str = "nvidia-smi-csv";
const EXAMPLE: &str = "1543210121.25,50,4031.0 below \"Wall time,Step,Value\", or 12898, 4031 MiB below \"pid, used_gpu_memory [MiB]\"";
/// Maximum number of processes that are read; rows of further ones are rejected.
const MAX_PROCESSES: usize = 1024;
const MAX_GPUS: usize = 255;
/// Number of consecutive readings without a process after which it counts as ended. The same pid later is a new process.
const MAX_MISSED: u32 = 8;

pub(super) fn looks_like(head: &[u8]) -> bool {
    first_line(head).and_then(fields).is_some_and(|names| Columns::parse(&names).is_some())
}

/// What the columns of a file mean, according to its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Columns {
    /// The file has TensorBoard's columns: wall time, step, value.
    Scalar,
    Processes {
        count: usize,
        time: Option<usize>,
        /// Column that identifies the GPU best: the UUID, else another column.
        gpu: Option<usize>,
        model: Option<usize>,
        pid: usize,
        name: Option<usize>,
        used: usize,
    },
    /// The file has columns about whole devices and no processes.
    Devices,
}

impl Columns {
    fn parse(names: &[Cow<'_, str>]) -> Option<Columns> {
        if names == ["Wall time", "Step", "Value"] {
            return Some(Columns::Scalar);
        }
        // Returns the column of the first name in `wanted` that the header has.
        let find = |wanted: &[&str]| {
            let column =
                |wanted: &&str| names.iter().position(|name| name.split(' ').next() == Some(*wanted));
            wanted.iter().find_map(column)
        };
        if let (Some(pid), Some(used)) = (find(&["pid"]), find(&["used_gpu_memory", "used_memory"])) {
            return Some(Columns::Processes {
                count: names.len(),
                time: find(&["timestamp"]),
                gpu: find(&["gpu_uuid", "gpu_bus_id", "gpu_serial"]),
                model: find(&["gpu_name"]),
                pid,
                name: find(&["process_name", "name"]),
                used,
            });
        }
        find(&["memory.used"]).map(|_| Columns::Devices)
    }
}

/// Parses a number of MiB, with or without its unit, to bytes. A text such as `[N/A]` is the reason why there is no number.
fn mib(text: &str) -> Option<Result<u64, Absence>> {
    let text = text.trim();
    match text {
        "[N/A]" | "N/A" | "[Not Supported]" => return Some(Err(Absence::NotAvailable)),
        "[Insufficient Permissions]" => return Some(Err(Absence::NoPermission)),
        _ => {}
    }
    let number: f64 = text.strip_suffix("MiB").unwrap_or(text).trim().parse().ok()?;
    let bytes = (number * MIB as f64).round();
    (0.0..=MAX_BYTES as f64).contains(&bytes).then_some(Ok(bytes as u64))
}

/// Parses a time such as `2018/11/26 05:28:41.251` as UTC, in ns since 1970. The file does not state a time zone.
fn timestamp(text: &str) -> Option<u64> {
    let (date, time) = text.trim().split_once(' ')?;
    let mut date = date.split(['/', '-']).map(|part| part.parse::<u64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut time = time.split(':').map(|part| part.parse::<u64>().ok());
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    let is_date = (1970..2500).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !is_date || hour > 23 || minute > 59 || second > 60 || fraction.len() > 9 {
        return None;
    }
    let nanos = fraction.parse::<u64>().ok()? * 10_u64.pow(9 - fraction.len() as u32);
    // The year is counted from March, so that a leap day is its last day.
    let (year, month) = if month < 3 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = (365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1)
        .checked_sub(719_468)?;
    Some((((days * 24 + hour) * 60 + minute) * 60 + second) * 1_000_000_000 + nanos)
}

/// Parses a UUID of the form `GPU-` and 32 hexadecimal digits.
fn uuid(text: &str) -> Option<u128> {
    let digits: String = text.strip_prefix("GPU-")?.chars().filter(|&character| character != '-').collect();
    (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok()).flatten()
}

/// Processes of one reading with their used bytes, by slot of the GPU.
type Group = BTreeMap<u8, Vec<(ProcessKey, Result<u64, Absence>)>>;

#[derive(Default)]
struct Log {
    columns: Option<Columns>,
    /// Identifiers of the GPUs; the index is the slot.
    gpus: Vec<String>,
    /// Live processes by pid: key, and number of readings since the last one that contained the process.
    live: BTreeMap<u32, (ProcessKey, u32)>,
    /// Number of processes so far, including ended ones.
    processes: usize,
    /// Rows of the reading that is being collected.
    group: Group,
    /// GPUs that had a process in the last reading.
    busy: BTreeSet<u8>,
    /// Time of the current reading, on the file's clock.
    group_time: Option<u64>,
    group_line: u64,
    /// Time of the first reading, on the file's clock.
    first: Option<u64>,
    readings: u64,
    /// Number of readings with a time before that of an earlier reading.
    backwards: u64,
    /// Whether some row did not identify its GPU.
    nameless: bool,
}

impl Log {
    fn line(&mut self, feed: &mut Feed<'_>, number: u64, line: &str) {
        let Some(fields) = fields(line) else { return feed.reject(number) };
        if line.trim().is_empty() {
            return;
        }
        // With option -l, some versions of nvidia-smi repeat the header.
        if let Some(columns) = Columns::parse(&fields) {
            self.columns.get_or_insert(columns);
            return;
        }
        let read = match self.columns {
            Some(Columns::Scalar) => self.scalar(feed, number, &fields),
            Some(Columns::Processes { .. }) => self.process(feed, number, &fields),
            Some(Columns::Devices) => Some(()),
            None => None,
        };
        if read.is_none() {
            feed.reject(number);
        }
    }

    fn scalar(&mut self, feed: &mut Feed<'_>, number: u64, fields: &[Cow<'_, str>]) -> Option<()> {
        let [time, step, value] = fields else { return None };
        let seconds: f64 = time.parse().ok()?;
        step.parse::<f64>().ok()?;
        let time_ns = (0.0..9e9).contains(&seconds).then_some((seconds * 1e9) as u64)?;
        let used = mib(value)?;
        self.flush(feed);
        self.add(number, Some(time_ns), 0, (ProcessKey::default(), used));
        Some(())
    }

    fn process(&mut self, feed: &mut Feed<'_>, number: u64, fields: &[Cow<'_, str>]) -> Option<()> {
        let Some(Columns::Processes { count, time, gpu, model, pid, name, used }) = self.columns else {
            return None;
        };
        if fields.len() != count {
            return None;
        }
        let field = |at: usize| fields.get(at).map(|field| &**field);
        let time_ns = match time {
            Some(at) => Some(timestamp(field(at)?)?),
            None => None,
        };
        let pid: u32 = field(pid)?.parse().ok().filter(|pid| *pid != 0)?;
        let used = mib(field(used)?)?;
        let gpu = gpu.and_then(field).unwrap_or_default();
        self.nameless |= gpu.is_empty();
        let model = model.and_then(field).unwrap_or_default();
        let known = self.live.get(&pid).map(|(key, _)| *key);
        let slot = self.gpus.iter().position(|known| known == gpu);
        let is_full = known.is_none() && self.processes >= MAX_PROCESSES
            || slot.is_none() && self.gpus.len() >= MAX_GPUS;
        if is_full {
            return None;
        }
        let slot = slot.unwrap_or(self.gpus.len()) as u8;
        let is_same = |(other, _): &(ProcessKey, _)| Some(*other) == known;
        let is_again = self.group.get(&slot).is_some_and(|rows| rows.iter().any(is_same));
        if is_again || time_ns != self.group_time {
            self.flush(feed);
        }
        if usize::from(slot) == self.gpus.len() {
            self.gpus.push(gpu.chars().take(128).collect());
            match uuid(gpu) {
                Some(uuid) => feed.gpu(slot, uuid, model),
                None => feed.device(slot, None),
            }
        }
        let key = match self.live.get(&pid) {
            Some((key, _)) => *key,
            None => {
                let key = ProcessKey { pid, start_ticks: self.processes as u64 };
                self.processes += 1;
                self.live.insert(pid, (key, 0));
                let name = name.and_then(field).unwrap_or_default();
                let comm = name.rsplit('/').next().unwrap_or(name);
                if !comm.is_empty() {
                    feed.fact(key, "comm", comm);
                }
                key
            }
        };
        self.add(number, time_ns, slot, (key, used));
        Some(())
    }

    fn add(&mut self, line: u64, time_ns: Option<u64>, slot: u8, row: (ProcessKey, Result<u64, Absence>)) {
        if self.group.is_empty() {
            (self.group_time, self.group_line) = (time_ns, line);
        }
        self.group.entry(slot).or_default().push(row);
    }

    /// Emits the current reading. A GPU that had a process only in the last reading is emitted without processes.
    fn flush(&mut self, feed: &mut Feed<'_>) {
        let group = std::mem::take(&mut self.group);
        if group.is_empty() {
            return;
        }
        let first = *self.first.get_or_insert_with(|| {
            let clock = if self.group_time.is_some() { ClockKind::Wall } else { ClockKind::Ordinal };
            feed.anchor(clock, self.group_time.unwrap_or(0));
            self.group_time.unwrap_or(0)
        });
        let time_ns = self.group_time.map_or(self.group_line, |time_ns| time_ns.saturating_sub(first));
        self.backwards += u64::from(time_ns < feed.time_ns);
        feed.time_ns = feed.time_ns.max(time_ns);
        self.readings += 1;
        let busy: BTreeSet<u8> = group.keys().copied().collect();
        for &slot in busy.union(&self.busy) {
            feed.device(slot, None);
            feed.reading(slot, group.get(&slot).map_or(&[], Vec::as_slice));
        }
        self.busy = busy;
        for (_, missed) in self.live.values_mut() {
            *missed += 1;
        }
        for (key, _) in group.values().flatten() {
            if let Some((_, missed)) = self.live.get_mut(&key.pid) {
                *missed = 0;
            }
        }
        self.live.retain(|_, (key, missed)| {
            if *missed >= MAX_MISSED {
                feed.gone(*key);
            }
            *missed < MAX_MISSED
        });
    }

    fn caveats(&self, feed: &mut Feed<'_>) {
        let what = match self.columns {
            Some(Columns::Scalar) => {
                "a TensorBoard CSV does not say what its values are: they are read as MiB that nvidia-smi shows for a process on a GPU"
            }
            _ => "the file has only nvidia-smi's numbers: what the memory is used for is unknown",
        };
        feed.caveat("nvml_only", what);
        if matches!(self.columns, Some(Columns::Processes { time: Some(_), .. })) {
            feed.caveat("local_time", "timestamps have no time zone: they are read as UTC");
        }
        if self.group_time.is_none() {
            feed.caveat("no_clock", "the file has no clock: times are its line numbers");
        }
        if self.nameless && self.columns != Some(Columns::Scalar) {
            feed.caveat("one_gpu", "no column identifies the GPU: all rows are attributed to one GPU");
        }
        if self.backwards > 0 {
            let text =
                plural(self.backwards, "reading") + " out of order; each got the time of the one before";
            feed.caveat("late_readings", text);
        }
    }
}

pub(super) fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let mut feed = Feed::new(sink);
    let mut log = Log::default();
    let read = lines(input, &mut feed, |feed, number, line| log.line(feed, number, line))?;
    log.flush(&mut feed);
    if log.columns == Some(Columns::Devices) {
        let what = "has nvidia-smi's numbers of whole GPUs, and a run needs those of processes: --query-compute-apps=timestamp,gpu_uuid,pid,process_name,used_memory";
        return Err(Error::Unsuitable { path, what: what.into() });
    }
    if log.readings == 0 {
        return Err(Error::NothingFound { path, format: FORMAT, lines: read, example: EXAMPLE });
    }
    log.caveats(&mut feed);
    feed.caveat_rejects("row", "line", EXAMPLE);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_amounts() {
        assert_eq!(timestamp("2018/11/26 05:28:41.251"), Some(1_543_210_121_251_000_000));
        assert_eq!(timestamp("1970/01/01 00:00:00"), Some(0));
        assert_eq!(timestamp("2024/02/29 00:00:00.5"), Some(1_709_164_800_500_000_000));
        for bad in [
            "",
            "2018/13/26 05:28:41",
            "2018/11/26",
            "2018/11/26 25:00:00",
            "2018/11/26 05:28:41.",
            "99999/1/1 0:0:0",
        ] {
            assert_eq!(timestamp(bad), None, "{bad}");
        }
        assert_eq!(mib("4031 MiB"), Some(Ok(4031 << 20)));
        assert_eq!(mib("4031.0"), Some(Ok(4031 << 20)));
        assert_eq!(mib("[N/A]"), Some(Err(Absence::NotAvailable)));
        for bad in ["", "-1", "NaN", "1e30", "12 GiB"] {
            assert_eq!(mib(bad), None, "{bad}");
        }
        assert_eq!(uuid("GPU-00000000-0000-0000-0000-0000000000ff"), Some(255));
        assert_eq!(uuid("GPU-ff"), None);
    }
}
