//! Runs that are asked for, by what the tables have columns of.

use super::error::Result;
use super::file::{RunSummary, Store, summary};
use gpumem_model::run::State;
use rusqlite::types::ToSql;

/// Which runs, and in what order. Nothing is asked for by default: all of them, the newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Name of the user, or the uid.
    pub user: Option<String>,
    /// The job's id, or the name that was put in front of it.
    pub job: Option<String>,
    /// Number of a device, or the beginning of its UUID.
    pub device: Option<String>,
    /// They had not ended before: nanoseconds since 1970.
    pub since_ns: Option<i64>,
    /// They had begun until then.
    pub until_ns: Option<i64>,
    /// How they are: see [`state_name`].
    pub state: Option<&'static str>,
    /// Memory ran out, or is suspected to have.
    pub oom: bool,
    /// In the command, the source's origin or the name of the job: a part of it, or with `*` and `?` all of one.
    pub label: Option<String>,
    /// Order.
    pub sort: Sort,
    /// Not more than so many.
    pub limit: Option<usize>,
}

/// What runs are ordered by; the largest or newest first, names from the first letter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sort {
    /// When they were stored.
    #[default]
    Stored,
    /// When they began.
    Started,
    /// The highest `tracked`, of a process without an agent the highest `used`.
    Peak,
    /// Ordered records.
    Events,
    /// The command.
    Label,
}

/// A run that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// As in the list of all.
    pub run: RunSummary,
    /// Its user's name.
    pub user: Option<String>,
    /// Its user's id.
    pub uid: Option<u64>,
    /// Id of its job.
    pub job: Option<String>,
    /// Its rank.
    pub rank: Option<String>,
    /// Names of its devices.
    pub devices: Vec<String>,
    /// Highest `used` that was read on any one of its devices.
    pub peak_used_bytes: Option<i64>,
    /// Times at which memory ran out, or is suspected to have.
    pub ooms: u64,
}

/// Names of states, as they are asked for.
pub const STATES: [&str; 4] = ["running", "ended", "interrupted", "rolled"];

/// How a state is called.
pub fn state_name(state: State) -> &'static str {
    let [running, ended, interrupted, rolled] = STATES;
    match state {
        State::Open => running,
        State::Closed { .. } => ended,
        State::Interrupted => interrupted,
        State::Rolled { .. } => rolled,
    }
}

/// `Oom::is_true` and suspicions, of a row of `detail`; runs of older schemas have all of them in one.
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
    /// Runs that are asked for.
    pub fn select(&self, filter: &Filter) -> Result<Vec<Listed>> {
        let mut conditions: Vec<String> = Vec::new();
        let mut values: Vec<Box<dyn ToSql>> = Vec::new();
        let mut ask = |condition: &str, value: Box<dyn ToSql>| {
            values.push(value);
            conditions.push(condition.replace("?", &format!("?{}", values.len())));
        };
        if let Some(user) = &filter.user {
            let condition = "(facts ->> '$.user' = ? OR cast(owner_uid AS TEXT) = ?)";
            ask(condition, Box::new(user.clone()));
        }
        if let Some(job) = &filter.job {
            // As `who::is_of_job`: NAME.ID is meant by both, and no name has a full stop behind it but that one.
            let condition =
                "(claims ->> '$.job' = ? OR (substr(claims ->> '$.job', 1, length(?) + 1) = ? || '.'
                AND instr(substr(claims ->> '$.job', length(?) + 2), '.') = 0)
                OR coalesce(nullif(facts ->> '$.slurm_job', ''), nullif(facts ->> '$.mapped_job', ''),
                    claims ->> '$.slurm_job', claims ->> '$.slurm_job_id') = ?
                OR coalesce(facts ->> '$.pod_uid', claims ->> '$.pod_uid') = ? OR facts ->> '$.pod' = ?)";
            ask(condition, Box::new(job.clone()));
        }
        if let Some(device) = &filter.device {
            let condition = match device.parse::<u32>() {
                Ok(_) => "EXISTS (SELECT 1 FROM device WHERE run = run.id AND ordinal = cast(? AS INTEGER))",
                Err(_) => {
                    "EXISTS (SELECT 1 FROM device
                        WHERE run = run.id AND lower(substr(name, 1, length(?))) = lower(?))"
                }
            };
            ask(condition, Box::new(device.clone()));
        }
        if let Some(since_ns) = filter.since_ns {
            ask(&format!("{ENDED} >= ?"), Box::new(since_ns.div_euclid(1_000_000_000)));
        }
        if let Some(until_ns) = filter.until_ns {
            ask(&format!("{STARTED} <= ?"), Box::new(until_ns.div_euclid(1_000_000_000)));
        }
        if let Some(label) = &filter.label {
            let named = ["label", "source_origin", "coalesce(claims ->> '$.job', '')"];
            let fits = if label.contains(['*', '?']) {
                named.map(|name| format!("lower({name}) GLOB lower(@)"))
            } else {
                named.map(|name| format!("instr(lower({name}), lower(@)) > 0"))
            };
            ask(&format!("({})", fits.join(" OR ")).replace('@', "?"), Box::new(label.clone()));
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
            "SELECT id, uid, stored_s, label, pid, source_kind, started_ns, last_ns, events, {PEAK},
                clock, wall_offset_ns, state, closed_ns, closed_status, rolled_ns,
                writer_pid, writer_start, writer_boot, source_origin, part,
                (SELECT id FROM run AS before WHERE before.life = run.life AND before.part = run.part - 1),
                facts ->> '$.user', owner_uid, claims ->> '$.job', claims ->> '$.rank',
                (SELECT json_group_array(name) FROM (SELECT name FROM device WHERE run = run.id ORDER BY idx)),
                {PEAK_USED}, {OOMS}
            FROM run {conditions} ORDER BY {order}"
        );
        let limit = filter.limit.unwrap_or(usize::MAX);
        self.sql(|db| {
            let mut statement = db.prepare(&sql)?;
            let values: Vec<&dyn ToSql> = values.iter().map(AsRef::as_ref).collect();
            let rows = statement.query_map(values.as_slice(), |row| {
                Ok(Listed {
                    run: summary(row)?,
                    user: row.get(22)?,
                    uid: super::columns::maybe_unsigned(row, 23)?,
                    job: row.get(24)?,
                    rank: row.get(25)?,
                    devices: super::columns::from_json(row, 26)?,
                    peak_used_bytes: row.get(27)?,
                    ooms: super::columns::unsigned(row, 28)?,
                })
            })?;
            // Whether a run's writer lives is no column.
            let is_meant =
                |listed: &Listed| filter.state.is_none_or(|state| state_name(listed.run.state) == state);
            rows.filter(|row| row.as_ref().map_or(true, is_meant)).take(limit).collect()
        })
    }
}
