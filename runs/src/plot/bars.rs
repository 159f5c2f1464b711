//! Stacked bars side by side on one scale, each with a list of its parts: layers beside data structures, before beside
//! after.

use super::axis::{Axis, GREY, LARGE, SMALL, percents, words};
use super::drawing::{Anchor, Data, Drawing, Fill, Rect, Text};
use super::helvetica::fitted;
use super::palette::{self, BLACK, RANKS, Theme};
use crate::report::units::thousands;
use std::collections::{BTreeMap, BTreeSet};

/// A bar: its parts add up to its total.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bar {
    /// What stands above it.
    pub title: String,
    /// Sum of its parts.
    pub total_bytes: i64,
    /// Its parts, in any order.
    pub segments: Vec<Segment>,
}

/// A part of a bar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The same name has the same colour in all bars of a picture.
    pub name: String,
    /// May be negative: it is drawn below zero.
    pub bytes: i64,
    /// What it is.
    pub kind: Kind,
}

/// What a part of a bar is, from below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A colour of its own, the largest lowest.
    Category,
    /// Several categories in one, plain grey.
    Smaller,
    /// What no rule takes, white.
    Others,
    /// What pools hold and nobody uses, hatched lightly.
    Idle,
    /// Pools that report no blocks.
    Opaque,
    /// Older than the agent.
    Predates,
    /// What nothing tracks, hatched.
    Untrackable,
}

impl Kind {
    /// How it is drawn; `rank` is that of a category.
    pub(super) fn fill(self, rank: usize) -> Fill {
        let theme = Theme::Light;
        match self {
            Kind::Category => Fill::Solid(palette::category(rank, theme)),
            Kind::Smaller => palette::smaller(theme).into(),
            Kind::Others => palette::others(theme).into(),
            Kind::Idle => palette::idle(theme).into(),
            Kind::Opaque => palette::opaque(theme).into(),
            Kind::Predates => palette::predates(theme).into(),
            Kind::Untrackable => palette::untrackable(theme).into(),
        }
    }
}

const MARGIN: f64 = 16.0;
/// For the numbers of the scale.
const SCALE: f64 = 44.0;
const BAR: f64 = 84.0;
/// Beside a bar, for the shares of thin parts.
const SIDE: f64 = 44.0;
const LIST: f64 = 214.0;
const HEIGHT: f64 = 330.0;
const ROW: f64 = 15.0;
/// Parts below this share have no label, and below [`THIN`] one beside them.
const LABELLED: f64 = 0.05;
/// Parts below this share have their label beside them, on either side in turn.
const THIN: f64 = 0.10;

/// Bars on one scale.
pub fn bars(bars: &[Bar]) -> Drawing {
    let ranks = ranks(bars);
    let bars: Vec<Bar> = bars.iter().zip(&ranks).map(|(bar, ranks)| folded(bar, ranks)).collect();
    let column = SIDE + BAR + SIDE + LIST;
    let plot = Rect {
        x: MARGIN + SCALE,
        y: MARGIN + 58.0,
        width: column * bars.len().max(1) as f64,
        height: HEIGHT,
    };
    let titles: Vec<&str> = bars.iter().map(|bar| bar.title.as_str()).collect();
    let mut out =
        Drawing::new(titles.join(", "), plot.x + plot.width + MARGIN, plot.y + HEIGHT + 2.0 * MARGIN);
    let sum = |bar: &Bar, is: fn(i64) -> bool| -> i64 {
        bar.segments.iter().map(|part| part.bytes).filter(|&bytes| is(bytes)).fold(0, i64::saturating_add)
    };
    let high = bars.iter().map(|bar| sum(bar, |bytes| bytes > 0)).max().unwrap_or(0);
    let low = bars.iter().map(|bar| sum(bar, |bytes| bytes < 0)).min().unwrap_or(0);
    let axis = Axis::new(low, high);
    axis.draw(plot, &mut out);
    for (index, (bar, ranks)) in bars.iter().zip(&ranks).enumerate() {
        let x = plot.x + column * index as f64;
        one(bar, ranks, &axis, Rect { x, width: column, ..plot }, &mut out);
    }
    axis.zero(plot, &mut out);
    out
}

/// One bar with its title, labels and list.
fn one(bar: &Bar, ranks: &[String], axis: &Axis, plot: Rect, out: &mut Drawing) {
    let rank = |part: &Segment| ranks.iter().position(|name| *name == part.name).unwrap_or(0);
    let parts = bar.segments.iter().filter(|part| part.bytes != 0);
    let mut parts: Vec<(&Segment, Fill)> = parts.map(|part| (part, part.kind.fill(rank(part)))).collect();
    parts.sort_by_key(|(part, _)| (part.kind, if part.kind == Kind::Category { rank(part) } else { 0 }));
    let x = plot.x + SIDE;
    let amounts: Vec<i64> = parts.iter().map(|(part, _)| part.bytes).collect();
    let shares = percents(bar.total_bytes, &amounts);
    let (mut top, mut bottom) = (0_i64, 0_i64);
    let mut is_left = false;
    for (index, (part, fill)) in parts.iter().enumerate() {
        let edge = if part.bytes > 0 { &mut top } else { &mut bottom };
        let from = *edge;
        *edge = edge.saturating_add(part.bytes);
        let (a, b) = (axis.y(plot, from as f64), axis.y(plot, *edge as f64));
        let at = Rect { x, y: a.min(b), width: BAR, height: (a - b).abs() };
        let data = Data { of: bar.title.clone(), name: part.name.clone(), bytes: part.bytes };
        out.rect(at, *fill, Some((BLACK, 0.5)), Some(data));
        let share = part.bytes as f64 / bar.total_bytes.max(1) as f64;
        let Some(label) = shares.as_ref().and_then(|shares| shares.get(index)) else { continue };
        if share.abs() < LABELLED {
            continue;
        }
        let y = at.y + at.height / 2.0 + SMALL * 0.36;
        let label = words(label, x + BAR / 2.0, y, SMALL);
        if share.abs() >= THIN && at.height > SMALL * 1.4 {
            let color = match fill {
                Fill::Solid(color) => color.text(),
                _ => BLACK,
            };
            let label = Text { anchor: Anchor::Middle, color, ..label };
            if let Fill::Hatched(pattern) = fill {
                // Words on lines are hard to read: a piece of plain ground behind them.
                let width = label.width() + 6.0;
                let behind = Rect { x: label.x - width / 2.0, y: y - SMALL, width, height: SMALL * 1.35 };
                out.rect(behind, Fill::Solid(pattern.ground), None, None);
            }
            out.text(label);
        } else if is_left {
            out.text(Text { anchor: Anchor::End, x: x - 4.0, ..label });
            is_left = false;
        } else {
            out.text(Text { x: x + BAR + 4.0, ..label });
            is_left = true;
        }
    }
    let beside = Rect { x: x + BAR + SIDE, width: LIST, ..plot };
    list(bar, &parts, axis, shares.as_deref(), beside, out);
    let room = plot.width - SIDE - 8.0;
    let title = fitted(&bar.title, LARGE, true, room);
    out.text(Text { bold: true, ..words(&title, x, plot.y - 32.0, LARGE) });
    let total = format!("{} {}", axis.unit.amount(bar.total_bytes), axis.unit.name);
    let total = match parts.iter().map(|(part, _)| part.bytes).fold(0, i64::saturating_add) {
        sum if sum == bar.total_bytes => format!("{total} ({} bytes)", thousands(bar.total_bytes)),
        // Nobody should be able to make such a bar. Who does is told.
        sum => format!("{total}; its parts are {} bytes off", thousands(sum.saturating_sub(bar.total_bytes))),
    };
    out.text(Text { color: GREY, ..words(&total, x, plot.y - 17.0, SMALL) });
}

/// What the parts are, in the order in which they are stacked, and that they add up.
fn list(
    bar: &Bar,
    parts: &[(&Segment, Fill)],
    axis: &Axis,
    shares: Option<&[String]>,
    at: Rect,
    out: &mut Drawing,
) {
    let amounts: Vec<i64> = parts.iter().map(|(part, _)| part.bytes).collect();
    let total = axis.unit.round(bar.total_bytes);
    let printed = axis.unit.apportion(total, &amounts);
    let (amounts_at, shares_at) = (at.x + at.width - 58.0, at.x + at.width - 12.0);
    // Beside the middle of the bar, not above its top.
    let height = ROW * (parts.len() as f64 + 1.0);
    let mut y = at.y + ((at.height - height) / 2.0).max(0.0) + SMALL;
    let right = |text: &str, x: f64, y: f64| Text { anchor: Anchor::End, ..words(text, x, y, SMALL) };
    for (index, (part, fill)) in parts.iter().enumerate().rev() {
        let swatch = Rect { x: at.x, y: y - SMALL * 0.8, width: 11.0, height: 9.0 };
        out.rect(swatch, *fill, Some((BLACK, 0.5)), None);
        let amount = printed.get(index).map(|&steps| axis.unit.print(steps)).unwrap_or_default();
        let amount = right(&amount, amounts_at, y);
        let room = amounts_at - amount.width() - at.x - 22.0;
        out.text(words(&fitted(&part.name, SMALL, false, room), at.x + 16.0, y, SMALL));
        out.text(amount);
        if let Some(share) = shares.and_then(|shares| shares.get(index)) {
            out.text(right(share, shares_at, y));
        }
        y += ROW;
    }
    out.line(vec![(at.x, y - ROW * 0.72), (shares_at, y - ROW * 0.72)], GREY, 0.5);
    let sum = format!("total {}", axis.unit.name);
    out.text(words(&sum, at.x + 16.0, y, SMALL));
    out.text(right(&axis.unit.print(total), amounts_at, y));
    if shares.is_some() {
        out.text(right("100.0 %", shares_at, y));
    }
}

/// Of each bar the categories that have colours of their own, the largest first: where bars share names, those of all
/// together, so that a name has one colour and one place in all of them.
fn ranks(bars: &[Bar]) -> Vec<Vec<String>> {
    let mut seen = BTreeSet::new();
    let is_shared = bars.iter().any(|bar| {
        let own: BTreeSet<&str> = categories(bar).map(|part| part.name.as_str()).collect();
        let is_shared = own.iter().any(|name| seen.contains(name));
        seen.extend(own);
        is_shared
    });
    match is_shared {
        true => vec![largest(bars); bars.len()],
        false => bars.iter().map(|bar| largest(std::slice::from_ref(bar))).collect(),
    }
}

fn categories(bar: &Bar) -> impl Iterator<Item = &Segment> {
    bar.segments.iter().filter(|part| part.kind == Kind::Category)
}

fn largest(bars: &[Bar]) -> Vec<String> {
    let mut all: BTreeMap<&str, i64> = BTreeMap::new();
    for part in bars.iter().flat_map(categories) {
        let weight = all.entry(&part.name).or_default();
        *weight = (*weight).max(part.bytes.saturating_abs());
    }
    let mut all: Vec<(&str, i64)> = all.into_iter().collect();
    all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
    // What is folded needs a place too.
    let named = if all.len() > RANKS { RANKS - 1 } else { all.len() };
    all.into_iter().take(named).map(|(name, _)| name.to_owned()).collect()
}

/// The bar with all categories that have no rank in one part.
fn folded(bar: &Bar, ranks: &[String]) -> Bar {
    let is_small = |part: &Segment| part.kind == Kind::Category && !ranks.contains(&part.name);
    let (small, mut segments): (Vec<Segment>, Vec<Segment>) =
        bar.segments.iter().cloned().partition(is_small);
    if !small.is_empty() {
        let bytes = small.iter().map(|part| part.bytes).fold(0, i64::saturating_add);
        let name = format!("({} smaller)", thousands(small.len() as u64));
        segments.push(Segment { name, bytes, kind: Kind::Smaller });
    }
    Bar { segments, ..bar.clone() }
}
