//! Writes metric families: each family once with its help text, then its series. Families are in the order of their first use.

use crate::stats::Family;
use crate::view::text::{Label, Number};
use gpumem_ledger::DeviceView;
use std::sync::Arc;

/// Makes a static for each family from its type, name, labels and help text, and the list `FAMILIES`.
macro_rules! families {
    ($($family:ident: $kind:ident $name:literal $labels:expr, $help:literal;)*) => {
        $(static $family: Family =
            Family { name: $name, help: $help, kind: stringify!($kind), labels: $labels };)*

        pub(super) static FAMILIES: &[&Family] = &[$(&$family),*];
    };
}

pub(super) use families;

/// Labels that several series share, as text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels(String);

/// Bytes of room that kept series may have, at most.
const MORE_BYTES: usize = 128;
/// Bytes that a copy of labels has room for, because most copies get further labels.
const MORE_LABELS: usize = 96;

impl Clone for Labels {
    fn clone(&self) -> Self {
        let mut text = String::with_capacity(self.0.len() + MORE_LABELS);
        text.push_str(&self.0);
        Labels(text)
    }
}

impl Labels {
    /// Returns an empty list with room for the labels that most series have.
    pub(crate) fn new() -> Self {
        Labels(String::with_capacity(192))
    }

    /// Drops the room for further labels.
    pub(crate) fn shrunk(mut self) -> Self {
        self.0.shrink_to_fit();
        self
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        push_pair(&mut self.0, name, &value.into());
        self
    }
}

fn push_pair(out: &mut String, name: &str, value: &Label<'_>) {
    if !out.is_empty() && !out.ends_with('{') {
        out.push(',');
    }
    out.push_str(name);
    out.push_str("=\"");
    value.push(out);
    out.push('"');
}

/// Series of one owner as text, which later scrapes write again while the owner does not change. Values that change all the time
/// are left out.
#[derive(Debug, Default)]
pub(crate) struct Series {
    text: String,
    parts: Vec<Part>,
    /// Number of lines in all parts.
    lines: usize,
}

/// Consecutive lines of one family.
#[derive(Debug)]
struct Part {
    family: &'static Family,
    lines: usize,
    /// End of the lines in the text.
    end: usize,
    /// For one line without its value, which is an age: when the age was 0.
    since: Option<Since>,
}

/// The time at which an age was 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Since {
    pub time_ns: u64,
    /// Index of the device and number of the reading, if later readings that repeat it make the age 0 again.
    pub reading: Option<(usize, u64)>,
}

impl Since {
    fn time_ns(&self, devices: &[DeviceView]) -> u64 {
        let confirmed = self.reading.and_then(|(device, number)| devices.get(device)?.confirmed_ns(number));
        self.time_ns.max(confirmed.unwrap_or(0))
    }
}

impl Series {
    /// Writes a series, unless its value is unknown.
    pub(crate) fn add(&mut self, family: &'static Family, labels: &Labels, value: impl Number) {
        self.push(family, labels, None, value);
    }

    pub(crate) fn add_with<'a>(
        &mut self,
        family: &'static Family,
        labels: &Labels,
        (name, own): (&str, impl Into<Label<'a>>),
        value: impl Number,
    ) {
        self.push(family, labels, Some((name, &own.into())), value);
    }

    /// Writes a series whose value is the time in seconds, at each scrape, since `since`.
    pub(crate) fn add_age(&mut self, family: &'static Family, labels: &Labels, since: Since) {
        self.push_labels(family, labels, None);
        self.end_line(family, Some(since));
    }

    /// Ends a line, whose text has been written.
    fn end_line(&mut self, family: &'static Family, since: Option<Since>) {
        let end = self.text.len();
        self.lines += 1;
        match self.parts.last_mut() {
            Some(last) if std::ptr::eq(last.family, family) && last.since.or(since).is_none() => {
                (last.lines, last.end) = (last.lines + 1, end);
            }
            _ => self.parts.push(Part { family, lines: 1, end, since }),
        }
    }

    /// Returns the number of series.
    pub(crate) fn len(&self) -> usize {
        self.lines
    }

    fn push(
        &mut self,
        family: &'static Family,
        labels: &Labels,
        own: Option<(&str, &Label<'_>)>,
        value: impl Number,
    ) {
        if value.is_known() {
            self.push_labels(family, labels, own);
            value.push(&mut self.text);
            self.text.push('\n');
            self.end_line(family, None);
        }
    }

    fn push_labels(&mut self, family: &Family, labels: &Labels, own: Option<(&str, &Label<'_>)>) {
        let out = &mut self.text;
        out.push_str(family.name);
        if !labels.0.is_empty() || own.is_some() {
            out.push('{');
            out.push_str(&labels.0);
            if let Some((name, value)) = own {
                push_pair(out, name, value);
            }
            out.push('}');
        }
        out.push(' ');
    }

    /// Returns no series, with room for as many as `earlier` has and somewhat longer numbers.
    pub(crate) fn with_room_of(earlier: &Series) -> Self {
        let text = String::with_capacity(earlier.text.len() + MORE_BYTES / 2);
        Series { text, parts: Vec::with_capacity(earlier.parts.len()), lines: 0 }
    }

    /// Drops the room for further series, unless it is small.
    pub(crate) fn shrink(&mut self) {
        if self.text.capacity() > self.text.len() + MORE_BYTES {
            self.text.shrink_to_fit();
        }
        self.parts.shrink_to_fit();
    }
}

/// Returns the first `count` lines of a text.
fn first_lines(text: &str, count: usize) -> &str {
    let last = count.checked_sub(1).and_then(|index| text.match_indices('\n').nth(index));
    last.map_or("", |(end, _)| &text[..=end])
}

/// Lines of a scrape, with [`Part::since`].
type Written<'s> = (&'s str, Option<Since>);

/// Bytes of an age, at most.
const AGE_BYTES: usize = 24;

/// The series of one scrape, up to a limit.
#[derive(Debug)]
pub(crate) struct Families {
    /// Series of each owner, with the number of lines that are within the limit.
    owners: Vec<(Arc<Series>, usize)>,
    count: usize,
    max_series: usize,
    /// Number of series that were omitted because of the limit.
    pub omitted: u64,
}

impl Families {
    pub(crate) fn new(max_series: usize) -> Self {
        Families { owners: Vec::new(), count: 0, max_series, omitted: 0 }
    }

    /// Adds series. Those beyond the limit are omitted and counted.
    pub(crate) fn add(&mut self, series: Series) {
        let all = series.lines;
        let fitting = all.min(self.max_series.saturating_sub(self.count));
        self.omitted += (all - fitting) as u64;
        self.count += fitting;
        self.owners.push((series.into(), fitting));
    }

    /// Adds all series of an owner if `more` further ones fit. Returns whether it did.
    pub(crate) fn add_whole(&mut self, series: &Arc<Series>, more: usize) -> bool {
        let all = series.lines;
        let fits = all <= self.room(more);
        if fits {
            self.count += all;
            self.owners.push((Arc::clone(series), all));
        }
        fits
    }

    /// Returns the number of series that fit if `more` further ones must fit too.
    pub(crate) fn room(&self, more: usize) -> usize {
        self.max_series.saturating_sub(self.count).saturating_sub(more)
    }

    /// Returns the text, with room for `more` bytes. `now_ns`: the time from which ages are computed.
    pub(crate) fn text(&self, now_ns: u64, devices: &[DeviceView], more: usize) -> String {
        let mut families: Vec<(&Family, Vec<Written<'_>>)> = Vec::new();
        // The family of the next part mostly follows the family of the last one.
        let (mut last, mut bytes) = (0, more);
        for (series, lines) in &self.owners {
            let (mut start, mut left) = (0, *lines);
            for part in &series.parts {
                if left == 0 {
                    break;
                }
                let mut from_last = (last..families.len()).chain(0..last);
                let known = from_last.find(|&at| std::ptr::eq(families[at].0.name, part.family.name));
                last = known.unwrap_or_else(|| {
                    families.push((part.family, Vec::with_capacity(self.owners.len())));
                    bytes += 2 * part.family.name.len() + part.family.help.len() + 32;
                    families.len() - 1
                });
                let mut text = &series.text[start..part.end];
                if part.lines > left {
                    text = first_lines(text, left);
                }
                families[last].1.push((text, part.since));
                bytes += text.len() + part.since.map_or(0, |_| AGE_BYTES);
                (start, left) = (part.end, left.saturating_sub(part.lines));
            }
        }
        let mut text = String::with_capacity(bytes);
        for (family, lines) in families {
            for part in
                ["# HELP ", family.name, " ", family.help, "\n# TYPE ", family.name, " ", family.kind, "\n"]
            {
                text.push_str(part);
            }
            for (lines, since) in lines {
                text.push_str(lines);
                if let Some(since) = since {
                    (now_ns.saturating_sub(since.time_ns(devices)) as f64 / 1e9).push(&mut text);
                    text.push('\n');
                }
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static A: Family = Family { name: "a_bytes", help: "A.", kind: "gauge", labels: &[] };
    static B: Family = Family { name: "b_total", help: "B.", kind: "counter", labels: &[] };
    static AGE: Family = Family { name: "c_seconds", help: "C.", kind: "gauge", labels: &[] };

    #[test]
    fn families_are_whole() {
        let labels = Labels::default().with("pid", "1").with("user", "a\"\n");
        let (mut series, mut others) = (Series::default(), Series::default());
        series.add(&A, &labels, 5_u64);
        series.add(&B, &Labels::default(), 6_u64);
        series.add(&A, &Labels::default(), Some(-7_i64));
        series.add(&A, &Labels::default(), None::<u64>);
        others.add_with(&B, &labels, ("reason", "x"), 8_u64);
        others.add(&A, &labels, 9_u64);
        let mut families = Families::new(4);
        families.add(series);
        families.add(others);
        assert_eq!(families.omitted, 1);
        assert_eq!(
            families.text(0, &[], 0),
            "# HELP a_bytes A.\n# TYPE a_bytes gauge\na_bytes{pid=\"1\",user=\"a\\\"\\\\u{a}\"} 5\na_bytes -7\n\
             # HELP b_total B.\n# TYPE b_total counter\nb_total 6\n\
             b_total{pid=\"1\",user=\"a\\\"\\\\u{a}\",reason=\"x\"} 8\n"
        );
    }

    #[test]
    fn an_owner_has_all_series_or_none() {
        let owner = |count| {
            let mut series = Series::default();
            (0..count).for_each(|number: u64| series.add(&A, &Labels::default(), number));
            Arc::new(series)
        };
        let mut families = Families::new(4);
        assert!(families.add_whole(&owner(1), 3));
        assert!(!families.add_whole(&owner(1), 3), "no room for more");
        assert!(!families.add_whole(&owner(4), 0));
        assert!(families.add_whole(&owner(3), 0));
        assert_eq!(families.omitted, 0);
        let text = families.text(0, &[], 0);
        assert_eq!(
            text,
            "# HELP a_bytes A.\n# TYPE a_bytes gauge\na_bytes 0\na_bytes 0\na_bytes 1\na_bytes 2\n"
        );
    }

    #[test]
    fn ages_are_those_of_the_scrape() {
        let mut series = Series::default();
        series.add_age(
            &AGE,
            &Labels::default().with("pid", "1"),
            Since { time_ns: 1_000_000_000, reading: None },
        );
        series.add(&A, &Labels::default(), 3_u64);
        let series = Arc::new(series);
        for (now_ns, age) in [(1_500_000_000, "0.5"), (4_000_000_000, "3"), (0, "0")] {
            let mut families = Families::new(2);
            assert!(families.add_whole(&series, 0));
            let text = families.text(now_ns, &[], 0);
            assert!(
                text.contains(&format!("c_seconds{{pid=\"1\"}} {age}\n")) && text.ends_with("\na_bytes 3\n"),
                "{text}"
            );
        }
    }
}
