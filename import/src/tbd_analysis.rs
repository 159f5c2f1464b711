//! Reads the output of the TBD suite's memory_analysis.py for a log (`..._ANALYSIS`): sums of categories.
//!
//! ```text
//! {"WORD": [BYTES, ["(TAG).\n", ...]], ...}        a category: all tags that contain WORD, and the sum of their bytes
//! ```
//!
//! The file lacks the sizes of single allocations, and tags that contain no category's word. The first tag of a category becomes
//! an allocation of all its bytes. The other tags become allocations of 0 bytes, so that the number of allocations is right.

use super::feed::{Feed, MAX_BYTES, Piece, ProcessFeed};
use super::tbd_log;
use gpumem_model::units::{plural, thousands};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_wire::Role;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::io::{self, BufRead, Read};

const FORMAT: &str = "tbd-analysis";
const EXAMPLE: &str = r#""in_arg": [1024.0, ["(in_arg:fc_weight).\n"]]"#;
/// Maximum length of a word or tag.
const MAX_TEXT_BYTES: usize = 1 << 20;
/// Maximum number of categories; the suite defines about fifty words.
const MAX_CATEGORIES: u64 = 4096;

/// Returns whether a file begins with a JSON object that contains the end of a tag, `).\n"`.
pub(super) fn looks_like(head: &[u8]) -> bool {
    let is_object = head.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    is_object && head.windows(5).any(|window| window == b").\\n\"")
}

/// Counts the bytes read, and limits those between two quotes, so that an endless text does not fill the memory.
struct Meter<R> {
    inner: R,
    offset: u64,
    /// Number of bytes since the last quote. A quote after a backslash does not count, because it is a part of a text.
    since_quote: usize,
    is_escaped: bool,
}

impl<R: BufRead> Read for Meter<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.since_quote >= MAX_TEXT_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a word or tag of more than 1 MiB"));
        }
        let length = into.len().min(MAX_TEXT_BYTES - self.since_quote);
        let read = self.inner.read(into.get_mut(..length).unwrap_or_default())?;
        for &byte in into.iter().take(read) {
            self.since_quote = if byte == b'"' && !self.is_escaped { 0 } else { self.since_quote + 1 };
            self.is_escaped = byte == b'\\' && !self.is_escaped;
        }
        self.offset += read as u64;
        Ok(read)
    }
}

/// What the tags of a category have in common.
#[derive(Debug, Default)]
struct Tags {
    count: u64,
    /// Common prefix of all tags so far; `None` once two differ.
    prefix: Option<String>,
    /// Common role of all tags so far; unknown once two differ.
    role: Role,
}

impl Tags {
    fn add(&mut self, token: &str) {
        let token = token.trim_end();
        let tag = token.strip_suffix('.').unwrap_or(token);
        let tag = tag.strip_prefix('(').and_then(|tag| tag.strip_suffix(')')).unwrap_or(tag);
        let prefix = tag.split_once(':').map(|(prefix, _)| prefix);
        let role = tbd_log::role(tag);
        if self.count == 0 {
            (self.prefix, self.role) = (prefix.map(str::to_owned), role);
        }
        self.count += 1;
        if self.prefix.as_deref() != prefix {
            self.prefix = None;
        }
        if self.role != role {
            self.role = Role::Unknown;
        }
    }

    /// Returns the tag path for a category's bytes: the word, below the common prefix of its tags.
    fn path(&self, word: &str) -> String {
        let plain = word.strip_prefix('(').and_then(|word| word.strip_suffix(')')).unwrap_or(word);
        match &self.prefix {
            Some(prefix) if prefix != plain && !prefix.contains(plain) => {
                format!("{prefix}/{}", plain.trim_start_matches(':').replace(':', "/"))
            }
            _ => plain.replace(':', "/"),
        }
    }
}

struct Analysis<'a, 's> {
    feed: &'a mut Feed<'s>,
    process: &'a mut ProcessFeed,
    categories: u64,
    tags: u64,
    bytes: u64,
}

impl Analysis<'_, '_> {
    fn category(&mut self, word: &str, Category(bytes, tags): &Category) {
        self.categories += 1;
        self.feed.time_ns = self.categories;
        if !(0.0..=MAX_BYTES as f64).contains(bytes) || bytes.fract() != 0.0 {
            return self.feed.reject(self.categories);
        }
        self.tags += tags.count;
        self.bytes = self.bytes.saturating_add(*bytes as u64);
        let tag = self.process.tag(self.feed, &tags.path(word));
        let piece = Piece::new(0, *bytes as u64, tag, tags.role);
        self.process.defer(piece);
        for _ in 1..tags.count {
            self.process.defer(Piece { bytes: 0, ..piece });
        }
    }
}

/// Reads the categories one by one, so that those before an error are kept.
impl<'de> Visitor<'de> for &mut Analysis<'_, '_> {
    type Value = ();

    fn expecting(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        text.write_str("an object of categories")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(word) = map.next_key::<Cow<'_, str>>()? {
            if self.categories == MAX_CATEGORIES {
                return Err(serde::de::Error::custom("more categories than the suite defines"));
            }
            self.category(&word, &map.next_value()?);
        }
        Ok(())
    }
}

/// Value of a category in the file: its bytes, and what its tags have in common.
#[derive(Deserialize)]
#[serde(expecting = "[bytes, [tags]]")]
struct Category(f64, Tags);

/// Reads the tags one by one, because there may be more of them than fit into memory.
impl<'de> Deserialize<'de> for Tags {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Tags, D::Error> {
        from.deserialize_seq(Tags::default())
    }
}

impl<'de> Visitor<'de> for Tags {
    type Value = Tags;

    fn expecting(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        text.write_str("tags")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Tags, A::Error> {
        while let Some(token) = seq.next_element::<Cow<'_, str>>()? {
            self.add(&token);
        }
        Ok(self)
    }
}

pub(super) fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let mut feed = Feed::without_clock(sink);
    let mut process = ProcessFeed::default();
    let mut meter = Meter { inner: input.into_reader(), offset: 0, since_quote: 0, is_escaped: false };
    let mut analysis = Analysis { feed: &mut feed, process: &mut process, categories: 0, tags: 0, bytes: 0 };
    let read = serde_json::Deserializer::from_reader(&mut meter).deserialize_map(&mut analysis);
    let Analysis { categories, tags, bytes, .. } = analysis;
    if categories == 0 {
        return match read {
            Err(error) => Err(Error::Unsuitable {
                path,
                what: format!("is not an analysis of the TBD suite: {error}; one begins: {{{EXAMPLE}"),
            }),
            Ok(()) => Err(Error::NothingFound { path, format: FORMAT, lines: 1, example: EXAMPLE }),
        };
    }
    if let Err(error) = read {
        let text = format!("the analysis cannot be read from byte {} on: {error}", thousands(meter.offset));
        feed.caveat("cut", text);
    }
    let text = format!(
        "an analysis has {} in {}, {} bytes, without the size of each; tags that match none of its words are in no sum, and \
         frees are unknown",
        plural(tags, "tag"),
        if categories == 1 { "1 category".to_owned() } else { thousands(categories) + " categories" },
        thousands(bytes)
    );
    feed.caveat("sums_only", text);
    feed.caveat_rejects("sum", "category", EXAMPLE);
    process.end(&mut feed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_model::run;
    use gpumem_report::rules::Groupings;

    /// The preset's patterns are the suite's words enclosed in stars.
    #[test]
    fn each_word_of_the_suite_has_its_category() {
        let text = include_str!("../../config/rules/tbd.toml");
        let tbd = Groupings::load("tbd").expect("preset");
        let mut name = "";
        let mut words = 0;
        for line in text.lines().take_while(|line| !line.contains("[[structure]]")) {
            if let Some(rule) = line.strip_prefix("name = \"") {
                name = rule.trim_end_matches('"');
            }
            let Some(pattern) = line.strip_prefix("tag = [\"") else { continue };
            let word = pattern.trim_end_matches("\"]").trim_matches('*').replace('/', ":");
            if word == "_equal_scalar" {
                continue; // the suite matches its word _sc first, too
            }
            let mut tags = Tags::default();
            tags.add("(forward_features:x).\n");
            for tags in [tags, Tags::default()] {
                let cell = run::Cell { tag: Some(tags.path(&word)), ..run::Cell::default() };
                // Many words for inputs occur without a prefix.
                let is_exact = !pattern.starts_with('*') && tags.prefix.is_some();
                let found = tbd.layer.category(&cell);
                assert!(is_exact || found == Some(name), "{word}: {found:?}, not {name}");
            }
            words += 1;
        }
        assert!(words > 40);
    }

    #[test]
    fn what_tags_have_in_common() {
        let of = |tokens: &[&str], word| {
            let mut tags = Tags::default();
            tokens.iter().for_each(|token| tags.add(token));
            (tags.path(word), tags.role)
        };
        assert_eq!(of(&["(in_arg:x).\n", "(in_arg:y).\n"], "in_arg"), ("in_arg".into(), Role::Parameter));
        assert_eq!(of(&["(source).\n"], "(source)"), ("source".into(), Role::Input));
        let features = ["(forward_features:a_mul0).\n", "(forward_features:b_mul0).\n"];
        assert_eq!(of(&features, ":_mul"), ("forward_features/_mul".into(), Role::Activation));
        assert_eq!(of(&["(forward_features:att).\n", "(att).\n"], "att"), ("att".into(), Role::Unknown));
    }
}
