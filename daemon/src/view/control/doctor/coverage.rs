//! Makes the findings about how complete the data of one process is.

use super::finding::{Findings, limit};
use gpumem_ledger::{AnomalyCounts, Blocked, Coverage, ProcessView};
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use gpumem_model::layers;
use gpumem_model::run::SUBSCRIPTION_HELD;

pub(super) fn check_process(process: &ProcessView, now_ns: u64, findings: &mut Vec<Finding>) {
    let mut out = Findings { subject: format!("process {}", process.key.pid), out: findings };
    let coverage = &process.coverage;
    if let Some(blocked) = &coverage.blocked {
        let (text, fix) = blocked_finding(blocked, now_ns);
        out.add(Check::ProcessBlocked, State::Bad, text, Some(fix));
    }
    if coverage.paused {
        let (text, fix) = paused_finding(coverage, now_ns);
        out.add(Check::ProcessPaused, State::Warn, text, fix);
    }
    if !coverage.covered {
        if coverage.blocked.is_none() && !coverage.paused {
            let text = "it has no agent: its used bytes are known, their purpose is not";
            out.add(Check::Process, State::Warn, text, Some("start it with `gpumemctl run -- ...`"));
        }
        return;
    }
    if coverage.late {
        let text = "the agent started after the first allocations: earlier memory counts as `predates`";
        let fix = "start the process with `gpumemctl run -- ...`";
        out.add(Check::ProcessLate, State::Warn, text, Some(fix));
    }
    if coverage.blind_count > 0 && coverage.open_blind().is_none() {
        let total = seconds(coverage.blind_total_ns(now_ns));
        let often = match coverage.blind_count {
            1 => String::new(),
            count => format!(" in {count} intervals"),
        };
        let (text, fix) = match coverage.blind_doubt {
            true => (
                "allocations and frees of that time are unknown, so sums and peaks are not exact",
                Some("restart the process to get exact values"),
            ),
            false => ("it had recorded nothing before", None),
        };
        let text = format!("the agent was blind for {total}{often}: {text}");
        out.add(Check::ProcessBlind, State::Warn, text, fix);
    }
    let lost = coverage.lost_in_all();
    if coverage.partial_history && lost > 0 {
        let state = match coverage.partial_state {
            true => "sums are bounds",
            false => "sums are exact again, peaks are lower bounds",
        };
        out.add(Check::ProcessLost, State::Warn, format!("{lost} records were lost: {state}"), None);
    }
    if let Some(full) = coverage.full {
        let (text, key) = limit(full);
        let fix = format!("raise {key} if the process really uses that much");
        let text = format!("{text}: its further records are lost");
        out.add(Check::ProcessLimit, State::Warn, text, Some(&fix));
    }
    if let Some(text) = anomalies(&process.odd) {
        let fix = "its tracked bytes come from the process itself, its used bytes from the driver; if its agent is \
             genuine, please report a fault of gpumem";
        out.add(Check::ProcessOdd, State::Warn, text, Some(fix));
    }
    check_layers(process, &mut out);
    // The process has an agent that sends records, whatever the other findings are.
    let earlier = coverage.earlier.map_or(0, |earlier| earlier.events);
    let records = earlier.saturating_add(coverage.events);
    let lost = if lost == 0 { "none".to_owned() } else { lost.to_string() };
    let since = match earlier {
        0 => String::new(),
        _ => format!(": {earlier} of them before gpumemd was restarted, since when live peaks count"),
    };
    out.add(Check::Process, State::Ok, format!("covered, {records} records, {lost} lost{since}"), None);
}

/// Returns a text about records that contradict each other. The agent of this project sends none.
fn anomalies(odd: &AnomalyCounts) -> Option<String> {
    let kinds = [
        (odd.unknown_frees, "free memory that was not allocated"),
        (odd.unknown_ends, "end calls that did not begin"),
        (odd.replaced, "allocate addresses that were allocated already"),
        (odd.unknown_handles, "name unknown handles, pools or segments"),
        (odd.impossible, "have impossible sizes"),
        (odd.duplicates, "were sent twice"),
        (odd.devices_beyond, "name more devices than a process may have"),
    ];
    let counted: Vec<String> =
        kinds.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    (!counted.is_empty()).then(|| format!("of its records, {}", counted.join(", ")))
}

/// Adds findings on which sources give names (tags) to the process's memory, and which of them do not work.
fn check_layers(process: &ProcessView, out: &mut Findings<'_>) {
    let sources = &process.coverage.layers;
    let Some(level) = layers::level(sources) else { return };
    out.add(Check::ProcessNames, State::Ok, format!("names: {level}"), None);
    for source in sources.iter().filter(|source| source.is_degraded()) {
        // Sources that the user has switched off are not a problem.
        let state = if source.state == "off" { State::Ok } else { State::Warn };
        let text = layers::describe_degraded(std::slice::from_ref(source), 200).join("");
        out.add(Check::ProcessNames, state, format!("names: {text}"), None);
    }
}

pub(super) fn seconds(ns: u64) -> String {
    match ns as f64 / 1e9 {
        s if s < 120.0 => format!("{s:.1} s"),
        s => format!("{:.0} min", s / 60.0),
    }
}

/// Returns the text and the remedy for a process whose agent cannot use CUPTI.
fn blocked_finding(blocked: &Blocked, now_ns: u64) -> (String, &'static str) {
    let since = seconds(now_ns.saturating_sub(blocked.since_ns));
    let by = blocked.by.as_str();
    if blocked.result == SUBSCRIPTION_HELD {
        let by = if by.is_empty() { "another CUPTI client" } else { by };
        let text =
            format!("{by} has held the CUPTI subscription (code 39) for {since}: allocations are not seen");
        let remedy = "end the other profiler; the agent then subscribes again. For torch.profiler, one of: `with \
             gpumem.paused():` \
                      around it, KINETO_USE_DAEMON=1, or a PyTorch whose profiler needs no subscription (Kineto since \
                      August 2026)";
        return (text, remedy);
    }
    let code = if blocked.result == 0 { String::new() } else { format!(" (code {})", blocked.result) };
    let text = format!("allocations have not been seen for {since}: {by}{code}");
    let remedy = match blocked.result {
        0 if by.starts_with("CUPTI was") => {
            "no action: the agent subscribes again; without TEARDOWN_CUPTI=1 this does not happen"
        }
        0 => "install nvidia-cuda-cupti of the program's CUDA version, or set its path in GPUMEM_CUPTI_PATH",
        2 | 46 => "install a newer nvidia-cuda-cupti of the same CUDA major, or set GPUMEM_CUPTI_PATH",
        100 => "no GPU is visible to the program: compare nvidia-smi with CUDA_VISIBLE_DEVICES",
        15 | 999 => {
            "use a libcupti that is not newer than the driver: nvidia-cuda-cupti of the CUDA version that nvidia-smi shows, \
             or the one in GPUMEM_CUPTI_PATH; the agent retries"
        }
        23 => "end the other profiler or debugger; the agent then subscribes again",
        35 => {
            "allow the user to use CUPTI: NVreg_RestrictProfilingToAdminUsers=0, or the container's capabilities"
        }
        41 => {
            "no action: confidential computing switches tracing off; used bytes and names from frameworks remain"
        }
        43 => {
            "use a newer driver and libcupti on this MIG instance; until then, only used bytes and names from frameworks are known"
        }
        45 => "use a newer driver on WSL; until then, only used bytes and names from frameworks are known",
        47 => "turn hardware event tracing off under MPS; the agent then subscribes again",
        _ => "no action: the agent retries at least once a minute",
    };
    (text, remedy)
}

fn paused_finding(coverage: &Coverage, now_ns: u64) -> (String, Option<&'static str>) {
    let window = coverage.open_blind();
    let since = window.map(|window| seconds(now_ns.saturating_sub(window.from_ns)));
    let lasting = since.map_or(String::new(), |since| format!(", for {since}"));
    match window {
        Some(window) if coverage.disarmed => {
            let text = format!("the agent has stopped{lasting}: {}", window.why);
            let remedy = match window.why.starts_with("its thread could not be started") {
                true => "restart it with a higher limit of threads: ulimit -u, or pids.max of its container",
                false => "please report it; the program is not harmed",
            };
            (text, Some(remedy))
        }
        _ => {
            let text = format!("paused by the program{lasting}: allocations are not seen");
            (text, Some("gpumem_resume() ends it, or the end of `with gpumem.paused():`"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked(result: u16, by: &str) -> (String, &'static str) {
        blocked_finding(&Blocked { since_ns: 1_000_000_000, result, by: by.into() }, 13_400_000_000)
    }

    #[test]
    fn a_blocker_is_named_with_since_when_and_what_to_do() {
        let (text, remedy) = blocked(39, "Nsight Systems");
        assert!(text.starts_with("Nsight Systems has held the CUPTI subscription"), "{text}");
        assert!(text.contains("12.4 s"), "{text}");
        for way in ["end the other profiler", "gpumem.paused()", "KINETO_USE_DAEMON=1", "a PyTorch whose"] {
            assert!(remedy.contains(way), "{way}: {remedy}");
        }
        assert!(blocked(39, "").0.starts_with("another CUPTI client has held"));
    }

    #[test]
    fn each_refusal_has_words_of_its_own() {
        let codes = [0, 2, 15, 23, 35, 41, 43, 45, 47, 999];
        for code in codes {
            let (text, remedy) = blocked(code, "why");
            assert!(
                text.contains("why")
                    && text.starts_with("allocations have not been seen for ")
                    && !remedy.is_empty(),
                "{text}"
            );
            assert_eq!(text.contains("(code "), code != 0, "{text}");
        }
        assert!(blocked(0, "CUPTI was finalized by another client").1.contains("TEARDOWN_CUPTI"));
    }
}
