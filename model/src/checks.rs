//! The checks of `gpumemctl doctor`. Programs and documents may refer to a check by its id: ids are added, never reused.
//! docs/troubleshooting.md contains the same table; a test compares the two.

macro_rules! checks {
    ($( $check:ident = $id:literal, $about:literal; )*) => {
        /// One check of `gpumemctl doctor`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs)] // the table describes each check
        pub enum Check { $( $check, )* }

        impl Check {
            /// All checks, in the order in which documents list them.
            pub const ALL: &'static [Check] = &[ $( Check::$check, )* ];

            /// Returns the check's id.
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
    Daemon = "daemon", "whether a daemon answers, and may be believed: the places that were looked at, and what was there";
    DaemonVersion = "daemon.version", "whether gpumemd and gpumemctl are of one version";
    DaemonUnit = "daemon.unit", "the state of gpumemd.service and its sockets, where systemd runs the machine";
    DaemonPort = "daemon.port", "who has the port for metrics, where no daemon answers: with it taken, gpumemd does not start";
    DaemonConfig = "daemon.config", "whether the configuration was taken when it was last read again";
    Sockets = "sockets", "owner and mode of the daemon's sockets, and whether processes of this user can report";
    SocketPath = "sockets.path", "whether each path that is set fits into the 107 bytes of a socket's path";
    NamespacePid = "namespace.pid", "the PID namespaces of the daemon and of who asks: pids mean something in one of them only";
    NamespaceTime = "namespace.time", "whether the clocks of the daemon and of who asks agree (time namespaces)";
    Driver = "driver", "whether the kernel's driver is loaded";
    DriverVersions = "driver.versions", "whether the driver's libraries and its kernel module are of one release";
    DriverFiles = "driver.files", "whether this user may open the driver's device files";
    DriverWsl = "driver.wsl", "Windows beneath: no bytes of processes";
    DriverMps = "driver.mps", "whether an MPS control daemon runs here";
    Nvml = "nvml", "whether NVML answers the daemon: library, driver, permissions, versions";
    NvmlPids = "nvml.pids", "drivers that answer with the pids or bytes of another PID namespace";
    NvmlRecords = "nvml.records", "the early 535 drivers that write longer records than they say";
    NvmlConfidential = "nvml.confidential", "confidential computing";
    NvmlEvents = "nvml.events", "whether faults (Xid) and changes of MIG are heard of";
    NvmlCalls = "nvml.calls", "calls that did not return, and lists that were put off because they would stop the driver too long";
    Gpu = "gpu", "whether a GPU has fresh readings; if not, what NVML says";
    GpuUnnamed = "gpu.unnamed", "GPUs that are there and cannot be named";
    GpuMig = "gpu.mig", "MIG instances that may not be seen from here";
    GpuFaults = "gpu.faults", "faults (Xid) that the driver told of";
    GpuEvents = "gpu.events", "events of a GPU's health beside faults: DRAM retirement, poison, GPU unavailable, recovery action";
    GpuStrangers = "gpu.strangers", "memory of processes that are dead, hidden or in another PID namespace";
    GpuBytes = "gpu.bytes", "processes in its list without bytes (WSL, vGPU, some MIG)";
    GpuRemainder = "gpu.remainder", "memory in no process's line";
    GpuMps = "gpu.mps", "clients of MPS, and where their memory is charged";
    GpuGraphics = "gpu.graphics", "processes that draw as well as compute";
    GpuVgpu = "gpu.vgpu", "a virtual GPU: what the host keeps back";
    GpuUnified = "gpu.unified", "a GPU that uses the host's memory and has none of its own";
    GpuAddressing = "gpu.addressing", "how a GPU addresses the host's memory (HMM, ATS), and which NUMA node its own memory is";
    GpuLimits = "gpu.limits", "limits of a GPU's memory that the driver keeps for control groups (R615), and how much of each is used";
    Accounting = "accounting", "the driver's accounting mode: exact peaks of processes without an agent; never changed by gpumemd";
    KernelLog = "kernel.log", "whether the kernel's log can be read: kills for host memory, faults by pid";
    Store = "store", "whether runs are written: path, damage, permissions, a full disk";
    StoreDamage = "store.damage", "a store that was damaged and set aside";
    StoreSize = "store.size", "a store that is larger than it may be";
    StoreAge = "store.age", "old runs that are kept, because the clock by which they are old may be wrong";
    StoreLost = "store.lost", "runs that were never stored";
    StoreAnswers = "store.answers", "answers that would have been too large, and lack runs";
    StoreRoom = "store.room", "room in the store's file system";
    Recording = "recording", "records that the daemon's recording lacks";
    Metrics = "metrics", "whether metrics are served, and where";
    MetricsSeries = "metrics.series", "series that a scrape left out";
    MetricsConnections = "metrics.connections", "scrapes that found all connections taken";
    ControlConnections = "control.connections", "callers of gpumemctl that found all connections taken";
    ControlShare = "control.share", "users whose requests had to wait because they take more of the processor than they may";
    AgentLibrary = "agent.library", "whether gpumemctl finds libgpumem.so, for this machine's architecture";
    AgentVersions = "agent.versions", "which libgpumem.so files this user's processes have loaded: replaced, removed or different ones";
    AgentCupti = "agent.cupti", "whether there is a libcupti, and one that the driver's CUDA version can serve";
    AgentEnvironment = "agent.environment", "variables of this shell that keep the agent out or change what it does";
    AgentLimits = "agent.limits", "agents that found a limit reached: connections, hellos, descriptors, records a second, devices";
    AgentMemory = "agent.memory", "processes that said more than the daemon may remember of them, of their user or of all";
    AgentProtocol = "agent.protocol", "agents of another version of the protocol";
    AgentIdentity = "agent.identity", "agents whose process the daemon could not tell";
    AgentPackets = "agent.packets", "agents that were dropped for what they sent";
    AgentClock = "agent.clock", "agents whose clock is not the daemon's: another time namespace";
    Uncovered = "processes.uncovered", "processes without an agent: how many, and the biggest";
    Blocked = "processes.blocked", "processes in which another client holds CUPTI, and which";
    Partial = "processes.partial", "processes that lost records, or reached the limit of rows";
    Process = "process", "whether the daemon knows the process, and covers it";
    ProcessAccess = "process.access", "whether this user may look into it";
    ProcessCuda = "process.cuda", "whether it has opened the driver's libcuda";
    ProcessProgram = "process.program", "what the library cannot be loaded into: static programs, another C library, another architecture";
    ProcessVariable = "process.variable", "whether CUDA_INJECTION64_PATH reached it, and if not, who lost it";
    ProcessFile = "process.file", "whether the library is there and readable in its mount namespace, and fits it";
    ProcessDisabled = "process.disabled", "whether GPUMEM_DISABLE keeps the agent out";
    ProcessAgent = "process.agent", "which libgpumem.so it has loaded, and whether its agent runs";
    ProcessFork = "process.fork", "a child that was forked after CUDA was in use: its agent is silent, and CUDA does not work there";
    ProcessSocket = "process.socket", "whether it sees the daemon's agent socket: path, mount namespace, permissions";
    ProcessSandbox = "process.sandbox", "system call filters (seccomp) that may keep the agent from reporting";
    ProcessAge = "process.age", "a process that is older than the daemon, or younger than a moment";
    ProcessCupti = "process.cupti", "which libcupti it has loaded, and which other tool that uses it";
    ProcessBlocked = "process.blocked", "why CUPTI does not serve its agent";
    ProcessPaused = "process.paused", "an agent that was paused, or has stopped";
    ProcessLate = "process.late", "an agent that came after the first allocations";
    ProcessBlind = "process.blind", "times in which its agent saw nothing";
    ProcessLost = "process.lost", "records of it that were lost";
    ProcessLimit = "process.limit", "whether the daemon may remember more of it";
    ProcessOdd = "process.odd", "records of it that contradict each other: an agent that lies, or a fault of ours";
    ProcessNames = "process.names", "how its memory gets its names, and which layers do not work";
    ProcessBytes = "process.bytes", "why NVML has no bytes of it";
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
