//! Converts the poller's frames to frames for the ledger ("the host's"). Devices keep their slots and readings their order
//! across all pollers, and pids get their start times. Keeps the state that is needed when a poller is lost during a reading.

#[cfg(test)]
mod tests;

use super::answer::{Code, HEALTH_EVENTS, HealthEventKind, List};
use super::protocol::{NOT_OUR_PID, PollerList};
use super::session::absence_of;
use crate::clock::now_ns;
use crate::nvml_status::{DeviceStatus, HealthEvent, NvmlCalls, NvmlStatus};
use crate::source::process::{Gpu, Processes};
use crate::stats::Timing;
use gpumem_ledger::{DeviceName, ProcessKey};
use gpumem_wire::{Absence, Body, NONE_DEVICE, Reading, Record, Stamp, frame};
use std::collections::BTreeMap;
use tracing::warn;

/// Latest reading of one device, and what follows from it.
#[derive(Debug, Default)]
struct Readings {
    /// Number of the reading that has begun and has not ended; `None` if there is none.
    open: Option<u64>,
    /// Processes reported so far in the reading that has begun, each with the bit set of its lists, see [`List::bit`].
    now: Vec<(ProcessKey, u8)>,
    /// Processes in the last successful reading, each with the bit set of its lists.
    last: Vec<(ProcessKey, u8)>,
    /// Whether the reading that has begun has all processes of `last` and no others.
    is_same: bool,
    /// Whether a process of the reading that has begun was dropped, because it could not be identified.
    is_cut: bool,
    /// If the pids in `last` still identified their processes at the end of that reading: number of the poller, and the number of
    /// processes that had ended by then.
    proof: Option<(u64, u64)>,
    /// When a poller last ended a reading (ns). The reading may have failed, but all its calls had returned.
    ended_ns: u64,
    /// Time of the last memory reading (ns).
    memory_ns: u64,
}

#[derive(Debug, Default)]
pub(crate) struct PollerState {
    /// Number of the poller, from 1 on.
    number: u64,
    /// Process list of each device, indexed by the device's slot in the poller's records.
    lists: Vec<PollerList>,
    /// Number (slot) of each device in the host's records, indexed by the device's slot in the poller's records.
    slots: Vec<u8>,
    totals: NvmlCalls,
    /// Whether to drop records until the next `SampleBegin`, because they belong to an outdated reading.
    skips_reading: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Translator {
    /// Status of NVML and of all devices that were seen so far. A device's index is its slot in the host's records.
    pub status: NvmlStatus,
    /// State of the readings of each device, indexed by its slot in the host's records.
    readings: Vec<Readings>,
    poller: PollerState,
    /// Number of the last reading.
    number: u64,
    /// Number of pollers so far.
    pollers: u64,
    /// Call totals of all pollers except the current one.
    before: NvmlCalls,
    /// Translated frames that have not been taken.
    out: Vec<u8>,
    /// Durations of calls (ns) that the owner has not taken so far.
    pub timings: Vec<(Timing, u32)>,
}

impl Translator {
    /// Begins translating for a new poller. Returns the state of the previous one, for [`Translator::resume_poller`].
    pub(crate) fn begin_poller(&mut self) -> PollerState {
        self.before = self.all_totals();
        self.pollers += 1;
        std::mem::replace(&mut self.poller, PollerState { number: self.pollers, ..PollerState::default() })
    }

    /// Returns to an earlier poller, whose state is `state`. Its buffered readings are dropped later, in `begin_reading`, if the
    /// poller in between took newer ones.
    pub(crate) fn resume_poller(&mut self, state: PollerState) {
        self.before = combine(self.all_totals(), state.totals, u64::saturating_sub);
        self.poller = state;
    }

    /// Returns whether the current poller has reported the device with this slot.
    pub(crate) fn has_opened(&self, slot: u8) -> bool {
        self.poller.slots.contains(&slot)
    }

    /// Returns the call totals of all pollers together.
    pub(crate) fn all_totals(&self) -> NvmlCalls {
        combine(self.before, self.poller.totals, u64::saturating_add)
    }

    /// Returns the device that has this slot in the records of the current poller.
    pub(crate) fn device_of_poller(&self, slot: u8) -> Option<&DeviceStatus> {
        self.status.devices.get(usize::from(*self.poller.slots.get(usize::from(slot))?))
    }

    /// Returns when a poller last ended a reading of this device (ns); 0 if never.
    pub(crate) fn read_ns(&self, slot: u8) -> u64 {
        self.readings.get(usize::from(slot)).map_or(0, |readings| readings.ended_ns)
    }

    /// Translates the complete frames at the start of `bytes`. Returns their length in bytes; `None` if the data is not a frame.
    pub(crate) fn translate(&mut self, bytes: &[u8], processes: &Processes) -> Option<usize> {
        let mut rest = bytes;
        loop {
            match frame::split_frame(rest) {
                Ok(Some((slot, payload, after))) => {
                    // Skip unknown records. The poller is the same program, so it writes none.
                    if let Ok(record) = Record::decode(slot, payload) {
                        self.take(&record, processes);
                    }
                    rest = after;
                }
                Ok(None) | Err(frame::Error::Cut { .. }) => return Some(bytes.len() - rest.len()),
                Err(frame::Error::Length(_)) => return None,
            }
        }
    }

    /// Returns the frames translated since the last call. The facts of new processes come first.
    pub(crate) fn take_frames(&mut self, processes: &Processes) -> Vec<u8> {
        let mut frames = Vec::new();
        processes.take_facts(now_ns(), &mut frames);
        frames.append(&mut self.out);
        frames
    }

    fn write(&mut self, stamp: Stamp, body: Body<'_>) {
        Record { stamp, body }.append_frame(&mut self.out);
    }

    fn take(&mut self, record: &Record<'_>, processes: &Processes) {
        let Record { mut stamp, mut body } = *record;
        match body {
            Body::Device { .. } => return self.take_device(record),
            Body::ProcessFacts { facts, .. } => return self.take_facts(stamp.device, facts),
            Body::Counter { .. } if stamp.device != NONE_DEVICE => {
                return self.count_health_event(stamp.device, stamp.tag);
            }
            Body::Counter { value } => {
                let mut totals = (1..).zip(self.poller.totals.fields_mut());
                if let Some((_, total)) = totals.find(|(tag, _)| *tag == stamp.tag) {
                    *total = value as u64;
                }
                return;
            }
            _ => {}
        }
        if stamp.device != NONE_DEVICE {
            let Some(&slot) = self.poller.slots.get(usize::from(stamp.device)) else { return };
            stamp.device = slot;
        }
        let index = usize::from(stamp.device);
        if let Body::SameProcesses {} = body {
            return self.take_same(record, index, processes);
        }
        if let Some(list) = self.poller.lists.get_mut(usize::from(record.stamp.device)) {
            match body {
                Body::SampleBegin { .. } => list.begin(),
                Body::ProcessSample { used_bytes, lists, .. } => list.name(stamp.thread, used_bytes, lists),
                Body::SampleEnd { .. } => list.end(),
                _ => {}
            }
        }
        match &mut body {
            Body::SampleBegin { number } => match self.begin_reading(stamp.device, stamp.time_ns) {
                Some(begun) => *number = begun,
                None => return,
            },
            Body::AccountedPeak { start_ticks, .. } | Body::ProtectedSample { start_ticks, .. } => {
                let Some(key) = processes.identify(stamp.thread) else { return };
                *start_ticks = key.start_ticks;
            }
            Body::DeviceFault { xid } => {
                let device = self.status.devices.get(index).map(|device| device.name.to_string());
                warn!(device, xid, "the driver reported a fault (Xid)");
            }
            Body::ProcessSample { .. } | Body::SampleEnd { .. } if self.poller.skips_reading => return,
            Body::ProcessSample { start_ticks, lists, .. } => {
                let is_ours = *start_ticks != NOT_OUR_PID;
                // No file descriptor was free to identify the process. Drop the sample, because it might be attributed to
                // another process.
                let Ok(key) = is_ours.then(|| processes.try_identify(stamp.thread)).transpose() else {
                    self.readings.get_mut(index).into_iter().for_each(|readings| readings.is_cut = true);
                    return;
                };
                let key = key.flatten().unwrap_or(ProcessKey { pid: stamp.thread, start_ticks: 0 });
                *start_ticks = key.start_ticks;
                if let Some(readings) =
                    self.readings.get_mut(index).filter(|readings| readings.open.is_some())
                {
                    // Lists are mostly in the order of the last one.
                    let same_place = readings.last.get(readings.now.len());
                    let is_known = || {
                        same_place.is_some_and(|(listed, _)| *listed == key) || contains(&readings.last, key)
                    };
                    if is_ours && !is_known() {
                        note_use(key, &self.status.devices[index], processes);
                    }
                    readings.now.push((key, *lists));
                }
            }
            Body::SampleEnd { number, result } => {
                self.note_proof(index, *result == 0, processes);
                self.timings.push((Timing::NvmlLists, std::mem::take(&mut stamp.context)));
                match self.close_reading(index, stamp.time_ns, *result == 0) {
                    Some(open) => *number = open,
                    None => return,
                }
            }
            Body::DeviceSample { .. } => {
                self.timings.push((Timing::NvmlMemory, stamp.context));
                if let Some(readings) = self.readings.get_mut(index) {
                    if stamp.time_ns < readings.memory_ns {
                        return;
                    }
                    readings.memory_ns = stamp.time_ns;
                    self.status.devices[index].memory_read_ns = Some(stamp.time_ns);
                }
            }
            &mut Body::Source { up, reason } if !self.take_source(&mut stamp, up, reason) => return,
            _ => {}
        }
        self.write(stamp, body);
    }

    /// Begins a reading and returns its number; `None` if another poller has taken a newer reading meanwhile.
    fn begin_reading(&mut self, slot: u8, time_ns: u64) -> Option<u64> {
        let index = usize::from(slot);
        // The reading was buffered by a poller that was stuck while another one took newer readings.
        if self.readings.get(index).is_some_and(|readings| time_ns < readings.ended_ns) {
            self.poller.skips_reading = true;
            return None;
        }
        self.poller.skips_reading = false;
        self.end_reading(slot, Absence::Unknown, Code::UNKNOWN);
        Some(self.open_reading(index))
    }

    /// Opens a reading of a device, and returns its number.
    fn open_reading(&mut self, index: usize) -> u64 {
        self.number += 1;
        if let Some(readings) = self.readings.get_mut(index) {
            readings.open = Some(self.number);
            readings.now.clear();
            (readings.is_same, readings.is_cut) = (false, false);
        }
        self.number
    }

    /// Ends the open reading of a device when its poller has ended it. Returns the number of the reading.
    fn close_reading(&mut self, index: usize, time_ns: u64, is_whole: bool) -> Option<u64> {
        let readings = self.readings.get_mut(index)?;
        let open = readings.open.take()?;
        readings.ended_ns = time_ns;
        if is_whole {
            self.status.devices[index].list_read_ns = Some(time_ns);
        }
        if is_whole && readings.is_same {
            for &(key, lists) in &readings.now {
                readings.last.iter_mut().filter(|(known, _)| *known == key).for_each(|known| known.1 = lists);
            }
        } else if is_whole {
            std::mem::swap(&mut readings.now, &mut readings.last);
        }
        if is_whole && !(readings.is_same && readings.now.is_empty()) {
            let device = &mut self.status.devices[index];
            [device.drawing, device.mps] = [List::Graphics, List::Mps].map(|list| {
                let listed = readings.last.iter().filter(|(_, lists)| lists & list.bit() != 0);
                listed.map(|(key, _)| key.pid).collect()
            });
        }
        Some(open)
    }

    /// Handles the record of a reading whose other processes are the same as in the poller's last one. Passes it on if the ledger
    /// has that reading and its pids still identify the same processes; otherwise translates a record for each process.
    fn take_same(&mut self, record: &Record<'_>, index: usize, processes: &Processes) {
        let place = usize::from(record.stamp.device);
        let Some(list) = self.poller.lists.get_mut(place) else { return };
        list.note_same();
        if self.poller.skips_reading {
            return;
        }
        let Some(readings) = self.readings.get_mut(index).filter(|readings| readings.open.is_some()) else {
            return;
        };
        if !readings.is_cut && readings.proof == Some((self.poller.number, processes.ends())) {
            readings.is_same = true;
            self.write(Stamp { device: index as u8, ..record.stamp }, Body::SameProcesses {});
            return;
        }
        for (pid, used, lists) in self.poller.lists[place].others() {
            let used_bytes = Reading::of(used);
            let body = Body::ProcessSample { start_ticks: 0, used_bytes, absence: Absence::Unknown, lists };
            self.take(&Record { stamp: Stamp { thread: pid, ..record.stamp }, body }, processes);
        }
    }

    /// Notes at the end of a reading whether the next one may refer to it.
    fn note_proof(&mut self, index: usize, is_whole: bool, processes: &Processes) {
        let number = self.poller.number;
        let Some(readings) = self.readings.get_mut(index) else { return };
        if readings.open.is_none() {
            readings.proof = None; // the ledger has only a part of it
            return;
        }
        if readings.is_same && is_whole {
            return; // as proved before
        }
        let keys = readings.now.iter().map(|(key, _)| *key);
        let ends = if is_whole && !readings.is_cut { processes.ends_if_live(keys) } else { None };
        readings.proof = ends.map(|ends| (number, ends));
    }

    /// Counts a health event in the device's status. `tag` is the event's index in [`HEALTH_EVENTS`] plus one.
    fn count_health_event(&mut self, slot: u8, tag: u32) {
        let kind = (tag as usize).checked_sub(1).and_then(|place| HEALTH_EVENTS.get(place));
        if let (Some(kind), Some(device)) = (kind, self.device_of_poller_mut(slot)) {
            warn!(device = device.name.to_string(), event = kind.name, "the driver reported: {}", kind.text);
            count_event(&mut device.health_events, kind);
        }
    }

    fn device_of_poller_mut(&mut self, slot: u8) -> Option<&mut DeviceStatus> {
        self.status.devices.get_mut(usize::from(*self.poller.slots.get(usize::from(slot))?))
    }

    /// Stores the facts (properties) of a device or the driver in the status.
    fn take_facts(&mut self, slot: u8, facts: &str) {
        let facts = facts.lines().filter_map(|line| line.split_once('='));
        let facts: BTreeMap<String, String> =
            facts.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        if slot == NONE_DEVICE {
            let unnamed = facts.get("unnamed").map_or("", String::as_str).split(',');
            let unnamed = unnamed.filter_map(|pair| {
                let (gpu, code) = pair.split_once(':')?;
                let code = Code(code.parse().ok()?);
                Some((gpu.parse().ok()?, code.to_string(), code.remedy()))
            });
            self.status.unnamed = unnamed.collect();
            self.status.facts = facts;
        } else if let Some(device) = self.device_of_poller_mut(slot) {
            device.facts = facts;
        }
    }

    /// Adds a device to the status, or updates it. Writes its record if that is new to the ledger.
    fn take_device(&mut self, record: &Record<'_>) {
        let Body::Device { uuid_high, uuid_low, total_bytes, ordinal, id, name } = record.body else {
            return;
        };
        let device = DeviceName::from_record(uuid_high, uuid_low, ordinal, id);
        let devices = &mut self.status.devices;
        let known = devices.iter().position(|known| known.name == device);
        let index = known.unwrap_or(devices.len());
        let slot = u8::try_from(index).unwrap_or(NONE_DEVICE);
        let place = usize::from(record.stamp.device);
        if self.poller.slots.len() <= place {
            self.poller.slots.resize(place + 1, NONE_DEVICE);
            self.poller.lists.resize_with(place + 1, PollerList::default);
        }
        self.poller.slots[place] = slot;
        if slot == NONE_DEVICE {
            return; // the host's records cannot name more devices
        }
        if known.is_none() {
            let mut entry = DeviceStatus::new(device, slot, ordinal);
            (entry.model, entry.since_ns) = (name.to_owned(), record.stamp.time_ns);
            devices.push(entry);
            self.readings.push(Readings::default());
        }
        let entry = &mut devices[index];
        let total = total_bytes.0.or(entry.total_bytes);
        let is_news = known.is_none() || entry.index != ordinal || entry.total_bytes != total;
        (entry.index, entry.total_bytes) = (ordinal, total);
        if entry.problem.as_deref() == Some(MISSING) {
            set_problem(entry, None, record.stamp.time_ns);
        }
        if is_news {
            let body = Body::Device { uuid_high, uuid_low, total_bytes: Reading(total), ordinal, id, name };
            self.write(Stamp { device: slot, ..record.stamp }, body);
        }
    }

    /// Marks devices that the poller did not report as missing, except those for which `is_skipped` returns true.
    pub(crate) fn mark_missing(&mut self, is_skipped: impl Fn(&DeviceStatus) -> bool) {
        let slots = self.poller.slots.clone();
        let is_missing = |device: &DeviceStatus| {
            device.problem.is_none() && !slots.contains(&device.slot) && !is_skipped(device)
        };
        self.report_problems(is_missing, Some(MISSING));
    }

    /// Sets the problem of the devices that `is_meant` selects, without a record of the poller.
    pub(crate) fn report_problems(
        &mut self,
        is_meant: impl Fn(&DeviceStatus) -> bool,
        problem: Option<&str>,
    ) {
        let now = now_ns();
        for device in self.status.devices.iter_mut().filter(|device| is_meant(device)) {
            set_problem(device, problem, now);
            let reason = format!("nvml: {}", problem.unwrap_or("fine"));
            let stamp = Stamp { time_ns: now, device: device.slot, ..Stamp::default() };
            let body = Body::Source { up: problem.is_none(), reason: &reason };
            Record { stamp, body }.append_frame(&mut self.out);
        }
    }

    /// Sets the state of the NVML source without a record of the poller.
    pub(crate) fn report_source(&mut self, up: bool, reason: &str) {
        let now = now_ns();
        set_source(&mut self.status, up, reason, now);
        self.write(Stamp { time_ns: now, ..Stamp::default() }, Body::Source { up, reason });
    }

    /// Stores a `Source` record of the poller in the status. Returns whether the record must be passed on.
    fn take_source(&mut self, stamp: &mut Stamp, up: bool, reason: &str) -> bool {
        let status = &mut self.status;
        let code = Some(Code(std::mem::take(&mut stamp.context))).filter(|code| code.0 != 0);
        if stamp.device == NONE_DEVICE {
            let closed_s = u64::from(std::mem::take(&mut stamp.tag));
            if closed_s != 0 {
                status.released_until_ns = Some(stamp.time_ns.saturating_add(closed_s * 1_000_000_000));
            } else if up {
                status.released_until_ns = None;
            }
            if status.up == up && status.reason == reason {
                return false; // repeated after the poller executed itself again
            }
            set_source(status, up, reason, stamp.time_ns);
            status.remedy = code.and_then(Code::remedy);
        } else if let Some(device) = status.devices.get_mut(usize::from(stamp.device)) {
            let problem = (!up).then(|| reason.strip_prefix("nvml: ").unwrap_or(reason));
            set_problem(device, problem, stamp.time_ns);
            (device.code, device.remedy) = (code.map(|code| code.0), code.and_then(Code::remedy));
        }
        true
    }

    /// Ends the readings that a lost poller had begun. `gpus` has the NVML indices of GPUs whose readings other pollers continue.
    pub(crate) fn end_readings(&mut self, gpus: &[u16]) {
        for index in 0..self.readings.len() {
            if !gpus.contains(&self.status.devices[index].index) {
                self.end_reading(index as u8, Absence::Unknown, Code::UNKNOWN);
            }
        }
    }

    /// Writes a reading of this device that has no values, only the reason for that.
    pub(crate) fn report_absent(&mut self, slot: u8, code: Code) {
        let index = usize::from(slot);
        if self.readings.get(index).is_some_and(|readings| readings.open.is_none()) {
            let number = self.open_reading(index);
            let stamp = Stamp { time_ns: now_ns(), device: slot, ..Stamp::default() };
            self.write(stamp, Body::SampleBegin { number });
        }
        self.end_reading(slot, absence_of(code), code);
    }

    /// Ends the open reading of a device, if any. Writes the processes that it has not reported so far, with this reason.
    fn end_reading(&mut self, slot: u8, absence: Absence, code: Code) {
        let Some(readings) = self.readings.get_mut(usize::from(slot)) else { return };
        let Some(number) = readings.open.take() else { return };
        readings.proof = None;
        let stamp = Stamp { time_ns: now_ns(), device: slot, ..Stamp::default() };
        let is_named = |key| readings.is_same || contains(&readings.now, key);
        for (key, _) in readings.last.iter().filter(|(key, _)| !is_named(*key)) {
            let (start_ticks, used_bytes) = (key.start_ticks, Reading::ABSENT);
            let body = Body::ProcessSample { start_ticks, used_bytes, absence, lists: 0 };
            Record { stamp: Stamp { thread: key.pid, ..stamp }, body }.append_frame(&mut self.out);
        }
        let result = u16::try_from(code.0).unwrap_or(999);
        self.write(stamp, Body::SampleEnd { number, result });
    }
}

fn contains(processes: &[(ProcessKey, u8)], key: ProcessKey) -> bool {
    processes.iter().any(|(listed, _)| *listed == key)
}

/// Returns totals of calls, each made by `with` from the same total of `one` and `other`.
fn combine(mut one: NvmlCalls, mut other: NvmlCalls, with: fn(u64, u64) -> u64) -> NvmlCalls {
    for (one, other) in one.fields_mut().into_iter().zip(other.fields_mut()) {
        *one = with(*one, *other);
    }
    one
}

/// Tells the process table which GPU a process uses. The job that a batch system has assigned to this GPU may be that of the
/// process.
fn note_use(key: ProcessKey, device: &DeviceStatus, processes: &Processes) {
    let instance = device.facts.get("gpu_instance").and_then(|instance| instance.parse().ok());
    processes.note_gpu(key, Gpu { index: device.index.into(), instance });
}

/// Problem text of a device that the poller no longer reports.
pub(crate) const MISSING: &str = "no longer there";

fn set_source(status: &mut NvmlStatus, up: bool, reason: &str, now: u64) {
    if status.up != up || status.reason != reason {
        (status.up, status.reason, status.since_ns) = (up, reason.to_owned(), now);
        status.remedy = None;
    }
}

fn set_problem(device: &mut DeviceStatus, problem: Option<&str>, now: u64) {
    if device.problem.as_deref() != problem {
        (device.problem, device.since_ns) = (problem.map(str::to_owned), now);
        (device.code, device.remedy) = (None, None);
    }
}

/// Counts an event of a device. Keeps the events in the order of [`HEALTH_EVENTS`].
fn count_event(events: &mut Vec<HealthEvent>, kind: &HealthEventKind) {
    let &HealthEventKind { name, text, is_grave, .. } = kind;
    match events.iter_mut().find(|event| event.name == name) {
        Some(event) => event.count += 1,
        None => {
            events.push(HealthEvent { name, text, is_grave, count: 1 });
            events.sort_by_key(|event| HEALTH_EVENTS.iter().position(|kind| kind.name == event.name));
        }
    }
}
