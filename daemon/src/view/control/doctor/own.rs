//! Findings about the daemon itself: paths, limits that were reached, and losses that no other check reports.

use super::finding::finding;
use crate::run_writer::{self, Doubt};
use crate::stats::Count;
use crate::view::ViewContext;
use crate::view::health::Health;
use gpumem_ledger::Snapshot;
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use rustix::fs::statvfs;

/// Free bytes in the store's file system below which a warning is given.
const LITTLE_ROOM: u64 = 64 << 20;
/// Share of deferred lists among the requested ones from which they are reported.
const MANY_DEFERRED: f64 = 0.5;

/// A counter whose increase has a remedy.
struct Told {
    count: Count,
    check: Check,
    subject: &'static str,
    /// Text after the count.
    what: &'static str,
    fix: &'static str,
}

const fn told(
    count: Count,
    check: Check,
    subject: &'static str,
    what: &'static str,
    fix: &'static str,
) -> Told {
    Told { count, check, subject, what, fix }
}

const SAME_VERSION: &str = "install gpumemd and libgpumem.so of one version";
const HOST_PIDS: &str = "run the daemon in the host's PID namespace (hostPID, --pid=host)";
const SEE_LOG: &str = "see the daemon's log: which process, and what it sent";
const ENOUGH_FILES: &str = "raise the daemon's limit of open files (LimitNOFILE=, ulimit -n)";

/// Counters of refused peers and of omitted data.
const TOLD: [Told; 30] = [
    told(
        Count::RefusedFull,
        Check::AgentLimits,
        "agents",
        "agents found all connections taken",
        "raise agent.connections; each takes three of the open files that LimitNOFILE= allows",
    ),
    told(
        Count::RefusedUid,
        Check::AgentLimits,
        "agents",
        "agents found their user's connections taken",
        "raise agent.connections_per_uid",
    ),
    told(
        Count::RefusedWaiting,
        Check::AgentLimits,
        "agents",
        "peers came while too many had not said hello",
        "raise agent.connections_without_hello; if it goes on, somebody opens connections and says nothing",
    ),
    told(
        Count::RefusedSilent,
        Check::AgentLimits,
        "agents",
        "peers said no hello in time",
        "raise agent.hello_timeout_s if the machine is that busy; agents come again by themselves",
    ),
    told(
        Count::RefusedDescriptors,
        Check::AgentLimits,
        "agents",
        "agents came without their memory, or with more than that",
        SAME_VERSION,
    ),
    told(
        Count::RefusedSize,
        Check::AgentLimits,
        "agents",
        "agents handed over a larger memory than is taken",
        "raise agent.shared_mib, or lower GPUMEM_RING_SLOTS and GPUMEM_LIVE_ROWS of those processes",
    ),
    told(
        Count::AgentWaited,
        Check::AgentLimits,
        "agents",
        "times an agent was read later because it sent more than it may",
        "raise agent.mib_per_s; what waits too long is lost to the agent's full ring, and counted there",
    ),
    told(
        Count::SkippedDevices,
        Check::AgentLimits,
        "agents",
        "records of agents named more devices than a process may",
        SEE_LOG,
    ),
    told(
        Count::AcceptFailures,
        Check::AgentLimits,
        "agents",
        "connections could not be accepted",
        ENOUGH_FILES,
    ),
    told(
        Count::RefusedRows,
        Check::AgentMemory,
        "agents",
        "records were refused of processes with too many live allocations and blocks",
        "raise agent.rows_per_process; the sums of such a process are bounds",
    ),
    told(
        Count::RefusedOfUser,
        Check::AgentMemory,
        "agents",
        "records were refused of processes of a user who has used up their share of the daemon's memory",
        "raise agent.memory_mib_per_uid and agent.memory_mib; processes.partial says whose",
    ),
    told(
        Count::RefusedOfAll,
        Check::AgentMemory,
        "agents",
        "records were refused because the daemon may remember no more",
        "raise agent.memory_mib, and MemoryMax= of the unit with it",
    ),
    told(
        Count::ControlFull,
        Check::ControlConnections,
        "control",
        "callers found all connections taken",
        "raise control.connections",
    ),
    told(
        Count::ControlOfUid,
        Check::ControlConnections,
        "control",
        "callers found their user's connections taken",
        "raise control.connections_per_uid, or look who asks all the time",
    ),
    told(
        Count::ControlWaited,
        Check::ControlShare,
        "control",
        "answers were made later because their user asks for much",
        "raise control.share_per_uid, or look who asks all the time",
    ),
    told(
        Count::RefusedVersion,
        Check::AgentProtocol,
        "agents",
        "agents speak another version of the protocol",
        SAME_VERSION,
    ),
    told(
        Count::SkippedUnknown,
        Check::AgentProtocol,
        "agents",
        "records of agents are of a kind that this daemon does not know",
        SAME_VERSION,
    ),
    told(
        Count::RefusedIdentity,
        Check::AgentIdentity,
        "agents",
        "agents could not be told who they are",
        HOST_PIDS,
    ),
    told(
        Count::RefusedGone,
        Check::AgentIdentity,
        "agents",
        "agents had ended and another process had their pid before their hello was read: they have no run",
        "see why the daemon is late (processor time, a stopped daemon), or raise kernel.pid_max",
    ),
    told(
        Count::SkippedOver,
        Check::AgentPackets,
        "agents",
        "records of agents were read after the runs of their processes had been closed: these runs are incomplete",
        "see why the daemon is late (processor time, a stopped daemon)",
    ),
    told(
        Count::RefusedMemory,
        Check::AgentPackets,
        "agents",
        "agents handed over memory that is not sealed as it must be",
        SAME_VERSION,
    ),
    told(
        Count::DroppedFraming,
        Check::AgentPackets,
        "agents",
        "agents were dropped for broken packets",
        SEE_LOG,
    ),
    told(
        Count::DroppedOversize,
        Check::AgentPackets,
        "agents",
        "agents were dropped for packets that are too large",
        SEE_LOG,
    ),
    told(
        Count::DroppedTime,
        Check::AgentClock,
        "agents",
        "agents were dropped because their clock is not the daemon's",
        "start the process in the daemon's time namespace (no unshare --time)",
    ),
    told(
        Count::SeriesFolded,
        Check::MetricsSeries,
        "metrics",
        "series were left out of scrapes",
        "raise metrics.max_series, or have fewer categories (metrics.rules)",
    ),
    told(
        Count::HttpFull,
        Check::MetricsConnections,
        "metrics",
        "connections were closed because all were taken: scrapes, or who says nothing",
        "raise metrics.connections, or look who holds them (ss -tn sport = :9837)",
    ),
    told(
        Count::ReloadErrors,
        Check::DaemonConfig,
        "configuration",
        "times it was refused, and the old one kept",
        "gpumemd --check tells what is wrong with it; then systemctl reload gpumemd",
    ),
    told(
        Count::RecordingLost,
        Check::Recording,
        "recording",
        "records are not in it: the disk was too slow, or full",
        "record to a faster disk; sums of its replay are bounds",
    ),
    told(
        Count::StoreDropped,
        Check::StoreLost,
        "store",
        "runs were never stored: too many, or too large ones, waited while the store was out of order or slow",
        "mend what is said of the store, or raise runs.waiting_mib",
    ),
    told(
        Count::StoreNotShown,
        Check::StoreAnswers,
        "store",
        "answers lack runs, because they would have had more than 256 stored ones, or 32 MiB",
        "ask for fewer: gpumemctl runs lists all that are in the store",
    ),
];

/// Adds all findings about the daemon.
pub(super) fn look(context: &ViewContext, health: &Health, findings: &mut Vec<Finding>) {
    of_calls(health, findings);
    of_store(&context.keeper.status(), findings);
    findings.push(match context.fixed.metrics {
        Some(address) => {
            let text = format!("http://{address}/metrics");
            finding(Check::Metrics, State::Ok, "metrics", text, None)
        }
        None => {
            let text = "served on the control socket only (GET /v1/metrics)";
            let fix = "metrics.listen = \"127.0.0.1:9837\" lets Prometheus come";
            finding(Check::Metrics, State::Ok, "metrics", text, Some(fix))
        }
    });
    for told in &TOLD {
        let count = context.stats.get(told.count);
        // An invalid configuration that was corrected later needs no report.
        let is_over = told.count == Count::ReloadErrors && context.stats.get(Count::Reloads) > 0;
        if count > 0 && !is_over {
            let text = format!("{count} {} since the start", told.what);
            findings.push(finding(told.check, State::Warn, told.subject, text, Some(told.fix)));
        }
    }
}

fn of_calls(health: &Health, findings: &mut Vec<Finding>) {
    let refused = health.nvml.counters.refused;
    if refused > 0 {
        let text = format!(
            "{refused} values of the driver were refused since the start: more than the size of the GPU"
        );
        let fix = "see the kernel's log (dmesg | grep -e NVRM -e Xid); reset the GPU or reload the driver";
        findings.push(finding(Check::NvmlCalls, State::Warn, "nvml", text, Some(fix)));
    }
    let hangs = health.nvml.counters.hangs;
    if hangs > 0 {
        let text = format!("{hangs} calls did not return since the start, and their process was replaced");
        let fix =
            "see dmesg (NVRM, Xid): a GPU may be about to fail; nvml.call_timeout_s is how long is waited";
        findings.push(finding(Check::NvmlCalls, State::Warn, "nvml", text, Some(fix)));
    }
    let counters = &health.nvml.counters;
    let (lists, deferred) = (counters.list_calls as f64, counters.lists_deferred as f64);
    if deferred > 100.0 && deferred > MANY_DEFERRED * (lists + deferred) {
        let text = format!(
            "{deferred} of {} process lists were put off, because lists stop the driver and may take only so much of \
             the time: bytes of processes are older than they could be",
            lists + deferred
        );
        let fix = "raise nvml.list_budget, or nvml.list_every_s if that is recent enough";
        findings.push(finding(Check::NvmlCalls, State::Ok, "nvml", text, Some(fix)));
    }
}

fn of_store(store: &run_writer::Status, findings: &mut Vec<Finding>) {
    let mut say = |check, state, text: String, fix: Option<&str>| {
        findings.push(finding(check, state, "store", text, fix));
    };
    let waiting = format!("{} runs wait in memory ({} MiB)", store.waiting, store.waiting_bytes >> 20);
    match &store.reason {
        _ if let Some(time) = store.stuck => {
            let text = format!("its disk has not answered for {} s; {waiting}", time.as_secs());
            say(
                Check::Store,
                State::Bad,
                text,
                Some("look into the file system: it is slow, or stands still"),
            );
        }
        Some(reason) => say(Check::Store, State::Bad, format!("{reason}; {waiting}"), store.remedy),
        None if store.is_late => {
            let text = format!(
                "{} runs with news are not in it, the oldest for {} s: a kill of the daemon would cost that",
                store.waiting + store.queued,
                store.oldest.as_secs()
            );
            let fix =
                "its disk is slow for so many processes: use a faster one, or raise runs.checkpoint_every_s";
            say(Check::Store, State::Warn, text, Some(fix));
        }
        None => say(Check::Store, State::Ok, store.path.display().to_string(), None),
    }
    if let Some(aside) = &store.set_aside {
        let text = format!("it was damaged, is now {}, and a new one was begun", aside.display());
        say(Check::StoreDamage, State::Warn, text, Some("look into the file system's log"));
    }
    if store.is_too_large {
        let text = "it is larger than runs.max_size_mib, and all that is in it is of living processes or was imported";
        say(Check::StoreSize, State::Warn, text.to_owned(), Some("raise runs.max_size_mib"));
    }
    if let Some(doubt) = store.age_doubt {
        let text = format!("no run is deleted for its age (runs.keep_days): {doubt}");
        // A doubt that only needs time is not a problem.
        let is_wrong = !matches!(doubt, Doubt::Begun);
        let state = if is_wrong { State::Warn } else { State::Ok };
        say(
            Check::StoreAge,
            state,
            text,
            is_wrong.then_some("look whether the clock is right: timedatectl, date"),
        );
    }
    let room = store.path.parent().and_then(|folder| statvfs(folder).ok());
    if let Some(left) =
        room.map(|room| room.f_bavail.saturating_mul(room.f_frsize)).filter(|left| *left < LITTLE_ROOM)
    {
        let text = format!("its file system has {} MiB left", left >> 20);
        let fix = "make room, lower runs.keep_days or runs.max_size_mib, or move it: runs.store";
        say(Check::StoreRoom, State::Warn, text, Some(fix));
    }
}

/// Returns names and values for the user.
pub(super) fn facts(
    context: &ViewContext,
    snapshot: &Snapshot,
    health: &Health,
    now_ns: u64,
) -> Vec<(String, String)> {
    let running = snapshot.processes.iter().filter(|process| process.ended.is_none());
    let store = context.keeper.status();
    let config = context.fixed.config.display();
    let config = match context.fixed.config.exists() {
        true => config.to_string(),
        false => format!("{config} (not there: defaults)"),
    };
    let mut facts = vec![
        ("devices", snapshot.devices.len().to_string()),
        ("processes", running.count().to_string()),
        ("agents", health.agents.to_string()),
        ("store", store.path.display().to_string()),
        ("configuration", config),
    ];
    if let Some(address) = context.fixed.metrics {
        facts.push(("metrics", address.to_string()));
    }
    // Lets users in another namespace notice the difference.
    for (name, link) in [("pid namespace", "pid"), ("time namespace", "time")] {
        let link = std::fs::read_link(format!("/proc/self/ns/{link}"));
        facts.extend(link.ok().map(|link| (name, link.display().to_string())));
    }
    facts.push(("clock", now_ns.to_string()));
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
