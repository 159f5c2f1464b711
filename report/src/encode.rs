//! Encodings that several output forms share: JSON objects, CSV fields, text in HTML and XML.

use gpumem_model::escape::escape_key;

/// Makes a JSON object from fields with values, in this order. A field without a value takes the variable of the same name. With
/// `#[serde(flatten)]` the fields of the value become fields of the object. An optional field is a flattened `Option`.
macro_rules! object {
    ($($(#[$attribute:meta])* $name:ident $(: $value:expr)?),* $(,)?) => {{
        // Each value has its own type parameter, named like its field.
        #[allow(non_camel_case_types)]
        let object = {
            #[derive(serde::Serialize)]
            struct Object<$($name),*> {
                $($(#[$attribute])* $name: $name),*
            }
            Object { $($name $(: $value)?),* }
        };
        object
    }};
}
pub(crate) use object;

/// Encodes a text as one CSV field. Different texts give different fields, and no spreadsheet evaluates one as a formula.
///
/// An apostrophe is inserted before `=`, `+`, `-` or `@` where a spreadsheet cell may begin; blanks, quotes and further
/// apostrophes may be between. To decode, remove the first such apostrophe. Some spreadsheets also treat semicolons and bars as
/// separators, even inside quotes, so a cell may begin after each of these characters.
pub(crate) fn csv_field(text: &str) -> String {
    const SEPARATORS: [char; 3] = [',', ';', '|'];
    let text = escape_key(text);
    let mut out = String::with_capacity(text.len() + 2);
    for cell in text.split_inclusive(SEPARATORS) {
        if is_formula(cell) {
            out.push('\'');
        }
        out.push_str(cell);
    }
    if out.contains(SEPARATORS) || out.contains('"') || out.trim().len() < out.len() {
        return format!("\"{}\"", out.replace('"', "\"\""));
    }
    out
}

/// Returns whether a spreadsheet would evaluate a cell as a formula after leading apostrophes, quotes and blanks are removed.
fn is_formula(cell: &str) -> bool {
    let first = cell
        .trim_start_matches(|character: char| character.is_whitespace() || matches!(character, '\'' | '"'));
    first.starts_with(['=', '+', '-', '@', '\u{ff1d}', '\u{ff0b}', '\u{ff0d}', '\u{ff20}'])
}

/// Encodes an amount as one CSV field, which is empty if the amount is unknown.
pub(crate) fn csv_number(bytes: Option<i64>) -> String {
    bytes.map(|bytes| bytes.to_string()).unwrap_or_default()
}

/// Escapes text for content and quoted attributes of HTML and XML.
pub(crate) fn markup(text: &str) -> String {
    // `&` is escaped first, because the other escapes contain it.
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', "&#39;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_csv_field_is_one_field_and_harmless() {
        assert_eq!(csv_field("a,\"b\""), "\"a,\"\"b\"\"\"");
        assert_eq!(csv_field("=1+1"), "'=1+1");
        assert_eq!(csv_field(" +1"), "' +1");
        assert_eq!(csv_field("a;=1|@b"), "\"a;'=1|'@b\"");
        assert_eq!(csv_field("layers.0-1=2@x"), "layers.0-1=2@x");
        assert_eq!(csv_field("a\u{1b}[2J\n\u{9b}b"), "a\\u{1b}[2J\\u{a}\\u{9b}b");
        let alike = ["=1", "'=1", "''=1", "\"=1", "\u{1b}", "\\u{1b}", "a", "a ", " a"];
        let fields: std::collections::BTreeSet<String> = alike.iter().map(|text| csv_field(text)).collect();
        assert_eq!(fields.len(), alike.len(), "{fields:?}");
    }

    #[test]
    fn an_object_has_its_names_in_order_and_the_fields_of_flattened_values() {
        let (name, none) = ("a", None::<u8>);
        let inner = object! { x: 1, y: [2] };
        let all = object! { z: 0, name, #[serde(flatten)] inner, #[serde(flatten)] none: none.map(|x| object! { x }) };
        assert_eq!(serde_json::to_string(&all).expect("JSON"), r#"{"z":0,"name":"a","x":1,"y":[2]}"#);
    }
}
