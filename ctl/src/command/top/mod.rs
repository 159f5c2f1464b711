//! `gpumemctl top`: a live view of all devices and processes, and of one process in detail.
//!
//! ```text
//! events              keys, signals and the daemon's replies, in one queue
//! state               the current view, and the actions of keys
//! list                the list of processes: filter, order, selection
//! overview            view of all devices and processes
//! process, history    view of one process; its memory over time
//! screen              a grid of characters, and the bytes that update a terminal to show it
//! keys, terminal      decoding of keys; setup of the terminal
//! ```
//!
//! The terminal needs only basic features: an alternate screen, sixteen colours and cursor positions. A frame is one write, which
//! has only the changes since the last frame.

mod events;
mod history;
mod keys;
mod list;
mod overview;
mod process;
mod screen;
mod state;
mod terminal;

use crate::args::Top as Args;
use crate::client::Daemon;
use crate::output::{print, size, unicode};
use anyhow::{Result, anyhow};
use events::{Event, Reply};
pub(super) use overview::device_cells;
use screen::Screen;
use signal_hook::consts::signal::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::low_level::{emulate_default_handler, raise};
use state::{Action, State};
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::channel;
use terminal::Terminal;

/// Width in columns of a frame that is written to a pipe.
const PIPED: usize = 100;

pub(crate) fn run(args: &Args) -> Result<()> {
    let daemon = Daemon::find(args.socket.as_deref())?;
    let has_screen = std::env::var_os("TERM").is_none_or(|kind| kind != "dumb");
    if args.once || !io::stdout().is_terminal() || !has_screen {
        return once(args, daemon);
    }
    drop(daemon);
    live(args)
}

/// Returns whether to use colours: on a terminal, unless NO_COLOR is set (no-color.org).
fn colors() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Prints one frame.
fn once(args: &Args, daemon: Daemon) -> Result<()> {
    let mut state = State::new(args);
    let Reply { ps, process } = events::poll_daemon(&mut Some(daemon), args.socket.as_deref(), args.pid);
    if let (Err(why), _) | (_, Some((_, Err(why)))) = (&ps, &process) {
        return Err(anyhow!("{why}"));
    }
    state.update(Reply { ps, process })?;
    let width = crate::output::width().unwrap_or(PIPED);
    let mut screen = Screen::new((width, state.height(width)), unicode(), colors());
    state.draw(&mut screen, false);
    let texts = screen.text();
    let last = texts.iter().rposition(|text| !text.is_empty()).unwrap_or(0);
    let mut out = Vec::new();
    for (row, text) in texts.iter().enumerate().take(last + 1) {
        if screen.colors {
            out.extend(screen.printed(row))
        } else {
            out.extend_from_slice(text.as_bytes())
        }
        out.push(b'\n');
    }
    print(&String::from_utf8_lossy(&out))
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
    let mut shown: Option<Screen> = None;
    let ended = loop {
        let mut screen = Screen::new(size().unwrap_or((80, 24)), unicode(), colors());
        state.draw(&mut screen, true);
        let bytes = screen.changes(shown.as_ref());
        state.written.add(bytes.len());
        if !bytes.is_empty() && terminal.write(&bytes).is_err() {
            break Ok(Action::Quit); // the terminal is gone
        }
        shown = Some(screen);
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
            // The sender of the signal expects this process to end by it.
            io::stdout().flush()?;
            emulate_default_handler(signal).map_err(Into::into)
        }
        _ => Ok(()),
    }
}
