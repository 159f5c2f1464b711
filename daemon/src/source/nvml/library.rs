//! Finding and opening the library, and which devices there are.
//!
//! On a partitioned GPU the devices are its instances. The GPU itself is then none: its lists name the processes of
//! its instances, and its memory is theirs, so that everything would be there twice.

use super::raw::{Charge, Code, Handle, List, Memory, Raw};
use gpumem_ledger::DeviceName;
use nvml_wrapper::error::NvmlError;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where the library is looked for, in this order: the loader's own search first, then WSL, NixOS, and what GKE
/// and device plugins mount.
const PLACES: [&str; 6] = [
    "libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/run/opengl-driver/lib/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "/home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1",
    "libnvidia-ml.so",
];

/// Whether pids and bytes in process lists can be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pids {
    /// They are this namespace's.
    Trusted,
    /// The driver gives this namespace's pids, with the bytes of whichever host process has that number.
    ForeignBytes,
    /// The driver gives the host's pids, which mean other processes here.
    Foreign,
}

/// One GPU or MIG instance.
#[derive(Debug, Clone)]
pub struct Device {
    /// UUID.
    pub name: DeviceName,
    /// NVML's index; of an instance, that of its GPU.
    pub index: u16,
    /// Product name.
    pub model: String,
}

/// What is known of an open library.
pub trait Gpus {
    /// Its devices, in NVML's order. Never changes; see [`Gpus::has_changed`].
    fn devices(&self) -> &[Device];
    /// Memory of a device.
    ///
    /// # Errors
    /// What NVML says.
    fn memory(&mut self, device: usize) -> Result<Memory, Code>;
    /// Appends the processes of one list.
    ///
    /// # Errors
    /// What NVML says.
    fn list(&mut self, device: usize, list: List, charges: &mut Vec<Charge>) -> Result<(), Code>;
    /// Whether pids and bytes can be believed.
    fn pids(&self) -> Pids;
    /// Whether there are other devices now: then open again. `enter` is told which index comes next.
    fn has_changed(&mut self, enter: &mut dyn FnMut(u16)) -> bool;
    /// Library and driver, for people.
    fn description(&self) -> &str;
}

/// What should not be touched while opening.
#[derive(Debug, Clone, Default)]
pub struct Avoid {
    /// NVML's indices.
    pub indices: Vec<u16>,
}

/// The real thing.
pub struct Library {
    raw: Raw,
    devices: Vec<Device>,
    handles: Vec<(Handle, Option<(u32, u32)>)>,
    pids: Pids,
    description: String,
}

impl Library {
    /// Opens `given`, or else the first library that answers, and looks which devices there are.
    ///
    /// # Errors
    /// Why there is none, for people.
    pub fn open(
        given: Option<&Path>,
        trust_pids: bool,
        avoid: &Avoid,
        enter: &mut dyn FnMut(u16),
    ) -> Result<Library, String> {
        let (raw, place) = find(given)?;
        let driver = raw.nvml().sys_driver_version().unwrap_or_else(|_| "of unknown version".to_owned());
        let pids = if trust_pids { Pids::Trusted } else { pids_of(&driver, is_host_namespace()) };
        let found =
            enumerate(&raw, avoid, enter).map_err(|code| format!("devices cannot be counted: {code}"))?;
        let (devices, handles) =
            found.into_iter().map(|(device, handle, instance)| (device, (handle, instance))).unzip();
        let description = format!("{}, driver {driver}", place.display());
        Ok(Library { raw, devices, handles, pids, description })
    }
}

fn find(given: Option<&Path>) -> Result<(Raw, PathBuf), String> {
    let places: Vec<OsString> = match given {
        Some(path) => vec![path.into()],
        None => PLACES.iter().map(OsString::from).collect(),
    };
    let mut refused: Option<String> = None;
    for place in &places {
        match Raw::open(place) {
            Ok(raw) => return Ok((raw, place.into())),
            Err(Some(code)) => {
                refused.get_or_insert_with(|| format!("{}: {code}", place.to_string_lossy()));
            }
            Err(None) => {}
        }
    }
    Err(refused.unwrap_or_else(|| match given {
        Some(path) => format!("{} cannot be loaded", path.display()),
        None => "no NVIDIA driver: libnvidia-ml.so.1 was not found".to_owned(),
    }))
}

type Found = (Device, Handle, Option<(u32, u32)>);

fn enumerate(raw: &Raw, avoid: &Avoid, enter: &mut dyn FnMut(u16)) -> Result<Vec<Found>, Code> {
    let nvml = raw.nvml();
    let mut found = Vec::new();
    for index in 0..nvml.device_count()? {
        let number = u16::try_from(index).unwrap_or(u16::MAX);
        if avoid.indices.contains(&number) {
            continue;
        }
        enter(number);
        // A GPU that cannot even be named (lost, no permission) is left out; the others are there.
        let Ok(gpu) = nvml.device_by_index(index) else { continue };
        let Some(name) = gpu.uuid().ok().and_then(|uuid| parse_uuid(&uuid)) else { continue };
        let model = |device: &nvml_wrapper::Device<'_>| device.name().unwrap_or_default();
        let before = found.len();
        if gpu.mig_mode().is_ok_and(|mode| mode.current != 0) {
            // The index space has holes.
            for place in 0..gpu.mig_device_count().unwrap_or(0) {
                let instance = match gpu.mig_device_by_index(place) {
                    Ok(instance) => instance,
                    Err(NvmlError::NotFound) => continue,
                    Err(_) => continue,
                };
                let Some(name) = instance.uuid().ok().and_then(|uuid| parse_uuid(&uuid)) else { continue };
                let handle = raw.handle(&instance);
                let device = Device { name, index: number, model: model(&instance) };
                found.push((device, handle, raw.instance(handle)));
            }
        }
        if found.len() == before {
            found.push((Device { name, index: number, model: model(&gpu) }, raw.handle(&gpu), None));
        }
    }
    Ok(found)
}

impl Gpus for Library {
    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn memory(&mut self, device: usize) -> Result<Memory, Code> {
        let &(handle, _) = self.handles.get(device).ok_or(Code::NOT_FOUND)?;
        self.raw.memory(handle)
    }

    fn list(&mut self, device: usize, list: List, charges: &mut Vec<Charge>) -> Result<(), Code> {
        let &(handle, instance) = self.handles.get(device).ok_or(Code::NOT_FOUND)?;
        let first = charges.len();
        self.raw.list(handle, list, charges)?;
        if instance.is_some() {
            // Several compute instances may share a GPU instance: each gets its own processes.
            let mut place = 0;
            charges.retain(|charge| {
                place += 1;
                place <= first || charge.instance.is_none() || charge.instance == instance
            });
        }
        Ok(())
    }

    fn pids(&self) -> Pids {
        self.pids
    }

    fn has_changed(&mut self, enter: &mut dyn FnMut(u16)) -> bool {
        let Ok(found) = enumerate(&self.raw, &Avoid::default(), enter) else { return true };
        let names = found.iter().map(|(device, ..)| device.name);
        !names.eq(self.devices.iter().map(|device| device.name))
    }

    fn description(&self) -> &str {
        &self.description
    }
}

/// `GPU-8-4-4-4-12` or `MIG-8-4-4-4-12` in hexadecimal. The older spelling of instances, `MIG-GPU-uuid/gi/ci`,
/// becomes a UUID of its own, made from the GPU's and the instance numbers.
pub fn parse_uuid(text: &str) -> Option<DeviceName> {
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

fn hex(text: &str) -> Option<[u8; 16]> {
    let groups = [8, 4, 4, 4, 12];
    let mut digits = Vec::with_capacity(32);
    let mut parts = text.split('-');
    for length in groups {
        let part = parts.next().filter(|part| part.len() == length)?;
        for character in part.chars() {
            digits.push(u8::try_from(character.to_digit(16)?).ok()?);
        }
    }
    if parts.next().is_some() {
        return None;
    }
    let mut uuid = [0; 16];
    for (byte, pair) in uuid.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(uuid)
}

/// The kernel numbers its first PID namespace so (`PROC_PID_INIT_INO`).
fn is_host_namespace() -> bool {
    std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == "pid:[4026531836]")
}

/// What a driver of this version does with pids, as read in the releases of its kernel modules.
fn pids_of(driver: &str, is_host: bool) -> Pids {
    if is_host {
        return Pids::Trusted;
    }
    let mut parts = driver.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    match version {
        (0, ..) => Pids::Foreign, // not a number: nothing is known
        version if version < (535, 113, 1) => Pids::Foreign,
        version if version < (565, 57, 1) => Pids::ForeignBytes,
        _ => Pids::Trusted,
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
}
