//! The process's memory by name at the end and at the peak: rows for the page's groupings, icicle and lists.

use super::data::{Ranks, SMALLER};
use crate::lines::clean_name;
use crate::{By, Report, names};
use gpumem_model::run::{Class, Device};
use serde::Serialize;
use std::collections::BTreeMap;

/// Bytes with one name: tag, layer, structure, class, library, bytes at the end, bytes at the peak.
///
/// Tag and library are indices into the device's lists, or -1 for none. Tag -2 stands for many small ones. Class is 0 for bytes
/// that can have a name, 1 for idle pool bytes, 2 for opaque pools.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Holding(i32, i32, i32, u8, i32, i64, i64);

type Key = (i32, i32, i32, u8, i32);

/// Interned strings: each is stored once.
#[derive(Default)]
struct Strings {
    codes: BTreeMap<String, i32>,
    all: Vec<String>,
}

impl Strings {
    fn code(&mut self, text: &str) -> i32 {
        if let Some(code) = self.codes.get(text) {
            return *code;
        }
        let code = i32::try_from(self.all.len()).unwrap_or(i32::MAX);
        self.codes.insert(text.to_owned(), code);
        self.all.push(clean_name(text));
        code
    }
}

/// Returns tags, libraries and holdings, the largest first. Holdings beyond `limit` are merged by layer and structure. The sums
/// of all holdings are those of the moments.
pub(super) fn holdings(
    report: &Report<'_>,
    device: &Device,
    ranks: &[Ranks; 3],
    limit: usize,
) -> (Vec<String>, Vec<String>, Vec<Holding>) {
    let mut cells: BTreeMap<u32, [i64; 2]> = BTreeMap::new();
    for (column, moment) in [&device.last, &device.peak].into_iter().enumerate() {
        for (cell, bytes) in &moment.amounts {
            if let Some(sum) = cells.entry(*cell).or_default().get_mut(column) {
                *sum = sum.saturating_add(*bytes);
            }
        }
    }
    let mut cells: Vec<(u32, [i64; 2])> = cells.into_iter().collect();
    let weight = |bytes: &[i64; 2]| bytes.iter().map(|bytes| bytes.saturating_abs()).max();
    cells.sort_by(|a, b| weight(&b.1).cmp(&weight(&a.1)).then_with(|| a.0.cmp(&b.0)));
    let (mut tags, mut libraries) = (Strings::default(), Strings::default());
    let mut rows: BTreeMap<Key, [i64; 2]> = BTreeMap::new();
    for (number, (index, bytes)) in cells.iter().enumerate() {
        let key = key(report, *index, ranks, number < limit, &mut tags, &mut libraries);
        for (sum, bytes) in rows.entry(key).or_default().iter_mut().zip(bytes) {
            *sum = sum.saturating_add(*bytes);
        }
    }
    let mut rows: Vec<(Key, [i64; 2])> = rows.into_iter().collect();
    rows.sort_by(|a, b| weight(&b.1).cmp(&weight(&a.1)).then_with(|| a.0.cmp(&b.0)));
    let rows = rows.into_iter().map(|((tag, layer, structure, class, library), [last, peak])| {
        Holding(tag, layer, structure, class, library, last, peak)
    });
    (tags.all, libraries.all, rows.collect())
}

fn key(
    report: &Report<'_>,
    index: u32,
    ranks: &[Ranks; 3],
    is_named: bool,
    tags: &mut Strings,
    libraries: &mut Strings,
) -> Key {
    let cell = report.run.cells.get(index as usize);
    let class = match cell.map(|cell| cell.class) {
        Some(Class::PoolIdle) => return (-1, -1, -1, 1, -1),
        Some(Class::Opaque) => return (-1, -1, -1, 2, -1),
        Some(Class::Direct | Class::Block) | None => 0,
    };
    let code =
        |by: By| ranks.get(by as usize).map_or(SMALLER, |ranks| ranks.code(report.category(index, by)));
    let tag = cell.and_then(|cell| cell.tag.as_deref());
    let library = cell.and_then(|cell| cell.library.as_deref()).filter(|_| tag.is_none());
    let (tag, library) = match is_named {
        true => (
            tag.map_or(-1, |tag| tags.code(tag)),
            library.map_or(-1, |path| libraries.code(names::library(path))),
        ),
        false => (SMALLER, -1),
    };
    (tag, code(By::Layer), code(By::Structure), class, library)
}
