//! Compact encoding for lists of numbers that are rewritten often: timelines, columns of growth, and buckets of series.
//!
//! A number is a LEB128 varint of 64 bits. Signed numbers are zigzag-coded first (0, -1, 1, -2, ... become 0, 1, 2, 3, ...).
//! Differences wrap on overflow, so that every value can be restored. A cell is one kind of memory of a run, as its index in
//! `Run::cells`. An amount is a number of bytes.
//!
//! ```text
//! timeline chunk   points
//!   point          time_ns (minus that of the previous point), signed rest_bytes (minus the previous), form, n, n * amount
//!   form 0         all amounts: cell (minus the previous cell, as 32 bits), signed bytes
//!   form 1         differences from the previous point: cell (minus the previous cell), signed difference of bytes; a missing
//!                  cell counts as 0. Used only if both points are sorted by cell and without zeros
//! columns          cell (minus the previous cell, as 32 bits), n, n * signed value (minus the previous value)
//! bucket           time_ns (minus that of the previous bucket), form, used, tracked, untrackable, samples, doubtful
//!   form           two bits for each of the three amounts: 0 absent, 1 one value for min, max and last, 2 three values
//!   amount         signed last (minus the previous one of the same amount); in form 2 also signed min and max (minus last)
//! ```
//!
//! The number before the first one of a list is 0; the first point of a chunk has form 0. Measured: a timeline of 256 points with
//! 64 cells, of which a quarter changes between points, takes 286 KB as JSON and 27 KB packed. 64 columns of 64 points take 8 KB.

use crate::varint::{put, put_signed, take, take_signed};
use gpumem_model::series::{Bucket, Extremes};
use gpumem_model::timeline::Point;

/// Maximum number of cells of an unpacked point, far more than are written (64). A point without differences takes five bytes but
/// as much memory as the previous one. Without limits, a small chunk of a malicious store could exhaust the memory.
const MAX_CELLS: usize = 4096;
/// Maximum number of points of an unpacked chunk, far more than are written (16).
const MAX_POINTS: usize = 1024;

/// Bytes of most packed buckets, at most.
const USUAL_BUCKET_BYTES: usize = 24;

pub(super) fn pack_points(points: &[Point]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut before: Option<&Point> = None;
    for point in points {
        let (time_ns, rest_bytes) = before.map_or((0, 0), |point| (point.time_ns, point.rest_bytes));
        put(&mut out, point.time_ns.wrapping_sub(time_ns));
        put_signed(&mut out, point.rest_bytes.wrapping_sub(rest_bytes));
        let differences = before.and_then(|before| differences(&before.amounts, &point.amounts));
        put(&mut out, u64::from(differences.is_some()));
        let amounts = differences.as_deref().unwrap_or(&point.amounts);
        put(&mut out, amounts.len() as u64);
        let mut last = 0;
        for &(cell, bytes) in amounts {
            put(&mut out, cell.wrapping_sub(last).into());
            put_signed(&mut out, bytes);
            last = cell;
        }
        before = Some(point);
    }
    out
}

/// Unpacks a chunk; `None` if it is invalid.
pub(super) fn unpack_points(mut chunk: &[u8]) -> Option<Vec<Point>> {
    let mut points: Vec<Point> = Vec::new();
    while !chunk.is_empty() {
        let before = points.last();
        let (time_ns, rest_bytes) = before.map_or((0, 0), |point| (point.time_ns, point.rest_bytes));
        let time_ns = take(&mut chunk)?.wrapping_add(time_ns);
        let rest_bytes = take_signed(&mut chunk)?.wrapping_add(rest_bytes);
        let form = take(&mut chunk)?;
        let mut amounts = Vec::new();
        let mut cell = 0_u32;
        for _ in 0..take(&mut chunk)? {
            cell = cell.wrapping_add(u32::try_from(take(&mut chunk)?).ok()?);
            amounts.push((cell, take_signed(&mut chunk)?));
        }
        let amounts = match (form, before) {
            (0, _) => amounts,
            (1, Some(before)) => merged(&before.amounts, &amounts, i64::wrapping_add),
            _ => return None,
        };
        if amounts.len() > MAX_CELLS || points.len() == MAX_POINTS {
            return None;
        }
        points.push(Point { time_ns, amounts: amounts.into(), rest_bytes });
    }
    Some(points)
}

pub(super) fn pack_columns(columns: &[(u32, Vec<i64>)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut last = 0;
    for (cell, values) in columns {
        put(&mut out, cell.wrapping_sub(last).into());
        put(&mut out, values.len() as u64);
        let mut before = 0;
        for &value in values {
            put_signed(&mut out, value.wrapping_sub(before));
            before = value;
        }
        last = *cell;
    }
    out
}

/// Unpacks columns; `None` if the bytes are invalid.
pub(super) fn unpack_columns(mut packed: &[u8]) -> Option<Vec<(u32, Vec<i64>)>> {
    let mut columns = Vec::new();
    let mut cell = 0_u32;
    while !packed.is_empty() {
        cell = cell.wrapping_add(u32::try_from(take(&mut packed)?).ok()?);
        let (mut values, mut value) = (Vec::new(), 0_i64);
        for _ in 0..take(&mut packed)? {
            value = value.wrapping_add(take_signed(&mut packed)?);
            values.push(value);
        }
        columns.push((cell, values));
    }
    Some(columns)
}

pub(crate) fn pack_buckets(buckets: &[Bucket]) -> Vec<u8> {
    let mut out = Vec::with_capacity(buckets.len() * USUAL_BUCKET_BYTES);
    let (mut time_ns, mut lasts) = (0, [0_i64; 3]);
    for bucket in buckets {
        let amounts = [bucket.used, bucket.tracked, bucket.untrackable];
        let form = |amount: Option<Extremes>| {
            amount.map_or(0, |amount| 1 + u64::from(amount != Extremes::at(amount.last)))
        };
        put(&mut out, bucket.time_ns.wrapping_sub(time_ns));
        put(&mut out, amounts.iter().fold(0, |forms, amount| forms << 2 | form(*amount)));
        for (amount, last) in amounts.into_iter().zip(&mut lasts) {
            let Some(amount) = amount else { continue };
            put_signed(&mut out, amount.last.wrapping_sub(*last));
            *last = amount.last;
            if form(Some(amount)) == 2 {
                put_signed(&mut out, amount.min.wrapping_sub(*last));
                put_signed(&mut out, amount.max.wrapping_sub(*last));
            }
        }
        put(&mut out, bucket.samples.into());
        put(&mut out, bucket.doubtful.into());
        time_ns = bucket.time_ns;
    }
    out
}

/// Unpacks buckets; `None` if the bytes are invalid.
pub(crate) fn unpack_buckets(mut packed: &[u8]) -> Option<Vec<Bucket>> {
    let (mut buckets, mut time_ns, mut lasts) = (Vec::new(), 0_u64, [0_i64; 3]);
    while !packed.is_empty() {
        time_ns = time_ns.wrapping_add(take(&mut packed)?);
        let forms = take(&mut packed)?;
        let mut amounts = [None; 3];
        for (at, (amount, last)) in amounts.iter_mut().zip(&mut lasts).enumerate() {
            let form = forms >> (4 - 2 * at) & 3;
            if form == 0 {
                continue;
            }
            *last = last.wrapping_add(take_signed(&mut packed)?);
            let mut extremes = Extremes::at(*last);
            if form == 2 {
                extremes.min = last.wrapping_add(take_signed(&mut packed)?);
                extremes.max = last.wrapping_add(take_signed(&mut packed)?);
            }
            *amount = Some(extremes);
        }
        let [used, tracked, untrackable] = amounts;
        let mut count = || u32::try_from(take(&mut packed)?).ok();
        buckets.push(Bucket { time_ns, used, tracked, untrackable, samples: count()?, doubtful: count()? });
    }
    Some(buckets)
}

/// Returns the differences from `before` to `now`; `None` if `now` could not be restored from them.
fn differences(before: &[(u32, i64)], now: &[(u32, i64)]) -> Option<Vec<(u32, i64)>> {
    let is_plain = |amounts: &[(u32, i64)]| {
        amounts.is_sorted_by(|(earlier, _), (later, _)| earlier < later)
            && amounts.iter().all(|(_, bytes)| *bytes != 0)
    };
    (is_plain(before) && is_plain(now)).then(|| merged(now, before, i64::wrapping_sub))
}

/// Merges two lists that are sorted by cell: combines the values of each cell with `combine` and drops zeros.
fn merged(a: &[(u32, i64)], b: &[(u32, i64)], combine: impl Fn(i64, i64) -> i64) -> Vec<(u32, i64)> {
    let mut out = Vec::with_capacity(a.len().max(b.len()));
    let (mut a, mut b) = (a.iter().copied().peekable(), b.iter().copied().peekable());
    loop {
        let cell = match (a.peek(), b.peek()) {
            (Some((one, _)), Some((other, _))) => *one.min(other),
            (Some((cell, _)), None) | (None, Some((cell, _))) => *cell,
            (None, None) => return out,
        };
        let value = |pair: Option<(u32, i64)>| pair.map_or(0, |(_, bytes)| bytes);
        let bytes = combine(value(a.next_if(|(at, _)| *at == cell)), value(b.next_if(|(at, _)| *at == cell)));
        if bytes != 0 {
            out.push((cell, bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Generates extreme numbers, and small ones.
    fn number() -> impl Strategy<Value = i64> {
        prop_oneof![-3..4_i64, any::<i64>(), Just(i64::MIN), Just(i64::MAX)]
    }

    fn extremes() -> impl Strategy<Value = Option<Extremes>> {
        let three = (number(), number(), number()).prop_map(|(min, max, last)| Extremes { min, max, last });
        prop::option::of(prop_oneof![three, number().prop_map(Extremes::at)])
    }

    fn amounts() -> impl Strategy<Value = Vec<(u32, i64)>> {
        let cell = prop_oneof![0..8_u32, any::<u32>()];
        let any_order = prop::collection::vec((cell, number()), 0..6);
        let by_cell = prop::collection::btree_map(0..12_u32, number(), 0..8);
        prop_oneof![
            any_order,
            by_cell.prop_map(|map| map.into_iter().filter(|(_, bytes)| *bytes != 0).collect())
        ]
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_back(
            points in prop::collection::vec((any::<u64>(), amounts(), number()), 0..20),
            columns in prop::collection::vec((any::<u32>(), prop::collection::vec(number(), 0..9)), 0..9),
            buckets in prop::collection::vec((any::<(u64, u32, u32)>(), [extremes(), extremes(), extremes()]), 0..9),
            noise in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let points: Vec<Point> = points
                .into_iter()
                .map(|(time_ns, amounts, rest_bytes)| Point { time_ns, amounts: amounts.into(), rest_bytes })
                .collect();
            let (chunk, packed) = (pack_points(&points), pack_columns(&columns));
            let bucket = |((time_ns, samples, doubtful), amounts)| {
                let [used, tracked, untrackable]: [Option<Extremes>; 3] = amounts;
                Bucket { time_ns, used, tracked, untrackable, samples, doubtful }
            };
            let buckets: Vec<Bucket> = buckets.into_iter().map(bucket).collect();
            prop_assert_eq!(unpack_buckets(&pack_buckets(&buckets)), Some(buckets));
            prop_assert_eq!(unpack_points(&chunk), Some(points));
            prop_assert_eq!(unpack_columns(&packed), Some(columns));
            // A truncated chunk is rejected or shorter; random bytes must not panic.
            for cut in 0..chunk.len() {
                let _ = unpack_points(&chunk[..cut]);
            }
            let _ = (unpack_points(&noise), unpack_columns(&noise), unpack_buckets(&noise));
        }
    }

    #[test]
    fn a_point_like_the_one_before_takes_a_handful_of_bytes() {
        let amounts: Vec<(u32, i64)> = (0..64).map(|cell| (cell, 1 << 30)).collect();
        let point = |time_ns| Point { time_ns, amounts: amounts.clone().into(), rest_bytes: 1 << 40 };
        let one = pack_points(&[point(1_000_000_000)]).len();
        let many: Vec<Point> = (1..=16).map(|second| point(second * 1_000_000_000)).collect();
        assert!(pack_points(&many).len() <= one + 15 * 8, "{} bytes", pack_points(&many).len());
    }

    /// A chunk of a few kilobytes must not expand to gigabytes.
    #[test]
    fn a_small_chunk_is_no_large_list() {
        let amounts: Vec<(u32, i64)> = (0..MAX_CELLS as u32).map(|cell| (cell, 1)).collect();
        let points = |count: u64, amounts: &[(u32, i64)]| -> Vec<Point> {
            let one = |time_ns| Point { time_ns, amounts: amounts.to_vec().into(), rest_bytes: 0 };
            (0..count).map(one).collect()
        };
        let most = points(MAX_POINTS as u64, &amounts[..3]);
        assert_eq!(unpack_points(&pack_points(&most)), Some(most));
        assert_eq!(unpack_points(&pack_points(&points(MAX_POINTS as u64 + 1, &[]))), None);
        assert!(unpack_points(&pack_points(&points(2, &amounts))).is_some());
        let more = [&amounts[..], &[(MAX_CELLS as u32, 1)]].concat();
        assert_eq!(unpack_points(&pack_points(&points(1, &more))), None);
    }

    /// An impossible length must not cause a large allocation.
    #[test]
    fn a_length_is_not_believed() {
        let mut chunk = vec![0, 0, 0];
        put(&mut chunk, u64::MAX);
        assert_eq!(unpack_points(&chunk), None);
        let mut columns = vec![0];
        put(&mut columns, u64::MAX);
        assert_eq!(unpack_columns(&columns), None);
    }
}
