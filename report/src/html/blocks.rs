//! Single blocks of the last steps: the data for the page's picture of blocks.
//!
//! The largest blocks are polygons. Blocks with one name that are live all the time are one polygon. The other blocks are one band,
//! and the bytes in no block another. At each time polygons and bands add up to the tracked bytes. If these change very often, the
//! times of their changes are rounded.

use super::data::Context;
use crate::encode::object;
use crate::lines::clean_name;
use crate::{GroupBy, names};
use gpumem_model::blocks::{Block, Blocks};
use gpumem_model::run::{Class, Device};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Maximum number of steps in the picture. More would be too narrow.
const MOST_STEPS: usize = 16;
/// Number of steps that the picture has even if they have more blocks than polygons.
const LEAST_STEPS: usize = 3;
/// Maximum number of corners of all polygons. With more, drawing takes longer than a frame.
const MOST_CORNERS: usize = 120_000;
/// Maximum number of times at which the bands change, for each polygon that may be drawn.
const MOST_LEVELS: usize = 2;

/// Returns the blocks of the last steps; `None` if the run has none.
pub(super) fn blocks(context: Context<'_>, device: &Device) -> Option<impl Serialize + use<>> {
    let all = &device.details.blocks;
    if all.blocks.is_empty() || context.limits.blocks == 0 || !context.limits.tags {
        return None;
    }
    let from_ns = first_step(all, context.limits.blocks);
    let shown: Vec<Block> = all.blocks.iter().filter_map(|block| block.since(from_ns)).collect();
    let count = shown.len();
    let (shown, merged) = merged(shown);
    let drawn = drawn(&shown, context.limits.blocks);
    let levels = levels(all, from_ns, (&shown, &drawn), MOST_LEVELS * context.limits.blocks);
    // Times are counted from the begin of the picture, which makes the file smaller.
    let offset = |time_ns: u64| time_ns.saturating_sub(from_ns);
    let mut cells: BTreeMap<u32, usize> = BTreeMap::new();
    let mut known = Vec::new();
    let count_of =
        |block: &Block| merged.get(&block.cell).filter(|_| block.is_constant()).map_or(1, |count| *count);
    let rows: Vec<_> = drawn
        .iter()
        .map(|block| {
            let name = *cells.entry(block.cell).or_insert_with(|| {
                known.push(name(context, block.cell));
                known.len() - 1
            });
            (
                name,
                block.bytes,
                block.made_ns.map(offset),
                block.freed_ns.map(offset),
                block.address,
                count_of(block),
            )
        })
        .collect();
    let steps = all.steps.iter().filter(|(time_ns, _)| *time_ns >= from_ns);
    Some(object! {
        // Begin and end of the picture.
        from: context.origin.offset_ns(from_ns),
        to: context.origin.offset_ns(all.to_ns.max(from_ns.saturating_add(1))),
        steps: steps.map(|&(time_ns, number)| (offset(time_ns), number)).collect::<Vec<_>>(),
        // Name, source line, role, phase, and codes in each grouping.
        names: known,
        // Index of the name, bytes, times of allocation and free (null: outside of the picture), address, number of blocks.
        rows,
        // Number of blocks in the picture, with those that are not in `rows`.
        count,
        // Bytes of the smaller blocks and tracked bytes, from a time on.
        levels: levels.into_iter().map(|(time_ns, smaller, tracked)| (offset(time_ns), smaller, tracked)).collect::<Vec<_>>(),
    })
}

/// Returns a sentence that says how to get single blocks, for a run that a daemon stored without them.
pub(super) fn why_none(context: Context<'_>, device: &Device) -> Option<&'static str> {
    const WHY: &str = "This page has no single blocks. The page of one process has them if the daemon keeps its requests (keep_requests = true below \
                       [runs] in gpumemd.toml), or if it is made from a recording: gpumemctl run --record FILE -- COMMAND, then gpumemctl report FILE --html.";
    let Context { report, limits, .. } = context;
    let is_in_blocks =
        |&(cell, _): &(u32, i64)| report.cell(cell).is_some_and(|cell| cell.class == Class::Block);
    let could_have = report.run.source.kind == "daemon" && device.peak.amounts.iter().any(is_in_blocks);
    (could_have && limits.tags && limits.blocks > 0 && device.details.blocks.blocks.is_empty()).then_some(WHY)
}

/// Returns the time at which the picture begins: that of a step, if steps are known.
fn first_step(all: &Blocks, most_blocks: usize) -> u64 {
    let changed = |from_ns: u64| {
        let is_inside = |time_ns: Option<u64>| time_ns.is_some_and(|time_ns| time_ns >= from_ns);
        all.blocks.iter().filter(|block| is_inside(block.made_ns) || is_inside(block.freed_ns)).count()
    };
    // A single step may have begun shortly before the end.
    let known = if all.steps.len() > 1 { all.steps.as_slice() } else { &[] };
    let last = known.iter().rev().take(MOST_STEPS).enumerate();
    let fits = last.take_while(|&(at, &(time_ns, _))| at < LEAST_STEPS || changed(time_ns) <= most_blocks);
    fits.last().map_or(all.from_ns, |(_, &(time_ns, _))| time_ns)
}

/// Merges the blocks of each cell that are live all the time. Returns also their numbers by cell.
fn merged(blocks: Vec<Block>) -> (Vec<Block>, BTreeMap<u32, usize>) {
    let (constant, mut shown): (Vec<Block>, Vec<Block>) = blocks.into_iter().partition(Block::is_constant);
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    let mut sums: BTreeMap<u32, Block> = BTreeMap::new();
    for block in constant {
        *counts.entry(block.cell).or_default() += 1;
        let none = Block { bytes: 0, ..block };
        let sum = sums.entry(block.cell).and_modify(|sum| sum.address = 0).or_insert(none);
        sum.bytes = sum.bytes.saturating_add(block.bytes);
    }
    shown.extend(sums.into_values());
    (shown, counts)
}

/// Returns the largest blocks in the order in which they are stacked. Of blocks with equal bytes, those that changed come first.
fn drawn(shown: &[Block], most: usize) -> Vec<Block> {
    let mut drawn = shown.to_vec();
    drawn.sort_by_key(|block| (Reverse(block.bytes), block.is_constant()));
    drawn.truncate(most);
    loop {
        let mut stacked = drawn.clone();
        stacked
            .sort_by_key(|block| (block.made_ns, Reverse(block.freed_ns.unwrap_or(u64::MAX)), block.address));
        if drawn.len() <= 16 || corners(&stacked) <= MOST_CORNERS {
            return stacked;
        }
        drawn.truncate(drawn.len() / 2);
    }
}

/// Returns the number of corners of the polygons, or more than [`MOST_CORNERS`]. A free moves all blocks above it.
fn corners(stacked: &[Block]) -> usize {
    let mut frees: Vec<(u64, usize)> =
        (0..).zip(stacked).filter_map(|(at, block)| Some((block.freed_ns?, at))).collect();
    frees.sort_unstable();
    let mut count = stacked.len();
    for (freed_ns, at) in frees {
        let above =
            stacked[at + 1..].iter().take_while(|block| block.made_ns.is_none_or(|made| made < freed_ns));
        count += above.filter(|block| block.freed_ns.is_none_or(|freed| freed > freed_ns)).count();
        if count > MOST_CORNERS {
            break;
        }
    }
    count
}

/// Returns the bytes of the blocks that are not drawn, and the tracked bytes, from each time on at which they change. Rounds the
/// times if there are more than `most`.
fn levels(
    all: &Blocks,
    from_ns: u64,
    (shown, drawn): (&[Block], &[Block]),
    most: usize,
) -> Vec<(u64, i64, i64)> {
    // Changes of the bytes in blocks that are not drawn, and of the tracked bytes. The sum of all blocks may exceed 64 bits.
    let mut changes: BTreeMap<u64, [i128; 2]> = BTreeMap::new();
    for (blocks, sign) in [(shown, 1), (drawn, -1)] {
        for block in blocks {
            let bytes = sign * i128::from(block.bytes);
            changes.entry(block.made_ns.unwrap_or(from_ns)).or_default()[0] += bytes;
            if let Some(freed_ns) = block.freed_ns {
                changes.entry(freed_ns).or_default()[0] -= bytes;
            }
        }
    }
    let mut tracked = 0;
    for &(time_ns, bytes) in &all.tracked {
        changes.entry(time_ns.max(from_ns)).or_default()[1] += i128::from(bytes) - tracked;
        tracked = bytes.into();
    }
    changes.retain(|_, change| *change != [0; 2]);
    let width_ns = all.to_ns.saturating_sub(from_ns).div_ceil(most.max(1) as u64).max(1);
    let is_thinned = changes.len() > most;
    let mut now = [0_i128; 2];
    let within = |bytes: i128| bytes.clamp(0, i64::MAX.into()) as i64;
    let mut levels: Vec<(u64, i64, i64)> = Vec::new();
    for (time_ns, change) in changes {
        now.iter_mut().zip(change).for_each(|(now, change)| *now += change);
        let level = (time_ns, within(now[0]), within(now[1]));
        match levels.last_mut() {
            Some(last) if is_thinned && last.0 / width_ns == time_ns / width_ns => {
                (last.1, last.2) = (level.1, level.2)
            }
            _ => levels.push(level),
        }
    }
    levels
}

/// Returns the name of a cell's blocks, their source line, role and phase (empty if unknown), and their codes in each grouping.
fn name(context: Context<'_>, index: u32) -> (String, String, String, String, [i32; 3]) {
    let Context { report, ranks, .. } = context;
    let codes = GroupBy::ALL.map(|by| ranks[by as usize].code(report.category(index, by)));
    let Some(cell) = report.cell(index) else { return Default::default() };
    let library = || cell.library.as_deref().map(names::library);
    let name = cell.tag.as_deref().or_else(library).map_or_else(|| "(no tag)".to_owned(), clean_name);
    let line = names::line_of(cell).map(clean_name).filter(|line| *line != name).unwrap_or_default();
    let text = |text: &Option<String>| text.as_deref().map(clean_name).unwrap_or_default();
    (name, line, text(&cell.role), text(&cell.phase), codes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Report;
    use crate::html::html;
    use crate::html::tests::run_of_a_log;
    use crate::rules::Groupings;

    fn block(bytes: u64, made_ns: Option<u64>, freed_ns: Option<u64>) -> Block {
        Block { address: bytes, bytes, cell: 0, made_ns, freed_ns }
    }

    #[test]
    fn polygons_and_bands_add_up_to_the_tracked_bytes() {
        let mut all = Blocks { to_ns: 1000, ..Blocks::default() };
        all.tracked = vec![(0, 10_000), (300, 12_000), (500, 9_000)];
        for at in 0..100 {
            all.blocks.push(block(at, Some(at * 7 % 500), (at % 3 > 0).then_some(500 + at * 5)));
        }
        let drawn = drawn(&all.blocks, 20);
        assert_eq!(drawn.len(), 20);
        assert!(drawn.iter().all(|block| block.bytes >= 80), "the largest");
        let levels = levels(&all, 0, (&all.blocks, &drawn), 1000);
        for time_ns in 0..1000 {
            let is_live = |block: &&Block| {
                block.made_ns <= Some(time_ns) && block.freed_ns.is_none_or(|freed| freed > time_ns)
            };
            let live: u64 = drawn.iter().filter(is_live).map(|block| block.bytes).sum();
            let is_smaller = |block: &&Block| is_live(block) && !drawn.contains(block);
            let smaller: u64 = all.blocks.iter().filter(is_smaller).map(|block| block.bytes).sum();
            let level = levels.iter().rfind(|level| level.0 <= time_ns).expect("from the begin");
            let tracked = all.tracked.iter().rfind(|(from, _)| *from <= time_ns).expect("from the begin").1;
            assert_eq!((level.1, level.2), (smaller as i64, tracked), "at {time_ns}");
            assert!(live as i64 + level.1 <= tracked, "at {time_ns}");
        }
    }

    #[test]
    fn tracked_bytes_are_right_between_rounded_times_and_levels_are_bounded() {
        // A large block, and many small ones, are made and freed in memory that is always there.
        let mut all = Blocks { to_ns: 1_000_000, tracked: vec![(0, 1 << 30)], ..Blocks::default() };
        all.blocks = (0..15_000).map(|at| block(9, Some(at * 60 + 1), Some(at * 60 + 50))).collect();
        all.blocks.push(block(1 << 29, Some(500_017), Some(600_003)));
        let drawn = drawn(&all.blocks, 1);
        for most in [1, 500, 8000, usize::MAX] {
            let levels = levels(&all, 0, (&all.blocks, &drawn), most);
            assert!(levels.len() <= most.saturating_add(1), "{} of {most}", levels.len());
            for &(time_ns, smaller, tracked) in &levels {
                assert_eq!((smaller / 10, tracked), (0, 1 << 30), "at {time_ns}");
            }
        }
    }

    #[test]
    fn sizes_and_times_may_have_any_value() {
        let mut all = Blocks { from_ns: u64::MAX, to_ns: u64::MAX, ..Blocks::default() };
        all.blocks = vec![block(u64::MAX, Some(u64::MAX), None), block(1 << 48, None, None)];
        all.blocks.extend((0..1 << 15).map(|_| block(1 << 48, Some(u64::MAX), None)));
        all.tracked = vec![(0, i64::MIN), (u64::MAX, i64::MAX)];
        let levels = levels(&all, 7, (&all.blocks, &[]), 1000);
        assert_eq!(levels, [(7, 1 << 48, 0), (u64::MAX, i64::MAX, i64::MAX)]);
        let mut run = run_of_a_log();
        run.devices[0].details.blocks = all;
        let page = html(&Report::new(&run, Groupings::preset(None).clone(), None));
        assert!(page.contains("\"levels\":[[0,"));
    }

    #[test]
    fn blocks_that_are_live_all_the_time_are_one_polygon_for_each_name() {
        let other = Block { cell: 1, ..block(5, None, None) };
        let all = vec![block(10, None, None), block(20, None, None), block(30, Some(4), None), other];
        let (shown, counts) = merged(all);
        let sum = Block { address: 0, ..block(30, None, None) };
        assert_eq!(shown, [block(30, Some(4), None), sum, other]);
        assert_eq!(counts, BTreeMap::from([(0, 2), (1, 1)]));
    }

    #[test]
    fn polygons_get_fewer_if_they_would_have_too_many_corners() {
        // The oldest block is freed first, which moves all others.
        let first_in: Vec<Block> = (0..4000).map(|at| block(9, Some(at + 1), Some(at + 4001))).collect();
        let few = drawn(&first_in, 4000);
        assert!((16..4000).contains(&few.len()) && corners(&few) <= MOST_CORNERS, "{}", few.len());
        // The newest block is freed first, which moves none.
        let last_in: Vec<Block> = (0..4000).map(|at| block(9, Some(at + 1), Some(9000 - at))).collect();
        assert_eq!((drawn(&last_in, 4000).len(), corners(&last_in)), (4000, 4000));
    }

    #[test]
    fn picture_begins_with_the_first_step_whose_blocks_fit() {
        let mut all = Blocks { from_ns: 5, to_ns: 10_000, ..Blocks::default() };
        assert_eq!(first_step(&all, 100), 5, "no steps");
        all.steps = vec![(9_990, 1)];
        assert_eq!(first_step(&all, 100), 5, "one step");
        all.steps = (1..=100).map(|step| (step * 100, step)).collect();
        assert_eq!(first_step(&all, 100), 8500, "16 steps");
        all.blocks = (0..10_000).map(|at| block(1, Some(at), Some(at + 1))).collect();
        assert_eq!(first_step(&all, 510), 9500, "with at most 510 blocks");
        assert_eq!(first_step(&all, 10), 9800, "3 steps");
    }
}
