//! Whether an amount grows: a verdict on a few dozen points, with its rate and how sure it is.
//!
//! 1. **Warm-up** is dropped: the first tenth of the points, and at least two.
//! 2. **What is over is over.** The points are cut in two where two lines fit them much better than one, and the later part is
//!    judged: a ramp that has ended, or memory that was taken once and for all, is no growth.
//!    A part is cut again as long as that helps.
//! 3. **Rate**: the median of the slopes between all pairs of points (Theil-Sen), which a few wild points do not move, with
//!    the bounds between which it lies at 95 % (Sen's, from the ranks of those slopes).
//! 4. **Trend**: the Mann-Kendall test counts how many pairs rise more than fall. Points that resemble their neighbours are
//!    worth fewer: the variance grows with the autocorrelation of what the line leaves.
//! 5. **Material**: what changed over the part in all must be worth a word.
//!
//! No point is trusted to be normal, and nothing here is random: the same points give the same verdict.

use serde::{Deserialize, Serialize};

/// Fewer points after warm-up are no evidence.
pub use gpumem_model::growth::LEAST_POINTS;
/// Chance of a verdict where there is nothing but noise, for one amount.
pub const ALPHA: f64 = 0.001;
/// Two lines must leave at most this share of what one leaves.
const CUT: f64 = 0.35;
/// A part that a line can be laid through.
const LEAST_PART: usize = 4;
/// What leaves less than this part of what it rises is a line, whatever pattern the rest has.
const LINE: f64 = 0.02;
/// What rises this many times as far as its points are spread about the line is no chance, however alike neighbours are.
const CLEAR: f64 = 6.0;
/// Confidence is never said to be more.
const MOST_CONFIDENCE: f64 = 0.999;
/// Standard deviations on either side of bounds at 95 %.
const BOUNDS: f64 = 1.96;

/// What became of an amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It neither grows nor shrinks by anything worth a word.
    Flat,
    /// It grows, and has not stopped.
    Growing,
    /// It shrinks, and has not stopped.
    Shrinking,
    /// It changed once, and is flat since.
    OneJump,
    /// Too few points.
    NotEnoughData,
}

impl Verdict {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Flat => "flat",
            Verdict::Growing => "growing",
            Verdict::Shrinking => "shrinking",
            Verdict::OneJump => "one jump",
            Verdict::NotEnoughData => "not enough data",
        }
    }
}

/// A verdict with its numbers. Rates are bytes per step or per minute, whichever the points are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Judgement {
    /// What became of it.
    pub verdict: Verdict,
    /// Rate; absent where there is not enough data.
    pub bytes_per_unit: Option<f64>,
    /// Bounds of the rate at 95 %.
    pub low_high: Option<(f64, f64)>,
    /// How sure the verdict is: of 1. Of `flat`: that it changes by less than what is worth a word.
    pub confidence: Option<f64>,
    /// Points that were judged.
    pub points: usize,
    /// First and last step or minute of those.
    pub span: Option<(f64, f64)>,
    /// Of [`Verdict::OneJump`]: how much.
    pub jump_bytes: Option<i64>,
}

impl Judgement {
    /// Not enough data.
    pub fn none(points: usize) -> Self {
        Judgement {
            verdict: Verdict::NotEnoughData,
            bytes_per_unit: None,
            low_high: None,
            confidence: None,
            points,
            span: None,
            jump_bytes: None,
        }
    }

    /// Steps or minutes that were judged.
    pub fn units(&self) -> f64 {
        self.span.map_or(0.0, |(first, last)| last - first)
    }
}

/// Judges points (step or minute, bytes), which are in order. A change of less than `material` bytes over all that is
/// judged is none; `alpha` is the chance of a wrong word on noise.
pub fn judge(points: &[(f64, f64)], material: f64, alpha: f64) -> Judgement {
    let warm_up = points.len().div_ceil(10).max(2).min(points.len());
    let points = &points[warm_up..];
    if points.len() < LEAST_POINTS {
        return Judgement::none(points.len());
    }
    let mut part = points;
    let mut jump = None;
    let mut alpha = alpha;
    while let Some(at) = cut(part) {
        let (before, after) = part.split_at(at);
        let step = level(after) - level(before);
        if after.len() < LEAST_POINTS {
            // Too soon to say what it does since; what it did before is known.
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
        alpha /= 4.0; // the part was chosen: it must be the clearer
    }
    let found = judge_part(part, material, alpha);
    match (found.verdict, jump) {
        (Verdict::Flat, Some(bytes)) => {
            Judgement { verdict: Verdict::OneJump, jump_bytes: Some(bytes), ..found }
        }
        _ => found,
    }
}

/// Judges all of the points.
fn judge_part(points: &[(f64, f64)], material: f64, alpha: f64) -> Judgement {
    let slopes = slopes(points);
    let (Some(&(first, _)), Some(&(last, _)), false) = (points.first(), points.last(), slopes.is_empty())
    else {
        return Judgement::none(points.len());
    };
    let rate = median(&slopes);
    let (score, deviation) = mann_kendall(points, rate);
    let z = if deviation > 0.0 { (score.abs() - 1.0).max(0.0) / deviation } else { 0.0 };
    // Of both directions together.
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

/// Where two lines fit much better than one.
fn cut(points: &[(f64, f64)]) -> Option<usize> {
    if points.len() < LEAST_POINTS + LEAST_PART {
        return None;
    }
    let (slope, _, one) = line(points);
    let spread = points.iter().map(|(_, y)| y.abs()).fold(0.0, f64::max);
    let rise = slope * (points[points.len() - 1].0 - points[0].0);
    if one <= (spread * 1e-9).max(rise.abs() * LINE).powi(2) * points.len() as f64 {
        return None; // a line it is
    }
    let left = |at: usize| line(&points[..at]).2 + line(&points[at..]).2;
    let places = LEAST_PART..=points.len() - LEAST_PART;
    let best = places.map(|at| (left(at), at)).min_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 <= CUT * one).then_some(best.1)
}

/// Whether what lies between two parts is a step, and not the end of a ramp: most of what changed happened between them.
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

/// The middle of a part.
fn level(part: &[(f64, f64)]) -> f64 {
    let mut bytes: Vec<f64> = part.iter().map(|(_, y)| *y).collect();
    bytes.sort_by(f64::total_cmp);
    median(&bytes)
}

/// Slope, intercept and squared residuals of the line of least squares.
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

/// Slopes between all pairs, sorted.
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

/// Pairs that rise minus pairs that fall, and its standard deviation where there is no trend.
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

/// How much what the line leaves resembles what it leaves of the point before; 0 of a line that is beyond doubt: stairs leave
/// a pattern too.
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
    // Of few points it comes out too small, by about that much (Kendall 1954).
    if like > 0.0 { like + (1.0 + 4.0 * like) / left.len() as f64 } else { like }
}

/// The normal distribution up to z (Abramowitz and Stegun 26.2.17, off by at most 7.5e-8).
fn normal(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = [1.330_274_429, -1.821_255_978, 1.781_477_937, -0.356_563_782, 0.319_381_530];
    let tail = series.iter().fold(0.0, |sum, factor| (sum + factor) * t);
    let above = tail * (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if z >= 0.0 { 1.0 - above } else { above }
}
