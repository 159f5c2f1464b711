//! Writes metric families: each family once with its help text, then its series. Families are in the order of their first use.

use crate::stats::Family;
use crate::view::text::{Label, Number};

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
#[derive(Debug, Default)]
pub(crate) struct Labels(String);

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

/// Lengths and counts of a scrape, to which [`Families::undo`] resets it.
#[derive(Debug)]
pub(crate) struct Mark {
    lengths: Vec<usize>,
    series: usize,
    omitted: u64,
}

#[derive(Debug)]
pub(crate) struct Families {
    families: Vec<(Family, String)>,
    /// Index in `families` of the last series' family. The next series mostly has the same family or one of the next.
    last: usize,
    series: usize,
    max_series: usize,
    /// Number of series that were omitted because of the limit.
    pub omitted: u64,
}

impl Families {
    pub(crate) fn new(max_series: usize) -> Self {
        Families { families: Vec::new(), last: 0, series: 0, max_series, omitted: 0 }
    }

    /// Writes a series, unless its value is unknown. Beyond the limit a series is omitted and counted.
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

    fn push(
        &mut self,
        family: &'static Family,
        labels: &Labels,
        own: Option<(&str, &Label<'_>)>,
        value: impl Number,
    ) {
        if !value.is_known() {
            return;
        }
        if self.series >= self.max_series {
            self.omitted += 1;
            return;
        }
        self.series += 1;
        let mut from_last = (self.last..self.families.len()).chain(0..self.last);
        let known = from_last.find(|&at| std::ptr::eq(self.families[at].0.name, family.name));
        self.last = known.unwrap_or_else(|| {
            self.families.push((*family, String::with_capacity(4096)));
            self.families.len() - 1
        });
        let out = &mut self.families[self.last].1;
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
        value.push(out);
        out.push('\n');
    }

    pub(crate) fn mark(&self) -> Mark {
        let lengths = self.families.iter().map(|(_, text)| text.len()).collect();
        Mark { lengths, series: self.series, omitted: self.omitted }
    }

    /// Returns whether no series was omitted since `since`, and `more` series fit.
    pub(crate) fn has_room(&self, since: &Mark, more: usize) -> bool {
        self.omitted == since.omitted && self.series.saturating_add(more) <= self.max_series
    }

    pub(crate) fn undo(&mut self, since: Mark) {
        let lengths = since.lengths.into_iter().chain(std::iter::repeat(0));
        self.families.iter_mut().zip(lengths).for_each(|((_, text), length)| text.truncate(length));
        (self.series, self.omitted) = (since.series, since.omitted);
    }

    pub(crate) fn text(self) -> String {
        let bytes: usize = self.families.iter().map(|(_, series)| series.len() + 256).sum();
        let mut text = String::with_capacity(bytes + 16_384);
        for (family, series) in self.families.iter().filter(|(_, series)| !series.is_empty()) {
            for part in
                ["# HELP ", family.name, " ", family.help, "\n# TYPE ", family.name, " ", family.kind, "\n"]
            {
                text.push_str(part);
            }
            text.push_str(series);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static A: Family = Family { name: "a_bytes", help: "A.", kind: "gauge", labels: &[] };
    static B: Family = Family { name: "b_total", help: "B.", kind: "counter", labels: &[] };

    #[test]
    fn families_are_whole() {
        let labels = Labels::default().with("pid", "1").with("user", "a\"\n");
        let mut families = Families::new(4);
        families.add(&A, &labels, 5_u64);
        families.add(&B, &Labels::default(), 6_u64);
        families.add(&A, &Labels::default(), -7_i64);
        families.add_with(&B, &labels, ("reason", "x"), 8_u64);
        families.add(&A, &labels, 9_u64);
        assert_eq!(families.omitted, 1);
        assert_eq!(
            families.text(),
            "# HELP a_bytes A.\n# TYPE a_bytes gauge\na_bytes{pid=\"1\",user=\"a\\\"\\\\u{a}\"} 5\na_bytes -7\n\
             # HELP b_total B.\n# TYPE b_total counter\nb_total 6\n\
             b_total{pid=\"1\",user=\"a\\\"\\\\u{a}\",reason=\"x\"} 8\n"
        );
    }
    #[test]
    fn what_is_undone_was_never_written() {
        let mut families = Families::new(3);
        families.add(&A, &Labels::default(), 1_u64);
        let before = families.mark();
        assert!(families.has_room(&before, 2) && !families.has_room(&before, 3));
        (0..3).for_each(|_| families.add(&A, &Labels::default(), 2_u64));
        families.add(&B, &Labels::default(), 3_u64);
        assert!(!families.has_room(&before, 0));
        families.undo(before);
        assert_eq!(families.omitted, 0);
        families.add(&A, &Labels::default(), 4_u64);
        assert_eq!(families.text(), "# HELP a_bytes A.\n# TYPE a_bytes gauge\na_bytes 1\na_bytes 4\n");
    }
}
