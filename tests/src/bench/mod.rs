//! Measurements. Each is compared with its floor, the minimum that any program would have to do. Both are measured alternately in
//! the same run, because absolute times differ between machines and ratios do not. A benchmark panics if the final state is
//! wrong.

mod agent;
mod cost;
mod daemon;
mod disk;
mod footprint;
mod frames;
mod import;
mod ingest;
mod kinds;
mod ledger;
mod memory;
mod node;
mod nvtx;
pub mod peer;
pub mod player;
mod programs;
mod python;
mod replay;
mod report;
mod rounds;
mod scrape;
mod snapshot;
mod store;
mod timeline;
mod torch;
mod traffic;

/// A named measurement.
#[derive(Debug)]
pub struct Bench {
    /// Name as typed.
    pub name: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Measures and prints a table.
    pub run: fn(),
}

/// All benchmarks.
pub const ALL: &[Bench] = &[
    Bench {
        name: "agent",
        about: "what the agent adds to a driver call, and what a scope costs",
        run: agent::run,
    },
    Bench { name: "nvtx", about: "what an NVTX range costs a program that annotates itself", run: nvtx::run },
    Bench {
        name: "frames",
        about: "what the module path from Python frames adds to a block, by depth",
        run: frames::run,
    },
    Bench {
        name: "python",
        about: "what a scope costs from Python, beside an empty context manager",
        run: python::run,
    },
    Bench {
        name: "ledger",
        about: "events/s into a ledger with 1 million live rows and 1,000 tags, one core",
        run: ledger::run,
    },
    Bench {
        name: "ingest",
        about: "events/s from the agent socket into the ledger of a real daemon, and their CPU time",
        run: ingest::run,
    },
    Bench {
        name: "daemon",
        about: "CPU, memory and start of gpumemd on 8 GPUs with 16 processes each",
        run: daemon::run,
    },
    Bench {
        name: "scrape",
        about: "GET /metrics of 128 processes, with a GPU that hangs, and of 64 agents with 1 million blocks",
        run: scrape::run,
    },
    Bench {
        name: "import",
        about: "a training log into a report, beside a plain Python reader of the same file",
        run: import::run,
    },
    Bench {
        name: "snapshot",
        about: "PyTorch's memory snapshots into a report, beside Python's own reader of the same file",
        run: snapshot::run,
    },
    Bench {
        name: "report",
        about: "the report of a run with 10 million events, from its recording and from the store",
        run: report::run,
    },
    Bench {
        name: "replay",
        about: "events/s of the model of PyTorch's allocator, 10 million under eight settings",
        run: replay::run,
    },
    Bench {
        name: "store",
        about: "checkpoints a second of a training run, and disk space for an hour",
        run: store::run,
    },
    Bench {
        name: "disk",
        about: "bytes that gpumemd writes for 128 processes without an agent",
        run: disk::run,
    },
    Bench {
        name: "timeline",
        about: "what timelines of 64 processes with 2,000 tags take, in time and memory",
        run: timeline::run,
    },
    Bench {
        name: "torch",
        about: "what the agent adds to a training step of PyTorch, beside torch's own history and profiler",
        run: torch::run,
    },
    Bench {
        name: "footprint",
        about: "instructions and lines of the first caches that a block event of PyTorch takes, counted by callgrind",
        run: footprint::run,
    },
];
