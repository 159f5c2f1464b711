//! State of `top`: the current view, the latest reply, and the actions of keys.

use super::events::Reply;
use super::keys::Key;
use super::list::List;
use super::process::Process;
use super::widgets::{BOLD, DIM, Look, PLAIN, RED, Scroll, YELLOW, draw_text, length, wrap};
use super::{help, overview};
use crate::args::Top as Args;
use crate::command::ps;
use crate::command::report::processes;
use gpumem_model::control::Ps;
use gpumem_model::units::plural;
use gpumem_report::text::escape;
use jiff::Zoned;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Layout, Rect};
use ratatui_core::text::{Line, Span, Text};
use ratatui_core::widgets::Widget;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// What the main loop does after an event.
pub(crate) enum Action {
    Quit,
    EndBySignal(i32),
    Fail(anyhow::Error),
    Redraw,
}

/// Number of rows that is enough for all but devices and processes.
const ENOUGH_ROWS: usize = 500;

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
    /// The process that is shown in place of the list.
    process: Option<Process>,
    /// Position in the help, if it is shown.
    help: Option<Scroll>,
    paused: bool,
    /// Pid of the process to request from now on, if it changed; the inner `None` requests no process.
    pub request: Option<Option<u32>>,
}

impl State {
    pub(crate) fn new(args: &Args) -> Self {
        State {
            device: args.device.clone(),
            interval: args.interval,
            process: args.pid.map(Process::new),
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
        let is_done = match (&mut self.help, &mut self.process) {
            (Some(help), _) => help.key(key),
            (None, Some(process)) => process.key(key),
            (None, None) => self.list.key(key, self.ps.as_ref()),
        };
        match key {
            _ if is_done => {}
            Key::Char('q') => return Some(Action::Quit),
            Key::Redraw => return Some(Action::Redraw),
            Key::Char('p') => self.paused = !self.paused,
            Key::Char('?' | 'h') if self.help.is_none() => self.help = Some(Scroll::default()),
            Key::Char('?' | 'h') | Key::Escape | Key::Enter | Key::Left if self.help.is_some() => {
                self.help = None
            }
            Key::Escape | Key::Left | Key::Backspace if self.process.is_some() && self.help.is_none() => {
                (self.process, self.request) = (None, Some(None));
            }
            Key::Enter | Key::Right if self.process.is_none() && self.help.is_none() => self.open_process(),
            _ => {}
        }
        None
    }

    fn open_process(&mut self) {
        let chosen = self.ps.as_ref().and_then(|ps| self.list.chosen_process(ps));
        // Processes that the daemon hides from this user have pid 0.
        if let Some(process) = chosen.filter(|process| process.pid != 0) {
            self.process = Some(Process::new(process.pid));
            self.request = Some(Some(process.pid));
        }
    }

    /// Returns a number of rows that is enough for the whole view.
    pub(crate) fn enough_rows(&self) -> usize {
        ENOUGH_ROWS + self.ps.as_ref().map_or(0, |ps| ps.devices.len() + ps.processes.len())
    }

    pub(crate) fn draw(&mut self, area: Rect, frame: &mut Buffer, look: Look) {
        let outage: Vec<Line> = self.outage.iter().flat_map(|outage| outage_lines(outage, area)).collect();
        let rows = [length(1), length(outage.len()), Constraint::Fill(1), length(look.is_live.into())];
        let [of_title, of_outage, of_view, of_keys] = Layout::vertical(rows).areas(area);
        self.draw_title(of_title, frame);
        Text::from(outage).render(of_outage, frame);
        match (&mut self.help, &mut self.process, &self.ps) {
            (Some(scroll), _, _) => draw_text(&help::lines(look), scroll, of_view, frame, look),
            (None, Some(process), _) => process.draw(of_view, frame, look),
            (None, None, Some(ps)) => overview::draw(ps, &mut self.list, of_view, frame, look),
            (None, None, None) => Line::styled("asking ...", DIM).render(of_view, frame),
        }
        if look.is_live {
            self.keys_line(of_keys.width, look).render(of_keys, frame);
        }
        look.apply(frame);
    }

    fn draw_title(&self, area: Rect, frame: &mut Buffer) {
        let mut title = Line::styled("gpumemctl top", BOLD);
        if let Some(ps) = &self.ps {
            let pids: BTreeSet<u32> = ps.processes.iter().map(|process| process.pid).collect();
            let text = format!("  {}, {}", plural(ps.devices.len() as u64, "GPU"), processes(pids.len()));
            title.push_span(Span::styled(text, PLAIN));
        }
        if self.paused {
            title.push_span(Span::styled("  PAUSED", BOLD.fg(YELLOW)));
        }
        let text = format!("{}  every {} s", self.updated_at, self.interval.as_secs_f64());
        let right = Line::styled(text, DIM).right_aligned();
        let widths = [length(title.width() + 2), Constraint::Fill(1)];
        let [of_title, of_right] = Layout::horizontal(widths).areas(area);
        title.render(of_title, frame);
        if right.width() <= of_right.width.into() {
            right.render(of_right, frame);
        }
    }

    /// Returns the line with the most important keys, or with the filter that the user types.
    fn keys_line(&self, width: u16, look: Look) -> Line<'_> {
        let filter = escape(&self.list.filter);
        if self.list.typing {
            return help::typed_line(&filter, look);
        }
        let mut line = Line::default();
        let keys = match (&self.help, &self.process) {
            (Some(_), _) => help::OF_HELP,
            (None, Some(_)) => help::OF_PROCESS,
            (None, None) => help::OF_LIST,
        };
        if !filter.is_empty() && keys == help::OF_LIST {
            line.push_span(Span::styled(format!("/{filter}  "), YELLOW));
        }
        help::add_keys(&mut line, keys, width);
        line
    }
}

/// Returns the lines on a daemon that does not answer: since when, and the reason.
fn outage_lines((since, why): &(Instant, String), area: Rect) -> impl Iterator<Item = Line<'static>> {
    let (seconds, why) = (since.elapsed().as_secs(), why.replace('\n', " "));
    wrap(&format!("no answer for {seconds} s, trying again: {why}"), area, 3, BOLD.fg(RED))
}
