//! Tracks devices whose calls hang (do not return), and checks whether they work again.
//!
//! A hung call blocks the poller, and with it the readings of all devices. So pollers skip the device, or only its process
//! lists, until its calls return again. At intervals another process (the probe) tries these calls. Losing it costs no readings.

use super::DeviceName;
use super::answer::Code;
use super::call_state::{Call, CallState};
use super::protocol::{Arguments, SECOND, Target, Uuid, launch, limit};
use super::translate::{NOT_THERE, Translator};
use crate::clock::now_ns;
use crate::config::NvmlSettings;
use crate::nvml_status::{DeviceStatus, NvmlStatus};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Child;

/// Maximum interval between probes of a hung device, in seconds.
const HUNG_MOST: u64 = 3600;
/// Time for which a poller skips a device, in seconds: ten years, because the parent ends the skipping with a command.
const UNTIL_TOLD: u64 = 10 * 365 * 86_400;

/// A GPU whose calls did not return. Pollers must not even open it, because `nvmlDeviceGetHandleByIndex` may hang too.
#[derive(Debug)]
struct Hung {
    /// Device whose call hangs; `None` if the device's name was not known yet.
    name: Option<DeviceName>,
    /// NVML's index of the GPU.
    index: u16,
    /// Whether only process lists hang, so that memory can be read.
    only_lists: bool,
    /// Time of the next probe (ns).
    until_ns: u64,
    wait_s: u64,
    /// Whether the device has answered a probe, while a complete reading has not followed yet.
    is_back: bool,
}

impl Hung {
    fn is(&self, device: &DeviceStatus) -> bool {
        match self.name {
            Some(name) if self.only_lists => device.name == name,
            _ => device.index == self.index && device.problem.as_deref() != Some(NOT_THERE),
        }
    }

    fn target(&self) -> Target {
        self.name.map_or(Target::Index(self.index), |name| Target::Name(Uuid(name)))
    }

    fn wait_longer(&mut self, now: u64) {
        self.wait_s = (self.wait_s * 2).min(HUNG_MOST);
        self.until_ns = now.saturating_add(self.wait_s * SECOND);
    }

    fn report(&self, what: &str, translator: &mut Translator, status: &mut NvmlStatus, now: u64) {
        let lists = if self.only_lists { "process list: " } else { "" };
        let problem = format!("{lists}{what}; skipped for {} s", self.wait_s);
        translator.report_problems(status, |device| self.is(device), Some(&problem), now);
    }
}

/// Process that tries the calls of one hung device.
#[derive(Debug)]
struct Probe {
    child: Child,
    call_state: CallState,
    target: Target,
    seen: (u64, Call),
    same: u32,
}

enum ProbeResult {
    /// All tried calls have returned.
    Answers,
    /// The memory call has returned, but a list call has not.
    Memory,
    /// A call has not returned, or the probe ended during it.
    Nothing,
    /// The library could not be opened, so nothing is known about the device.
    NoLibrary,
}

/// A call that has not returned so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pending {
    pub doing: Call,
    pub name: Option<DeviceName>,
    pub index: u16,
}

#[derive(Debug, Default)]
pub(crate) struct Actions {
    pub lines: String,
    /// Whether another poller must be started, because the current one has not opened a GPU that may be read again.
    pub needs_reopen: bool,
}

#[derive(Debug, Default)]
pub(crate) struct HungDevices {
    hung: Vec<Hung>,
    pending: Vec<Pending>,
    probe: Option<Probe>,
}

/// Problem shown for a device whose call has not returned so far and has not timed out.
const PENDING: &str = "a call has not returned so far";

impl HungDevices {
    /// Adds to the arguments of a new poller which devices it must skip.
    pub(crate) fn add_skips(&self, arguments: &mut Arguments) {
        for hung in self.hung.iter().filter(|hung| !hung.is_back) {
            match hung.name {
                Some(name) if hung.only_lists => arguments.skip_lists.push((Uuid(name), UNTIL_TOLD)),
                _ => arguments.skip_index.push((hung.index, UNTIL_TOLD)),
            }
        }
        arguments.skip_index.extend(self.pending.iter().map(|pending| (pending.index, UNTIL_TOLD)));
    }

    /// Returns whether pollers skip this device because its calls hang.
    pub(crate) fn has(&self, device: &DeviceStatus) -> bool {
        self.hung.iter().any(|hung| hung.is(device))
            || self.pending.iter().any(|pending| pending.index == device.index)
    }

    /// Returns whether no device is read, because all of them hang or have a pending call.
    pub(crate) fn has_all(&self, devices: &[DeviceStatus]) -> bool {
        let is_hung = |device: &DeviceStatus| {
            self.hung.iter().any(|hung| !hung.only_lists && hung.is(device))
                || self.pending.iter().any(|pending| pending.index == device.index)
        };
        let mut there =
            devices.iter().filter(|device| device.problem.as_deref() != Some(NOT_THERE)).peekable();
        there.peek().is_some() && there.all(is_hung)
    }

    /// Returns the poller's current call and its GPU; `None` if the GPU is not known.
    pub(crate) fn target(doing: Call, translator: &Translator, status: &NvmlStatus) -> Option<Pending> {
        let (name, index) = match doing {
            Call::Device(slot) | Call::Lists(slot) => {
                let name = translator.device_of_poller(slot, status)?;
                (Some(name), status.devices.iter().find(|device| device.name == name)?.index)
            }
            Call::Index(index) => (None, index),
            Call::Nothing | Call::Library | Call::Events => return None,
        };
        Some(Pending { doing, name, index })
    }

    /// Adds a GPU whose call takes long: new pollers skip it until [`HungDevices::returned`] or [`HungDevices::avoid`].
    pub(crate) fn suspect(&mut self, pending: Pending, translator: &mut Translator, status: &mut NvmlStatus) {
        self.pending.push(pending);
        self.report_pending(pending.index, Some(PENDING), translator, status);
    }

    /// Removes the entry of [`HungDevices::suspect`], because the call has returned.
    pub(crate) fn returned(
        &mut self,
        pending: Pending,
        translator: &mut Translator,
        status: &mut NvmlStatus,
    ) {
        self.pending.retain(|other| *other != pending);
        self.report_pending(pending.index, None, translator, status);
    }

    fn report_pending(
        &self,
        index: u16,
        problem: Option<&str>,
        translator: &mut Translator,
        status: &mut NvmlStatus,
    ) {
        let before = if problem.is_some() { None } else { Some(PENDING) };
        let is_meant = |device: &DeviceStatus| device.index == index && device.problem.as_deref() == before;
        translator.report_problems(status, is_meant, problem, now_ns());
    }

    /// Handles a poller that hung while opening GPUs that had answered a probe: waits longer before their next probe.
    pub(crate) fn relapse(&mut self) {
        let now = now_ns();
        for hung in self.hung.iter_mut().filter(|hung| hung.is_back || hung.only_lists) {
            (hung.is_back, hung.only_lists) = (false, false);
            hung.wait_longer(now);
        }
    }

    /// Kills the probe, so that it does not keep NVML open.
    pub(crate) fn release(&mut self) {
        self.probe = None; // dropping kills it
    }

    /// Adds a GPU whose call hung or crashed the poller. Skips it for a while, longer each time, and sets its problem.
    pub(crate) fn avoid(
        &mut self,
        pending: Pending,
        code: Code,
        settings: &NvmlSettings,
        translator: &mut Translator,
        status: &mut NvmlStatus,
    ) {
        self.returned(pending, translator, status);
        let Pending { doing, name, index } = pending;
        let now = now_ns();
        let known = self.hung.iter().position(|hung| hung.name == name && hung.index == index);
        let mut hung = known.map(|place| self.hung.remove(place)).unwrap_or_else(|| {
            let wait_s = settings.hang_retry.as_secs().max(1);
            let until_ns = now.saturating_add(wait_s * SECOND);
            Hung { name, index, only_lists: false, until_ns, wait_s, is_back: false }
        });
        if known.is_some() {
            hung.wait_longer(now);
        }
        (hung.only_lists, hung.is_back) = (matches!(doing, Call::Lists(_)), false);
        let slots: Vec<u8> =
            status.devices.iter().filter(|device| hung.is(device)).map(|device| device.slot).collect();
        for slot in slots {
            translator.report_absent(slot, code);
        }
        let what = if code == Code::TIMEOUT { "a call did not return" } else { "a call ended the poller" };
        hung.report(what, translator, status, now);
        self.hung.push(hung);
    }

    /// Removes devices that have been read completely since they hung.
    pub(crate) fn revive(&mut self, translator: &mut Translator, status: &mut NvmlStatus) {
        if self.hung.is_empty() {
            return;
        }
        let now = now_ns();
        self.hung.retain(|hung| {
            let since = hung.until_ns.saturating_sub(hung.wait_s * SECOND);
            // Require a complete reading: memory calls may return where list calls hang.
            let answers = |device: &&DeviceStatus| hung.is(device) && translator.read_ns(device.slot) > since;
            if !status.devices.iter().any(|device| answers(&device)) {
                return true;
            }
            translator.report_problems(status, |device| hung.is(device), None, now);
            false
        });
    }

    /// Starts a probe that is due, or checks the running probe. Must be called once in each `tick`.
    pub(crate) fn tick(
        &mut self,
        tick: Duration,
        settings: &NvmlSettings,
        translator: &mut Translator,
        status: &mut NvmlStatus,
    ) -> Actions {
        let now = now_ns();
        let Some(probe) = &mut self.probe else {
            if status.released_until_ns.is_none() {
                self.begin(settings, now);
            }
            return Actions::default();
        };
        let Some(found) = probe.poll(tick, settings) else { return Actions::default() };
        let target = probe.target;
        self.probe = None;
        let Some(hung) = self.hung.iter_mut().find(|hung| hung.target() == target) else {
            return Actions::default();
        };
        let mut devices = status.devices.iter().filter(|device| hung.is(device));
        let is_open = devices.all(|device| translator.has_opened(device.slot));
        match found {
            ProbeResult::Answers => {
                hung.is_back = true;
                let lines = match target {
                    Target::Name(Uuid(name)) => format!("skip-lists {name} 0\nskip {name} 0\n"),
                    Target::Index(_) => String::new(),
                };
                Actions { lines, needs_reopen: !is_open || matches!(target, Target::Index(_)) }
            }
            ProbeResult::NoLibrary => {
                hung.until_ns = now.saturating_add(hung.wait_s * SECOND);
                Actions::default()
            }
            ProbeResult::Nothing | ProbeResult::Memory => {
                status.counters.hangs += 1;
                hung.wait_longer(now);
                let needs_reopen = matches!(found, ProbeResult::Memory) && !hung.only_lists && !is_open;
                let lines = match (target, found) {
                    (Target::Name(Uuid(name)), ProbeResult::Memory) if !hung.only_lists => {
                        hung.only_lists = true;
                        format!("skip-lists {name} {UNTIL_TOLD}\nskip {name} 0\n")
                    }
                    (Target::Name(Uuid(name)), ProbeResult::Nothing) if hung.only_lists => {
                        hung.only_lists = false;
                        format!("skip {name} {UNTIL_TOLD}\n")
                    }
                    _ => String::new(),
                };
                hung.report("a call did not return", translator, status, now);
                Actions { lines, needs_reopen }
            }
        }
    }

    fn begin(&mut self, settings: &NvmlSettings, now: u64) {
        let Some(due) = self.hung.iter().position(|hung| !hung.is_back && hung.until_ns <= now) else {
            return;
        };
        let target = self.hung[due].target();
        let mut arguments =
            Arguments { settings: settings.clone(), probe: Some(target), ..Arguments::default() };
        let index = self.hung[due].index;
        let others = self.hung.iter().filter(|hung| !hung.only_lists).map(|hung| hung.index);
        let others = others.chain(self.pending.iter().map(|pending| pending.index));
        arguments.skip_index = others.filter(|&other| other != index).map(|of| (of, UNTIL_TOLD)).collect();
        match launch(arguments, Stdio::null) {
            Ok((child, call_state)) => {
                let seen = (0, Call::Nothing);
                self.probe = Some(Probe { child, call_state, target, seen, same: 0 });
            }
            Err(_) => {
                let hung = &mut self.hung[due];
                hung.until_ns = now.saturating_add(hung.wait_s * SECOND);
            }
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
        let now = self.call_state.get();
        self.same = if now == self.seen { self.same + 1 } else { 0 };
        self.seen = now;
        if tick * self.same < limit(now.1, settings) {
            return None;
        }
        let _ = self.child.start_kill();
        Some(if let Call::Lists(_) = now.1 { ProbeResult::Memory } else { ProbeResult::Nothing })
    }
}
