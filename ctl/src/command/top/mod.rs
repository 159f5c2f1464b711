//! `gpumemctl top`: a live view of all devices and processes, and of one process in detail.
//!
//! ```text
//! events              keys, signals and the daemon's replies, in one queue
//! state               the current view, and the actions of keys
//! list                the list of processes: filter, order, selection
//! overview            view of all devices and processes
//! process, history    view of one process; its memory over time
//! screen              a grid with bars and sparklines, and the bytes that update a terminal to show it
//! keys, terminal      decoding of keys; setup of the terminal
//! ```
//!
//! It needs only basic features of a terminal: the alternate screen, sixteen colours and cursor positions. A frame is written
//! with a single write, which contains only the changes.

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
use screen::Screen;
use signal_hook::consts::signal::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::low_level::{emulate_default_handler, raise};
use state::{Done, State};
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::channel;
use terminal::Terminal;

/// Width of a frame that is not written to a terminal, in columns.
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

fn once(args: &Args, daemon: Daemon) -> Result<()> {
    let mut state = State::new(args);
    let Reply { ps, process } = events::question(&mut Some(daemon), args.socket.as_deref(), args.pid);
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

fn live(args: &Args) -> Result<()> {
    let mut state = State::new(args);
    let input = terminal::input()?;
    let (events, happened) = channel();
    let (want, wanted) = channel();
    events::signals(events.clone())?;
    let terminal = Terminal::take(&input, terminal::output()?)?;
    events::typed(input, events.clone());
    events::ask(args.socket.as_deref().map(Into::into), args.interval, wanted, events);
    let _ = want.send(args.pid); // if that thread has ended, it has sent `Over`
    let mut shown: Option<Screen> = None;
    let ended = loop {
        let mut screen = Screen::new(size().unwrap_or((80, 24)), unicode(), colors());
        state.draw(&mut screen, true);
        let bytes = screen.changes(shown.as_ref());
        state.cost.frame(bytes.len());
        if !bytes.is_empty() && terminal.write(&bytes).is_err() {
            break Ok(Done::Left); // the terminal is gone
        }
        shown = Some(screen);
        // Handles all queued events before the next frame.
        let mut next = happened.recv().ok();
        let mut done = None;
        while let Some(event) = next {
            match event {
                Event::Key(key) => done = state.key(key),
                Event::Reply(reply) => done = state.update(*reply).err().map(Done::Failed),
                Event::Signal(SIGWINCH) => {}
                Event::Signal(SIGTSTP) => {
                    terminal.leave();
                    raise(signal_hook::consts::SIGSTOP)?;
                    shown = None;
                }
                Event::Signal(SIGCONT) => {
                    terminal.enter()?;
                    shown = None;
                }
                Event::Signal(SIGINT) => done = Some(Done::Left),
                Event::Signal(signal) => done = Some(Done::Signal(signal)),
                Event::Over => done = Some(Done::Left),
            }
            if let Some(pid) = state.wanted() {
                let _ = want.send(pid);
            }
            if done.is_some() {
                break;
            }
            next = happened.try_recv().ok();
        }
        match done {
            Some(Done::Redraw) => shown = None,
            Some(Done::Failed(error)) => break Err(error),
            Some(done) => break Ok(done),
            None => {}
        }
    };
    drop(terminal);
    match ended? {
        Done::Signal(signal @ (SIGTERM | SIGHUP | SIGQUIT)) => {
            // End by the signal, as its sender expects.
            io::stdout().flush()?;
            emulate_default_handler(signal).map_err(Into::into)
        }
        _ => Ok(()),
    }
}
