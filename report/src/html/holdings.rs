//! Memory of the process by name at the end and at the peak: the data for the page's groupings, icicle chart and lists.

use super::data::{Context, SMALLER};
use crate::lines::clean_name;
use crate::{GroupBy, names, ranked_columns};
use gpumem_model::run::{Class, Device};
use serde::Serialize;
use std::collections::BTreeMap;

/// Bytes with one name, as (tag, layer, structure, class, library, bytes at the end, bytes at the peak).
///
/// Tag and library are indices into the device's lists, or -1 for none. Tag -2 stands for many small tags. Class is 0 for bytes
/// that can have a name, 1 for idle pool bytes, 2 for pools that report no blocks.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Holding(i32, i32, i32, u8, i32, i64, i64);

type Key = (i32, i32, i32, u8, i32);

/// A list of strings without repetitions; a string's code is its index in the list.
#[derive(Default)]
pub(super) struct Strings {
    /// Codes by unescaped string.
    pub codes: BTreeMap<String, i32>,
    /// The strings without control characters.
    pub all: Vec<String>,
}

impl Strings {
    /// Returns the code of a string, which is added if it is not in the list.
    pub fn code(&mut self, text: &str) -> i32 {
        if let Some(code) = self.codes.get(text) {
            return *code;
        }
        let code = i32::try_from(self.all.len()).unwrap_or(i32::MAX);
        self.codes.insert(text.to_owned(), code);
        self.all.push(clean_name(text));
        code
    }
}

/// Returns tags, libraries and holdings, the largest first. Holdings beyond `limit` are merged by layer and structure. The bytes
/// of all holdings add up to the tracked bytes at the end and at the peak.
pub(super) fn holdings(context: Context<'_>, device: &Device) -> (Vec<String>, Vec<String>, Vec<Holding>) {
    let last = device.last.amounts.iter().map(|&(cell, bytes)| (cell, [bytes, 0]));
    let peak = device.peak.amounts.iter().map(|&(cell, bytes)| (cell, [0, bytes]));
    let cells = ranked_columns(last.chain(peak));
    let (mut tags, mut libraries) = (Strings::default(), Strings::default());
    let rows = ranked_columns(cells.into_iter().enumerate().map(|(number, (index, bytes))| {
        (key(context, index, number < context.limits.holdings, &mut tags, &mut libraries), bytes)
    }));
    let rows = rows.into_iter().map(|((tag, layer, structure, class, library), [last, peak])| {
        Holding(tag, layer, structure, class, library, last, peak)
    });
    (tags.all, libraries.all, rows.collect())
}

fn key(context: Context<'_>, index: u32, is_named: bool, tags: &mut Strings, libraries: &mut Strings) -> Key {
    let Context { report, ranks, .. } = context;
    let cell = report.cell(index);
    let class = match cell.map(|cell| cell.class) {
        Some(Class::PoolIdle) => return (-1, -1, -1, 1, -1),
        Some(Class::Opaque) => return (-1, -1, -1, 2, -1),
        Some(Class::Direct | Class::Block) | None => 0,
    };
    let code = |by: GroupBy| ranks[by as usize].code(report.category(index, by));
    let tag = cell.and_then(|cell| cell.tag.as_deref());
    let library = cell.and_then(|cell| cell.library.as_deref()).filter(|_| tag.is_none());
    let (tag, library) = if is_named {
        let library = library.map_or(-1, |path| libraries.code(names::library(path)));
        (tag.map_or(-1, |tag| tags.code(tag)), library)
    } else {
        (SMALLER, -1)
    };
    (tag, code(GroupBy::Layer), code(GroupBy::Structure), class, library)
}
