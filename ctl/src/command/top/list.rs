//! State of the list of all processes: filter, order, selection, and the recent used memory of each process.

use super::keys::Key;
use super::widgets::Scroll;
use gpumem_model::control::{ProcessRow, Ps};
use gpumem_model::units::signed;
use gpumem_report::text::{escape, sparkline};
use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};

/// Sort order of the rows; the number is the column in [`ps::HEADS`](crate::command::ps::HEADS).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Order {
    #[default]
    Used = 4,
    /// By device, the largest process first. The daemon sends the rows in this order.
    Device = 0,
    Tracked = 5,
    Idle = 6,
    Gap = 7,
    User = 2,
    Pid = 1,
}

impl Order {
    /// Returns the order that follows this one in `cycle`, for the key that changes the order.
    fn next(self) -> Order {
        use Order::*;
        let cycle = [Used, Tracked, Idle, Gap, User, Pid, Device];
        let index = cycle.iter().position(|order| *order == self).unwrap_or(0);
        cycle[(index + 1) % cycle.len()]
    }

    /// Compares two rows. Larger amounts come first, unknown ones last.
    fn compare(self, one: &ProcessRow, other: &ProcessRow) -> Ordering {
        let by_amount = |amount: fn(&ProcessRow) -> Option<i64>| amount(other).cmp(&amount(one));
        match self {
            Order::Device => one.device.cmp(&other.device),
            Order::Pid => one.pid.cmp(&other.pid),
            Order::User => one.user.cmp(&other.user),
            Order::Used => by_amount(|process| process.used_bytes.map(signed)),
            Order::Tracked => by_amount(|process| process.tracked_bytes),
            Order::Idle => by_amount(|process| process.idle_bytes),
            Order::Gap => by_amount(|process| Some(signed(process.used_bytes?) - process.tracked_bytes?)),
        }
    }
}

/// Identifies a process on a device across replies: pid and the device's UUID.
type RowId = (u32, String);

/// Number of values in the history of a process, which is the width of its sparkline.
pub(crate) const HISTORY: usize = 24;

#[derive(Debug, Default)]
pub(crate) struct List {
    pub order: Order,
    pub reversed: bool,
    /// Words that a shown row must contain; if empty, all rows are shown.
    pub filter: String,
    pub typing: bool,
    chosen: Option<RowId>,
    pub scroll: Scroll,
    /// Used bytes of each process in the last replies, the oldest first.
    history: HashMap<RowId, VecDeque<Option<u64>>>,
}

impl List {
    /// Adds the used bytes of a reply to the history of each process, and drops the history of ended processes.
    pub(crate) fn update(&mut self, ps: &Ps) {
        let mut history = HashMap::new();
        for process in &ps.processes {
            let id = row_id(ps, process);
            let mut values = self.history.remove(&id).unwrap_or_default();
            if values.len() == HISTORY {
                values.pop_front();
            }
            values.push_back(process.used_bytes);
            history.insert(id, values);
        }
        self.history = history;
    }

    /// Returns the used memory of a process in the last replies as a sparkline.
    pub(crate) fn sparkline(&self, ps: &Ps, process: &ProcessRow, unicode: bool) -> String {
        let values = self.history.get(&row_id(ps, process)).into_iter().flatten();
        let values: Vec<Option<i64>> = values.map(|bytes| bytes.map(signed)).collect();
        sparkline(values.iter().copied(), values.iter().flatten().max().copied().unwrap_or(0), unicode)
    }

    /// Returns the indices in `Ps::processes` of the shown rows, sorted by `order`.
    fn rows(&self, ps: &Ps) -> Vec<usize> {
        let mut rows: Vec<(usize, &ProcessRow)> =
            ps.processes.iter().enumerate().filter(|(_, process)| self.is_shown(ps, process)).collect();
        rows.sort_by(|(_, one), (_, other)| {
            let order = self.order.compare(one, other);
            if self.reversed { order.reverse() } else { order }
        });
        rows.into_iter().map(|(row, _)| row).collect()
    }

    fn is_shown(&self, ps: &Ps, process: &ProcessRow) -> bool {
        let user = process.user.clone().or_else(|| process.uid.map(|uid| uid.to_string()));
        let device = ps.devices.get(process.device);
        let texts = [
            user,
            process.command.clone(),
            Some(process.pid.to_string()),
            Some(process.flags.join(" ")),
            device.map(|device| format!("gpu{} {}", device.index, device.uuid)),
        ];
        let texts = texts.into_iter().flatten().chain(process.who.values().cloned());
        let text = escape(&texts.collect::<Vec<_>>().join(" ")).to_lowercase();
        self.filter.to_lowercase().split_whitespace().all(|word| text.contains(word))
    }

    /// Returns the indices of the shown rows, and moves the position to the selected process; to the first if it has ended.
    pub(crate) fn located(&mut self, ps: &Ps) -> Vec<usize> {
        let rows = self.rows(ps);
        self.scroll.position = self.selected(ps, &rows);
        rows
    }

    fn selected(&self, ps: &Ps, rows: &[usize]) -> usize {
        let is_chosen = |row: &usize| {
            ps.processes.get(*row).is_some_and(|process| Some(&row_id(ps, process)) == self.chosen.as_ref())
        };
        rows.iter().position(is_chosen).unwrap_or(0)
    }

    pub(crate) fn chosen_process<'p>(&self, ps: &'p Ps) -> Option<&'p ProcessRow> {
        let rows = self.rows(ps);
        rows.get(self.selected(ps, &rows)).and_then(|row| ps.processes.get(*row))
    }

    /// Handles a key. Returns whether the key has an effect in the list.
    pub(crate) fn key(&mut self, key: Key, ps: Option<&Ps>) -> bool {
        if self.typing {
            match key {
                Key::Char(character) if self.filter.len() < 64 => self.filter.push(character),
                Key::Backspace => _ = self.filter.pop(),
                Key::Enter => self.typing = false,
                Key::Escape => (self.typing, self.filter) = (false, String::new()),
                _ => return false,
            }
            return true;
        }
        let rows = ps.map(|ps| self.located(ps)).unwrap_or_default();
        if self.scroll.key(key) {
            let row = rows.get(self.scroll.position).or(rows.last());
            let process = ps.zip(row).and_then(|(ps, row)| Some((ps, ps.processes.get(*row)?)));
            self.chosen = process.map(|(ps, process)| row_id(ps, process));
            return true;
        }
        match key {
            Key::Char('s') => (self.order, self.reversed) = (self.order.next(), false),
            Key::Char('r') => self.reversed = !self.reversed,
            Key::Char('/') => self.typing = true,
            Key::Escape if !self.filter.is_empty() => self.filter.clear(),
            _ => return false,
        }
        true
    }
}

fn row_id(ps: &Ps, process: &ProcessRow) -> RowId {
    (process.pid, ps.devices.get(process.device).map(|device| device.uuid.clone()).unwrap_or_default())
}
