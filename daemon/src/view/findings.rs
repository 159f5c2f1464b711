//! Findings of live processes, as the control API and the page have them.

use super::rows::Rows;
use crate::run_writer::LiveFindings;
use gpumem_model::control::ProcessFinding;
use std::cmp::Reverse;

/// Returns the findings on the processes of `rows` that have an agent and whose memory is shown, the most important first. With
/// `names`, the texts have tags and names of processes.
pub(super) fn of_rows(rows: &Rows<'_>, live: &LiveFindings, names: bool) -> Vec<ProcessFinding> {
    let mut found = Vec::new();
    for (at, (row, process, _)) in rows.processes.iter().enumerate() {
        let Some(findings) = live.of(process.key).filter(|_| row.tracked_bytes.is_some()) else { continue };
        let is_first = || rows.processes[..at].iter().all(|(_, other, _)| other.key != process.key);
        let uuid = rows.devices.get(row.device).map(|(device, _)| device.uuid.as_str());
        for (of, finding) in findings.iter() {
            let (device, is_shown) = match of {
                Some(of) => (Some(row.device), Some(of.as_str()) == uuid),
                None => (None, is_first()),
            };
            if is_shown {
                let shown = ProcessFinding {
                    pid: row.pid,
                    start_ticks: process.key.start_ticks,
                    device,
                    kind: finding.kind.name(),
                    severity: finding.severity.name(),
                    bytes: finding.bytes,
                    share: finding.share,
                    confidence: finding.confidence,
                    full_in_s: finding.full_in_s,
                    text: if names { finding.sentence() } else { finding.anonymous_sentence() },
                };
                found.push((finding.severity, shown));
            }
        }
    }
    found.sort_by_key(|(severity, shown)| (*severity, Reverse(shown.bytes)));
    found.into_iter().map(|(_, shown)| shown).collect()
}
