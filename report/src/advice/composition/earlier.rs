//! Changes for memory of an earlier pass that is still held when a request fails: its result, or all of it, kept by an exception.

use super::super::item::{Item, Kind, Memory, mib};
use super::cells::is_activation;
use crate::amounts::sum;
use crate::{Report, held};
use gpumem_model::names::Named;
use gpumem_model::run::{Cell, Class, Device, Fate, Oom};
use gpumem_model::units::signed;
use gpumem_wire::Phase;

/// The result of the previous pass has at least this share of the bytes that were requested for the next one, and they have at least
/// this share of it: more bytes are several results that the program keeps.
const SAME_SHARE: f64 = 0.9;
/// Minimum share of the earlier attempt's memory that is still held by the same modules. A new attempt with a smaller batch makes
/// less in each module.
const HELD_SHARE: f64 = 0.95;
/// Minimum share of the bytes beyond the earlier attempt's that lie in modules which it had passed. A single attempt that comes
/// further has more bytes in the module in which the earlier one failed, or in later ones.
const AGAIN_SHARE: f64 = 0.5;
/// Minimum bytes beyond the earlier attempt's, as a share of these.
const MORE_SHARE: f64 = 0.05;
/// Maximum size of the failed request, as a share of the earlier one. An attempt of the same size holds as much in each module.
const SMALLER: f64 = 0.75;

/// Returns the change for an attempt that failed before in the same step and may still be held, and whether that is certain.
pub(super) fn failed_attempt(report: &Report<'_>, device: &Device, oom: &Oom) -> Option<(Item, bool)> {
    let (bytes, is_held_twice) = of_failed_attempt(report, device, oom)?;
    let change = match is_held_twice {
        true => {
            "Retry after the except block, not in it: while it runs, the exception keeps the tensors of the attempt that failed"
        }
        false => {
            "If the program retries in the except block, retry after it: while it runs, the exception keeps the tensors of the attempt that failed"
        }
    };
    let item = Item::new(Kind::FailedAttempt, Memory::Activations, device, change);
    let formula = format!(
        "as many bytes as the {} of an attempt whose error the program caught in this step were held when a smaller attempt failed",
        mib(bytes)
    );
    Some((Item { formula, ..item }, is_held_twice))
}

/// Returns the change for the result of the previous pass, if a pass without a backward pass requests memory for the next result of
/// the same module, and would get it without the previous one.
pub(super) fn previous_result(report: &Report<'_>, device: &Device, oom: &Oom) -> Option<Item> {
    let tag = oom.tag.as_deref()?;
    let is_output = |cell: &Cell| {
        cell.class == Class::Block
            && cell.role.is_none()
            && cell.phase.as_deref() == Phase::Forward.name()
            && cell.tag.as_deref() == Some(tag)
    };
    let is_evaluation = oom.phase.as_deref() == Phase::Evaluation.name();
    let later_pass = oom.passes_without_backward.is_some_and(|passes| passes > 1);
    let kept = device.details.iterations.open.as_ref()?.kept_activations.last_bytes;
    let asked = signed(oom.asked_bytes);
    let bytes = held(report.run, &oom.amounts, is_output).min(kept);
    let would_fit = oom.free_bytes().unwrap_or(0).saturating_add(bytes) >= asked;
    let is_same = bytes.min(asked) as f64 >= bytes.max(asked) as f64 * SAME_SHARE;
    (is_evaluation && later_pass && would_fit && is_same && asked > 0).then(
        || {
            let change = "If nothing reads the previous result of {0} any more, such as the next pass, delete it before that pass (del): it is held while the next one is made";
            let item = Item::new(Kind::PreviousResult, Memory::Activations, device, change).named(tag);
            let formula =
                format!("{} that a pass kept until the next one requested {}", mib(bytes), mib(asked));
            // A result may be the input of the next pass.
            item.estimated([0, bytes], formula)
        },
    )
}

/// Returns the bytes of a failed attempt in the same step that seem to be still held when `oom` fails, and whether a second attempt is
/// held beside them.
fn of_failed_attempt(report: &Report<'_>, device: &Device, oom: &Oom) -> Option<(i64, bool)> {
    let before = device.details.ooms.iter().filter(|other| {
        other.time_ns < oom.time_ns
            && matches!(other.fate, Fate::Survived)
            && other.step == oom.step
            && oom.asked_bytes as f64 <= other.asked_bytes as f64 * SMALLER
    });
    let now = report.by_tag(&oom.amounts, is_activation);
    let held = before.filter_map(|other| {
        let then = report.by_tag(&other.amounts, is_activation);
        let all = sum(then.values().copied());
        let still = sum(then.iter().map(|(tag, bytes)| now.get(tag).copied().unwrap_or(0).min(*bytes)));
        let is_passed = |tag: &str| then.contains_key(tag) && Some(tag) != other.tag.as_deref();
        let more = |fits: &dyn Fn(&str) -> bool| {
            let tags = now.iter().filter(|(tag, _)| fits(tag));
            let more = tags.map(|(tag, bytes)| bytes.saturating_sub(then.get(tag).copied().unwrap_or(0)));
            sum(more.filter(|bytes| *bytes > 0)) as f64
        };
        let (again, more) = (more(&is_passed), more(&|_| true));
        let is_held_twice = again >= more * AGAIN_SHARE && again >= all as f64 * MORE_SHARE;
        (all > 0 && still as f64 >= all as f64 * HELD_SHARE).then_some((still, is_held_twice))
    });
    held.max_by_key(|(bytes, is_held_twice)| (*is_held_twice, *bytes))
}
