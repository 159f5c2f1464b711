//! Reasons why an amount of a run is not exact, as sentences, and the bounds of its true value.

use super::paired_run::compared;
use super::{At, SIDES, Side};
use gpumem_model::run::{Coverage, Device, Moment};
use serde::Serialize;

/// A reason why the numbers of A or B are not exact.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Uncertainty {
    /// The side with the inexact numbers: `A` or `B`.
    pub side: &'static str,
    /// Stable identifier for programs: the name of a flag, or the kind of NVML sample.
    pub code: &'static str,
    /// The reason as one sentence.
    pub text: String,
}

/// Lower and upper bound of an amount; `None` where there is no such bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) low: Option<i64>,
    pub(super) high: Option<i64>,
}

impl Bounds {
    pub(super) fn exact(bytes: i64) -> Self {
        Bounds { low: Some(bytes), high: Some(bytes) }
    }
}

/// Kind of an amount. It determines how flags such as `late` affect the bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Used,
    Tracked,
    PartOfTracked,
    Gap,
}

/// Returns the reasons why the compared moments of two devices are not exact.
pub(super) fn of_devices(sides: &[Side<'_>; 2], devices: [Option<usize>; 2], at: At) -> Vec<Uncertainty> {
    let mut reasons = Vec::new();
    for ((side, name), device) in sides.iter().zip(SIDES).zip(devices) {
        if let Some(device) = device.and_then(|device| side.run.devices.get(device)) {
            of_device(name, &side.run.coverage, device, at, &mut reasons);
        }
    }
    reasons
}

fn of_device(
    side: &'static str,
    coverage: &Coverage,
    device: &Device,
    at: At,
    reasons: &mut Vec<Uncertainty>,
) {
    let moment = compared(device, at);
    let mut add = |code: &'static str, text: String| reasons.push(Uncertainty { side, code, text });
    if at == At::Peak && device.details.ooms.iter().any(|oom| oom.is_out_of_memory() || oom.is_suspected()) {
        add("oom", "memory ran out: the peak lacks the request that failed".into());
    }
    if !coverage.covered {
        let why = match coverage.blocked_by {
            Some(_) => "blocked: its agent could not attach to CUPTI, so only NVML's number is known",
            None => "uncovered: the process has no agent, so only NVML's number is known",
        };
        return add(if coverage.blocked_by.is_some() { "blocked" } else { "uncovered" }, why.into());
    }
    if moment.tracked_bytes.is_none() && device.name.starts_with(crate::labels::RANK) {
        add("uncovered", format!("only NVML's number is known for {}: its sums have no names", device.name));
    }
    if coverage.late {
        let text = "its agent was loaded after the first allocations: older memory is in `predates the agent`, without names";
        add("late", text.into());
    }
    if coverage.blind_doubt {
        add("blind", "the agent saw nothing for a time: sums and peak are not exact".into());
    } else if moment.partial || (at == At::Now && coverage.partial_state) {
        add("partial", "records were lost: its sums are not exact".into());
    } else if at == At::Peak && (coverage.partial_history || coverage.partial_state) {
        add("partial", "records were lost: its peak is a lower bound".into());
    }
    match moment.torn {
        Some((low, high)) if low == high => {
            add("torn", "a call was in progress while NVML was read: tracked is a lower bound".into());
        }
        Some(_) => add("torn", "memory changed while NVML was read: tracked lies between two values".into()),
        None => {}
    }
    if moment.stale {
        add("stale", "its sample ended before the agent's records arrived: Untrackable is uncertain".into());
    }
    match (&moment.used_absence, moment.used_bytes()) {
        (_, None) => {
            let why = device.last.used_absence.as_ref();
            let why = why.map_or("NVML was not read".to_owned(), |why| format!("NVML says {why}"));
            add("no_sample", format!("used and Untrackable are unknown: {why}"));
        }
        (Some(why), Some(_)) => {
            let text = format!("NVML's newest reading has no number ({why}): an older one is compared");
            add("old_sample", text);
        }
        (None, Some(_)) if moment.gap_distance_ns != 0 => {
            add("carried", "Untrackable was measured at another time than the peak (~)".into());
        }
        _ => {}
    }
}

/// Returns the bounds of an amount at a moment. Untrackable memory measured near the peak counts as measured at the peak.
pub(super) fn bounds(bytes: Option<i64>, kind: Kind, coverage: &Coverage, moment: &Moment, at: At) -> Bounds {
    let Some(bytes) = bytes else { return Bounds::default() };
    let is_lower = at == At::Peak && (coverage.partial_history || coverage.partial_state);
    let is_vague = coverage.blind_doubt || moment.partial || (at == At::Now && coverage.partial_state);
    // NVML read this value directly, so it is exact at the time of the reading.
    if kind == Kind::Used && (!coverage.covered || at == At::Now) {
        return Bounds::exact(bytes);
    }
    if is_vague
        || (kind == Kind::Gap && (is_lower || moment.stale))
        || (kind == Kind::PartOfTracked && is_lower)
    {
        return Bounds::default();
    }
    let mut bounds = Bounds::exact(bytes);
    if is_lower {
        bounds.high = None;
    }
    if let (Some((low, high)), Kind::Tracked | Kind::PartOfTracked | Kind::Gap) = (moment.torn, kind) {
        let width = high.saturating_sub(low);
        let (less, more) = match (kind, width) {
            // A call that allocates or frees was in progress, and the size of its memory was unknown.
            (Kind::Gap, 0) => return Bounds { low: None, high: Some(bytes) },
            (_, 0) => return Bounds { low: Some(bytes), high: None },
            (Kind::Tracked, _) => (bytes.saturating_sub(low), high.saturating_sub(bytes)),
            _ => (width, width),
        };
        bounds = Bounds {
            low: Some(bytes.saturating_sub(less.max(0))),
            high: Some(bytes.saturating_add(more.max(0))),
        };
    }
    if coverage.late && matches!(kind, Kind::Tracked | Kind::PartOfTracked) {
        // Memory older than the agent may belong to any category or tag.
        bounds.high =
            bounds.high.zip(moment.predates_bytes).map(|(high, older)| high.saturating_add(older.max(0)));
    }
    bounds
}
