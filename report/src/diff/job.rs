//! Several processes as one side of a comparison: the ranks of a job, or what a launcher started. What each has on a device is a
//! device of the sum, named after its rank, so that ranks stand beside each other and all of them add up.

use gpumem_model::run::{Caveat, Coverage, Device, Moment, Oom, Own, Process, Run, Source, State};

/// How the names of such devices begin: what driver and logs call theirs does not.
pub(crate) const MEMBER: &str = "rank ";

/// The processes as one run, by rank; `title` says what they are: `8 processes of job bert`. Their peaks are of different times: the sum is what
/// was needed if every process is counted at its own.
pub fn together(title: &str, mut runs: Vec<Run>) -> Run {
    let rank = |run: &Run| run.process.claims.get("rank").and_then(|rank| rank.parse::<u64>().ok());
    runs.sort_by_key(|run| (rank(run).is_none(), rank(run), run.process.start_ticks, run.process.pid));
    let command = runs.iter().find_map(|run| run.process.facts.get("command").cloned());
    let count = runs.len();
    let first = runs.first();
    let mut sum = Run {
        source: Source {
            kind: first.map(|run| run.source.kind.clone()).unwrap_or_default(),
            origin: first.map(|run| run.source.origin.clone()).unwrap_or_default(),
            preset: first.and_then(|run| run.source.preset.clone()),
        },
        clock: first.map_or(gpumem_model::run::Clock::Lines, |run| run.clock),
        process: Process {
            facts: command.map(|command| ("command".into(), command)).into_iter().collect(),
            ..Process::default()
        },
        state: if runs.iter().any(|run| run.state == State::Open) { State::Open } else { State::Interrupted },
        coverage: Coverage::default(),
        caveats: Vec::new(),
        cells: Vec::new(),
        devices: Vec::new(),
        own: Own::default(),
    };
    for (place, run) in runs.into_iter().enumerate() {
        let name =
            rank(&run).map_or_else(|| format!("{MEMBER}- ({place})"), |rank| format!("{MEMBER}{rank}"));
        add_coverage(&mut sum.coverage, &run.coverage);
        let offset = sum.cells.len() as u32;
        sum.cells.extend(run.cells);
        let several = run.devices.len() > 1;
        for device in run.devices {
            let mut name = if several { format!("{name}, GPU {}", device.ordinal) } else { name.clone() };
            if sum.devices.iter().any(|known| known.name == name) {
                name = format!("{name} ({place})"); // two processes claim one rank
            }
            let ordinal = u16::try_from(sum.devices.len()).unwrap_or(u16::MAX);
            sum.devices.push(Device {
                name,
                ordinal,
                last: shifted(device.last, offset),
                peak: shifted(device.peak, offset),
                details: gpumem_model::run::Details {
                    ooms: device.details.ooms.into_iter().map(|oom| shifted_oom(oom, offset)).collect(),
                    ..gpumem_model::run::Details::default()
                },
                ..device
            });
        }
    }
    let text = if count == 1 { title.to_owned() } else { format!("{title}, each at its own time") };
    sum.caveats.push(Caveat { code: "job".into(), text });
    sum
}

/// What is in doubt of one is in doubt of the sum.
fn add_coverage(sum: &mut Coverage, of: &Coverage) {
    sum.covered |= of.covered;
    sum.late |= of.late;
    sum.blocked_by = sum.blocked_by.take().or_else(|| of.blocked_by.clone());
    sum.blind_doubt |= of.blind_doubt;
    sum.partial_state |= of.partial_state;
    sum.partial_history |= of.partial_history;
    sum.add_counts(of);
}

fn shifted(moment: Moment, offset: u32) -> Moment {
    Moment { amounts: shifted_amounts(moment.amounts, offset), ..moment }
}

fn shifted_oom(oom: Oom, offset: u32) -> Oom {
    Oom { amounts: shifted_amounts(oom.amounts, offset), ..oom }
}

/// The same amounts, of cells that come behind `offset` others.
fn shifted_amounts(amounts: Vec<(u32, i64)>, offset: u32) -> Vec<(u32, i64)> {
    amounts.into_iter().map(|(cell, bytes)| (cell.saturating_add(offset), bytes)).collect()
}
