//! Implements `gpumemctl explain`: explains the words of a report with the numbers of a run, and suggests what to do.
//!
//! A word is anything that a report prints: the name of a row, a column, a flag, a key of JSON. Categories and tags are explained
//! from the rules and the run themselves.

mod here;
mod numbers;

use super::Report;
use crate::category::Rules;
use crate::lines::Lines;
use crate::rules::{Groupings, PRESETS};
use gpumem_model::checks::Check;
use gpumem_model::escape::escape;
use here::ExplainedRun;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::sync::LazyLock;
use strsim::levenshtein;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    subject: Vec<Subject>,
}

/// Words about one subject, in the order in which they are listed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Subject {
    title: String,
    word: Vec<Word>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Word {
    /// All spellings of the word; the first one is the title.
    names: Vec<String>,
    means: String,
    /// Name of the number that a run shows for this word, see [`numbers::NUMBERS`], and an optional argument; may be empty.
    #[serde(default)]
    here: String,
    /// Advice for the reader; may be empty.
    #[serde(default, rename = "do")]
    todo: String,
}

/// Returns the subjects in the order in which they are listed.
fn subjects() -> &'static [Subject] {
    // A test checks that the file can be parsed.
    static FILE: LazyLock<File> =
        LazyLock::new(|| toml::from_str(include_str!("words.toml")).unwrap_or_default());
    &FILE.subject
}

fn words() -> impl Iterator<Item = &'static Word> {
    subjects().iter().flat_map(|subject| &subject.word)
}

/// Returns the first spelling of each word that can be explained.
pub fn titles() -> impl Iterator<Item = &'static str> {
    words().filter_map(|entry| entry.names.first()).map(String::as_str)
}

/// Returns the form of a word for comparisons: lower case, without suffixes for units, parts separated by one space.
fn plain(whole: &str) -> String {
    let mut word = without_number(whole.trim().trim_start_matches("<- "))
        .trim_end_matches([':', '*'])
        .trim_start_matches('~')
        .to_lowercase();
    for suffix in ["_bytes", "_ns", "_s", "_ms"] {
        if let Some(stem) = word.strip_suffix(suffix).filter(|stem| !stem.is_empty()) {
            word = stem.to_owned();
            break;
        }
    }
    let joined = word.split(['_', '-', ' ']).filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ");
    // Signs such as `~` and `-` can be explained too, so they are kept.
    if joined.is_empty() { whole.trim().to_owned() } else { joined }
}

/// Returns the word of a row that sums several, such as `smaller` of `(3 smaller)`.
fn without_number(row: &str) -> &str {
    let inner = row.strip_prefix('(').and_then(|row| row.strip_suffix(')'));
    let parts = inner.and_then(|inner| inner.split_once(' '));
    let is_number = |text: &str| text.chars().all(|digit| digit.is_ascii_digit() || digit == ',');
    parts.filter(|(number, _)| is_number(number)).map_or(row, |(_, word)| word)
}

fn find(word: &str) -> Option<&'static Word> {
    let word = plain(word);
    words().find(|entry| entry.names.iter().any(|name| plain(name) == word))
}

/// Returns whether a word can be explained without a run.
pub fn is_known(word: &str) -> bool {
    find(word).is_some() || preset_category(word).is_some() || check(word).is_some()
}

/// Explains a word. `report` is the run whose numbers are shown, if any. For an unknown word, returns `Err` with the most similar
/// known words.
pub fn explain(word: &str, report: Option<&Report<'_>>, width: Option<usize>) -> Result<String, Vec<String>> {
    let here = report.and_then(ExplainedRun::of);
    let mut out = Lines::new(width);
    if let Some(entry) = find(word) {
        let [name, others @ ..] = entry.names.as_slice() else { return Err(Vec::new()) };
        let also = if others.is_empty() { String::new() } else { format!("  (also: {})", others.join("; ")) };
        out.prose(&format!("{name}{also}"));
        out.inset(&entry.means);
        let numbers = here.as_ref().and_then(|here| Some((here, numbers::number(here, &entry.here)?)));
        if let Some((here, numbers)) = numbers {
            out.inset(&format!("here: {numbers}  ({})", here.title()));
        }
        if !entry.todo.is_empty() {
            out.inset(&format!("do: {}", entry.todo));
        }
    } else if let Some(lines) =
        category(word, report, here.as_ref()).or_else(|| tag(word, here.as_ref())).or_else(|| check(word))
    {
        let mut lines = lines.iter();
        lines.by_ref().take(1).for_each(|line| out.prose(line));
        lines.for_each(|line| out.inset(line));
    } else {
        let known = words().flat_map(|entry| entry.names.iter().cloned());
        let checks = Check::ALL.iter().map(|check| check.id().to_owned());
        let known: Vec<String> = known.chain(categories(report)).chain(checks).collect();
        return Err(nearest(word, &known));
    }
    Ok(out.lines.join("\n") + "\n")
}

/// Returns the list of all words that can be explained, by subject.
pub fn list(width: Option<usize>) -> String {
    let mut out = Lines::new(width);
    out.prose(
        "gpumemctl explain WORD [PID|RUN|FILE] says what a word of a report means, with the numbers of a run",
    );
    for subject in subjects() {
        let names = subject.word.iter().filter_map(|entry| entry.names.first());
        out.line("");
        out.line(&subject.title);
        out.inset(&names.cloned().collect::<Vec<_>>().join(", "));
    }
    out.line("");
    out.prose("also every category of the presets and of your rules, every tag of the run, every key of the JSON forms");
    out.lines.join("\n") + "\n"
}

/// Returns the names of all categories in the preset rules and in the rules of the run.
fn categories(report: Option<&Report<'_>>) -> Vec<String> {
    let presets = PRESETS.iter().map(|(name, _)| Groupings::preset(Some(name)));
    let rules = presets.chain(report.map(|report| &report.groupings)).flat_map(Groupings::rules);
    let all: BTreeSet<&String> = rules.map(|rule| &rule.name).collect();
    all.into_iter().cloned().collect()
}

/// Returns the preset rules that have a category of that name, each with its grouping; `None` if there are none.
fn preset_category(word: &str) -> Option<Vec<String>> {
    let has = |rules: &Rules| rules.rules.iter().any(|rule| plain(&rule.name) == plain(word));
    let groupings = PRESETS.iter().map(|(name, _)| (name, Groupings::preset(Some(name))));
    let found = groupings.flat_map(|(name, groupings)| {
        let rules = [("layer", &groupings.layer), ("structure", &groupings.structure)];
        rules.map(|(what, rules)| has(rules).then(|| format!("{name} (by {what})")))
    });
    let found: Vec<String> = found.flatten().collect();
    (!found.is_empty()).then_some(found)
}

/// Explains a category that preset rules or the run's rules define, or that the report derived from a path or library.
fn category(word: &str, report: Option<&Report<'_>>, here: Option<&ExplainedRun<'_>>) -> Option<Vec<String>> {
    let presets = preset_category(word);
    let of_run = here.and_then(|here| here.category(&|name: &str| plain(name) == plain(word)));
    if presets.is_none() && of_run.is_none() {
        return None;
    }
    let name = of_run.as_ref().map_or(word.to_owned(), |(name, ..)| name.clone());
    let mut lines = vec![escape(&name)];
    lines.push(match (&presets, report) {
        (Some(presets), _) => format!(
            "A category: tracked bytes for which a rule of this name is the first to match. In the presets {}.",
            presets.join(", ")
        ),
        (None, Some(report)) if report.groupings.rules().any(|rule| rule.name == name) => {
            let rules = escape(&report.groupings.name);
            format!("A category of the rules {rules}: bytes for which a rule of this name is the first to match.")
        }
        _ => "A name without a rule: a common prefix of tags, or the library that allocated.".to_owned(),
    });
    if let (Some((_, by, numbers)), Some(here)) = (of_run, here) {
        lines.push(format!("here: {numbers}, by {}  ({})", by.name(), here.title()));
    }
    lines.push("do: its tags are in gpumemctl report --tags; your own rules: --rules FILE".to_owned());
    Some(lines)
}

fn tag(word: &str, here: Option<&ExplainedRun<'_>>) -> Option<Vec<String>> {
    let here = here?;
    let numbers = here.tag(word)?;
    Some(vec![
        escape(word),
        "A tag: the path under which these bytes were allocated (scopes, ranges, modules), innermost last."
            .to_owned(),
        format!("here: {numbers}  ({})", here.title()),
        "do: gpumemctl report --tags lists all of them, --growth says which grow".to_owned(),
    ])
}

/// Explains a check of `gpumemctl doctor` by its id.
fn check(word: &str) -> Option<Vec<String>> {
    let check = Check::ALL.iter().find(|check| check.id() == word)?;
    let about = format!("A check of gpumemctl doctor: it examines {}.", check.about());
    let advice =
        "do: gpumemctl doctor shows the result of this check; docs/troubleshooting.md has the remedies"
            .to_owned();
    Some(vec![word.to_owned(), about, advice])
}

/// Maximum number of suggestions for an unknown word.
const OFFERED: usize = 4;
/// Maximum number of characters of a word that are compared; further characters are ignored.
const LONGEST: usize = 64;

/// Returns the words of `known` most similar to `word`, the best first. A word that contains the other counts as similar, and so does
/// one with a similar part: `retaind` is near `retained forward outputs`.
pub fn nearest(word: &str, known: &[String]) -> Vec<String> {
    let compared = |word: &str| -> String { plain(word).chars().take(LONGEST).collect() };
    let word = compared(word);
    let most = 1 + word.chars().count() / 3;
    let is_part = |whole: &str, part: &str| part.len() >= 3 && whole.contains(part);
    let length = word.split(' ').count();
    let distance = |name: &&String| {
        let name = compared(name);
        let words: Vec<&str> = name.split(' ').collect();
        let of = |part: &[&str]| levenshtein(&word, &part.join(" "));
        let of_parts = words.windows(length).filter(|part| part.len() < words.len()).map(of).min();
        let of_parts =
            of_parts.filter(|distance| *distance <= most).map(|distance| distance.saturating_add(1));
        let of_whole = Some(of(&words)).filter(|distance| *distance <= most);
        let of_similar = (is_part(&name, &word) || is_part(&word, &name)).then_some(1);
        [of_whole, of_parts, of_similar].into_iter().flatten().min()
    };
    let mut near: Vec<(usize, &String)> =
        known.iter().filter_map(|name| Some((distance(&name)?, name))).collect();
    near.sort();
    near.dedup_by(|a, b| a.1 == b.1);
    // For the misspelling "untrackabel", suggests Untrackable and not its abbreviation UNTRACK.
    let is_whole = |name: &str, part: &str| {
        name.len() > part.len() && name.starts_with(part) && levenshtein(&word, name) <= most
    };
    let is_abbreviation = |part: &str| near.iter().any(|(_, name)| is_whole(&plain(name), part));
    // A phrase around a word that is nearer says nothing more.
    let is_phrase = |at: usize, name: &str| {
        let nearer = near.iter().take(at).map(|(_, nearer)| plain(nearer));
        name.split(' ').count() > length && nearer.into_iter().any(|nearer| is_part(name, &nearer))
    };
    let is_offered = |at: usize, name: &str| !is_abbreviation(name) && !is_phrase(at, name);
    let offered = near.iter().enumerate().filter(|(at, (_, name))| is_offered(*at, &plain(name)));
    offered.take(OFFERED).map(|(_, (_, name))| (*name).clone()).collect()
}

#[cfg(test)]
mod tests;
