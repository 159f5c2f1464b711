//! Limits the length of a JSON document: lists and objects lose elements, long texts their ends.

use serde_json::Value;
use std::collections::BTreeMap;

/// Longest document that is passed on unchanged, in bytes: about 10,000 tokens of a language model.
const DOCUMENT_BYTES: usize = 40_000;
/// Longest text in a shortened document, in characters.
const TEXT_CHARS: usize = 300;
/// Number of fields that an object keeps in a shortened document; gpumemctl's own objects have fewer.
const FIELDS: usize = 64;
/// Number of lists whose losses the note names.
const NAMED_LISTS: usize = 12;
/// Fields with the time of an element.
const TIMES: [&str; 4] = ["time_ns", "start_ns", "started_ns", "from_ns"];

/// Returns a document that is short enough, and a note on what it lacks. `None` if it is not JSON or stays too long.
pub(crate) fn shorten(document: String) -> Option<(String, Option<String>)> {
    if document.len() <= DOCUMENT_BYTES {
        return Some((document, None));
    }
    let whole: Value = serde_json::from_str(&document).ok()?;
    [64, 32, 16, 8, 4, 2, 1].into_iter().find_map(|keep| {
        let mut cut = Cut { keep, written: String::new(), losses: BTreeMap::new(), texts: 0 };
        cut.write(&whole, "")?;
        let note = cut.note(document.len());
        Some((cut.written, Some(note)))
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

/// Returns the time of an element: an object's field, or the first of two values.
fn time(item: &Value) -> Option<u64> {
    match item {
        Value::Object(fields) => TIMES.iter().find_map(|name| fields.get(*name))?.as_u64(),
        Value::Array(pair) if pair.len() == 2 => pair.first()?.as_u64(),
        _ => None,
    }
}

/// Returns the first elements of a list, or the last ones of a list in order of time.
fn kept(items: &[Value], keep: usize) -> &[Value] {
    let (first, last) = (items.first().and_then(time), items.last().and_then(time));
    let is_in_time = first.is_some() && first < last && items.is_sorted_by_key(time);
    match items.len().saturating_sub(keep) {
        left_out if is_in_time => &items[left_out..],
        left_out => &items[..items.len() - left_out],
    }
}

/// A document that is written in part.
struct Cut {
    /// Number of elements that a list keeps.
    keep: usize,
    written: String,
    /// Elements that are left out and elements that there were, for each path in the document.
    losses: BTreeMap<String, (usize, usize)>,
    /// Number of texts that lost their ends.
    texts: usize,
}

impl Cut {
    /// Writes a value. `None` if the document becomes too long.
    fn write(&mut self, value: &Value, path: &str) -> Option<()> {
        match value {
            Value::Array(items) => {
                let kept = kept(items, self.keep);
                self.count(path, kept.len(), items.len());
                let path = format!("{path}[]");
                self.written.push('[');
                for (index, item) in kept.iter().enumerate() {
                    self.written.push_str(if index == 0 { "" } else { "," });
                    self.write(item, &path)?;
                }
                self.written.push(']');
            }
            Value::Object(fields) => {
                self.count(path, fields.len().min(FIELDS), fields.len());
                self.written.push('{');
                for (index, (name, field)) in fields.iter().take(FIELDS).enumerate() {
                    self.written.push_str(if index == 0 { "" } else { "," });
                    let name = self.write_text(name);
                    self.written.push(':');
                    self.write(field, &if path.is_empty() { name } else { format!("{path}.{name}") })?;
                }
                self.written.push('}');
            }
            Value::String(text) => drop(self.write_text(text)),
            _ => self.written.push_str(&value.to_string()),
        }
        (self.written.len() <= DOCUMENT_BYTES).then_some(())
    }

    /// Writes a text of at most [`TEXT_CHARS`] characters, and returns it.
    fn write_text(&mut self, text: &str) -> String {
        let mut text = text;
        let mut end = "";
        if let Some((length, _)) = text.char_indices().nth(TEXT_CHARS) {
            (text, end) = (&text[..length], "...");
            self.texts += 1;
        }
        let text = format!("{text}{end}");
        self.written.push_str(&ascii(&Value::from(&*text).to_string()));
        text
    }

    fn count(&mut self, path: &str, kept: usize, all: usize) {
        if kept < all {
            let (left_out, before) = self.losses.entry(path.to_owned()).or_default();
            *left_out += all - kept;
            *before += all;
        }
    }

    fn note(&self, bytes: usize) -> String {
        let mut largest: Vec<_> = self.losses.iter().collect();
        largest.sort_by_key(|(_, (left_out, _))| std::cmp::Reverse(*left_out));
        let others = largest.len().saturating_sub(NAMED_LISTS);
        let named = largest.iter().take(NAMED_LISTS);
        let mut parts: Vec<String> = named
            .map(|(path, (left_out, all))| {
                let path: String = path.chars().take(TEXT_CHARS).collect();
                format!("{left_out} of {all} elements of {path:?}")
            })
            .collect();
        parts.extend((others > 0).then(|| format!("elements of {others} other lists")));
        parts.extend((self.texts > 0).then(|| format!("the ends of {} texts", self.texts)));
        format!(
            "The document of {bytes} bytes is shortened: a list in order of time keeps its last {0} elements, another its first \
             {0}. Left out: {1}.",
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
            "The document of {} bytes is shortened: a list in order of time keeps its last 64 elements, another its first 64. \
             Left out: 1936 of 2000 elements of \"devices[].rows\", the ends of 64 texts.",
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
    fn lists_in_order_of_time_keep_their_newest_elements() {
        let elements = |element: fn(u64) -> Value| (0..9000).map(element).collect::<Vec<_>>();
        let document = json!({
            "ooms": elements(|at| json!({ "step": at, "time_ns": at / 2 })),
            "points": elements(|at| json!([at, 5])),
            "newest_first": elements(|at| json!({ "step": at, "started_ns": 9000 - at })),
            "largest_first": elements(|at| json!({ "step": at, "time_ns": at % 7 })),
            "unknown": elements(|at| json!({ "step": at, "time_ns": (at > 0).then_some(at) })),
        });
        let (short, note) = shorten(document.to_string()).expect("a shorter one");
        let short: Value = serde_json::from_str(&short).expect("JSON");
        assert_eq!((&short["ooms"][63]["step"], &short["points"][63][0]), (&8999.into(), &8999.into()));
        for list in ["newest_first", "largest_first", "unknown"] {
            assert_eq!(short[list][0]["step"], 0, "{list}");
        }
        assert!(note.is_some_and(|note| note.contains("8936 of 9000 elements of \"ooms\"")));
    }

    #[test]
    fn names_of_fields_and_their_number_are_limited() {
        let fields: serde_json::Map<String, Value> =
            (0..9000).map(|at| (format!("{at:04}"), at.into())).collect();
        let document = json!({ "facts": fields, "n".repeat(100_000): vec![7; 9000] });
        let (short, note) = shorten(document.to_string()).expect("a shorter one");
        let short: Value = serde_json::from_str(&short).expect("JSON");
        assert_eq!(short["facts"].as_object().map(serde_json::Map::len), Some(FIELDS));
        assert!(short.get("n".repeat(TEXT_CHARS) + "...").is_some(), "{short}");
        let note = note.expect("a note");
        assert!(note.contains("8936 of 9000 elements of \"facts\"") && note.len() < 1000, "{note}");
    }

    #[test]
    fn what_cannot_be_shortened_is_refused() {
        let inner: serde_json::Map<String, Value> = (0..200).map(|at| (at.to_string(), at.into())).collect();
        let fields: serde_json::Map<String, Value> =
            (0..200).map(|at| (at.to_string(), Value::from(inner.clone()))).collect();
        assert_eq!(shorten(Value::from(fields).to_string()), None);
        assert_eq!(shorten("x".repeat(DOCUMENT_BYTES + 1)), None);
    }
}
