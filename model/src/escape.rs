//! Escapes text from untrusted sources before it is shown. This module alone decides which characters are unsafe.
//!
//! Processes choose the names of themselves, their memory and their files, and every view shows these names. Terminals execute
//! escape sequences, direction controls reverse text, and invisible characters make two names look the same. Each such
//! character is shown by its number, `\u{1b}`, so that different names still look different. A view's own syntax
//! may need further escapes, which the view adds.

use serde::Serialize;
use std::fmt::Write;

/// Whether a character is unsafe: a display may execute it or show nothing. Unsafe are controls, line ends, direction controls,
/// invisible characters (Unicode's Default_Ignorable_Code_Point), and noncharacters.
pub fn is_unsafe(character: char) -> bool {
    match character {
        ' '..='~' => false,
        character if character.is_control() => true,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' => true,
        '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' => true,
        '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' => true,
        '\u{fff0}'..='\u{fffb}' | '\u{fffe}'..='\u{ffff}' => true,
        '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}' => true,
        _ => false,
    }
}

/// Returns text as one line without unsafe characters. Text that is already clean is unchanged, so a second call is harmless.
pub fn escape(text: &str) -> String {
    escape_where(text, |_| false)
}

/// Like [`escape`], for names used as keys (labels, lines that programs read). Different texts stay different, because an
/// existing `\u{` is escaped too. Must be applied exactly once.
pub fn escape_key(text: &str) -> String {
    escape_where(text, |rest| rest.starts_with("\\u{"))
}

/// Escapes unsafe characters, and those at which `escapes_too` is true for the rest of the text.
fn escape_where(text: &str, escapes_too: impl Fn(&str) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for (at, character) in text.char_indices() {
        if is_unsafe(character) || text.get(at..).is_some_and(&escapes_too) {
            // Writing to a String cannot fail.
            let _ = write!(out, "\\u{{{:x}}}", character as u32);
        } else {
            out.push(character);
        }
    }
    out
}

/// Returns a word quoted for a shell, for commands that people copy.
pub fn quoted(word: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "._/+:@%=,-".contains(character);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Returns a document as indented JSON with a line end. Its strings keep their values, but unsafe characters are escaped.
pub fn json(document: &impl Serialize) -> String {
    // Keys are strings and numbers are finite: serialisation cannot fail.
    escape_json(&serde_json::to_string_pretty(document).unwrap_or_default(), |_| false) + "\n"
}

/// Returns a JSON text with escapes for unsafe characters and for those that `also` selects. Line ends between tokens stay;
/// all other such characters can only occur in strings.
pub fn escape_json(json: &str, also: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(json.len());
    for character in json.chars() {
        if character == '\n' || !(is_unsafe(character) || also(character)) {
            out.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_is_shown_by_its_number() {
        assert_eq!(escape("a\u{1b}[2J\n\u{9b}"), "a\\u{1b}[2J\\u{a}\\u{9b}");
        assert_eq!(escape("\u{202e}\u{feff}\u{e0041}"), "\\u{202e}\\u{feff}\\u{e0041}");
        for harmless in ["a/b.0", "größe \u{1f600} 模型 \u{645}\u{631}", "C:\\u", "a\u{301}"] {
            assert_eq!(escape(harmless), harmless);
            assert_eq!(escape_key(harmless), harmless);
        }
    }

    #[test]
    fn cleaning_twice_is_cleaning_once_and_keys_stay_apart() {
        let names = ["a\u{1b}", "a\\u{1b}", "a\\u{5c}u{1b}", "a", "a\u{200b}", "a\u{200c}", "a\\", "a\\u"];
        for name in names {
            assert_eq!(escape(&escape(name)), escape(name));
        }
        let keys: std::collections::BTreeSet<String> = names.iter().map(|name| escape_key(name)).collect();
        assert_eq!(keys.len(), names.len(), "{keys:?}");
    }

    #[test]
    fn words_survive_a_shell() {
        let words = ["r1", "a/b-c.log", "", "my log", "it's"].map(quoted);
        assert_eq!(words, ["r1", "a/b-c.log", "''", "'my log'", r"'it'\''s'"]);
    }

    #[test]
    fn json_says_the_same_without_a_byte_that_acts() {
        let names = ["\u{1b}[2J\u{9b}\u{7f}\n", "\u{202e}\u{2028}\u{e0041}", "\u{1f600} \\ \""];
        let text = json(&names);
        assert!(!text.chars().any(|character| is_unsafe(character) && character != '\n'), "{text}");
        assert_eq!(serde_json::from_str::<Vec<String>>(&text).expect("JSON"), names);
    }
}
