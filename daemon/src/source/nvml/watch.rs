//! Supervises the poller from the daemon: starts it, reads its frames, detects calls that hang, and replaces the poller.
//!
//! A poller that is stuck in the kernel may survive even SIGKILL. Then it is abandoned. The next poller skips the device of the
//! stuck call until a probe finds that the device answers (hung.rs).
//!
//! A substitute starts long before the call's timeout: after [`stall_of`], another poller reads the other GPUs while the stuck
//! one is only watched. If the call returns in time, the first poller continues and the substitute ends. A GPU that answers
//! again is opened by a new poller. It replaces the current poller once it has opened all GPUs, so that opening does not delay
//! the readings of others.

mod standby;

use super::Command;
use super::answer::Code;
use super::call_state::{Call, CallState};
use super::hung::{Actions, HungDevices};
use super::protocol::{Arguments, SECOND, launch, limit};
use super::translate::Translator;
use crate::clock::now_ns;
use crate::config::NvmlSettings;
use crate::nvml_status::NvmlStatus;
use crate::os::{is_out_of_descriptors, lock};
use crate::source::Batch;
use crate::source::process::Processes;
use crate::stats::Stats;
use gpumem_wire::frame::records;
use standby::{Stuck, read_next};
use std::collections::VecDeque;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tracing::{debug, info, warn};

/// Maximum number of unread bytes from the poller. A frame is shorter, so more bytes are invalid.
const MOST_UNREAD: usize = 128 * 1024;
/// First pause before a poller that has ended is replaced, and the maximum; doubled each time.
const RESTART: Duration = Duration::from_secs(1);
const RESTART_MOST: Duration = Duration::from_secs(30);
/// Lifetime after which a poller counts as working, so that the next restart has the first pause.
const LIVED: Duration = Duration::from_secs(60);
/// Maximum interval for reading the call state.
const TICK_MOST: Duration = Duration::from_millis(200);
/// Duration after which a call counts as stuck and the other GPUs get another poller; at most half of the call's timeout.
const STALL: Duration = Duration::from_millis(400);
/// Time without readings after which the source counts as down: while the poller is in a call, and while it is idle. An idle
/// poller changes its call state every second.
const DOWN: Duration = Duration::from_secs(1);
const DOWN_IDLE: Duration = Duration::from_millis(2500);
/// Age of the poller's records that shows that the daemon was stopped (ns). Normally the records are written within 50 ms.
const STOPPED_NS: u64 = SECOND * 3 / 10;
/// Pause for reading agents before such old records are translated, and minimum time between two pauses.
const AGENTS_FIRST: Duration = Duration::from_millis(250);
const AGENTS_AGAIN: Duration = Duration::from_secs(2);
/// Maximum number of stuck pollers that are watched at one time.
const MOST_STUCK: usize = 4;
/// Period over which the share of time in list calls is computed (ns).
const SHARE_WINDOW_NS: u64 = 10 * SECOND;

#[derive(Debug)]
enum End {
    /// All handles of the NVML source were dropped.
    Done,
    Died,
    Stuck(Call),
    Malformed,
}

pub(crate) struct Watch {
    pub settings: NvmlSettings,
    pub processes: Processes,
    pub out: mpsc::Sender<Batch>,
    pub status: Arc<Mutex<NvmlStatus>>,
    pub commands: mpsc::UnboundedReceiver<Command>,
    stats: Arc<Stats>,
    pub translator: Translator,
    hung: HungDevices,
    /// Pollers whose current call is stuck but has not timed out.
    stuck: Vec<Stuck>,
    /// Poller that opens all GPUs again, to replace the current poller.
    next: Option<Poller>,
    needs_reopen: bool,
    /// When translating old records was last delayed for agents.
    agents_first: Option<Instant>,
    /// Whether reading events has hung; then pollers do not read events any more.
    no_events: bool,
    /// Recent samples of the total time in list calls: (time, total), both in ns.
    share: VecDeque<(u64, u64)>,
}

struct Poller {
    child: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    call_state: CallState,
    unread: Vec<u8>,
    /// Call state as last read, and the number of ticks for which it has not changed.
    seen: (u64, Call),
    same: u32,
}

impl Poller {
    /// Reads the call state. Returns for how long it has not changed. Counts ticks instead of time: while the daemon was
    /// stopped, the poller may have been stopped too.
    fn stalled_for(&mut self, tick: Duration) -> Duration {
        let now = self.call_state.get();
        self.same = if now == self.seen { self.same + 1 } else { 0 };
        self.seen = now;
        tick * self.same
    }

    /// Sends command lines; a full pipe loses them. A poller that reads nothing is detected by its call state.
    async fn write(&mut self, lines: &str) {
        if !lines.is_empty() {
            let _ = timeout(Duration::from_millis(100), self.stdin.write_all(lines.as_bytes())).await;
        }
    }
}

impl Watch {
    pub(crate) fn new(
        settings: NvmlSettings,
        processes: Processes,
        out: mpsc::Sender<Batch>,
        status: Arc<Mutex<NvmlStatus>>,
        commands: mpsc::UnboundedReceiver<Command>,
        stats: Arc<Stats>,
    ) -> Watch {
        Watch {
            settings,
            processes,
            out,
            status,
            commands,
            stats,
            translator: Translator::default(),
            hung: HungDevices::default(),
            stuck: Vec::new(),
            next: None,
            needs_reopen: false,
            agents_first: None,
            no_events: false,
            share: VecDeque::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, NvmlStatus> {
        lock(&self.status)
    }

    pub(crate) async fn run(mut self) {
        let mut wait = RESTART;
        loop {
            let started = Instant::now();
            let end = match self.start() {
                Ok(poller) => self.listen(poller).await,
                Err(error) => {
                    self.report_source(false, &format!("nvml: the poller cannot be started: {error}")).await;
                    // Running out of descriptors is not the driver's fault, and a retry is cheap.
                    if is_out_of_descriptors(&error) {
                        wait = RESTART;
                    }
                    End::Died
                }
            };
            self.lock().poller_pid = None;
            if started.elapsed() >= LIVED {
                wait = RESTART;
            }
            let pause = match end {
                End::Done => return,
                // Restart at once, because the other devices are waiting. The hung device is skipped.
                End::Stuck(Call::Device(_) | Call::Lists(_) | Call::Index(_) | Call::Events) => {
                    Duration::ZERO
                }
                _ => {
                    let pause = wait;
                    wait = (wait * 2).min(RESTART_MOST);
                    pause
                }
            };
            if !self.pause(pause).await {
                return;
            }
            self.lock().counters.restarts += 1;
        }
    }

    /// Waits before the next start of a poller. Returns false if the source has ended.
    async fn pause(&mut self, pause: Duration) -> bool {
        let end = sleep(pause);
        tokio::pin!(end);
        loop {
            tokio::select! {
                () = &mut end => return true,
                command = self.commands.recv() => match command {
                    None => return false,
                    Some(command) => { self.note(&command); }
                },
            }
        }
    }

    fn start(&mut self) -> std::io::Result<Poller> {
        let poller = self.launch()?;
        self.lock().poller_pid = poller.child.id();
        self.translator.begin_poller();
        Ok(poller)
    }

    fn launch(&mut self) -> std::io::Result<Poller> {
        let now = now_ns();
        let left = |until: u64| until.saturating_sub(now).div_ceil(SECOND);
        let mut arguments = Arguments {
            settings: self.settings.clone(),
            released_s: self.lock().released_until_ns.map_or(0, left),
            ..Arguments::default()
        };
        arguments.no_events = self.no_events || self.stuck.iter().any(|stuck| stuck.pending.is_none());
        self.hung.add_skips(&mut arguments);
        let (mut child, call_state) = launch(arguments, Stdio::piped)?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (stdin, stdout) = pipes.ok_or_else(|| std::io::Error::other("no pipes"))?;
        debug!(pid = child.id(), "nvml poller started");
        let unread = Vec::with_capacity(16 * 1024);
        Ok(Poller { child, stdin, stdout, call_state, unread, seen: (0, Call::Nothing), same: 0 })
    }

    /// Stores what a command means for future pollers. Returns the command line for the current poller.
    fn note(&mut self, command: &Command) -> String {
        if let Command::Release(_) = command {
            self.hung.release();
            self.abandon_stuck();
            self.next = None; // dropping kills it
        }
        let mut status = self.lock();
        match command {
            Command::Hint(device) => format!("list {device}\n"),
            Command::Release(time) => {
                let seconds = time.as_secs_f64().ceil() as u64;
                status.released_until_ns = Some(now_ns().saturating_add(seconds.saturating_mul(SECOND)));
                format!("release {seconds}\n")
            }
            Command::Resume => {
                status.released_until_ns = None;
                "resume\n".to_owned()
            }
        }
    }

    async fn listen(&mut self, mut poller: Poller) -> End {
        let tick = (self.settings.call_timeout / 4).clamp(Duration::from_millis(10), TICK_MOST);
        let mut ticks = interval(tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let end = loop {
            tokio::select! {
                read = poller.stdout.read_buf(&mut poller.unread) => {
                    if !matches!(read, Ok(count) if count > 0) {
                        break End::Died;
                    }
                    if !self.take_unread(&mut poller).await {
                        break End::Malformed;
                    }
                }
                opened = read_next(&mut self.next) => {
                    if let Some(mut next) = self.next.take().filter(|_| opened) {
                        std::mem::swap(&mut poller, &mut next);
                        self.replace(next, &poller).await;
                        if !self.take_unread(&mut poller).await {
                            break End::Malformed;
                        }
                    } else {
                        self.hung.relapse();
                    }
                }
                command = self.commands.recv() => {
                    let Some(command) = command else { break End::Done };
                    let line = self.note(&command);
                    poller.write(&line).await;
                }
                _ = ticks.tick() => {
                    let stalled = poller.stalled_for(tick);
                    self.note_stall(stalled, poller.seen.1);
                    if stalled >= limit(poller.seen.1, &self.settings) {
                        break End::Stuck(poller.seen.1);
                    }
                    if stalled >= stall_of(&self.settings) {
                        match self.substitute(poller).await {
                            Some(next) => poller = next,
                            None => return End::Died,
                        }
                    }
                    poller = self.check_stuck(poller, tick).await;
                    self.check_next(tick);
                    let Actions { lines, needs_reopen } =
                        self.hung.tick(tick, &self.settings, &mut self.translator, &mut lock(&self.status));
                    self.needs_reopen |= needs_reopen;
                    poller.write(&lines).await;
                    for stuck in &mut self.stuck {
                        stuck.poller.write(&lines).await;
                    }
                    self.tick().await;
                }
            }
        };
        let doing = poller.seen.1;
        self.end_poller(poller, &end, doing).await;
        end
    }

    /// Translates the complete frames that a poller has written. Returns false if it wrote invalid data.
    async fn take_unread(&mut self, poller: &mut Poller) -> bool {
        let first = records(&poller.unread).next().and_then(|record| record.ok()?.ok());
        let age_ns = first.map_or(0, |record| now_ns().saturating_sub(record.stamp.time_ns));
        if age_ns > STOPPED_NS && self.agents_first.is_none_or(|last| last.elapsed() > AGENTS_AGAIN) {
            // First read the agents of processes that have ended meanwhile, because they identify the processes in the waiting
            // readings.
            self.agents_first = Some(Instant::now());
            sleep(AGENTS_FIRST).await;
        }
        let Some(taken) = self.take(&poller.unread).await else { return false };
        poller.unread.drain(..taken);
        poller.unread.len() <= MOST_UNREAD
    }

    /// Stores in the status whether no GPU is read, because the current poller is stalled or skips all GPUs.
    fn note_stall(&self, stalled: Duration, doing: Call) {
        let most = if doing == Call::Nothing { DOWN_IDLE } else { DOWN };
        let mut status = self.lock();
        let since = now_ns().saturating_sub(stalled.as_nanos() as u64);
        let is_none_read = stalled >= most || self.hung.has_all(&status.devices);
        status.stalled_since_ns = is_none_read.then(|| *status.stalled_since_ns.get_or_insert(since));
    }

    /// Translates the poller's frames. Returns their length in bytes, or `None` if they are invalid.
    async fn take(&mut self, bytes: &[u8]) -> Option<usize> {
        self.processes.sweep();
        let taken = {
            let mut status = lock(&self.status);
            let was_up = (status.up, status.reason.clone());
            let was_released = status.released_until_ns.is_some();
            let now = now_ns();
            if status.released_until_ns.is_some_and(|until| until <= now) {
                status.released_until_ns = None;
            }
            let taken = self.translator.translate(bytes, &self.processes, &mut status).ok();
            if (status.up, &status.reason) != (was_up.0, &was_up.1) {
                if status.up {
                    info!(reason = %status.reason, "nvml is up");
                    let hung = &self.hung;
                    self.translator.mark_missing(&mut status, |device| hung.has(device));
                } else if status.released_until_ns.is_some() {
                    info!(reason = %status.reason, "nvml is closed for a while");
                    if !was_released {
                        self.hung.release();
                    }
                } else {
                    warn!(reason = %status.reason, "nvml is down");
                }
            }
            self.hung.revive(&mut self.translator, &mut status);
            taken
        };
        for (timing, ns) in self.translator.timings.drain(..) {
            self.stats.observe(timing, Duration::from_nanos(ns.into()));
        }
        self.send().await;
        if taken.is_none() {
            self.lock().counters.malformed += 1;
        }
        taken
    }

    async fn tick(&mut self) {
        let totals = self.translator.all_totals();
        let now = now_ns();
        self.share.push_back((now, totals.list_ns));
        while self.share.len() > 2 && self.share.get(1).is_some_and(|(time, _)| now - time >= SHARE_WINDOW_NS)
        {
            self.share.pop_front();
        }
        let share = self
            .share
            .front()
            .filter(|(time, _)| *time < now)
            .map(|&(time, list_ns)| totals.list_ns.saturating_sub(list_ns) as f64 / (now - time) as f64);
        {
            let counters = &mut self.lock().counters;
            (counters.calls, counters.list_share) = (totals, share.unwrap_or(0.0));
        }
        self.send().await; // command lines that have been read by now
    }

    async fn send(&mut self) {
        let frames = self.translator.take_frames(&self.processes);
        if !frames.is_empty() {
            // An error means that the daemon is about to end.
            let _ = self.out.send(Batch::of_host(frames)).await;
        }
    }

    async fn report_source(&mut self, up: bool, reason: &str) {
        if lock(&self.status).reason != reason {
            self.translator.report_source(&mut lock(&self.status), up, reason);
            self.send().await;
        }
    }

    /// Kills the poller without waiting long for its end. Ends its open readings, whose values are unknown now.
    async fn end_poller(&mut self, mut poller: Poller, end: &End, doing: Call) {
        if let End::Done = end {
            // A poller that still reads commands can shut NVML down properly.
            let _ = timeout(Duration::from_millis(100), poller.stdin.write_all(b"quit\n")).await;
            drop(poller.stdin);
            if timeout(Duration::from_millis(500), poller.child.wait()).await.is_ok() {
                return;
            }
        }
        let _ = poller.child.start_kill();
        let exit = timeout(Duration::from_millis(500), poller.child.wait()).await;
        let exit = exit.ok().and_then(Result::ok);
        if let End::Done = end {
            return;
        }
        // Find the call during which the poller ended.
        let doing = if let End::Died = end { poller.call_state.get().1 } else { doing };
        self.no_events |= matches!(end, End::Stuck(Call::Events));
        self.lock().no_events = self.no_events;
        let is_device = matches!(doing, Call::Device(_) | Call::Lists(_) | Call::Index(_));
        let reason = match end {
            End::Stuck(_) => "nvml: a call did not return; the poller was replaced",
            End::Malformed => "nvml: the poller wrote invalid data and was replaced",
            _ => "nvml: the poller ended and is being replaced",
        };
        warn!(?end, ?doing, left_behind = exit.is_none(), "nvml poller lost");
        {
            let mut status = lock(&self.status);
            status.counters.hangs += u64::from(matches!(end, End::Stuck(_)));
            if let Some(pending) = HungDevices::target(doing, &self.translator, &status) {
                let code = if let End::Stuck(_) = end { Code::TIMEOUT } else { Code::UNKNOWN };
                self.hung.avoid(pending, code, &self.settings, &mut self.translator, &mut status);
            } else if !is_device {
                self.translator.report_source(&mut status, false, reason);
            }
            let (devices, stuck) = (&status.devices, &self.stuck);
            let is_stuck =
                |index| stuck.iter().any(|stuck| stuck.pending.is_some_and(|of| of.index == index));
            self.translator
                .end_readings(|slot| devices.iter().any(|of| of.slot == slot && is_stuck(of.index)));
        }
        self.send().await;
    }
}

/// Returns how long a call may take before its poller gets a substitute.
fn stall_of(settings: &NvmlSettings) -> Duration {
    STALL.min(settings.call_timeout / 2)
}
