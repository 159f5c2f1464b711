//! Generated runs for tests of the page. They are consistent: every moment is the sum of its parts.

use gpumem_model::blocks::{Block, Blocks};
use gpumem_model::gap::{UntrackableChange, UntrackableParts};
use gpumem_model::iterations::{Iteration, Iterations, Level};
use gpumem_model::oom::{Fate, Holder, Oom, OomDevice, OomKind};
use gpumem_model::parameters::{Column, Parameters};
use gpumem_model::program_data::{Counter, ProgramData, Range, Span};
use gpumem_model::run::{
    Caveat, Cell, Class, Clock, Coverage, Details, Device, DeviceReading, Moment, Process, Run, Source, State,
};
use gpumem_model::series::{Bucket, Extremes, Series};
use gpumem_model::timeline::{Point, Timeline};
use std::collections::BTreeMap;

const MIB: i64 = 1 << 20;
const S: u64 = 1_000_000_000;
/// A day in November, in the afternoon.
const WALL_NS: i64 = 1_795_190_400_000_000_000;

/// Parameters of a training run.
#[derive(Debug, Clone, Copy)]
pub struct Training {
    /// Number of layers of the model; each has 34 cells.
    pub layers: u32,
    /// Number of devices.
    pub devices: u16,
    /// Points of timelines.
    pub points: usize,
    /// Buckets of series.
    pub buckets: usize,
    /// Duration in seconds.
    pub seconds: u64,
    /// The run ended with an OOM.
    pub has_oom: bool,
}

impl Training {
    /// A small program on one GPU that ends successfully.
    pub const SMALL: Training =
        Training { layers: 4, devices: 1, points: 120, buckets: 300, seconds: 600, has_oom: false };
    /// The largest supported run.
    pub const HUGE: Training =
        Training { layers: 400, devices: 1, points: 256, buckets: 1024, seconds: 400_000, has_oom: true };
    /// One process on eight GPUs.
    pub const EIGHT: Training =
        Training { layers: 32, devices: 8, points: 256, buckets: 1024, seconds: 7200, has_oom: true };
}

/// Names of the modules of a layer, and their share in MiB.
const MODULES: [(&str, i64); 5] =
    [("attn/qkv_proj", 12), ("attn/out_proj", 4), ("mlp/up_proj", 16), ("mlp/down_proj", 16), ("norm", 1)];
/// Memory of a module: role, phase, factor, and whether it is freed in each step.
const ROLES: [(&str, &str, i64, bool); 4] = [
    ("parameter", "setup", 1, false),
    ("gradient", "backward", 1, true),
    ("optimizer state", "optimizer", 2, false),
    ("activation", "forward", 3, true),
];

/// Returns the cells of a model with this many layers, each with its maximum bytes and whether it is temporary.
fn cells(layers: u32) -> Vec<(Cell, i64, bool)> {
    let text = |text: &str| Some(text.to_owned());
    let mut all = Vec::new();
    for layer in 0..layers {
        for (module, mib) in MODULES {
            for (role, phase, factor, is_moving) in ROLES {
                let tag = format!("GPT/layers.{layer}/{module}");
                let cell = Cell {
                    class: Class::Block,
                    tag: Some(tag),
                    role: text(role),
                    phase: text(phase),
                    pool: text("torch"),
                    ..Cell::default()
                };
                all.push((cell, mib * factor * MIB + 512, is_moving));
            }
        }
    }
    let block = |tag: &str, role: &str| Cell {
        class: Class::Block,
        tag: text(tag),
        role: text(role),
        pool: text("torch"),
        ..Cell::default()
    };
    let nccl = Cell { class: Class::Direct, library: text("/usr/lib/libnccl.so.2"), ..Cell::default() };
    let idle = Cell { class: Class::PoolIdle, pool: text("torch"), ..Cell::default() };
    for (role, phase, ..) in ROLES {
        let cell = Cell { phase: text(phase), ..block("(smaller ones)", role) };
        all.push((cell, 0, false));
    }
    all.push((block("GPT/embed", "parameter"), 96 * MIB, false));
    all.push((block("GPT/lm_head", "activation"), 300 * MIB, true));
    all.push((block("optimizer", "workspace"), 32 * MIB, true));
    all.push((nccl, 632 * MIB, false));
    all.push((idle, 200 * MIB, true));
    all
}

/// Returns all amounts when this share of the temporary memory is present, in eighths.
fn amounts(cells: &[(Cell, i64, bool)], eighths: i64) -> gpumem_model::run::Amounts {
    let held = cells.iter().map(|(_, most, is_moving)| if *is_moving { most * eighths / 8 } else { *most });
    (0_u32..).zip(held).filter(|(_, bytes)| *bytes != 0).collect()
}

fn sum(amounts: &[(u32, i64)]) -> i64 {
    amounts.iter().map(|(_, bytes)| bytes).sum()
}

/// The program's own annotations: a growing counter, and the activity in each step.
fn own(until_ns: u64) -> ProgramData {
    let points = (1..=40).map(|part| (10 * S + part * until_ns / 40, part as i64 * 32)).collect();
    let counter = Counter {
        name: Some("samples".into()),
        value: 1280,
        changes: 40,
        min: 32,
        max: 1280,
        area: i128::from(until_ns) * 640,
        since_ns: 10 * S,
        until_ns: 10 * S + until_ns,
        points,
    };
    let range = |name: &str, part: u64| Range {
        name: Some(name.into()),
        count: 40,
        total_ns: until_ns / part,
        min_ns: until_ns / part / 50,
        max_ns: until_ns / part / 30,
        ..Range::default()
    };
    ProgramData {
        counters: vec![counter],
        ranges: vec![range("load", 4), range("load/decode", 5)],
        spans: vec![Span(0, 41_873, 10 * S, 11 * S), Span(1, 41_873, 10 * S, 10 * S + 1)],
        ..ProgramData::default()
    }
}

/// Returns a training run with PyTorch.
pub fn training(of: Training) -> Run {
    let cells = cells(of.layers);
    let devices = (0..of.devices).map(|ordinal| device(of, ordinal, &cells)).collect();
    let facts = [
        ("command", "/usr/bin/python3 /home/alice/train.py --config big.yaml"),
        ("user", "alice"),
        ("comm", "python3"),
    ];
    let map = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect::<BTreeMap<_, _>>()
    };
    Run {
        source: Source { kind: "daemon".into(), origin: "node7".into(), preset: None },
        clock: Clock::Monotonic { wall_offset_ns: Some(WALL_NS) },
        process: Process {
            pid: 41_873,
            start_ticks: 7,
            uid: Some(1000),
            facts: map(&facts),
            claims: map(&[("rank", "3"), ("job", "8812")]),
        },
        state: State::Closed {
            time_ns: (10 + of.seconds) * S,
            status: Some(if of.has_oom { 256 } else { 0 }),
        },
        coverage: Coverage {
            covered: true,
            events: 10_000_000,
            allocations: 5_000_000,
            allocated_bytes: 1 << 50,
            samples: of.seconds,
            torn_samples: 3,
            steps: of.seconds / 2,
            failed_allocations: u64::from(of.has_oom),
            ..Coverage::default()
        },
        caveats: vec![Caveat {
            code: "made_up".into(),
            text: "this run is made up: it shows what a page looks like".into(),
        }],
        cells: cells.into_iter().map(|(cell, ..)| cell).collect(),
        devices,
        own: own(of.seconds * S),
    }
}

/// Gives the first device of a run 5 steps of single blocks: in each step 40 activations are made, which are freed in reverse.
/// 40 parameters are live all the time.
pub fn with_blocks(mut run: Run) -> Run {
    let named = (0..).zip(&run.cells).filter(|(_, cell)| cell.tag.is_some() && cell.class == Class::Block);
    let cells: Vec<u32> = named.map(|(index, _)| index).take(40).collect();
    let device = &mut run.devices[0];
    let from_ns = device.last.time_ns - 5 * S;
    let mut blocks = Blocks { from_ns, to_ns: from_ns + 5 * S, is_cut: true, ..Blocks::default() };
    for (at, &cell) in (1..).zip(&cells) {
        let block = Block { address: at << 30, bytes: at << 20, cell, made_ns: None, freed_ns: None };
        blocks.blocks.push(block);
        for step in 0..5 {
            let begin_ns = from_ns + step * S;
            let (made_ns, freed_ns) = (begin_ns + at * S / 100, begin_ns + S - at * S / 100);
            let made = Block { made_ns: Some(made_ns), freed_ns: Some(freed_ns), ..block };
            blocks.blocks.push(Block { bytes: at << 19, address: (at << 30) + (1 << 29), ..made });
        }
    }
    blocks.steps = (0..5).map(|step| (from_ns + step * S, 95 + step)).collect();
    blocks.tracked = vec![(from_ns, 2000 * MIB), (from_ns + 2 * S, 2100 * MIB)];
    device.details.blocks = blocks;
    run
}

fn device(of: Training, ordinal: u16, cells: &[(Cell, i64, bool)]) -> Device {
    let from = 10 * S;
    let at = |part: u64, parts: usize| from + of.seconds * S / parts.max(1) as u64 * part;
    // Memory rises in the first tenth, then goes up and down with the steps.
    let eighths = |part: u64, parts: usize| match part * 10 / parts.max(1) as u64 {
        0 => (part % 3) as i64,
        9 => 8,
        tenth => (part * 5 % 7) as i64 + i64::from(tenth > 4),
    };
    let gap =
        |part: u64, parts: usize| (498 + if part * 3 > parts as u64 { 412 } else { 0 }) * MIB + 216 * MIB;
    let sums =
        cells.iter().enumerate().filter(|(_, (cell, ..))| cell.tag.as_deref() == Some("(smaller ones)"));
    let sums: BTreeMap<&Option<String>, u32> = sums.map(|(at, (cell, ..))| (&cell.role, at as u32)).collect();
    let fold_of = |cell: u32| sums.get(&cells[cell as usize].0.role).copied().unwrap_or(cell);
    let point = |part: u64| {
        let mut amounts = amounts(cells, eighths(part, of.points));
        amounts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        // Small amounts are summed by role.
        let most = amounts.len().min(40);
        for (cell, bytes) in amounts.split_off(most) {
            let sum = fold_of(cell);
            match amounts.iter_mut().find(|(cell, _)| *cell == sum) {
                Some((_, sum)) => *sum += bytes,
                None => amounts.push((sum, bytes)),
            }
        }
        amounts.sort_unstable();
        Point { time_ns: at(part, of.points), amounts, rest_bytes: 0 }
    };
    let points: Vec<Point> = (0..of.points as u64).map(point).collect();
    let bucket = |part: u64| {
        let [low, high] = [0, 8].map(|eighths| sum(&amounts(cells, eighths)));
        let held = sum(&amounts(cells, eighths(part, of.buckets)));
        let gap = gap(part, of.buckets);
        let level = |bytes: i64| Extremes {
            min: bytes.min(low.max(bytes - 300 * MIB)),
            max: bytes.max(high.min(bytes + 200 * MIB)),
            last: bytes,
        };
        Bucket {
            time_ns: at(part, of.buckets),
            used: Some(level(held + gap)),
            tracked: Some(level(held)),
            untrackable: Some(Extremes::at(gap)),
            samples: 4,
            doubtful: 0,
        }
    };
    let series =
        Series { width_ns: at(1, of.buckets) - from, buckets: (0..of.buckets as u64).map(bucket).collect() };
    let parts = UntrackableParts {
        context_bytes: 498 * MIB,
        modules_bytes: 412 * MIB,
        local_memory_bytes: 130 * MIB,
        rounding_bytes: 30 * MIB,
        unexplained_bytes: 56 * MIB,
        ..UntrackableParts::default()
    };
    let moment = |time_ns: u64, eighths: i64| {
        let amounts = amounts(cells, eighths);
        Moment {
            time_ns,
            tracked_bytes: Some(sum(&amounts)),
            amounts,
            predates_bytes: Some(0),
            untrackable_bytes: Some(parts.sum()),
            parts: Some(parts),
            ..Moment::default()
        }
    };
    let end = from + of.seconds * S;
    let peak_ns = points.iter().max_by_key(|point| point.tracked_bytes()).map_or(end, |point| point.time_ns);
    let (last, mut peak) = (moment(end, 5), moment(peak_ns, 8));
    peak.gap_distance_ns = 400_000_000;
    let [used, top] = [&last, &peak].map(|moment| moment.used_bytes().unwrap_or(0));
    let total = (top + 9000 * MIB) as u64;
    let tenant = 3310 * MIB as u64;
    let free = total - used as u64 - tenant - 64 * MIB as u64 - 623 * MIB as u64;
    let oom = of.has_oom.then(|| oom(&peak, top, total, end));
    Device {
        name: format!("GPU-{:08x}-0000-1111-2222-333344445555", 0x5f1c_0000_u32 + u32::from(ordinal)),
        ordinal,
        model: "NVIDIA H100 80GB HBM3".into(),
        total_bytes: Some(total),
        peak_used: Some((top as u64, peak_ns)),
        beside: gpumem_model::run::SideMemory { pinned_bytes: 512 * MIB, ..Default::default() },
        reading: Some(DeviceReading {
            time_ns: end,
            used_bytes: total - free,
            free_bytes: free,
            system_reserved_bytes: Some(623 * MIB as u64),
            unified: false,
        }),
        unaccounted_bytes: Some(64 * MIB),
        tenants: vec![(52_110, Some(tenant))],
        other_tenants: (0, 0),
        series,
        details: Details {
            steps: steps(of, parts),
            timeline: Timeline { width_ns: 1, points },
            iterations: iterations(of, peak.tracked_bytes.unwrap_or(0)),
            parameters: Parameters {
                columns: ["parameter", "gradient"]
                    .map(|role| Column { role: role.into(), tag: Some("model/head".into()) })
                    .into(),
                is_cut: false,
                changes: vec![(10 * S, vec![(0, 512 * MIB), (1, 256 * MIB)])],
            },
            ooms: oom.into_iter().collect(),
            ..Details::default()
        },
        last,
        peak,
    }
}

fn steps(of: Training, parts: UntrackableParts) -> Vec<UntrackableChange> {
    let step =
        |seconds: u64, parts: UntrackableParts, cause: &str, kind: &str, tag: &str| UntrackableChange {
            time_ns: (10 + seconds) * S,
            bytes: parts.sum(),
            parts,
            cause: cause.into(),
            events: 1,
            kind: kind.into(),
            tag: Some(tag.into()),
            ..UntrackableChange::default()
        };
    vec![
        step(
            0,
            UntrackableParts { context_bytes: parts.context_bytes, ..UntrackableParts::default() },
            "context created",
            "measured",
            "setup",
        ),
        step(
            of.seconds / 3,
            UntrackableParts { modules_bytes: parts.modules_bytes, ..UntrackableParts::default() },
            "module loaded",
            "upper_bound",
            "GPT/layers.0/attn",
        ),
        step(
            of.seconds / 2,
            UntrackableParts {
                local_memory_bytes: parts.local_memory_bytes,
                unexplained_bytes: 56 * MIB,
                ..UntrackableParts::default()
            },
            "stack limit",
            "model",
            "GPT/layers.3/mlp",
        ),
    ]
}

fn iterations(of: Training, peak: i64) -> Iterations {
    let level = |peak_bytes: i64, last_bytes: i64| Level { peak_bytes, last_bytes };
    let row = |first: u64| Iteration {
        first,
        last: first,
        count: 1,
        start_ns: first * S,
        end_ns: (first + 1) * S,
        tracked: level(peak - (first as i64 % 5) * 10 * MIB, peak / 2),
        pool_reserved: level(peak / 2, peak / 2),
        parameters: level(peak / 8, peak / 8),
        gradients: level(peak / 8, 0),
        optimizer_state: level(peak / 4, peak / 4),
        activations: level(peak / 3, 0),
        ..Iteration::default()
    };
    Iterations { rows: (0..of.seconds.min(256)).map(row).collect(), open: None }
}

fn oom(peak: &Moment, used: i64, total: u64, end_ns: u64) -> Oom {
    let free = total as i64 - used - 6644 * MIB - 687 * MIB;
    let holder = |pid: u32, user: &str, used_bytes: i64, growth: i64| Holder {
        pid,
        user: Some(user.into()),
        used_bytes,
        growth_bytes: Some(growth * MIB),
        growth_ns: Some(60 * S),
        since_ns: None,
    };
    Oom {
        kind: OomKind::Device,
        fate: Fate::Fatal { after_ns: 800_000_000, status: Some(256) },
        time_ns: end_ns - S,
        last_ns: end_ns - S,
        count: 1,
        refusals: 2,
        asked_bytes: 2048 * MIB as u64,
        driver_asked_bytes: Some(2048 * MIB as u64),
        device_free_bytes: Some(free as u64),
        tag: Some("GPT/layers.3/mlp/up_proj".into()),
        phase: Some("forward".into()),
        step: Some(18_221),
        tracked_bytes: peak.tracked_bytes.unwrap_or(0),
        amounts: peak.amounts.clone(),
        predates_bytes: Some(0),
        untrackable_bytes: peak.untrackable_bytes,
        idle_bytes: Some(200 * MIB as u64),
        largest_idle_bytes: Some(64 * MIB as u64),
        device: Some(OomDevice {
            read_ns: end_ns - S,
            total_bytes: total,
            free_bytes: free,
            system_bytes: Some(623 * MIB as u64),
            unaccounted_bytes: 64 * MIB,
            unified: false,
            holders: vec![holder(41_873, "alice", used, 1922), holder(52_110, "bob", 6644 * MIB, 3334)],
            others: (0, 0),
        }),
        ..Oom::default()
    }
}
