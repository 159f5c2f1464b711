//! Views of unvalidated runs: from a hostile daemon or a damaged store.

use crate::harmless;
use gpumem_model::run::Run;
use gpumem_report::rules::Groupings;
use gpumem_report::text::{Layout, text};
use gpumem_report::{Report, csv, html, json, trace, tree};
use serde_json::Value;

/// Reduces numbers to plausible amounts of memory: larger ones are rejected elsewhere, or wrap.
pub fn tamed(value: Value) -> Value {
    match value {
        Value::Number(number) => match number.as_i64() {
            Some(number) => (number % (1 << 44)).into(),
            None => number.as_u64().map_or(Value::Number(number), |number| (number % (1 << 44)).into()),
        },
        Value::Array(all) => all.into_iter().map(tamed).collect(),
        Value::Object(all) => {
            Value::Object(all.into_iter().map(|(name, value)| (name, tamed(value))).collect())
        }
        other => other,
    }
}

/// Renders every view of an inconsistent run. Rendering must not panic, and its text must have no control characters.
pub fn shown(run: &Run) {
    let report = Report::new(run, Groupings::preset(None).clone(), None);
    text(&report, Layout::default()).lines().for_each(harmless);
    drop((
        json::json(&report),
        csv::csv(&report),
        html::html(&report),
        trace::json(&report),
        tree::treemap(&report),
    ));
    drop(tree::collapsed(&report));
}
