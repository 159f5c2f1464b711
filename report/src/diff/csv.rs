//! The comparison as a table for other programs: for each pair of devices and each grouping one line per name. The lines
//! of a grouping add up to what NVML charges (or to `tracked` without a sample), in all three columns of bytes.
//!
//! `device_a,device_b,grouping,part,name,a_bytes,b_bytes,difference_bytes,only_in`; grouping is `layer`, `structure` or
//! `tag`; part is `category`, `others`, `pool_idle`, `opaque`, `predates`, `uncovered`, or one of the gap as in the report's
//! CSV; what is not known is empty.

use super::{Diff, Pair, difference, json};
use crate::By;
use crate::csv::field;
use std::fmt::Write;

/// First line.
pub const HEADER: &str = "device_a,device_b,grouping,part,name,a_bytes,b_bytes,difference_bytes,only_in";

/// The comparison.
pub fn csv(diff: &Diff<'_>) -> String {
    let mut out = format!("{HEADER}\n");
    for pair in &diff.pairs {
        for (by, name) in [(By::Layer, "layer"), (By::Structure, "structure"), (By::Tag, "tag")] {
            rows(diff, pair, by, name, &mut out);
        }
    }
    out
}

fn rows(diff: &Diff<'_>, pair: &Pair, by: By, grouping: &str, out: &mut String) {
    let device = |side: usize| {
        let device = diff.sides.get(side)?.run.devices.get((*pair.devices.get(side)?)?);
        device.map(|device| field(&device.name))
    };
    let [a, b] = [0, 1].map(|side| device(side).unwrap_or_default());
    for row in json::leaves(pair, by) {
        let number = |bytes: Option<i64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let _ = writeln!(
            out,
            "{a},{b},{grouping},{},{},{},{},{},{}",
            row.part,
            field(&row.name),
            number(row.a),
            number(row.b),
            number(difference(&[row.a, row.b])),
            row.only_in.unwrap_or("")
        );
    }
}
