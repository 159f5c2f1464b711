//! Tracks devices whose calls hang (do not return), and checks whether they work again.
//!
//! A hung call blocks the poller, and with it the readings of all devices. So pollers skip the device, or only its process
//! lists, until its calls return again. At intervals another process (the probe) tries these calls. Losing the probe costs no
//! readings.

use super::answer::Code;
use super::call_state::{Call, CallState};
use super::protocol::{Arguments, Command, SECOND, Target, Uuid, launch, limit};
use super::schedule::Skip;
use super::translate::{MISSING, Translator};
use crate::clock::now_ns;
use crate::config::NvmlSettings;
use crate::nvml_status::DeviceStatus;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Child;

/// Maximum interval between probes of a hung device, in seconds.
const MAX_WAIT_S: u64 = 3600;

/// A GPU whose calls did not return. Pollers must not even open it, because `nvmlDeviceGetHandleByIndex` may hang too.
#[derive(Debug)]
struct Hung {
    target: Target,
    /// Whether only process lists hang, so that memory can be read.
    only_lists: bool,
    next_probe_ns: u64,
    /// Interval before the next probe, in seconds.
    wait_s: u64,
    /// Whether the device has answered a probe, while a complete reading has not followed yet.
    is_back: bool,
}

impl Hung {
    /// Returns whether the device's calls hang because of this GPU.
    fn includes(&self, device: &DeviceStatus) -> bool {
        match self.target.name {
            Some(Uuid(name)) if self.only_lists => device.name == name,
            _ => device.index == self.target.index && device.problem.as_deref() != Some(MISSING),
        }
    }

    /// Schedules the next probe after the same interval.
    fn wait(&mut self) {
        self.next_probe_ns = now_ns().saturating_add(self.wait_s * SECOND);
    }

    /// Schedules the next probe after twice the interval.
    fn wait_longer(&mut self) {
        self.wait_s = (self.wait_s * 2).min(MAX_WAIT_S);
        self.wait();
    }

    /// Sets the problem of all devices whose calls hang because of this GPU.
    fn report(&self, what: &str, translator: &mut Translator) {
        let lists = if self.only_lists { "process list: " } else { "" };
        let problem = format!("{lists}{what}; skipped for {} s", self.wait_s);
        translator.report_problems(|device| self.includes(device), Some(&problem));
    }
}

/// Process that tries the calls of one hung device.
#[derive(Debug)]
struct Probe {
    child: Child,
    call_state: CallState,
    target: Target,
}

/// Result of a probe: which calls of the hung device have returned.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ProbeResult {
    /// All calls that the probe has tried have returned.
    Answers,
    /// The call for the device's memory has returned, but a call for a process list has not.
    Memory,
    /// A call has not returned, or the probe ended during it.
    Nothing,
    /// The probe could not open the library, so the device's state is unknown.
    NoLibrary,
}

/// A call that has not returned so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingCall {
    pub call: Call,
    pub target: Target,
}

/// All GPUs whose calls hang or take long.
#[derive(Debug)]
pub(crate) struct HungDevices {
    settings: NvmlSettings,
    hung: Vec<Hung>,
    /// Calls that take long and have not timed out.
    pending: Vec<PendingCall>,
    probe: Option<Probe>,
    /// Whether another poller must be started, because the current one has not opened a GPU that may be read again.
    pub needs_reopen: bool,
}

/// Problem shown for a device whose call has not returned so far and has not timed out.
const PENDING: &str = "an NVML call has not returned so far";

impl HungDevices {
    pub(crate) fn new(settings: NvmlSettings) -> Self {
        HungDevices { settings, hung: Vec::new(), pending: Vec::new(), probe: None, needs_reopen: false }
    }

    /// Returns whether no device hangs, and none is suspected or tried.
    pub(crate) fn is_empty(&self) -> bool {
        self.hung.is_empty() && self.pending.is_empty() && self.probe.is_none() && !self.needs_reopen
    }

    /// Adds to the arguments of a new poller which devices it must skip.
    pub(crate) fn add_skips(&self, arguments: &mut Arguments) {
        for hung in self.hung.iter().filter(|hung| !hung.is_back) {
            match hung.target.name {
                Some(name) if hung.only_lists => arguments.skip.push((name, Skip::Lists)),
                _ => arguments.skip_index.push(hung.target.index),
            }
        }
        arguments.skip_index.extend(self.pending.iter().map(|pending| pending.target.index));
    }

    /// Returns whether a call of the device's GPU is pending.
    fn is_pending(&self, device: &DeviceStatus) -> bool {
        self.pending.iter().any(|pending| pending.target.index == device.index)
    }

    /// Returns whether pollers skip this device because its calls hang, or because a call of its GPU is pending.
    pub(crate) fn has(&self, device: &DeviceStatus) -> bool {
        self.hung.iter().any(|hung| hung.includes(device)) || self.is_pending(device)
    }

    /// Returns whether no device is read, because all of them hang or have a pending call.
    pub(crate) fn has_all(&self, devices: &[DeviceStatus]) -> bool {
        let is_unread = |device: &DeviceStatus| {
            self.hung.iter().any(|hung| !hung.only_lists && hung.includes(device)) || self.is_pending(device)
        };
        let mut present =
            devices.iter().filter(|device| device.problem.as_deref() != Some(MISSING)).peekable();
        present.peek().is_some() && present.all(is_unread)
    }

    /// Returns the poller's current call and its GPU; `None` if the GPU is not known.
    pub(crate) fn pending(call: Call, translator: &Translator) -> Option<PendingCall> {
        let (name, index) = match call {
            Call::Device(slot) | Call::Lists(slot) => {
                let device = translator.device_of_poller(slot)?;
                (Some(Uuid(device.name)), device.index)
            }
            Call::Index(index) => (None, index),
            Call::Nothing | Call::Library | Call::Events => return None,
        };
        Some(PendingCall { call, target: Target { name, index } })
    }

    /// Adds a GPU whose call takes long: new pollers skip it until [`HungDevices::returned`]. If the call times out,
    /// [`HungDevices::avoid`] replaces this entry.
    pub(crate) fn suspect(&mut self, pending: PendingCall, translator: &mut Translator) {
        self.pending.push(pending);
        let is_new = |device: &DeviceStatus| device.index == pending.target.index && device.problem.is_none();
        translator.report_problems(is_new, Some(PENDING));
    }

    /// Removes the entry of [`HungDevices::suspect`], because the call has returned.
    pub(crate) fn returned(&mut self, pending: PendingCall, translator: &mut Translator) {
        self.pending.retain(|other| *other != pending);
        let is_pending = |device: &DeviceStatus| {
            device.index == pending.target.index && device.problem.as_deref() == Some(PENDING)
        };
        translator.report_problems(is_pending, None);
    }

    /// Handles a poller that hung or failed while opening GPUs that had answered a probe: waits longer before their next probe.
    pub(crate) fn relapse(&mut self) {
        for hung in self.hung.iter_mut().filter(|hung| hung.is_back || hung.only_lists) {
            (hung.is_back, hung.only_lists) = (false, false);
            hung.wait_longer();
        }
    }

    /// Kills the probe, so that it does not keep NVML open.
    pub(crate) fn release(&mut self) {
        self.probe = None; // dropping kills it
    }

    /// Adds a GPU whose call hung or crashed the poller. Skips it for a while, longer each time, and sets its problem.
    pub(crate) fn avoid(&mut self, pending: PendingCall, code: Code, translator: &mut Translator) {
        self.returned(pending, translator);
        let PendingCall { call, target } = pending;
        let known = self.hung.iter().position(|hung| hung.target == target);
        let wait_s = match known.map(|place| self.hung.remove(place)) {
            Some(known) => (known.wait_s * 2).min(MAX_WAIT_S),
            None => self.settings.hang_retry.as_secs().max(1),
        };
        let only_lists = matches!(call, Call::Lists(_));
        let mut hung = Hung { target, only_lists, next_probe_ns: 0, wait_s, is_back: false };
        hung.wait();
        let devices = translator.status.devices.iter().filter(|device| hung.includes(device));
        for slot in devices.map(|device| device.slot).collect::<Vec<_>>() {
            translator.report_absent(slot, code);
        }
        let what = if code == Code::TIMEOUT { "a call did not return" } else { "a call ended the poller" };
        hung.report(what, translator);
        self.hung.push(hung);
    }

    /// Removes devices that have been read completely since they hung.
    pub(crate) fn revive(&mut self, translator: &mut Translator) {
        self.hung.retain(|hung| {
            let since = hung.next_probe_ns.saturating_sub(hung.wait_s * SECOND);
            // Require a complete reading: memory calls may return where list calls hang.
            let answers =
                |device: &DeviceStatus| hung.includes(device) && translator.read_ns(device.slot) > since;
            let is_revived = translator.status.devices.iter().any(answers);
            if is_revived {
                translator.report_problems(|device| hung.includes(device), None);
            }
            !is_revived
        });
    }

    /// Starts a probe that is due, or checks the running probe. Must be called once in each `tick`. Returns a command for the
    /// pollers, if any.
    pub(crate) fn tick(&mut self, tick: Duration, translator: &mut Translator) -> Option<Command> {
        let Some(probe) = &mut self.probe else {
            if translator.status.released_until_ns.is_none() {
                self.begin();
            }
            return None;
        };
        let result = probe.poll(tick, &self.settings)?;
        let target = probe.target;
        self.probe = None;
        let hung = self.hung.iter_mut().find(|hung| hung.target == target)?;
        let mut devices = translator.status.devices.iter().filter(|device| hung.includes(device));
        let is_open = devices.all(|device| translator.has_opened(device.slot));
        let skip = match (result, hung.only_lists) {
            (ProbeResult::NoLibrary, _) => {
                hung.wait();
                return None;
            }
            (ProbeResult::Answers, _) => {
                hung.is_back = true;
                self.needs_reopen |= !is_open || target.name.is_none();
                Some(Skip::Nothing)
            }
            (ProbeResult::Memory, false) => {
                hung.only_lists = target.name.is_some();
                self.needs_reopen |= !is_open;
                Some(Skip::Lists)
            }
            (ProbeResult::Nothing, true) => {
                hung.only_lists = false;
                Some(Skip::All)
            }
            _ => None,
        };
        if result != ProbeResult::Answers {
            translator.status.counters.hangs += 1;
            hung.wait_longer();
            hung.report("a call did not return", translator);
        }
        skip.zip(target.name).map(|(skip, name)| Command::Skip(name, skip))
    }

    /// Starts a probe of the first GPU whose time for that has come.
    fn begin(&mut self) {
        let now = now_ns();
        let Some(due) = self.hung.iter().position(|hung| !hung.is_back && hung.next_probe_ns <= now) else {
            return;
        };
        let target = self.hung[due].target;
        let others = self.hung.iter().filter(|hung| !hung.only_lists).map(|hung| hung.target.index);
        let others = others.chain(self.pending.iter().map(|pending| pending.target.index));
        let skip_index = others.filter(|&other| other != target.index).collect();
        let settings = self.settings.clone();
        let probe = Some(target);
        let arguments = Arguments { settings, probe, skip_index, no_events: true, ..Arguments::default() };
        match launch(arguments, Stdio::null) {
            Ok((child, call_state)) => self.probe = Some(Probe { child, call_state, target }),
            Err(_) => self.hung[due].wait(),
        }
    }
}

impl Probe {
    /// Returns the result of the probe, or `None` while it is running.
    fn poll(&mut self, tick: Duration, settings: &NvmlSettings) -> Option<ProbeResult> {
        match self.child.try_wait() {
            Ok(Some(exit)) if exit.success() => return Some(ProbeResult::Answers),
            Ok(Some(exit)) if exit.code().is_some() => return Some(ProbeResult::NoLibrary),
            Ok(Some(_)) | Err(_) => return Some(ProbeResult::Nothing),
            Ok(None) => {}
        }
        if self.call_state.stalled_for(tick) < limit(self.call_state.call(), settings) {
            return None;
        }
        let _ = self.child.start_kill();
        let is_list = matches!(self.call_state.call(), Call::Lists(_));
        Some(if is_list { ProbeResult::Memory } else { ProbeResult::Nothing })
    }
}
