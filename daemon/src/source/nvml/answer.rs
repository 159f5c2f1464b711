//! Results of NVML calls: numbers, or an error code with a text and a remedy for the user.

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::nvmlReturn_t;

/// Error code of NVML; never 0, which means success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub u32);

impl Code {
    pub(crate) const UNINITIALIZED: Code = Code(1);
    pub(crate) const INVALID_ARGUMENT: Code = Code(2);
    pub(crate) const NOT_SUPPORTED: Code = Code(3);
    pub(crate) const NO_PERMISSION: Code = Code(4);
    pub(crate) const NOT_FOUND: Code = Code(6);
    pub(crate) const INSUFFICIENT_SIZE: Code = Code(7);
    pub(crate) const DRIVER_NOT_LOADED: Code = Code(9);
    pub(crate) const TIMEOUT: Code = Code(10);
    pub(crate) const FUNCTION_NOT_FOUND: Code = Code(13);
    pub(crate) const GPU_IS_LOST: Code = Code(15);
    pub(crate) const RESET_REQUIRED: Code = Code(16);
    pub(crate) const LIB_RM_VERSION_MISMATCH: Code = Code(18);
    pub(crate) const ARGUMENT_VERSION_MISMATCH: Code = Code(25);
    pub(crate) const GPU_NOT_FOUND: Code = Code(28);
    pub(crate) const UNKNOWN: Code = Code(999);
    /// Code of this project, not of NVML: the call succeeded but returned an impossible value.
    pub(crate) const IMPOSSIBLE: Code = Code(1_000_000);

    /// Returns whether the error concerns the whole library: no device can be read until it is opened again.
    pub(crate) fn is_of_library(self) -> bool {
        matches!(self, Code::UNINITIALIZED | Code::DRIVER_NOT_LOADED | Code::LIB_RM_VERSION_MISMATCH)
    }

    /// Returns whether the error may mean that this device no longer exists, while other devices do.
    pub(crate) fn casts_doubt_on_device(self) -> bool {
        matches!(self, Code::INVALID_ARGUMENT | Code::NOT_FOUND | Code::GPU_NOT_FOUND)
    }

    /// Returns whether the error means that the GPU is unusable until it is reset.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Code::GPU_IS_LOST | Code::RESET_REQUIRED | Code::GPU_NOT_FOUND | Code::UNKNOWN)
    }

    /// Returns how the user can remove the cause of the error. All failed calls are retried automatically.
    pub(crate) fn remedy(self) -> Option<&'static str> {
        Some(match self.0 {
            1 => "no action: gpumemd opens the library again",
            2 | 6 | 28 => {
                "check whether the GPU was removed or its MIG partition changed; gpumemd keeps searching for devices"
            }
            3 => "a driver of another branch may support it",
            4 => {
                "give gpumemd read and write access to /dev/nvidiactl and /dev/nvidia*; with MIG in a container: root, \
                 privileged, NVIDIA_MIG_MONITOR_DEVICES=all"
            }
            7 => "no action: processes start and end faster than they can be listed; gpumemd retries",
            9 => "load the driver (modprobe nvidia, or run nvidia-smi as root once); gpumemd retries",
            10 => "see the kernel log (dmesg | grep NVRM): the GPU may be about to fail",
            15 => {
                "dmesg has an Xid with the reason (79: fallen off the bus); stop its users and reset it, or power-cycle \
                 the machine; gpumemd then finds it again"
            }
            16 => {
                "gpumemctl nvml release --for 60s, then nvidia-smi --gpu-reset; gpumemd then finds it again"
            }
            18 => {
                "the library was upgraded and the module was not: stop the users of the GPU and reload the nvidia modules, \
                 or reboot; gpumemd then continues"
            }
            19 => "another program uses the GPU exclusively; gpumemd retries",
            25 => "install library and kernel module of the same driver release",
            27 => "no action: the GPU is still starting",
            11 | 14 | 20 | 21 | 999 => "see the kernel log (dmesg | grep -e NVRM -e Xid)",
            1_000_000 => {
                "the driver returns wrong values: compare with nvidia-smi, see the kernel log (dmesg | grep -e NVRM -e Xid), \
                 reset the GPU or reload the driver"
            }
            _ => return None,
        })
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = match self.0 {
            1 => "the library is not initialised",
            2 => "invalid argument",
            3 => "not supported",
            4 => "no permission",
            6 => "not found",
            7 => "the list kept growing while it was read",
            9 => "the driver is not loaded",
            10 => "timeout",
            13 => "the library lacks the function",
            15 => "the GPU is lost",
            16 => "the GPU needs a reset",
            18 => "library and driver are of different versions; reload the driver or reboot",
            19 => "in use",
            25 => "argument version mismatch",
            27 => "not ready",
            28 => "GPU not found",
            999 => "unknown error",
            1_000_000 => "impossible values",
            other => return write!(f, "error {other}"),
        };
        f.write_str(text)
    }
}

impl From<NvmlError> for Code {
    fn from(error: NvmlError) -> Code {
        match error {
            NvmlError::FailedToLoadSymbol(_) => Code::FUNCTION_NOT_FOUND,
            error => Code(nvmlReturn_t::from(error)),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Size of the device's memory, in bytes.
    pub total_bytes: u64,
    /// Bytes that are neither used nor reserved.
    pub free_bytes: u64,
    /// Bytes in use. Includes the driver's own memory, unless `reserved_bytes` contains it.
    pub used_bytes: u64,
    /// Bytes reserved by the driver for itself, if it reports them separately.
    pub reserved_bytes: Option<u64>,
    /// Whether the device has no memory of its own; then the numbers are those of the host's memory.
    pub is_unified: bool,
}

impl Memory {
    pub(crate) fn new(
        total_bytes: u64,
        free_bytes: u64,
        used_bytes: u64,
        reserved_bytes: Option<u64>,
    ) -> Memory {
        Memory { total_bytes, free_bytes, used_bytes, reserved_bytes, is_unified: false }
    }

    /// Returns name and value of the first number of bytes that exceeds the device's memory; `None` if none does.
    pub(crate) fn impossible(&self) -> Option<(&'static str, u64)> {
        let all = [
            ("used", Some(self.used_bytes)),
            ("free", Some(self.free_bytes)),
            ("reserved", self.reserved_bytes),
        ];
        all.into_iter()
            .find_map(|(name, bytes)| Some((name, bytes.filter(|bytes| *bytes > self.total_bytes)?)))
    }
}

/// Highest number that a pid can have.
pub(crate) const MAX_PID: u32 = i32::MAX as u32;

/// Entry of a process list: a process that uses the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Charge {
    /// Pid as reported by NVML.
    pub pid: u32,
    /// Bytes used by the process; `None` if NVML answers "not available".
    pub bytes: Option<u64>,
    /// Numbers of the GPU instance and the compute instance, on a partitioned GPU.
    pub instance: Option<(u32, u32)>,
    /// Part of `bytes` that confidential computing protects; `None` without that feature, or if NVML answers "not available".
    pub protected_bytes: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub kind: EventKind,
    /// Numbers of the GPU instance and the compute instance, if the event names them.
    pub instance: Option<(u32, u32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventKind {
    /// A fault of the GPU, with the driver's number for it (Xid).
    Xid(u64),
    /// The GPU's partition into instances has changed.
    Partitioned,
    /// A health event of the GPU other than an Xid; the number is its index in [`HEALTH_EVENTS`].
    Health(usize),
    /// An event of a type that was not requested.
    Other,
}

/// GPU memory limit of a control group (drivers from R615 on).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    pub soft_bytes: u64,
    /// Hard limit in bytes; `u64::MAX` means no limit.
    pub hard_bytes: u64,
    pub used_bytes: u64,
}

/// A kind of health event of a GPU (drivers from R580 on).
#[derive(Debug)]
pub(crate) struct HealthEventKind {
    /// Bit in NVML's mask of event types.
    pub bit: u64,
    pub name: &'static str,
    pub text: &'static str,
    /// Whether the GPU or its memory is unreliable after such an event until it is reset.
    pub is_grave: bool,
}

pub(crate) const HEALTH_EVENTS: [HealthEventKind; 6] = {
    const fn of(bit: u64, name: &'static str, text: &'static str, is_grave: bool) -> HealthEventKind {
        HealthEventKind { bit, name, text, is_grave }
    }
    [
        of(0x400, "dram_retirement", "DRAM retired", false),
        of(0x800, "dram_retirement_failure", "DRAM retirement failed", true),
        of(0x1000, "poison_nonfatal", "non-fatal poison error", false),
        of(0x2000, "poison_fatal", "fatal poison error", true),
        of(0x4000, "gpu_unavailable", "GPU unavailable", true),
        of(0x8000, "recovery_action", "recovery action changed", true),
    ]
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum List {
    Compute = 0,
    Graphics = 1,
    Mps = 2,
}

impl List {
    pub(crate) const ALL: [List; 3] = [List::Compute, List::Graphics, List::Mps];

    /// Returns the bit of this list in `ProcessSample.lists`.
    pub(crate) const fn bit(self) -> u8 {
        1 << self as u8
    }
}
