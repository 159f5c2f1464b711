//! The list of processes of all devices: filter, order and selection.

use super::keys::Key;
use gpumem_model::control::{ProcessRow, Ps};
use gpumem_model::units::signed;
use gpumem_report::text::escape;
use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};

/// Sort order of the rows; the number is the column in [`ps::HEADS`](crate::command::ps::HEADS).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Order {
    /// By device, the largest first: the order of the daemon.
    #[default]
    Device = 0,
    Used = 4,
    Tracked = 5,
    Idle = 6,
    Gap = 7,
    User = 2,
    Pid = 1,
}

impl Order {
    fn next(self) -> Order {
        match self {
            Order::Device => Order::Used,
            Order::Used => Order::Tracked,
            Order::Tracked => Order::Idle,
            Order::Idle => Order::Gap,
            Order::Gap => Order::User,
            Order::User => Order::Pid,
            Order::Pid => Order::Device,
        }
    }

    /// Compares two rows. Larger amounts come first, unknown ones last.
    fn compare(self, one: &ProcessRow, other: &ProcessRow) -> Ordering {
        let amount = |process: &ProcessRow| match self {
            Order::Used => process.used_bytes.map(signed),
            Order::Tracked => process.tracked_bytes,
            Order::Idle => process.idle_bytes,
            Order::Gap => {
                process.used_bytes.zip(process.tracked_bytes).map(|(used, tracked)| signed(used) - tracked)
            }
            _ => None,
        };
        match self {
            Order::Device => one.device.cmp(&other.device),
            Order::Pid => one.pid.cmp(&other.pid),
            Order::User => one.user.cmp(&other.user),
            _ => amount(other).cmp(&amount(one)),
        }
    }
}

/// Identifies a process on a device across replies: pid and the device's UUID.
pub(crate) type Name = (u32, String);

const KEPT: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct List {
    pub order: Order,
    pub reversed: bool,
    /// Only rows that contain these words are shown.
    pub filter: String,
    /// The user is typing the filter.
    pub typing: bool,
    chosen: Option<Name>,
    history: HashMap<Name, VecDeque<Option<u64>>>,
}

impl List {
    /// Adds the values of a reply to the history of each process, and drops processes that are gone.
    pub(crate) fn update(&mut self, ps: &Ps) {
        let mut history = HashMap::new();
        for process in &ps.processes {
            let name = name(ps, process);
            let mut values = self.history.remove(&name).unwrap_or_default();
            if values.len() == KEPT {
                values.pop_front();
            }
            values.push_back(process.used_bytes);
            history.insert(name, values);
        }
        self.history = history;
    }

    pub(crate) fn history(&self, ps: &Ps, process: &ProcessRow) -> Vec<Option<u64>> {
        let values = self.history.get(&name(ps, process));
        values.map(|values| values.iter().copied().collect()).unwrap_or_default()
    }

    /// Returns the indices of the shown rows, in their order.
    pub(crate) fn rows(&self, ps: &Ps) -> Vec<usize> {
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

    /// Returns the position of the selected row, or the first one if it is gone.
    pub(crate) fn chosen(&self, ps: &Ps, rows: &[usize]) -> usize {
        let is_it = |row: &usize| {
            ps.processes.get(*row).is_some_and(|process| Some(&name(ps, process)) == self.chosen.as_ref())
        };
        rows.iter().position(is_it).unwrap_or(0)
    }

    pub(crate) fn process<'p>(&self, ps: &'p Ps) -> Option<&'p ProcessRow> {
        let rows = self.rows(ps);
        rows.get(self.chosen(ps, &rows)).and_then(|row| ps.processes.get(*row))
    }

    /// Handles a key of the list. Returns whether it was one.
    pub(crate) fn key(&mut self, key: Key, ps: Option<&Ps>, page: usize) -> bool {
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
        let Some(by) = key.step(page) else {
            match key {
                Key::Char('s') => (self.order, self.reversed) = (self.order.next(), false),
                Key::Char('r') => self.reversed = !self.reversed,
                Key::Char('/') => self.typing = true,
                Key::Escape if !self.filter.is_empty() => self.filter.clear(),
                _ => return false,
            }
            return true;
        };
        if let Some(ps) = ps {
            let rows = self.rows(ps);
            let at = self.chosen(ps, &rows).saturating_add_signed(by).min(rows.len().saturating_sub(1));
            self.chosen =
                rows.get(at).and_then(|row| ps.processes.get(*row)).map(|process| name(ps, process));
        }
        true
    }
}

fn name(ps: &Ps, process: &ProcessRow) -> Name {
    (process.pid, ps.devices.get(process.device).map(|device| device.uuid.clone()).unwrap_or_default())
}
