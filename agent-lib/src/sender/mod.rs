//! The sender, the agent's only permanent thread. It sends records and names to a socket or file, and on request the whole state.
//! It also makes periodic checks. It may wait for the daemon without limit. The program waits for it only with a timeout: at its
//! end (GPUMEM_EXIT_WAIT_MS), in requests of the C API, and in cuMemPoolDestroy.

mod client;
mod drain;
mod link;
mod record;
mod resync;

pub(crate) use link::{close_in_child, connect_anew, receive_now, send_now};

use crate::base::clock::Calibration;
use crate::base::own_thread::{self, FINISHED, OWNER, THREAD};
use crate::base::{fault_injection, wake};
use crate::driver::core::{Core, report_status};
use crate::naming::callers;
use crate::naming::callers::sites::Sites;
use crate::record::{panic, status};
use crate::sources::api::scope;
use crate::sources::nvtx;
use crate::sources::torch::health::Health;
use crate::threads::{self, Thread};
use client::Client;
use gpumem_wire::{AgentState, Body, ByeReason, Record};
use link::Link;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::time::Duration;

/// Shortest and first pause between two rounds while there is something to send. A program that only allocates fills an eighth
/// of the ring in that time.
const BUSY: Duration = Duration::from_millis(10);
/// Longest pause while there is something to send, for a ring of `USUAL_SLOTS`. It is shorter if more than a quarter of the ring
/// fills in that time. Each round costs the program's processors 50 us, whatever it sends: a timer, wake-ups of this thread and
/// of the daemon, system calls. With longer pauses busy programs would fill the socket's buffer and wait for the daemon.
const STEADY: Duration = Duration::from_millis(20);
/// Ring size for `STEADY`; a smaller ring fills sooner, so its pauses are shorter.
const USUAL_SLOTS: u64 = 1 << 16;
/// Longest pause while there is nothing to send, also without a daemon. Each round searches for new libraries (PyTorch, libraries
/// with NVTX, modules that allocate). The later they are found, the more of their blocks have no name.
const IDLE: Duration = Duration::from_millis(100);
/// Interval of the checks of pools, threads and subscription, in ns.
const CHECK_NS: u64 = 1_000_000_000;

/// Whether the process exits. The sender then sends all remaining records and stops.
static FINISHING: AtomicBool = AtomicBool::new(false);

/// What was sent so far on the current connection.
#[derive(Debug, Default)]
struct Progress {
    /// Number of bytes of names sent so far.
    names_sent: u64,
    /// Number of the last record for which it and all earlier ones were put into packets or are lost.
    packed_seq: u64,
    /// Whether records were lost since the last resync.
    has_losses: bool,
    /// Number (`epoch`) of the daemon's request to which the next resync replies; `None` if no resync is due.
    resync: Option<u64>,
    state_version: Option<u64>,
    layers_version: Option<u64>,
    /// Number of the last report of the agent's state that was sent.
    reports_sent: u64,
    /// Number of the first record withheld since the count of withheld records was last sent; `None` while not muted.
    muted_since: Option<u64>,
}

#[derive(Debug)]
struct Sender {
    core: &'static Core,
    thread: Option<&'static Thread>,
    link: Link,
    calibration: Calibration,
    progress: Progress,
    /// Values last sent to the daemon: `Core::unrestored_rows`; `Live::refused` plus `threads::refused`; whether the table of
    /// names is full.
    shortages: (u64, u64, bool),
    /// Number from the daemon's Welcome, which a resync sends back; 0 before the Welcome.
    epoch: u64,
    next_check_ns: u64,
    /// Whether the sender is the last thread of the process: all threads of the host program have ended.
    is_alone: bool,
    muted_by_daemon: bool,
    /// Whether the link is a file for a dump. Records written there do not count as sent.
    dumping: bool,
    /// Time of the next periodic dump; 0 for none.
    next_dump_ns: u64,
    /// Time at which the additional recording ends; 0 for no limit.
    record_until_ns: u64,
    window: Option<record::StepWindow>,
    /// File of a recording that has ended at a limit, kept for the reply to the program's request to end the recording.
    ended: Option<PathBuf>,
    client: Client,
    torch: Health,
    sites: Sites,
}

/// Starts the sender, once in a process.
pub(crate) fn start(core: &'static Core) {
    if OWNER.swap(core.pid, AcqRel) == core.pid {
        return;
    }
    FINISHING.store(false, Relaxed);
    FINISHED.store(false, Relaxed);
    callers::prepare();
    callers::update_table(core);
    wake::prepare();
    let run = move || {
        THREAD.store(own_thread::kernel_id(), Relaxed);
        if !panic::shielded(false, || Sender::new(core).run()) {
            panic::shielded((), || link::last_words(core));
        }
        FINISHED.store(true, Release);
    };
    let thread = std::thread::Builder::new().name("gpumem".to_owned()).stack_size(256 << 10);
    // No signal of the host may be delivered to the new thread.
    if let Err(error) = own_thread::without_signals(|| thread.spawn(run)) {
        FINISHED.store(true, Release);
        give_up(core, &error);
    }
}

/// Disarms the agent when its thread cannot be started (RLIMIT_NPROC, the cgroup's pids.max), because records would never be
/// sent. The calling thread sends the reason to the daemon. It never waits, because the connection's buffer is empty.
#[cold]
fn give_up(core: &Core, error: &std::io::Error) {
    status::disarm();
    FINISHING.store(true, Release); // so that the link waits at most a short time
    let result = error.raw_os_error().and_then(|number| u16::try_from(number).ok()).unwrap_or(0);
    let detail = format!(
        "its thread could not be started: {error} (RLIMIT_NPROC or the cgroup's pids.max is reached)"
    );
    report_status(AgentState::Disarmed, result, &detail);
    let mut link = Link::new(core);
    if link.connect(core) {
        let stamp = core.recorder.stamp();
        let body = Body::Agent { result, state: AgentState::Disarmed, detail: &detail };
        link.frame(&Record { stamp, body });
        link.frame(&Record { stamp, body: Body::Bye { reason: ByeReason::Disarmed } });
        link.flush(); // the connection stays open until the program ends: see `link::last_words`
    }
}

/// Stops recording at exit, and waits up to GPUMEM_EXIT_WAIT_MS until the sender has sent all remaining records.
pub fn finish() {
    if OWNER.load(Acquire) != std::process::id() || FINISHED.load(Acquire) {
        return;
    }
    status::disarm();
    FINISHING.store(true, Release);
    wake::wake();
    let longest = Duration::from_millis(Core::get().map_or(0, |core| core.settings.exit_wait_ms));
    let start = std::time::Instant::now();
    while !FINISHED.load(Acquire) && start.elapsed() < longest {
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn finishing() -> bool {
    FINISHING.load(Acquire)
}

/// Sleeps until an event of `fds`, a call of `wake`, or the timeout.
fn wait(fds: &[(RawFd, i16)], time: Duration) {
    let mut polled = [libc::pollfd { fd: -1, events: 0, revents: 0 }; 3];
    let wake = (wake::descriptor(), libc::POLLIN);
    for (place, (fd, events)) in polled.iter_mut().zip([wake].into_iter().chain(fds.iter().copied())) {
        (place.fd, place.events) = (fd, events);
    }
    // SAFETY: the array has this length; negative descriptors are ignored.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, time.as_millis() as i32) };
    wake::taken(polled[0].revents != 0);
}

pub(crate) fn wait_readable(fd: RawFd, time: Duration) -> bool {
    let mut polled = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let time = i32::try_from(time.as_millis()).unwrap_or(i32::MAX).max(1);
    // SAFETY: passes one pollfd.
    unsafe { libc::poll(&mut polled, 1, time) > 0 }
}

/// Returns the pause after a round that took `taken` records out of a ring of `slots`. `last` is the pause before the round.
fn pause_of(last: Duration, taken: u64, slots: u64) -> Duration {
    let longest = (STEADY * slots.min(USUAL_SLOTS) as u32 / USUAL_SLOTS as u32).max(BUSY);
    let pause = match taken {
        0 => BUSY,                   // a resync or a command
        _ if last > longest => BUSY, // first records after an idle time
        _ if taken > slots / 4 => last / 2,
        _ if taken <= slots / 8 => last * 2,
        _ => last,
    };
    pause.clamp(BUSY, longest)
}

impl Sender {
    fn new(core: &'static Core) -> Self {
        Sender {
            core,
            thread: threads::current(),
            link: Link::new(core),
            calibration: Calibration::default(),
            progress: Progress::default(),
            shortages: (0, 0, false),
            epoch: 0,
            next_check_ns: 0,
            is_alone: false,
            muted_by_daemon: false,
            dumping: false,
            next_dump_ns: 0,
            record_until_ns: 0,
            window: None,
            ended: None,
            client: Client::default(),
            torch: Health::default(),
            sites: Sites::default(),
        }
    }

    /// Runs rounds until the process ends or another thread's panic has disarmed the agent; returns true.
    fn run(&mut self) -> bool {
        let mut pause = BUSY;
        loop {
            fault_injection::at("sender");
            // Read before the round, so that the last round has the last records and the report of a panic.
            let has_panicked = status::panicked();
            let is_last = finishing() || self.is_alone || has_panicked;
            let taken = self.progress.packed_seq;
            let busy = self.round();
            if is_last && has_panicked == status::panicked() {
                self.send_bye(if has_panicked { ByeReason::Disarmed } else { ByeReason::Exit });
                self.link.close();
                return true;
            }
            if finishing() || status::panicked() {
                continue;
            }
            let taken = self.progress.packed_seq.saturating_sub(taken);
            pause = if busy {
                pause_of(pause, taken, self.core.recorder.ring.slots())
            } else {
                (pause * 2).min(IDLE)
            };
            wait(&[(self.link.socket(), libc::POLLIN)], pause);
        }
    }

    /// Runs one round; returns whether there was anything to send or a request.
    fn round(&mut self) -> bool {
        self.core.recorder.clock.calibrate(&mut self.calibration);
        callers::update_table(self.core); // in each round: a library may allocate as soon as it is loaded
        nvtx::report_state(self.core);
        self.torch.search_torch(self.core);
        scope::report_state();
        self.run_checks();
        if status::armed() {
            crate::sources::python_host::run::request_if_due(self.core);
        }
        if let Some(thread) = self.thread.filter(|_| status::armed()) {
            self.sites.name(self.core, thread);
        }
        if !self.link.has_main() {
            self.connect();
        }
        let mut busy = self.handle_requests();
        if !self.link.is_up() {
            return false;
        }
        self.apply_mute();
        self.receive_commands();
        if !self.link.may_speak() {
            return busy;
        }
        busy |= self.send_new();
        if self.progress.has_losses && self.progress.resync.is_none() {
            self.progress.resync = Some(self.epoch);
        }
        if let Some(epoch) = self.progress.resync
            && self.link.is_up()
        {
            self.send_state(epoch);
            busy = true;
        }
        busy
    }

    /// Connects to the daemon, if an attempt is due. A new connection gets all names again, but no records that were sent before.
    fn connect(&mut self) {
        if !self.link.connect(self.core) {
            return;
        }
        self.epoch = 0;
        let Progress { has_losses, muted_since, .. } = self.progress;
        // Records that were packed but not sent on the old connection are packed again.
        let packed_seq = self.core.recorder.ring.sent();
        self.progress = Progress { packed_seq, has_losses, muted_since, ..Progress::default() };
    }

    /// Checks subscription, pools and threads once a second.
    fn run_checks(&mut self) {
        let now = self.core.recorder.clock.now();
        if finishing() || now < self.next_check_ns {
            return;
        }
        self.next_check_ns = now + CHECK_NS;
        self.is_alone = own_thread::is_alone();
        if let Some(thread) = self.thread.filter(|_| status::armed()) {
            thread.inside(|| {
                self.core.poll_pools(thread);
                self.core.drop_closed_exports(thread);
            });
        }
        threads::sweep(self.core.pid);
        self.torch.update(self.core, self.thread);
        callers::reclaim(now);
        if self.core.devices.driver().is_some() && status::armed() {
            // Between two subscriptions, the returns of calls in flight are not observed. A resync omits the rows that these
            // calls removed.
            if self.client.check(self.core, now) && self.link.is_up() {
                self.progress.resync = Some(self.epoch);
            }
            if self.client.check_soon {
                self.next_check_ns = now; // in the next round
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_far_apart_as_long_as_little_comes() {
        let of = |last_ms, taken, slots| pause_of(Duration::from_millis(last_ms), taken, slots).as_millis();
        let usual = USUAL_SLOTS;
        assert_eq!([of(100, 1, usual), of(10, 1, usual), of(20, 1, usual)], [10, 20, 20]);
        // A training step with 225,000 events a second; a program that only allocates; values at the limits.
        assert_eq!([of(10, 2_250, usual), of(20, 4_500, usual)], [20, 20]);
        assert_eq!([of(10, 8_193, usual), of(20, 16_385, usual), of(10, 60_000, usual)], [10, 10, 10]);
        assert_eq!([of(20, 0, usual), of(10, 0, usual)], [10, 10], "a resync, a command");
        let smaller = [of(10, 1, 1024), of(10, 1, usual / 2), of(10, 1, usual / 4 * 3), of(10, 1, 1 << 24)];
        assert_eq!(smaller, [10, 10, 15, 20]);
    }
}
