//! The change for forward passes without a backward pass that need more memory than the training steps, such as an evaluation with
//! a larger batch.

use super::super::item::{Item, Kind, Memory, mib};
use super::cells::is_role;
use super::graphs::step_at;
use crate::amounts::{sum, sums};
use crate::{Report, held, names};
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device};
use gpumem_wire::{Phase, Role};

/// Minimum memory in use in these passes, as a factor of that of the training steps.
const CLEARLY_MORE: f64 = 1.3;
/// Minimum activations at a moment of a training step, as a share of those of the largest step; these passes keep less.
const TRAINING_SHARE: f64 = 0.1;
/// Maximum activations at such a moment, as a factor of those of the largest step. The timeline may take memory of other passes
/// that ended within the same slot for activations.
const MOST_OF_STEP: f64 = 1.05;
/// Minimum number of completed training steps, and of moments in them that the timeline has. Fewer may miss their highest one.
const LEAST: usize = 3;
/// Minimum share of the difference between both that modules or lines have allocated outside of training.
const EXPLAINED_SHARE: f64 = 0.8;
/// Minimum share of the difference that modules have allocated in a forward pass: a model is not loaded in a pass.
const FORWARD_SHARE: f64 = 0.1;

/// Bytes in use at the highest moment of passes without a backward pass, and of training steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Levels<'r> {
    passes: i64,
    training: i64,
    /// The module or line with the largest part of the difference.
    largest: &'r str,
}

/// Returns the change for passes without a backward pass that set the peak of a program that trains, and fits.
pub(super) fn larger_than_training(report: &Report<'_>, device: &Device) -> Option<Item> {
    let levels = levels(report, device)?;
    let change = "Use a smaller batch in the passes that have no backward pass, such as the evaluation, or make what {0} allocates in chunks of the rows: they need more memory than the training steps";
    let item = Item::new(Kind::EvaluationBatch, Memory::Activations, device, change).named(levels.largest);
    let formula = format!(
        "{} in use at the peak, which lies in such a pass, less {} in use in training steps",
        mib(levels.passes),
        mib(levels.training)
    );
    Some(item.estimated([levels.passes - levels.training; 2], formula))
}

/// Returns whether a cell may be of a pass without a backward pass: activations and the state of a model have roles.
fn is_of_pass(cell: &Cell) -> bool {
    let has_phase = |phase: Phase| cell.phase.as_deref() == phase.name();
    cell.class == Class::Block
        && (cell.role.is_none() || is_role(cell, Role::Temporary))
        && !has_phase(Phase::Backward)
        && !has_phase(Phase::Optimizer)
}

/// Returns whether more forward passes without a backward pass began in the step of the peak than in others, whose temporaries are
/// smaller than these of the peak. Else each training step may need what the peak has.
fn has_more_passes(device: &Device, temporaries: i64) -> bool {
    let rows = &device.details.iterations.rows;
    let trained = || rows.iter().filter(|row| row.activations.peak_bytes > 0 && row.passes_at_once > 0);
    let Some(fewest) = trained().map(|row| row.passes_at_once).min() else { return false };
    let mut usual = trained().filter(|row| row.passes_at_once == fewest);
    let is_higher = step_at(device, device.peak.time_ns).is_some_and(|step| step.passes_at_once > fewest);
    is_higher && usual.all(|row| row.temporaries.peak_bytes < temporaries.max(1))
}

fn levels<'r>(report: &'r Report<'_>, device: &'r Device) -> Option<Levels<'r>> {
    let steps = device.details.iterations.rows.iter().map(|row| row.activations.peak_bytes);
    let steps: Vec<i64> = steps.filter(|bytes| *bytes > 0).collect();
    let of_step = steps.iter().copied().max().filter(|_| steps.len() >= LEAST)?;
    let bytes = |amounts: &Amounts, fits: &dyn Fn(&Cell) -> bool| held(report.run, amounts, fits);
    let in_use = |amounts: &Amounts, tracked: i64| {
        tracked.saturating_sub(bytes(amounts, &|cell| cell.class == Class::PoolIdle))
    };
    let peak = (&device.peak.amounts, in_use(&device.peak.amounts, device.peak.tracked_bytes?));
    let points = device.details.timeline.points.iter();
    let points = points.map(|point| (&point.amounts, in_use(&point.amounts, point.tracked_bytes())));
    // Of equal moments, the peak is the last one.
    let moments: Vec<(&Amounts, i64)> = points.chain([peak]).collect();
    let is_in_training = |amounts: &Amounts| {
        let share = bytes(amounts, &|cell| is_role(cell, Role::Activation)) as f64 / of_step as f64;
        (TRAINING_SHARE..=MOST_OF_STEP).contains(&share)
    };
    // Temporaries of an optimizer's step are needed, too.
    let is_of_optimizer =
        |cell: &Cell| is_role(cell, Role::Temporary) && cell.phase.as_deref() == Phase::Optimizer.name();
    let is_needed = |amounts: &Amounts| is_in_training(amounts) || bytes(amounts, &is_of_optimizer) > 0;
    let (fullest, passes) = moments.iter().copied().max_by_key(|(_, bytes)| *bytes)?;
    let training: Vec<_> = moments.iter().copied().filter(|(amounts, _)| is_needed(amounts)).collect();
    let (in_step, level) = training.iter().copied().max_by_key(|(_, bytes)| *bytes)?;
    if training.len() < LEAST || (passes as f64) < level as f64 * CLEARLY_MORE {
        return None;
    }
    let before = |cell: u32| in_step.iter().find(|(other, _)| *other == cell).map_or(0, |(_, bytes)| *bytes);
    let added: Vec<(&Cell, i64)> = fullest
        .iter()
        .filter_map(|(cell, bytes)| {
            let of_pass = report.cell(*cell).filter(|cell| is_of_pass(cell))?;
            Some((of_pass, bytes.saturating_sub(before(*cell)).max(0)))
        })
        .collect();
    let difference = passes.saturating_sub(level) as f64;
    let has_share = |bytes: i64, share: f64| bytes as f64 >= difference * share;
    let of_phase = |phase: Phase| {
        let cells = added.iter().filter(move |(cell, _)| cell.phase.as_deref() == phase.name());
        sum(cells.map(|(_, bytes)| *bytes))
    };
    let of_evaluation = of_phase(Phase::Evaluation);
    let of_forward = of_phase(Phase::Forward).saturating_add(of_evaluation);
    let all = sum(added.iter().map(|(_, bytes)| *bytes));
    let (largest, _) = added.iter().max_by_key(|(_, bytes)| *bytes)?;
    // A convolution whose algorithms are tried for the first time needs that much in a training step, too.
    let is_of_module = |(cell, bytes): &(&'r Cell, i64)| {
        let tag = cell.tag.as_deref().filter(|tag| is_role(cell, Role::Temporary) && !names::is_line(tag))?;
        Some((tag, *bytes))
    };
    let is_one_module = sums(added.iter().filter_map(is_of_module))
        .into_values()
        .any(|bytes| has_share(bytes, EXPLAINED_SHARE));
    // Nor is a model what a line makes and frees within a step, such as the distances of all pairs.
    let is_of_line = |cell: &Cell| {
        let is_of_setup = cell.phase.as_deref() == Phase::Setup.name();
        is_role(cell, Role::Temporary) && !is_of_setup && cell.tag.as_deref().is_some_and(names::is_line)
    };
    let of_lines = added.iter().filter(|(cell, _)| is_of_line(cell));
    let of_lines = sum(of_lines.map(|(_, bytes)| *bytes));
    let is_made_in_pass = has_share(of_forward, FORWARD_SHARE) || has_share(of_lines, EXPLAINED_SHARE);
    let is_explained = has_share(all, EXPLAINED_SHARE) && is_made_in_pass;
    let is_named = has_share(of_evaluation, FORWARD_SHARE);
    let temporaries = bytes(fullest, &|cell| is_role(cell, Role::Temporary));
    let is_pass = is_named || has_more_passes(device, temporaries);
    (is_explained && !is_one_module && is_pass).then_some(Levels {
        passes,
        training: level,
        largest: largest.tag.as_deref()?,
    })
}
