//! Selects runs by a filter. The filter becomes an SQL condition; only the state is checked after reading.

use super::error::Result;
use super::file::{RunSummary, SUMMARY, Store, summary};
use super::tables;
use gpumem_model::run::State;
use rusqlite::types::ToSql;

/// Conditions, order and limit of a selection of runs. The default selects all runs, the newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only runs of this user (name or uid).
    pub user: Option<String>,
    /// Job id, the name of a job whose id has the form NAME.ID, Slurm job, pod uid, or pod name.
    pub job: Option<String>,
    /// Only runs of processes that this pid has started, directly or not.
    pub ancestor: Option<u32>,
    /// Number of a device, or the beginning of its UUID.
    pub device: Option<String>,
    /// Runs that had not ended before this time, in ns since 1970.
    pub since_ns: Option<i64>,
    /// Runs that began at or before this time, in ns since 1970.
    pub until_ns: Option<i64>,
    /// Only runs in this state, see [`state_name`].
    pub state: Option<&'static str>,
    /// Only runs in which memory ran out or is suspected to have run out.
    pub oom: bool,
    /// Text in the command, the source's origin or the job's name: a substring, or with `*` and `?` a pattern for the whole.
    pub label: Option<String>,
    pub sort: Sort,
    pub limit: Option<usize>,
}

/// Order of the selected runs: largest or newest first, labels in ascending order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sort {
    #[default]
    Stored,
    Started,
    /// Highest tracked bytes; for a process without an agent, highest bytes that NVML charged.
    Peak,
    Events,
    Label,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectedRun {
    pub run: RunSummary,
    pub user: Option<String>,
    pub uid: Option<u64>,
    pub job: Option<String>,
    pub rank: Option<String>,
    pub devices: Vec<String>,
    /// NVML index of each device.
    pub gpus: Vec<i64>,
    /// Highest bytes that NVML charged to the process on any device of the run.
    pub peak_used_bytes: Option<i64>,
    /// Number of OOM records in which memory ran out or is suspected to have run out. Repeated failures share a record.
    pub ooms: u64,
}

/// Names of states, as used in filters.
pub const STATES: [&str; 4] = ["running", "ended", "interrupted", "rolled"];

pub fn state_name(state: State) -> &'static str {
    let [running, ended, interrupted, rolled] = STATES;
    match state {
        State::Open => running,
        State::Closed { .. } => ended,
        State::Interrupted => interrupted,
        State::Rolled { .. } => rolled,
    }
}

/// SQL for the number of OOM records in which memory ran out (see `Oom::is_out_of_memory`) or is suspected to have run out. Older
/// schemas store these in the row `rest`.
const OOMS: &str = "(SELECT count(*) FROM detail, json_each(CASE
        WHEN name NOT IN ('ooms', 'rest') OR NOT json_valid(body) THEN '[]'
        WHEN name = 'ooms' THEN body
        ELSE coalesce(json_extract(body, '$.ooms'), '[]') END) AS oom
    WHERE detail.run = run.id AND name IN ('ooms', 'rest') AND (oom.value ->> '$.kind' IN ('pool', 'device', 'suspected')
        OR (oom.value ->> '$.is_unheard' AND oom.value ->> '$.fate.fate' = 'fatal')))";
const STARTED: &str = "coalesce((wall_offset_ns + started_ns) / 1000000000, stored_s)";
const ENDED: &str = "coalesce((wall_offset_ns + last_ns) / 1000000000, max(stored_s, written_s))";
const PEAK_USED: &str = "(SELECT max(peak_used_bytes) FROM device WHERE run = run.id)";
const PEAK: &str = "(SELECT max(tracked_bytes) FROM moment WHERE run = run.id AND kind = 'peak')";

impl Store {
    pub fn select(&self, filter: &Filter) -> Result<Vec<SelectedRun>> {
        let mut conditions: Vec<String> = Vec::new();
        let mut values: Vec<Box<dyn ToSql>> = Vec::new();
        let mut add = |condition: &str, value: Box<dyn ToSql>| {
            values.push(value);
            conditions.push(condition.replace("?", &format!("?{}", values.len())));
        };
        if let Some(user) = &filter.user {
            let condition = "(facts ->> '$.user' = ? OR cast(owner_uid AS TEXT) = ?)";
            add(condition, Box::new(user.clone()));
        }
        if let Some(job) = &filter.job {
            // The same rule as `owner::is_of_job`: the filter is a whole id such as NAME.ID, or NAME, which ends at the last full
            // stop.
            let condition =
                "(claims ->> '$.job' = ? OR (substr(claims ->> '$.job', 1, length(?) + 1) = ? || '.'
                AND instr(substr(claims ->> '$.job', length(?) + 2), '.') = 0)
                OR coalesce(nullif(facts ->> '$.slurm_job', ''), nullif(facts ->> '$.mapped_job', ''),
                    claims ->> '$.slurm_job', claims ->> '$.slurm_job_id') = ?
                OR coalesce(facts ->> '$.pod_uid', claims ->> '$.pod_uid') = ? OR facts ->> '$.pod' = ?)";
            add(condition, Box::new(job.clone()));
        }
        if let Some(pid) = filter.ancestor {
            let condition = "instr(',' || (facts ->> '$.ancestors') || ',', ',' || ? || ',') > 0";
            add(condition, Box::new(pid));
        }
        if let Some(device) = &filter.device {
            let condition = match device.parse::<u32>() {
                Ok(_) => "EXISTS (SELECT 1 FROM device WHERE run = run.id AND ordinal = cast(? AS INTEGER))",
                Err(_) => {
                    "EXISTS (SELECT 1 FROM device
                        WHERE run = run.id AND lower(substr(name, 1, length(?))) = lower(?))"
                }
            };
            add(condition, Box::new(device.clone()));
        }
        if let Some(since_ns) = filter.since_ns {
            // The database may not have the end of a run with a writer, because its last changes may be in the delta log.
            add(
                &format!("({ENDED} >= ? OR writer_pid IS NOT NULL)"),
                Box::new(since_ns.div_euclid(1_000_000_000)),
            );
        }
        if let Some(until_ns) = filter.until_ns {
            add(&format!("{STARTED} <= ?"), Box::new(until_ns.div_euclid(1_000_000_000)));
        }
        if let Some(label) = &filter.label {
            let named = ["label", "source_origin", "coalesce(claims ->> '$.job', '')"];
            let fits = if label.contains(['*', '?']) {
                named.map(|name| format!("lower({name}) GLOB lower(@)"))
            } else {
                named.map(|name| format!("instr(lower({name}), lower(@)) > 0"))
            };
            add(&format!("({})", fits.join(" OR ")).replace('@', "?"), Box::new(label.clone()));
        }
        if filter.oom {
            conditions.push(format!("{OOMS} > 0"));
        }
        let conditions =
            if conditions.is_empty() { String::new() } else { format!("WHERE {}", conditions.join(" AND ")) };
        let order = match filter.sort {
            Sort::Stored => "id DESC".to_owned(),
            Sort::Started => format!("{STARTED} DESC, id DESC"),
            Sort::Peak => format!("coalesce({PEAK}, {PEAK_USED}) DESC NULLS LAST, id DESC"),
            Sort::Events => "events DESC, id DESC".to_owned(),
            Sort::Label => "label, id DESC".to_owned(),
        };
        let sql = format!(
            "SELECT {SUMMARY},
                facts ->> '$.user', owner_uid, claims ->> '$.job', claims ->> '$.rank',
                (SELECT json_group_array(name) FROM (SELECT name FROM device WHERE run = run.id ORDER BY idx)),
                {PEAK_USED}, {OOMS},
                (SELECT json_group_array(ordinal) FROM (SELECT ordinal FROM device WHERE run = run.id ORDER BY idx))
            FROM run {conditions} ORDER BY {order}"
        );
        let limit = filter.limit.unwrap_or(usize::MAX);
        let deltas = self.deltas(None)?;
        self.sql(|db| {
            let mut statement = db.prepare(&sql)?;
            let values: Vec<&dyn ToSql> = values.iter().map(AsRef::as_ref).collect();
            let rows = statement.query_map(values.as_slice(), |row| {
                let (run, figures) = summary(row, &deltas)?;
                Ok(SelectedRun {
                    run,
                    user: row.get(23)?,
                    uid: tables::maybe_unsigned(row, 24)?,
                    job: row.get(25)?,
                    rank: row.get(26)?,
                    devices: tables::from_json(row, 27)?,
                    peak_used_bytes: row.get::<_, Option<i64>>(28)?.max(figures.peak_used_bytes),
                    ooms: tables::unsigned(row, 29)?,
                    gpus: tables::from_json(row, 30)?,
                })
            })?;
            // The state depends on whether the writer is alive, so SQL cannot select by it.
            let matches =
                |listed: &SelectedRun| filter.state.is_none_or(|state| state_name(listed.run.state) == state);
            rows.filter(|row| row.as_ref().map_or(true, matches)).take(limit).collect()
        })
    }
}
