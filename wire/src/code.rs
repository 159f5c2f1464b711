//! Codes: small integers inside records. Each list of codes is an enum. An unknown number is read as `Unknown`, because a newer
//! peer may send more values and must not be refused.

/// Conversion between an enum of codes and its numbers, for generic functions.
pub(crate) trait Code: Sized {
    fn number(self) -> u8;
    fn of_number(number: u8) -> Self;
}

macro_rules! codes {
    ($( $(#[$doc:meta])* $name:ident { $( $(#[$item_doc:meta])* $item:ident = $number:literal ),* $(,)? } )*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(u8)]
        pub enum $name {
            /// No value, or a number unknown to this version.
            #[default]
            Unknown = 0,
            $( $(#[$item_doc])* $item = $number, )*
        }
        impl $name {
            /// All values of the type, `Unknown` first.
            pub const ALL: &'static [$name] = &[$name::Unknown, $( $name::$item, )*];
            pub const fn to_code(self) -> u8 {
                self as u8
            }
            /// Returns the value for a number on the wire; `Unknown` for a number that this version does not know.
            pub const fn from_code(code: u8) -> Self {
                match code {
                    $( $number => $name::$item, )*
                    _ => $name::Unknown,
                }
            }
        }
        impl Code for $name {
            #[inline(always)]
            fn number(self) -> u8 {
                self.to_code()
            }
            #[inline(always)]
            fn of_number(number: u8) -> Self {
                Self::from_code(number)
            }
        }
    )* };
}

codes! {
    /// Kind of memory. It decides whether NVML charges the memory to the process.
    MemoryKind {
        /// cuMemAlloc and its variants: device memory.
        Device = 1,
        /// cuMemAllocPitch: device memory, pitch times height.
        Pitched = 2,
        /// Arrays and mipmaps: device memory in a tiled layout, usually `ESTIMATED`.
        Array = 3,
        /// Allocated from a driver pool in stream order. NVML charges the pool's reserved bytes, not this allocation.
        StreamOrdered = 4,
        /// cuMemCreate on a device.
        Vmm = 5,
        /// cuMemAllocManaged: memory that migrates between host and device; NVML charges it to no process.
        Managed = 16,
        /// Page-locked host memory that the driver allocated.
        Pinned = 17,
        /// The program's host memory, registered with the driver.
        Registered = 18,
        /// Memory of another process or API, mapped in this one (IPC, shareable handle, external memory).
        Imported = 19,
        /// cuMemCreate on a host location.
        HostVmm = 20,
    }

    /// Role of a block: what its bytes are used for. A role does not depend on the tag, and may be set later than the allocation.
    Role {
        /// A weight that training updates.
        Parameter = 1,
        Gradient = 2,
        /// State that an optimizer keeps for each parameter.
        OptimizerState = 3,
        /// Result of the forward pass, kept for the backward pass.
        Activation = 4,
        Input = 5,
        /// Memory of a block that was allocated and freed within one phase.
        Temporary = 6,
        /// Scratch memory of a library (cuBLAS, cuDNN, NCCL).
        Workspace = 7,
        /// State that is saved but not trained (running means, masks).
        Buffer = 8,
        /// Keys and values of earlier tokens that a model keeps to produce the next ones.
        KvCache = 9,
        /// A parameter of an untrained copy of a trained module: an average of the weights (EMA), a target network.
        ParameterCopy = 10,
    }

    /// Phase: part of a training step.
    Phase {
        /// Before the first step, while the model is built.
        Setup = 1,
        Forward = 2,
        Backward = 3,
        Optimizer = 4,
        /// Evaluation without gradients.
        Evaluation = 5,
        /// Between two other phases: a batch is loaded, gradients are clipped. Only in `Pressure`, in `Oom`, and in blocks that the
        /// closure of an optimizer's step makes.
        Between = 6,
    }

    /// The owner that reserves a pool's memory.
    PoolOwner {
        /// A CUDA memory pool (cuMemPool): the driver reserves its memory; the agent polls its totals.
        Driver = 1,
        /// The driver's pool for graph memory nodes: the driver reserves its memory; the agent polls its totals.
        Graph = 2,
        /// A framework that divides driver allocations into blocks.
        Framework = 3,
    }

    /// API that mapped memory of another process or API (record `Import`).
    ImportSource {
        /// cuIpcOpenMemHandle.
        Ipc = 1,
        /// cuMemImportFromShareableHandle: the memory is counted like that of a VMM handle.
        ShareableHandle = 2,
        /// cuImportExternalMemory and its mapped buffers.
        External = 3,
        /// cuMemPoolImportPointer.
        PoolPointer = 4,
    }

    /// State of a block after the program has freed it.
    FreeState {
        /// The pool can use the block for the next request.
        Done = 1,
        /// The owner has freed the block, but a stream may still use it (record_stream).
        Pending = 2,
    }

    /// Whether the agent observes driver calls.
    AgentState {
        /// CUPTI's callbacks for driver calls arrive.
        Covered = 1,
        /// The agent started after the first allocation. Reports show older memory as `predates`.
        Late = 2,
        /// CUPTI does not serve the agent, mostly because another client holds the subscription. The record's payload is that
        /// client's name, if known, or else the reason.
        Blocked = 3,
        Paused = 4,
        /// The agent has disabled itself permanently after a fault. The record's payload is the reason.
        Disarmed = 5,
    }

    /// Memory that is freed together with a context.
    DestroyScope {
        /// The allocations of that context.
        Context = 1,
        /// Everything of this process on the device (cuDevicePrimaryCtxReset).
        Device = 2,
    }

    /// Driver activity that changes the memory of a process outside of allocations: its untrackable bytes.
    DriverEventKind {
        ContextCreated = 1,
        /// A module was loaded. `bytes` is the size of its loadable sections, an upper bound under lazy loading.
        ModuleLoaded = 2,
        ModuleUnloaded = 3,
        /// CU_LIMIT_STACK_SIZE was set to `value` bytes for each thread.
        StackLimit = 4,
        /// CU_LIMIT_PRINTF_FIFO_SIZE was set to `value` bytes.
        PrintfLimit = 5,
        /// CU_LIMIT_MALLOC_HEAP_SIZE was set to `value` bytes.
        HeapLimit = 6,
        GraphInstantiated = 7,
        GraphDestroyed = 8,
        StreamCreated = 9,
        PeerAccess = 10,
        /// A library of kernels was loaded.
        LibraryLoaded = 11,
        GreenContextCreated = 12,
        /// A call that will create a context has begun: NVML's figure does not include the context yet.
        ContextCreating = 13,
    }

    /// Kind of clock of a recording: meaning of the times in its records.
    ClockKind {
        /// CLOCK_MONOTONIC of the host, in nanoseconds.
        Monotonic = 1,
        /// No clock: times are positions (line numbers of a log); only their order is meaningful.
        Ordinal = 2,
        /// Wall-clock nanoseconds since the epoch, as another tool wrote them.
        Wall = 3,
    }

    DeviceIdKind {
        /// UUID of a GPU.
        Gpu = 1,
        /// UUID of a MIG instance.
        Mig = 2,
        /// The device has only a number and no UUID, as in imports.
        Ordinal = 3,
    }

    /// Why a value of NVML is absent. An unknown value is never written as zero.
    Absence {
        /// NVML answers "not available" (WSL, some MIG).
        NotAvailable = 1,
        /// NVML refuses for lack of permission.
        NoPermission = 2,
        /// The process was in none of NVML's lists.
        NotListed = 3,
        GpuLost = 4,
        /// The NVML call did not return in time.
        Timeout = 5,
        /// The device does not offer this value.
        NotSupported = 6,
        /// The value is unreliable, because old drivers confuse pid namespaces.
        WrongNamespace = 7,
        /// The value is larger than the device's memory.
        Impossible = 8,
    }

    FrameFormat {
        /// UTF-8, one frame a line, innermost first: `function<TAB>file<TAB>line`.
        Text = 1,
        /// Return addresses (u64), innermost first, to be resolved against the modules.
        Address = 2,
    }

    /// Begin or end of a scope.
    Edge {
        Begin = 1,
        End = 2,
    }

    /// Why an agent sends `Bye`.
    ByeReason {
        Exit = 1,
        /// The agent disabled itself after a fault.
        Disarmed = 2,
        Requested = 3,
    }

    /// A naming layer: one source of names for memory.
    Layer {
        /// Names from the blocks that PyTorch's allocator reports.
        Blocks = 1,
        /// Reports of PyTorch's out-of-memory observer.
        OutOfMemory = 2,
        /// Scopes of the C API and of Python.
        Scopes = 3,
        Nvtx = 4,
        /// Names of modules, from the Python frames that made the allocation.
        ModulePath = 5,
        /// Names of the forward pass for allocations of the backward pass, by autograd's sequence numbers.
        Autograd = 6,
        /// Exact roles: modules, parameters and optimizers, read from Python.
        Roles = 7,
        /// Python stacks recorded by the framework (imports).
        Stacks = 8,
    }

    LayerState {
        /// The layer works, and its self-test passed.
        Active = 1,
        /// A part of the layer works; the reason in the record names the part.
        Degraded = 2,
        /// The layer is not needed: the process has no PyTorch, no Python or no scope.
        Absent = 3,
        /// The user has switched the layer off.
        Off = 4,
        /// The layer's self-test failed, or the software that it reads has an unsupported version.
        Failed = 5,
    }

    /// Kind of reply that a program requests from the daemon.
    AskKind {
        ReportText = 1,
        ReportJson = 2,
    }

    /// Outcome of an out-of-memory error, as far as the sender of the record knows it.
    OomOutcome {
        /// The allocator gave up: the request failed after all retries.
        Fatal = 1,
        /// The caller handled the error and continued.
        Survived = 2,
    }
}

/// A number of bytes that may be absent. On the wire, `u64::MAX` means absent, as in NVML.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Reading(pub Option<u64>);

impl Reading {
    /// Returns a present value.
    pub const fn of(bytes: u64) -> Self {
        Reading(Some(bytes))
    }
    /// An absent number of bytes.
    pub const ABSENT: Reading = Reading(None);
}
