//! `gpumemctl runs`: lists the runs of the store, optionally filtered.

use crate::args::Runs;
use crate::exit::Kind;
use crate::output::{print, width};
use crate::when::{When, now_ns};
use anyhow::Result;
use gpumem_model::time::date_minute;
use gpumem_model::units::{Unit, plural, signed};
use gpumem_report::table::{Align, Table, cut};
use gpumem_report::text::{escape, short_command};
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
        job: args.job.clone(),
        device: args.device.clone(),
        since_ns: at(&args.since, "--since")?,
        until_ns: at(&args.until, "--until")?,
        state: args.state.as_deref().and_then(|asked| STATES.into_iter().find(|state| *state == asked)),
        oom: args.oom,
        label: args.label.clone(),
        sort: args.sort,
        limit: args.limit,
    })
}

fn table(runs: &[SelectedRun], store_bytes: u64, terminal: Option<usize>) -> String {
    let peak = |listed: &SelectedRun| listed.run.peak_tracked_bytes.or(listed.peak_used_bytes);
    let unit = Unit::for_largest(runs.iter().filter_map(peak).max().unwrap_or(0));
    use Align::{Left, Right};
    let mut table = Table::new([Left, Left, Right, Left, Left, Right, Right]);
    table.row_with_note(["RUN", "STORED", "PID", "USER", "STATE", "PEAK", "OOM"], "LABEL");
    for listed in runs {
        let run = &listed.run;
        let is_used = run.peak_tracked_bytes.is_none();
        let user = listed.user.as_deref().map(escape).or(listed.uid.map(|uid| uid.to_string()));
        let cells = [
            run.id.to_string(),
            date_minute(run.stored_s),
            if run.pid == 0 { "-".to_owned() } else { run.pid.to_string() },
            user.unwrap_or_else(|| "-".into()),
            state_name(run.state).to_owned(),
            peak(listed).map_or("-".to_owned(), |bytes| unit.amount(bytes) + if is_used { "*" } else { "" }),
            if listed.ooms == 0 { String::new() } else { listed.ooms.to_string() },
        ];
        table.row_with_note(cells, &label(listed));
    }
    let columns = terminal.unwrap_or(usize::MAX);
    let out: String = table.lines().iter().map(|line| cut(line, columns).to_owned() + "\n").collect();
    let has_used =
        runs.iter().any(|listed| listed.run.peak_tracked_bytes.is_none() && peak(listed).is_some());
    let used = if has_used { ", * of used" } else { "" };
    let (count, unit) = (plural(runs.len() as u64, "run"), unit.name);
    let size = Unit::for_largest(signed(store_bytes)).amount_with_name(signed(store_bytes));
    out + &format!(
        "{count}, peak of tracked in {unit}{used}; the store takes {size}; next: gpumemctl report RUN | diff RUN RUN\n"
    )
}

/// Returns the label of a row: command, file of origin, rank, job, and number of the part if the run is stored in parts.
fn label(listed: &SelectedRun) -> String {
    let run = &listed.run;
    let (label, origin) = (short_command(&run.label), escape(&run.source_origin));
    let mut label = match run.source_kind.as_str() {
        "daemon" => label,
        _ if label == origin => label,
        _ => format!("{label} ({origin})"),
    };
    if let Some(rank) = &listed.rank {
        label += &format!(" rank {}", escape(rank));
    }
    if let Some(job) = &listed.job {
        label += &format!(" [{}]", escape(job));
    }
    match run.continues {
        Some(before) => label += &format!("  part {} of its life, after {before}", run.part),
        None if run.part > 1 => label += &format!("  part {} of its life", run.part),
        None => {}
    }
    label
}

fn row_json(listed: &SelectedRun) -> serde_json::Value {
    let run = &listed.run;
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
        "source": run.source_kind,
        "origin": run.source_origin,
        "state": state_name(run.state),
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
