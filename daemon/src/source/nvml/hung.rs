//! Devices whose calls did not return, and how it is found out that they do again.
//!
//! The poller would stand still with such a device, and the others would wait for it. So it leaves the device, or only
//! its lists, alone until it is told otherwise, and another process, the probe, tries the calls from time to time: one
//! that is lost costs nobody a reading.

use super::DeviceName;
use super::answer::Code;
use super::call_state::{Call, CallState};
use super::protocol::{Arguments, Target};
use super::protocol::{SECOND, launch, limit};
use super::translate::{NOT_THERE, Translator};
use crate::clock::now_ns;
use crate::config::NvmlSettings;
use crate::nvml_status::{DeviceStatus, NvmlStatus};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Child;

/// A device that hung is tried again after at most this long.
const HUNG_MOST: u64 = 3600;
/// Seconds for which a poller is told to leave a device alone that it will be given back: ten years.
const UNTIL_TOLD: u64 = 10 * 365 * 86_400;

/// A GPU whose calls did not return. Pollers must not even open it: `nvmlDeviceGetHandleByIndex` may hang too.
#[derive(Debug)]
struct Hung {
    /// The device whose call did not return; `None` if it hung before its name was known.
    name: Option<DeviceName>,
    /// NVML's index of the GPU.
    index: u16,
    /// Its memory answers.
    only_lists: bool,
    /// When it is tried again.
    until_ns: u64,
    wait_s: u64,
    /// It answered a probe; a whole reading has not ended since.
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
        self.name.map_or(Target::Index(self.index), Target::Name)
    }

    fn wait_longer(&mut self, now: u64) {
        self.wait_s = (self.wait_s * 2).min(HUNG_MOST);
        self.until_ns = now.saturating_add(self.wait_s * SECOND);
    }

    fn say(&self, what: &str, translator: &mut Translator, status: &mut NvmlStatus, now: u64) {
        let lists = if self.only_lists { "process list: " } else { "" };
        let problem = format!("{lists}{what}; left alone for {} s", self.wait_s);
        let slots: Vec<u8> =
            status.devices.iter().filter(|device| self.is(device)).map(|device| device.slot).collect();
        for slot in slots {
            translator.say_problem(status, slot, Some(&problem), now);
        }
    }
}

/// A process that tries one device.
#[derive(Debug)]
struct Probe {
    child: Child,
    beacon: CallState,
    target: Target,
    seen: (u64, Call),
    same: u32,
}

/// How a probe ended.
enum Found {
    /// All calls returned.
    Answers,
    /// Memory did, lists did not.
    Memory,
    /// A call did not return, or ended the probe.
    Nothing,
    /// The library could not be opened: that says nothing of the device.
    NoLibrary,
}

/// A call that has not returned so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pending {
    pub doing: Call,
    pub name: Option<DeviceName>,
    /// NVML's index of the GPU.
    pub index: u16,
}

/// What the parent of the poller must do.
#[derive(Debug, Default)]
pub(crate) struct Actions {
    /// Command lines for the poller.
    pub lines: String,
    /// Start another poller, because this one has not opened a GPU that may be read now.
    pub needs_reopen: bool,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct HungDevices {
    hung: Vec<Hung>,
    /// Calls that have not returned, but whose timeout has not expired.
    pending: Vec<Pending>,
    probe: Option<Probe>,
}

/// Problem of a device while a call has not returned and its timeout has not expired.
const PENDING: &str = "a call has not returned so far";

impl HungDevices {
    /// What a poller must leave alone from its start.
    pub(crate) fn tell(&self, arguments: &mut Arguments) {
        for hung in self.hung.iter().filter(|hung| !hung.is_back) {
            match hung.name {
                Some(name) if hung.only_lists => arguments.skip_lists.push((name, UNTIL_TOLD)),
                _ => arguments.skip_index.push((hung.index, UNTIL_TOLD)),
            }
        }
        arguments.skip_index.extend(self.pending.iter().map(|pending| (pending.index, UNTIL_TOLD)));
    }

    /// Whether pollers leave this device alone.
    pub(crate) fn has(&self, device: &DeviceStatus) -> bool {
        self.hung.iter().any(|hung| hung.is(device))
            || self.pending.iter().any(|pending| pending.index == device.index)
    }

    /// The GPU that the current poller is calling for, as far as it is known.
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

    /// A call for this GPU takes long: new pollers leave it alone until [`HungDevices::returned`] or [`HungDevices::avoid`].
    pub(crate) fn suspect(&mut self, pending: Pending, translator: &mut Translator, status: &mut NvmlStatus) {
        self.pending.push(pending);
        self.say_pending(pending.index, Some(PENDING), translator, status);
    }

    /// The call has returned.
    pub(crate) fn returned(
        &mut self,
        pending: Pending,
        translator: &mut Translator,
        status: &mut NvmlStatus,
    ) {
        self.pending.retain(|other| *other != pending);
        self.say_pending(pending.index, None, translator, status);
    }

    fn say_pending(
        &self,
        index: u16,
        problem: Option<&str>,
        translator: &mut Translator,
        status: &mut NvmlStatus,
    ) {
        let before = if problem.is_some() { None } else { Some(PENDING) };
        let is_meant = |device: &&DeviceStatus| device.index == index && device.problem.as_deref() == before;
        let slots: Vec<u8> = status.devices.iter().filter(is_meant).map(|device| device.slot).collect();
        for slot in slots {
            translator.say_problem(status, slot, problem, now_ns());
        }
    }

    /// A poller that should have opened GPUs again got stuck with them: waits longer before the next probe.
    pub(crate) fn relapse(&mut self) {
        let now = now_ns();
        for hung in self.hung.iter_mut().filter(|hung| hung.is_back || hung.only_lists) {
            (hung.is_back, hung.only_lists) = (false, false);
            hung.wait_longer(now);
        }
    }

    /// Nothing may have NVML open for now.
    pub(crate) fn release(&mut self) {
        self.probe = None; // which kills it
    }

    /// A call did not return, or ended the poller: leaves the GPU alone for a while, longer each time, and says why.
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
            translator.say_absent(slot, code);
        }
        let what = if code == Code::TIMEOUT { "a call did not return" } else { "a call ended the poller" };
        hung.say(what, translator, status, now);
        self.hung.push(hung);
    }

    /// Devices that answer again are as others.
    pub(crate) fn revive(&mut self, translator: &mut Translator, status: &mut NvmlStatus) {
        if self.hung.is_empty() {
            return;
        }
        let now = now_ns();
        self.hung.retain(|hung| {
            let since = hung.until_ns.saturating_sub(hung.wait_s * SECOND);
            // A whole reading: memory may answer where lists do not.
            let answers = |device: &&DeviceStatus| hung.is(device) && translator.read_ns(device.slot) > since;
            if !status.devices.iter().any(|device| answers(&device)) {
                return true;
            }
            let slots: Vec<u8> =
                status.devices.iter().filter(|device| hung.is(device)).map(|device| device.slot).collect();
            for slot in slots {
                translator.say_problem(status, slot, None, now);
            }
            false
        });
    }

    /// Begins a probe that is due, or looks after the one that runs; called every `tick`.
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
        let Some(found) = probe.look(tick, settings) else { return Actions::default() };
        let target = probe.target;
        self.probe = None;
        let Some(hung) = self.hung.iter_mut().find(|hung| hung.target() == target) else {
            return Actions::default();
        };
        let mut devices = status.devices.iter().filter(|device| hung.is(device));
        let is_open = devices.all(|device| translator.has_opened(device.slot));
        match found {
            Found::Answers => {
                hung.is_back = true;
                let lines = match target {
                    Target::Name(name) => format!("skip-lists {name} 0\nskip {name} 0\n"),
                    Target::Index(_) => String::new(),
                };
                Actions { lines, needs_reopen: !is_open || matches!(target, Target::Index(_)) }
            }
            Found::NoLibrary => {
                hung.until_ns = now.saturating_add(hung.wait_s * SECOND);
                Actions::default()
            }
            Found::Nothing | Found::Memory => {
                status.counters.hangs += 1;
                hung.wait_longer(now);
                let needs_reopen = matches!(found, Found::Memory) && !hung.only_lists && !is_open;
                let lines = match (target, found) {
                    (Target::Name(name), Found::Memory) if !hung.only_lists => {
                        hung.only_lists = true;
                        format!("skip-lists {name} {UNTIL_TOLD}\nskip {name} 0\n")
                    }
                    (Target::Name(name), Found::Nothing) if hung.only_lists => {
                        hung.only_lists = false;
                        format!("skip {name} {UNTIL_TOLD}\n")
                    }
                    _ => String::new(),
                };
                hung.say("a call did not return", translator, status, now);
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
            Ok((child, beacon)) => {
                let seen = (0, Call::Nothing);
                self.probe = Some(Probe { child, beacon, target, seen, same: 0 });
            }
            Err(_) => {
                let hung = &mut self.hung[due];
                hung.until_ns = now.saturating_add(hung.wait_s * SECOND);
            }
        }
    }
}

impl Probe {
    /// How it ended, if it has.
    fn look(&mut self, tick: Duration, settings: &NvmlSettings) -> Option<Found> {
        match self.child.try_wait() {
            Ok(Some(exit)) if exit.success() => return Some(Found::Answers),
            Ok(Some(exit)) if exit.code().is_some() => return Some(Found::NoLibrary),
            Ok(Some(_)) | Err(_) => return Some(Found::Nothing),
            Ok(None) => {}
        }
        let now = self.beacon.get();
        self.same = if now == self.seen { self.same + 1 } else { 0 };
        self.seen = now;
        if tick * self.same < limit(now.1, settings) {
            return None;
        }
        let _ = self.child.start_kill();
        Some(if let Call::Lists(_) = now.1 { Found::Memory } else { Found::Nothing })
    }
}
