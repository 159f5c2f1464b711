//! The change for a line outside of modules that copies a large output to float32.

use super::super::item::{Item, Kind, Memory, mib};
use super::cells::is_role;
use super::parts::Parts;
use crate::amounts::is_about;
use crate::{Report, names};
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device, Oom};
use gpumem_model::units::signed;
use gpumem_wire::{Phase, Role};
use std::collections::BTreeMap;

/// Two numbers of bytes are about the same if they differ by at most this share.
const SAME_SHARE: f64 = 0.02;

/// Returns whether a cell has memory of a forward pass that is not over, or that waits for its backward pass.
fn is_of_pass(cell: &Cell) -> bool {
    let is_outside = cell.phase.is_none() || cell.phase.as_deref() == Phase::Forward.name();
    let has_role = is_role(cell, Role::Activation) || is_role(cell, Role::Temporary);
    cell.class == Class::Block && is_outside && has_role
}

fn is_twice(bytes: i64, output: i64) -> bool {
    is_about(bytes, output.saturating_mul(2), SAME_SHARE)
}

/// Returns the line outside of modules with the most bytes and the module with the most, if the line has twice as many.
fn copy<'r>(tags: &BTreeMap<&'r str, i64>) -> Option<(&'r str, i64, &'r str)> {
    let largest = |is_line: bool| {
        let tags = tags.iter().filter(|(tag, _)| names::is_line(tag) == is_line);
        tags.map(|(tag, bytes)| (*tag, *bytes)).max_by_key(|(_, bytes)| *bytes)
    };
    let ((line, bytes), (module, output)) = largest(true).zip(largest(false))?;
    is_twice(bytes, output).then_some((line, bytes, module))
}

/// Returns whether all of a line's bytes have one role. Two tensors with the type of the output, such as a rearranged copy and a
/// result that is kept for the backward pass, have as many bytes as one copy in float32.
fn is_one_cell(report: &Report<'_>, amounts: &Amounts, line: &str, bytes: i64) -> bool {
    let is_same = |of_cell: i64| is_about(of_cell, bytes, SAME_SHARE);
    let is_of_line = |cell: &Cell| is_of_pass(cell) && cell.tag.as_deref() == Some(line);
    amounts.iter().any(|(cell, of_cell)| is_same(*of_cell) && report.cell(*cell).is_some_and(is_of_line))
}

/// Returns the change for a line with twice the bytes of a module's output, if the parameters have 16 bits: a copy in 32 bits. With
/// float32 parameters, autocast makes such copies itself.
pub(super) fn copy_of_output(
    report: &Report<'_>,
    device: &Device,
    parts: &Parts<'_>,
    oom: Option<&Oom>,
) -> Option<Item> {
    if !matches!(parts.sizes.parameter_kind(), Some("bfloat16" | "float16")) {
        return None;
    }
    // The output may be freed once the copy is made: then the peak, which has both, shows it.
    let at_oom = oom.map(|oom| &oom.amounts).filter(|amounts| !amounts.is_empty());
    let now = report.by_tag(at_oom.unwrap_or(&device.peak.amounts), is_of_pass);
    let peak = report.by_tag(&device.peak.amounts, is_of_pass);
    let is_held = |line: &str, bytes: i64| now.get(line) == Some(&bytes);
    let (line, bytes, module) =
        [&now, &peak].into_iter().find_map(copy).filter(|(line, bytes, _)| is_held(line, *bytes))?;
    if !is_one_cell(report, at_oom.unwrap_or(&device.peak.amounts), line, bytes) {
        return None;
    }
    let asked = oom.map_or(0, |oom| signed(oom.asked_bytes));
    // A request of the same size is made of the copy.
    let of_request = if is_twice(bytes, asked / 2) { asked / 2 } else { 0 };
    parts.is_large(bytes).then(|| {
        let change = "If {0} copies the output of {1} to float32 (such as by .float()), leave that out, or copy it in chunks of the rows: F.cross_entropy takes 16-bit logits";
        let item = Item::new(Kind::OutputCopy, Memory::Activations, device, change).named(line).named(module);
        let of_asked = match of_request {
            0 => String::new(),
            _ => format!(", and 1/2 x {} of the request, which is made of it", mib(asked)),
        };
        let formula = format!("{}, twice as much as that output has{of_asked}", mib(bytes));
        item.estimated([bytes, bytes.saturating_add(of_request)], formula)
    })
}
