//! Assembles the daemon: the only file that names sources and views.

use crate::aggregator::recorder::Recorder;
use crate::aggregator::{Aggregator, Command, SnapshotReader};
use crate::clock;
use crate::config::{self, Change, Config, Home, Keys, Settings};
use crate::limits::user_share::UserShares;
use crate::os::fit_connections;
use crate::run_writer::RunWriter;
use crate::service::{self, notify};
use crate::signals::Pulse;
use crate::sockets;
use crate::source::agent::{self, Agents};
use crate::source::kernel::Kernel;
use crate::source::nvml::Nvml;
use crate::source::process::{EndedProcess, Processes};
use crate::source::{Batch, frame_of};
use crate::stats::{Count, Stats};
use crate::view::Health;
use crate::view::self_report::{self, Format};
use crate::view::{self, AgentCommand, Sources, ViewContext, control, http};
use gpumem_ledger::{DeviceName, ProcessKey};
use gpumem_report::{GroupBy, csv, json};
use gpumem_wire::{AskKind, Body, Reading, Stamp};
use rustix::net::{AddressFamily, SocketType};
use sd_notify::NotifyState;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Notify, mpsc};

/// Capacity of the aggregator's inbox (the queue from sources), in batches of up to 60 KiB: 4 MiB at most. A source waits while
/// the inbox is full.
const INBOX: usize = 64;
/// Minimum interval between two readings of late facts about processes, such as command lines. They are read in wake-ups for
/// other work; without any, up to 0.5 s later.
const FACTS_INTERVAL: Duration = Duration::from_millis(750);
/// Delays before each retry to read the exit status of an ended process.
const STATUS_RETRIES: [Duration; 3] =
    [Duration::from_millis(1), Duration::from_millis(9), Duration::from_millis(40)];
/// At shutdown, maximum time for writing each run to the store once more. systemd waits for 5 s (systemd/gpumemd.service).
const LAST_WRITE: Duration = Duration::from_secs(3);

/// Signals that end the daemon or reload its configuration.
#[derive(Debug)]
pub struct Signals {
    /// Receives an event when the daemon must end.
    pub end: Pulse,
    /// Receives an event when the configuration must be reloaded.
    pub reload: Pulse,
}

/// Source of the configuration, for reloads.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Path of the configuration file; `None`: the default path.
    pub file: Option<PathBuf>,
    /// Whether the daemon serves one user and ends when idle.
    pub private: bool,
    /// Paths and ids of the user who runs the daemon.
    pub home: Home,
    /// Whether to use sockets that systemd passes, and to send notifications to systemd.
    pub service: bool,
}

impl Setup {
    pub(crate) fn config(&self) -> Result<Config, config::Error> {
        Config::load(self.file.as_deref())
    }

    /// Reads the configuration and returns its settings.
    pub fn settings(&self) -> Result<Settings, config::Error> {
        Settings::of(&self.config()?, self.private, &self.home)
    }
}

/// Runs the daemon until a signal ends it, or it is private and idle.
///
/// # Errors
/// Errors during the start, in the configuration or a socket. Later errors do not end the daemon.
pub async fn run(setup: Setup, settings: Settings, mut signals: Signals) -> anyhow::Result<()> {
    let stats = Arc::new(Stats::new()?);
    let keys = Keys::of(&setup.config()?);
    let recording_resumed = Arc::new(Notify::new());
    let recorder = record(&settings, &stats, &recording_resumed)?;
    let mut listeners = Listeners::open(&setup, &settings)?;

    let (run_writer, writer_thread) =
        RunWriter::start(settings.store.clone(), settings.retention, Arc::clone(&stats))?;
    run_writer.set_queue_limit(settings.waiting_bytes);
    let (inbox, batches) = mpsc::channel::<Batch>(INBOX);
    let (queries, query_inbox) = mpsc::channel(16);
    let (commands, command_inbox) = mpsc::channel(16);
    let (mut aggregator, reader) = Aggregator::new(Arc::clone(&stats), run_writer.clone(), settings.pace);
    aggregator.record(recorder);
    let mut aggregator = tokio::spawn(aggregator.run(batches, query_inbox, command_inbox));

    let processes = Processes::with(settings.who.clone());
    let kernel = Kernel::new(&settings.kernel);
    let nvml = Nvml::start(settings.nvml.clone(), processes.clone(), inbox.clone(), Arc::clone(&stats));
    let hinted = nvml.clone();
    let hint = Box::new(move |uuid| hinted.hint(DeviceName::Gpu(uuid)));
    let (wanted, connections) = (settings.limits.connections, fit_connections(settings.limits.connections));
    if connections < wanted {
        tracing::warn!(connections, wanted, "the limit of open files is too low for that many agents");
    }
    let agents = Agents::new(settings.limits, processes.clone(), inbox.clone(), Arc::clone(&stats), hint);
    let sources = LiveSources { nvml, agents: Arc::clone(&agents), kernel: kernel.clone() };
    let config = setup.file.clone().unwrap_or_else(|| config::USUAL_PATH.into());
    let metrics = listeners.http.as_ref().and_then(|listener| listener.local_addr().ok());
    let context = Arc::new(ViewContext {
        fixed: view::StartupInfo { config, metrics },
        reader: reader.clone(),
        stats,
        run_writer,
        queries,
        sources: Box::new(sources),
        shown: settings.shown.clone().into(),
        is_reload_refused: AtomicBool::new(false),
        shares: UserShares::default(),
        rendered: Default::default(),
    });
    set_self_reports(&agents, &context);
    let http_connections = Arc::new(AtomicUsize::new(settings.http_connections));
    if let Some(kept) = listeners.kept.take() {
        agents.inherit(kept).await;
    }
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(Arc::clone(&agents).listen(listeners.agent));
    tasks.spawn(control::serve(listeners.control, Arc::clone(&context)));
    if let Some(listener) = listeners.http {
        tasks.spawn(http::serve(listener, Arc::clone(&context), Arc::clone(&http_connections)));
    }
    tasks.spawn(forward_exits(processes.clone(), Arc::clone(&agents), kernel.clone(), inbox.clone()));
    tasks.spawn(forward_facts(processes, kernel, inbox));
    if setup.service {
        let status_context = Arc::clone(&context);
        tasks.spawn(service::watchdog(reader.clone(), move || status(&status_context.sources.health())));
        notify(&[NotifyState::Ready, NotifyState::Status("watching")]);
    }
    tracing::info!(
        runtime_dir = %settings.runtime_dir.display(),
        metrics = ?settings.listen,
        store = %settings.store.display(),
        private = settings.private,
        "gpumemd is ready"
    );

    let mut reloader =
        Reloader { setup, settings, keys, agents, context, http_connections, commands, recording_resumed };
    loop {
        let idle = reloader.settings.idle_exit;
        tokio::select! {
            () = signals.end.next() => break,
            ended = &mut aggregator => anyhow::bail!("the ledger's task ended: {ended:?}"),
            () = signals.reload.next() => reloader.reload().await,
            () = reloader.recording_resumed.notified() => reloader.agents.resync(),
            () = until_idle(idle, &reloader.agents, &reader) => {
                tracing::info!("this private daemon ends because it is idle");
                break;
            }
        }
    }
    tracing::info!("gpumemd ends");
    if reloader.setup.service {
        notify(&[NotifyState::Stopping]);
    }
    tasks.abort_all();
    reloader.agents.finish().await;
    // Fails only if the aggregator has ended.
    let _ = reloader.commands.send(Command::End).await;
    let _ = aggregator.await;
    writer_thread.end(LAST_WRITE);
    Ok(())
}

/// Sets the function that makes a report when a program requests one about itself. The other views show the same report.
fn set_self_reports(agents: &Agents, context: &Arc<ViewContext>) {
    let context = Arc::clone(context);
    agents.answer_with(Box::new(move |key, uid, what, options| {
        let context = Arc::clone(&context);
        Box::pin(async move {
            let unanswered = |errno, text: &str| agent::Unanswered { errno, text: text.to_owned() };
            let format: Format = match (what, agent::option(&options, "format")) {
                (AskKind::ReportText, Some("csv")) => |report, _| csv::csv(report),
                (AskKind::ReportText, _) => self_report::text,
                (AskKind::ReportJson, _) => |report, _| json::json(report),
                (AskKind::Unknown, _) => {
                    return Err(unanswered(22, "this daemon does not support this request"));
                }
            };
            let by = match agent::option(&options, "by") {
                Some("layer") => Some(GroupBy::Layer),
                Some("structure") => Some(GroupBy::Structure),
                Some("tag") => Some(GroupBy::Tag),
                Some(_) => return Err(unanswered(22, "by= must be layer, structure or tag")),
                None => None,
            };
            let all = agent::option(&options, "all") == Some("1");
            let none = "the daemon has no run of this process: it has not used a GPU so far";
            let report = self_report::report(context, (key, uid), by, format, all).await;
            report.ok_or_else(|| unanswered(2, none))
        })
    }));
}

fn record(
    settings: &Settings,
    stats: &Arc<Stats>,
    resumed: &Arc<Notify>,
) -> anyhow::Result<Option<Recorder>> {
    use anyhow::Context;
    let Some(path) = &settings.record else { return Ok(None) };
    let recorder = Recorder::start(path, Arc::clone(stats), Arc::clone(resumed));
    recorder.map(Some).with_context(|| format!("record = {path:?}: a new file cannot be created"))
}

struct Listeners {
    agent: UnixListener,
    control: UnixListener,
    http: Option<TcpListener>,
    /// Descriptors that systemd kept from an earlier daemon; `None` if systemd does not keep any.
    kept: Option<Vec<(String, OwnedFd)>>,
    _runtime_dir_lock: Option<std::fs::File>,
}

impl Listeners {
    fn open(setup: &Setup, settings: &Settings) -> anyhow::Result<Self> {
        let mut passed = if setup.service { sockets::passed()? } else { Vec::new() };
        let mut take = |name| passed.extract_if(.., |(passed, _)| passed == name).last().map(|(_, fd)| fd);
        let (agent, control, http) = (take("agent"), take("control"), take("http"));
        let mode = if settings.private { 0o700 } else { 0o755 };
        let mut lock = None;
        if agent.is_none() || control.is_none() {
            sockets::runtime_dir(&settings.runtime_dir, mode)?;
            lock = Some(sockets::lock(&settings.runtime_dir)?);
        }
        // A service manager keeps the connections of agents only if it also passes the agents' socket.
        let kept = agent.is_some().then_some(passed);
        let agent = match agent {
            Some(fd) => sockets::check_passed("agent", fd, AddressFamily::UNIX, SocketType::SEQPACKET)?,
            None => sockets::listen_to_agents(&settings.runtime_dir, mode)?,
        };
        let http = match (http, settings.listen) {
            (Some(fd), _) => {
                let fd = sockets::check_passed("http", fd, AddressFamily::INET, SocketType::STREAM)?;
                Some(TcpListener::from_std(fd.into())?)
            }
            (None, Some(address)) => Some(sockets::tcp(address)?),
            (None, None) => None,
        };
        // The control socket is opened last, so a client that can connect to it can connect to all sockets.
        let control = match control {
            Some(fd) => sockets::check_passed("control", fd, AddressFamily::UNIX, SocketType::STREAM)?,
            None => sockets::listen(&settings.runtime_dir.join("control.sock"), SocketType::STREAM, 0o666)?,
        };
        Ok(Listeners {
            agent: UnixListener::from_std(agent.into())?,
            control: UnixListener::from_std(control.into())?,
            http,
            kept,
            _runtime_dir_lock: lock,
        })
    }
}

struct Reloader {
    setup: Setup,
    settings: Settings,
    /// Values of the configuration keys that are in effect.
    keys: Keys,
    agents: Arc<Agents>,
    context: Arc<ViewContext>,
    http_connections: Arc<AtomicUsize>,
    commands: mpsc::Sender<Command>,
    recording_resumed: Arc<Notify>,
}

impl Reloader {
    /// Reloads the configuration file. An invalid file changes nothing.
    async fn reload(&mut self) {
        if self.setup.service {
            match NotifyState::monotonic_usec_now() {
                Ok(now) => notify(&[NotifyState::Reloading, now]),
                Err(_) => notify(&[NotifyState::Reloading]),
            }
        }
        let result = self.apply_settings().await;
        self.context.is_reload_refused.store(result.is_err(), Ordering::Relaxed);
        match result {
            Ok(()) => self.context.stats.add(Count::Reloads, 1),
            Err(error) => {
                self.context.stats.add(Count::ReloadErrors, 1);
                tracing::error!(error = error_chain(&error), "the configuration stays as it was");
            }
        }
        if self.setup.service {
            notify(&[NotifyState::Ready]);
        }
    }

    async fn apply_settings(&mut self) -> anyhow::Result<()> {
        let config = self.setup.config()?;
        let new = Settings::of(&config, self.setup.private, &self.setup.home)?;
        if self.settings.record != new.record {
            let recorder = record(&new, &self.context.stats, &self.recording_resumed)?;
            let _ = self.commands.send(Command::Record(recorder)).await;
            self.agents.resync();
        }
        self.agents.set_limits(new.limits);
        self.http_connections.store(new.http_connections, Ordering::Relaxed);
        self.context.show(new.shown.clone());
        let _ = self.commands.send(Command::AggregatorSettings(new.pace)).await;
        self.context.run_writer.set_queue_limit(new.waiting_bytes);
        if self.settings.retention != new.retention {
            self.context.run_writer.set_retention(new.retention);
        }
        let changes = self.keys.take(&Keys::of(&config));
        if changes.is_empty() {
            tracing::info!("configuration reloaded: no change");
        }
        for Change { key, old, new, at_once } in changes {
            if at_once {
                tracing::info!(key, old, new, "configuration reloaded: key changed");
            } else {
                tracing::warn!(key, old, new, "configuration reloaded: this key needs a restart");
            }
        }
        // Settings that need a restart keep their present values.
        self.settings = Settings {
            runtime_dir: self.settings.runtime_dir.clone(),
            store: self.settings.store.clone(),
            nvml: self.settings.nvml.clone(),
            kernel: self.settings.kernel.clone(),
            who: self.settings.who.clone(),
            listen: self.settings.listen,
            ..new
        };
        Ok(())
    }
}

/// Returns when no agent was connected and no view was read for `limit`. Never returns if `limit` is `None`.
async fn until_idle(limit: Option<Duration>, agents: &Agents, reader: &SnapshotReader) {
    let Some(limit) = limit else { return std::future::pending().await };
    let mut busy_ns = clock::now_ns();
    // Agents are counted only at each check, so the daemon may end early by up to one interval between checks.
    let longest = (limit / 10).clamp(Duration::from_millis(10), Duration::from_millis(250));
    loop {
        if agents.connections().0 > 0 {
            busy_ns = clock::now_ns();
        }
        let idle_ns = clock::now_ns().saturating_sub(busy_ns.max(reader.read_ns()));
        let Some(left) = limit.checked_sub(Duration::from_nanos(idle_ns)) else { return };
        tokio::time::sleep(left.clamp(Duration::from_millis(10), longest)).await;
    }
}

/// Sends the ends of processes to the aggregator, with the kernel's reports about them.
async fn forward_exits(
    processes: Processes,
    agents: Arc<Agents>,
    kernel: Kernel,
    inbox: mpsc::Sender<Batch>,
) {
    loop {
        let gone = processes.next_ended().await;
        let time_ns = clock::now_ns();
        agents.ended(gone.key);
        match gone.status() {
            // The status is unknown: the parent has not waited for the process, or the status cannot be read.
            None => drop(tokio::spawn(late_end(gone, time_ns, kernel.clone(), inbox.clone()))),
            status if inbox.send(end(&gone, time_ns, status, &kernel)).await.is_err() => return,
            _ => {}
        }
    }
}

/// Sends the end of a process to the aggregator when its exit status is known, or after the last retry.
async fn late_end(gone: EndedProcess, time_ns: u64, kernel: Kernel, inbox: mpsc::Sender<Batch>) {
    let mut status = None;
    for wait in STATUS_RETRIES {
        tokio::time::sleep(wait).await;
        status = gone.status();
        if status.is_some() {
            break;
        }
    }
    // Fails only if the aggregator has ended.
    let _ = inbox.send(end(&gone, time_ns, status, &kernel)).await;
}

fn end(gone: &EndedProcess, time_ns: u64, status: Option<u64>, kernel: &Kernel) -> Batch {
    let stamp = Stamp { thread: gone.key.pid, time_ns, ..Stamp::default() };
    let start_ticks = gone.key.start_ticks;
    let mut frames = Vec::new();
    let facts = kernel.end_facts(gone.key, clock::now_ns());
    if !facts.is_empty() {
        let (uid, parent_pid) = (Reading(gone.facts.uid), gone.facts.parent_pid.into());
        let body = Body::ProcessFacts { start_ticks, uid, parent_pid, facts: &facts };
        frames = frame_of(stamp, body);
    }
    frames.extend(frame_of(stamp, Body::ProcessGone { start_ticks, status: Reading(status) }));
    Batch::of_host(frames)
}

/// Sends facts that are known late, such as a command line, to the aggregator. Reads the kernel's log at the same interval.
async fn forward_facts(processes: Processes, kernel: Kernel, inbox: mpsc::Sender<Batch>) {
    loop {
        clock::next_wake_up(FACTS_INTERVAL).await;
        let now_ns = clock::now_ns();
        kernel.read_log(now_ns);
        processes.take_new().into_iter().for_each(|key| kernel.note_start(key));
        processes.read_late_facts();
        let mut frames = Vec::new();
        processes.take_facts(now_ns, &mut frames);
        if !frames.is_empty() && inbox.send(Batch::of_host(frames)).await.is_err() {
            return;
        }
    }
}

fn status(health: &Health) -> String {
    let nvml = health.nvml.problem().map_or_else(|| "up".to_owned(), |problem| format!("down: {problem}"));
    format!("{} agents, nvml {nvml}", health.agents)
}

struct LiveSources {
    nvml: Nvml,
    agents: Arc<Agents>,
    kernel: Kernel,
}

impl Sources for LiveSources {
    fn health(&self) -> Health {
        let (nvml, kernel) = (self.nvml.status(), self.kernel.status());
        let (agents, agents_waiting) = self.agents.connections();
        Health { nvml, kernel_log: kernel.log, kernel_problem: kernel.problem, agents, agents_waiting }
    }

    fn release(&self, time: Duration) {
        self.nvml.release(time);
    }

    fn send_command(&self, key: ProcessKey, command: AgentCommand) -> view::CommandResult {
        let agents = Arc::clone(&self.agents);
        Box::pin(async move { agents.command(key, command).await })
    }
}

/// Returns the texts of an error and its causes. A cause is left out if the text before it contains its text.
pub fn error_chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        let cause = cause.trim_end();
        if text.is_empty() {
            cause.clone_into(&mut text);
        } else if !text.contains(cause) {
            text.push_str(": ");
            text.push_str(cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::error_chain;
    use anyhow::anyhow;

    #[test]
    fn each_cause_is_written_once() {
        let cause = anyhow!("no such file\n");
        assert_eq!(error_chain(&cause), "no such file");
        assert_eq!(
            error_chain(&anyhow!("no such file").context("a.toml: no such file, make one")),
            "a.toml: no such file, make one"
        );
        assert_eq!(error_chain(&anyhow!("no such file").context("opening")), "opening: no such file");
    }
}
