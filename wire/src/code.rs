//! The small integers inside records. Each reads an unknown number as `Unknown`: a newer peer may
//! say more than we know, and must not be refused for it.

macro_rules! codes {
    ($( $(#[$doc:meta])* $name:ident { $( $(#[$item_doc:meta])* $item:ident = $number:literal ),* $(,)? } )*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(u8)]
        pub enum $name {
            /// Not told, or a number that this version does not know.
            #[default]
            Unknown = 0,
            $( $(#[$item_doc])* $item = $number, )*
        }
        impl $name {
            /// Every value that this version knows, `Unknown` first.
            pub const ALL: &'static [$name] = &[$name::Unknown, $( $name::$item, )*];
            /// The number on the wire.
            pub const fn to_code(self) -> u8 {
                self as u8
            }
            /// The value of a number on the wire; an unknown number is `Unknown`.
            pub const fn from_code(code: u8) -> Self {
                match code {
                    $( $number => $name::$item, )*
                    _ => $name::Unknown,
                }
            }
        }
    )* };
}

codes! {
    /// What an allocation is made of, which decides whether NVML charges it to the process.
    MemoryKind {
        /// cuMemAlloc and kin: device bytes of their own.
        Device = 1,
        /// cuMemAllocPitch: device bytes, pitch times height.
        Pitched = 2,
        /// Arrays and mipmaps: device bytes in a tiled layout, usually `ESTIMATED`.
        Array = 3,
        /// Carved from a driver pool in stream order; the pool's reserved bytes are the physical ones.
        StreamOrdered = 4,
        /// cuMemCreate on a device.
        Vmm = 5,
        /// cuMemAllocManaged: migrates; NVML charges it to no process.
        Managed = 16,
        /// Page-locked host memory that the driver allocated.
        Pinned = 17,
        /// Host memory of the program's own, registered with the driver.
        Registered = 18,
        /// Another process's or API's memory, mapped here (IPC, shareable handle, external memory).
        Imported = 19,
        /// cuMemCreate on a host location.
        HostVmm = 20,
    }

    /// What a block is for. Beside its tag, and may be known only later.
    Role {
        /// A weight that training updates.
        Parameter = 1,
        /// The gradient of a parameter.
        Gradient = 2,
        /// State that an optimizer keeps per parameter.
        OptimizerState = 3,
        /// Kept from forward for backward.
        Activation = 4,
        /// Data handed to the model.
        Input = 5,
        /// Allocated and freed within one phase.
        Temporary = 6,
        /// Scratch of a library (cuBLAS, cuDNN, NCCL).
        Workspace = 7,
        /// State that is saved but not trained (running means, masks).
        Buffer = 8,
        /// Keys and values of earlier tokens that a model keeps to produce the next ones.
        KvCache = 9,
        /// A parameter of a module that is never trained itself but is a copy of one that is: an average of
        /// the weights (EMA), a target network.
        ParameterCopy = 10,
    }

    /// Part of a training step.
    Phase {
        /// Building the model, before the first step.
        Setup = 1,
        /// Forward pass.
        Forward = 2,
        /// Backward pass.
        Backward = 3,
        /// Optimizer step.
        Optimizer = 4,
        /// Evaluation without gradients.
        Evaluation = 5,
        /// Between two of those: a batch is loaded, gradients are clipped. Only where memory ran out.
        Between = 6,
    }

    /// Who reserves a pool's memory.
    PoolOwner {
        /// A CUDA memory pool (cuMemPool): reserves for itself, polled.
        Driver = 1,
        /// The driver's pool behind graph memory nodes: reserves for itself, polled.
        Graph = 2,
        /// A framework that carves segments out of driver allocations.
        Framework = 3,
    }

    /// How an imported range came.
    ImportSource {
        /// cuIpcOpenMemHandle.
        Ipc = 1,
        /// cuMemImportFromShareableHandle: follows the rules of handles.
        ShareableHandle = 2,
        /// cuImportExternalMemory and its mapped buffers.
        External = 3,
        /// cuMemPoolImportPointer.
        PoolPointer = 4,
    }

    /// Where a freed block is.
    FreeState {
        /// Free for the next request.
        Done = 1,
        /// The owner let go, a stream may still use it (record_stream).
        Pending = 2,
    }

    /// Whether the agent sees driver calls.
    AgentState {
        /// Callbacks arrive.
        Covered = 1,
        /// Attached after the first allocation: what was there before is `predates`.
        Late = 2,
        /// Another CUPTI client holds the subscription; the payload names it where it can be known.
        Blocked = 3,
        /// Paused on request.
        Paused = 4,
        /// Disarmed for good (a fault in the agent); the payload says why.
        Disarmed = 5,
    }

    /// What a context's end takes with it.
    DestroyScope {
        /// The allocations of that context.
        Context = 1,
        /// Everything of this process on the device (cuDevicePrimaryCtxReset).
        Device = 2,
    }

    /// Driver activity that moves the gap.
    DriverEventKind {
        /// A context was created.
        ContextCreated = 1,
        /// A module was loaded; bytes are its loadable sections, an upper bound under lazy loading.
        ModuleLoaded = 2,
        /// A module was unloaded.
        ModuleUnloaded = 3,
        /// CU_LIMIT_STACK_SIZE was set; value in bytes per thread.
        StackLimit = 4,
        /// CU_LIMIT_PRINTF_FIFO_SIZE was set; value in bytes.
        PrintfLimit = 5,
        /// CU_LIMIT_MALLOC_HEAP_SIZE was set; value in bytes.
        HeapLimit = 6,
        /// An executable graph was made.
        GraphInstantiated = 7,
        /// An executable graph was destroyed.
        GraphDestroyed = 8,
        /// A stream was created.
        StreamCreated = 9,
        /// Peer access was enabled.
        PeerAccess = 10,
        /// A library of kernels was loaded.
        LibraryLoaded = 11,
        /// A green context was created.
        GreenContextCreated = 12,
        /// A call that will create a context was entered: what is charged now is charged without it.
        ContextCreating = 13,
    }

    /// How far the clock of a recording can be trusted.
    ClockKind {
        /// CLOCK_MONOTONIC of the host, in nanoseconds.
        Monotonic = 1,
        /// No clock: times are positions (lines of a log), 1 apart; only their order means anything.
        Ordinal = 2,
        /// Wall-clock nanoseconds since the epoch, as another tool wrote them.
        Wall = 3,
    }

    /// How a device is named.
    DeviceIdKind {
        /// UUID of a GPU.
        Gpu = 1,
        /// UUID of a MIG instance.
        Mig = 2,
        /// Only an ordinal is known (imports).
        Ordinal = 3,
    }

    /// Why a reading is absent. Unknown is never zero.
    Absence {
        /// NVML answers "not available" (WSL, some MIG).
        NotAvailable = 1,
        /// NVML refuses.
        NoPermission = 2,
        /// The process was not in any list.
        NotListed = 3,
        /// The GPU is lost.
        GpuLost = 4,
        /// The call did not return in time.
        Timeout = 5,
        /// The device does not offer it.
        NotSupported = 6,
        /// The bytes cannot be trusted (pid namespace of old drivers).
        WrongNamespace = 7,
        /// The value cannot be right: more than the size of the device.
        Impossible = 8,
    }

    /// Frames of a stack, as they were taken.
    FrameFormat {
        /// UTF-8, one frame a line, innermost first: `function<TAB>file<TAB>line`.
        Text = 1,
        /// u64 return addresses, innermost first, to be resolved against the modules.
        Address = 2,
    }

    /// Edge of a scope.
    Edge {
        /// The scope begins.
        Begin = 1,
        /// The scope ends.
        End = 2,
    }

    /// Why an agent says good-bye.
    ByeReason {
        /// The process exits.
        Exit = 1,
        /// The agent disarmed itself.
        Disarmed = 2,
        /// Asked to stop.
        Requested = 3,
    }

    /// A way in which memory gets its names.
    Layer {
        /// Blocks of PyTorch's allocator.
        Blocks = 1,
        /// Its word that it is out of memory.
        OutOfMemory = 2,
        /// Scopes of the C API and of Python.
        Scopes = 3,
        /// NVTX ranges.
        Nvtx = 4,
        /// The path of the module in whose Python frame the allocation was made.
        ModulePath = 5,
        /// Backward allocations, named after the forward pass by autograd's sequence numbers.
        Autograd = 6,
        /// Modules, parameters and optimizers as Python knows them.
        Roles = 7,
        /// Stacks of Python frames that the framework itself took (imports).
        Stacks = 8,
    }

    /// Whether a layer of names is at work.
    LayerState {
        /// It is, and has passed its own test.
        Active = 1,
        /// It works in part; the reason says in which.
        Degraded = 2,
        /// There is nothing for it to do: no PyTorch, no Python, no scope.
        Absent = 3,
        /// It was switched off.
        Off = 4,
        /// Its own test failed, or it met something that it does not know.
        Failed = 5,
    }

    /// What a program asks the daemon about itself.
    AskKind {
        /// The report, as people read it.
        ReportText = 1,
        /// The report as JSON.
        ReportJson = 2,
    }

    /// How an out-of-memory ended, as far as the reporter knows.
    OomOutcome {
        /// The request failed after every retry.
        Fatal = 1,
        /// The caller caught it and went on.
        Survived = 2,
    }
}

/// A reading in bytes that may be absent. On the wire absence is `u64::MAX` (NVML's own sentinel).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Reading(pub Option<u64>);

impl Reading {
    /// A reading that is there.
    pub const fn of(bytes: u64) -> Self {
        Reading(Some(bytes))
    }
    /// A reading that is not.
    pub const ABSENT: Reading = Reading(None);
}
