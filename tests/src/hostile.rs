//! Hostile names that a user could choose to harm viewers of the data, and detection of their effects.
//!
//! Every view is shown all of [`WORDS`] in every field where a process, a file or an administrator can set text.
//! [`run`] finds these fields in the run model, so a new field is included at once.

use crate::pages::{Training, training};
use gpumem_model::run::Run;
use gpumem_runs::export::{self, From};
use serde_json::Value;

/// Harmful in browsers, terminals, shells, spreadsheets, scrapers, logs, paths and templates; and names that only look like
/// another.
pub const WORDS: &[&str] = &[
    // Pages and pictures.
    "</script><script>window.harm = 1</script>",
    "<!--<script>",
    "<img src=x onerror=\"window.harm = 1\">",
    "\"' onmouseover='window.harm=1' x=\"",
    "right\u{202e}left \u{2066}isolated",
    "line\nfeed\r\u{2028}\u{2029}and \0 zero",
    "\u{1b}]0;title\u{7}\u{9b}31m",
    "${window.harm = 1}`javascript:window.harm=1",
    "\u{645}\u{631}\u{62d}\u{628}\u{627} \u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{1f600}",
    "&lt;b&gt; &amp; ]]> %3Cscript%3E \\u003cscript\\u003e",
    "]]>--><!ENTITY x SYSTEM 'file:///etc/passwd'>&x;",
    "{{constructor.constructor('window.harm=1')()}}",
    "__proto__",
    "constructor",
    "hasOwnProperty",
    "javascript:window.harm=1",
    // Terminals.
    "\u{1b}[2J\u{1b}[H\u{1b}[8mgone",
    "\u{1b}]8;;http://harm.invalid\u{1b}\\click\u{1b}]8;;\u{1b}\\",
    "\u{9d}0;title\u{9c}\u{90}q\u{9c}\u{85}",
    "100%\r  0%\u{8}\u{8}\u{8}\u{7f}",
    "%s%n%x %00",
    "\u{301}\u{302}\u{303}",
    // Spreadsheets.
    "=cmd|' /C calc'!A0",
    "+1+1",
    "-1+1",
    "@SUM(A1)",
    "\t=1+1",
    " =1+1",
    "a;=1+1;b",
    "a,=1+1",
    "\"=1+1",
    "'=1+1",
    "\u{ff1d}1+1",
    // Scrapers and logs.
    "a\"} 1\ngpumem_device_used_bytes{gpu=\"0",
    "tag=\"x\",pid=\"1\"",
    "# HELP gpumem_device_used_bytes x",
    "back\\slash\\",
    "back\\nslash",
    "<3>forged",
    "a\n<3>gpumemd: all is well",
    "a;b c 5\nd 7",
    // Shells and paths.
    "$(touch harm)`touch harm`;touch harm",
    "';touch harm;'",
    "--output=harm",
    "../../../../tmp/harm",
    "..",
    "/",
    // Names that resemble another name, or one of our keywords.
    "ab",
    "a\u{200b}b",
    "a\u{200c}b",
    "a\u{ad}b",
    "a\u{feff}b",
    "a\u{fe0f}b",
    "a\u{3164}b",
    "a\u{e0041}b",
    "a\u{fffe}b",
    "ab ",
    " ab",
    "\u{1b}",
    "\\u{1b}",
    "\u{200b}\u{2060}",
    "\u{1}",
    "\u{2}",
    "\u{fffd}",
    "Others",
    "sum",
    "NaN",
];

/// Bytes that are not UTF-8, for program names, arguments, file names and tags.
pub const BYTES: &[&[u8]] =
    &[b"caf\xe9", b"caf\xe8", b"\xff\xfe\x9b31m", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80 \x1b[2J"];

/// Whether a terminal or viewer would interpret the character or hide it. A separate list, independent of the
/// product's.
fn is_obeyed(character: char) -> bool {
    const OTHERS: [char; 16] = [
        '\u{ad}',
        '\u{200b}',
        '\u{200c}',
        '\u{2028}',
        '\u{2029}',
        '\u{202e}',
        '\u{2060}',
        '\u{2066}',
        '\u{2069}',
        '\u{3164}',
        '\u{fe0f}',
        '\u{feff}',
        '\u{fffe}',
        '\u{ffff}',
        '\u{e0041}',
        '\u{61c}',
    ];
    character.is_control() || OTHERS.contains(&character)
}

/// Returns the lines of output for people or programs.
///
/// # Panics
/// If the text has a character that a terminal or viewer would interpret, or that is invisible.
pub fn lines<'t>(what: &str, text: &'t [u8]) -> Vec<&'t str> {
    let text = std::str::from_utf8(text).unwrap_or_else(|error| panic!("{what}: {error}"));
    for line in text.lines() {
        let bad = line.chars().find(|&character| is_obeyed(character));
        assert_eq!(bad, None, "{what}: {line:?}");
    }
    text.lines().collect()
}

/// Returns the fields of comma-separated values (RFC 4180).
///
/// # Panics
/// If rows differ in length, quotes do not match, or a spreadsheet with any separator would evaluate a cell that is not a number.
pub fn csv(what: &str, text: &[u8]) -> Vec<Vec<String>> {
    let rows: Vec<Vec<String>> =
        lines(what, text).iter().filter(|line| !line.is_empty()).map(|line| row(what, line)).collect();
    assert!(rows.windows(2).all(|pair| pair[0].len() == pair[1].len()), "{what}: rows of different lengths");
    let calculated = |cell: &str| {
        let cell = cell.trim_start_matches(|character: char| character == '"' || character.is_whitespace());
        cell.starts_with(['=', '+', '-', '@', '\u{ff1d}'])
            && cell.trim_end_matches('"').parse::<f64>().is_err()
    };
    for cell in rows.iter().flatten() {
        assert!(!calculated(cell), "{what}: {cell:?} is a formula");
        let inside = cell.split([',', ';', '|', '\t']).find(|cell| calculated(cell));
        assert_eq!(inside, None, "{what}: a formula in {cell:?}");
    }
    rows
}

fn row(what: &str, line: &str) -> Vec<String> {
    let (mut fields, mut rest) = (Vec::new(), line);
    loop {
        let mut field = String::new();
        if let Some(mut quoted) = rest.strip_prefix('"') {
            loop {
                let (before, after) =
                    quoted.split_once('"').unwrap_or_else(|| panic!("{what}: an open quote in {line:?}"));
                field += before;
                quoted = after;
                let Some(more) = quoted.strip_prefix('"') else { break };
                field.push('"');
                quoted = more;
            }
            rest = quoted;
            assert!(rest.is_empty() || rest.starts_with(','), "{what}: {line:?}");
        } else {
            let end = rest.find(',').unwrap_or(rest.len());
            field += &rest[..end];
            rest = &rest[end..];
            assert!(!field.contains('"'), "{what}: a quote in {line:?}");
        }
        fields.push(field);
        match rest.strip_prefix(',') {
            Some(next) => rest = next,
            None => return fields,
        }
    }
}

/// Returns a small training run in which every string of the model is one of [`WORDS`] or of maximum length, wherever
/// the model accepts it. Each such string is the tag of a cell.
pub fn run() -> Run {
    let mut run = training(Training { has_oom: true, ..Training::SMALL });
    let long = "é/".repeat(127);
    run.process
        .claims
        .extend(["job", "pod", "x\u{1b}[2J=\"<b>"].map(|name| (name.to_owned(), String::new())));
    let mut whole = serde_json::to_value(&run).unwrap_or_default();
    let mut places = Vec::new();
    find(&whole, &mut String::new(), &mut places);
    let mut words = WORDS.iter().copied().chain([long.as_str()]).cycle();
    let mut kinds: Vec<(String, bool)> = Vec::new();
    for place in places {
        // Fields that differ only in numbers are one kind. Keywords of the model (`closed`, `block`) cannot be
        // replaced, and an absent value may be a number.
        let kind: String =
            place.split('/').map(|part| if part.parse::<u64>().is_ok() { "/N" } else { part }).collect();
        let known = kinds.iter().find(|(other, _)| *other == kind).map(|(_, may)| *may);
        let Some(leaf) = whole.pointer_mut(&place) else { continue };
        let word = Value::String(words.next().unwrap_or_default().to_owned());
        let before = std::mem::replace(leaf, word);
        let may = known.unwrap_or_else(|| {
            let may = serde_json::from_value::<Run>(whole.clone()).is_ok();
            kinds.push((kind, may));
            may
        });
        if !may && let Some(leaf) = whole.pointer_mut(&place) {
            *leaf = before;
        }
    }
    let mut run: Run = serde_json::from_value(whole).expect("each place was tried");
    assert!(run.cells.len() > WORDS.len(), "a cell for each word");
    for (cell, word) in run.cells.iter_mut().zip(WORDS.iter().copied().chain([long.as_str()])) {
        cell.tag = Some(word.to_owned());
    }
    run
}

fn find(value: &Value, at: &mut String, places: &mut Vec<String>) {
    let length = at.len();
    match value {
        Value::String(_) | Value::Null => places.push(at.clone()),
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                *at += &format!("/{index}");
                find(item, at, places);
                at.truncate(length);
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                *at += &format!("/{}", name.replace('~', "~0").replace('/', "~1"));
                find(field, at, places);
                at.truncate(length);
            }
        }
        _ => {}
    }
}

/// Returns such a run as an exported file.
pub fn exported(run: &Run, uid: &str) -> Vec<u8> {
    let from =
        From { host: WORDS[6].into(), id: Some(WORDS[4].into()), time_s: 1, program: WORDS[16].into() };
    export::write(run, uid, &from).expect("small enough")
}
