//! Adds up PyTorch's own numbers and the memory outside PyTorch to the bytes that nvidia-smi shows, at one moment of a run:
//!
//! ```text
//! memory_allocated + idle = memory_reserved
//!                         + outside + predates + Untrackable = used
//! ```
//!
//! `idle` includes freed blocks that a stream still uses: PyTorch cannot reuse these yet. All values are sums of the bytes
//! recorded for that moment, so they always add up.

use super::names::{TORCH, library};
use crate::amounts::sum;
use crate::held;
use gpumem_model::run::{Cell, Class, Device, Moment, Pool, Run};
use serde::Serialize;

/// Kind of allocator that serves PyTorch's memory requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// PyTorch's caching allocator.
    Pool,
    /// The CUDA driver, which serves each tensor (`cudaMallocAsync`, or caching disabled): the run shows no pool of PyTorch.
    Driver,
}

/// Memory of one process on one device at one moment: how PyTorch's numbers and other memory add up to the driver's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bridge {
    /// Kind of allocator that serves PyTorch's memory requests.
    pub source: Source,
    /// Bytes in live tensors. For [`Source::Driver`]: bytes of live allocations that PyTorch's library requested.
    pub memory_allocated_bytes: i64,
    /// Bytes that PyTorch reserves but does not use. For [`Source::Driver`]: idle bytes of the driver's pools.
    pub idle_bytes: i64,
    /// The part of `idle_bytes` in blocks that are freed but that a stream may still use.
    pub pending_bytes: i64,
    /// Sum of `memory_allocated_bytes` and `idle_bytes`.
    pub memory_reserved_bytes: i64,
    /// Tracked bytes (allocations that the agent saw) that do not belong to PyTorch.
    pub outside_bytes: i64,
    /// Bytes allocated before the agent was loaded.
    pub predates_bytes: Option<i64>,
    /// Untrackable bytes (used - predates - tracked), as in the report.
    pub untrackable_bytes: Option<i64>,
    /// Sum of `memory_reserved_bytes`, outside, predates and untrackable bytes; `None` if one is unknown.
    pub used_bytes: Option<i64>,
}

/// Returns whether `path` is the library of PyTorch's allocator, which calls the driver.
fn is_torch_library(path: &str) -> bool {
    matches!(library(path), "libc10_cuda" | "libc10_hip")
}

impl Bridge {
    /// Returns the equation (`Bridge`) of a moment; `None` if PyTorch has no memory in the process.
    pub fn of(run: &Run, moment: &Moment) -> Option<Self> {
        let tracked = moment.tracked_bytes?;
        let source = if super::names::has_torch(run) {
            Source::Pool
        } else {
            let by_torch = |cell: &Cell| cell.library.as_deref().is_some_and(is_torch_library);
            run.cells.iter().any(by_torch).then_some(Source::Driver)?
        };
        let is_part = |wanted: Part| move |cell: &Cell| part(cell, source) == wanted;
        let allocated = held(run, &moment.amounts, is_part(Part::Allocated));
        let idle = held(run, &moment.amounts, is_part(Part::Idle));
        let outside = Bridge::outside(run, moment, source);
        Some(Bridge {
            source,
            memory_allocated_bytes: allocated,
            idle_bytes: idle,
            pending_bytes: held(run, &moment.amounts, |cell| cell.pending && is_part(Part::Idle)(cell)),
            memory_reserved_bytes: allocated.saturating_add(idle),
            outside_bytes: sum(outside.amounts.iter().map(|(_, bytes)| *bytes)),
            predates_bytes: moment.predates_bytes,
            untrackable_bytes: moment.untrackable_bytes,
            used_bytes: moment
                .predates_bytes
                .zip(moment.untrackable_bytes)
                .map(|(predates, gap)| sum([predates, tracked, gap])),
        })
    }

    /// Returns the moment reduced to the bytes outside PyTorch.
    pub(super) fn outside(run: &Run, moment: &Moment, source: Source) -> Moment {
        let is_outside = |&&(index, _): &&(u32, i64)| {
            run.cells.get(index as usize).is_none_or(|cell| part(cell, source) == Part::Outside)
        };
        let amounts = moment.amounts.iter().filter(is_outside).copied().collect();
        Moment { amounts, ..Moment::default() }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Allocated,
    Idle,
    Outside,
}

fn part(cell: &Cell, source: Source) -> Part {
    let is_own = match source {
        Source::Pool => cell.pool.as_deref() == Some(TORCH),
        Source::Driver => match cell.class {
            // Idle bytes of the driver's pools are attributed to PyTorch, because no other user of these pools has been found.
            Class::PoolIdle => cell.pool.is_none(),
            _ => cell.library.as_deref().is_some_and(is_torch_library),
        },
    };
    match cell.class {
        Class::Direct if source == Source::Pool => Part::Outside,
        Class::Direct | Class::Block if is_own => Part::Allocated,
        Class::PoolIdle if is_own => Part::Idle,
        _ => Part::Outside,
    }
}

/// Returns PyTorch's total of live blocks and the agent's total, if they differed at the last comparison. They also differ if
/// PyTorch had blocks before the agent was loaded.
pub(super) fn disagreement(device: &Device) -> Option<(u64, u64)> {
    pool(device)?.check.filter(|(own, ours)| own != ours)
}

fn pool(device: &Device) -> Option<&Pool> {
    device.details.pools.iter().find(|pool| pool.name.as_deref() == Some(TORCH))
}

/// Returns the (reserved, allocated) bytes that PyTorch last reported; `None` if PyTorch reported none, or if its total of live
/// blocks was equal to that of the agent.
pub(super) fn reported_totals(device: &Device) -> Option<(u64, u64)> {
    let pool = pool(device)?;
    pool.own.filter(|_| pool.check.is_none_or(|(own, ours)| own != ours))
}
