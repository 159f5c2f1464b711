//! Advice as text of at most 15 lines, and as JSON of less than 4 kB.

use super::item::{Advice, Basis, Item, Kind, mib};
use crate::Report;
use crate::findings::text::{list, outcome};
use crate::findings::{self, Findings, Outcome};
use crate::labels::command_line_of;
use crate::lines::listed;
use crate::most_used;
use gpumem_model::escape::{self, escape};
use gpumem_model::units::signed;
use serde_json::{Value, json};

/// Version of the JSON document.
const VERSION: u32 = 1;
/// Maximum size of the JSON document in bytes.
const MAX_JSON: usize = 4_000;
/// Maximum number of letters of a name.
const NAME: usize = 80;
/// Maximum width of the command in the title, in columns of the terminal.
const COMMAND: usize = 60;
/// Maximum number of settings that are listed as useless.
const USELESS: usize = 3;

/// Returns a name without unsafe characters, shortened.
fn clean(name: &str) -> String {
    let mut short: String = escape(name).chars().take(NAME).collect();
    if short.len() < escape(name).len() {
        short.push('~');
    }
    short
}

impl Item {
    /// Returns the text of the change. The untrusted names replace `{0}` and `{1}` in it.
    pub fn sentence(&self) -> String {
        let name = |at: usize| self.untrusted_names.get(at).map(|name| clean(name)).unwrap_or_default();
        // A name may have the text `{1}`, so the sentence is split first.
        let change = escape(&self.change);
        let parts = change.split("{0}").map(|part| part.replace("{1}", &name(1)));
        parts.collect::<Vec<_>>().join(&name(0))
    }

    /// Returns the change and its saving in one line, for a report. `why` is the command for more.
    pub(super) fn line(&self, heading: &str, why: &str) -> String {
        format!("{heading}: {} ({}; {why})", self.sentence(), self.amount())
    }

    /// Returns the bytes that the change saves.
    fn amount(&self) -> String {
        match self.saves_bytes {
            None => "saving unknown".to_owned(),
            Some([least, most]) if most <= 0 || mib(least) == mib(most) => format!("-{}", mib(most)),
            Some([least, most]) if least <= 0 => format!("up to -{}", mib(most)),
            Some([least, most]) => format!("-{} to -{}", findings::mib(least), mib(most)),
        }
    }

    fn saving(&self) -> String {
        // What a limit refused was not held.
        if self.kind == Kind::PoolLimit {
            return escape(&self.formula);
        }
        let basis = match self.basis {
            Basis::Replayed => "replayed",
            Basis::Estimated => "estimated",
            Basis::Unverified => "unverified",
        };
        let formula =
            if self.formula.is_empty() { String::new() } else { format!(": {}", escape(&self.formula)) };
        format!("{}, {basis}{formula}", self.amount())
    }
}

/// Returns the advice as text.
pub fn text(report: &Report<'_>, advice: &Advice) -> String {
    let found = Findings::of(report);
    let device = report.run.devices.iter().max_by_key(|device| most_used(device));
    let (used, total) =
        device.map_or((0, None), |device| (most_used(device).unwrap_or(0), device.total_bytes));
    if advice.items.is_empty() {
        let finding = found.findings.iter().find(|finding| finding.kind != findings::Kind::Losses);
        let why = match (finding, list(report, &found).into_iter().next()) {
            (Some(finding), _) => {
                return format!("No change is known that helps: {}\n{}", finding.sentence(), replay(advice));
            }
            (None, Some(line)) => line,
            (None, None) => {
                let total = total.map(|total| format!(" of {}", mib(signed(total)))).unwrap_or_default();
                format!("{}{total} at the peak, and no finding", mib(used))
            }
        };
        return format!("No free change is known: {why}\n{}", replay(advice));
    }
    let command = command_line_of(report.run, COMMAND);
    let mut lines = match (outcome(report, &found), advice.outcome) {
        (Some(outcome), Outcome::OutOfMemory | Outcome::Suspected) => vec![format!("{command}: {outcome}")],
        _ => vec![format!("{command}: {} at the peak", mib(used))],
    };
    for (number, item) in (1..).zip(&advice.items) {
        let device = item.device.filter(|_| report.run.devices.len() > 1);
        let device = device.map(|ordinal| format!("GPU {ordinal}: ")).unwrap_or_default();
        lines.push(format!("{number}. {device}{}", item.sentence()));
        lines.push(format!("   {}", item.saving()));
    }
    if let Some((numbers, bytes)) = &advice.together {
        let numbers = numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(" and ");
        lines.push(format!("{numbers} together: up to -{}. Others overlap.", mib(*bytes)));
    }
    lines.join("\n") + "\n" + &replay(advice)
}

/// Returns the lines on replayed settings that save nothing, and on a replay that was not possible.
fn replay(advice: &Advice) -> String {
    let useless = listed(advice.useless.iter().map(|setting| escape(setting)), USELESS);
    let useless =
        if useless.is_empty() { useless } else { format!("Replayed, and saves nothing: {useless}.\n") };
    let refused = advice.not_replayed.as_ref();
    useless
        + &refused
            .map(|why| format!("Allocator settings could not be replayed: {}\n", escape(why)))
            .unwrap_or_default()
}

/// Returns the advice as JSON. Texts from the program are in `untrusted_names` only.
pub fn json(report: &Report<'_>, advice: &Advice) -> String {
    let mut advice = advice.clone();
    loop {
        let document = document(report, &advice);
        if document.len() < MAX_JSON || advice.items.pop().is_none() {
            return document;
        }
        advice.together = super::together(report, &advice.items);
    }
}

fn document(report: &Report<'_>, advice: &Advice) -> String {
    let item = |item: &Item| -> Value {
        let names: Vec<String> = item.untrusted_names.iter().map(|name| clean(name.trim())).collect();
        json!({
            "kind": item.kind,
            "device": item.device,
            "change": item.change,
            "untrusted_names": names,
            "saves_bytes": item.saves_bytes.map(|[least, most]| json!({"least": least, "most": most})),
            "basis": item.basis,
            "formula": item.formula,
            "memory": item.memory,
        })
    };
    let together = advice.together.as_ref();
    escape::json(&json!({
        "schema": "gpumem.advice",
        "version": VERSION,
        "run": report.id,
        "pid": report.run.process.pid,
        "outcome": advice.outcome,
        "is_short_of_memory": advice.is_short,
        "peak_bytes": report.run.devices.iter().filter_map(most_used).max(),
        "advice": advice.items.iter().map(item).collect::<Vec<_>>(),
        "together": together.map(|(numbers, bytes)| json!({"numbers": numbers, "most_bytes": bytes})),
        "useless_settings": advice.useless.iter().take(USELESS).map(|setting| clean(setting)).collect::<Vec<_>>(),
        "not_replayed": advice.not_replayed.as_deref().map(clean),
    }))
}
