//! Memory of the process by name at the end, at the peak and at each point of the course: the data for the page's groupings,
//! icicle chart, lists and timeline.

use super::data::{Context, SMALLER};
use crate::lines::clean_name;
use crate::{GroupBy, names};
use gpumem_model::cell::is_sum;
use gpumem_model::run::{Class, Device};
use gpumem_model::timeline::Point;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// What one holding's bytes have in common: (tag, code in each grouping, class, library).
///
/// Tag and library are indices into the device's lists, or -1 for none. Tag -2 stands for many small tags. Class is 0 for bytes
/// that can have a name, 1 for idle pool bytes, 2 for pools that report no blocks.
type Key = (i32, [i32; 3], u8, i32);

/// Bytes with one key, as (tag, codes by layer, structure and tag, class, library, bytes at the end, bytes at the peak, course).
///
/// The course is a list of pairs: index of a point, and bytes from this point on. The bytes are 0 before the first pair.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Holding(i32, i32, i32, i32, u8, i32, i64, i64, Vec<i64>);

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

/// Bytes by column: column 0 is the end, column 1 the peak, the others are the points.
type Columns = BTreeMap<usize, i64>;
const POINTS: usize = 2;

fn most(columns: &Columns) -> i64 {
    columns.values().map(|bytes| bytes.saturating_abs()).max().unwrap_or(0)
}

fn add<K: Ord>(sums: &mut BTreeMap<K, Columns>, key: K, column: usize, bytes: i64) {
    let sum = sums.entry(key).or_default().entry(column).or_default();
    *sum = sum.saturating_add(bytes);
}

fn largest_first<K: Ord>(sums: BTreeMap<K, Columns>) -> Vec<(K, Columns)> {
    let mut all: Vec<_> = sums.into_iter().collect();
    all.sort_by_key(|(_, columns)| Reverse(most(columns)));
    all
}

/// Returns tags, libraries and holdings, the largest first. Holdings beyond `limit` are merged by layer and structure. The bytes
/// of all holdings add up to the tracked bytes at the end, at the peak, and at each point.
pub(super) fn holdings(
    context: Context<'_>,
    device: &Device,
    points: &[&Point],
) -> (Vec<String>, Vec<String>, Vec<Holding>) {
    // By cell, and whether the cell is a group of small cells of a point.
    let mut cells: BTreeMap<(u32, bool), Columns> = BTreeMap::new();
    for (column, moment) in [&device.last, &device.peak].into_iter().enumerate() {
        moment.amounts.iter().for_each(|&(cell, bytes)| add(&mut cells, (cell, false), column, bytes));
    }
    let is_group =
        |cell: u32| context.report.cell(cell).is_some_and(|cell| cell.tag.as_deref().is_some_and(is_sum));
    let mut sums: BTreeMap<Key, Columns> = BTreeMap::new();
    for (column, point) in (POINTS..).zip(points) {
        point
            .amounts
            .iter()
            .for_each(|&(cell, bytes)| add(&mut cells, (cell, is_group(cell)), column, bytes));
        if point.rest_bytes != 0 {
            add(&mut sums, (SMALLER, [SMALLER; 3], 0, -1), column, point.rest_bytes);
        }
    }
    let (mut tags, mut libraries) = (Strings::default(), Strings::default());
    for (number, ((cell, is_group), columns)) in largest_first(cells).into_iter().enumerate() {
        let is_named = number < context.limits.holdings;
        let key = key(context, cell, is_group, is_named, &mut tags, &mut libraries);
        columns.into_iter().for_each(|(column, bytes)| add(&mut sums, key, column, bytes));
    }
    let holdings = largest_first(sums).into_iter().map(|(key, columns)| {
        let at = |column: usize| columns.get(&column).copied().unwrap_or(0);
        let mut course = Vec::new();
        let mut bytes = 0;
        for point in 0..points.len() {
            if at(POINTS + point) != bytes {
                bytes = at(POINTS + point);
                course.extend([point as i64, bytes]);
            }
        }
        let (tag, [layer, structure, by_tag], class, library) = key;
        Holding(tag, layer, structure, by_tag, class, library, at(0), at(1), course)
    });
    (tags.all, libraries.all, holdings.collect())
}

/// Returns the key of a cell. `is_group`: the cell sums small cells of a point; those without a category are not `Others`.
fn key(
    context: Context<'_>,
    index: u32,
    is_group: bool,
    is_named: bool,
    tags: &mut Strings,
    libraries: &mut Strings,
) -> Key {
    let Context { report, ranks, .. } = context;
    let cell = report.cell(index);
    let class = match cell.map(|cell| cell.class) {
        Some(Class::PoolIdle) => return (-1, [-1; 3], 1, -1),
        Some(Class::Opaque) => return (-1, [-1; 3], 2, -1),
        Some(Class::Direct | Class::Block) | None => 0,
    };
    let codes = GroupBy::ALL.map(|by| match report.category(index, by) {
        None if is_group => SMALLER,
        name => ranks[by as usize].code(name),
    });
    let tag = cell.and_then(|cell| cell.tag.as_deref());
    let library = cell.and_then(|cell| cell.library.as_deref()).filter(|_| tag.is_none());
    let (tag, library) = if is_named {
        let library = library.map_or(-1, |path| libraries.code(names::library(path)));
        (tag.map_or(-1, |tag| tags.code(tag)), library)
    } else {
        (SMALLER, -1)
    };
    (tag, codes, class, library)
}
