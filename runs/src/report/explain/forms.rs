//! What stands in lists, comparisons and JSON.

use super::here::none;
use super::{Word, word};

pub(super) const WORDS: &[Word] = &[
    word(
        &["last", "now"],
        "The latest moment at which everything was known at once: the last NVML sample with tracked at its own time.",
        |here| Some(format!("at {}", here.run.clock.time(here.device.last.time_ns))),
        "",
    ),
    word(
        &["at peak", "peak"],
        "The highest tracked, exact and with what it was made of; of equal moments the one with the least idle.",
        |here| Some(format!("at {}", here.run.clock.time(here.device.peak.time_ns))),
        "",
    ),
    word(
        &["run", "runs", "id", "uid", "part", "parts", "continues", "stored", "label"],
        "One process's life on its GPUs, first sight to exit, as the store keeps it (r7). One that lasts for days goes on in parts. Its uid is the same in every store.",
        |here| here.report.id.clone(),
        "gpumemctl runs lists them, with --user, --job, --since, --oom, --label",
    ),
    word(
        &["state", "running", "open", "ended", "closed", "interrupted", "rolled", "status"],
        "running (open): it goes on; ended (closed): with its status; interrupted: nobody watched to the end, the numbers are the last ones kept; rolled: it goes on in the next part.",
        none,
        "",
    ),
    word(
        &[
            "process",
            "pid",
            "start ticks",
            "started",
            "facts",
            "claims",
            "user",
            "owner",
            "command",
            "rank",
            "job",
        ],
        "pid and start time name a process. Facts were seen (command, user, cgroup); claims are what the process says of itself (rank, job).",
        |here| Some(here.run.process.pid.to_string()).filter(|pid| pid != "0"),
        "",
    ),
    word(
        &["source", "recording", "daemon", "import", "schema", "version"],
        "Where a run came from: the daemon of a machine, a recording, another tool's file, or an exported run (gpumem-run).",
        |here| Some(format!("{} {}", here.run.source.kind, here.run.source.origin)),
        "",
    ),
    word(
        &["clock", "time", "from", "start", "end", "to", "wall offset", "monotonic", "lines"],
        "Times in JSON are nanoseconds of the host's monotonic clock, or lines of a log; with wall_offset_ns since 1970.",
        none,
        "",
    ),
    word(
        &["series", "buckets", "width", "min", "max", "timeline"],
        "used, tracked and the gap over time in buckets: lowest, highest and last of each. The timeline has what was held, by cell.",
        |here| here.count(here.device.series.buckets.len() as u64, "bucket"),
        "",
    ),
    word(
        &["window"],
        "The part of the life that was asked for: its first column is its end, its second its fullest moment.",
        none,
        "gpumemctl report --since 1h | --at 10:30 | --between A,B",
    ),
    word(
        &["name", "bytes", "file", "moved"],
        "Names are as they were said, bytes are bytes. moved: the run was exported on another machine.",
        none,
        "",
    ),
    word(
        &[
            "A",
            "B",
            "side",
            "B - A",
            "difference",
            "sentence",
            "only in",
            "in A, not in B",
            "in B, not in A",
            "unchanged",
            "smaller differences",
        ],
        "Of gpumemctl diff A B: what B has more is positive; A + difference = B in every row. Only in: the other run has no record of that name at any time.",
        none,
        "",
    ),
    word(
        &["paired", "pairs", "uuid", "number", "order", "alone"],
        "How diff chose two devices: the same UUID, the same number (imports have no UUIDs), else in their order; alone: only one side has it.",
        none,
        "diff --device N compares one pair",
    ),
    word(
        &["gate", "limit", "outcome", "within", "above", "unknown outcome", "of"],
        "Of diff --fail-above: exit code 8 where B exceeds A by more than it may, 9 where what is known does not tell. Bounds count as bounds.",
        none,
        "docs/compare.md has an example for CI",
    ),
    word(
        &["idle apart", "by layer", "by structure", "by tag"],
        "The same direct and block bytes grouped in another way; idle and opaque bytes are not among them.",
        none,
        "",
    ),
];
