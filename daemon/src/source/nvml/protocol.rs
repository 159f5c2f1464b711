//! Protocol between the daemon and its NVML child (the poller): the child's arguments, commands and output; UUIDs as text.

use super::call_state::{Call, CallState, CallStateWriter};
use super::schedule::Skip;
use crate::clock::now_ns;
use crate::config::NvmlSettings;
use crate::nvml_status::NvmlCalls;
use gpumem_ledger::DeviceName;
use gpumem_wire::{Body, Record, Stamp};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Child;

pub(super) const SECOND: u64 = 1_000_000_000;
/// Value of `start_ticks` in a process sample whose pid is of another PID namespace.
pub(super) const NOT_OUR_PID: u64 = u64::MAX;

/// Arguments of the child, passed as one JSON word.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
pub(crate) struct Arguments {
    pub settings: NvmlSettings,
    /// Number of the inherited descriptor of the call state.
    pub call_state: Option<i32>,
    /// Devices whose calls hang, each with the calls to skip.
    pub skip: Vec<(Uuid, Skip)>,
    /// NVML indices of GPUs that must not be opened.
    pub skip_index: Vec<u16>,
    /// Number of seconds for which NVML stays closed after the start.
    pub released_s: u64,
    /// Whether events must not be read, because such a call did not return.
    pub no_events: bool,
    /// Call totals from before the process executed itself again.
    pub totals: NvmlCalls,
    /// Last interval between attempts to open the library (ms), from before the process executed itself again.
    pub wait_ms: u64,
    /// If set, the child only tries the calls of this device, then ends.
    pub probe: Option<Target>,
}

/// The device or GPU of a call that hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Target {
    /// The device; `None` if the call opens the GPU, so that all its devices are meant.
    pub name: Option<Uuid>,
    /// NVML's index of the GPU.
    pub index: u16,
}

impl Arguments {
    /// Returns the child's command-line arguments, with `nvml-poller` first.
    pub(crate) fn to_args(&self) -> Vec<OsString> {
        // Fails only for a path that is not UTF-8; the configuration cannot contain one.
        vec!["nvml-poller".into(), serde_json::to_string(self).unwrap_or_default().into()]
    }

    /// Parses the arguments that follow `nvml-poller`. Returns `None` if they are invalid.
    pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Option<Arguments> {
        let mut args = args.into_iter();
        let arguments = serde_json::from_slice(args.next()?.as_encoded_bytes()).ok()?;
        args.next().is_none().then_some(arguments)
    }
}

/// A command to the poller, written as one line of JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) enum Command {
    /// Read the process lists of this device soon.
    List(Uuid),
    /// Skip these calls of the device from now on.
    Skip(Uuid, Skip),
    /// Close NVML, and open it again after this number of seconds.
    Release(u64),
    /// Open NVML again now.
    Resume,
    Quit,
}

/// UUID of a device, with its conversion to and from JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Uuid(pub DeviceName);

impl TryFrom<String> for Uuid {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Uuid, &'static str> {
        parse_uuid(&text).map(Uuid).ok_or("not a UUID")
    }
}

impl From<Uuid> for String {
    fn from(uuid: Uuid) -> String {
        uuid.0.to_string()
    }
}

/// Parses `GPU-8-4-4-4-12` or `MIG-8-4-4-4-12` in hexadecimal. An instance in the older form, `MIG-GPU-uuid/gi/ci`, gets a UUID
/// made from the GPU's UUID and the instance numbers.
pub(crate) fn parse_uuid(text: &str) -> Option<DeviceName> {
    if let Some(rest) = text.strip_prefix("MIG-GPU-") {
        let (uuid, instance) = rest.split_once('/')?;
        let (gpu, compute) = instance.split_once('/')?;
        let (gpu, compute): (u8, u8) = (gpu.parse().ok()?, compute.parse().ok()?);
        let mut uuid = hex(uuid)?;
        uuid[14] ^= gpu.wrapping_add(1);
        uuid[15] ^= compute.wrapping_add(1);
        return Some(DeviceName::Mig(uuid));
    }
    match text.split_once('-')? {
        ("GPU", uuid) => Some(DeviceName::Gpu(hex(uuid)?)),
        ("MIG", uuid) => Some(DeviceName::Mig(hex(uuid)?)),
        _ => None,
    }
}

/// Parses the hexadecimal digits of a UUID, in groups of 8, 4, 4, 4 and 12.
fn hex(text: &str) -> Option<[u8; 16]> {
    if !text.split('-').map(str::len).eq([8, 4, 4, 4, 12]) {
        return None;
    }
    let mut digits = text.chars().filter(|&character| character != '-').map(|digit| digit.to_digit(16));
    let mut uuid = [0; 16];
    for byte in &mut uuid {
        *byte = (digits.next()?? << 4 | digits.next()??) as u8;
    }
    Some(uuid)
}

/// Timeout for opening the library: the driver needs seconds to initialize each unused GPU.
const LIBRARY_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of an idle poller, which updates its call state every second. A poller without an update is stopped or lost.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns how long this call may take before it counts as hung.
pub(crate) fn limit(call: Call, settings: &NvmlSettings) -> Duration {
    match call {
        Call::Device(_) | Call::Lists(_) | Call::Events => settings.call_timeout,
        Call::Index(_) => settings.call_timeout * 4,
        Call::Library => LIBRARY_TIMEOUT,
        Call::Nothing => IDLE_TIMEOUT,
    }
}

/// Starts a poller with these arguments. Returns its process and its call state.
pub(crate) fn launch(mut arguments: Arguments, stdio: fn() -> Stdio) -> std::io::Result<(Child, CallState)> {
    let call_state = CallState::new()?;
    let (inherited, number) = call_state.to_inherit()?;
    arguments.call_state = Some(number);
    // Execute this program even if its file has been replaced by a newer one.
    let program = arguments.settings.program.as_deref().unwrap_or(Path::new("/proc/self/exe"));
    let mut command = tokio::process::Command::new(program);
    command.arg0("gpumemd").args(arguments.to_args());
    // Use another process group, so that an interrupt typed at the terminal reaches only the daemon, which handles it.
    command.stdin(stdio()).stdout(stdio()).kill_on_drop(true).process_group(0);
    let child = command.spawn()?;
    drop(inherited);
    Ok((child, call_state))
}

/// Maximum delay of memory samples before they are written, in ns. They are written in the last wake-up before that, because
/// each write wakes the parent.
pub(super) const FLUSH_NS: u64 = 220_000_000;
/// Minimum time between two updates of the call state with the same call, in ns.
const SAME_CALL_NS: u64 = 50_000_000;

/// The poller's output to its parent.
pub(crate) struct FrameWriter {
    /// Frames that are not written so far.
    pub frames: Vec<u8>,
    /// Totals of calls, which the poller writes as frames regularly.
    pub totals: NvmlCalls,
    sink: Box<dyn Write>,
    call_state: Option<CallStateWriter>,
    /// Last published call, and the time of its publication (ns).
    published: (Call, u64),
}

impl FrameWriter {
    pub(crate) fn new(sink: Box<dyn Write>, call_state: Option<CallStateWriter>) -> FrameWriter {
        let (frames, totals) = (Vec::with_capacity(16 * 1024), NvmlCalls::default());
        FrameWriter { frames, totals, sink, call_state, published: (Call::Nothing, 0) }
    }

    /// Writes the current NVML call to memory shared with the daemon. Repeated calls for one device in quick succession are
    /// written once.
    pub(crate) fn set_call(&mut self, call: Call) {
        let Some(call_state) = &mut self.call_state else { return };
        let now = now_ns();
        if self.published.0 != call || now.saturating_sub(self.published.1) >= SAME_CALL_NS {
            self.published = (call, now);
            call_state.set(call);
        }
    }

    pub(crate) fn write(&mut self, stamp: Stamp, body: Body<'_>) {
        Record { stamp, body }.append_frame(&mut self.frames);
    }

    /// Announces that no call follows until `until_ns` (CLOCK_MONOTONIC).
    pub(crate) fn sleep_until(&mut self, until_ns: u64) {
        if let Some(call_state) = &mut self.call_state {
            self.published = (Call::Nothing, now_ns());
            call_state.sleep_until(until_ns);
        }
    }

    /// Writes the pending frames.
    /// Errors: The parent has closed the pipe.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.set_call(Call::Nothing);
        if !self.frames.is_empty() {
            self.sink.write_all(&self.frames)?;
            self.frames.clear();
        }
        Ok(())
    }
}

/// Process in a list of a poller: pid, used bytes, bit set of its lists.
type Listed = (u32, u64, u8);

/// The process list of a device in a poller's frames.
#[derive(Debug, Default)]
pub(crate) struct PollerList {
    /// Processes of the last reading, sorted by pid; empty if the bytes of one are unknown.
    last: Vec<Listed>,
    /// Processes that the reading that has begun has named.
    named: Vec<Listed>,
    /// Whether the other processes of the reading are the same as in `last`.
    is_same: bool,
}

impl PollerList {
    /// Begins a reading.
    pub fn begin(&mut self) {
        self.named.clear();
        self.is_same = false;
    }

    /// Adds a process that the reading names.
    pub fn name(&mut self, pid: u32, used_bytes: gpumem_wire::Reading, lists: u8) {
        self.named.extend(used_bytes.0.map(|used| (pid, used, lists)));
    }

    /// Notes that the processes that the present reading has not named are as in the last one.
    pub fn note_same(&mut self) {
        self.is_same = true;
    }

    /// Returns the processes of the last reading that the present one has not named.
    pub fn others(&self) -> Vec<Listed> {
        let is_named = |pid| self.named.iter().any(|(named, ..)| *named == pid);
        self.last.iter().filter(|(pid, ..)| !is_named(*pid)).copied().collect()
    }

    /// Ends the reading, which becomes the last one.
    pub fn end(&mut self) {
        if std::mem::take(&mut self.is_same) {
            for named in &self.named {
                if let Ok(at) = self.last.binary_search_by_key(&named.0, |(pid, ..)| *pid) {
                    self.last[at] = *named;
                }
            }
        } else {
            std::mem::swap(&mut self.last, &mut self.named);
        }
        self.named.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_read_and_written_alike() {
        for text in ["GPU-8f2b6c1d-0a3e-4d5f-9b7a-001122334455", "MIG-00000000-1111-2222-3333-444444444444"] {
            assert_eq!(parse_uuid(text).map(|name| name.to_string()).as_deref(), Some(text));
        }
        for wrong in [
            "",
            "GPU-",
            "GPU-8f2b6c1d0a3e4d5f9b7a001122334455",
            "GPU-8f2b6c1d-0a3e-4d5f-9b7a-00112233445",
            "GPU-8f2b6c1d-0a3e-4d5f-9b7a-00112233445g",
            "GPU-8f2b6c1d-0a3e-4d5f-9b7a-001122334455-1",
            "TPU-8f2b6c1d-0a3e-4d5f-9b7a-001122334455",
            "GPU-éf2b6c1-0a3e-4d5f-9b7a-001122334455",
        ] {
            assert_eq!(parse_uuid(wrong), None, "{wrong}");
        }
    }
}
