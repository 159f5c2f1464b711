//! Identities of processes and devices, and origins of records.

use gpumem_wire::DeviceIdKind;

/// Identity of a process. Pids are reused, but a pid together with its start time is unique.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessKey {
    /// Pid in the daemon's PID namespace.
    pub pid: u32,
    /// Start time of the process in clock ticks: field 22 of /proc/PID/stat; 0 if unknown (imports).
    pub start_ticks: u64,
}

/// Sender of a record. Ids inside a record are local to its origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The daemon, which reads NVML and /proc.
    Host,
    /// The agent inside this process.
    Process(ProcessKey),
}

/// Identity of a device. NVML's index and CUDA's ordinal may differ, so only the UUID matches both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceName {
    /// UUID of a GPU, most significant byte first.
    Gpu([u8; 16]),
    /// UUID of a MIG instance.
    Mig([u8; 16]),
    /// Number of a device in an import without UUIDs.
    Ordinal(u16),
}

impl DeviceName {
    /// Returns the device that a `Device` record names.
    pub fn from_record(uuid_high: u64, uuid_low: u64, ordinal: u16, id: DeviceIdKind) -> Self {
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&uuid_high.to_be_bytes());
        uuid[8..].copy_from_slice(&uuid_low.to_be_bytes());
        match id {
            DeviceIdKind::Gpu => DeviceName::Gpu(uuid),
            DeviceIdKind::Mig => DeviceName::Mig(uuid),
            DeviceIdKind::Ordinal | DeviceIdKind::Unknown => DeviceName::Ordinal(ordinal),
        }
    }
}

impl std::fmt::Display for DeviceName {
    /// Formats the identity like NVML: `GPU-8-4-4-4-12` and `MIG-...`; `ordinal-N` for imports.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (prefix, uuid) = match self {
            DeviceName::Gpu(uuid) => ("GPU", uuid),
            DeviceName::Mig(uuid) => ("MIG", uuid),
            DeviceName::Ordinal(ordinal) => return write!(f, "ordinal-{ordinal}"),
        };
        f.write_str(prefix)?;
        for (index, byte) in uuid.iter().enumerate() {
            if matches!(index, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// Refers to an account: one process on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AccountRef {
    /// The account on the device with this index in [`Snapshot::devices`](crate::Snapshot::devices).
    Device(usize),
    /// The account with this index in [`ProcessView::accounts`](crate::ProcessView::accounts); its device is not known yet.
    Unnamed(usize),
}
