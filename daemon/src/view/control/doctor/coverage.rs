//! Completeness of one process's data, and remedies for gaps.

use super::finding::{finding, limit};
use gpumem_ledger::{AnomalyCounts, Blocked, Coverage, ProcessView};
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use gpumem_model::layers;
use gpumem_model::run::SUBSCRIPTION_HELD;

pub(super) fn of_process(process: &ProcessView, now_ns: u64) -> Vec<Finding> {
    let say = |check, state, text: String, fix| {
        finding(check, state, format!("process {}", process.key.pid), text, fix)
    };
    let coverage = &process.coverage;
    let mut findings = Vec::new();
    if let Some(blocked) = &coverage.blocked {
        let (text, remedy) = of_blocked(blocked, now_ns);
        findings.push(say(Check::ProcessBlocked, State::Bad, text, Some(remedy)));
    }
    if coverage.paused {
        let (text, remedy) = of_paused(coverage, now_ns);
        findings.push(say(Check::ProcessPaused, State::Warn, text, remedy));
    }
    if !coverage.covered {
        if findings.is_empty() {
            let text = "no agent speaks for it: its used bytes are known, not what they are for";
            let remedy = "start it with `gpumemctl run -- ...`";
            findings.push(say(Check::Process, State::Warn, text.to_owned(), Some(remedy)));
        }
        return findings;
    }
    if coverage.late {
        let text = "the agent came after the first allocations: what was there before is `predates`";
        let remedy = "start the process with `gpumemctl run -- ...`";
        findings.push(say(Check::ProcessLate, State::Warn, text.to_owned(), Some(remedy)));
    }
    if coverage.blind_count > 0 && coverage.open_blind().is_none() {
        let total = seconds(coverage.blind_total_ns(now_ns));
        let often = match coverage.blind_count {
            1 => String::new(),
            count => format!(" in {count} times"),
        };
        let (text, remedy) = match coverage.blind_doubt {
            true => (
                "what was allocated and freed then is not known, so sums and peaks are not exact",
                EXACT_AGAIN,
            ),
            false => ("nothing had been seen before", None),
        };
        let text = format!("the agent was blind for {total}{often}: {text}");
        findings.push(say(Check::ProcessBlind, State::Warn, text, remedy));
    }
    let lost = coverage.lost_in_all();
    if coverage.partial_history && lost > 0 {
        let state = if coverage.partial_state {
            "sums are bounds"
        } else {
            "sums are right again, peaks are lower bounds"
        };
        findings.push(say(
            Check::ProcessLost,
            State::Warn,
            format!("{lost} records were lost: {state}"),
            None,
        ));
    }
    if let Some(full) = coverage.full {
        let (text, key) = limit(full);
        let text = format!("{text}: what it adds is lost");
        let fix = format!("raise {key}, if what it says is true");
        let subject = format!("process {}", process.key.pid);
        findings.push(finding(Check::ProcessLimit, State::Warn, subject, text, Some(&fix)));
    }
    if let Some(text) = of_oddities(&process.odd) {
        let remedy = "its lines are what it says, its `used` is the driver's word; if the agent is ours, please report it";
        findings.push(say(Check::ProcessOdd, State::Warn, text, Some(remedy)));
    }
    findings.extend(
        of_layers(process).into_iter().map(|(state, text, fix)| say(Check::ProcessNames, state, text, fix)),
    );
    // The agent's records arrive, independently of the other findings.
    let earlier = coverage.earlier.map_or(0, |earlier| earlier.events);
    let records = earlier.saturating_add(coverage.events);
    let lost = if lost == 0 { "none".to_owned() } else { lost.to_string() };
    let text = match earlier {
        0 => format!("covered, {records} records, {lost} lost"),
        _ => format!(
            "covered, {records} records, {lost} lost: {earlier} of them before gpumemd was restarted, since when live peaks count"
        ),
    };
    findings.push(say(Check::Process, State::Ok, text, None));
    findings
}

/// Returns a text about inconsistent records. The agent of this project sends none.
fn of_oddities(odd: &AnomalyCounts) -> Option<String> {
    let kinds = [
        (odd.unknown_frees, "free what was not there"),
        (odd.unknown_ends, "end what did not begin"),
        (odd.replaced, "allocate what was there already"),
        (odd.unknown_handles, "name handles, pools or segments that were not there"),
        (odd.impossible, "have sizes that no machine has"),
        (odd.duplicates, "came twice"),
        (odd.devices_beyond, "are of more devices than a process may have"),
    ];
    let said: Vec<String> =
        kinds.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    (!said.is_empty()).then(|| format!("of its records, {}", said.join(", ")))
}

/// Returns how memory gets its names, and which sources of names do not work.
fn of_layers(process: &ProcessView) -> Vec<(State, String, Option<&'static str>)> {
    let said = &process.coverage.layers;
    let Some(level) = layers::level(said) else { return Vec::new() };
    let mut found = vec![(State::Ok, format!("names: {level}"), None)];
    for said in said.iter().filter(|said| said.is_lacking()) {
        // Sources that the user has switched off are not a problem.
        let state = if said.state == "off" { State::Ok } else { State::Warn };
        let text = layers::lacking(std::slice::from_ref(said), 200).join("");
        found.push((state, format!("names: {text}"), None));
    }
    found
}

const EXACT_AGAIN: Option<&str> = Some("a new start of the process is exact again");

fn seconds(ns: u64) -> String {
    match ns as f64 / 1e9 {
        s if s < 120.0 => format!("{s:.1} s"),
        s => format!("{:.0} min", s / 60.0),
    }
}

/// Returns the meaning of CUPTI's error for tracking allocations, and the remedy.
fn of_blocked(blocked: &Blocked, now_ns: u64) -> (String, &'static str) {
    let since = seconds(now_ns.saturating_sub(blocked.since_ns));
    let by = blocked.by.as_str();
    if blocked.result == SUBSCRIPTION_HELD {
        let by = if by.is_empty() { "another CUPTI client" } else { by };
        let text =
            format!("{by} has held the CUPTI subscription (code 39) for {since}: allocations are not seen");
        let remedy = "end the other profiler, the agent takes over by itself; for torch.profiler: `with gpumem.paused():` \
                      around it, KINETO_USE_DAEMON=1, or a PyTorch whose profiler needs no subscription (Kineto since \
                      August 2026)";
        return (text, remedy);
    }
    let code = if blocked.result == 0 { String::new() } else { format!(" (code {})", blocked.result) };
    let text = format!("{by}{code}, for {since}: allocations are not seen");
    let remedy = match blocked.result {
        0 if by.starts_with("CUPTI was") => {
            "nothing: the agent subscribes again by itself; it does not come to this without TEARDOWN_CUPTI=1"
        }
        0 => "install nvidia-cuda-cupti of the program's CUDA version, or say where it is: GPUMEM_CUPTI_PATH",
        2 | 46 => "install a newer nvidia-cuda-cupti of the same CUDA major, or set GPUMEM_CUPTI_PATH",
        100 => {
            "nvidia-smi shows the GPUs of this machine, CUDA_VISIBLE_DEVICES those that the program may use: without one there is nothing to see"
        }
        15 | 999 => {
            "use a libcupti that is not newer than the driver: nvidia-cuda-cupti of the CUDA version that nvidia-smi shows, \
             or GPUMEM_CUPTI_PATH; it is tried again by itself"
        }
        23 => "end the other profiler or debugger: the agent takes over by itself",
        35 => {
            "let the user use CUPTI: NVreg_RestrictProfilingToAdminUsers=0, or the container's capabilities"
        }
        41 => "tracing is off under confidential computing: used bytes and names from frameworks remain",
        43 => {
            "use a newer driver and libcupti on this MIG instance: used bytes and names from frameworks remain"
        }
        45 => "use a newer driver on WSL: used bytes and names from frameworks remain",
        47 => "turn hardware event tracing off under MPS: the agent takes over by itself",
        _ => "it is tried again by itself, each minute at least",
    };
    (text, remedy)
}

fn of_paused(coverage: &Coverage, now_ns: u64) -> (String, Option<&'static str>) {
    let window = coverage.open_blind();
    let since = window.map(|window| seconds(now_ns.saturating_sub(window.from_ns)));
    let lasting = since.map_or(String::new(), |since| format!(", for {since}"));
    match window {
        Some(window) if coverage.disarmed => {
            let text = format!("the agent has stopped{lasting}: {}", window.why);
            let remedy = match window.why.starts_with("its thread could not be started") {
                true => {
                    "start it again where it may have one more thread: ulimit -u, or pids.max of its container"
                }
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
        of_blocked(&Blocked { since_ns: 1_000_000_000, result, by: by.into() }, 13_400_000_000)
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
            assert!(text.starts_with("why") && text.contains("not seen") && !remedy.is_empty(), "{text}");
            assert_eq!(text.contains("(code "), code != 0, "{text}");
        }
        assert!(blocked(0, "CUPTI was finalized by another client").1.contains("TEARDOWN_CUPTI"));
    }
}
