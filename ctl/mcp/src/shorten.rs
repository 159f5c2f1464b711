//! Limits the length of a JSON document: lists lose their last elements, long texts their ends.

use serde_json::Value;
use std::collections::BTreeMap;

/// Longest document that is passed on unchanged, in bytes: about 10,000 tokens of a language model.
const DOCUMENT_BYTES: usize = 40_000;
/// Longest text in a shortened document, in characters.
const TEXT_CHARS: usize = 300;
/// Number of lists whose losses the note names.
const NAMED_LISTS: usize = 12;

/// Returns a document that is short enough, and a note on what it lacks. `None` if it is not JSON or stays too long.
pub(crate) fn shorten(document: String) -> Option<(String, Option<String>)> {
    if document.len() <= DOCUMENT_BYTES {
        return Some((document, None));
    }
    let whole: Value = serde_json::from_slice(document.as_bytes()).ok()?;
    [64, 32, 16, 8, 4, 2, 1].into_iter().find_map(|keep| {
        let mut cut = Cut { keep, lists: BTreeMap::new(), texts: 0 };
        let mut short = whole.clone();
        cut.apply(&mut short, "");
        let text = ascii(&short.to_string());
        (text.len() <= DOCUMENT_BYTES).then(|| (text, Some(cut.note(document.len()))))
    })
}

/// Escapes the characters of a JSON document that a terminal may interpret, or that are invisible: all outside of ASCII.
fn ascii(document: &str) -> String {
    let mut escaped = String::with_capacity(document.len());
    for character in document.chars() {
        if character.is_ascii() && character != '\x7f' {
            escaped.push(character);
        } else {
            let units = character.encode_utf16(&mut [0; 2]).to_vec();
            escaped.extend(units.iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    escaped
}

struct Cut {
    /// Number of elements that a list keeps.
    keep: usize,
    /// Elements that are left out and elements that there were, for each path in the document.
    lists: BTreeMap<String, (usize, usize)>,
    /// Number of texts that lost their ends.
    texts: usize,
}

impl Cut {
    fn apply(&mut self, value: &mut Value, path: &str) {
        match value {
            Value::Array(items) => {
                if items.len() > self.keep {
                    let (left_out, all) = self.lists.entry(path.to_owned()).or_default();
                    *left_out += items.len() - self.keep;
                    *all += items.len();
                    items.truncate(self.keep);
                }
                items.iter_mut().for_each(|item| self.apply(item, &format!("{path}[]")));
            }
            Value::Object(fields) => {
                for (name, field) in fields {
                    self.apply(field, &if path.is_empty() { name.clone() } else { format!("{path}.{name}") });
                }
            }
            Value::String(text) => {
                if let Some((end, _)) = text.char_indices().nth(TEXT_CHARS) {
                    text.truncate(end);
                    text.push_str("...");
                    self.texts += 1;
                }
            }
            _ => {}
        }
    }

    fn note(&self, bytes: usize) -> String {
        let mut largest: Vec<_> = self.lists.iter().collect();
        largest.sort_by_key(|(_, (left_out, _))| std::cmp::Reverse(*left_out));
        let others = largest.len().saturating_sub(NAMED_LISTS);
        let named = largest.iter().take(NAMED_LISTS);
        let mut parts: Vec<String> = named
            .map(|(path, (left_out, all))| format!("{left_out} of {all} elements of {path:?}"))
            .collect();
        parts.extend((others > 0).then(|| format!("elements of {others} other lists")));
        parts.extend((self.texts > 0).then(|| format!("the ends of {} texts", self.texts)));
        format!(
            "The document of {bytes} bytes is shortened: a list keeps its first {} elements. Left out: {}.",
            self.keep,
            parts.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn short_documents_stay_as_they_are() {
        let document = "{ \"b\": 1, \"a\": [1, 2] }\n".to_owned();
        assert_eq!(shorten(document.clone()), Some((document, None)));
    }

    #[test]
    fn a_long_document_says_what_it_lacks() {
        let rows: Vec<Value> = (0..2000).map(|row| json!({ "row": row, "name": "n".repeat(400) })).collect();
        let document = json!({ "total": 7, "devices": [{ "rows": rows }] }).to_string();
        let (short, note) = shorten(document.clone()).expect("a shorter one");
        let short_value: Value = serde_json::from_slice(short.as_bytes()).expect("JSON");
        assert!(short.len() <= DOCUMENT_BYTES && short_value["total"] == 7, "{short}");
        assert_eq!(short_value["devices"][0]["rows"].as_array().map(Vec::len), Some(64));
        let expected = format!(
            "The document of {} bytes is shortened: a list keeps its first 64 elements. Left out: 1936 of 2000 elements of \
             \"devices[].rows\", the ends of 64 texts.",
            document.len()
        );
        assert_eq!(note, Some(expected));
    }

    #[test]
    fn a_shortened_document_has_no_invisible_characters() {
        let document =
            json!({ "name": "\u{202e}\u{9b}31m\u{7f}\u{1f600}", "rows": vec![7; 30_000] }).to_string();
        let (short, _) = shorten(document).expect("a shorter one");
        assert!(short.contains(r#""\u202e\u009b31m\u007f\ud83d\ude00""#), "{short}");
    }

    #[test]
    fn what_cannot_be_shortened_is_refused() {
        let fields: serde_json::Map<String, Value> =
            (0..9000).map(|at| (at.to_string(), at.into())).collect();
        assert_eq!(shorten(Value::from(fields).to_string()), None);
        assert_eq!(shorten("x".repeat(DOCUMENT_BYTES + 1)), None);
    }
}
