//! Creates findings of `doctor`; texts shared by several checks.

use gpumem_ledger::QuotaExceeded;
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};

pub(super) fn finding(
    check: Check,
    state: State,
    subject: impl Into<String>,
    text: impl Into<String>,
    fix: Option<&str>,
) -> Finding {
    let id = check.id().to_owned();
    Finding { id, state, subject: subject.into(), text: text.into(), fix: fix.map(str::to_owned) }
}

/// Findings about one subject.
pub(super) struct Findings<'a> {
    pub subject: String,
    pub out: &'a mut Vec<Finding>,
}

impl Findings<'_> {
    /// Adds a finding.
    pub(super) fn say(&mut self, check: Check, state: State, text: impl Into<String>, fix: Option<&str>) {
        self.out.push(finding(check, state, self.subject.as_str(), text, fix));
    }
}

pub(super) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// Returns the text of a limit that is reached, and the configuration key that sets it.
pub(super) fn limit(full: QuotaExceeded) -> (&'static str, &'static str) {
    match full {
        QuotaExceeded::Rows => {
            ("it has reached its limit of live allocations and blocks", "agent.rows_per_process")
        }
        QuotaExceeded::User => (
            "its user's processes have used up their share of the daemon's memory",
            "agent.memory_mib_per_uid",
        ),
        QuotaExceeded::All => ("the daemon's memory for records is used up", "agent.memory_mib"),
    }
}
