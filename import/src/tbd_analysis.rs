//! Reads the output of the TBD suite's memory_analysis.py for a log (`..._ANALYSIS`): sums of categories.
//!
//! ```text
//! {"WORD": [BYTES, ["(TAG).\n", ...]], ...}        all tags that contain WORD, and the sum of their bytes
//! ```
//!
//! The file lacks sizes of single allocations, and tags that match no category word. Each category becomes one allocation with
//! all its bytes. Its other tags become allocations of 0 bytes, so that the number of allocations is right.

use super::feed::{Feed, MAX_BYTES, Piece, Speaker};
use super::tbd_log;
use gpumem_model::units::{plural, thousands};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_wire::Role;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::cell::Cell;
use std::io::{self, BufRead, Read};
use std::rc::Rc;

const FORMAT: &str = "tbd-analysis";
const EXAMPLE: &str = r#""in_arg": [1024.0, ["(in_arg:fc_weight).\n"]]"#;
const MAX_TEXT_BYTES: usize = 1 << 20;
/// Maximum number of categories; the suite defines about fifty words.
const MAX_CATEGORIES: u64 = 4096;

/// Returns whether a file begins with an object that contains tags as the suite writes them.
pub(super) fn looks_like(head: &[u8]) -> bool {
    let is_object = head.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    is_object && head.windows(5).any(|window| window == b").\\n\"")
}

/// Limits the bytes that are read between two words, so that an endless text does not fill the memory.
struct Meter<R> {
    inner: R,
    left: Rc<Cell<usize>>,
    offset: Rc<Cell<u64>>,
}

impl<R: BufRead> Read for Meter<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(self.left.get());
        if most == 0 && !into.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a word or tag of more than 1 MiB"));
        }
        let read = self.inner.read(into.get_mut(..most).unwrap_or_default())?;
        self.left.set(self.left.get() - read);
        self.offset.set(self.offset.get() + read as u64);
        Ok(read)
    }
}

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
    speaker: &'a mut Speaker,
    left: Rc<Cell<usize>>,
    categories: u64,
    tags: u64,
    bytes: u64,
}

impl Analysis<'_, '_> {
    fn refill(&self) {
        self.left.set(MAX_TEXT_BYTES);
    }

    fn category(&mut self, word: &str, bytes: Option<u64>, tags: &Tags) {
        self.categories += 1;
        self.feed.time_ns = self.categories;
        let Some(bytes) = bytes else { return self.feed.reject(self.categories) };
        self.tags += tags.count;
        self.bytes = self.bytes.saturating_add(bytes);
        let tag = self.speaker.tag(self.feed, &tags.path(word));
        let piece = Piece::new(0, bytes, tag, tags.role);
        self.speaker.hold(piece);
        for _ in 1..tags.count {
            self.speaker.hold(Piece { bytes: 0, ..piece });
        }
    }
}

/// Reads the top-level object of the file.
impl<'de> Visitor<'de> for &mut Analysis<'_, '_> {
    type Value = ();

    fn expecting(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        text.write_str("an object of categories")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.refill();
        while let Some(word) = map.next_key::<Cow<'_, str>>()? {
            if self.categories == MAX_CATEGORIES {
                return Err(serde::de::Error::custom("more categories than the suite has words"));
            }
            self.refill();
            let (bytes, tags) = map.next_value_seed(Category(&self.left))?;
            self.category(&word, bytes, &tags);
            self.refill();
        }
        Ok(())
    }
}

/// Reads the value of a category, `[BYTES, [TAGS]]`.
struct Category<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for Category<'_> {
    type Value = (Option<u64>, Tags);

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Category<'_> {
    type Value = (Option<u64>, Tags);

    fn expecting(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        text.write_str("[bytes, [tags]]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let missing = |at| serde::de::Error::invalid_length(at, &self);
        let bytes: f64 = seq.next_element()?.ok_or_else(|| missing(0))?;
        let is_possible = (0.0..=MAX_BYTES as f64).contains(&bytes) && bytes.fract() == 0.0;
        let tags = seq.next_element_seed(List(self.0))?.ok_or_else(|| missing(1))?;
        Ok((is_possible.then_some(bytes as u64), tags))
    }
}

/// Reads the list of a category's tags, `[TAGS]`.
struct List<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for List<'_> {
    type Value = Tags;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Tags, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for List<'_> {
    type Value = Tags;

    fn expecting(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        text.write_str("tags")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Tags, A::Error> {
        let mut tags = Tags::default();
        self.0.set(MAX_TEXT_BYTES);
        while let Some(token) = seq.next_element::<Cow<'_, str>>()? {
            tags.add(&token);
            self.0.set(MAX_TEXT_BYTES);
        }
        Ok(tags)
    }
}

pub(super) fn read(input: Input, sink: &mut dyn Sink) -> Result<(), Error> {
    let path = input.path.clone();
    let mut feed = Feed::of_lines(sink);
    let mut speaker = Speaker::default();
    let (left, offset) = (Rc::new(Cell::new(MAX_TEXT_BYTES)), Rc::new(Cell::new(0)));
    let reader = Meter { inner: input.into_reader(), left: left.clone(), offset: offset.clone() };
    let mut json = serde_json::Deserializer::from_reader(reader);
    let mut analysis =
        Analysis { feed: &mut feed, speaker: &mut speaker, left, categories: 0, tags: 0, bytes: 0 };
    let read = json.deserialize_map(&mut analysis);
    let Analysis { categories, tags, bytes, .. } = analysis;
    if categories == 0 {
        return match read {
            Err(error) => Err(Error::NoMemory {
                path,
                what: format!("is not an analysis of the TBD suite: {error}; one begins: {{{EXAMPLE}"),
            }),
            Ok(()) => Err(Error::NothingFound { path, format: FORMAT, lines: 1, example: EXAMPLE }),
        };
    }
    if let Err(error) = read {
        let text = format!("the analysis cannot be read from byte {} on: {error}", thousands(offset.get()));
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
    feed.tell_rejects("sum", "category", EXAMPLE);
    speaker.end(&mut feed);
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
