//! Reads the devices of one opened NVML library, one action at a time, and writes the results as frames.

use self::extras::Limits;
use super::answer::{Charge, Code, Event, List, Memory, PID_MOST};
use super::call_state::Call;
use super::library::{Facts, Gpus, Pids};
use super::protocol::{FrameWriter, NOT_OUR_PID};
use super::schedule::{NextRead, Schedule};
use crate::clock::now_ns;
use crate::config::NvmlSettings;
use crate::nvml_status::NvmlCalls;
use gpumem_ledger::DeviceName;
use gpumem_wire::{Absence, Body, DeviceIdKind, Reading, Stamp};
use std::io;
use std::time::Duration;

/// Expected duration (ns) from which on the begin of a reading is written at once, because the ledger marks its accounts then.
const SAY_BEGIN_NS: u64 = 1_000_000;
/// Interval (ns) for reopening the library while a GPU is lost, because the GPU may have been reset meanwhile.
const REOPEN_NS: u64 = 300_000_000_000;
/// Interval for checking whether the devices have changed, and a shorter one after a call has indicated a change (ns).
const REDISCOVER_NS: u64 = 30_000_000_000;
const DOUBT_NS: u64 = 2_000_000_000;
/// Minimum interval for reading events (ns). Events are read in wake-ups for other calls.
const EVENTS_NS: u64 = 500_000_000;

#[derive(Debug, Default)]
struct DeviceState {
    total_bytes: Option<u64>,
    memory_problem: Option<Code>,
    list_problem: Option<Code>,
    /// Texts of the first impossible values since the last valid result: of memory, of process lists, and of accounted peaks.
    memory_refused: Option<String>,
    list_refused: Option<String>,
    peak_refused: Option<String>,
    /// Problem as last written. `Some(None)` means that "no problem" was written; `None`, that nothing was.
    written: Option<Option<String>>,
    lost_since_ns: Option<u64>,
    /// Pids in the last successfully read list.
    pids: Vec<u32>,
    /// Whether the driver's accounting is on, and the accounted peaks as last written.
    is_accounting: bool,
    peaks: Vec<(u32, u64)>,
    /// Properties of the device as last written.
    facts: Facts,
    /// State of the device's graphics list and MPS list.
    extras: [Extra; 2],
    limits: Limits,
}

#[derive(Debug, Default)]
struct Extra {
    is_unsupported: bool,
    had_some: bool,
    looked_ns: Option<u64>,
}

/// One process of a reading, merged from all process lists of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    pid: u32,
    bytes: Option<u64>,
    protected: Option<u64>,
    lists: u8,
    /// Whether the driver reported an impossible number of bytes, which was dropped.
    is_refused: bool,
}

/// What the caller must do after [`Session::turn`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Again,
    Wait(u64),
    /// Close the library and open it again: at once if `None`, otherwise after a retry interval.
    Reopen(Option<Code>),
    /// Close the library for some time, because unbinding this GPU (the driver's number) from the driver waits for that.
    Release(u32),
}

pub(crate) struct Session {
    gpus: Box<dyn Gpus>,
    schedule: Schedule,
    seen: Vec<DeviceState>,
    extra_interval_ns: u64,
    number: u64,
    opened_ns: u64,
    checked_ns: u64,
    /// Whether a call has indicated that the devices may have changed.
    is_in_doubt: bool,
    stay_until_ns: u64,
    looked_ns: u64,
    charges: Vec<Charge>,
    rows: Vec<Row>,
    happened: Vec<(u16, Event)>,
    /// Error code if the first call of some device showed that the whole library is unusable.
    broken: Option<Code>,
}

impl Session {
    /// Starts reading, and writes records of all devices. Makes no call for devices in `avoid` before the time given there.
    pub(crate) fn begin(
        gpus: Box<dyn Gpus>,
        settings: &NvmlSettings,
        avoid: &[(DeviceName, u64)],
        out: &mut FrameWriter,
    ) -> Session {
        let now = now_ns();
        let mut schedule = Schedule::new(settings, now);
        // A device's slot is one byte, and 255 means no device.
        let count = gpus.devices().len().min(usize::from(gpumem_wire::NONE_DEVICE));
        schedule.set_devices(count, now);
        let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let mut session = Session {
            gpus,
            schedule,
            seen: (0..count).map(|_| DeviceState::default()).collect(),
            extra_interval_ns: ns(settings.extra_interval),
            number: 0,
            opened_ns: now,
            checked_ns: now,
            is_in_doubt: false,
            stay_until_ns: 0,
            looked_ns: 0,
            charges: Vec::new(),
            rows: Vec::new(),
            happened: Vec::new(),
            broken: None,
        };
        session.write_facts(None, &session.gpus.facts(None), out);
        for index in 0..count {
            let name = session.gpus.devices()[index].name;
            match avoid.iter().find(|(avoided, until)| *avoided == name && *until > now) {
                Some(&(_, until)) => session.schedule.suspend(index, until),
                None => {
                    out.doing(Call::Device(index as u8));
                    let memory = session.gpus.memory(index).and_then(possible);
                    session.seen[index].total_bytes = memory.ok().map(|memory| memory.total_bytes);
                    session.broken = session.broken.or(memory.err().filter(|code| code.is_of_library()));
                }
            }
            session.announce(index, out);
            if avoid.iter().any(|(avoided, until)| *avoided == name && *until > now) {
                session.write_facts(Some(index), &session.gpus.facts(Some(index)), out);
            } else {
                session.read_accounting(index, out);
            }
        }
        session
    }

    fn announce(&self, index: usize, out: &mut FrameWriter) {
        let device = &self.gpus.devices()[index];
        let (uuid, id) = match device.name {
            DeviceName::Mig(uuid) => (uuid, DeviceIdKind::Mig),
            DeviceName::Gpu(uuid) => (uuid, DeviceIdKind::Gpu),
            DeviceName::Ordinal(_) => ([0; 16], DeviceIdKind::Ordinal),
        };
        let number = u128::from_be_bytes(uuid);
        let body = Body::Device {
            uuid_high: (number >> 64) as u64,
            uuid_low: number as u64,
            total_bytes: Reading(self.seen[index].total_bytes),
            ordinal: device.index,
            id,
            name: &device.model,
        };
        out.write(at(index, now_ns()), body);
    }

    pub(crate) fn broken(&self) -> Option<Code> {
        self.broken
    }

    pub(crate) fn description(&self) -> String {
        let devices = match self.seen.len() {
            1 => "1 device".to_owned(),
            count => format!("{count} devices"),
        };
        let doubt = match self.gpus.pids() {
            Pids::Trusted => "",
            Pids::ForeignBytes | Pids::Foreign => {
                "; this driver confuses PID namespaces: bytes per process are omitted (run gpumemd in the host's)"
            }
        };
        let unnamed = self.gpus.unnamed().iter();
        let unnamed: String =
            unnamed.map(|(gpu, code)| format!("; GPU {gpu} cannot be identified: {code}")).collect();
        format!("{}, {devices}{unnamed}{doubt}", self.gpus.description())
    }

    pub(crate) fn ask(&mut self, name: DeviceName) {
        if let Some(index) = self.index(name) {
            self.schedule.ask(index, now_ns());
        }
    }

    /// Skips a device until `until_ns`. A time in the past ends the skipping.
    pub(crate) fn skip(&mut self, name: DeviceName, until_ns: u64) {
        if let Some(index) = self.index(name) {
            self.schedule.suspend(index, until_ns);
        }
    }

    pub(crate) fn skip_lists(&mut self, name: DeviceName, until_ns: u64) {
        if let Some(index) = self.index(name) {
            self.schedule.suspend_lists(index, until_ns);
        }
    }

    /// Does not check for changed devices before this time, because some devices must not be called.
    pub(crate) fn stay_until(&mut self, until_ns: u64) {
        self.stay_until_ns = until_ns;
    }

    /// Returns the index of the device with this UUID, whether that is a GPU or an instance: requesters may not know.
    fn index(&self, name: DeviceName) -> Option<usize> {
        let uuid = |name: DeviceName| match name {
            DeviceName::Gpu(uuid) | DeviceName::Mig(uuid) => Some(uuid),
            DeviceName::Ordinal(_) => None,
        };
        let devices = self.gpus.devices().iter();
        let same = |of: DeviceName| of == name || uuid(of).is_some() && uuid(of) == uuid(name);
        devices.map(|device| device.name).position(same).filter(|&index| index < self.seen.len())
    }

    /// Does the next action that is due.
    /// Errors: The frames cannot be written, because the parent has closed the pipe.
    pub(crate) fn turn(&mut self, totals: &mut NvmlCalls, out: &mut FrameWriter) -> io::Result<Next> {
        let now = now_ns();
        let stay_until_ns = self.stay_until_ns.max(self.schedule.suspended_until_ns());
        let rediscover_ns = if self.is_in_doubt { DOUBT_NS } else { REDISCOVER_NS };
        if now.saturating_sub(self.checked_ns) >= rediscover_ns && now >= stay_until_ns {
            (self.checked_ns, self.is_in_doubt) = (now, false);
            if self.gpus.has_changed(&mut |index| out.doing(Call::Index(index))) {
                return Ok(Next::Reopen(None));
            }
            for index in 0..self.seen.len() {
                out.doing(Call::Device(index as u8));
                self.read_accounting(index, out);
            }
        }
        let broken = match self.schedule.next(now) {
            NextRead::Wait(until) => {
                let is_due = now.saturating_sub(self.looked_ns) >= EVENTS_NS;
                let happened = if is_due { self.events(now, out) } else { None };
                return Ok(happened.unwrap_or(Next::Wait(until)));
            }
            NextRead::Memory => self.memory_turn(totals, out),
            NextRead::List(index) => self.reading(index, totals, out)?,
        };
        totals.deferred += std::mem::take(&mut self.schedule.deferred);
        if let Some(code) = broken {
            return Ok(Next::Reopen(Some(code)));
        }
        let is_old = |since: &u64| now.saturating_sub(*since.max(&self.opened_ns)) >= REOPEN_NS;
        if self.seen.iter().any(|seen| seen.lost_since_ns.as_ref().is_some_and(is_old)) {
            return Ok(Next::Reopen(None));
        }
        Ok(Next::Again)
    }

    /// Reads the memory of all devices that are due. Returns the error code if the whole library is unusable.
    fn memory_turn(&mut self, totals: &mut NvmlCalls, out: &mut FrameWriter) -> Option<Code> {
        let began = now_ns();
        let mut broken = None;
        let mut now = began;
        for index in 0..self.seen.len() {
            if self.schedule.wants_memory(index, now) {
                let memory = self.read_memory(index, totals, out);
                now = now_ns();
                self.schedule.memory_read(index, now, memory.ok().map(|memory| memory.used_bytes));
                // Write the first `fine` only after a complete reading, because lists may hang where memory calls return.
                if self.seen[index].written.is_some() || memory.is_err() {
                    self.write_state(index, now, out);
                }
                broken = broken.or(memory.err().filter(|code| code.is_of_library()));
            }
        }
        self.schedule.memory_turn_ended(now, now - began);
        broken
    }

    fn read_memory(
        &mut self,
        index: usize,
        totals: &mut NvmlCalls,
        out: &mut FrameWriter,
    ) -> Result<Memory, Code> {
        out.doing(Call::Device(index as u8));
        let began = now_ns();
        let memory = self.gpus.memory(index);
        let ended = now_ns();
        totals.memory_calls += 1;
        totals.memory_ns += ended - began;
        totals.failed_calls += u64::from(memory.is_err());
        let seen = &mut self.seen[index];
        match memory.ok().and_then(|memory| Some((memory.impossible()?, memory.total_bytes))) {
            Some(((name, bytes), total)) => {
                totals.refused += 1;
                seen.memory_refused.get_or_insert_with(|| format!("{name} {bytes} of {total} bytes"));
            }
            None => seen.memory_refused = None,
        }
        let memory = memory.and_then(possible);
        seen.memory_problem = memory.err();
        self.is_in_doubt |= memory.is_err_and(Code::doubts_the_device);
        if let Ok(memory) = memory {
            if seen.total_bytes.is_none() {
                seen.total_bytes = Some(memory.total_bytes);
                self.announce(index, out);
            }
            let stamp =
                Stamp { context: u32::try_from(ended - began).unwrap_or(u32::MAX), ..at(index, ended) };
            let body = Body::DeviceSample {
                used_bytes: memory.used_bytes,
                free_bytes: memory.free_bytes,
                reserved_bytes: Reading(memory.reserved_bytes),
                unified: memory.is_unified,
            };
            out.write(stamp, body);
        }
        memory
    }

    /// Makes one reading of a device: its memory, its process lists, and its memory again.
    fn reading(
        &mut self,
        index: usize,
        totals: &mut NvmlCalls,
        out: &mut FrameWriter,
    ) -> io::Result<Option<Code>> {
        self.number += 1;
        let number = self.number;
        let began = now_ns();
        out.write(at(index, began), Body::SampleBegin { number });
        if self.schedule.last_cost_ns(index).is_none_or(|cost| cost >= SAY_BEGIN_NS) {
            out.flush()?;
        }
        let first = self.read_memory(index, totals, out);
        let (mut cost, failed) = self.read_lists(index, began, totals, out);
        let list_ns = u32::try_from(cost).unwrap_or(u32::MAX);
        let accounting_ns = now_ns();
        self.write_rows(index, failed, totals, out);
        if self.seen[index].is_accounting {
            cost += now_ns() - accounting_ns;
        }
        let last = if first.is_ok() { self.read_memory(index, totals, out) } else { first };
        let ended = now_ns();
        let result = failed.map_or(0, |code| u16::try_from(code.0).unwrap_or(999));
        out.write(Stamp { context: list_ns, ..at(index, ended) }, Body::SampleEnd { number, result });
        if let Ok(memory) = last {
            self.schedule.memory_read(index, ended, Some(memory.used_bytes));
        }
        // A list with impossible values still counts as successful for the schedule.
        self.schedule.listed(index, began, ended, cost, failed.is_none_or(|code| code == Code::IMPOSSIBLE));
        self.write_state(index, ended, out);
        self.is_in_doubt |= failed.is_some_and(Code::doubts_the_device);
        Ok(failed.or(first.err()).filter(|code| code.is_of_library()))
    }

    /// Reads the process lists into `rows`. Returns the time spent in list calls, and the error if any.
    fn read_lists(
        &mut self,
        index: usize,
        now: u64,
        totals: &mut NvmlCalls,
        out: &mut FrameWriter,
    ) -> (u64, Option<Code>) {
        let (mut cost, mut failed, mut refused) = (0, None, None);
        self.rows.clear();
        for list in List::ALL {
            if list != List::Compute {
                let extra = &self.seen[index].extras[list as usize - 1];
                let is_due =
                    extra.looked_ns.is_none_or(|looked| now >= looked.saturating_add(self.extra_interval_ns));
                if extra.is_unsupported || !(extra.had_some || is_due) {
                    continue;
                }
            }
            self.charges.clear();
            out.doing(Call::Lists(index as u8));
            let began = now_ns();
            let answer = self.gpus.list(index, list, &mut self.charges);
            let took = now_ns() - began;
            cost += took;
            totals.list_calls += 1;
            totals.list_ns += took;
            totals.failed_calls += u64::from(answer.is_err());
            if list != List::Compute {
                let extra = &mut self.seen[index].extras[list as usize - 1];
                extra.looked_ns = Some(now);
                if let Err(Code::NOT_SUPPORTED | Code::FUNCTION_NOT_FOUND) = answer {
                    extra.is_unsupported = true;
                    continue;
                }
                extra.had_some = answer.is_ok() && !self.charges.is_empty();
            }
            if answer.is_err() {
                failed = answer.err();
                break;
            }
            let total = self.seen[index].total_bytes.unwrap_or(u64::MAX);
            for charge in self.charges.iter().filter(|charge| charge.pid != 0) {
                let is_nobody = charge.pid > PID_MOST;
                let is_refused = charge.bytes.is_some_and(|bytes| bytes > total);
                if is_nobody || is_refused {
                    totals.refused += 1;
                    let what = || match charge.bytes {
                        Some(bytes) if is_refused => format!("pid {}: {bytes} of {total} bytes", charge.pid),
                        _ => format!("pid {}", charge.pid),
                    };
                    refused.get_or_insert_with(what);
                }
                if !is_nobody {
                    self.rows.push(Row {
                        pid: charge.pid,
                        bytes: charge.bytes.filter(|_| !is_refused),
                        protected: charge
                            .protected_bytes
                            .filter(|bytes| charge.bytes.is_some_and(|all| *bytes <= all)),
                        lists: list.bit(),
                        is_refused,
                    });
                }
            }
        }
        merge(&mut self.rows);
        let seen = &mut self.seen[index];
        if refused.is_some() {
            failed = failed.or(Some(Code::IMPOSSIBLE));
            seen.list_refused = seen.list_refused.take().or(refused);
        } else if failed.is_none() {
            seen.list_refused = None;
        }
        self.seen[index].list_problem = failed;
        (cost, failed)
    }

    fn write_rows(
        &mut self,
        index: usize,
        failed: Option<Code>,
        totals: &mut NvmlCalls,
        out: &mut FrameWriter,
    ) {
        let now = now_ns();
        let stamp = |pid| Stamp { thread: pid, ..at(index, now) };
        let (start_ticks, doubt) = match self.gpus.pids() {
            Pids::Trusted => (0, None),
            Pids::ForeignBytes => (0, Some(Absence::WrongNamespace)),
            Pids::Foreign => (NOT_OUR_PID, Some(Absence::WrongNamespace)),
        };
        for row in &self.rows {
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
        let Some(code) = failed else {
            if self.seen[index].is_accounting && doubt.is_none() {
                self.write_accounted_peaks(index, totals, out);
            }
            let pids = &mut self.seen[index].pids;
            pids.clear();
            pids.extend(self.rows.iter().map(|row| row.pid));
            self.read_limits(index, out);
            return;
        };
        let pids = &self.seen[index].pids;
        // Report the processes whose memory is unknown now, with the reason for that.
        let absence = absence_of(code);
        for &pid in pids.iter().filter(|pid| self.rows.binary_search_by_key(pid, |row| &row.pid).is_err()) {
            let body = Body::ProcessSample { start_ticks, used_bytes: Reading::ABSENT, absence, lists: 0 };
            out.write(stamp(pid), body);
        }
    }

    /// Writes the state of a device (its problem, or `fine`) if it has changed.
    fn write_state(&mut self, index: usize, now: u64, out: &mut FrameWriter) {
        let seen = &mut self.seen[index];
        let is_lost = [seen.memory_problem, seen.list_problem].into_iter().flatten().any(Code::is_loss);
        seen.lost_since_ns = is_lost.then(|| seen.lost_since_ns.unwrap_or(now));
        let words = |code: Code, refused: &Option<String>| match refused {
            Some(refused) if code == Code::IMPOSSIBLE => format!("{code} were refused ({refused})"),
            _ => code.to_string(),
        };
        let problem = match (seen.memory_problem, seen.list_problem) {
            (Some(memory), _) if Some(memory) == seen.list_problem => {
                Some(words(memory, &seen.memory_refused))
            }
            (Some(memory), _) => Some(format!("memory: {}", words(memory, &seen.memory_refused))),
            (None, Some(list)) => Some(format!("process list: {}", words(list, &seen.list_refused))),
            (None, None) => seen
                .peak_refused
                .as_ref()
                .map(|_| format!("accounted peaks: {}", words(Code::IMPOSSIBLE, &seen.peak_refused))),
        };
        if seen.written.as_ref() == Some(&problem) {
            return;
        }
        let reason = problem.as_ref().map_or("nvml: fine".to_owned(), |problem| format!("nvml: {problem}"));
        let peaks = seen.peak_refused.as_ref().map(|_| Code::IMPOSSIBLE);
        let code = seen.memory_problem.or(seen.list_problem).or(peaks).map_or(0, |code| code.0);
        out.write(
            Stamp { context: code, ..at(index, now) },
            Body::Source { up: problem.is_none(), reason: &reason },
        );
        seen.written = Some(problem);
    }
}

fn at(index: usize, time_ns: u64) -> Stamp {
    Stamp { time_ns, device: index as u8, ..Stamp::default() }
}

/// Merges rows with the same pid. A process that computes and draws is in two lists, with the same bytes.
fn merge(rows: &mut Vec<Row>) {
    rows.sort_unstable_by_key(|row| row.pid);
    rows.dedup_by(|later, kept| {
        let is_same = later.pid == kept.pid;
        if is_same {
            kept.bytes = kept.bytes.max(later.bytes); // `None` is less than any number
            kept.protected = kept.protected.max(later.protected);
            kept.lists |= later.lists;
            kept.is_refused |= later.is_refused;
        }
        is_same
    });
}

fn possible(memory: Memory) -> Result<Memory, Code> {
    if memory.impossible().is_some() { Err(Code::IMPOSSIBLE) } else { Ok(memory) }
}

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
