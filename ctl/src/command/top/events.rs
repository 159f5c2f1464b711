//! Events of the main loop: keys, signals and replies of the daemon. A thread for each kind sends its events to one queue.

use super::keys::{Key, keys};
use crate::client::{Daemon, RunReply, RunSelector};
use gpumem_model::control::Ps;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::signal::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

pub(crate) enum Event {
    Key(Key),
    /// Number of a signal that this process received.
    Signal(i32),
    Reply(Box<Reply>),
    /// A reading thread has ended. While the main loop runs, only a closed terminal or a panic causes this.
    Over,
}

pub(crate) struct Reply {
    /// Processes and devices, or the reason why they are unknown.
    pub ps: Result<Ps, String>,
    /// Pid of the process that was requested, and its run. `None` for the run means that the daemon has none.
    pub process: Option<(u32, Result<Option<RunReply>, String>)>,
}

/// Time to wait after an escape character for the rest of a key. If nothing follows, it is the escape key.
const REST_OF_A_KEY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Longest sequence of a key in bytes; longer input is dropped.
const LONGEST_KEY: usize = 64;

/// Starts a thread that sends events. The end of the thread is an event too, also after a panic.
fn thread(events: Sender<Event>, work: impl FnOnce(&Sender<Event>) + Send + 'static) {
    struct SendOver(Sender<Event>);
    impl Drop for SendOver {
        fn drop(&mut self) {
            let _ = self.0.send(Event::Over); // fails only if the main loop has ended
        }
    }
    std::thread::spawn(move || work(&SendOver(events).0));
}

pub(crate) fn signals(events: Sender<Event>) -> io::Result<()> {
    let all = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGWINCH];
    let mut signals = signal_hook::iterator::Signals::new(all)?;
    thread(events, move |events| {
        let _ = signals.forever().try_for_each(|signal| events.send(Event::Signal(signal)));
    });
    Ok(())
}

/// Starts the thread that reads keys.
pub(crate) fn typed_keys(mut input: File, events: Sender<Event>) {
    thread(events, move |events| {
        let mut pending = Vec::new();
        let mut buffer = [0; 256];
        loop {
            let read = match input.read(&mut buffer) {
                Ok(read @ 1..) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                _ => break,
            };
            pending.extend_from_slice(buffer.get(..read).unwrap_or_default());
            let (mut found, decoded) = keys(&pending);
            pending.drain(..decoded);
            if pending == [0x1b] && !has_more_input(&input) {
                pending.clear();
                found.push(Key::Escape);
            }
            if pending.len() > LONGEST_KEY {
                pending.clear();
            }
            if found.into_iter().any(|key| events.send(Event::Key(key)).is_err()) {
                break;
            }
        }
    });
}

fn has_more_input(input: &File) -> bool {
    poll(&mut [PollFd::new(input, PollFlags::IN)], Some(&REST_OF_A_KEY)).is_ok_and(|ready| ready > 0)
}

/// Starts the thread that polls the daemon every `interval`, and at once when `requested` has the pid of another process.
pub(crate) fn replies(
    socket: Option<PathBuf>,
    interval: Duration,
    requested: Receiver<Option<u32>>,
    events: Sender<Event>,
) {
    thread(events, move |events| {
        let (mut pid, mut daemon) = (None, None);
        loop {
            let since = Instant::now();
            let reply = poll_daemon(&mut daemon, socket.as_deref(), pid);
            if events.send(Event::Reply(Box::new(reply))).is_err() {
                break;
            }
            // A slow daemon is polled less often: the interval is at least four times the duration of a reply.
            let pause = interval.max(since.elapsed() * 4);
            match requested.recv_timeout(pause.saturating_sub(since.elapsed())) {
                Ok(next) => pid = next,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            while let Ok(next) = requested.try_recv() {
                pid = next;
            }
        }
    });
}

/// Polls the daemon once. After a failure a daemon is searched again, because another one may have started.
pub(crate) fn poll_daemon(daemon: &mut Option<Daemon>, socket: Option<&Path>, pid: Option<u32>) -> Reply {
    let found = match daemon.take().map_or_else(|| Daemon::find(socket), Ok) {
        Ok(found) => found,
        Err(error) => return Reply { ps: Err(error.to_string()), process: None },
    };
    let ps = found.ps().map_err(|error| format!("{error:#}"));
    let process = pid.filter(|_| ps.is_ok()).map(|pid| {
        let runs = found.runs(RunSelector::Pid(pid));
        (pid, runs.map(|runs| runs.into_iter().next()).map_err(|error| format!("{error:#}")))
    });
    if ps.is_ok() {
        *daemon = Some(found);
    }
    Reply { ps, process }
}
