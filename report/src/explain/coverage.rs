//! How sure a number is: flags and counts.

use super::here::none;
use super::{Word, word};

pub(super) const WORDS: &[Word] = &[
    word(
        &["covered", "covered since start", "coverage", "flags"],
        "An agent (libgpumem.so) or a log spoke for the process, so that its memory is tracked and named.",
        |here| here.flag(here.coverage().covered),
        "",
    ),
    word(
        &["uncovered"],
        "No agent spoke for the process: what NVML charges is known, and nothing of what it is made of.",
        |here| here.flag(!here.coverage().covered),
        "start it under gpumemctl run -- COMMAND, or set CUDA_INJECTION64_PATH; gpumemctl doctor PID says why not",
    ),
    word(
        &["late", "covered late"],
        "The agent came after allocations. What is older is `predates the agent`; what came later is exact.",
        |here| here.flag(here.coverage().late),
        "start the program under gpumemctl run",
    ),
    word(
        &["partial", "partial state", "partial history", "lower bound", "doubtful"],
        "Records were lost. The sums of now are not exact until the agent restates them (partial state), peaks are lower bounds for good (partial history).",
        |here| {
            Some(format!(
                "state {}, history {}",
                yes(here.coverage().partial_state),
                yes(here.coverage().partial_history)
            ))
        },
        "a larger ring or a faster disk for recordings; gpumemctl doctor PID",
    ),
    word(
        &["blocked", "blocked by", "blocked code"],
        "Another profiler holds CUPTI, or the agent is not let in: allocations are not seen meanwhile.",
        |here| here.flag(here.coverage().blocked_by.is_some()),
        "end the other profiler, or lend it CUPTI for a while: gpumem_pause() and gpumem_resume()",
    ),
    word(
        &["blind", "blind count", "blind doubt", "why"],
        "A time in which the agent saw nothing: paused, blocked, or CUPTI was taken away. If it had seen memory before, sums are not exact since then.",
        |here| here.count(here.coverage().blind_count, "time"),
        "",
    ),
    word(
        &["restarted"],
        "gpumemd was restarted while the process lived. Nothing was lost by that: reports have both lives, metrics have the peaks since.",
        none,
        "",
    ),
    word(
        &["paused"],
        "The agent has let go of CUPTI on request (gpumem_pause()), so that another profiler can have it.",
        none,
        "gpumem_resume(); in Python leave `with gpumem.paused():`",
    ),
    word(
        &["stale", "stale samples", "not fresh", "age"],
        "A sample of NVML that was closed without the agent's word (it was silent for half a second), or a reading that is old.",
        |here| here.count(here.coverage().stale_samples, "sample"),
        "a program that is stopped or swapped out cannot answer; gpumemctl doctor",
    ),
    word(
        &["torn", "torn samples", "tracked min", "tracked max"],
        "Memory moved while NVML was read: tracked at that moment lies between two values.",
        |here| here.count(here.coverage().torn_samples, "sample"),
        "wait for a quieter moment: reports use the latest complete one",
    ),
    word(
        &["samples", "NVML samples", "NVML sample", "sample"],
        "How often NVML told what the process has.",
        |here| here.count(here.coverage().samples, "sample"),
        "",
    ),
    word(
        &["~", "gap distance", "carried"],
        "The gap was measured at another moment than the one it stands at, mostly near the peak: NVML is read once a second, peaks last for milliseconds.",
        |here| {
            Some(format!(
                "{} from the peak",
                here.run.clock.distance(here.device.peak.gap_distance_ns.unsigned_abs())
            ))
        },
        "tracked is exact there; only used and the gap are near",
    ),
    word(
        &[
            "-",
            "not known",
            "null",
            "used absence",
            "no permission",
            "not listed",
            "not available",
            "gpu lost",
            "timeout",
            "not supported",
            "wrong namespace",
            "list failed",
            "unknown",
        ],
        "What is not known is never 0. Where NVML gave no number its reason is told: no permission, not listed, timeout, not supported, ...",
        |here| here.device.last.used_absence.clone().or(Some("everything is known".to_owned())),
        "gpumemctl doctor says what does not work and what helps",
    ),
    word(
        &["lost", "events lost", "withheld", "ooms dropped", "dropped"],
        "Records that never arrived: the ring was full. Each loss is counted, the agent's table is read again, the sums say partial until then.",
        |here| here.count(here.coverage().lost, "record"),
        "",
    ),
    word(
        &["rejected"],
        "Lines or records of a file that could not be read. They are counted and named, and stop nothing.",
        |here| {
            here.count(here.coverage().rejected, "line or record")
                .map(|text| text.replace("records", "records (or lines)"))
        },
        "",
    ),
    word(
        &["odd"],
        "Records that did not fit what was known: frees of unknown addresses, ids never named, impossible sizes.",
        |here| here.count(here.coverage().odd, "record"),
        "many of them: the agent came late, or two libraries are loaded; gpumemctl doctor PID",
    ),
    word(
        &["events", "allocations", "allocation", "allocated", "failed allocations"],
        "Records that were applied, and of those the driver allocations that succeeded; their bytes are counted without taking frees off.",
        |here| here.count(here.coverage().events, "event"),
        "",
    ),
    word(
        &["measured", "model", "upper bound", "at least", "none", "kind", "confidence", "expected"],
        "How a number came to be: measured at a step of the gap; a model of the driver's limits; an upper bound (code at most its loadable size); at least, because others are bounds. (As a key of a device, model is its product name.)",
        none,
        "",
    ),
    word(
        &["caveats", "code", "text", "note", "doubts"],
        "What a reader must know beside the numbers: a sentence for people, a stable code for programs.",
        |here| here.count(here.run.caveats.len() as u64, "caveat"),
        "",
    ),
];

fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}
