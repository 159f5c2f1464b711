//! Categories: ordered rules that say what a cell is called. First match wins, so every byte is counted
//! once; what no rule takes is `Others`. Rules are read by views, after the sums: no total depends on
//! them.
//!
//! Two **groupings** of the same bytes exist side by side, by layer and by data structure; each is a
//! [`Rules`] of its own.

use gpumem_ledger::{CellView, is_sum, without_sum};
use gpumem_model::run::Class;
use gpumem_wire::{Phase, Role};
use regex_lite::Regex;

/// What cells that no rule takes are called.
pub const OTHERS: &str = "Others";

/// Compiled size of an expression: its cost on each tag grows with it. Far above what names need.
const MAX_PATTERN_BYTES: usize = 1 << 15;

/// A pattern that a whole text must match.
#[derive(Debug, Clone)]
pub struct Pattern(Matcher);

#[derive(Debug, Clone)]
enum Matcher {
    /// Most rules by far, tried on every tag: worth more than a general engine.
    /// The pieces between its stars.
    Glob(Box<[Box<str>]>),
    Expression(Regex),
}

/// A pattern that cannot be used, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatternError {
    /// As it was written.
    pub pattern: String,
    /// What is wrong with it.
    pub reason: String,
}

impl std::fmt::Display for PatternError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown: String = self.pattern.chars().take(80).collect();
        let more = if shown.len() < self.pattern.len() { "..." } else { "" };
        write!(f, "pattern \"{shown}{more}\": {}", self.reason)
    }
}

impl std::error::Error for PatternError {}

impl Pattern {
    /// `re:EXPRESSION` is a regular expression, anchored at both ends. Anything else is a glob: `*` is
    /// any run of characters (`/` too), `?` is one character, the rest stands for itself.
    ///
    /// # Errors
    /// An expression that does not parse, or that would be too large.
    pub fn new(text: &str) -> Result<Self, PatternError> {
        let Some(expression) = text.strip_prefix("re:") else {
            return Ok(Pattern(Matcher::Glob(text.split('*').map(Into::into).collect())));
        };
        // By itself first: `a)|(b` would be an expression only between the anchors' brackets.
        let build = |expression: &str| {
            regex_lite::RegexBuilder::new(expression)
                .dot_matches_new_line(true)
                .size_limit(MAX_PATTERN_BYTES)
                .build()
        };
        let anchored = build(expression).and_then(|_| build(&format!("^(?:{expression})$")));
        match anchored {
            Ok(expression) => Ok(Pattern(Matcher::Expression(expression))),
            Err(error) => Err(PatternError { pattern: text.into(), reason: error.to_string() }),
        }
    }

    /// Whether the whole of `text` matches.
    pub fn matches(&self, text: &str) -> bool {
        match &self.0 {
            Matcher::Glob(glob) => glob_matches(glob, text),
            Matcher::Expression(expression) => expression.is_match(text),
        }
    }
}

/// Piece by piece between the stars, each at its first place: for globs the first place is as good as any
/// later one, so there is no backtracking.
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
        None => rest.is_empty(), // no star at all
        Some("") => true,
        Some(last) => {
            let (length, available) = (last.chars().count(), rest.chars().count());
            let Some(skip) = available.checked_sub(length) else { return false };
            let end = rest.char_indices().nth(skip).map_or("", |(at, _)| &rest[at..]);
            piece_at_start(last, end).is_some_and(str::is_empty)
        }
    }
}

/// What follows a piece (in which `?` is any character) at the start of a text.
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

/// One rule: a cell matches if every list that is not empty has something that matches.
#[derive(Debug, Clone, Default)]
pub struct Rule {
    /// Name of the category. Rules may share one.
    pub name: String,
    /// On the tag path.
    pub tags: Vec<Pattern>,
    /// On the role.
    pub roles: Vec<Role>,
    /// On the phase.
    pub phases: Vec<Phase>,
    /// On the calling library's path.
    pub libraries: Vec<Pattern>,
}

impl Rule {
    fn is_by_name(&self) -> bool {
        !self.tags.is_empty() || !self.libraries.is_empty()
    }

    fn matches(&self, cell: &CellView) -> bool {
        let any = |patterns: &[Pattern], text: Option<&str>| {
            patterns.is_empty()
                || text.is_some_and(|text| patterns.iter().any(|pattern| pattern.matches(text)))
        };
        any(&self.tags, cell.tag.as_deref().map(without_sum))
            && any(&self.libraries, cell.library.as_deref())
            && (self.roles.is_empty() || self.roles.contains(&cell.role))
            && (self.phases.is_empty() || self.phases.contains(&cell.phase))
    }
}

/// One grouping.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// In order.
    pub rules: Vec<Rule>,
}

/// A cell that rules of different categories match: the first has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Index of the cell.
    pub cell: usize,
    /// Category that has it.
    pub winner: String,
    /// Category of a later rule that matches too.
    pub loser: String,
}

impl Rules {
    /// Category of a cell of class direct or block; `None` for `Others` and for the classes that rules do
    /// not name.
    pub fn category(&self, cell: &CellView) -> Option<&str> {
        if !is_named_by_rules(cell) {
            return None;
        }
        self.rules.iter().find(|rule| rule.matches(cell)).map(|rule| rule.name.as_str())
    }

    /// Cells that more than one category wants by its name, for the user to judge the order by: words catch more than
    /// was meant. A later rule on role or phase alone is there for what is left, and wants nothing.
    pub fn conflicts(&self, cells: &[CellView]) -> Vec<Conflict> {
        let mut conflicts = Vec::new();
        let is_one = |cell: &CellView| is_named_by_rules(cell) && !cell.tag.as_deref().is_some_and(is_sum);
        for (index, cell) in cells.iter().enumerate().filter(|(_, cell)| is_one(cell)) {
            let mut matching = self.rules.iter().filter(|rule| rule.matches(cell));
            let Some(winner) = matching.next() else { continue };
            if let Some(loser) = matching.find(|rule| rule.name != winner.name && rule.is_by_name()) {
                conflicts.push(Conflict {
                    cell: index,
                    winner: winner.name.clone(),
                    loser: loser.name.clone(),
                });
            }
        }
        conflicts
    }
}

/// Idle and opaque bytes have no tag: the identity names them.
pub fn is_named_by_rules(cell: &CellView) -> bool {
    matches!(cell.class, Class::Direct | Class::Block)
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
        let cell = CellView {
            class: Class::Block,
            tag: Some("h.1/attn".into()),
            origin: None,
            role: Role::Unknown,
            phase: Phase::Forward,
            library: None,
            pool: None,
            pending: false,
            inherited: false,
        };
        let rest = rule("made in forward", Vec::new(), vec![Phase::Forward]);
        let mut rules = Rules { rules: vec![rule("attention", glob("*att*"), Vec::new()), rest] };
        assert_eq!(rules.conflicts(std::slice::from_ref(&cell)), []);
        rules.rules.push(rule("blocks", glob("h.*"), Vec::new()));
        let [conflict] = &rules.conflicts(&[cell])[..] else { panic!("one conflict") };
        assert_eq!((&*conflict.winner, &*conflict.loser), ("attention", "blocks"));
    }

    #[test]
    fn expressions_are_anchored() {
        let pattern = Pattern::new(r"re:h\.\d+/mlp").expect("a pattern");
        assert!(pattern.matches("h.12/mlp"));
        assert!(!pattern.matches("model/h.12/mlp"));
        assert!(!pattern.matches("h.12/mlp/up"));
        for wrong in ["re:(", "re:forward)|(?:zzz", "re:(?:(?:.*){0,100}){0,50}x"] {
            assert_eq!(Pattern::new(wrong).expect_err(wrong).pattern, wrong);
        }
    }
}
