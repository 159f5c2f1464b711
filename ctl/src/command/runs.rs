//! `gpumemctl runs`: lists the runs of the store, optionally filtered.

use crate::args::Runs;
use crate::exit::Kind;
use crate::output::{print, width};
use crate::when::{When, now_ns};
use anyhow::Result;
use gpumem_model::run::{Clock, State};
use gpumem_model::time::{date_minute, duration};
use gpumem_model::units::{Unit, plural, signed};
use gpumem_report::table::{Align, Table, cut, pad, shorten, width as width_of};
use gpumem_report::text::{command_line, escape, exit, wrapped};
use gpumem_runs::store::{Filter, STATES, SelectedRun, Store, state_name};

pub(crate) fn run(args: &Runs) -> Result<()> {
    let store = Store::open_read_only(args.store.readable()?)?;
    let runs = store.select(&filter(args)?)?;
    if args.json {
        let list: Vec<_> = runs.iter().map(row_json).collect();
        return print(&gpumem_model::escape::json(&list));
    }
    let size = store.room()?.file_bytes;
    print(&table(&runs, size, width()))
}

fn filter(args: &Runs) -> Result<Filter> {
    let now = now_ns();
    let at = |when: &Option<When>, option: &str| -> Result<Option<i64>> {
        let at = when.as_ref().map(|when| when.unix_ns(now)).transpose();
        at.map_err(|why| Kind::Usage.error(format!("{option} {why}")))
    };
    Ok(Filter {
        user: args.user.clone(),
        ancestor: None,
        job: args.job.clone(),
        device: args.device.clone(),
        since_ns: at(&args.since, "--since")?,
        until_ns: at(&args.until, "--until")?,
        state: args.state.as_deref().and_then(|asked| STATES.into_iter().find(|state| *state == asked)),
        oom: args.oom,
        label: args.label.clone(),
        sort: args.sort,
        limit: args.limit.and_then(|limit| usize::try_from(limit).ok()),
    })
}

/// Columns of the table, except the last one: heading and alignment.
pub(super) const COLUMNS: [(&str, Align); 10] = [
    ("RUN", Align::Left),
    ("STORED", Align::Left),
    ("PID", Align::Right),
    ("USER", Align::Left),
    ("GPU", Align::Left),
    ("STATE", Align::Left),
    ("EXIT", Align::Left),
    ("TIME", Align::Right),
    ("PEAK", Align::Right),
    ("OOM", Align::Right),
];
const LABEL: &str = "COMMAND";
/// Columns that a narrow terminal omits, in this order.
const OMITTED: [&str; 4] = ["USER", "GPU", "PID", "TIME"];
/// Number of columns of the terminal that the command needs before others are omitted.
const LEAST_LABEL: usize = 20;
/// Minimum number of columns for the command itself, before the rank and the job.
const LEAST_COMMAND: usize = 10;

fn table(runs: &[SelectedRun], store_bytes: u64, terminal: Option<usize>) -> String {
    let unit = Unit::for_largest(runs.iter().filter_map(peak).max().unwrap_or(0));
    let rows: Vec<[String; 10]> = runs.iter().map(|listed| cells(listed, unit)).collect();
    // A column that is empty in all rows is not shown.
    let mut shown: Vec<usize> =
        (0..COLUMNS.len()).filter(|column| rows.iter().any(|row| !row[*column].is_empty())).collect();
    let table = |shown: &[usize]| {
        let mut table = Table::new(shown.iter().map(|column| COLUMNS[*column].1).collect::<Vec<_>>());
        table.row(shown.iter().map(|column| COLUMNS[*column].0));
        rows.iter().for_each(|row| table.row(shown.iter().map(|column| row[*column].clone())));
        table
    };
    let mut printed = table(&shown);
    for omitted in OMITTED {
        if terminal.is_none_or(|terminal| printed.width() + LEAST_LABEL <= terminal) {
            break;
        }
        shown.retain(|column| COLUMNS[*column].0 != omitted);
        printed = table(&shown);
    }
    let width = printed.width();
    let room = terminal.map_or(usize::MAX, |terminal| terminal.saturating_sub(width));
    let labels = [LABEL.to_owned()].into_iter().chain(runs.iter().map(|listed| label(listed, room)));
    let row = |(line, label): (&String, String)| {
        let line = pad(line, width, Align::Left) + cut(&label, room);
        line.trim_end().to_owned() + "\n"
    };
    let out: String = printed.lines().iter().zip(labels).map(row).collect();
    let has_used =
        runs.iter().any(|listed| listed.run.peak_tracked_bytes.is_none() && peak(listed).is_some());
    let used = if has_used { ", * of used" } else { "" };
    let (count, unit) = (plural(runs.len() as u64, "run"), unit.name);
    let size = Unit::for_largest(signed(store_bytes)).amount_with_name(signed(store_bytes));
    let summary = format!(
        "{count}, peak of tracked in {unit}{used}; the store takes {size}; next: gpumemctl report RUN | diff RUN RUN"
    );
    out + &wrapped(&summary, terminal).join("\n") + "\n"
}

/// Returns the highest tracked bytes, or else the highest bytes that NVML charged.
fn peak(listed: &SelectedRun) -> Option<i64> {
    listed.run.peak_tracked_bytes.or(listed.peak_used_bytes)
}

/// Returns the cells of a row, in the order of [`COLUMNS`].
fn cells(listed: &SelectedRun, unit: Unit) -> [String; 10] {
    let run = &listed.run;
    let user = listed.user.as_deref().map(escape).or(listed.uid.map(|uid| uid.to_string()));
    let gpus: Vec<String> = listed.gpus.iter().map(ToString::to_string).collect();
    let status = match run.state {
        State::Closed { status: Some(status), .. } => exit(status).replace("exit ", ""),
        _ => String::new(),
    };
    let length = run.started_ns.zip(run.last_ns).filter(|_| run.clock != Clock::Lines);
    let length = length.map(|(from_ns, to_ns)| duration(to_ns.saturating_sub(from_ns)));
    let is_used = run.peak_tracked_bytes.is_none();
    [
        run.id.to_string(),
        date_minute(run.stored_s),
        if run.pid == 0 { "-".to_owned() } else { run.pid.to_string() },
        user.unwrap_or_else(|| "-".into()),
        shorten(&gpus.join(","), 8, false),
        state_name(run.state).to_owned(),
        status,
        length.unwrap_or_default(),
        peak(listed).map_or("-".to_owned(), |bytes| unit.amount(bytes) + if is_used { "*" } else { "" }),
        if listed.ooms == 0 { String::new() } else { listed.ooms.to_string() },
    ]
}

/// Returns the label of a row: command, file of origin, rank, job, and number of the part if the run is stored in parts. The
/// command is shortened so that the label fits into `columns`.
fn label(listed: &SelectedRun, columns: usize) -> String {
    let run = &listed.run;
    let mut rest = String::new();
    if run.source_kind != "daemon" && run.label != run.source_origin {
        rest += &format!(" ({})", escape(&run.source_origin));
    }
    if let Some(rank) = &listed.rank {
        rest += &format!(" rank {}", escape(rank));
    }
    if let Some(job) = &listed.job {
        rest += &format!(" [{}]", escape(job));
    }
    match run.continues {
        Some(before) => rest += &format!("  part {} of its life, after {before}", run.part),
        None if run.part > 1 => rest += &format!("  part {} of its life", run.part),
        None => {}
    }
    command_line(&run.label, columns.saturating_sub(width_of(&rest)).max(LEAST_COMMAND)) + &rest
}

fn row_json(listed: &SelectedRun) -> serde_json::Value {
    let run = &listed.run;
    let status = if let State::Closed { status, .. } = run.state { status } else { None };
    serde_json::json!({
        "run": run.id.to_string(),
        "uid": run.uid,
        "label": run.label,
        "pid": run.pid,
        "user": listed.user,
        "owner_uid": listed.uid,
        "job": listed.job,
        "rank": listed.rank,
        "devices": listed.devices,
        "gpus": listed.gpus,
        "source": run.source_kind,
        "origin": run.source_origin,
        "state": state_name(run.state),
        "status": status,
        "part": run.part,
        "continues": run.continues.map(|id| id.to_string()),
        "stored_s": run.stored_s,
        "started_ns": run.started_ns,
        "last_ns": run.last_ns,
        "peak_tracked_bytes": run.peak_tracked_bytes,
        "peak_used_bytes": listed.peak_used_bytes,
        "ooms": listed.ooms,
        "events": run.events,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_import::read_file;
    use std::path::Path;

    /// Returns the listed runs of a store with one run of a daemon.
    fn listed(command: &str, status: u64, rank: Option<&str>) -> Vec<SelectedRun> {
        let folder = std::env::temp_dir().join(format!("gpumemctl-runs-{}-{status}", std::process::id()));
        let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = read_file(&log, None).expect("a log").remove(0);
        run.source.kind = "daemon".into();
        run.clock = Clock::Monotonic { wall_offset_ns: Some(0) };
        run.process.facts.insert("command".into(), command.into());
        run.process.facts.insert("user".into(), "alice".into());
        run.process.claims.extend(rank.map(|rank| ("rank".to_owned(), rank.to_owned())));
        let device = &mut run.devices[0];
        device.ordinal = 3;
        for bucket in &mut device.series.buckets {
            bucket.time_ns = 7_000_000_000;
        }
        for moment in [&mut device.last, &mut device.peak] {
            moment.time_ns = 648_000_000_000;
        }
        run.state = State::Closed { time_ns: 648_000_000_000, status: Some(status) };
        let mut store = Store::open(folder.join("runs.sqlite")).expect("a store");
        store.insert(&run, "boot:1").expect("saved");
        let runs = store.select(&Filter::default()).expect("selected");
        std::fs::remove_dir_all(&folder).expect("removed");
        runs
    }

    #[test]
    fn table_shows_arguments_gpu_time_and_exit_code() {
        let runs = listed("/usr/bin/python train.py --steps 4000 --leak", 256, Some("5"));
        let text = table(&runs, 0, None);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0].join(" "), "RUN STORED PID USER GPU STATE EXIT TIME PEAK COMMAND");
        let shown = rows[1][3..].join(" ");
        assert_eq!(shown, "20417 alice 3 ended 1 10m41s 298.5 python train.py --steps 4000 --leak rank 5");
        assert!(table(&listed("mixer", 9, None), 0, None).contains("  ended  signal 9  "));
    }

    #[test]
    fn table_is_never_wider_than_the_terminal() {
        let command = format!("python 训练.py {}--last 模型", "--option 值 ".repeat(30));
        let runs = listed(&command, 0, Some("5"));
        for columns in [80, 100, 120] {
            let text = table(&runs, 0, Some(columns));
            let rows: Vec<&str> = text.lines().take(2).collect();
            assert!(rows.iter().all(|row| width_of(row) <= columns), "{text}");
            assert!(rows[1].contains("  python 训练.py") && rows[1].ends_with(" rank 5"), "{text}");
        }
        assert!(!table(&runs, 0, Some(80)).contains("USER"));
        assert!(table(&runs, 0, Some(140)).contains("USER"));
    }
}
