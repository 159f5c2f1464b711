//! Recognises the copies of float32 weights in half precision that autocast keeps while it is in force.

use crate::amounts::{is_about, sum, sums};
use crate::category::{COPIES, OUTPUTS};
use crate::model_sizes::ModelSizes;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Run};
use gpumem_wire::{Phase, Role};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum difference of two sizes of the same parameters, as a share: allocations are rounded up.
const SAME_SIZE_SHARE: f64 = 0.01;
/// Minimum share of the parameters that autocast copies.
const COPIED_SHARE: f64 = 0.5;

/// Returns the bytes by module that are as many as a copy of the module's float32 parameters in half precision has, if most
/// parameters have such a copy.
pub(crate) fn copies<'r>(
    of_forward: &BTreeMap<&'r str, i64>,
    parameters: &BTreeMap<&str, i64>,
    sizes: &ModelSizes<'_>,
) -> BTreeMap<&'r str, i64> {
    if sizes.parameter_kind() != Some("float32") {
        return BTreeMap::new();
    }
    let of_modules = parameters.iter().filter_map(|(tag, bytes)| Some((tag.rsplit_once('/')?.0, *bytes)));
    let of_modules = sums(of_modules);
    let is_copy = |(tag, bytes): &(&&'r str, &i64)| {
        let half = of_modules.get(**tag).map_or(0, |bytes| bytes / 2);
        half > 0 && is_about(**bytes, half, SAME_SIZE_SHARE)
    };
    let copies = of_forward.iter().filter(is_copy).map(|(tag, bytes)| (*tag, *bytes));
    let copies: BTreeMap<&str, i64> = copies.collect();
    let all = sum(parameters.values().copied()) / 2;
    if sum(copies.values().copied()) as f64 >= all as f64 * COPIED_SHARE { copies } else { BTreeMap::new() }
}

/// Returns whether a cell may have copies, because its blocks come from forward passes and have no role.
fn may_be_copy(cell: &Cell) -> bool {
    cell.class == Class::Block && cell.phase.as_deref() == Phase::Forward.name() && cell.role.is_none()
}

/// Returns the modules that have copies at the peak of a device, or when memory ran out.
fn modules(run: &Run) -> BTreeSet<&str> {
    let sizes = ModelSizes::of(run);
    let by_tag = |amounts: &Amounts, fits: &dyn Fn(&Cell) -> bool| {
        sums(amounts.iter().filter_map(|(cell, bytes)| {
            Some((run.cells.get(*cell as usize).filter(|cell| fits(cell))?.tag.as_deref()?, *bytes))
        }))
    };
    let is_parameter = |cell: &Cell| cell.role.as_deref() == Role::Parameter.name();
    let peaks = run.devices.iter().map(|device| &device.peak.amounts);
    let ooms = run.devices.iter().flat_map(|device| device.details.ooms.iter().map(|oom| &oom.amounts));
    let of_moment = |amounts| copies(&by_tag(amounts, &may_be_copy), &by_tag(amounts, &is_parameter), &sizes);
    match sizes.parameter_kind() {
        Some("float32") => peaks.chain(ooms).flat_map(of_moment).map(|(tag, _)| tag).collect(),
        _ => BTreeSet::new(),
    }
}

/// Puts cells with copies into the category of copies of parameters. `categories` are those of the run's cells by structure; a category
/// by which other rules name such a cell stays.
pub(crate) fn name_copies(run: &Run, categories: &mut [Option<String>]) {
    let modules = modules(run);
    for (name, cell) in categories.iter_mut().zip(&run.cells) {
        let is_copied = cell.tag.as_deref().is_some_and(|tag| modules.contains(tag));
        if is_copied && may_be_copy(cell) && name.as_deref() == Some(OUTPUTS) {
            *name = Some(COPIES.to_owned());
        }
    }
}
