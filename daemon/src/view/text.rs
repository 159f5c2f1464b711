//! Makes untrusted texts safe for terminals, dashboards and scrapers, and writes numbers as metrics have them.

use gpumem_model::escape::{escape as shown, escape_key, is_unsafe};
use std::borrow::Cow;
use std::fmt::Write;

/// Maximum length of a label value in bytes, so that long names of processes do not make a scrape large.
pub(crate) const LABEL_BYTES: usize = 128;
/// Length of the end of a cut text in bytes: `~` and 8 digits of a hash of the whole text.
const SUM_BYTES: usize = 9;

/// Replaces control characters in a text by escapes, and cuts the text to [`LABEL_BYTES`].
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    if is_plain(text) { text.into() } else { cut(text, shown(text)).into() }
}

fn is_plain(text: &str) -> bool {
    text.len() <= LABEL_BYTES && !text.chars().any(is_unsafe)
}

/// Value of a label. Different texts have different values, because a duplicate series would be lost. So texts that differ only
/// in invisible characters, or beyond the maximum length, do not become equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Label<'a>(Cow<'a, str>);

impl<'a> From<&'a str> for Label<'a> {
    fn from(text: &'a str) -> Self {
        let is_itself = is_plain(text) && !text.contains("\\u{");
        Label(if is_itself { text.into() } else { cut(text, escape_key(text)).into() })
    }
}

impl<'a> From<&'a Label<'_>> for Label<'a> {
    fn from(label: &'a Label<'_>) -> Self {
        Label(Cow::Borrowed(&label.0))
    }
}

impl Label<'_> {
    /// Returns the label of a text of the source code: a short one without special characters.
    pub(crate) fn word(text: &'static str) -> Label<'static> {
        debug_assert!(is_plain(text) && !text.contains(['\\', '"']), "{text}");
        Label(Cow::Borrowed(text))
    }

    pub(crate) fn into_owned(self) -> Label<'static> {
        Label(Cow::Owned(self.0.into_owned()))
    }

    pub(crate) fn push(&self, out: &mut String) {
        if !self.0.contains(['\\', '"']) {
            out.push_str(&self.0);
            return;
        }
        for character in self.0.chars() {
            if matches!(character, '\\' | '"') {
                out.push('\\');
            }
            out.push(character);
        }
    }
}

fn cut(text: &str, mut shown: String) -> String {
    if shown.len() > LABEL_BYTES {
        // FNV-1a. A process that makes two of its names collide only merges its own series.
        let sum =
            text.bytes().fold(0x811c_9dc5_u32, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        let end = (0..=LABEL_BYTES - SUM_BYTES).rev().find(|&at| shown.is_char_boundary(at));
        shown.truncate(end.unwrap_or(0));
        // Writing to a String cannot fail.
        let _ = write!(shown, "~{sum:08x}");
    }
    shown
}

/// A number that can be the value of a series. An unknown one has no series.
pub(crate) trait Number {
    fn is_known(&self) -> bool {
        true
    }

    fn push(self, out: &mut String);
}

impl<N: Number> Number for Option<N> {
    fn is_known(&self) -> bool {
        self.is_some()
    }

    fn push(self, out: &mut String) {
        self.into_iter().for_each(|number| number.push(out));
    }
}

impl Number for u64 {
    /// Formats the digits directly, because `format!` is slower and a scrape has thousands of numbers.
    fn push(mut self, out: &mut String) {
        let mut digits = [0; 20];
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = b'0' + (self % 10) as u8;
            self /= 10;
            if self == 0 {
                break;
            }
        }
        out.push_str(std::str::from_utf8(&digits[at..]).unwrap_or_default());
    }
}

impl Number for i64 {
    fn push(self, out: &mut String) {
        if self < 0 {
            out.push('-');
        }
        self.unsigned_abs().push(out);
    }
}

impl Number for f64 {
    fn push(self, out: &mut String) {
        // Writing to a String cannot fail.
        let _ = write!(out, "{self}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_is_shown_and_what_is_long_is_cut() {
        assert_eq!(clean("python"), "python");
        assert_eq!(clean("a\nb\0\u{202e}\x1b[2J"), "a\\u{a}b\\u{0}\\u{202e}\\u{1b}[2J");
        let long = "é".repeat(100);
        let (cut, other) = (clean(&long).into_owned(), clean(&(long.clone() + "x")).into_owned());
        assert!(
            cut.len() <= LABEL_BYTES && cut.starts_with(&"é".repeat(59)) && cut != other,
            "{cut} {other}"
        );
        assert_eq!(clean(&cut), cut);
        assert_eq!(clean(&"\n".repeat(100)).len(), LABEL_BYTES);
    }

    #[test]
    fn numbers_are_written_as_they_are_formatted() {
        for number in [0, 9, 10, 4096, u64::MAX] {
            let mut out = String::new();
            number.push(&mut out);
            assert_eq!(out, number.to_string());
        }
        for number in [0, -1, i64::MIN, i64::MAX] {
            let mut out = String::new();
            number.push(&mut out);
            assert_eq!(out, number.to_string());
        }
    }

    #[test]
    fn labels_are_escaped_once_and_stay_apart() {
        let of = |text: &str| {
            let mut out = String::new();
            Label::from(text).push(&mut out);
            out
        };
        assert_eq!(of("a\"b\\c\n"), "a\\\"b\\\\c\\\\u{a}");
        assert_ne!(of("\u{1b}"), of("\\u{1b}"));
        assert_ne!(of(&"a".repeat(200)), of(&"a".repeat(201)));
    }
}
