//! What happens: keys, signals, and what the daemon says, each heard by a thread of its own and told in one queue.

use super::keys::{Key, keys};
use crate::client::{Daemon, RunReply, RunSelector};
use gpumem_model::control::Ps;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::signal::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// Something that happened.
pub(crate) enum Event {
    Key(Key),
    Signal(i32),
    Said(Box<Said>),
    /// The terminal is gone, or a thread that should never end has ended.
    Over,
}

/// What the daemon said to one question.
pub(crate) struct Said {
    /// Who holds what; or why that is not known.
    pub ps: Result<Ps, String>,
    /// The process that was asked for.
    pub process: Option<(u32, Result<Option<RunReply>, String>)>,
}

/// A lone escape is the key, unless the rest of a sequence comes in this time.
const REST_OF_A_KEY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// A key is a few bytes; what is longer is none.
const LONGEST_KEY: usize = 64;

/// Says that a thread has ended, however it did.
struct Farewell(Sender<Event>);

impl Drop for Farewell {
    fn drop(&mut self) {
        let _ = self.0.send(Event::Over); // nobody listens where all is over
    }
}

/// Hears signals from now on.
///
/// # Errors
/// What the system says.
pub(crate) fn signals(events: Sender<Event>) -> io::Result<()> {
    let all = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGWINCH];
    let mut signals = signal_hook::iterator::Signals::new(all)?;
    std::thread::spawn(move || {
        let events = Farewell(events);
        for signal in signals.forever() {
            if events.0.send(Event::Signal(signal)).is_err() {
                break;
            }
        }
    });
    Ok(())
}

/// Reads keys from now on.
pub(crate) fn typed(mut input: File, events: Sender<Event>) {
    std::thread::spawn(move || {
        let events = Farewell(events);
        let mut held = Vec::new();
        let mut buffer = [0; 256];
        loop {
            let read = match input.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            held.extend_from_slice(buffer.get(..read).unwrap_or_default());
            let (mut found, taken) = keys(&held);
            held.drain(..taken);
            if held == [0x1b] && !more_comes(&input) {
                held.clear();
                found.push(Key::Escape);
            }
            if held.len() > LONGEST_KEY {
                held.clear();
            }
            if found.into_iter().any(|key| events.0.send(Event::Key(key)).is_err()) {
                break;
            }
        }
    });
}

fn more_comes(input: &File) -> bool {
    poll(&mut [PollFd::new(input, PollFlags::IN)], Some(&REST_OF_A_KEY)).is_ok_and(|ready| ready > 0)
}

/// Asks the daemon from now on: every `interval`, and at once when told what to look at.
pub(crate) fn ask(
    socket: Option<PathBuf>,
    interval: Duration,
    wanted: Receiver<Option<u32>>,
    events: Sender<Event>,
) {
    std::thread::spawn(move || {
        let events = Farewell(events);
        let (mut pid, mut daemon) = (None, None);
        loop {
            let since = Instant::now();
            let said = question(&mut daemon, socket.as_deref(), pid);
            if events.0.send(Event::Said(Box::new(said))).is_err() {
                break;
            }
            // A daemon that needs long for an answer is not asked all the time.
            let pause = interval.max(since.elapsed() * 4);
            match wanted.recv_timeout(pause.saturating_sub(since.elapsed())) {
                Ok(next) => pid = next,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            while let Ok(next) = wanted.try_recv() {
                pid = next;
            }
        }
    });
}

/// Asks once. The daemon is looked for anew after it did not answer: it may be another one.
pub(crate) fn question(
    daemon: &mut Option<Daemon>,
    socket: Option<&std::path::Path>,
    pid: Option<u32>,
) -> Said {
    let found = match daemon.take() {
        Some(daemon) => Ok(daemon),
        None => Daemon::find(socket).map_err(|error| error.to_string()),
    };
    let found = match found {
        Ok(found) => found,
        Err(why) => return Said { ps: Err(why), process: None },
    };
    let ps = found.ps().map_err(|error| format!("{error:#}"));
    let process = pid.filter(|_| ps.is_ok()).map(|pid| {
        let runs = found.runs(RunSelector::Pid(pid));
        (pid, runs.map(|runs| runs.into_iter().next()).map_err(|error| format!("{error:#}")))
    });
    if ps.is_ok() {
        *daemon = Some(found);
    }
    Said { ps, process }
}
