//! Categories: ordered rules that give names to cells. A cell is memory with one tag, role, pool and so on. The first rule that
//! matches wins, so every byte counts once. `Others` is memory that no rule matches. Rules apply only when a report is made,
//! after memory is summed by cell: no total depends on them.
//!
//! Two **groupings** of the same bytes exist: by layer of the model, and by data structure. Each has its own [`Rules`].

use gpumem_model::cell::{CellTraits, is_sum, without_sum};
use gpumem_model::run::{Cell, Class};
use gpumem_wire::{Phase, Role};
use regex_lite::Regex;

/// Name of memory that no rule matches.
pub const OTHERS: &str = "Others";
/// Category of blocks from forward passes whose role is unknown.
pub(crate) const OUTPUTS: &str = "retained forward outputs";
/// Category of copies of parameters.
pub(crate) const COPIES: &str = "parameter copies";
/// Name of the unused memory of pools in texts.
pub(crate) const CACHED: &str = "cached by the allocator";
/// Name of the memory that NVML charges to a process and no record of the agent explains.
pub(crate) const UNTRACKABLE: &str = "Untrackable";
/// Name of the owner of untrackable memory that context, modules, local memory and heaps explain as a whole.
pub(crate) const OF_CUDA: &str = "CUDA itself";

/// Maximum compiled size of a regular expression in bytes, because its cost on each tag grows with it. Names need far less.
const MAX_PATTERN_BYTES: usize = 1 << 15;

/// A pattern that a whole text must match.
#[derive(Debug, Clone)]
pub enum Pattern {
    /// A glob, as the pieces between its stars. Most patterns are globs and are tried on every tag, so globs have a fast
    /// implementation.
    Glob(Box<[Box<str>]>),
    /// A regular expression, anchored at both ends.
    Expression(Regex),
}

impl Pattern {
    /// Parses a pattern. `re:EXPRESSION` is a regular expression, anchored at both ends. Anything else is a glob: `*` matches any
    /// sequence of characters (including `/`), `?` matches one character, and all others match themselves.
    ///
    /// # Errors
    /// If the expression does not parse, or is too large. The text gives the pattern and the reason.
    pub fn new(text: &str) -> Result<Self, String> {
        let Some(expression) = text.strip_prefix("re:") else {
            return Ok(Pattern::Glob(text.split('*').map(Into::into).collect()));
        };
        // Compiled without anchors first, to reject expressions such as `a)|(b`, which become valid inside `^(?:...)$`.
        let build = |expression: &str| {
            regex_lite::RegexBuilder::new(expression)
                .dot_matches_new_line(true)
                .size_limit(MAX_PATTERN_BYTES)
                .build()
        };
        let anchored = build(expression).and_then(|_| build(&format!("^(?:{expression})$")));
        anchored.map(Pattern::Expression).map_err(|reason| {
            let shown: String = text.chars().take(80).collect();
            let more = if shown.len() < text.len() { "..." } else { "" };
            format!("pattern \"{shown}{more}\": {reason}")
        })
    }

    /// Returns whether the whole of `text` matches.
    pub fn matches(&self, text: &str) -> bool {
        match self {
            Pattern::Glob(glob) => glob_matches(glob, text),
            Pattern::Expression(expression) => expression.is_match(text),
        }
    }
}

/// Matches the pieces between stars one by one, each at its first occurrence. A later occurrence would leave less text for the
/// other pieces, so no backtracking is needed.
fn glob_matches(pieces: &[Box<str>], text: &str) -> bool {
    let (first, pieces) = pieces.split_first().map_or(("", pieces), |(first, pieces)| (&**first, pieces));
    let Some(mut rest) = piece_at_start(first, text) else { return false };
    let mut last: Option<&str> = None;
    for piece in pieces {
        if let Some(middle) = last.replace(piece) {
            match find_piece(middle, rest) {
                Some(after) => rest = after,
                None => return false,
            }
        }
    }
    match last {
        None => rest.is_empty(), // the glob has no star
        Some("") => true,
        Some(last) => {
            let (length, available) = (last.chars().count(), rest.chars().count());
            let Some(skip) = available.checked_sub(length) else { return false };
            let end = rest.char_indices().nth(skip).map_or("", |(at, _)| &rest[at..]);
            piece_at_start(last, end).is_some_and(str::is_empty)
        }
    }
}

/// Returns the text after `piece`, if it begins with `piece`; `?` in the piece matches any character.
fn piece_at_start<'t>(piece: &str, text: &'t str) -> Option<&'t str> {
    if !piece.contains('?') {
        return text.strip_prefix(piece);
    }
    let mut rest = text.chars();
    for wanted in piece.chars() {
        let found = rest.next()?;
        if wanted != '?' && wanted != found {
            return None;
        }
    }
    Some(rest.as_str())
}

fn find_piece<'t>(piece: &str, text: &'t str) -> Option<&'t str> {
    if !piece.contains('?') {
        return text.find(piece).map(|at| &text[at + piece.len()..]);
    }
    text.char_indices().find_map(|(at, _)| piece_at_start(piece, &text[at..]))
}

/// A rule: lists of patterns. A cell matches if each list that is not empty has a pattern that the cell matches.
#[derive(Debug, Clone, Default)]
pub struct Rule {
    /// Name of the category; several rules may have the same category.
    pub name: String,
    pub tags: Vec<Pattern>,
    pub roles: Vec<Role>,
    pub phases: Vec<Phase>,
    pub libraries: Vec<Pattern>,
}

impl Rule {
    fn is_by_name(&self) -> bool {
        !self.tags.is_empty() || !self.libraries.is_empty()
    }

    fn matches(&self, cell: CellTraits<'_>) -> bool {
        let any = |patterns: &[Pattern], text: Option<&str>| {
            patterns.is_empty()
                || text.is_some_and(|text| patterns.iter().any(|pattern| pattern.matches(text)))
        };
        any(&self.tags, cell.tag.map(without_sum))
            && any(&self.libraries, cell.library)
            && (self.roles.is_empty() || self.roles.contains(&cell.role))
            && (self.phases.is_empty() || self.phases.contains(&cell.phase))
    }
}

/// The rules of one grouping.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// Rules in order of precedence.
    pub rules: Vec<Rule>,
}

impl Rules {
    /// Returns the category of a cell with direct or block bytes; `None` for `Others` and for other classes of memory.
    pub fn category<'c>(&self, cell: impl Into<CellTraits<'c>>) -> Option<&str> {
        let cell = cell.into();
        if !is_named_by_rules(cell.class) {
            return None;
        }
        self.rules.iter().find(|rule| rule.matches(cell)).map(|rule| rule.name.as_str())
    }

    /// Returns cells that rules of several categories match by tag or library, so that the user can check the order of the rules.
    /// Each is (tag, category of the first rule, category of a later rule). A later rule that has only roles or phases is meant
    /// for the remaining memory, so its match is not a conflict.
    pub fn conflicts(&self, cells: &[Cell]) -> Vec<(String, String, String)> {
        let is_one = |cell: &CellTraits<'_>| is_named_by_rules(cell.class) && !cell.tag.is_some_and(is_sum);
        let conflict = |cell: CellTraits<'_>| {
            let mut matching = self.rules.iter().filter(|rule| rule.matches(cell));
            let winner = matching.next()?;
            let loser = matching.find(|rule| rule.name != winner.name && rule.is_by_name())?;
            Some((cell.tag.unwrap_or_default().to_owned(), winner.name.clone(), loser.name.clone()))
        };
        cells.iter().map(CellTraits::from).filter(is_one).filter_map(conflict).collect()
    }
}

/// Returns whether rules apply to a class. Idle bytes, and pools that report no blocks, have no tag but their own rows.
pub fn is_named_by_rules(class: Class) -> bool {
    matches!(class, Class::Direct | Class::Block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_whole_texts() {
        let cases = [
            ("*att*", "forward_features/att_hidden", true),
            ("*att*", "at", false),
            ("source", "source", true),
            ("source", "source_embed", false),
            ("*/_mul*", "forward_features/_mul537", true),
            ("a*b*c", "abbc", true),
            ("a*b*c", "abcb", false),
            ("*ab", "aab", true),
            ("*a?c", "xxabc", true),
            ("*a?b*", "aab", true),
            ("?", "\u{e4}", true),
            ("??", "\u{e4}", false),
            ("*\u{e4}*", "x\u{e4}y", true),
            ("", "", true),
            ("*", "", true),
            ("**", "anything/at all", true),
            ("a*", "", false),
            ("h.1", "hx1", false),
        ];
        for (glob, text, expected) in cases {
            assert_eq!(Pattern::new(glob).map(|glob| glob.matches(text)), Ok(expected), "{glob} on {text}");
        }
    }

    #[test]
    fn only_words_are_in_conflict() {
        let glob = |text| vec![Pattern::new(text).expect("a glob")];
        let rule = |name: &str, tags, phases| Rule { name: name.into(), tags, phases, ..Rule::default() };
        let (tag, phase) = (Some("h.1/attn".to_owned()), Some("forward".to_owned()));
        let cell = Cell { class: Class::Block, tag, phase, ..Cell::default() };
        let rest = rule("retained forward outputs", Vec::new(), vec![Phase::Forward]);
        let mut rules = Rules { rules: vec![rule("attention", glob("*att*"), Vec::new()), rest] };
        assert_eq!(rules.conflicts(std::slice::from_ref(&cell)), []);
        rules.rules.push(rule("blocks", glob("h.*"), Vec::new()));
        let conflict = ["h.1/attn", "attention", "blocks"].map(str::to_owned);
        assert_eq!(rules.conflicts(&[cell]), [conflict.into()]);
    }

    #[test]
    fn expressions_are_anchored() {
        let pattern = Pattern::new(r"re:h\.\d+/mlp").expect("a pattern");
        assert!(pattern.matches("h.12/mlp"));
        assert!(!pattern.matches("model/h.12/mlp"));
        assert!(!pattern.matches("h.12/mlp/up"));
        for wrong in ["re:(", "re:forward)|(?:zzz", "re:(?:(?:.*){0,100}){0,50}x"] {
            let error = Pattern::new(wrong).expect_err(wrong).to_string();
            assert!(error.starts_with(&format!("pattern \"{wrong}\": ")), "{error}");
        }
    }
}
