//! Makes the findings about the daemon itself: its store and sockets, limits that were reached, and lost data.

use super::finding::finding;
use crate::nvml_status::NvmlCounters;
use crate::run_writer::{self, Doubt};
use crate::stats::Count;
use crate::view::{Health, ViewContext};
use gpumem_ledger::Snapshot;
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use rustix::fs::statvfs;
use std::sync::atomic::Ordering;

/// Number of free bytes in the store's file system below which a warning is given.
const LITTLE_ROOM: u64 = 64 << 20;
/// If a larger share of the requested process lists was deferred, a finding reports that.
const MANY_DEFERRED: f64 = 0.5;

const SAME_VERSION: &str = "install gpumemd and libgpumem.so of one version";
const HOST_PIDS: &str = "run the daemon in the host's PID namespace (hostPID, --pid=host)";
const SEE_LOG: &str = "see the daemon's log: which process, and what it sent";
const LATE: &str = "find out why the daemon is late (processor time, a stopped daemon)";
const ENOUGH_FILES: &str = "raise the daemon's limit of open files (LimitNOFILE=, ulimit -n)";

/// Makes tables of counters whose increase has a remedy. Each check has a subject, and one entry per counter: the text after
/// its number, and the remedy.
macro_rules! counters {
    ($($check:ident $subject:literal { $($count:ident: $text:literal, $remedy:expr;)* })*) => {
        &[$($((Check::$check, $subject, Count::$count, $text, $remedy),)*)*]
    };
}

const COUNTERS: &[(Check, &str, Count, &str, &str)] = counters! {
    AgentLimits "agents" {
        RefusedFull: "agents were refused because all connections were taken",
            "raise agent.connections; each takes three of the open files that LimitNOFILE= allows";
        RefusedUid: "agents were refused because all connections of their user were taken",
            "raise agent.connections_per_uid";
        RefusedWaiting: "peers were refused because too many had not sent a hello",
            "raise agent.connections_without_hello; if it continues, a program opens connections and sends nothing";
        RefusedSilent: "peers sent no hello in time",
            "raise agent.hello_timeout_s if the machine is busy; agents connect again";
        RefusedDescriptors: "agents sent no shared memory, or more than one descriptor", SAME_VERSION;
        RefusedSize: "agents were refused because their shared memory is too large",
            "raise agent.shared_mib, or lower GPUMEM_RING_SLOTS and GPUMEM_LIVE_ROWS of those processes";
        AgentWaited: "times reading an agent was delayed because it exceeded agent.mib_per_s",
            "raise agent.mib_per_s; records that the agent's full ring loses meanwhile are counted as lost";
        SkippedDevices: "records of agents named more devices than a process may have", SEE_LOG;
        AcceptFailures: "connections could not be accepted", ENOUGH_FILES;
    }
    AgentMemory "agents" {
        RefusedRows: "records were refused: their processes have too many live allocations and blocks",
            "raise agent.rows_per_process; the sums of such a process are bounds";
        RefusedOfUser: "records were refused: their user has used up its share of the daemon's memory",
            "raise agent.memory_mib_per_uid and agent.memory_mib; processes.partial names the processes";
        RefusedOfAll: "records were refused: the daemon's memory for records is used up",
            "raise agent.memory_mib, and MemoryMax= of the unit with it";
    }
    ControlConnections "control" {
        ControlFull: "requests to the control socket were refused because all connections were taken", "raise control.connections";
        ControlOfUid: "requests to the control socket were refused because all connections of their user were taken",
            "raise control.connections_per_uid, or find the program that opens them";
    }
    ControlShare "control" {
        ControlWaited: "answers were delayed because their user had exceeded control.share_per_uid",
            "raise control.share_per_uid, or find the program that sends the requests";
    }
    AgentProtocol "agents" {
        RefusedVersion: "agents have another version of the protocol", SAME_VERSION;
        SkippedUnknown: "records of agents are of a kind unknown to this daemon", SAME_VERSION;
    }
    AgentIdentity "agents" {
        RefusedIdentity: "agents could not be identified", HOST_PIDS;
        RefusedGone: "agents have no run: they had ended, and another process had their pid before the daemon read their first message",
            "find out why the daemon is late (processor time, a stopped daemon), or raise kernel.pid_max";
    }
    AgentPackets "agents" {
        SkippedOver: "records of agents were read after the runs of their processes had been closed: these runs are incomplete",
            LATE;
        RefusedMemory: "agents sent shared memory with missing seals or an invalid header", SAME_VERSION;
        DroppedFraming: "agents were disconnected because of malformed packets", SEE_LOG;
        DroppedOversize: "agents were disconnected because of too large packets", SEE_LOG;
    }
    AgentClock "agents" {
        DroppedTime: "agents were disconnected because their clock is not the daemon's",
            "start the process in the daemon's time namespace (no unshare --time)";
    }
    MetricsSeries "metrics" {
        SeriesFolded: "series were omitted from scrapes",
            "raise metrics.max_series, or use rules with fewer categories (metrics.rules)";
    }
    MetricsConnections "metrics" {
        HttpFull: "idle connections were closed because all were taken",
            "raise metrics.connections, or find the clients that hold them (ss -tn sport = :9837)";
    }
    Recording "recording" {
        RecordingLost: "records are missing in the recording because the disk was too slow or full",
            "record to a faster disk; sums from this recording are bounds";
    }
    StoreLost "store" {
        StoreDropped: "runs were never stored: too many or too large ones waited while the store was slow or not writable",
            "fix the run-store problem reported above, or raise runs.waiting_mib";
    }
    StoreAnswers "store" {
        StoreNotShown: "answers lack runs, because an answer has at most 256 stored runs and 32 MiB",
            "narrow the request; gpumemctl runs lists all stored runs";
    }
};

pub(super) fn add_findings(context: &ViewContext, health: &Health, findings: &mut Vec<Finding>) {
    check_nvml_calls(health, findings);
    check_store(&context.run_writer.status(), findings);
    let (text, fix) = match context.fixed.metrics {
        Some(address) => (format!("http://{address}/metrics"), None),
        None => (
            "served on the control socket only (GET /v1/metrics)".to_owned(),
            Some("metrics.listen = \"127.0.0.1:9837\" serves them to Prometheus"),
        ),
    };
    findings.push(finding(Check::Metrics, State::Ok, "metrics", text, fix));
    if context.is_reload_refused.load(Ordering::Relaxed) {
        let text =
            "the last reload was refused because the new configuration is invalid; the old one is in effect";
        let fix = "gpumemd --check shows what is wrong; then systemctl reload gpumemd";
        findings.push(finding(Check::DaemonConfig, State::Warn, "configuration", text.to_owned(), Some(fix)));
    }
    for &(check, subject, count, what, remedy) in COUNTERS {
        let number = context.stats.get(count);
        if number > 0 {
            let text = format!("{what}: {number} since the start");
            findings.push(finding(check, State::Warn, subject, text, Some(remedy)));
        }
    }
}

fn check_nvml_calls(health: &Health, findings: &mut Vec<Finding>) {
    let NvmlCounters { calls, hangs, .. } = &health.nvml.counters;
    let refused = calls.refused;
    if refused > 0 {
        let text = format!(
            "{refused} impossible values of the driver were refused since the start: more bytes than the GPU has, or invalid pids"
        );
        let fix = "see the kernel log (dmesg | grep -e NVRM -e Xid); reset the GPU or reload the driver";
        findings.push(finding(Check::NvmlCalls, State::Warn, "nvml", text, Some(fix)));
    }
    if *hangs > 0 {
        let text = format!("{hangs} calls did not return since the start, and their process was replaced");
        let fix =
            "see dmesg (NVRM, Xid): a GPU may be about to fail; nvml.call_timeout_s is the timeout of a call";
        findings.push(finding(Check::NvmlCalls, State::Warn, "nvml", text, Some(fix)));
    }
    let (lists, deferred) = (calls.list_calls as f64, calls.deferred as f64);
    if deferred > 100.0 && deferred > MANY_DEFERRED * (lists + deferred) {
        let text = format!(
            "{deferred} of {} process lists were deferred, because lists lock the driver and nvml.list_budget limits their \
             time: bytes of processes are older than nvml.list_every_s",
            lists + deferred
        );
        let fix = "raise nvml.list_budget, or raise nvml.list_every_s if older values are acceptable";
        findings.push(finding(Check::NvmlCalls, State::Ok, "nvml", text, Some(fix)));
    }
}

fn check_store(store: &run_writer::Status, findings: &mut Vec<Finding>) {
    let mut add = |check, state, text: String, fix: Option<&str>| {
        findings.push(finding(check, state, "store", text, fix));
    };
    let mut waiting = format!("{} runs wait in memory ({} MiB)", store.waiting, store.waiting_bytes >> 20);
    if store.queued > 0 {
        waiting += &format!(", changes of {} more are not in it", store.queued);
    }
    match &store.reason {
        _ if let Some(time) = store.stuck => {
            let text = format!("its disk has not answered for {} s; {waiting}", time.as_secs());
            let fix = "check the file system: it is slow or does not respond";
            add(Check::Store, State::Bad, text, Some(fix));
        }
        Some(reason) => add(Check::Store, State::Bad, format!("{reason}; {waiting}"), store.remedy),
        None if store.is_late => {
            let text = format!(
                "changes of {} runs are not in it, the oldest for {} s: a killed daemon would lose them",
                store.waiting + store.queued,
                store.oldest.as_secs()
            );
            let fix = "its disk is too slow for the number of processes: use a faster one, or raise \
                     runs.checkpoint_every_s";
            add(Check::Store, State::Warn, text, Some(fix));
        }
        None => add(Check::Store, State::Ok, store.path.display().to_string(), None),
    }
    if let Some(aside) = &store.set_aside {
        let text = format!("it was damaged and renamed to {}; a new one was created", aside.display());
        let fix = "check the kernel log for errors of the file system";
        add(Check::StoreDamage, State::Warn, text, Some(fix));
    }
    if store.is_too_large {
        let text = "it is larger than runs.max_size_mib, and has only runs of live processes and imported ones, which are not deleted";
        add(Check::StoreSize, State::Warn, text.to_owned(), Some("raise runs.max_size_mib"));
    }
    if let Some(doubt) = store.age_doubt {
        let text = format!("no run is deleted for its age (runs.keep_days): {doubt}");
        // Shortly after the start, this is not a problem.
        let is_wrong = !matches!(doubt, Doubt::Begun);
        let state = if is_wrong { State::Warn } else { State::Ok };
        add(Check::StoreAge, state, text, is_wrong.then_some("check the clock: timedatectl, date"));
    }
    let left = store.path.parent().and_then(|folder| statvfs(folder).ok());
    let left = left.map(|space| space.f_bavail.saturating_mul(space.f_frsize));
    if let Some(left) = left.filter(|left| *left < LITTLE_ROOM) {
        let text = format!("the store's file system has only {} MiB free", left >> 20);
        let fix = "free space, lower runs.keep_days or runs.max_size_mib, or move the store: runs.store";
        add(Check::StoreRoom, State::Warn, text, Some(fix));
    }
}

pub(super) fn facts(
    context: &ViewContext,
    snapshot: &Snapshot,
    health: &Health,
    now_ns: u64,
) -> Vec<(String, String)> {
    let running = snapshot.running();
    let store = context.run_writer.status();
    let config = context.fixed.config.display();
    let config = match context.fixed.config.exists() {
        true => config.to_string(),
        false => format!("{config} (missing: defaults)"),
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
    // gpumemctl compares the namespaces with its own.
    for (name, link) in [("pid namespace", "pid"), ("time namespace", "time")] {
        let link = std::fs::read_link(format!("/proc/self/ns/{link}"));
        facts.extend(link.ok().map(|link| (name, link.display().to_string())));
    }
    facts.push(("clock", now_ns.to_string()));
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn runs_that_are_not_in_the_store_are_counted() {
        let say = |store: run_writer::Status| {
            let mut findings = Vec::new();
            check_store(&store, &mut findings);
            let first = findings.remove(0);
            (first.state, first.text, first.fix.unwrap_or_default())
        };
        let oldest = Duration::from_secs(7_200);
        let late =
            run_writer::Status { waiting: 512, queued: 9_488, oldest, ..run_writer::Status::default() };
        let (state, text, fix) = say(run_writer::Status { is_late: true, ..late.clone() });
        assert_eq!(state, State::Warn);
        assert_eq!(
            text,
            "changes of 10000 runs are not in it, the oldest for 7200 s: a killed daemon would lose them"
        );
        assert!(fix.contains("runs.checkpoint_every_s"), "{fix}");
        let reason = Some("not a directory".to_owned());
        let (state, text, _) = say(run_writer::Status { reason, ..late.clone() });
        assert_eq!(state, State::Bad);
        let waits = "512 runs wait in memory (0 MiB), changes of 9488 more are not in it";
        assert_eq!(text, format!("not a directory; {waits}"));
        assert_eq!(say(late).0, State::Ok, "they are written soon enough");
    }
}
