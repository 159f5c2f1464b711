//! Models of a changed program: some memory is not requested, or is larger. The program's other requests are assumed to stay the same.

use anyhow::Result;
use gpumem_import::roles;
use gpumem_import::torch_snapshot::Requests;
use gpumem_model::escape::escape;
use gpumem_model::units::{Unit, signed};
use gpumem_replay::{Event, Figures};
use std::collections::HashSet;

/// Ids of added requests have this bit.
const ADDED: u64 = 1 << 63;

/// A change of the program: memory of a role or name is multiplied.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scale<'a> {
    /// A role, or text that the name of the memory, or its line of the program, contains.
    pub name: &'a str,
    /// Factor; 0 if the memory is not requested.
    pub factor: f64,
}

/// A changed program, and the figures between which its memory is assumed to be.
pub(super) struct Model<'a> {
    pub(super) scale: Scale<'a>,
    pub(super) ends: [Figures; 2],
    /// For a role: share of the requested bytes that have no known role, and so do not change.
    pub(super) without_role: Option<f64>,
}

impl Model<'_> {
    /// Returns the least and the greatest peak of reserved bytes.
    pub(super) fn range(&self) -> (u64, u64) {
        let [first, second] = self.ends.each_ref().map(|figures| figures.reserved.peak);
        (first.min(second), first.max(second))
    }

    /// Returns the program and its range as text.
    pub(super) fn text(&self, unit: Unit) -> String {
        let (least, most) = self.range();
        let Scale { name, factor } = &self.scale;
        let change = match *factor {
            0.0 => format!("without {}", escape(name)),
            factor => format!("{} times {factor}", escape(name)),
        };
        let fails = match self.ends.iter().filter(|figures| figures.failure.is_some()).count() {
            0 => "",
            1 => ", may run out of memory",
            _ => ", runs out of memory",
        };
        let (least, most) = (unit.amount(signed(least)), unit.amount_with_name(signed(most)));
        let range = if most.starts_with(&format!("{least} ")) { most } else { format!("{least} to {most}") };
        let without_role = match self.without_role {
            Some(share) => format!(" Of the requested bytes, {:.1} % have no known role.", share * 100.0),
            None => String::new(),
        };
        format!(
            "Model, not a replay: {change}, {range} reserved{fails}, if all other requests stay the same.{without_role}\n"
        )
    }
}

impl Scale<'_> {
    /// Passes the events of the changed program to `replay`, in two ways between which the truth is assumed to be, and returns both
    /// results; `None` if no memory has the name. Memory is larger: larger requests, or more of them. Memory is dropped: no
    /// requests, or each is freed at once.
    pub(super) fn apply<T>(
        &self,
        requests: &Requests,
        mut replay: impl FnMut(&mut dyn Iterator<Item = Event>) -> Result<T>,
    ) -> Result<Option<(bool, [T; 2])>> {
        let is_request = |(event, named): (&Event, &bool)| *named && matches!(event, Event::Request { .. });
        let is_requested = |named: &Vec<bool>| requests.events.iter().zip(named).any(is_request);
        // A word that is not a role of this memory may be part of a name.
        let of_role = roles::named(self.name).map(|role| requests.of_role(role)).filter(is_requested);
        let is_role = of_role.is_some();
        let of_name = || Some(requests.named(self.name)).filter(is_requested);
        let Some(named): Option<Vec<bool>> = of_role.or_else(of_name) else { return Ok(None) };
        let [first, second] =
            [false, true].map(|is_second| replay(&mut self.changed(&requests.events, &named, is_second)));
        Ok(Some((is_role, [first?, second?])))
    }

    /// Returns the changed events one by one: a large factor makes far more of them than memory holds.
    fn changed(&self, events: &[Event], named: &[bool], is_second: bool) -> impl Iterator<Item = Event> {
        let mut chosen = HashSet::new();
        events.iter().zip(named).flat_map(move |(event, named)| {
            let mut changed = Vec::new();
            let id = match *event {
                Event::Request { id, .. } if *named => {
                    chosen.insert(id);
                    id
                }
                Event::Free { id, .. } | Event::Return { id } if chosen.contains(&id) => id,
                _ => {
                    if let Event::Request { id, .. } = event {
                        chosen.remove(id);
                    }
                    changed.push(event.clone());
                    return changed;
                }
            };
            match (self.factor > 0.0, is_second) {
                (true, false) => changed.push(self.larger(event)),
                (true, true) => self.repeated(event, &mut changed),
                (false, true) if matches!(event, Event::Request { .. }) => {
                    changed.extend([event.clone(), Event::Free { id, is_pending: false }]);
                }
                (false, _) => {}
            }
            changed
        })
    }

    fn larger(&self, event: &Event) -> Event {
        match *event {
            Event::Request { id, bytes, stream, pool, has_failed } => {
                let bytes = (bytes as f64 * self.factor) as u64;
                Event::Request { id, bytes, stream, pool, has_failed }
            }
            ref other => other.clone(),
        }
    }

    /// Repeats a request or free as often as the factor says; the rest of the factor is a smaller request.
    fn repeated(&self, event: &Event, events: &mut Vec<Event>) {
        let mut left = self.factor;
        for copy in 0.. {
            let of = |id: u64| if copy == 0 { id } else { ADDED | id << 8 | copy };
            let share = left.min(1.0);
            if share <= 0.0 {
                break;
            }
            left -= share;
            events.push(match *event {
                Event::Request { id, bytes, stream, pool, has_failed } => {
                    let bytes = (bytes as f64 * share) as u64;
                    Event::Request { id: of(id), bytes, stream, pool, has_failed }
                }
                Event::Free { id, is_pending } => Event::Free { id: of(id), is_pending },
                Event::Return { id } => Event::Return { id: of(id) },
                ref other => other.clone(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(id: u64, bytes: u64) -> Event {
        Event::Request { id, bytes, stream: 0, pool: 0, has_failed: false }
    }

    #[test]
    fn larger_memory_is_larger_requests_or_more_of_them() {
        let scale = Scale { name: "", factor: 2.5 };
        assert_eq!(scale.larger(&request(7, 1000)), request(7, 2500));
        let mut events = Vec::new();
        scale.repeated(&request(7, 1000), &mut events);
        let bytes: Vec<u64> = events
            .iter()
            .map(|event| if let Event::Request { bytes, .. } = event { *bytes } else { 0 })
            .collect();
        assert_eq!(bytes, [1000, 1000, 500]);
        let (asked, mut freed) = (events.len(), Vec::new());
        scale.repeated(&Event::Free { id: 7, is_pending: false }, &mut freed);
        assert_eq!(asked, freed.len(), "each is freed");
    }

    #[test]
    fn changed_program_is_made_event_by_event() {
        let events = vec![request(1, 10); 100_000];
        let scale = Scale { name: "", factor: 100.0 };
        let named = vec![true; events.len()];
        let mut changed = scale.changed(&events, &named, true);
        assert_eq!(changed.next(), Some(request(1, 10)));
        assert_eq!(changed.size_hint().0, 99, "the copies of one request");
    }

    #[test]
    fn dropped_memory_is_not_requested_or_freed_at_once() {
        let free = |id| Event::Free { id, is_pending: false };
        let events = [request(1, 10), request(2, 20), free(1), request(1, 30), free(2), free(1)];
        // The id 1 is used again by a request of another name.
        let named = [true, false, true, false, false, false];
        let scale = Scale { name: "", factor: 0.0 };
        let [without, at_once] =
            [false, true].map(|is_second| scale.changed(&events, &named, is_second).collect::<Vec<_>>());
        let rest = [request(2, 20), request(1, 30), free(2), free(1)];
        assert_eq!(without, rest);
        assert_eq!(at_once[..2], [request(1, 10), free(1)]);
        assert_eq!(at_once[2..], rest);
    }
}
