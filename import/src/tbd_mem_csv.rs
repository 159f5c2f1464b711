//! Reads CSV of the TBD suite's pytorch_mem_profiler: the memory use that it computed for each iteration.
//!
//! ```text
//! epoch,iteration,peak_cached,current_cached,total_feature_map_usage,total_weight_usage,PARAMETER...,
//!   total_layer_weight_gradient_usage,PARAMETER_grad...,intermediate_gradients      whole MB of 1,000,000 bytes
//! ```
//!
//! The cached bytes come from PyTorch's allocator and become `tracked`. The other columns are computed by the profiler: it adds
//! up every pointer that it has not seen before, even if the memory was freed. So these sums may exceed the GPU's memory many
//! times. If all sums of a row fit into its cached bytes, these bytes get the names of the columns; otherwise they get no names.
//! Several processes may write to one file. A second row for the same iteration is attributed to another process.

use super::feed::{Feed, MAX_BYTES, Piece, ProcessFeed};
use super::level::Composition;
use super::lines::{fields, first_line, lines};
use gpumem_model::units::{plural, thousands};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_wire::Role;
use std::borrow::Cow;

const FORMAT: &str = "tbd-mem-csv";
const EXAMPLE: &str = "0,10,8259,7000,1200,178,...";
const MAX_PROCESSES: usize = 64;
/// Columns with sums of the profiler: name in the file, name in tags, and role of the memory.
const TOTALS: [(&str, &str, Role); 4] = [
    ("total_feature_map_usage", "feature maps", Role::Activation),
    ("total_weight_usage", "weights", Role::Parameter),
    ("total_layer_weight_gradient_usage", "weight gradients", Role::Gradient),
    ("intermediate_gradients", "intermediate gradients", Role::Temporary),
];

pub(super) fn looks_like(head: &[u8]) -> bool {
    first_line(head).and_then(fields).is_some_and(|names| Columns::parse(&names).is_some())
}

#[derive(Debug)]
struct Columns {
    count: usize,
    /// Indices of the columns epoch, iteration, peak_cached, current_cached.
    keys: [usize; 4],
    /// Indices of the columns of [`TOTALS`]; `None` for a missing column.
    totals: [Option<usize>; 4],
    /// Columns of single parameters and of their gradients: (column, index in [`TOTALS`] of the total that includes it, name).
    parts: Vec<(usize, usize, String)>,
}

impl Columns {
    fn parse(names: &[Cow<'_, str>]) -> Option<Columns> {
        let find = |name: &str| names.iter().position(|other| other == name);
        let keys = [find("epoch")?, find("iteration")?, find("peak_cached")?, find("current_cached")?];
        let totals = TOTALS.map(|(name, ..)| find(name));
        totals[0]?;
        let mut parts = Vec::new();
        for total in [1, 2] {
            // The columns of parameters (or gradients) follow the column of their total, up to the next total.
            let Some(from) = totals[total] else { continue };
            let later = totals.iter().flatten().chain(&keys).filter(|&&at| at > from);
            let to = later.min().copied().unwrap_or(names.len());
            let named = names.iter().enumerate().take(to).skip(from + 1);
            parts.extend(named.map(|(at, name)| {
                let name = if total == 2 { name.strip_suffix("_grad").unwrap_or(name) } else { name };
                (at, total, name.replace('.', "/"))
            }));
        }
        Some(Columns { count: names.len(), keys, totals, parts })
    }
}

/// One row of the file: memory in one iteration.
struct Row {
    /// Epoch and iteration.
    step: (u64, u64),
    /// Bytes in the column `peak_cached`: the most that PyTorch's allocator had reserved.
    peak: u64,
    /// Bytes that PyTorch's allocator had reserved at the end of the iteration.
    current: u64,
    /// Bytes in the columns of [`TOTALS`].
    claims: [u64; 4],
    /// Bytes in the columns of single parameters.
    parts: Vec<u64>,
}

impl Row {
    fn parse(line: &str, columns: &Columns) -> Option<Row> {
        let fields = fields(line)?;
        if fields.len() != columns.count {
            return None;
        }
        let number = |at: usize| -> Option<f64> {
            let number: f64 = fields.get(at)?.trim().parse().ok()?;
            (0.0..1e15).contains(&number).then_some(number)
        };
        let bytes = |at: usize| {
            let bytes = (number(at)? * 1e6).round() as u64;
            (bytes <= MAX_BYTES).then_some(bytes)
        };
        let [epoch, iteration, peak, current] = columns.keys;
        let mut claims = [0; 4];
        for (claim, at) in claims.iter_mut().zip(columns.totals) {
            *claim = at.map_or(Some(0), bytes)?;
        }
        Some(Row {
            step: (number(epoch)? as u64, number(iteration)? as u64),
            peak: bytes(peak)?,
            current: bytes(current)?,
            claims,
            parts: columns.parts.iter().map(|(at, ..)| bytes(*at)).collect::<Option<_>>()?,
        })
    }

    fn claimed(&self) -> u64 {
        self.claims.iter().fold(0, |sum, claim| sum.saturating_add(*claim))
    }

    fn most(&self) -> u64 {
        self.peak.max(self.current)
    }

    fn is_impossible(&self) -> bool {
        self.claimed() > self.most()
    }

    fn sentence(&self) -> String {
        let claims = TOTALS.iter().zip(self.claims);
        let claims: Vec<String> =
            claims.map(|((_, name, _), bytes)| format!("{name} {}", thousands(bytes))).collect();
        format!("{} = {} bytes", claims.join(" + "), thousands(self.claimed()))
    }
}

/// One process that wrote rows to the file.
#[derive(Default)]
struct Rank {
    process: ProcessFeed,
    slot: u8,
    held: Composition,
    /// Epoch and iteration of the last row of this process.
    step: (u64, u64),
}

impl Rank {
    fn new(number: usize) -> Rank {
        Rank { process: ProcessFeed::new(number as u64), slot: number as u8, ..Rank::default() }
    }

    /// Emits the memory at the row's peak, and then the memory at the end of the iteration.
    fn add(&mut self, feed: &mut Feed<'_>, columns: &Columns, row: &Row) {
        self.step = row.step;
        self.process.device(feed, self.slot);
        self.process.step(feed, row.step.1);
        let named = self.named(feed, columns, row);
        for cached in [row.most(), row.current] {
            let sum: u64 = named.iter().map(|piece| piece.bytes).sum();
            let fits = !row.is_impossible() && sum <= cached;
            let rest = Piece::new(self.slot, if fits { cached - sum } else { cached }, 0, Role::Unknown);
            let named = if fits { named.as_slice() } else { &[] };
            let pieces: Vec<Piece> = [rest].iter().chain(named).copied().collect();
            self.held.set(&mut self.process, feed, self.slot, &pieces);
        }
    }

    /// Returns the row's memory as allocations with names, whose sum is the row's `claims`. Empty if the claims are impossible.
    fn named(&mut self, feed: &mut Feed<'_>, columns: &Columns, row: &Row) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if row.is_impossible() {
            return pieces;
        }
        for (index, ((_, name, role), claim)) in TOTALS.into_iter().zip(row.claims).enumerate() {
            let of_total = columns.parts.iter().zip(&row.parts).filter(|((_, total, _), _)| *total == index);
            let sum = of_total.clone().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
            // The file has rounded numbers, so the parameters together may exceed their total.
            let parts_fit = sum <= claim;
            let rest = if parts_fit { claim - sum } else { claim };
            let tag = self.process.tag(feed, name);
            pieces.push(Piece::new(self.slot, rest, tag, role));
            for ((_, _, part), bytes) in of_total {
                let tag = self.process.tag(feed, &format!("{name}/{part}"));
                pieces.push(Piece::new(self.slot, if parts_fit { *bytes } else { 0 }, tag, role));
            }
        }
        pieces
    }
}

#[derive(Default)]
struct Profile {
    columns: Option<Columns>,
    ranks: Vec<Rank>,
    rows: u64,
    impossible: u64,
    /// The impossible row with the highest claims, and its line.
    worst: Option<(u64, Row)>,
    /// Number of rows whose claims fit into the peak, but exceed the bytes cached at the end of the iteration.
    unfit: u64,
}

impl Profile {
    fn line(&mut self, feed: &mut Feed<'_>, number: u64, line: &str) {
        if line.trim().is_empty() {
            return;
        }
        let Some(columns) = &self.columns else {
            self.columns = fields(line).and_then(|names| Columns::parse(&names));
            if self.columns.is_none() {
                feed.reject(number);
            }
            return;
        };
        let Some(row) = Row::parse(line, columns) else { return feed.reject(number) };
        let rank = match self.ranks.iter().position(|rank| rank.step < row.step) {
            Some(index) => index,
            None if self.ranks.len() < MAX_PROCESSES => {
                self.ranks.push(Rank::new(self.ranks.len()));
                self.ranks.len() - 1
            }
            None => return feed.reject(number),
        };
        let Some(rank) = self.ranks.get_mut(rank) else { return };
        self.rows += 1;
        feed.time_ns = number;
        rank.add(feed, columns, &row);
        if row.is_impossible() {
            self.impossible += 1;
            if self.worst.as_ref().is_none_or(|(_, worst)| worst.claimed() < row.claimed()) {
                self.worst = Some((number, row));
            }
        } else if row.claimed() > row.current {
            self.unfit += 1;
        }
    }

    fn caveats(&self, feed: &mut Feed<'_>) {
        if let Some((line, worst)) = &self.worst {
            let text = format!(
                "IMPOSSIBLE: {} of {} claimed more memory than was ever cached; at line {line} {}, peak cached {} bytes. The \
                 profiler adds up every pointer that it has not seen before, freed or not; memory of these rows gets no names",
                thousands(self.impossible),
                plural(self.rows, "row"),
                worst.sentence(),
                thousands(worst.most()),
            );
            feed.caveat("impossible_claims", text);
        }
        let claims = "tracked is the memory cached by PyTorch's allocator, and its peak; names are the profiler's claims, in whole MB \
                      of 1,000,000 bytes; the file does not name the GPU";
        let unfit = plural(self.unfit, "row");
        let unfit =
            format!("{unfit} claimed more than was cached at the end: the names are shown at the peak");
        let count = self.ranks.len();
        let several = format!(
            "{count} processes wrote to this file: the first of several rows for an iteration is attributed to the first \
             process, which the file does not confirm; gpumemctl import stores each as a run"
        );
        feed.caveats([
            ("claims", true, claims.to_owned()),
            ("claims_at_peak", self.unfit > 0, unfit),
            ("several_processes", count > 1, several),
        ]);
    }
}

pub(super) fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let mut feed = Feed::without_clock(sink);
    let mut profile = Profile::default();
    let read = lines(input, &mut feed, |feed, number, line| profile.line(feed, number, line))?;
    match &profile.columns {
        _ if profile.rows > 0 => {}
        Some(columns) => {
            let what = format!(
                "has the header of pytorch_mem_profiler ({}), but no readable row: the profiler was stopped before its first print_period",
                plural(columns.count as u64, "column")
            );
            return Err(Error::Unsuitable { path, what });
        }
        None => return Err(Error::NothingFound { path, format: FORMAT, lines: read, example: EXAMPLE }),
    }
    profile.caveats(&mut feed);
    feed.caveat_rejects("row", "line", EXAMPLE);
    profile.ranks.iter_mut().for_each(|rank| rank.process.end(&mut feed));
    Ok(())
}
