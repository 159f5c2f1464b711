//! `Core`: the agent's whole state of a process, that is, the recorder and the state of the driver.

use crate::base::clock::Clock;
use crate::base::env::Settings;
use crate::base::hot::HOT_WORDS;
use crate::base::memfd::{self, Shared, Sizes};
use crate::base::own_thread;
use crate::base::ring::Ring;
use crate::driver::devices::Devices;
use crate::driver::exports::Exports;
use crate::driver::pools::{DriverPools, Multicast};
use crate::driver::torch_pools;
use crate::record::live::{Live, rows_for};
use crate::record::names::Names;
use crate::record::recorder::Recorder;
use crate::record::status;
use gpumem_wire::AgentState;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// The agent's state in a process, made once and never freed. The recorder comes first, because each record uses it.
#[derive(Debug)]
#[repr(C)]
pub struct Core {
    pub recorder: Recorder,
    pub(crate) settings: Settings,
    pub(crate) pid: u32,
    /// Start time of the process: field 22 of /proc/self/stat, in clock ticks after the boot.
    pub(crate) start_ticks: u64,
    pub(crate) shared: Shared,
    pub(crate) devices: Devices,
    pub driver_pools: DriverPools,
    pub torch: torch_pools::State,
    pub(crate) exports: Exports,
    pub(crate) multicast: Multicast,
    /// Tag for memory of threads without open scopes; 0 for none.
    pub(crate) process_tag: AtomicU32,
    pub(crate) pools_made: AtomicU64,
    /// Number of the last record that changed a reference count of a handle; see sender/resync.rs.
    pub references_changed: AtomicU64,
    /// Number of the last record whose effect the current or last resync includes.
    pub(crate) resync_after_seq: AtomicU64,
    /// Number of rows restored after a failed free, counting only rows that a resync during the free has omitted.
    pub(crate) restored: AtomicU64,
    /// Number of rows that a failed call has removed and that could not be restored. They are missing in resyncs.
    pub(crate) unrestored_rows: AtomicU64,
}

impl Core {
    /// Returns the core of the process; `None` until it is installed.
    #[inline(always)]
    pub fn get() -> Option<&'static Core> {
        let core = HOT_WORDS.core.load(Acquire).cast::<Core>();
        // SAFETY: null, or leaked by `install`.
        unsafe { core.as_ref() }
    }

    /// Makes `core` the core of the process, which `get` returns. Called by one thread.
    pub(crate) fn install(core: Box<Core>) -> &'static Core {
        let core: &'static Core = Box::leak(core);
        HOT_WORDS.core.store(std::ptr::from_ref(core).cast_mut().cast(), Release);
        core
    }

    pub(crate) fn device(&self, ordinal: u32) -> u8 {
        self.devices.slot(&self.recorder, ordinal)
    }

    /// Creates a core; `None` without memory. `functions` is the address of the table of exported functions.
    pub(crate) fn new(settings: Settings, functions: usize) -> Option<Box<Core>> {
        let pid = std::process::id();
        let start_ticks = own_thread::start_ticks();
        let sizes = Sizes {
            ring_slots: settings.ring_slots,
            live_rows: rows_for(settings.live_rows),
            name_bytes: settings.name_bytes,
        };
        let name = memfd::name_of(pid, functions)?;
        let shared = Shared::create(&name, sizes, pid, start_ticks)?;
        crate::threads::prepare().then_some(())?;
        Some(Box::new(Core {
            recorder: Recorder {
                ring: Ring::new(&shared),
                live: Live::new(shared.live())?,
                clock: Clock::new(),
                names: Names::new(&shared)?,
            },
            settings,
            pid,
            start_ticks,
            shared,
            devices: Devices::default(),
            driver_pools: DriverPools::default(),
            torch: torch_pools::State::new()?,
            exports: Exports::default(),
            multicast: Multicast::default(),
            process_tag: AtomicU32::new(0),
            pools_made: AtomicU64::new(0),
            references_changed: AtomicU64::new(0),
            resync_after_seq: AtomicU64::new(0),
            restored: AtomicU64::new(0),
            unrestored_rows: AtomicU64::new(0),
        }))
    }
}

/// Reports that the agent is in `state` from now on; see record/status.rs. Not for callbacks: it locks and allocates.
pub fn report_status(state: AgentState, result: u16, detail: &str) {
    let now = Core::get().map_or(0, |core| core.recorder.clock.now());
    status::report(now, state, result, detail);
}
