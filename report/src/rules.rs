//! Rules files: define the categories of memory. Users write them; the program contains some as presets.
//!
//! ```toml
//! [[layer]]                      # one grouping; [[structure]] is the other, of the same bytes
//! name = "Attention"             # category; rules may share one
//! tag = ["*att*", "re:h\\.\\d+"] # any of these on the tag path: globs, or anchored expressions
//! role = ["activation"]          # and any of these roles
//! phase = ["forward"]            # and any of these phases
//! library = ["*libnccl*"]        # and any of these on the calling library
//! ```
//!
//! Rules are tried in order. The first rule that matches memory determines its category. Memory that no rule matches is `Others`.

use crate::category::{OTHERS, Pattern, Rule, Rules};
use gpumem_model::names::{Named, phases_of_blocks};
use gpumem_model::run::Run;
use gpumem_wire::Role;
use serde::Deserialize;
use std::io::Read;
use std::path::Path;
use std::sync::LazyLock;

/// The rules of both groupings.
#[derive(Debug, Clone, Default)]
pub struct Groupings {
    /// Name of the rules: the name of a preset, or the path of a file.
    pub name: String,
    pub layer: Rules,
    pub structure: Rules,
}

/// Presets, as (name, text of the rules file).
pub const PRESETS: [(&str, &str); 4] = [
    ("default", include_str!("../../config/rules/default.toml")),
    ("mxnet", include_str!("../../config/rules/mxnet.toml")),
    ("tbd", include_str!("../../config/rules/tbd.toml")),
    ("torch", include_str!("../../config/rules/torch.toml")),
];

const MAX_FILE_BYTES: u64 = 1 << 20;
/// Name of the row for tracked bytes without a tag.
pub const NO_TAG: &str = "(no tag)";
/// Names of rows that reports create themselves, which a category must not have.
pub(crate) const RESERVED: [&str; 8] = [
    OTHERS,
    "tracked",
    "pool idle",
    "opaque pools",
    "Untrackable",
    "unexplained",
    "predates the agent",
    NO_TAG,
];

/// Reason why a rules file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name is neither a preset nor a readable file.
    #[error("rules \"{name}\": {source}; give a file, or one of the presets {presets}")]
    Open { name: String, source: std::io::Error, presets: String },
    /// The file is not TOML, or has unknown keys. The message contains the line.
    #[error("{path}: {message}")]
    Toml {
        path: String,
        /// Error message with line and column.
        message: String,
    },
    /// A rule has no conditions, or is wrong.
    #[error("{path}: [[{grouping}]] \"{rule}\": {message}")]
    Rule {
        path: String,
        grouping: &'static str,
        rule: String,
        /// What is wrong, and how to correct it.
        message: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    layer: Vec<Entry>,
    #[serde(default)]
    structure: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(default)]
    tag: Vec<String>,
    #[serde(default)]
    role: Vec<String>,
    #[serde(default)]
    phase: Vec<String>,
    #[serde(default)]
    library: Vec<String>,
}

impl Groupings {
    /// Loads the preset with this name, or a file if there is no such preset.
    pub fn load(name: &str) -> Result<Self, Error> {
        if let Some((_, text)) = PRESETS.iter().find(|(preset, _)| *preset == name) {
            return Groupings::parse(text, name);
        }
        let text = read(Path::new(name)).map_err(|source| Error::Open {
            name: name.into(),
            source,
            presets: PRESETS.map(|(preset, _)| preset).join(", "),
        })?;
        Groupings::parse(&text, name)
    }

    /// Returns the preset with the name that a stored run has; `default` if this program has no preset of that name.
    pub fn preset(name: Option<&str>) -> &'static Self {
        static PARSED: LazyLock<[Groupings; PRESETS.len()]> =
            LazyLock::new(|| PRESETS.map(|(name, text)| Groupings::parse(text, name).unwrap_or_default()));
        let find = |name: &str| PARSED.iter().find(|preset| preset.name == name);
        name.and_then(find).unwrap_or(&PARSED[0]) // `PARSED[0]` is `default`; a test parses every preset
    }

    /// Returns the rules that fit a run: its own preset, else `torch` if PyTorch's allocator was seen, else `default`.
    pub fn of_run(run: &Run) -> Self {
        let torch = crate::names::has_torch(run).then_some(crate::names::TORCH);
        Groupings::preset(run.source.preset.as_deref().or(torch)).clone()
    }

    pub(crate) fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.layer.rules.iter().chain(&self.structure.rules)
    }

    /// Parses the text of a rules file; `path` is used in messages.
    pub fn parse(text: &str, path: &str) -> Result<Self, Error> {
        let file: File = toml::from_str(text).map_err(|error| Error::Toml {
            path: path.into(),
            message: error.to_string().trim_end().into(),
        })?;
        Ok(Groupings {
            name: path.into(),
            layer: rules(file.layer, path, "layer")?,
            structure: rules(file.structure, path, "structure")?,
        })
    }
}

/// Reads a file of at most [`MAX_FILE_BYTES`]. Rejects devices and pipes, because their size is unknown.
fn read(path: &Path) -> std::io::Result<String> {
    let wrong = |text: &str| std::io::Error::new(std::io::ErrorKind::InvalidInput, text);
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        return Err(wrong("not a file"));
    }
    if found.len() > MAX_FILE_BYTES {
        return Err(wrong("larger than 1 MiB: not a file of rules"));
    }
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_FILE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

fn rules(entries: Vec<Entry>, path: &str, grouping: &'static str) -> Result<Rules, Error> {
    let rules = entries.into_iter().map(|entry| {
        let name = entry.name.clone();
        rule(entry).map_err(|message| Error::Rule { path: path.into(), grouping, rule: name, message })
    });
    Ok(Rules { rules: rules.collect::<Result<_, _>>()? })
}

fn rule(entry: Entry) -> Result<Rule, String> {
    if entry.name.trim() != entry.name || entry.name.is_empty() {
        return Err("a category needs a name, without blanks around it".into());
    }
    if RESERVED.contains(&entry.name.as_str()) || entry.name.starts_with('(') {
        return Err("a category needs another name: reports have a row of this name".into());
    }
    if entry.tag.is_empty() && entry.role.is_empty() && entry.phase.is_empty() && entry.library.is_empty() {
        return Err("matches nothing: add tag, role, phase or library".into());
    }
    let patterns = |texts: &[String]| -> Result<Vec<Pattern>, String> {
        texts.iter().map(|text| Pattern::new(text)).collect()
    };
    fn named<T: Named>(texts: &[String], what: &str, all: &[&str]) -> Result<Vec<T>, String> {
        let unknown = |text: &str| format!("{what} \"{text}\" does not exist; there are: {}", all.join(", "));
        texts.iter().map(|text| T::from_name(text).ok_or_else(|| unknown(text))).collect()
    }
    let roles: Vec<&str> = Role::NAMES.iter().map(|(name, _)| *name).collect();
    let phases: Vec<&str> = phases_of_blocks().collect();
    Ok(Rule {
        name: entry.name,
        tags: patterns(&entry.tag)?,
        libraries: patterns(&entry.library)?,
        roles: named(&entry.role, "role", &roles)?,
        phases: named(&entry.phase, "phase", &phases)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_parse() {
        for (name, _) in PRESETS {
            let groupings = Groupings::load(name).expect(name);
            assert!(!groupings.structure.rules.is_empty(), "{name}");
        }
    }

    #[test]
    fn mistakes_say_where_and_what_is_right() {
        let message = |text: &str| Groupings::parse(text, "my.toml").map(|_| ()).unwrap_err().to_string();
        assert!(message("[[layer]]\nname = \"a\"\ntags = [\"x\"]").contains("line 3"));
        assert!(message("[[layer]]\nname = \"a\"\nrole = [\"weights\"]").contains("there are: parameter"));
        assert!(message("[[layer]]\nname = \"a\"\ntag = [\"re:(\"]").contains("\"re:(\""));
        assert!(message("[[structure]]\nname = \"a\"").contains("matches nothing"));
        for name in ["Others", "pool idle", "(no tag)"] {
            assert!(
                message(&format!("[[layer]]\nname = \"{name}\"\ntag = [\"x\"]"))
                    .contains("needs another name")
            );
        }
        assert!(message("[[layer]]\nname = \" x\"\ntag = [\"x\"]").contains("blanks"));
        let error = Groupings::load("/nonexistent/rules.toml").unwrap_err().to_string();
        assert!(error.contains("presets default, mxnet, tbd, torch"), "{error}");
        let error = Groupings::load("/dev/zero").unwrap_err().to_string();
        assert!(error.contains("not a file"), "{error}");
        assert_eq!(Groupings::preset(Some("/etc/passwd")).name, "default");
    }
}
