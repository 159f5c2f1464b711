//! State of `top`: the current view, the latest reply, and the actions of keys.

use super::events::Reply;
use super::keys::Key;
use super::list::List;
use super::overview;
use super::process::Process;
use super::screen::{RED, Screen, Style, Written, YELLOW, columns};
use crate::args::Top as Args;
use crate::command::ps;
use crate::command::report::processes;
use gpumem_model::control::Ps;
use gpumem_model::units::plural;
use gpumem_report::text::escape;
use jiff::Zoned;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// What the main loop does after an event.
pub(crate) enum Action {
    Quit,
    EndBySignal(i32),
    Fail(anyhow::Error),
    Redraw,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum View {
    #[default]
    List,
    Process,
    Help,
}

#[derive(Default)]
pub(crate) struct State {
    device: Option<String>,
    interval: Duration,
    ps: Option<Ps>,
    /// Local time of the latest reply.
    updated_at: String,
    /// Time since which the daemon has not replied, and the reason.
    outage: Option<(Instant, String)>,
    list: List,
    process: Option<Process>,
    view: View,
    /// The view from which help was opened.
    before_help: View,
    paused: bool,
    /// Number of the list's rows that fit on the screen.
    page: usize,
    /// Pid of the process to request from now on, if it changed; the inner `None` requests no process.
    pub request: Option<Option<u32>>,
    pub written: Written,
}

impl State {
    pub(crate) fn new(args: &Args) -> Self {
        State {
            device: args.device.clone(),
            interval: args.interval,
            process: args.pid.map(Process::new),
            view: if args.pid.is_some() { View::Process } else { View::List },
            page: 1,
            ..State::default()
        }
    }

    /// Updates the state from a reply. Fails if the requested device does not exist.
    pub(crate) fn update(&mut self, reply: Reply) -> anyhow::Result<()> {
        match reply.ps {
            Ok(mut ps) => {
                if let Some(device) = &self.device {
                    ps::only(&mut ps, device)?;
                }
                self.outage = None;
                if !self.paused {
                    self.updated_at = Zoned::now().strftime("%H:%M:%S").to_string();
                    self.list.update(&ps);
                    self.ps = Some(ps);
                }
            }
            Err(why) => {
                let since = self.outage.take().map_or_else(Instant::now, |(since, _)| since);
                self.outage = Some((since, why));
            }
        }
        if let (Some((pid, run)), Some(process), false) = (reply.process, &mut self.process, self.paused) {
            // A reply on the process that was shown before may arrive late.
            if process.pid == pid {
                process.update(run);
            }
        }
        Ok(())
    }

    /// Handles a key. Returns what the main loop does, if anything.
    pub(crate) fn key(&mut self, key: Key) -> Option<Action> {
        if self.view == View::List && self.list.key(key, self.ps.as_ref(), self.page) {
            return None;
        }
        if let (View::Process, Some(process)) = (self.view, &mut self.process)
            && process.key(key)
        {
            return None;
        }
        match (key, self.view) {
            (Key::Char('q'), _) => return Some(Action::Quit),
            (Key::Redraw, _) => return Some(Action::Redraw),
            (Key::Char('?' | 'h') | Key::Escape | Key::Enter | Key::Left, View::Help) => {
                self.view = self.before_help
            }
            (Key::Char('?' | 'h'), view) => (self.view, self.before_help) = (View::Help, view),
            (Key::Char('p'), _) => self.paused = !self.paused,
            (Key::Enter | Key::Right, View::List) => self.open_process(),
            (Key::Escape | Key::Left | Key::Backspace, View::Process) => {
                (self.view, self.process, self.request) = (View::List, None, Some(None));
            }
            _ => {}
        }
        None
    }

    fn open_process(&mut self) {
        let chosen = self.ps.as_ref().and_then(|ps| self.list.chosen_process(ps));
        // Processes that the daemon hides from this user have pid 0.
        if let Some(process) = chosen.filter(|process| process.pid != 0) {
            self.process = Some(Process::new(process.pid));
            (self.view, self.request) = (View::Process, Some(Some(process.pid)));
        }
    }

    /// Returns the number of rows that the whole view needs.
    pub(crate) fn height(&self, width: usize) -> usize {
        match &self.process {
            Some(process) => 1 + process.height(width),
            None => 1 + self.ps.as_ref().map_or(1, overview::height),
        }
    }

    /// Draws the current view. A frame that is not live has no selection and no line of keys.
    pub(crate) fn draw(&mut self, screen: &mut Screen, is_live: bool) {
        self.draw_title(screen);
        let mut row = 1;
        if let Some((since, why)) = &self.outage {
            let (seconds, why) = (since.elapsed().as_secs(), why.replace('\n', " "));
            let text = format!("no answer for {seconds} s, trying again: {why}");
            screen.put_wrapped(&mut row, &text, 3, Style::bold(RED));
        }
        let end = screen.height.saturating_sub(usize::from(is_live));
        match (self.view, &self.ps) {
            (View::Help, _) => overview::draw_help(screen, (row, end), &self.written),
            (View::Process, _) => {
                if let Some(process) = &mut self.process {
                    process.draw(screen, (row, end), is_live);
                }
            }
            (View::List, Some(ps)) => {
                self.page = overview::draw(screen, ps, &self.list, (row, end), is_live).max(1)
            }
            (View::List, None) => _ = screen.put(row, 0, "asking ...", Style::DIM),
        }
        if is_live {
            self.draw_keys(screen, end);
        }
    }

    fn draw_title(&self, screen: &mut Screen) {
        let mut at = screen.put(0, 0, "gpumemctl top", Style::BOLD);
        if let Some(ps) = &self.ps {
            let pids: BTreeSet<u32> = ps.processes.iter().map(|process| process.pid).collect();
            let text = format!("  {}, {}", plural(ps.devices.len() as u64, "GPU"), processes(pids.len()));
            at = screen.put(0, at, &text, Style::PLAIN);
        }
        if self.paused {
            at = screen.put(0, at, "  PAUSED", Style::bold(YELLOW));
        }
        let right = format!("{}  every {} s", self.updated_at, self.interval.as_secs_f64());
        screen.put(0, screen.width.saturating_sub(columns(&right)).max(at + 2), &right, Style::DIM);
    }

    /// Draws the line with the most important keys, or with the filter that the user types.
    fn draw_keys(&self, screen: &mut Screen, row: usize) {
        if self.list.typing {
            let at = screen.put(row, 0, "only with these words: ", Style::BOLD);
            let at = screen.put(row, at, &escape(&self.list.filter), Style::PLAIN);
            screen.put(row, at, if screen.unicode { "█" } else { "_" }, Style::PLAIN);
            return;
        }
        let keys: &[(&str, &str)] = match self.view {
            View::Help => &[("Esc", "back"), ("q", "leave")],
            View::Process => &[
                ("Esc", "back"),
                ("?", "keys"),
                ("Tab", "rows"),
                ("Enter", "explain"),
                ("w", "time"),
                ("a", "all"),
                ("o", "oom"),
                ("g", "growth"),
                ("x", "Untrackable"),
            ],
            View::List => &[
                ("?", "keys"),
                ("q", "leave"),
                ("Enter", "in depth"),
                ("s", "sort"),
                ("r", "reverse"),
                ("/", "filter"),
                ("p", "pause"),
            ],
        };
        let mut at = 0;
        if !self.list.filter.is_empty() && self.view == View::List {
            at = screen.put(row, at, &format!("/{}", escape(&self.list.filter)), Style::of(YELLOW)) + 2;
        }
        for (key, what) in keys {
            if at + columns(key) + columns(what) + 1 > screen.width {
                break;
            }
            at = screen.put(row, at, key, Style::BOLD);
            at = screen.put(row, at + 1, what, Style::DIM) + 2;
        }
    }
}
