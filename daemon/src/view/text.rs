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

/// Appends a whole number.
pub fn push_number(out: &mut String, number: impl std::fmt::Display) {
    // A String takes everything.
    let _ = write!(out, "{number}");
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
    fn labels_are_escaped() {
        let mut out = String::new();
        push_label(&mut out, "a\"b\\c\n");
        assert_eq!(out, "a\\\"b\\\\c");
    }
}
