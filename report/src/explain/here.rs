//! Formats the numbers of a run that `gpumemctl explain WORD` shows with the explanation of a word.

use crate::labels::{device_name, label, pid};
use crate::{Columns, GroupBy, Part, Report, Statement, held, most_used, ooms};
use gpumem_model::run::{Cell, Coverage, Device, Moment, Oom, Run, State};
use gpumem_model::units::{Unit, plural, signed, thousands};

const UNKNOWN: &str = "not known";

/// A run, and the device on which it has the most memory.
pub(super) struct ExplainedRun<'r> {
    pub(super) report: &'r Report<'r>,
    pub(super) run: &'r Run,
    pub(super) device: &'r Device,
    statement: Statement,
    unit: Unit,
}

impl<'r> ExplainedRun<'r> {
    pub(super) fn of(report: &'r Report<'_>) -> Option<ExplainedRun<'r>> {
        let device = report.run.devices.iter().max_by_key(|device| most_used(device))?;
        let statement = report.statement(device, usize::MAX, 0);
        let unit = Unit::for_largest(most_used(device).unwrap_or(0));
        Some(ExplainedRun { report, run: report.run, device, statement, unit })
    }

    pub(super) fn title(&self) -> String {
        let id = self.report.id.as_ref().map(|id| format!(" {id}")).unwrap_or_default();
        format!("{}{id}{}, {}", label(self.run), pid(self.run), device_name(self.device))
    }

    pub(super) fn coverage(&self) -> &'r Coverage {
        &self.run.coverage
    }

    pub(super) fn amount(&self, bytes: i64) -> String {
        self.unit.amount_with_name(bytes)
    }

    /// Formats the amounts at the last moment and at the peak.
    pub(super) fn last_and_peak(&self, columns: Columns) -> Option<String> {
        let word = if self.run.state == State::Open { "now" } else { "last" };
        let [last, peak] = columns.map(|bytes| bytes.map_or(UNKNOWN.to_owned(), |bytes| self.amount(bytes)));
        let is_unknown = columns == [None, None];
        Some(if is_unknown { UNKNOWN.to_owned() } else { format!("{last} {word}, {peak} at peak") })
    }

    /// Formats the amounts of a statement's row. The statement omits a row that is zero: such a row is formatted as `none` if the
    /// process has an agent.
    pub(super) fn row(&self, part: Part) -> Option<String> {
        match self.statement.row(part) {
            Some(row) => self.last_and_peak(self.statement.rows[row].bytes),
            _ if self.coverage().covered => Some("none".to_owned()),
            _ => Some("unknown: the process has no agent".to_owned()),
        }
    }

    /// Formats the amounts of a part of untrackable memory (the gap), by the part's name.
    pub(super) fn part(&self, name: &str) -> Option<String> {
        let of = |moment: &Moment| {
            let parts = moment.gap_parts()?.each();
            parts.into_iter().find(|(part, ..)| *part == name).map(|(.., bytes)| bytes)
        };
        self.last_and_peak([of(&self.device.last), of(&self.device.peak)])
    }

    /// Formats the sum of the cells that `fits` selects, at the last moment and at the peak.
    pub(super) fn cells(&self, fits: impl Fn(&Cell) -> bool) -> Option<String> {
        let of = |moment: &Moment| moment.tracked_bytes.map(|_| held(self.run, &moment.amounts, &fits));
        self.last_and_peak([of(&self.device.last), of(&self.device.peak)])
    }

    /// Formats the sum of the cells with the role or phase `name`. `trait_of` returns either; `what` is `role` or `phase`.
    pub(super) fn named(
        &self,
        what: &str,
        trait_of: fn(&Cell) -> Option<&str>,
        name: &str,
    ) -> Option<String> {
        if self.run.cells.iter().all(|cell| trait_of(cell).is_none()) {
            return Some(format!("no program or framework reported {what} of blocks"));
        }
        self.cells(|cell| trait_of(cell) == Some(name))
    }

    /// Formats an amount that may be unknown.
    pub(super) fn unsigned(&self, bytes: Option<u64>) -> Option<String> {
        Some(bytes.map_or(UNKNOWN.to_owned(), |bytes| self.amount(signed(bytes))))
    }

    /// Formats the state of the source of names called `name` (such as a framework's hooks), and the reason for that state.
    pub(super) fn layer(&self, name: &str) -> Option<String> {
        let layer = self.coverage().layers.iter().find(|layer| layer.layer == name)?;
        let why = if layer.reason.is_empty() { String::new() } else { format!(": {}", layer.reason) };
        Some(format!("{}{why}", layer.state))
    }

    /// Formats the number and sum of the changes of untrackable memory that have this cause; `None` if there are none.
    pub(super) fn steps(&self, cause: &str) -> Option<String> {
        let steps = self.device.details.steps.iter().filter(|step| step.cause == cause);
        let (count, bytes) =
            steps.fold((0, 0_i64), |(count, sum), step| (count + 1, sum.saturating_add(step.bytes)));
        (count > 0).then(|| format!("{} of {}", plural(count, "step"), self.amount(bytes)))
    }

    /// Formats the number of out-of-memory events that `fits` selects.
    pub(super) fn ooms(&self, fits: impl Fn(&Oom) -> bool) -> Option<String> {
        let counts = ooms(self.run).filter(|(_, oom)| fits(oom)).map(|(_, oom)| oom.count.max(1));
        let count = counts.fold(0, u64::saturating_add);
        Some(if count == 0 { "none".to_owned() } else { format!("{} times", thousands(count)) })
    }

    /// Finds a category by name, preferably in the report's grouping. Returns its name, its grouping and its amounts as text.
    pub(super) fn category(&self, fits: &dyn Fn(&str) -> bool) -> Option<(String, GroupBy, String)> {
        [self.report.by, GroupBy::Structure, GroupBy::Layer]
            .into_iter()
            .filter(|by| *by != GroupBy::Tag)
            .find_map(|by| {
                let moments = [&self.device.last, &self.device.peak];
                let of = moments.map(|moment| (moment, self.report.composition(moment, by)));
                let name =
                    of.iter().flat_map(|(_, of)| of.categories.keys()).find(|name| fits(name))?.clone();
                let bytes = of.map(|(moment, of)| {
                    moment.tracked_bytes.map(|_| of.categories.get(&name).copied().unwrap_or(0))
                });
                Some((name, by, self.last_and_peak(bytes)?))
            })
    }

    pub(super) fn tag(&self, word: &str) -> Option<String> {
        let is_it = |cell: &Cell| cell.tag.as_deref() == Some(word);
        let is_there = self.run.cells.iter().any(is_it);
        self.cells(is_it).filter(|_| is_there)
    }
}
