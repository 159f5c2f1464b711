//! Supervises the poller from the daemon: starts it, reads its frames, detects calls that hang, and replaces the poller.
//!
//! A poller that is stuck in the kernel may survive even SIGKILL. Then it is abandoned. The next poller skips the device of the
//! stuck call until a probe finds that the device answers (hung.rs).
//!
//! A substitute starts long before the call's timeout: after [`stall_of`], another poller reads the other GPUs while the stuck one
//! is only watched. If the call returns in time and no other poller is stuck, the first poller continues and the substitute ends. A
//! GPU that answers again is opened by a new poller. It replaces the current poller once it has opened all GPUs, so that opening
//! does not delay the readings of others.

mod standby;

use super::answer::Code;
use super::call_state::{Call, CallState};
use super::hung::HungDevices;
use super::protocol::{Arguments, Command, FLUSH_NS, SECOND, Uuid, launch, limit};
use super::translate::Translator;
use crate::clock::{BEAT, BeatTimer, now_ns, share_wake_up};
use crate::config::NvmlSettings;
use crate::nvml_status::{NvmlStatus, STARTING};
use crate::os::{is_out_of_descriptors, lock};
use crate::source::Batch;
use crate::source::process::Processes;
use crate::stats::Stats;
use gpumem_ledger::DeviceName;
use gpumem_wire::frame::records;
use standby::{Stuck, read_next};
use std::collections::VecDeque;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{debug, info, warn};

/// Maximum number of unread bytes from the poller. A frame is shorter, so more bytes are invalid.
const MAX_UNREAD: usize = 128 * 1024;
/// First pause before a poller that has ended is replaced; doubled each time.
const RESTART: Duration = Duration::from_secs(1);
/// Maximum pause before a poller that has ended is replaced.
const MAX_RESTART: Duration = Duration::from_secs(30);
/// Lifetime after which a poller counts as working, so that the next restart has the first pause.
const STABLE: Duration = Duration::from_secs(60);
/// Duration after which a call counts as stuck and the other GPUs get another poller; at most half of the call's timeout.
const STALL: Duration = Duration::from_millis(400);
/// Time without a change of the call state after which the source counts as down while the poller is in a call.
const DOWN: Duration = Duration::from_secs(1);
/// Time without a change of the call state after which the source counts as down while the poller should have ended its sleep.
const DOWN_IDLE: Duration = Duration::from_millis(1500);
/// Age of the poller's records that shows that the daemon was stopped (ns). Normally the records are written within 220 ms.
const STOPPED_NS: u64 = SECOND * 3 / 10;
/// Pause in which agents' records are read first, before NVML records older than [`STOPPED_NS`] are translated.
const AGENTS_FIRST: Duration = Duration::from_millis(250);
/// Minimum time between two pauses of [`AGENTS_FIRST`].
const AGENTS_AGAIN: Duration = Duration::from_secs(2);
/// Maximum number of stuck pollers that are watched at one time.
const MAX_STUCK: usize = 4;
/// Period over which the share of time in list calls is computed (ns).
const SHARE_WINDOW_NS: u64 = 10 * SECOND;
/// Minimum time between two updates of that share, and of the totals of calls (ns).
const MIN_SHARE_NS: u64 = SECOND / 10;

/// Handle of the NVML source. Clones share the source, which ends when the last one is dropped.
#[derive(Debug, Clone)]
pub struct Nvml {
    translator: Arc<Mutex<Translator>>,
    commands: mpsc::UnboundedSender<Command>,
}

impl Nvml {
    /// Starts the source as a task of this tokio runtime. Never fails: problems appear in [`NvmlStatus`], and as `Source`
    /// records whose reason begins with `nvml: `. Such a record is about a device if its stamp has a device.
    ///
    /// All frames sent to `out` belong to [`gpumem_ledger::Origin::Host`]. The records of one reading are in order and not mixed
    /// with those of another reading. A long reading begins in an earlier batch than it ends, so that the ledger can record
    /// tracked bytes in time. Each reading that begins also ends, even if its poller is lost. `ProcessFacts` precede a
    /// process's first sample.
    pub fn start(
        settings: NvmlSettings,
        processes: Processes,
        out: mpsc::Sender<Batch>,
        stats: Arc<Stats>,
    ) -> Nvml {
        let (commands, received) = mpsc::unbounded_channel();
        let (reason, since_ns) = (STARTING.to_owned(), now_ns());
        let status = NvmlStatus { reason, since_ns, ..NvmlStatus::default() };
        let translator = Arc::<Mutex<Translator>>::default();
        lock(&translator).status = status;
        let watch = Watch {
            hung: HungDevices::new(settings.clone()),
            settings,
            processes,
            out,
            commands: received,
            stats,
            translator: Arc::clone(&translator),
            stuck: Vec::new(),
            next: None,
            agents_first: None,
            share: VecDeque::new(),
        };
        tokio::spawn(watch.run());
        Nvml { translator, commands }
    }

    /// Requests that this device's process lists are read soon, within the budget, because of an agent's event.
    pub fn hint(&self, device: DeviceName) {
        let _ = self.commands.send(Command::List(Uuid(device)));
    }

    /// Closes NVML, so that a GPU can be reset or partitioned. NVML is opened again after `time`.
    pub fn release(&self, time: Duration) {
        let _ = self.commands.send(Command::Release(time.as_secs_f64().ceil() as u64));
    }

    /// Opens NVML again before the time given to [`Nvml::release`] is over.
    pub fn resume(&self) {
        let _ = self.commands.send(Command::Resume);
    }

    /// Returns the current status without waiting for NVML.
    pub fn status(&self) -> NvmlStatus {
        lock(&self.translator).status.clone()
    }
}

/// Why the current poller is not read any more.
#[derive(Debug)]
enum PollerEnd {
    /// All handles of the NVML source were dropped.
    Done,
    Died,
    /// The call timed out.
    Stuck(Call),
    /// The poller wrote data that is not a frame.
    Malformed,
}

struct Watch {
    settings: NvmlSettings,
    processes: Processes,
    out: mpsc::Sender<Batch>,
    commands: mpsc::UnboundedReceiver<Command>,
    stats: Arc<Stats>,
    translator: Arc<Mutex<Translator>>,
    hung: HungDevices,
    /// Pollers whose current call is stuck but has not timed out.
    stuck: Vec<Stuck>,
    /// Poller that opens all GPUs again, to replace the current poller.
    next: Option<Poller>,
    /// When translating old records was last delayed for agents.
    agents_first: Option<Instant>,
    /// Recent samples of the total time in list calls: (time, total), both in ns.
    share: VecDeque<(u64, u64)>,
}

struct Poller {
    child: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    call_state: CallState,
    /// Bytes read from the poller and not yet translated.
    unread: Vec<u8>,
}

impl Poller {
    /// Sends a command; a full pipe loses it. A poller that reads nothing is detected by its call state.
    async fn send(&mut self, command: Command) {
        let line = format!("{}\n", serde_json::to_string(&command).unwrap_or_default());
        let _ = timeout(Duration::from_millis(100), self.stdin.write_all(line.as_bytes())).await;
    }
}

impl Watch {
    fn translator(&self) -> MutexGuard<'_, Translator> {
        lock(&self.translator)
    }

    /// Runs pollers, one after another, until all handles of the source were dropped.
    async fn run(mut self) {
        let mut wait = RESTART;
        loop {
            let started = Instant::now();
            let end = match self.start() {
                Ok(poller) => self.read(poller).await,
                Err(error) => {
                    let reason = format!("nvml: the poller cannot be started: {error}");
                    if self.translator().status.reason != reason {
                        self.translator().report_source(false, &reason);
                        self.send().await;
                    }
                    // Running out of descriptors is not the driver's fault, and a retry is cheap.
                    if is_out_of_descriptors(&error) {
                        wait = RESTART;
                    }
                    PollerEnd::Died
                }
            };
            self.translator().status.poller_pid = None;
            if started.elapsed() >= STABLE {
                wait = RESTART;
            }
            let pause = match end {
                PollerEnd::Done => return,
                // Restart at once, because the other devices are waiting. The hung device is skipped.
                PollerEnd::Stuck(Call::Device(_) | Call::Lists(_) | Call::Index(_) | Call::Events) => {
                    Duration::ZERO
                }
                _ => {
                    let pause = wait;
                    wait = (wait * 2).min(MAX_RESTART);
                    pause
                }
            };
            if !self.pause(pause).await {
                return;
            }
            self.translator().status.counters.restarts += 1;
        }
    }

    /// Waits before the next start of a poller. Returns false if the source has ended.
    async fn pause(&mut self, pause: Duration) -> bool {
        let end = Instant::now() + pause;
        loop {
            match timeout_at(end, self.commands.recv()).await {
                Err(_) => return true,
                Ok(None) => return false,
                Ok(Some(command)) => self.note(command),
            }
        }
    }

    /// Starts a poller that becomes the current one.
    fn start(&mut self) -> std::io::Result<Poller> {
        let poller = self.launch()?;
        let mut translator = self.translator();
        translator.status.poller_pid = poller.child.id();
        translator.begin_poller();
        drop(translator);
        Ok(poller)
    }

    /// Starts a poller that skips hung devices.
    fn launch(&mut self) -> std::io::Result<Poller> {
        let now = now_ns();
        let left = |until: u64| until.saturating_sub(now).div_ceil(SECOND);
        let (released_until_ns, no_events) = {
            let status = &self.translator().status;
            (status.released_until_ns, status.no_events)
        };
        let mut arguments = Arguments {
            settings: self.settings.clone(),
            released_s: released_until_ns.map_or(0, left),
            no_events: no_events || self.stuck.iter().any(|stuck| stuck.pending.is_none()),
            ..Arguments::default()
        };
        self.hung.add_skips(&mut arguments);
        let (mut child, call_state) = launch(arguments, Stdio::piped)?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (stdin, stdout) = pipes.ok_or_else(|| std::io::Error::other("no pipes"))?;
        debug!(pid = child.id(), "nvml poller started");
        Ok(Poller { child, stdin, stdout, call_state, unread: Vec::with_capacity(16 * 1024) })
    }

    /// Stores the effect of a command for pollers that are started later.
    fn note(&mut self, command: Command) {
        match command {
            Command::Release(seconds) => {
                self.hung.release();
                self.abandon_stuck();
                self.next = None; // dropping kills it
                let until = now_ns().saturating_add(seconds.saturating_mul(SECOND));
                self.translator().status.released_until_ns = Some(until);
            }
            Command::Resume => self.translator().status.released_until_ns = None,
            Command::List(_) | Command::Skip(..) | Command::Quit => {}
        }
    }

    /// Reads a poller, and those that replace it, until the current one ends, hangs or writes invalid data, or the source ends.
    async fn read(&mut self, mut poller: Poller) -> PollerEnd {
        let tick = (self.settings.call_timeout / 4).clamp(Duration::from_millis(10), BEAT);
        let mut timer = BeatTimer::new();
        timer.set_tick(tick, Duration::ZERO);
        let end = loop {
            tokio::select! {
                read = poller.stdout.read_buf(&mut poller.unread) => {
                    if !matches!(read, Ok(count) if count > 0) {
                        break PollerEnd::Died;
                    }
                    if !self.take_unread(&mut poller).await {
                        break PollerEnd::Malformed;
                    }
                    self.update_counters();
                    if self.is_well() {
                        // The next frames come after the poller's sleep, or later because it collects samples.
                        let wait = poller.call_state.sleeps_for(now_ns());
                        timer.set_tick(tick, wait.max(Duration::from_nanos(FLUSH_NS)));
                    }
                    share_wake_up();
                }
                opened = read_next(&mut self.next) => {
                    if let Some(next) = self.next.take().filter(|_| opened) {
                        let previous = std::mem::replace(&mut poller, next);
                        self.replace(previous, &poller).await;
                        if !self.take_unread(&mut poller).await {
                            break PollerEnd::Malformed;
                        }
                    } else {
                        self.hung.relapse();
                    }
                }
                command = self.commands.recv() => {
                    let Some(command) = command else { break PollerEnd::Done };
                    self.note(command);
                    poller.send(command).await;
                    // The command ends the poller's sleep.
                    timer.set_tick(tick, Duration::ZERO);
                }
                () = timer.expired() => {
                    let stalled = poller.call_state.stalled_for(tick);
                    let call = poller.call_state.call();
                    self.note_stall(stalled, call);
                    if stalled >= limit(call, &self.settings) {
                        break PollerEnd::Stuck(call);
                    }
                    if stalled >= stall_of(&self.settings) {
                        match self.substitute(poller).await {
                            Some(next) => poller = next,
                            None => return PollerEnd::Died,
                        }
                    }
                    poller = self.check_stuck(poller, tick).await;
                    self.check_next(tick);
                    let command = self.hung.tick(tick, &mut lock(&self.translator));
                    if let Some(command) = command {
                        poller.send(command).await;
                        for stuck in &mut self.stuck {
                            stuck.poller.send(command).await;
                        }
                    }
                    self.update_counters();
                    self.send().await; // records of what changed in this tick
                    let sleep = poller.call_state.sleeps_for(now_ns());
                    timer.set_tick(tick, if self.is_well() { sleep } else { Duration::ZERO });
                }
            }
        };
        self.end_poller(poller, &end).await;
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
        let Some(taken) = self.translate(&poller.unread).await else { return false };
        poller.unread.drain(..taken);
        poller.unread.len() <= MAX_UNREAD
    }

    /// Returns whether only the current poller runs, and no device hangs. Otherwise each beat is used.
    fn is_well(&self) -> bool {
        self.stuck.is_empty()
            && self.next.is_none()
            && self.hung.is_empty()
            && self.translator().status.stalled_since_ns.is_none()
    }

    /// Stores in the status whether no GPU is read, because the current poller is stalled or skips all GPUs.
    fn note_stall(&self, stalled: Duration, call: Call) {
        let max_stall = if call == Call::Nothing { DOWN_IDLE } else { DOWN };
        let status = &mut self.translator().status;
        let since = now_ns().saturating_sub(stalled.as_nanos() as u64);
        let is_none_read = stalled >= max_stall || self.hung.has_all(&status.devices);
        status.stalled_since_ns = is_none_read.then(|| *status.stalled_since_ns.get_or_insert(since));
    }

    /// Translates the poller's frames. Returns their length in bytes, or `None` if they are invalid.
    async fn translate(&mut self, bytes: &[u8]) -> Option<usize> {
        self.processes.sweep();
        let (taken, timings) = {
            let translator = &mut *lock(&self.translator);
            let (was_up, reason) = (translator.status.up, translator.status.reason.clone());
            translator.status.released_until_ns.take_if(|until| *until <= now_ns());
            let taken = translator.translate(bytes, &self.processes);
            translator.status.counters.malformed += u64::from(taken.is_none());
            let status = &translator.status;
            if (status.up, &status.reason) != (was_up, &reason) {
                if status.up {
                    info!(reason = %status.reason, "nvml is up");
                    translator.mark_missing(|device| self.hung.has(device));
                } else if status.released_until_ns.is_some() {
                    info!(reason = %status.reason, "nvml is closed temporarily");
                    self.hung.release();
                } else {
                    warn!(reason = %status.reason, "nvml is down");
                }
            }
            self.hung.revive(translator);
            (taken, std::mem::take(&mut translator.timings))
        };
        for (timing, ns) in timings {
            self.stats.observe(timing, Duration::from_nanos(ns.into()));
        }
        self.send().await;
        taken
    }

    /// Updates the call totals in the status, and the share of time in list calls.
    fn update_counters(&mut self) {
        let (now, calls) = (now_ns(), self.translator().all_totals());
        if self.share.back().is_some_and(|(time, _)| now - time < MIN_SHARE_NS) {
            return;
        }
        self.share.push_back((now, calls.list_ns));
        while self.share.len() > 2 && now - self.share[1].0 >= SHARE_WINDOW_NS {
            self.share.pop_front();
        }
        let share = self.share.front().filter(|(time, _)| *time < now).map_or(0.0, |&(time, list_ns)| {
            calls.list_ns.saturating_sub(list_ns) as f64 / (now - time) as f64
        });
        let counters = &mut self.translator().status.counters;
        (counters.calls, counters.list_share) = (calls, share);
    }

    /// Sends the translated frames to the ledger.
    async fn send(&self) {
        let frames = self.translator().take_frames(&self.processes);
        if !frames.is_empty() {
            // An error means that the daemon is about to end.
            let _ = self.out.send(Batch::of_host(frames)).await;
        }
    }

    /// Kills the poller without waiting long for its end. Ends its open readings, whose values are unknown now.
    async fn end_poller(&mut self, mut poller: Poller, end: &PollerEnd) {
        if let PollerEnd::Done = end {
            // A poller that still reads commands can shut NVML down properly.
            poller.send(Command::Quit).await;
            drop(poller.stdin);
            if timeout(Duration::from_millis(500), poller.child.wait()).await.is_ok() {
                return;
            }
        }
        let _ = poller.child.start_kill();
        let exit = timeout(Duration::from_millis(500), poller.child.wait()).await;
        // `code` becomes the error of the device, if the poller was in a call for a known GPU.
        let (call, code, reason) = match end {
            PollerEnd::Done => return,
            // Find the call during which the poller ended.
            PollerEnd::Died => {
                let call = poller.call_state.read().1;
                (call, Code::UNKNOWN, "nvml: the poller ended and is being replaced")
            }
            PollerEnd::Malformed => {
                let call = poller.call_state.call();
                (call, Code::UNKNOWN, "nvml: the poller wrote invalid data and was replaced")
            }
            PollerEnd::Stuck(call) => {
                (*call, Code::TIMEOUT, "nvml: a call did not return; the poller was replaced")
            }
        };
        warn!(?end, ?call, left_behind = !matches!(exit, Ok(Ok(_))), "nvml poller lost");
        {
            let translator = &mut *lock(&self.translator);
            translator.status.no_events |= matches!(end, PollerEnd::Stuck(Call::Events));
            translator.status.counters.hangs += u64::from(matches!(end, PollerEnd::Stuck(_)));
            if let Some(pending) = HungDevices::pending(call, translator) {
                self.hung.avoid(pending, code, translator);
            } else if !matches!(call, Call::Device(_) | Call::Lists(_) | Call::Index(_)) {
                translator.report_source(false, reason);
            }
            let stuck = self.stuck.iter().filter_map(|stuck| stuck.pending);
            translator.end_readings(&stuck.map(|pending| pending.target.index).collect::<Vec<_>>());
        }
        self.send().await;
    }
}

/// Returns how long a call may take before its poller gets a substitute.
fn stall_of(settings: &NvmlSettings) -> Duration {
    STALL.min(settings.call_timeout / 2)
}
