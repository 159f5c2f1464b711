//! PyTorch's memory from wire records to the printed report: the bridge to nvidia-smi, rows, OOMs.
mod machine;

use gpumem_model::run::{Cell, Class, Moment, OomKind, Run, State};
use gpumem_report::bridge::{Bridge, Source};
use gpumem_report::oom::{self, OomOptions};
use gpumem_report::rules::Groupings;
use gpumem_report::text::{Layout, text};
use gpumem_report::{GroupBy, Report, csv, json};
use gpumem_wire::*;
use machine::*;
use proptest::prelude::*;

fn report(run: &Run, by: Option<GroupBy>) -> Report<'_> {
    let mut report = Report::new(run, Groupings::of_run(run), by);
    report.command = "gpumemctl report 41873".into();
    report
}

fn told(run: &Run) -> String {
    text(&report(run, None), Layout::default())
}

fn line<'t>(text: &'t str, start: &str) -> &'t str {
    text.lines()
        .find(|line| line.trim_start().starts_with(start))
        .unwrap_or_else(|| panic!("no {start}\n{text}"))
}

/// Returns the numbers of a line, without commas and points.
fn numbers(line: &str) -> Vec<i64> {
    let number =
        |word: &str| word.trim_matches(['(', ')', ';', ':']).replace([',', '.'], "").parse::<i64>().ok();
    line.split_whitespace().filter_map(number).collect()
}

/// Compares with a golden file in tests/golden.
fn golden(name: &str, text: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/reports").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, text).expect("a golden file");
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap_or_default(), "UPDATE_GOLDEN=1 writes it");
}

#[test]
fn a_training_process_reads_as_it_should() {
    let mut said = Machine::new();
    said.train();
    let run = said.run();
    let text = told(&run);
    assert!(text.lines().count() <= 35, "{text}");
    golden("torch.txt", &text);
    for expected in [
        "covered since start, names: module path (97.9 % of bytes), 9 allocations",
        "\n  parameters                  13,476     13,476\n",
        "\n  optimizer state             26,952     26,952\n",
        "\n  libnccl (outside torch)      1,264      1,264\n",
        "\n  workspace (cuBLAS etc.)        768        768\n",
        "\n  Others                         214        214\n",
        "\n  pool idle                    8,648      8,648\n",
        "why nvidia-smi shows more than torch (MiB):",
        "  memory_allocated 60,006 + idle 8,648 (of it 100 waiting for a stream) = memory_reserved 68,654",
        "  + outside torch 1,264 + Untrackable 1,286 = 71,204",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    assert!(text.trim_end().ends_with("    oom: none    why: 2 suggestions (gpumemctl why 41873)"), "{text}");
    let bridge = Bridge::of(&run, &run.devices[0].last).expect("torch is there");
    assert_eq!(bridge.memory_allocated_bytes, 60_006 << 20);
    assert_eq!(bridge.used_bytes, Some(71_204 << 20));
    let document: serde_json::Value = serde_json::from_str(&json::json(&report(&run, None))).expect("JSON");
    assert_eq!(document["rules"], "torch");
    assert_eq!(document["names"], "module path");
    let told = &document["devices"][0]["last"]["bridge"];
    assert_eq!(told["memory_reserved_bytes"], 68_654_i64 << 20);
    let sum: i64 = ["memory_reserved_bytes", "outside_bytes", "predates_bytes", "untrackable_bytes"]
        .iter()
        .map(|field| told[*field].as_i64().expect("a number"))
        .sum();
    assert_eq!(Some(sum), told["used_bytes"].as_i64());
    let csv = csv::csv(&report(&run, None));
    assert!(csv.contains(",block,GPT/h.0/mlp,Others,GPT/h.0/mlp,"), "{csv}");
}

#[test]
fn layers_roll_up_by_depth_and_equal_paths_are_one() {
    let mut said = Machine::new();
    said.train();
    let run = said.run();
    let rows = |by| report(&run, Some(by)).composition(&run.devices[0].last, by);
    let layers = rows(GroupBy::Layer);
    assert!(layers.categories.contains_key("GPT/h.0/mlp"), "as deep as it fits: {layers:?}");
    let tags = rows(GroupBy::Tag);
    // Two of the agent's ids have this path: parameters and gradients.
    assert_eq!(tags.categories["GPT/h.1/attn"], (2 * 13_476) << 20);
    assert_eq!(tags.categories["libnccl (outside torch)"], 1_264 << 20);
    for composition in [rows(GroupBy::Layer), rows(GroupBy::Structure), tags] {
        assert_eq!(Some(composition.total()), run.devices[0].last.tracked_bytes);
    }
}

#[test]
fn what_does_not_work_is_said_beside_the_level() {
    let mut said = Machine::new();
    said.layer(Layer::ModulePath, LayerState::Failed, "CPython 3.15 is not known");
    said.layer(Layer::Scopes, LayerState::Active, "");
    said.train();
    said.layer(Layer::ModulePath, LayerState::Failed, "CPython 3.15 is not known");
    let text = told(&said.run());
    let expected = "names: scopes (97.9 % of bytes) [module path failed: CPython 3.15 is not known], ";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn a_total_that_is_not_ours_is_said() {
    let mut said = Machine::new();
    said.train();
    said.say(Body::PoolCheck { pool: POOL, total_bytes: 60_000 * MIB });
    let text = told(&said.run());
    let own = line(&text, "torch's own");
    assert_eq!(
        own,
        "  torch's own memory_allocated was 60,000 when it last compared, ours 60,006: -6,291,456 bytes apart"
    );
}

#[test]
fn without_a_pool_of_its_own_torch_is_told_by_its_library() {
    let mut said = Machine::new();
    said.module(1, "/usr/lib/python3/site-packages/torch/lib/libc10_cuda.so");
    said.module(2, "/usr/lib/libnccl.so.2");
    for (module, mib) in [(1, 500), (1, 100), (2, 64)] {
        said.stamp.module = module;
        said.alloc(mib * MIB, 0);
    }
    said.stamp.module = 0;
    said.sample(1_000 * MIB);
    let run = said.run();
    let bridge = Bridge::of(&run, &run.devices[0].last).expect("torch is there");
    assert_eq!((bridge.source, bridge.memory_allocated_bytes), (Source::Driver, 600 << 20));
    let text = told(&run);
    assert_eq!(
        line(&text, "torch has no pool"),
        "  torch has no pool of its own: allocated from the driver by its library 600.0"
    );
    assert_eq!(line(&text, "+ outside"), "  + outside torch 64.0 + Untrackable 336.0 = 1,000.0");
    assert!(Bridge::of(&Machine::new().run(), &Moment::default()).is_none());
}

#[test]
fn a_late_agent_says_what_torch_said_itself() {
    let mut said = Machine::new();
    said.control(Body::Agent { result: 0, state: AgentState::Late, detail: "" });
    said.control(Body::Baseline { bytes: 300 * MIB });
    said.pool();
    said.segment(100 * MIB);
    said.say(Body::PoolState { pool: POOL, reserved_bytes: 400 * MIB, used_bytes: 310 * MIB, took_us: 0 });
    said.sample(900 * MIB);
    let text = told(&said.run());
    assert_eq!(
        line(&text, "+ outside"),
        "  + outside torch 0.0 + predates the agent 300.0 + Untrackable 500.0 = 900.0"
    );
    assert!(line(&text, "torch's own numbers").contains("memory_allocated 310.0, memory_reserved 400.0"));
}

/// The long form.
const LONG: OomOptions<'static> = OomOptions { verbose: true, all: false, job: &[], width: None };

/// Another user's memory is the first cause, whether or not it has just grown.
#[test]
fn answer_is_wrapped_between_words() {
    let mut said = Machine::new();
    said.train();
    said.run_out();
    let run = said.run();
    let of_width = |width| oom::text(&report(&run, None), OomOptions { width, ..OomOptions::default() });
    let (narrow, wide) = (of_width(Some(43)), of_width(None));
    assert!(narrow.lines().all(|line| line.len() <= 43), "{narrow}");
    assert!(narrow.split_whitespace().eq(wide.split_whitespace()), "{narrow}{wide}");
}

#[test]
fn answer_names_the_cause_and_what_fits_without_it() {
    let mut said = Machine::new();
    said.train();
    said.run_out();
    let mut run = said.run();
    let short = |run: &Run| oom::text(&report(run, None), OomOptions::default());
    assert_eq!(
        short(&run),
        "\
OUT OF MEMORY  00:03:21Z  python train.py  pid 41873, GPU 3, exit 1
Asked for 2,048 MiB in forward of GPT/h.1/mlp/up_proj (train.py:212 in forward), step 18,221; 1,102 MiB were free.
1. other processes hold 6,644 MiB, 8 % of the device; bob 52110 took 3,334 MiB in the 60 s before
   Without them the request fits with 5,698 MiB to spare.
Other processes: 6,644 MiB, +3,334 MiB in the last 60 s (bob 52110).
Fragmentation: 10,470 MiB unused in 2 pieces, largest piece 8,548 MiB; large enough, but of another stream or pool.
next: gpumemctl oom 41873 --verbose | --all | --json; gpumemctl report 41873
"
    );
    let oom = &mut run.devices[0].details.ooms[0];
    oom.is_partial = true;
    for holder in &mut oom.device.as_mut().expect("NVML").holders {
        holder.growth_bytes = Some(0);
    }
    let text = short(&run);
    assert!(
        text.contains(
            "\n1. the memory that the program holds at one time does not fit: optimizer state 26,952"
        ),
        "{text}"
    );
    let others = "\n2. other processes hold 6,644 MiB, 8 % of the device; the largest is pid 52110 of bob\n";
    assert!(text.contains(others), "{text}");
    assert!(text.contains("Other processes: 6,644 MiB, unchanged in the last 60 s (bob 52110).\n"), "{text}");
    assert!(text.contains("\nIncomplete: memory from before the daemon's start"), "{text}");
    // Memory without a category has the name of its tag, if most of it has one.
    for cell in run.cells.iter_mut().filter(|cell| cell.role.as_deref() == Some("optimizer state")) {
        (cell.role, cell.tag) = (None, Some("history".into()));
    }
    let text = short(&run);
    assert!(text.contains("does not fit: history 26,952 + gradients 13,476"), "{text}");
}

#[test]
fn an_oom_is_told_with_who_had_the_device() {
    let mut said = Machine::new();
    said.train();
    said.run_out();
    let text = oom::text(&report(&said.run(), None), LONG);
    assert_eq!(
        text,
        "\
OOM #1 00:03:21Z GPU 3 (GPU-00000000) pid 41873 FATAL (exit 1 after 0.8 s)  (MiB)
asked 2,048, free 1,102: 946 short, the driver refused 2 times
at GPT/h.1/mlp/up_proj, forward, step 18,221, train.py:212
holders  alice 41873  73,126  (+1,922 in 60 s)
         bob 52110     6,644  (+3,334 in 60 s)
         unaccounted 64 + system 623 + free 1,102 = 81,559 with above
you      optimizer state 26,952 + gradients 13,476 + parameters 13,476 + activations 5,120 + libnccl (outside torch) 1,264 \
+ workspace (cuBLAS etc.) 768 + Others 214 + idle 10,570 + Untrackable 1,286 = 73,126
idle     10,470 in 2 pieces, largest block 8,548 >= 2,048
verdict  other processes hold 6,644 MiB, 8 % of the device; bob 52110 took 3,334 MiB in the 60 s before
"
    );
    let run = said.run();
    assert!(told(&run).trim_end().ends_with("    oom: 1 (gpumemctl oom 41873)"), "{}", told(&run));
    let document: serde_json::Value = serde_json::from_str(&oom::json(&report(&run, None))).expect("JSON");
    let entry = &document["ooms"][0];
    assert_eq!((&entry["what"], &entry["kind"]), (&"oom".into(), &"device".into()));
    let held: i64 =
        entry["held"].as_array().expect("names").iter().filter_map(|of| of["bytes"].as_i64()).sum();
    assert_eq!(held, 73_126 << 20);
}

#[test]
fn an_oom_with_unified_memory_is_told_with_the_rest_of_the_host() {
    let mut said = Machine::new();
    said.train();
    said.run_out();
    let mut run = said.run();
    let of_last = run.devices[0].details.ooms.last_mut().and_then(|oom| oom.device.as_mut());
    of_last.expect("the device then").unified = true;
    let text = oom::text(&report(&run, None), LONG);
    let expected = "rest of the host 64 + system 623 + available 1,102 = 81,559 with above\n";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn pressure_is_no_oom_and_a_limit_of_the_pool_is_one() {
    let mut said = Machine::new();
    said.layer(Layer::OutOfMemory, LayerState::Active, "");
    said.train();
    said.refuse(2_048 * MIB, 1_102 * MIB);
    said.say(Body::Pressure { bytes: 2_048 * MIB, device_free_bytes: Reading::of(1_102 * MIB) });
    said.segment(1_000 * MIB);
    said.time_ns += 60 * SECOND;
    said.tag(3);
    let (pool_used_bytes, pool_reserved_bytes) = (Reading::of(60_006 * MIB), Reading::of(69_654 * MIB));
    let outcome = OomOutcome::Fatal;
    said.say(Body::Oom { bytes: 512 * MIB, pool_used_bytes, pool_reserved_bytes, outcome, result: 0 });
    said.time_ns += 60 * SECOND;
    said.host(0, Body::Tick {});
    let run = said.run();
    let ooms = &run.devices[0].details.ooms;
    assert_eq!(
        ooms.iter().map(|oom| (oom.kind, oom.is_out_of_memory())).collect::<Vec<_>>(),
        [(OomKind::Pressure, false), (OomKind::Pool, true),]
    );
    let text = oom::text(&report(&run, None), LONG);
    assert!(text.starts_with("OOM #1 "), "{text}");
    for expected in [
        " pid 41873 survived  (MiB)\n",
        "asked 512 of the pool, which failed without a request to the driver: it held 69,654, 60,006 handed out; the device had ",
        "verdict  a limit of the pool refused 512 MiB beyond the 69,654 MiB (",
        "\npressure: the driver refused 1 time and the process continued; last at ",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    let all = oom::text(&report(&run, None), OomOptions { all: true, ..LONG });
    assert!(all.starts_with("PRESSURE #1 ") && all.contains("\nOOM #1 "), "{all}");
}

#[test]
fn a_refusal_that_nobody_would_speak_of_is_one_if_the_process_ends_with_it() {
    for (status, is_out_of_memory) in [(Some(256), true), (None, true), (Some(0), false)] {
        let mut said = Machine::new();
        said.alloc(100 * MIB, 0);
        said.refuse(2_048 * MIB, 7 * MIB);
        said.time_ns += SECOND;
        said.host(PID, Body::ProcessGone { start_ticks: 1, status: Reading(status) });
        let run = said.run();
        assert_eq!(run.devices[0].details.ooms[0].is_out_of_memory(), is_out_of_memory, "{status:?}");
    }
}

fn cell() -> impl Strategy<Value = Cell> {
    let class = prop::sample::select(vec![Class::Direct, Class::Block, Class::PoolIdle, Class::Opaque]);
    let word = |words: &'static [&'static str]| prop::option::of(prop::sample::select(words.to_vec()));
    let roles = word(&["parameter", "gradient", "workspace"]);
    let (tags, pools) = (word(&["a/b", "a/c/d", "e"]), word(&["torch", "rmm"]));
    (class, tags, roles, pools, word(&["/x/libnccl.so.2", "libc10_cuda.so"]), any::<bool>()).prop_map(
        |(class, tag, role, pool, library, pending)| Cell {
            class,
            tag: tag.map(str::to_owned),
            role: role.map(str::to_owned),
            pool: pool.map(str::to_owned),
            library: library.map(str::to_owned),
            pending: pending && class == Class::PoolIdle,
            ..Cell::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    /// For any moment, the bridge adds up, in bytes and as printed, with the numbers of the table.
    #[test]
    fn the_bridge_adds_up(
        cells in prop::collection::vec((cell(), -(1_i64 << 20)..(1 << 36)), 1..40),
        gap in -(1_i64 << 28)..(1_i64 << 33),
        predates in prop_oneof![Just(0_i64), 0..(1_i64 << 33)],
        by in prop::sample::select(vec![GroupBy::Layer, GroupBy::Structure, GroupBy::Tag]),
    ) {
        let mut said = Machine::new();
        said.alloc(MIB, 0);
        let mut run = said.run();
        run.cells = cells.iter().map(|(cell, _)| cell.clone()).collect();
        let amounts: gpumem_model::run::Amounts = cells.iter().enumerate().map(|(at, (_, bytes))| (at as u32, *bytes)).collect();
        let tracked = amounts.iter().map(|(_, bytes)| bytes).sum::<i64>();
        run.devices[0].last = Moment {
            amounts,
            tracked_bytes: Some(tracked),
            predates_bytes: Some(predates),
            untrackable_bytes: Some(gap),
            ..Moment::default()
        };
        let moment = &run.devices[0].last;
        let Some(bridge) = Bridge::of(&run, moment) else { return Ok(()) };
        prop_assert_eq!(bridge.memory_allocated_bytes + bridge.idle_bytes, bridge.memory_reserved_bytes);
        prop_assert_eq!(bridge.memory_reserved_bytes + bridge.outside_bytes, tracked);
        prop_assert_eq!(Some(tracked + predates + gap), bridge.used_bytes);
        let text = text(&report(&run, Some(by)), Layout::default());
        let used = numbers(line(&text, "used (="));
        let first = match bridge.source {
            Source::Pool => line(&text, "memory_allocated "),
            Source::Driver => line(&text, "torch has no pool"),
        };
        // Text in parentheses, such as the bytes waiting for a stream, is a part of its term and not a term.
        let terms: String = first.split('(').enumerate().map(|(at, part)| match at {
            0 => part,
            _ => part.split_once(')').map_or("", |(_, rest)| rest),
        }).collect();
        let terms = numbers(&terms);
        let (reserved, parts) = terms.split_last().expect("numbers");
        if !parts.is_empty() {
            prop_assert_eq!(parts.iter().sum::<i64>(), *reserved, "{}", text);
        }
        let second = numbers(line(&text, "+ outside torch"));
        let (sum, parts) = second.split_last().expect("numbers");
        prop_assert_eq!(reserved + parts.iter().sum::<i64>(), *sum, "{}", text);
        prop_assert_eq!(*sum, used[0], "{}", text);
    }
}

#[test]
fn the_other_ranks_of_the_job_are_one_line() {
    let mut said = Machine::new();
    said.run_out();
    let mut run = said.run();
    run.process.claims.insert("rank".into(), "3".into());
    run.process.claims.insert("world_size".into(), "8".into());
    let oom_ns = run.devices[0].details.ooms[0].last_ns;
    let sibling = |rank: u32, state: State, keeps_oom: bool| {
        let mut run = run.clone();
        run.process.pid += 1 + rank;
        run.process.claims.insert("rank".into(), rank.to_string());
        run.state = state;
        if !keeps_oom {
            run.devices[0].details.ooms.clear();
        }
        run
    };
    let ended =
        |after_ns: i64| State::Closed { time_ns: oom_ns.saturating_add_signed(after_ns), status: Some(256) };
    let job = vec![
        sibling(0, State::Open, false),
        sibling(1, State::Open, false),
        sibling(2, ended(1_200_000_000), false),
        run.clone(),
        sibling(5, ended(-400_000_000), false),
        sibling(6, ended(900_000_000), true),
    ];
    let text = oom::text(&report(&run, None), OomOptions { job: &job, ..LONG });
    let line = text.lines().find(|line| line.starts_with("ranks ")).expect("a line");
    let start = "ranks    this is 3 of 8; alive 0-2 (used ";
    assert!(line.starts_with(start), "{line}");
    for words in [
        "; also ran out 6 (",
        "; ended before 5 (the first 0.4 s before)",
        "; 1 of them ended after it, the first 1.2 s later",
    ] {
        assert!(line.contains(words), "{words} in {line}");
    }
    let alone = oom::text(&report(&run, None), OomOptions { job: &job[3..4], ..LONG });
    assert!(!alone.contains("ranks "), "{alone}");
}

#[test]
fn others_that_are_not_shown_have_no_name() {
    let mut said = Machine::new();
    said.run_out();
    let mut run = said.run();
    for holder in run.devices[0].details.ooms[0].device.as_mut().expect("read").holders.iter_mut().skip(1) {
        (holder.pid, holder.user) = (0, None);
    }
    let text = oom::text(&report(&run, None), LONG);
    assert!(text.contains("another process   6,644") && !text.contains("bob"), "{text}");
    assert!(text.contains("; another process took 3,334 MiB in "), "{text}");
}

#[test]
fn what_else_ended_it_comes_first_and_names_are_harmless() {
    let mut said = Machine::new();
    said.run_out();
    let mut run = said.run();
    let facts = [
        ("host_oom", "cgroup"),
        ("host_oom_ns", "203000000000"),
        ("host_oom_line", "Memory cgroup out of memory: Killed process 1 (\u{1b}[2J)"),
        ("host_oom_cgroup", "/slurm/uid_1/job_8812/step_0"),
        ("host_oom_limit", "68719476736"),
    ];
    run.process.facts.extend(facts.map(|(key, value)| (key.to_owned(), value.to_owned())));
    run.state = State::Closed { time_ns: 204_000_000_000, status: Some(9) };
    let text = oom::text(&report(&run, None), LONG);
    let first = "END 00:03:23Z pid 41873: killed by the kernel for HOST memory, not GPU memory: the limit of 64.0 GiB of step 0 of Slurm job 8812 was reached\n";
    assert!(text.starts_with(first), "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let json: serde_json::Value = serde_json::from_str(&oom::json(&report(&run, None))).expect("JSON");
    assert_eq!(
        (&json["ending"]["cause"], &json["ending"]["limit_bytes"]),
        (&"cgroup_memory".into(), &(64_u64 << 30).into())
    );
}
