//! `gpumemctl top`: a live view of all devices and processes, and of one process in detail.
//!
//! ```text
//! events              keys, signals and the daemon's replies, in one queue
//! state               the current view, and the actions of keys
//! list                the list of processes: filter, order, selection
//! overview, help      view of all devices and processes; the keys
//! process, history    view of one process; its memory over time
//! widgets             scrolling, texts, bars, styles
//! paint               the bytes that update a terminal to show a frame
//! keys, terminal      decoding of keys; setup of the terminal
//! ```
//!
//! A frame is a buffer of ratatui, which also has layout and tables. The terminal needs only basic features: an alternate screen, sixteen colours and cursor positions. A frame is one write, which
//! has only the changes since the last frame.

mod events;
mod help;
mod history;
mod keys;
mod list;
mod overview;
mod paint;
mod process;
mod state;
mod terminal;
mod widgets;

use crate::args::Top as Args;
use crate::client::Daemon;
use crate::exit::Kind;
use crate::output::{print, size, unicode};
use anyhow::{Result, anyhow};
use events::{Event, Reply};
pub(super) use overview::{DEVICE_HEADS, device_cells};
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use signal_hook::consts::signal::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::low_level::{emulate_default_handler, raise};
use state::{Action, State};
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::channel;
use terminal::Terminal;
use widgets::Look;

/// Width in columns of a frame that is written to a pipe.
const PIPED: u16 = 100;

pub(crate) fn run(args: &Args) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let has_screen = std::env::var_os("TERM").is_none_or(|kind| kind != "dumb");
    if args.once || !io::stdout().is_terminal() || !has_screen {
        return once(args, daemon);
    }
    drop(daemon);
    live(args)
}

/// Returns what the terminal can show. It gets colours unless NO_COLOR is set (no-color.org).
fn look(is_live: bool) -> Look {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    Look { unicode: unicode(), colors: io::stdout().is_terminal() && !no_color, is_live }
}

fn once(args: &Args, daemon: Daemon) -> Result<()> {
    let mut state = State::new(args);
    let Reply { ps, process: of_process } =
        events::poll_daemon(&mut Some(daemon), args.socket.as_deref(), args.pid);
    if let (Err(why), _) | (_, Some((_, Err(why)))) = (&ps, &of_process) {
        return Err(anyhow!("{why}"));
    }
    if let Some((pid, Ok(None))) = &of_process {
        return Err(Kind::NotFound.error(process::no_run(*pid)));
    }
    state.update(Reply { ps, process: of_process })?;
    let width = size().map_or(PIPED, |(width, _)| width);
    let area = Rect::new(0, 0, width, u16::try_from(state.enough_rows()).unwrap_or(u16::MAX));
    let mut frame = Buffer::empty(area);
    state.draw(area, &mut frame, look(false));
    print(&paint::printed(&frame))
}

/// Shows frames until the user quits.
fn live(args: &Args) -> Result<()> {
    let mut state = State::new(args);
    let input = terminal::input()?;
    let (events, queue) = channel();
    let (request, requested) = channel();
    events::signals(events.clone())?;
    let terminal = Terminal::open(&input, terminal::output()?)?;
    events::typed_keys(input, events.clone());
    events::replies(args.socket.as_deref().map(Into::into), args.interval, requested, events);
    let _ = request.send(args.pid); // if the receiving thread has ended, the queue has an event for it
    let mut shown: Option<Buffer> = None;
    let ended = loop {
        let (width, height) = size().unwrap_or((80, 24));
        let area = Rect::new(0, 0, width, height);
        let mut frame = Buffer::empty(area);
        state.draw(area, &mut frame, look(true));
        let bytes = paint::changes(shown.as_ref(), &frame);
        if !bytes.is_empty() && terminal.write(&bytes).is_err() {
            break Ok(Action::Quit); // the terminal is gone
        }
        shown = Some(frame);
        // Handles all queued events before the next frame.
        let mut next = queue.recv().ok();
        let mut action = None;
        while let Some(event) = next {
            match event {
                Event::Key(key) => action = state.key(key),
                Event::Reply(reply) => action = state.update(*reply).err().map(Action::Fail),
                Event::Signal(SIGWINCH) => {}
                Event::Signal(SIGTSTP) => {
                    terminal::restore();
                    raise(signal_hook::consts::SIGSTOP)?;
                    shown = None;
                }
                Event::Signal(SIGCONT) => {
                    terminal.enter()?;
                    shown = None;
                }
                Event::Signal(SIGINT) | Event::Over => action = Some(Action::Quit),
                Event::Signal(signal) => action = Some(Action::EndBySignal(signal)),
            }
            if let Some(pid) = state.request.take() {
                let _ = request.send(pid);
            }
            if action.is_some() {
                break;
            }
            next = queue.try_recv().ok();
        }
        match action {
            Some(Action::Redraw) => shown = None,
            Some(Action::Fail(error)) => break Err(error),
            Some(action) => break Ok(action),
            None => {}
        }
    };
    drop(terminal);
    match ended? {
        Action::EndBySignal(signal @ (SIGTERM | SIGHUP | SIGQUIT)) => {
            // The sender of the signal expects that this process ends by that signal.
            io::stdout().flush()?;
            emulate_default_handler(signal).map_err(Into::into)
        }
        _ => Ok(()),
    }
}
