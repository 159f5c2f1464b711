//! Categories: ordered rules that say what a cell is called. First match wins, so every byte is counted
//! once; what no rule takes is `Others`. Rules are read by views, after the sums: no total depends on
//! them.
//!
//! Two **groupings** of the same bytes exist side by side, by layer and by data structure; each is a
//! [`Rules`] of its own.

use crate::book::Class;
use crate::snapshot::CellView;
use gpumem_wire::{Phase, Role};
use regex_lite::Regex;

/// What cells that no rule takes are called.
pub const OTHERS: &str = "Others";

/// A pattern that a whole text must match.
#[derive(Debug, Clone)]
pub struct Pattern(Regex);

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
        write!(f, "pattern \"{}\": {}", self.pattern, self.reason)
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
        let expression = match text.strip_prefix("re:") {
            Some(expression) => format!("^(?:{expression})$"),
            None => glob(text),
        };
        let built = regex_lite::RegexBuilder::new(&expression).dot_matches_new_line(true).build();
        built.map(Pattern).map_err(|error| PatternError { pattern: text.into(), reason: error.to_string() })
    }

    /// Whether the whole of `text` matches.
    pub fn matches(&self, text: &str) -> bool {
        self.0.is_match(text)
    }
}

fn glob(text: &str) -> String {
    let mut expression = String::from("^");
    for character in text.chars() {
        match character {
            '*' => expression.push_str(".*"),
            '?' => expression.push('.'),
            other => expression.push_str(&regex_lite::escape(other.encode_utf8(&mut [0; 4]))),
        }
    }
    expression.push('$');
    expression
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
    fn matches(&self, cell: &CellView) -> bool {
        let any = |patterns: &[Pattern], text: Option<&str>| {
            patterns.is_empty()
                || text.is_some_and(|text| patterns.iter().any(|pattern| pattern.matches(text)))
        };
        any(&self.tags, cell.tag.as_deref())
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

    /// Cells that more than one category wants, for the user to judge the order by.
    pub fn conflicts(&self, cells: &[CellView]) -> Vec<Conflict> {
        let mut conflicts = Vec::new();
        for (index, cell) in cells.iter().enumerate().filter(|(_, cell)| is_named_by_rules(cell)) {
            let mut matching = self.rules.iter().filter(|rule| rule.matches(cell));
            let Some(winner) = matching.next() else { continue };
            if let Some(loser) = matching.find(|rule| rule.name != winner.name) {
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
