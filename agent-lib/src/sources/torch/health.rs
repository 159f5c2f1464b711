//! Determines and reports the states of two layers: PyTorch's blocks, and its out-of-memory reports. For the sender.

use crate::driver::core::Core;
use crate::driver::torch_pools::Device;
use crate::naming::callers;
use crate::record::status;
use crate::sources::torch::patch::{self, OUT_OF_MEMORY, SearchResult};
use crate::threads::{self, Thread};
use gpumem_wire::{Layer, LayerState};
use std::sync::atomic::Ordering::*;

/// What the sender remembers between two checks of PyTorch's hooks.
#[derive(Debug, Default)]
pub(crate) struct Health {
    /// Segments without a block at the last check: thread and address.
    silent: Vec<(u32, u64)>,
    /// Whether the same segment had no block at the last two checks, with no report in between.
    is_silent: bool,
    /// Number of reports of all devices at the last check.
    reports: u64,
    /// Values from which the reported states were derived: result of the search, number of pools, whether single tensors exist.
    reported: Option<(SearchResult, u32, bool)>,
    /// For each device, the number of PyTorch's reports when its totals were last requested.
    requested_at: Vec<u64>,
}

impl Health {
    /// Searches newly mapped files for PyTorch; called each round. Reports a changed result at once, because memory may run out
    /// in the first second.
    pub(crate) fn search_torch(&mut self, core: &Core) {
        if core.settings.layers.torch && status::armed() {
            patch::search(patch::search_result() == SearchResult::NotYet);
            let (pools, singles) = (core.torch.made.load(Relaxed), core.torch.single_tensors.load(Relaxed));
            let now = Some((patch::search_result(), pools, singles != 0));
            if self.reported != now {
                self.reported = now;
                self.report(core);
            }
        }
    }

    /// Updates the two reported states; called once a second.
    pub(crate) fn update(&mut self, core: &Core, thread: Option<&Thread>) {
        if !core.settings.layers.torch {
            let why = "switched off with GPUMEM_TORCH=0";
            status::report_layer(Layer::Blocks, LayerState::Off, why);
            status::report_layer(Layer::OutOfMemory, LayerState::Off, why);
            return;
        }
        self.request_totals(core, thread);
        self.check_segments(core);
        self.report(core);
    }

    fn report(&self, core: &Core) {
        let (state, why) = self.blocks(core);
        status::report_layer(Layer::Blocks, state, &why);
        let (state, why) = out_of_memory(core);
        status::report_layer(Layer::OutOfMemory, state, why);
    }

    /// Requests PyTorch's totals with the next report of each device that had reports. Also reads UUIDs that a report could not
    /// read.
    fn request_totals(&mut self, core: &Core, thread: Option<&Thread>) {
        self.requested_at.resize(core.torch.devices.len(), 0);
        for (ordinal, device) in core.torch.devices.iter().enumerate() {
            let reports = device.reports.load(Relaxed);
            if std::mem::replace(&mut self.requested_at[ordinal], reports) != reports {
                device.check_due.store(true, Relaxed);
            }
            if device.is_unknown.swap(false, AcqRel)
                && let Some(thread) = thread
            {
                thread.inside(|| core.device(ordinal as u32));
            }
        }
    }

    /// Detects that the hook of reports is not called: a segment of PyTorch has no block at two checks in a row.
    fn check_segments(&mut self, core: &Core) {
        let mut silent = Vec::new();
        for thread in threads::all() {
            let torchs = thread.torch.fresh().filter(|fresh| callers::is_torch(fresh.module()));
            silent.extend(torchs.map(|fresh| (thread.id.load(Relaxed), fresh.start.load(Relaxed))));
        }
        let reports = core.torch.devices.iter().map(|device| device.reports.load(Relaxed)).sum();
        self.is_silent = reports == self.reports && silent.iter().any(|one| self.silent.contains(one));
        (self.silent, self.reports) = (silent, reports);
    }

    fn blocks(&self, core: &Core) -> (LayerState, String) {
        let torch = &core.torch;
        let sum = |field: fn(&Device) -> u64| torch.pools().map(|pool| field(pool.device)).sum::<u64>();
        let reports = sum(|device| device.reports.load(Relaxed));
        let singles = torch.single_tensors.load(Relaxed);
        let (state, why) = match patch::search_result() {
            SearchResult::Nothing if reports == 0 => (LayerState::Absent, "no PyTorch with CUDA is loaded"),
            SearchResult::NoSlot => {
                (LayerState::Failed, "no function pointer to hook was found in this PyTorch's allocator")
            }
            SearchResult::NotYet => (
                LayerState::Failed,
                "the function pointer of PyTorch's allocator could not be \
                 replaced",
            ),
            _ if reports == 0 && singles != 0 => {
                let why = "PyTorch's caching allocator is not in use: tensors are driver allocations";
                (LayerState::Absent, why)
            }
            _ if self.is_silent && singles == 0 && reports == 0 => {
                (LayerState::Failed, "PyTorch reports no blocks, only segments: its tensors have no names")
            }
            _ if self.is_silent && singles == 0 => {
                let why = "PyTorch reports no blocks any more, only segments: tensors made since then have no names";
                (LayerState::Failed, why)
            }
            _ if reports == 0 => (LayerState::Absent, "PyTorch's caching allocator has allocated no block"),
            _ => (LayerState::Active, ""),
        };
        if state != LayerState::Active {
            return (state, why.to_owned());
        }
        let mut doubts = Vec::new();
        let drift = sum(|device| device.drift.load(Relaxed));
        if drift != 0 {
            doubts.push(format!(
                "reports of PyTorch's allocator were missed: its totals changed by {drift} bytes \
                     without a report"
            ));
        }
        let older = sum(|device| device.older.load(Relaxed));
        if older != 0 {
            doubts.push(format!("blocks of {older} bytes are older than the agent"));
        }
        for (index, device) in torch.devices.iter().enumerate() {
            let (unseen, its) = (device.unseen.load(Relaxed), device.reserved.load(Relaxed));
            if unseen != 0 {
                doubts.push(format!("device {index}: of {its} bytes of segments, {unseen} were not seen"));
            }
        }
        let untold = torch.unrecorded_pending.load(Relaxed);
        if untold != 0 {
            doubts.push(format!("{untold} frees that wait for a stream are counted as completed"));
        }
        if !patch::is_patched(patch::EVENT_RECORD) || !patch::is_patched(patch::EVENT_QUERY) {
            doubts.push("frees that wait for a stream are not distinguished from completed ones".into());
        }
        let state = if doubts.is_empty() { LayerState::Active } else { LayerState::Degraded };
        (state, doubts.join("; "))
    }
}

fn out_of_memory(core: &Core) -> (LayerState, &'static str) {
    let is_caching = core.torch.pools().next().is_some();
    match patch::search_result() {
        SearchResult::Nothing => (LayerState::Absent, "no PyTorch with CUDA is loaded"),
        _ if !patch::is_patched(OUT_OF_MEMORY) => (
            LayerState::Failed,
            "only failed driver calls are seen: this PyTorch has no known place to hook its out-of-memory report",
        ),
        _ if !is_caching && core.torch.single_tensors.load(Relaxed) != 0 => (
            LayerState::Degraded,
            "only failed driver calls are seen: PyTorch's caching allocator is not in use",
        ),
        _ => (LayerState::Active, ""),
    }
}
