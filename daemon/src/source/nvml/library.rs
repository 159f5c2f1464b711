//! Finds and opens the NVML library, and lists its devices.
//!
//! If a GPU is partitioned, its instances are the devices and the GPU itself is not. Its process lists and its memory include
//! those of its instances, so memory would be counted twice.

use super::answer::{Charge, Code, Event, List, Memory, MemoryLimit};
use super::protocol::{Arguments, parse_uuid};
use super::raw::{Handle, Raw};
use gpumem_ledger::DeviceName;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Paths of the library in the order of attempts: the loader's search path, WSL, NixOS, mounts of GKE and device plugins.
const LIBRARY_PATHS: [&str; 6] = [
    "libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/run/opengl-driver/lib/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "/home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1",
    "libnvidia-ml.so",
];

/// Whether pids and bytes in NVML's process lists are valid in this PID namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pids {
    /// Pids and bytes are valid.
    Trusted,
    /// Pids are valid in this namespace, but the bytes are those of the host's process with the same number.
    ForeignBytes,
    /// Pids are those of the host and mean other processes in this namespace.
    Foreign,
}

/// A GPU, or an instance of a partitioned GPU.
#[derive(Debug, Clone)]
pub(crate) struct Device {
    pub name: DeviceName,
    /// NVML's index of the GPU, or of the GPU to which this instance belongs.
    pub index: u16,
    pub model: String,
    /// Numbers of the GPU instance and the compute instance; `None` for a whole GPU.
    pub instance: Option<(u32, u32)>,
    /// Whether the GPU is partitioned and none of its instances is visible from here.
    pub hides_instances: bool,
    /// Properties of the driver; empty until the library is open.
    pub facts: Facts,
}

/// Devices and properties read when the library was opened. Never changed afterwards; see [`Gpus::has_changed`].
#[derive(Debug, Clone)]
pub(crate) struct Inventory {
    /// Devices in NVML's order.
    pub devices: Vec<Device>,
    /// GPUs that exist but cannot be identified, each with its NVML index and the error.
    pub unnamed: Vec<(u16, Code)>,
    pub pids: Pids,
    /// Properties of the driver.
    pub facts: Facts,
    /// Library and driver, as a text for the user.
    pub description: String,
}

/// The calls of an opened library. Devices are numbered as in its inventory.
pub(crate) trait Gpus {
    fn inventory(&self) -> &Inventory;
    /// Reads the memory of a device, or of the host if the device has no memory of its own.
    fn memory(&mut self, device: usize) -> Result<Memory, Code>;
    /// Appends the processes of one of the device's process lists to `charges`, which may have others of the same device.
    fn list(&mut self, device: usize, list: List, charges: &mut Vec<Charge>) -> Result<(), Code>;
    /// Returns the peak memory use of a process on a device, from the driver's accounting. The process may have ended.
    fn accounted_peak(&mut self, device: usize, pid: u32) -> Result<u64, Code>;
    /// Returns whether the driver's accounting is on. Other programs can switch it on and off.
    fn is_accounting(&mut self, device: usize) -> bool;
    /// Appends the events since the last call, each with the NVML index of its GPU.
    fn events(&mut self, found: &mut Vec<(u16, Event)>);
    /// Returns the driver's number of a GPU whose unbinding from the driver has begun since the last call. Unbinding waits until
    /// all processes have closed NVML.
    fn unbinding(&mut self) -> Option<u32>;
    /// Returns the memory limit of a control group on a device. `group` is the path of the control group.
    fn memory_limit(&mut self, device: usize, group: &str) -> Result<MemoryLimit, Code>;
    /// Returns the utilisation of a device in per cent and its power in W, each if the driver reports it.
    fn load(&mut self, device: usize) -> [Option<u32>; 2];
    /// Returns whether the devices have changed, so that the library must be opened again. Calls `enter` with a GPU's NVML index
    /// before it opens that GPU.
    fn has_changed(&mut self, enter: &mut dyn FnMut(u16)) -> bool;
}

/// Properties of a device or the driver, as pairs of name and value.
pub(crate) type Facts = Vec<(&'static str, String)>;

pub(crate) struct Library {
    raw: Raw,
    inventory: Inventory,
    handles: Vec<Handle>,
    watches: Vec<EventWatch>,
    /// Number of calls of [`Gpus::unbinding`] to skip after an error.
    unbinding_pause: u32,
    /// Whether each device's own memory (not the host's) has ever been read.
    has_memory: Vec<bool>,
}

struct EventWatch {
    /// NVML's index of the GPU.
    gpu: u16,
    handle: Handle,
    /// Number of the event set for [`Raw::event`], while the GPU is watched.
    set: Option<usize>,
    /// Number of polls for events to skip before the next attempt to watch this GPU.
    pause: u32,
}

/// Number of polls after which a GPU without events is tried again (some minutes).
const WATCH_PAUSE: u32 = 120;
/// Maximum number of events read in one poll; the next poll reads further ones.
const EVENTS_AT_ONCE: usize = 64;

impl Library {
    /// Opens the library of the settings, or else the first one that works, and lists the devices. Does not open or watch what
    /// `arguments` exclude. Calls `enter` with a GPU's NVML index before it opens that GPU.
    /// Errors: Reason as a text for the user, and NVML's code or 0.
    pub(crate) fn open(arguments: &Arguments, enter: &mut dyn FnMut(u16)) -> Result<Library, (String, u32)> {
        let settings = &arguments.settings;
        let (raw, place) = find(settings.library.as_deref())?;
        let driver = raw.nvml.sys_driver_version().unwrap_or_else(|_| "of unknown version".to_owned());
        let pids = pids_of(&driver, settings.trust_pids || crate::os::is_in_host_pid_namespace());
        let (found, gpus) = enumerate(&raw, &arguments.skip_index, enter)
            .map_err(|code| (format!("devices cannot be counted: {code}"), code.0))?;
        let (mut devices, handles): (Vec<Device>, Vec<Handle>) = found.into_iter().unzip();
        for (device, &handle) in devices.iter_mut().zip(&handles) {
            device.facts = facts_of(&raw, device, handle);
        }
        let description = format!("{}, driver {driver}", place.display());
        let mut facts = flags([
            ("confidential", raw.is_confidential()),
            ("protected", raw.tells_protected_bytes()),
            ("wsl", is_wsl() || place.starts_with("/usr/lib/wsl")),
            ("long_records", raw.looks_like_535),
        ]);
        facts.extend([
            ("library", place.display().to_string()),
            ("driver", driver),
            ("pids", format!("{pids:?}")),
        ]);
        let (mut watches, mut unnamed) = (Vec::new(), Vec::new());
        for (gpu, handle) in gpus {
            match handle {
                Ok(handle) => watches.push(EventWatch { gpu, handle, set: None, pause: 0 }),
                Err(code) => unnamed.push((gpu, code)),
            }
        }
        if !unnamed.is_empty() {
            let listed = unnamed.iter().map(|(gpu, code)| format!("{gpu}:{}", code.0));
            facts.push(("unnamed", listed.collect::<Vec<_>>().join(",")));
        }
        if arguments.no_events {
            watches.clear();
        }
        Ok(Library {
            raw,
            has_memory: vec![false; devices.len()],
            inventory: Inventory { devices, unnamed, pids, facts, description },
            handles,
            watches,
            unbinding_pause: if arguments.no_events { u32::MAX } else { 0 },
        })
    }
}

fn find(given: Option<&Path>) -> Result<(Raw, PathBuf), (String, u32)> {
    let places: Vec<OsString> = match given {
        Some(path) => vec![path.into()],
        None => LIBRARY_PATHS.iter().map(OsString::from).collect(),
    };
    let mut refused: Option<(String, u32)> = None;
    for place in &places {
        match Raw::open(place) {
            Ok(raw) => return Ok((raw, place.into())),
            Err(Some(code)) => {
                refused.get_or_insert_with(|| (format!("{}: {code}", place.to_string_lossy()), code.0));
            }
            Err(None) => {}
        }
    }
    Err(refused.unwrap_or_else(|| match given {
        Some(path) => (format!("{} cannot be loaded", path.display()), 0),
        None => ("no NVIDIA driver: libnvidia-ml.so.1 was not found".to_owned(), 0),
    }))
}

/// Handle of each GPU with its NVML index, or the error if the GPU cannot be identified.
type GpuHandles = Vec<(u16, Result<Handle, Code>)>;

/// Lists the devices, and the handles of all GPUs except those with an NVML index in `skip`.
fn enumerate(
    raw: &Raw,
    skip: &[u16],
    enter: &mut dyn FnMut(u16),
) -> Result<(Vec<(Device, Handle)>, GpuHandles), Code> {
    let nvml = &raw.nvml;
    let (mut found, mut gpus) = (Vec::new(), Vec::new());
    for index in 0..nvml.device_count()? {
        let number = u16::try_from(index).unwrap_or(u16::MAX);
        if skip.contains(&number) {
            continue;
        }
        enter(number);
        // Skip a GPU that cannot be identified (lost, no permission), and list the others.
        let named = nvml.device_by_index(index).and_then(|gpu| Ok((gpu.uuid()?, gpu)));
        let (uuid, gpu) = match named {
            Ok(named) => named,
            Err(error) => {
                gpus.push((number, Err(Code::from(error))));
                continue;
            }
        };
        let Some(name) = parse_uuid(&uuid) else { continue };
        gpus.push((number, Ok(raw.handle(&gpu))));
        let mut add = |name, device: &nvml_wrapper::Device<'_>, instance, hides_instances| {
            let (model, facts) = (device.name().unwrap_or_default(), Facts::new());
            let device_found = Device { name, index: number, model, instance, hides_instances, facts };
            found.push((device_found, raw.handle(device)));
        };
        let mut has_instances = false;
        let is_partitioned = gpu.mig_mode().is_ok_and(|mode| mode.current != 0);
        if is_partitioned {
            // Skip unused indices: those of instances have gaps.
            for place in 0..gpu.mig_device_count().unwrap_or(0) {
                let Ok(instance) = gpu.mig_device_by_index(place) else { continue };
                let Some(name) = instance.uuid().ok().and_then(|uuid| parse_uuid(&uuid)) else { continue };
                add(name, &instance, raw.instance(raw.handle(&instance)), false);
                has_instances = true;
            }
        }
        if !has_instances {
            add(name, &gpu, None, is_partitioned);
        }
    }
    Ok((found, gpus))
}

fn facts_of(raw: &Raw, device: &Device, handle: Handle) -> Facts {
    let wrapped = raw.wrapped(handle).ok();
    let mut facts = flags([
        ("hidden_instances", device.hides_instances),
        ("instance", device.instance.is_some()),
        ("display", wrapped.as_ref().is_some_and(|device| device.is_display_active().unwrap_or(false))),
        ("windows", raw.is_windows(handle)),
    ]);
    let numa_node = wrapped.and_then(|device| device.numa_node_id().ok());
    let numa_node = numa_node.filter(|&node| node != u32::MAX);
    facts.extend(raw.addressing(handle).map(|mode| ("addressing", mode.to_owned())));
    facts.extend(numa_node.map(|node| ("numa_node", node.to_string())));
    facts.extend(device.instance.map(|(of_gpu, _)| ("gpu_instance", of_gpu.to_string())));
    facts
}

/// Returns the names that apply as facts with the value `1`.
fn flags<const N: usize>(flags: [(&'static str, bool); N]) -> Facts {
    flags.into_iter().filter(|(_, applies)| *applies).map(|(name, _)| (name, "1".to_owned())).collect()
}

fn is_wsl() -> bool {
    let release = rustix::system::uname();
    release.release().to_string_lossy().to_lowercase().contains("microsoft")
}

impl Gpus for Library {
    fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    fn memory(&mut self, device: usize) -> Result<Memory, Code> {
        let memory = self.raw.memory(self.handles[device]);
        match memory {
            Ok(_) => self.has_memory[device] = true,
            // For a device whose own memory was read before, this code is an error. NVML documents it only for GPUs without
            // memory of their own.
            Err(Code::NOT_SUPPORTED)
                if self.inventory.devices[device].instance.is_none() && !self.has_memory[device] =>
            {
                return host_memory();
            }
            Err(_) => {}
        }
        memory
    }

    fn list(&mut self, device: usize, list: List, charges: &mut Vec<Charge>) -> Result<(), Code> {
        self.raw.list(self.handles[device], list, charges)?;
        let instance = self.inventory.devices[device].instance;
        if instance.is_some() {
            // Several compute instances may share a GPU instance, so keep only the processes of this compute instance.
            charges.retain(|charge| charge.instance.is_none() || charge.instance == instance);
        }
        Ok(())
    }

    fn accounted_peak(&mut self, device: usize, pid: u32) -> Result<u64, Code> {
        let stats = self.raw.wrapped(self.handles[device])?.accounting_stats_for(pid)?;
        stats.max_memory_usage.ok_or(Code::NOT_SUPPORTED)
    }

    fn is_accounting(&mut self, device: usize) -> bool {
        let device = self.raw.wrapped(self.handles[device]);
        device.is_ok_and(|device| device.is_accounting_enabled().unwrap_or(false))
    }

    fn events(&mut self, found: &mut Vec<(u16, Event)>) {
        for watch in &mut self.watches {
            if watch.pause > 0 {
                watch.pause -= 1;
                continue;
            }
            let set = watch.set.map_or_else(|| self.raw.watch(watch.handle), Ok);
            watch.set = set.ok();
            loop {
                match set.and_then(|set| self.raw.event(set)) {
                    Ok(Some(event)) => found.push((watch.gpu, event)),
                    Ok(None) => break,
                    Err(_) => {
                        (watch.set, watch.pause) = (None, WATCH_PAUSE);
                        break;
                    }
                }
                if found.len() >= EVENTS_AT_ONCE {
                    return;
                }
            }
        }
    }

    fn unbinding(&mut self) -> Option<u32> {
        if self.unbinding_pause > 0 {
            self.unbinding_pause = self.unbinding_pause.saturating_sub(1);
            return None;
        }
        self.raw.unbinding().unwrap_or_else(|code| {
            self.unbinding_pause = if code == Code::FUNCTION_NOT_FOUND { u32::MAX } else { WATCH_PAUSE };
            None
        })
    }

    fn memory_limit(&mut self, device: usize, group: &str) -> Result<MemoryLimit, Code> {
        self.raw.memory_limit(self.handles[device], group)
    }

    fn load(&mut self, device: usize) -> [Option<u32>; 2] {
        let Ok(device) = self.raw.wrapped(self.handles[device]) else { return [None; 2] };
        let percent =
            device.utilization_rates().ok().map(|rates| rates.gpu).filter(|percent| *percent <= 100);
        [percent, device.power_usage().ok().map(|milliwatts| milliwatts.saturating_add(500) / 1000)]
    }

    fn has_changed(&mut self, enter: &mut dyn FnMut(u16)) -> bool {
        let Ok((found, _)) = enumerate(&self.raw, &[], enter) else { return true };
        let names = found.iter().map(|(device, _)| device.name);
        !names.eq(self.inventory.devices.iter().map(|device| device.name))
    }
}

/// Returns how a driver of this version reports pids. `trusts` means that they are valid with every driver. The rules come from
/// the sources of NVIDIA's kernel modules.
fn pids_of(driver: &str, trusts: bool) -> Pids {
    if trusts {
        return Pids::Trusted;
    }
    let mut parts = driver.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    match version {
        (0, ..) => Pids::Foreign, // not a number: unknown driver
        version if version < (535, 113, 1) => Pids::Foreign,
        version if version < (565, 57, 1) => Pids::ForeignBytes,
        _ => Pids::Trusted,
    }
}

/// Reads the host's memory: size (MemTotal), free bytes (MemAvailable), and used bytes (the difference). It counts as device
/// memory if a GPU has no memory of its own (unified memory: GB10, Jetson) and NVML does not support that call.
/// Errors: NOT_SUPPORTED, NVML's own answer for the device, if /proc/meminfo cannot be read.
fn host_memory() -> Result<Memory, Code> {
    let text = std::fs::read("/proc/meminfo").map_err(|_| Code::NOT_SUPPORTED)?;
    parse_meminfo(&text).ok_or(Code::NOT_SUPPORTED)
}

/// Reads `MemTotal:   16384 kB` and `MemAvailable:` from the text of /proc/meminfo. `None` if either is missing.
fn parse_meminfo(text: &[u8]) -> Option<Memory> {
    let text = String::from_utf8_lossy(text);
    let amount = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
        kib.checked_mul(1024)
    };
    let (total_bytes, available) = (amount("MemTotal")?, amount("MemAvailable")?);
    let free_bytes = available.min(total_bytes);
    Some(Memory { is_unified: true, ..Memory::new(total_bytes, free_bytes, total_bytes - free_bytes, None) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_names_of_instances_differ_from_each_other_and_from_the_gpu() {
        let gpu = "8f2b6c1d-0a3e-4d5f-9b7a-001122334455";
        let mut names: Vec<DeviceName> = (0..7)
            .flat_map(|gi| (0..3).map(move |ci| (gi, ci)))
            .map(|(gi, ci)| parse_uuid(&format!("MIG-GPU-{gpu}/{gi}/{ci}")).expect("a name"))
            .collect();
        names.push(parse_uuid(&format!("MIG-{gpu}")).expect("a name"));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(parse_uuid(&format!("MIG-GPU-{gpu}/1")), None);
    }

    #[test]
    fn pids_are_believed_by_driver_and_namespace() {
        for (driver, expected) in [
            ("470.256.02", Pids::Foreign),
            ("535.104.05", Pids::Foreign),
            ("535.113.01", Pids::ForeignBytes),
            ("535.288.01", Pids::ForeignBytes),
            ("550.163.01", Pids::ForeignBytes),
            ("560.35.05", Pids::ForeignBytes),
            ("565.57.01", Pids::Trusted),
            ("595.45.04", Pids::Trusted),
            ("of unknown version", Pids::Foreign),
        ] {
            assert_eq!(pids_of(driver, false), expected, "{driver}");
            assert_eq!(pids_of(driver, true), Pids::Trusted);
        }
    }

    #[test]
    fn size_and_available_memory_are_read_and_add_up() {
        let text =
            b"MemTotal:       125514332 kB\nMemFree:         1000000 kB\nMemAvailable:   105514332 kB\n";
        let memory = parse_meminfo(text).expect("two amounts");
        assert_eq!((memory.total_bytes, memory.free_bytes), (125_514_332 << 10, 105_514_332 << 10));
        assert_eq!(memory.used_bytes, 20_000_000 << 10);
        assert!(memory.is_unified && memory.reserved_bytes.is_none());
    }

    #[test]
    fn text_without_the_two_amounts_is_no_reading() {
        for text in [
            &b""[..],
            b"MemTotal: 4 kB\n",
            b"MemAvailable: 4 kB\n",
            b"MemTotal: 4 MB\nMemAvailable: 1 kB\n",
            b"MemTotal: -4 kB\nMemAvailable: 1 kB\n",
            b"MemTotal: 99999999999999999999 kB\nMemAvailable: 1 kB\n",
        ] {
            assert_eq!(parse_meminfo(text), None, "{}", String::from_utf8_lossy(text));
        }
        // A container's view (lxcfs) may have more available than its limit.
        let odd = parse_meminfo(b"MemTotal: 4 kB\nMemAvailable: 9 kB\n").expect("two amounts");
        assert_eq!((odd.used_bytes, odd.free_bytes), (0, 4096));
    }

    #[test]
    fn this_host_has_memory() {
        let memory = host_memory().expect("/proc/meminfo");
        assert!(memory.used_bytes > 0 && memory.used_bytes + memory.free_bytes == memory.total_bytes);
    }
}
