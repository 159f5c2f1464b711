//! Decides whether an amount grows: computes a verdict from a few dozen points, with a rate and a confidence.
//!
//! 1. **Warm-up** is dropped: the first tenth of the points, and at least two points.
//! 2. **Finished changes do not count.** The points are split in two where two lines fit them much better than one, and only the
//!    later part is judged, if it has enough points. So a ramp that has ended, or a single allocation, is not growth. The later
//!    part is split again while that improves the fit.
//! 3. **Rate**: the median of the slopes between all pairs of points (Theil-Sen), which is robust against outliers. Its 95 %
//!    bounds are computed from the ranks of the slopes (Sen).
//! 4. **Trend**: the Mann-Kendall test counts how many more pairs rise than fall. Correlated points are weaker evidence, so the
//!    variance of this count grows with the autocorrelation of the residuals.
//! 5. **Minimum change**: a total change over the judged part that is below a minimum does not count.
//!
//! Points need not be normally distributed. The test has no random element: the same points give the same verdict.

use serde::{Deserialize, Serialize};

/// Minimum number of points that must remain after the warm-up; fewer points give no verdict.
pub use gpumem_model::growth::LEAST_POINTS;
/// Accepted probability of a false verdict on pure noise, for one amount.
pub const ALPHA: f64 = 0.001;
/// The points are split if two lines leave at most this fraction of the squared residuals of one line.
const CUT: f64 = 0.35;
const LEAST_PART: usize = 4;
/// If the residuals (root mean square) are below this fraction of the rise, the points count as a line, even if correlated.
const LINE: f64 = 0.02;
/// A rise of this many times the spread around the line is a trend, however strongly adjacent points are correlated.
const CLEAR: f64 = 6.0;
const MOST_CONFIDENCE: f64 = 0.999;
/// Distance of the 95 % bounds from the rate, in standard deviations.
const BOUNDS: f64 = 1.96;

/// Verdict on whether an amount grows over time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The amount has no significant trend, or its change is below the minimum that counts as growth.
    Flat,
    /// The amount grows, and has not stopped growing.
    Growing,
    /// The amount shrinks, and has not stopped shrinking.
    Shrinking,
    /// The amount changed by a sudden step and has been flat since. If there are too few points since the step: it was flat before.
    OneJump,
    /// There are too few points for a verdict.
    #[default]
    NotEnoughData,
}

impl Verdict {
    /// Returns the verdict's name as printed.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Flat => "flat",
            Verdict::Growing => "growing",
            Verdict::Shrinking => "shrinking",
            Verdict::OneJump => "one jump",
            Verdict::NotEnoughData => "not enough data",
        }
    }

    /// Returns whether the amount still grows or shrinks.
    pub fn moves(self) -> bool {
        matches!(self, Verdict::Growing | Verdict::Shrinking)
    }
}

/// A verdict with its numbers. Rates are bytes per step, period or minute, depending on the unit of the points.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Verdict,
    /// Rate of change; `None` without enough data.
    pub bytes_per_unit: Option<f64>,
    /// Lower and upper 95 % bound of the rate.
    pub low_high: Option<(f64, f64)>,
    /// Confidence in the verdict, 0 to 1. For `Flat`: confidence that the true change is below the minimum.
    pub confidence: Option<f64>,
    /// Number of points on which the verdict is based.
    pub points: usize,
    /// First and last step, period or minute of the judged points.
    pub span: Option<(f64, f64)>,
    /// Change in bytes, for [`Verdict::OneJump`].
    pub jump_bytes: Option<i64>,
}

impl Judgement {
    /// Returns the verdict for too few points.
    pub fn none(points: usize) -> Self {
        Judgement { points, ..Judgement::default() }
    }

    /// Returns the number of steps, periods or minutes from the first to the last judged point.
    pub fn units(&self) -> f64 {
        self.span.map_or(0.0, |(first, last)| last - first)
    }
}

/// Returns the number of points that are warm-up, of `count` points.
pub fn warm_up(count: usize) -> usize {
    count.div_ceil(10).max(2).min(count)
}

/// Judges points (step or minute, bytes), sorted by step or minute. A total change below `material` bytes does not count. `alpha`
/// is the accepted probability of a false verdict on pure noise.
pub fn judge(points: &[(f64, f64)], material: f64, alpha: f64) -> Judgement {
    let points = &points[warm_up(points.len())..];
    if points.len() < LEAST_POINTS {
        return Judgement::none(points.len());
    }
    let (mut part, mut jump, mut alpha) = (points, None, alpha);
    while let Some(at) = cut(part) {
        let (before, after) = part.split_at(at);
        let step = level(after) - level(before);
        if after.len() < LEAST_POINTS {
            // There are too few points since the jump for a verdict on them, but the part before the jump can be judged.
            if step.abs() >= material && is_step(before, after) && before.len() >= LEAST_POINTS {
                let until = judge_part(before, material, alpha);
                let verdict = if until.verdict == Verdict::Flat { Verdict::OneJump } else { until.verdict };
                let jump_bytes = (verdict == Verdict::OneJump).then_some(step as i64);
                return Judgement { verdict, jump_bytes, ..until };
            }
            break;
        }
        if is_step(before, after) && step.abs() >= material {
            jump = Some(step as i64);
        }
        part = after;
        alpha /= 4.0; // this part was selected from the points, so it needs stronger evidence
    }
    let found = judge_part(part, material, alpha);
    match (found.verdict, jump) {
        (Verdict::Flat, Some(bytes)) => {
            Judgement { verdict: Verdict::OneJump, jump_bytes: Some(bytes), ..found }
        }
        _ => found,
    }
}

fn judge_part(points: &[(f64, f64)], material: f64, alpha: f64) -> Judgement {
    let slopes = slopes(points);
    let (Some(&(first, _)), Some(&(last, _)), false) = (points.first(), points.last(), slopes.is_empty())
    else {
        return Judgement::none(points.len());
    };
    let rate = median(&slopes);
    let (score, deviation) = mann_kendall(points, rate);
    let z = if deviation > 0.0 { (score.abs() - 1.0).max(0.0) / deviation } else { 0.0 };
    // Probability that noise alone gives a score this far from 0 in either direction.
    let chance = 2.0 * (1.0 - normal(z));
    let reach = BOUNDS * deviation;
    let middle = slopes.len() as f64 / 2.0;
    let at = |rank: f64| slopes[(rank.max(0.0) as usize).min(slopes.len() - 1)];
    let bounds = (at(middle - reach / 2.0), at(middle + reach / 2.0));
    let span = last - first;
    let is_material = (rate * span).abs() >= material;
    let is_trend = chance < alpha && score.signum() == rate.signum();
    let (verdict, confidence) = match (is_trend && is_material, rate > 0.0) {
        (true, true) => (Verdict::Growing, 1.0 - chance),
        (true, false) => (Verdict::Shrinking, 1.0 - chance),
        (false, _) => {
            let sd = (bounds.1 - bounds.0) * span / (2.0 * BOUNDS);
            let room = material - (rate * span).abs();
            let sure = match (sd > 0.0, room > 0.0) {
                (true, _) => normal(room / sd),
                (false, is_less) => f64::from(u8::from(is_less)),
            };
            (Verdict::Flat, sure)
        }
    };
    Judgement {
        verdict,
        bytes_per_unit: Some(rate),
        low_high: Some(bounds),
        confidence: Some(confidence.min(MOST_CONFIDENCE)),
        points: points.len(),
        span: Some((first, last)),
        jump_bytes: None,
    }
}

/// Returns the index at which to split the points because two lines fit much better than one; `None` if one line fits, or if there
/// are too few points.
fn cut(points: &[(f64, f64)]) -> Option<usize> {
    if points.len() < LEAST_POINTS + LEAST_PART {
        return None;
    }
    let (slope, _, one) = line(points);
    let spread = points.iter().map(|(_, y)| y.abs()).fold(0.0, f64::max);
    let rise = slope * (points[points.len() - 1].0 - points[0].0);
    if one <= (spread * 1e-9).max(rise.abs() * LINE).powi(2) * points.len() as f64 {
        return None; // one line fits the points, so there is no split
    }
    let left = |at: usize| line(&points[..at]).2 + line(&points[at..]).2;
    let places = LEAST_PART..=points.len() - LEAST_PART;
    let best = places.map(|at| (left(at), at)).min_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 <= CUT * one).then_some(best.1)
}

/// Returns whether the change between two parts is a step, not the end of a ramp: most of it happens between the two parts.
fn is_step(before: &[(f64, f64)], after: &[(f64, f64)]) -> bool {
    let (Some(&(x, _)), Some(&(y, _))) = (before.last(), after.first()) else { return false };
    let at = |part: &[(f64, f64)], x: f64| {
        let (slope, intercept, _) = line(part);
        intercept + slope * x
    };
    let between = (x + y) / 2.0;
    let step = at(after, between) - at(before, between);
    let (slope, ..) = line(before);
    let ramp = slope * (x - before[0].0);
    step.abs() > ramp.abs() && step.abs() > 0.0
}

/// Returns the median of the bytes of a part.
fn level(part: &[(f64, f64)]) -> f64 {
    let mut bytes: Vec<f64> = part.iter().map(|(_, y)| *y).collect();
    bytes.sort_by(f64::total_cmp);
    median(&bytes)
}

/// Returns slope, intercept and sum of squared residuals of the least-squares line through the points.
fn line(points: &[(f64, f64)]) -> (f64, f64, f64) {
    let count = points.len().max(1) as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x0, y0) = (mean(|point| point.0), mean(|point| point.1));
    let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|(x, y)| of(x - x0, y - y0)).sum::<f64>();
    let (xx, xy) = (sum(&|x, _| x * x), sum(&|x, y| x * y));
    let slope = if xx > 0.0 { xy / xx } else { 0.0 };
    let left = sum(&|x, y| (y - slope * x).powi(2));
    (slope, y0 - slope * x0, left)
}

/// Returns the slopes between all pairs of points, sorted.
fn slopes(points: &[(f64, f64)]) -> Vec<f64> {
    let mut slopes = Vec::with_capacity(points.len() * points.len() / 2);
    for (at, (x, y)) in points.iter().enumerate() {
        let later = points[at + 1..].iter().filter(|(later, _)| later > x);
        slopes.extend(later.map(|(later, bytes)| (bytes - y) / (later - x)));
    }
    slopes.sort_by(f64::total_cmp);
    slopes
}

fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        count if count % 2 == 1 => sorted[count / 2],
        count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
    }
}

/// Returns the score (number of rising minus falling pairs), and the standard deviation that the score has without a trend.
fn mann_kendall(points: &[(f64, f64)], rate: f64) -> (f64, f64) {
    let mut score = 0_i64;
    for (at, (_, y)) in points.iter().enumerate() {
        for (_, later) in &points[at + 1..] {
            score += i64::from(later > y) - i64::from(later < y);
        }
    }
    let mut sorted: Vec<f64> = points.iter().map(|(_, y)| *y).collect();
    sorted.sort_by(f64::total_cmp);
    let term = |count: f64| count * (count - 1.0) * (2.0 * count + 5.0);
    let ties: f64 = sorted.chunk_by(|a, b| a == b).map(|equal| term(equal.len() as f64)).sum();
    let variance = ((term(points.len() as f64) - ties) / 18.0).max(0.0);
    let like = autocorrelation(points, rate).clamp(0.0, 0.95);
    (score as f64, (variance * (1.0 + like) / (1.0 - like)).sqrt())
}

/// Returns the correlation of each point's residual with that of the point before. Returns 0 if the points are clearly on a line,
/// because an amount that changes in steps leaves correlated residuals too.
fn autocorrelation(points: &[(f64, f64)], rate: f64) -> f64 {
    let left: Vec<f64> = points.iter().map(|(x, y)| y - rate * x).collect();
    let mut sorted = left.clone();
    sorted.sort_by(f64::total_cmp);
    let tenth = sorted.len() / 10;
    let width = match (sorted.get(tenth), sorted.get(sorted.len() - 1 - tenth)) {
        (Some(low), Some(high)) => high - low,
        _ => return 0.0,
    };
    let rise = rate * (points[points.len() - 1].0 - points[0].0);
    let mean = left.iter().sum::<f64>() / left.len() as f64;
    let all: f64 = left.iter().map(|rest| (rest - mean).powi(2)).sum();
    if rise.abs() >= CLEAR * width || all <= 0.0 {
        return 0.0;
    }
    let like = left.windows(2).map(|pair| (pair[0] - mean) * (pair[1] - mean)).sum::<f64>() / all;
    // With few points the estimate is too small; the added term approximately corrects this bias (Kendall 1954).
    if like > 0.0 { like + (1.0 + 4.0 * like) / left.len() as f64 } else { like }
}

/// Returns the cumulative normal distribution at z (Abramowitz and Stegun 26.2.17, error at most 7.5e-8).
fn normal(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = [1.330_274_429, -1.821_255_978, 1.781_477_937, -0.356_563_782, 0.319_381_530];
    let tail = series.iter().fold(0.0, |sum, factor| (sum + factor) * t);
    let above = tail * (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if z >= 0.0 { 1.0 - above } else { above }
}
