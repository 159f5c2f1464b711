//! Texts of strangers on their way to terminals, dashboards and scrapers.

use std::borrow::Cow;
use std::fmt::Write;

/// Longest label value in bytes: a scrape stays small whatever processes call themselves.
pub const LABEL_BYTES: usize = 128;

/// Control characters, and marks that make text run backwards or hide: nobody who looks at a dashboard or a
/// terminal wants them obeyed.
fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// A text without what is harmful, cut to [`LABEL_BYTES`] at a character.
pub fn clean(text: &str) -> Cow<'_, str> {
    if text.len() <= LABEL_BYTES && !text.chars().any(is_harmful) {
        return text.into();
    }
    let mut out = String::with_capacity(LABEL_BYTES);
    for c in text.chars().filter(|&c| !is_harmful(c)) {
        if out.len() + c.len_utf8() > LABEL_BYTES {
            break;
        }
        out.push(c);
    }
    out.into()
}

/// Appends a label's value as the exposition format wants it.
pub fn push_label(out: &mut String, value: &str) {
    let value = clean(value);
    if !value.contains(['\\', '"']) {
        out.push_str(&value);
        return;
    }
    for c in value.chars() {
        if matches!(c, '\\' | '"') {
            out.push('\\');
        }
        out.push(c);
    }
}

/// A number that a series can have.
pub trait Number {
    /// Appends it.
    fn push(self, out: &mut String);
}

impl Number for u64 {
    /// Without the machinery of formatting, which costs more than the digits: a scrape has thousands.
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
        out.extend(digits[at..].iter().map(|&digit| char::from(digit)));
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
        // A String takes everything.
        let _ = write!(out, "{self}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harmful_characters_go() {
        assert_eq!(clean("python"), "python");
        assert_eq!(clean("a\nb\0c\u{202e}d\x1b[2J\u{feff}"), "abcd[2J");
        let long = "é".repeat(100);
        assert_eq!(clean(&long), "é".repeat(64));
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
    fn labels_are_escaped() {
        let mut out = String::new();
        push_label(&mut out, "a\"b\\c\n");
        assert_eq!(out, "a\\\"b\\\\c");
    }
}
