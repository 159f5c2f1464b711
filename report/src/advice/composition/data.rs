//! The change for memory that a line of the program made before its first step, such as a data set.

use super::super::item::{Item, Kind, Memory, mib};
use super::super::library;
use super::has_forward_pass;
use super::parts::{Parts, data_of, steps_through};
use crate::Report;
use gpumem_model::run::{Device, Oom};

/// Minimum share of the process's memory from which a data set is named in a program that fits.
const MOST_SHARE: f64 = 0.5;
/// Minimum number of completed steps through which it stays.
const LEAST_STEPS: u64 = 3;
/// Minimum share of its bytes that it has through these steps: it does not grow.
const STEADY_SHARE: f64 = 0.99;

/// Returns the change for a data set on the device.
pub(super) fn item(
    report: &Report<'_>,
    device: &Device,
    parts: &Parts<'_>,
    oom: Option<&Oom>,
) -> Option<Item> {
    let is_checkpoint = |line: &str| parts.checkpoint.is_some_and(|(of, _)| of == line);
    let is_collected = |line: &str| library::keeper_of(line).is_some();
    let (line, bytes) = parts.data.filter(|(line, _)| !is_checkpoint(line) && !is_collected(line))?;
    if !parts.is_large(bytes) || !has_forward_pass(report) {
        return None;
    }
    // A line that makes memory again and again makes no data set.
    let change = match oom.is_some_and(|oom| oom.tag.as_deref() == Some(line)) {
        true => "Move the results that {0} collects to the host in pieces, or keep fewer of them",
        false => {
            "If {0} makes a data set or a buffer of which a step uses a part, keep it on the host and move each batch to the GPU, or keep it in a smaller type if its values have one, such as uint8"
        }
    };
    let item = Item::new(Kind::RetainedTensors, Memory::Data, device, change).named(line);
    // The program may use all of it in each step.
    Some(item.estimated([0, bytes], format!("{} that this line allocates, less a batch", mib(bytes))))
}

/// Returns whether the change is for most of the process's memory, which stays through all steps.
pub(super) fn is_most(item: &Item, parts: &Parts<'_>) -> bool {
    let is_data = item.kind == Kind::RetainedTensors && item.memory == Memory::Data;
    is_data && parts.data_stays && item.most() as f64 >= parts.used as f64 * MOST_SHARE
}

/// Returns whether these bytes of a line stayed, and did not grow, from the first completed step on.
pub(super) fn stays(report: &Report<'_>, device: &Device, line: &str, bytes: i64) -> bool {
    let rows = &device.details.iterations.rows;
    let (Some(last), steps) = (rows.last(), rows.iter().map(|row| row.count).sum::<u64>()) else {
        return false;
    };
    let kept = steps_through(device, last.end_ns, |point| {
        let of_line = data_of(report, &point.amounts).get(line).copied().unwrap_or(0);
        of_line as f64 >= bytes as f64 * STEADY_SHARE
    });
    // The first step may begin before the first point of the timeline.
    steps >= LEAST_STEPS && kept.saturating_add(1) >= steps
}
