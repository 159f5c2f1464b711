//! Creates findings of `doctor`; texts shared by several checks.

use gpumem_ledger::QuotaExceeded;
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};

/// Creates a finding.
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

pub(super) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// Returns the text of a limit that is reached, and the configuration key that sets it.
pub(super) fn limit(full: QuotaExceeded) -> (&'static str, &'static str) {
    match full {
        QuotaExceeded::Rows => {
            ("it has as many live allocations and blocks as it may", "agent.rows_per_process")
        }
        QuotaExceeded::User => (
            "its user's processes have said as much as the daemon may remember of them",
            "agent.memory_mib_per_uid",
        ),
        QuotaExceeded::All => ("the daemon may remember no more of any process", "agent.memory_mib"),
    }
}
