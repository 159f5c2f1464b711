//! Table of the checks of `gpumemctl doctor`. Programs and documents refer to a check by its id, so ids are never renamed or
//! reused. docs/troubleshooting.md has the same table; a test compares the two.

macro_rules! checks {
    ($( $check:ident = $id:literal, $about:literal; )*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Check { $( $check, )* }

        impl Check {
            /// All checks, in the order in which documents list them.
            pub const ALL: &'static [Check] = &[ $( Check::$check, )* ];

            pub const fn id(self) -> &'static str {
                match self { $( Check::$check => $id, )* }
            }

            /// Returns a description of what the check examines, for people.
            pub const fn about(self) -> &'static str {
                match self { $( Check::$check => $about, )* }
            }
        }
    };
}

checks! {
    Daemon = "daemon", "whether a daemon answers at one of the known sockets, and whether its user may be trusted";
    DaemonVersion = "daemon.version", "whether gpumemd and gpumemctl have the same version";
    DaemonUnit = "daemon.unit", "the state of gpumemd.service and its sockets, where systemd runs the machine";
    DaemonPort = "daemon.port", "the process that holds the metrics port while no daemon answers; gpumemd cannot start then";
    DaemonConfig = "daemon.config", "whether the last reload of the configuration was accepted";
    Sockets = "sockets", "owner and mode of the daemon's sockets, and whether processes of this user can report";
    SocketPath = "sockets.path", "whether each configured socket path has at most 107 bytes";
    NamespacePid = "namespace.pid", "whether gpumemctl and the daemon share a PID namespace; a pid is valid in one namespace only";
    NamespaceTime = "namespace.time", "whether gpumemctl and the daemon share a time namespace";
    Driver = "driver", "whether the kernel's driver is loaded";
    DriverVersions = "driver.versions", "whether the driver's libraries and its kernel module are of one release";
    DriverFiles = "driver.files", "whether this user may open the driver's device files";
    DriverWsl = "driver.wsl", "WSL: the driver reports no bytes of processes";
    DriverMps = "driver.mps", "whether an MPS control daemon runs here";
    Nvml = "nvml", "whether NVML answers the daemon: library, driver, permissions, versions";
    NvmlPids = "nvml.pids", "drivers that answer with the pids or bytes of another PID namespace";
    NvmlRecords = "nvml.records", "early 535 drivers, whose records are longer than declared";
    NvmlConfidential = "nvml.confidential", "confidential computing";
    NvmlEvents = "nvml.events", "whether the driver reports faults (Xid) and MIG changes";
    NvmlCalls = "nvml.calls", "calls that did not return, and lists that are read less often because they block the driver";
    Gpu = "gpu", "whether each GPU has fresh readings; for one without, NVML's error";
    GpuUnnamed = "gpu.unnamed", "GPUs without a readable UUID";
    GpuMig = "gpu.mig", "MIG instances that are hidden from this container";
    GpuFaults = "gpu.faults", "faults (Xid) that the driver reported";
    GpuEvents = "gpu.events", "health events of a GPU other than faults: DRAM retirement, poison, GPU unavailable, \
         recovery action";
    GpuStrangers = "gpu.strangers", "memory of processes that are dead, hidden or in another PID namespace";
    GpuBytes = "gpu.bytes", "listed processes without bytes (WSL, vGPU, some MIG)";
    GpuRemainder = "gpu.remainder", "used memory that NVML charges to no process";
    GpuMps = "gpu.mps", "clients of MPS, and where their memory is charged";
    GpuGraphics = "gpu.graphics", "processes that use a GPU for graphics as well as computing";
    GpuVgpu = "gpu.vgpu", "a virtual GPU (vGPU): values that its host withholds";
    GpuUnified = "gpu.unified", "a GPU without dedicated memory: it uses the host's";
    GpuAddressing = "gpu.addressing", "how a GPU addresses the host's memory (HMM, ATS), and the NUMA node of its memory";
    GpuLimits = "gpu.limits", "limits of a GPU's memory that the driver keeps for control groups (R615), and how much of each is used";
    Accounting = "accounting", "the driver's accounting mode: exact peaks of processes without an agent; never changed by gpumemd";
    KernelLog = "kernel.log", "whether the daemon can read the kernel's log, which names processes killed for lack \
         of host memory and those with faults";
    Store = "store", "whether runs are written: path, damage, permissions, a full disk";
    StoreDamage = "store.damage", "a store that was damaged and set aside";
    StoreSize = "store.size", "a store above its size limit";
    StoreAge = "store.age", "old runs that are kept because the clock may be wrong";
    StoreLost = "store.lost", "runs that were never stored";
    StoreAnswers = "store.answers", "replies that omit runs because of their size limit";
    StoreRoom = "store.room", "free space in the store's file system";
    Recording = "recording", "records that the daemon's recording lacks";
    Metrics = "metrics", "whether metrics are served, and where";
    MetricsSeries = "metrics.series", "series that a scrape left out";
    MetricsConnections = "metrics.connections", "scrapes that were refused because all connections were in use";
    ControlConnections = "control.connections", "requests of gpumemctl that were refused because all connections were in use";
    ControlShare = "control.share", "users whose requests wait because they exceed their share of processor time";
    AgentLibrary = "agent.library", "whether gpumemctl finds libgpumem.so, for this machine's architecture";
    AgentVersions = "agent.versions", "which libgpumem.so files this user's processes have loaded: replaced, removed or different ones";
    AgentCupti = "agent.cupti", "whether libcupti exists and fits the driver's CUDA version";
    AgentEnvironment = "agent.environment", "variables of this shell that disable or configure the agent";
    AgentLimits = "agent.limits", "agents that reached a limit: connections, hellos, descriptors, records per second, devices";
    AgentMemory = "agent.memory", "processes whose records exceed a memory limit: of the process, the user or the daemon";
    AgentProtocol = "agent.protocol", "agents of another version of the protocol";
    AgentIdentity = "agent.identity", "agents whose process the daemon could not identify";
    AgentPackets = "agent.packets", "agents that were disconnected because of invalid packets";
    AgentClock = "agent.clock", "agents whose clock is not the daemon's: another time namespace";
    Uncovered = "processes.uncovered", "processes without an agent: their number and the largest";
    Blocked = "processes.blocked", "processes in which another client holds CUPTI, and its name";
    Partial = "processes.partial", "processes that lost records, or reached the limit of rows";
    Process = "process", "whether the daemon knows the process, and covers it";
    ProcessAccess = "process.access", "whether this user may read the process's files in /proc";
    ProcessCuda = "process.cuda", "whether the process has opened the driver's libcuda";
    ProcessProgram = "process.program", "programs that cannot load the library: static, another C library, another architecture";
    ProcessVariable = "process.variable", "whether CUDA_INJECTION64_PATH reached the process, and if not, which \
         program dropped it";
    ProcessFile = "process.file", "whether libgpumem.so exists and is readable in the process's mount namespace, \
         and has the program's architecture";
    ProcessDisabled = "process.disabled", "whether GPUMEM_DISABLE keeps the agent out";
    ProcessAgent = "process.agent", "which libgpumem.so the process has loaded, and whether its agent runs";
    ProcessFork = "process.fork", "a child that was forked after CUDA was in use: its agent is silent, and CUDA does not work there";
    ProcessSocket = "process.socket", "whether the process can open the daemon's agent socket: path, mount \
         namespace, permissions";
    ProcessSandbox = "process.sandbox", "system call filters (seccomp) that may keep the agent from reporting";
    ProcessAge = "process.age", "a process that is older than the daemon or has just started";
    ProcessCupti = "process.cupti", "the libcupti that the process has loaded, and other tools that use CUPTI";
    ProcessBlocked = "process.blocked", "why CUPTI does not serve the process's agent";
    ProcessPaused = "process.paused", "an agent that was paused, or has stopped";
    ProcessLate = "process.late", "an agent that started after the first allocations";
    ProcessBlind = "process.blind", "intervals in which the process's agent recorded nothing";
    ProcessLost = "process.lost", "lost records";
    ProcessLimit = "process.limit", "whether the process's records are within the memory limits";
    ProcessOdd = "process.odd", "records that contradict each other: a forged agent, or a fault of gpumem";
    ProcessNames = "process.names", "the sources of names for the process's memory, and those that do not work";
    ProcessBytes = "process.bytes", "why NVML reports no bytes for the process";
    ProcessMemory = "process.memory", "what the process's memory shows: growth, unused pool memory, failed requests";
    ProcessMps = "process.mps", "an MPS server, in which the agent is silent";
}

#[cfg(test)]
mod tests {
    use super::Check;
    use std::collections::BTreeSet;

    #[test]
    fn ids_are_unique_and_can_be_typed() {
        let ids: BTreeSet<_> = Check::ALL.iter().map(|check| check.id()).collect();
        assert_eq!(ids.len(), Check::ALL.len());
        for check in Check::ALL {
            let plain = |byte: u8| byte.is_ascii_lowercase() || byte == b'.';
            assert!(check.id().bytes().all(plain), "{check:?}");
            assert!(!check.about().ends_with('.') && !check.about().contains('|'), "{check:?}");
        }
    }
}
