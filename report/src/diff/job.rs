//! Several processes as one side of a comparison: the ranks of a job, or what a launcher started. What each has on a device is a
//! device of the sum, named after its rank, so that ranks stand beside each other and all of them add up.

use gpumem_model::fields::Field;
use gpumem_model::run::{Caveat, Coverage, Details, Device, Own, Process, Run, Source, State};

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
    for (place, mut run) in runs.into_iter().enumerate() {
        let name =
            rank(&run).map_or_else(|| format!("{MEMBER}- ({place})"), |rank| format!("{MEMBER}{rank}"));
        sum.coverage.add(&run.coverage);
        let offset = sum.cells.len() as u32;
        run.remap(&|cell| Some(cell.saturating_add(offset)));
        sum.cells.extend(run.cells);
        let several = run.devices.len() > 1;
        for device in run.devices {
            let mut name = if several { format!("{name}, GPU {}", device.ordinal) } else { name.clone() };
            if sum.devices.iter().any(|known| known.name == name) {
                name = format!("{name} ({place})"); // two processes claim one rank
            }
            let ordinal = u16::try_from(sum.devices.len()).unwrap_or(u16::MAX);
            let details = Details { ooms: device.details.ooms, ..Details::default() };
            sum.devices.push(Device { name, ordinal, details, ..device });
        }
    }
    let text = if count == 1 { title.to_owned() } else { format!("{title}, each at its own time") };
    sum.caveats.push(Caveat { code: "job".into(), text });
    sum
}
