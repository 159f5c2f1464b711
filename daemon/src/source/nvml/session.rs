//! Reads the devices of one opened NVML library, one action at a time, and writes the results as frames.

use super::answer::{Charge, Code, Event, List, MAX_PID, Memory};
use super::call_state::Call;
use super::library::{Facts, Gpus, Pids};
use super::protocol::{Arguments, FrameWriter, NOT_OUR_PID, Uuid};
use super::schedule::{self, NextRead, Schedule, Skip};
use crate::clock::now_ns;
use extras::ControlGroups;
use gpumem_ledger::DeviceName;
use gpumem_wire::{Absence, Body, DeviceIdKind, Reading, Stamp};
use std::io;

/// If a reading is expected to take at least this long (ns), its begin is written at once: the ledger then records tracked bytes.
const SLOW_READING_NS: u64 = 1_000_000;
/// Interval (ns) for reopening the library while a GPU is lost, because the GPU may have been reset meanwhile.
const REOPEN_NS: u64 = 300_000_000_000;
/// Interval for checking whether the devices have changed (ns).
const REDISCOVER_NS: u64 = 30_000_000_000;
/// Interval for the same check after a call has indicated a change (ns).
const DOUBT_NS: u64 = 2_000_000_000;
/// Minimum interval for reading events (ns). Events are read in wake-ups for other calls.
const EVENTS_NS: u64 = 500_000_000;

#[derive(Debug, Default)]
struct DeviceState {
    /// Size of the device's memory, once it has been read.
    total_bytes: Option<u64>,
    memory: Problem,
    list: Problem,
    /// Problem of accounted peaks. It has a code only if a value was impossible.
    peak: Problem,
    /// Problem as last written. `Some(None)` means that "no problem" was written; `None`, that nothing was.
    written: Option<Option<String>>,
    /// Time since which the GPU is unusable until it is reset (ns).
    lost_since_ns: Option<u64>,
    /// Processes in the lists that were last read successfully, sorted by pid.
    listed: Vec<ProcessRow>,
    /// Whether `listed` is from the last reading, and the bytes of all its processes are known.
    can_repeat: bool,
    /// Whether the driver's accounting is on.
    is_accounting: bool,
    /// Pids and accounted peaks in bytes, as last written.
    peaks: Vec<(u32, u64)>,
    /// Properties of the device as last written.
    facts: Facts,
    /// State of the device's process lists, in the order of [`List::ALL`].
    lists: [ListState; 3],
    /// Time at which the memory limits of control groups were last read (ns).
    limits_read_ns: Option<u64>,
    /// Whether the driver has no memory limits for control groups.
    has_no_limits: bool,
    /// Time at which utilisation and power were last read (ns), and whether the driver reports neither.
    load_read_ns: Option<u64>,
    has_no_load: bool,
}

/// Problem that the last calls of one kind had, if any.
#[derive(Debug, Default)]
struct Problem {
    code: Option<Code>,
    /// First impossible value since the last valid result, as a text.
    refused: Option<String>,
}

impl Problem {
    fn set(&mut self, code: Option<Code>, refused: Option<String>) {
        self.refused = self.refused.take().or(refused).filter(|_| code.is_some());
        self.code = code;
    }

    fn text(&self) -> Option<String> {
        self.code.map(|code| match &self.refused {
            Some(refused) if code == Code::IMPOSSIBLE => format!("{code} were refused ({refused})"),
            _ => code.to_string(),
        })
    }
}

/// State of a process list. The graphics list and the MPS list are read less often while they are empty.
#[derive(Debug, Default)]
struct ListState {
    is_unsupported: bool,
    /// Whether the list had processes when it was last read.
    had_some: bool,
    /// Time at which the list was last read (ns).
    read_ns: Option<u64>,
}

/// One process of a reading, merged from all process lists of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessRow {
    pid: u32,
    bytes: Option<u64>,
    /// Bytes that confidential computing protects.
    protected: Option<u64>,
    /// Bit set of the lists that contain the process, see [`List::bit`].
    lists: u8,
    /// Whether the driver reported an impossible number of bytes, which was dropped.
    is_refused: bool,
}

/// What the caller must do after [`Session::act`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Call [`Session::act`] again.
    Again,
    /// Call [`Session::act`] again at this time (ns).
    Wait(u64),
    /// Close the library and open it again: at once if `None`, otherwise after a retry interval.
    Reopen(Option<Code>),
    /// Close the library for some time, because unbinding this GPU (the driver's number) from the driver waits for that.
    Release(u32),
}

pub(crate) struct Session {
    gpus: Box<dyn Gpus>,
    schedule: Schedule,
    /// State of each device, in the order of the library's inventory.
    devices: Vec<DeviceState>,
    /// Interval for reading a graphics or MPS list that was empty (ns).
    extra_interval_ns: u64,
    /// Number of readings begun so far.
    number: u64,
    /// Time at which the session began (ns).
    opened_ns: u64,
    /// Time at which the devices were last checked for changes (ns).
    checked_ns: u64,
    /// Whether a call has indicated that the devices may have changed.
    is_in_doubt: bool,
    /// Whether some GPUs must not be opened. Checking for changed devices would open them.
    has_unopened: bool,
    /// Time at which events were last read (ns).
    events_ns: u64,
    groups: ControlGroups,
    /// Buffer for the entries of one process list.
    charges: Vec<Charge>,
    /// Buffer for the processes of one reading, sorted by pid.
    rows: Vec<ProcessRow>,
    /// Buffer for events, each with the NVML index of its GPU.
    events: Vec<(u16, Event)>,
    /// Error code if the first call of some device showed that the whole library is unusable.
    pub broken: Option<Code>,
}

impl ProcessRow {
    /// Returns whether the row has the bytes of its process.
    fn is_known(&self) -> bool {
        self.bytes.is_some() && !self.is_refused
    }
}

impl Session {
    /// Starts reading, and writes records of all devices. Makes no calls that `arguments` exclude.
    pub(crate) fn begin(gpus: Box<dyn Gpus>, arguments: &Arguments, out: &mut FrameWriter) -> Session {
        let (settings, now) = (&arguments.settings, now_ns());
        // A device's slot is one byte, and 255 means no device.
        let count = gpus.inventory().devices.len().min(usize::from(gpumem_wire::NONE_DEVICE));
        let mut session = Session {
            gpus,
            schedule: Schedule::new(settings, count, now),
            devices: (0..count).map(|_| DeviceState::default()).collect(),
            extra_interval_ns: schedule::ns(settings.extra_interval),
            number: 0,
            opened_ns: now,
            checked_ns: now,
            is_in_doubt: false,
            has_unopened: !arguments.skip_index.is_empty(),
            events_ns: 0,
            groups: ControlGroups::default(),
            charges: Vec::new(),
            rows: Vec::new(),
            events: Vec::new(),
            broken: None,
        };
        session.write_facts(None, &session.gpus.inventory().facts, out);
        for index in 0..count {
            let name = session.gpus.inventory().devices[index].name;
            let skip = arguments.skip.iter().find(|(Uuid(skipped), _)| *skipped == name);
            let skip = skip.map_or(Skip::Nothing, |&(_, skip)| skip);
            session.schedule.set_skip(index, skip);
            if skip == Skip::All {
                session.announce(index, out);
                session.write_facts(Some(index), &session.gpus.inventory().devices[index].facts, out);
                continue;
            }
            out.set_call(Call::Device(index as u8));
            let memory = session.gpus.memory(index).and_then(possible);
            session.devices[index].total_bytes = memory.ok().map(|memory| memory.total_bytes);
            session.broken = session.broken.or(memory.err().filter(|code| code.is_of_library()));
            session.announce(index, out);
            session.read_accounting(index, out);
        }
        session
    }

    fn announce(&self, index: usize, out: &mut FrameWriter) {
        let device = &self.gpus.inventory().devices[index];
        let (uuid, id) = match device.name {
            DeviceName::Mig(uuid) => (uuid, DeviceIdKind::Mig),
            DeviceName::Gpu(uuid) => (uuid, DeviceIdKind::Gpu),
            DeviceName::Ordinal(_) => ([0; 16], DeviceIdKind::Ordinal),
        };
        let number = u128::from_be_bytes(uuid);
        let body = Body::Device {
            uuid_high: (number >> 64) as u64,
            uuid_low: number as u64,
            total_bytes: Reading(self.devices[index].total_bytes),
            ordinal: device.index,
            id,
            name: &device.model,
        };
        out.write(at(index, now_ns()), body);
    }

    /// Returns a text about library, driver and devices for the user.
    pub(crate) fn description(&self) -> String {
        let devices = match self.devices.len() {
            1 => "1 device".to_owned(),
            count => format!("{count} devices"),
        };
        let doubt = match self.gpus.inventory().pids {
            Pids::Trusted => "",
            Pids::ForeignBytes | Pids::Foreign => {
                "; this driver confuses PID namespaces: bytes per process are omitted (run gpumemd in the host's)"
            }
        };
        let unnamed = self.gpus.inventory().unnamed.iter();
        let unnamed: String =
            unnamed.map(|(gpu, code)| format!("; GPU {gpu} cannot be identified: {code}")).collect();
        format!("{}, {devices}{unnamed}{doubt}", self.gpus.inventory().description)
    }

    /// Requests a reading of this device's process lists soon.
    pub(crate) fn request(&mut self, name: DeviceName) {
        if let Some(index) = self.index(name) {
            self.schedule.request(index, now_ns());
        }
    }

    /// Skips these calls of the device from now on.
    pub(crate) fn set_skip(&mut self, name: DeviceName, skip: Skip) {
        if let Some(index) = self.index(name) {
            self.schedule.set_skip(index, skip);
        }
    }

    /// Returns the index of the device with this UUID, whether that is a GPU or an instance: requesters may not know.
    fn index(&self, name: DeviceName) -> Option<usize> {
        let uuid = |name: DeviceName| match name {
            DeviceName::Gpu(uuid) | DeviceName::Mig(uuid) => Some(uuid),
            DeviceName::Ordinal(_) => None,
        };
        let devices = self.gpus.inventory().devices.iter().take(self.devices.len());
        let is_same = |other: DeviceName| other == name || uuid(other).is_some() && uuid(other) == uuid(name);
        devices.map(|device| device.name).position(is_same)
    }

    /// Does the next action that is due.
    /// Errors: The frames cannot be written, because the parent has closed the pipe.
    pub(crate) fn act(&mut self, out: &mut FrameWriter) -> io::Result<Next> {
        let now = now_ns();
        let rediscover_ns = if self.is_in_doubt { DOUBT_NS } else { REDISCOVER_NS };
        let may_open_all = !self.has_unopened && !self.schedule.skips_any();
        if may_open_all && now.saturating_sub(self.checked_ns) >= rediscover_ns {
            (self.checked_ns, self.is_in_doubt) = (now, false);
            if self.gpus.has_changed(&mut |index| out.set_call(Call::Index(index))) {
                return Ok(Next::Reopen(None));
            }
            for index in 0..self.devices.len() {
                out.set_call(Call::Device(index as u8));
                self.read_accounting(index, out);
            }
        }
        let broken = match self.schedule.next(now) {
            NextRead::Wait(until) => {
                let is_due = now.saturating_sub(self.events_ns) >= EVENTS_NS;
                let next = if is_due { self.read_events(now, out) } else { None };
                return Ok(next.unwrap_or(Next::Wait(until)));
            }
            NextRead::Memory => self.read_due_memory(out),
            NextRead::List(index) => self.read_device(index, out)?,
        };
        out.totals.deferred += std::mem::take(&mut self.schedule.deferred);
        if let Some(code) = broken {
            return Ok(Next::Reopen(Some(code)));
        }
        let is_old = |since: &u64| now.saturating_sub(*since.max(&self.opened_ns)) >= REOPEN_NS;
        if self.devices.iter().any(|device| device.lost_since_ns.as_ref().is_some_and(is_old)) {
            return Ok(Next::Reopen(None));
        }
        Ok(Next::Again)
    }

    /// Reads the memory of all devices that are due. Returns the error code if the whole library is unusable.
    fn read_due_memory(&mut self, out: &mut FrameWriter) -> Option<Code> {
        let began = now_ns();
        let mut broken = None;
        let mut now = began;
        for index in 0..self.devices.len() {
            if self.schedule.wants_memory(index, now) {
                let memory = self.read_memory(index, out);
                now = now_ns();
                self.schedule.memory_read(index, now, memory.ok().map(|memory| memory.used_bytes));
                // Write the first `fine` only after a complete reading, because lists may hang where memory calls return.
                if self.devices[index].written.is_some() || memory.is_err() {
                    self.write_state(index, now, out);
                }
                broken = broken.or(memory.err().filter(|code| code.is_of_library()));
            }
        }
        self.schedule.memory_turn_ended(now, now - began);
        broken
    }

    /// Reads the memory of a device and writes it. Refuses numbers that exceed the device's size.
    fn read_memory(&mut self, index: usize, out: &mut FrameWriter) -> Result<Memory, Code> {
        out.set_call(Call::Device(index as u8));
        let began = now_ns();
        let memory = self.gpus.memory(index);
        let ended = now_ns();
        out.totals.memory_calls += 1;
        out.totals.memory_ns += ended - began;
        out.totals.failed_calls += u64::from(memory.is_err());
        let device = &mut self.devices[index];
        let refused = memory.ok().and_then(|memory| {
            let (name, bytes) = memory.impossible()?;
            Some(format!("{name} {bytes} of {} bytes", memory.total_bytes))
        });
        out.totals.refused += u64::from(refused.is_some());
        let memory = memory.and_then(possible);
        device.memory.set(memory.err(), refused);
        self.is_in_doubt |= memory.is_err_and(Code::casts_doubt_on_device);
        if let Ok(memory) = memory {
            if device.total_bytes.is_none() {
                device.total_bytes = Some(memory.total_bytes);
                self.announce(index, out);
            }
            let took_ns = u32::try_from(ended - began).unwrap_or(u32::MAX);
            let body = Body::DeviceSample {
                used_bytes: memory.used_bytes,
                free_bytes: memory.free_bytes,
                reserved_bytes: Reading(memory.reserved_bytes),
                unified: memory.is_unified,
            };
            out.write(Stamp { context: took_ns, ..at(index, ended) }, body);
        }
        memory
    }

    /// Makes one reading of a device: its memory, its process lists, and its memory again. Returns the error code if the whole
    /// library is unusable.
    fn read_device(&mut self, index: usize, out: &mut FrameWriter) -> io::Result<Option<Code>> {
        self.number += 1;
        let number = self.number;
        let began = now_ns();
        out.write(at(index, began), Body::SampleBegin { number });
        if self.schedule.last_cost_ns(index).is_none_or(|cost| cost >= SLOW_READING_NS) {
            out.flush()?;
        }
        let first = self.read_memory(index, out);
        let (mut cost, failed) = self.read_lists(index, began, out);
        let list_ns = u32::try_from(cost).unwrap_or(u32::MAX);
        let accounting_ns = now_ns();
        self.write_rows(index, failed, out);
        if self.devices[index].is_accounting {
            cost += now_ns() - accounting_ns;
        }
        let last = if first.is_ok() { self.read_memory(index, out) } else { first };
        let ended = now_ns();
        let result = failed.map_or(0, |code| u16::try_from(code.0).unwrap_or(999));
        out.write(Stamp { context: list_ns, ..at(index, ended) }, Body::SampleEnd { number, result });
        if let Ok(memory) = last {
            self.schedule.memory_read(index, ended, Some(memory.used_bytes));
        }
        // A list with impossible values still counts as successful for the schedule.
        self.schedule.listed(index, began, ended, cost, failed.is_none_or(|code| code == Code::IMPOSSIBLE));
        self.write_state(index, ended, out);
        self.is_in_doubt |= failed.is_some_and(Code::casts_doubt_on_device);
        Ok(failed.or(first.err()).filter(|code| code.is_of_library()))
    }

    /// Reads the process lists into `rows`. Returns the time spent in list calls (ns), and the error if any.
    fn read_lists(&mut self, index: usize, now: u64, out: &mut FrameWriter) -> (u64, Option<Code>) {
        let (mut cost, mut failed, mut refused) = (0, None, None);
        self.rows.clear();
        for list in List::ALL {
            let state = &self.devices[index].lists[list as usize];
            let is_due = state.read_ns.is_none_or(|read| now >= read.saturating_add(self.extra_interval_ns));
            let is_extra = list != List::Compute;
            if is_extra && (state.is_unsupported || !(state.had_some || is_due)) {
                continue;
            }
            self.charges.clear();
            out.set_call(Call::Lists(index as u8));
            let began = now_ns();
            let answer = self.gpus.list(index, list, &mut self.charges);
            let took = now_ns() - began;
            cost += took;
            out.totals.list_calls += 1;
            out.totals.list_ns += took;
            out.totals.failed_calls += u64::from(answer.is_err());
            let state = &mut self.devices[index].lists[list as usize];
            state.read_ns = Some(now);
            if is_extra && matches!(answer, Err(Code::NOT_SUPPORTED | Code::FUNCTION_NOT_FOUND)) {
                state.is_unsupported = true;
                continue;
            }
            state.had_some = answer.is_ok() && !self.charges.is_empty();
            if answer.is_err() {
                failed = answer.err();
                break;
            }
            let total = self.devices[index].total_bytes.unwrap_or(u64::MAX);
            for &Charge { pid, bytes, protected_bytes, .. } in &self.charges {
                if pid == 0 {
                    continue;
                }
                let is_refused = bytes.is_some_and(|bytes| bytes > total);
                if pid > MAX_PID || is_refused {
                    out.totals.refused += 1;
                    refused.get_or_insert_with(|| match bytes {
                        Some(bytes) if is_refused => format!("pid {pid}: {bytes} of {total} bytes"),
                        _ => format!("pid {pid}"),
                    });
                }
                if pid <= MAX_PID {
                    let protected = protected_bytes.filter(|part| bytes.is_some_and(|bytes| *part <= bytes));
                    let bytes = bytes.filter(|_| !is_refused);
                    self.rows.push(ProcessRow { pid, bytes, protected, lists: list.bit(), is_refused });
                }
            }
        }
        merge(&mut self.rows);
        failed = failed.or(refused.as_ref().map(|_| Code::IMPOSSIBLE));
        self.devices[index].list.set(failed, refused);
        (cost, failed)
    }

    /// Writes the processes of a reading. After an error, also writes those of the previous list, whose memory is unknown now.
    fn write_rows(&mut self, index: usize, failed: Option<Code>, out: &mut FrameWriter) {
        let now = now_ns();
        let stamp = |pid| Stamp { thread: pid, ..at(index, now) };
        let (start_ticks, doubt) = match self.gpus.inventory().pids {
            Pids::Trusted => (0, None),
            Pids::ForeignBytes => (0, Some(Absence::WrongNamespace)),
            Pids::Foreign => (NOT_OUR_PID, Some(Absence::WrongNamespace)),
        };
        let device = &self.devices[index];
        let is_known = doubt.is_none() && self.rows.iter().all(ProcessRow::is_known);
        let can_repeat = device.can_repeat && failed.is_none() && is_known;
        let changed = if can_repeat { changed_rows(&device.listed, &self.rows) } else { None };
        for row in changed.as_ref().unwrap_or(&self.rows) {
            let (bytes, absence) = match (doubt, row.bytes) {
                (Some(doubt), _) => (None, doubt),
                (None, Some(bytes)) => (Some(bytes), Absence::Unknown),
                (None, None) if row.is_refused => (None, Absence::Impossible),
                (None, None) => (None, Absence::NotAvailable),
            };
            let body =
                Body::ProcessSample { start_ticks, used_bytes: Reading(bytes), absence, lists: row.lists };
            out.write(stamp(row.pid), body);
            if let Some(protected_bytes) = row.protected.filter(|_| bytes.is_some()) {
                out.write(stamp(row.pid), Body::ProtectedSample { start_ticks, protected_bytes });
            }
        }
        if changed.is_some() {
            out.write(at(index, now), Body::SameProcesses {});
        }
        self.devices[index].can_repeat = failed.is_none() && is_known;
        let Some(code) = failed else {
            if self.devices[index].is_accounting && doubt.is_none() {
                self.write_accounted_peaks(index, out);
            }
            let listed = &mut self.devices[index].listed;
            let gone = listed.iter().filter(|row| !is_listed(&self.rows, row.pid));
            gone.for_each(|row| self.groups.forget(row.pid));
            std::mem::swap(listed, &mut self.rows);
            self.read_limits(index, out);
            self.read_load(index, out);
            return;
        };
        let absence = absence_of(code);
        for row in self.devices[index].listed.iter().filter(|row| !is_listed(&self.rows, row.pid)) {
            let body = Body::ProcessSample { start_ticks, used_bytes: Reading::ABSENT, absence, lists: 0 };
            out.write(stamp(row.pid), body);
        }
    }

    /// Writes the state of a device (its problem, or `fine`) if it has changed.
    fn write_state(&mut self, index: usize, now: u64, out: &mut FrameWriter) {
        let device = &mut self.devices[index];
        let codes = [&device.memory, &device.list, &device.peak].map(|problem| problem.code);
        let is_lost = codes.into_iter().flatten().any(Code::is_loss);
        device.lost_since_ns = is_lost.then(|| device.lost_since_ns.unwrap_or(now));
        let problem = match (device.memory.text(), device.list.text()) {
            (Some(text), _) if device.memory.code == device.list.code => Some(text),
            (Some(text), _) => Some(format!("memory: {text}")),
            (None, Some(text)) => Some(format!("process list: {text}")),
            (None, None) => device.peak.text().map(|text| format!("accounted peaks: {text}")),
        };
        if device.written.as_ref() == Some(&problem) {
            return;
        }
        let reason = format!("nvml: {}", problem.as_deref().unwrap_or("fine"));
        let code = codes.into_iter().flatten().next().map_or(0, |code| code.0);
        let body = Body::Source { up: problem.is_none(), reason: &reason };
        out.write(Stamp { context: code, ..at(index, now) }, body);
        device.written = Some(problem);
    }
}

/// Returns a stamp for a record about the device with this index.
fn at(index: usize, time_ns: u64) -> Stamp {
    Stamp { time_ns, device: index as u8, ..Stamp::default() }
}

/// Returns the rows that differ from those of the last reading; `None` if the processes differ, or if most rows do.
fn changed_rows(last: &[ProcessRow], rows: &[ProcessRow]) -> Option<Vec<ProcessRow>> {
    let is_same = last.len() == rows.len() && last.iter().zip(rows).all(|(last, row)| last.pid == row.pid);
    let changed = last.iter().zip(rows).filter(|(last, row)| last != row);
    let changed: Vec<ProcessRow> =
        if is_same { changed.map(|(_, row)| *row).collect() } else { return None };
    (changed.len() + 1 < rows.len()).then_some(changed)
}

fn is_listed(rows: &[ProcessRow], pid: u32) -> bool {
    rows.binary_search_by_key(&pid, |row| row.pid).is_ok()
}

/// Merges rows with the same pid. A process that computes and draws is in two lists, with the same bytes.
fn merge(rows: &mut Vec<ProcessRow>) {
    rows.sort_unstable_by_key(|row| row.pid);
    rows.dedup_by(|later, first| {
        let is_same = later.pid == first.pid;
        if is_same {
            first.bytes = first.bytes.max(later.bytes); // `None` is less than any number
            first.protected = first.protected.max(later.protected);
            first.lists |= later.lists;
            first.is_refused |= later.is_refused;
        }
        is_same
    });
}

/// Returns [`Code::IMPOSSIBLE`] instead of memory that exceeds the device's size.
fn possible(memory: Memory) -> Result<Memory, Code> {
    if memory.impossible().is_some() { Err(Code::IMPOSSIBLE) } else { Ok(memory) }
}

/// Returns the reason, in the words of the wire format, why a value is absent after this error.
pub(crate) fn absence_of(code: Code) -> Absence {
    match code {
        Code::NO_PERMISSION => Absence::NoPermission,
        Code::NOT_SUPPORTED | Code::FUNCTION_NOT_FOUND => Absence::NotSupported,
        Code::GPU_IS_LOST | Code::RESET_REQUIRED | Code::GPU_NOT_FOUND => Absence::GpuLost,
        Code::TIMEOUT => Absence::Timeout,
        Code::IMPOSSIBLE => Absence::Impossible,
        _ => Absence::Unknown,
    }
}

mod extras;
#[cfg(test)]
pub(crate) mod tests;
