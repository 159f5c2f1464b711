//! What keeps growing memory, as far as the amounts show it. References are not recorded.

use super::course::Course;
use crate::amounts::sum;
use crate::findings::KeptBy;
use crate::judge::trend_test::Judgement;
use crate::{Report, names};
use std::collections::BTreeMap;

/// Tags below this share of the growth do not count as lines of a function.
const LINE_SHARE: f64 = 0.02;
/// Two tags grow together if, at every point, the shares of their growth that exist differ by at most this.
const TOGETHER: f64 = 0.1;
/// Minimum mean deviation of the changes from their mean, as a share of the mean, from which entries have different sizes.
const VARIED: f64 = 0.15;

impl Course<'_> {
    /// Returns the function with several lines whose memory grows together. Memory with a role does not count: a graph keeps
    /// activations of all lines. The frame of a module of Python (`<module>`) exists once.
    pub(super) fn frames(&self, judgement: &Judgement, bytes: i64) -> Option<KeptBy> {
        let mut functions: BTreeMap<&str, Vec<Vec<f64>>> = BTreeMap::new();
        for (line, amounts) in self.structures.iter().filter(|(name, _)| names::is_line(name)) {
            let Some((_, function)) = line.split_once(' ').filter(|(_, name)| !name.starts_with('<')) else {
                continue;
            };
            let changes = self.changes(judgement, amounts);
            let added = sum(changes.iter().copied());
            if added as f64 >= bytes as f64 * LINE_SHARE && added > 0 {
                let mut share = 0.0;
                let shares = changes.iter().map(|change| {
                    share += *change as f64 / added as f64;
                    share
                });
                functions.entry(function).or_default().push(shares.collect());
            }
        }
        let grow_together = |lines: &[Vec<f64>]| {
            lines.windows(2).all(|pair| pair[0].iter().zip(&pair[1]).all(|(a, b)| (a - b).abs() <= TOGETHER))
        };
        let found = functions.into_iter().filter(|(_, lines)| lines.len() > 1 && grow_together(lines));
        found.max_by_key(|(_, lines)| lines.len()).map(|(name, _)| KeptBy::Frames(name.to_owned()))
    }

    /// Returns whether an amount grows by different bytes each time.
    pub(super) fn is_varied(&self, judgement: &Judgement, amounts: &[i64]) -> bool {
        let changes = self.changes(judgement, amounts);
        let count = changes.len().max(1) as f64;
        let mean = sum(changes.iter().copied()) as f64 / count;
        let deviation = changes.iter().map(|change| (*change as f64 - mean).abs()).sum::<f64>();
        mean > 0.0 && deviation / count >= mean * VARIED
    }
}

/// Returns the path of a module in a list up to its number, and this number: `Encoder/layers.3/attn` gives `Encoder/layers.` and 3.
fn numbered(tag: &str) -> Option<(&str, u64)> {
    let end = tag.rfind(|letter: char| letter.is_ascii_digit())? + 1;
    let start = tag[..end].rfind(|letter: char| !letter.is_ascii_digit()).map_or(0, |at| at + 1);
    let is_component = tag[end..].is_empty() || tag[end..].starts_with('/');
    let is_in_list = tag[..start].ends_with(['.', '/']);
    Some((&tag[..start], tag[start..end].parse().ok()?)).filter(|_| is_component && is_in_list)
}

/// Returns [`KeptBy::CacheOfSizes`] if the only growing tag is the first of several modules that differ in their numbers. `names` are
/// the growing tags of modules whose sizes change.
pub(super) fn first_of_many(report: &Report<'_>, names: &[(String, i64)]) -> Option<KeptBy> {
    let [(name, _)] = names else { return None };
    let (path, number) = numbered(name)?;
    let others = report.run.cells.iter().filter_map(|cell| numbered(cell.tag.as_deref()?));
    let mut others = others.filter(|(other, _)| *other == path).map(|(_, number)| number).peekable();
    let is_first = others.peek().is_some() && others.clone().all(|other| other >= number);
    (is_first && others.any(|other| other > number)).then_some(KeptBy::CacheOfSizes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::trend_test::ALPHA;
    use crate::judge::trend_test::judge;
    use crate::rules::Groupings;
    use gpumem_model::run::Cell;

    /// The name of a structure, and its MiB at each point.
    type Part = (&'static str, fn(i64) -> i64);

    /// Judges 60 points of these structures; returns what keeps their memory, and whether its sizes change.
    fn kept(parts: &[Part]) -> (Option<KeptBy>, bool) {
        let mut course = Course::new((0..60).collect(), (0..60).map(f64::from).collect());
        for (name, bytes) in parts {
            let amounts: Vec<i64> = (0..60).map(|at| bytes(at) << 20).collect();
            course.whole.iter_mut().zip(&amounts).for_each(|(sum, bytes)| *sum += bytes);
            course.structures.insert(name, amounts);
        }
        let whole = course.whole.iter().map(|bytes| *bytes as f64);
        let points: Vec<_> = course.positions.iter().copied().zip(whole).collect();
        let judgement = judge(&points, 1e6, ALPHA);
        let frames = course.frames(&judgement, course.added(&judgement, &course.whole));
        (frames, course.is_varied(&judgement, &course.whole))
    }

    #[test]
    fn lines_of_one_function_that_grow_together_are_its_frames() {
        let frames = Some(KeptBy::Frames("Service.handle".into()));
        let kept = |parts: &[Part]| kept(parts).0;
        let each: fn(i64) -> i64 = |at| at / 3 * 100;
        let half: fn(i64) -> i64 = |at| at / 3 * 50;
        let model = ("activations", each);
        assert_eq!(
            kept(&[("serve.py:4 Service.handle", each), ("serve.py:7 Service.handle", half), model]),
            frames
        );
        assert_eq!(kept(&[("serve.py:4 Service.handle", each), model]), None, "one line");
        assert_eq!(kept(&[("serve.py:4 <module>", each), ("serve.py:7 <module>", half)]), None);
        let late: fn(i64) -> i64 = |at| (at - 40).max(0) * 50;
        assert_eq!(kept(&[("serve.py:4 Service.handle", each), ("serve.py:7 Service.handle", late)]), None);
    }

    #[test]
    fn the_first_of_many_modules_that_grows_in_changing_sizes_is_a_cache() {
        let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        let sizes: fn(i64) -> i64 = |at| (0..at).map(|step| 40 + step * 37 % 90).sum();
        let same: fn(i64) -> i64 = |at| at * 70;
        assert!(kept(&[("retained forward outputs", sizes)]).1);
        assert!(!kept(&[("retained forward outputs", same)]).1);
        let mut first = |name: &str, modules: &[&str]| {
            let cell = |tag: &&str| Cell { tag: Some((*tag).into()), ..run.cells[0].clone() };
            run.cells = modules.iter().map(cell).collect();
            first_of_many(&Report::new(&run, Groupings::default(), None), &[(name.into(), 1)])
        };
        let layers = ["Encoder/layers.0", "Encoder/layers.1", "Encoder/head"];
        assert_eq!(first("Encoder/layers.0", &layers), Some(KeptBy::CacheOfSizes));
        assert_eq!(first("Encoder/layers.1", &layers), None, "the last one, as of kept outputs");
        assert_eq!(first("Encoder/layers.0", &layers[..1]), None, "the only one");
        assert_eq!(first("Encoder/head", &layers), None);
        assert_eq!(first("Net/fc1", &["Net/fc1", "Net/fc2"]), None, "not of a list");
    }
}
