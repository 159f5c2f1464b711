//! The figures of all crates as a table.

use super::graph::Graph;
use super::layers::Layers;
use super::source::{Sources, list};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

/// A function with more lines than this is long.
pub const LONG_FUNCTION: usize = 100;
/// A file with fewer lines than this is small, unless it is `mod.rs` or a crate's root.
pub const SMALL_FILE: usize = 60;
/// Crates whose public items are counted, with the names by which other crates use them. No external project uses these crates.
const INNER: [(&str, &str); 3] = [("agent-lib", "gpumem"), ("daemon", "gpumemd"), ("ctl", "gpumemctl")];

/// The figures of a crate.
pub struct Figures {
    /// Folder of the crate.
    pub krate: String,
    /// Production lines: code, comments and blanks below `src/`, without test items.
    pub lines: usize,
    /// Import cycles, the largest first.
    pub cycles: Vec<Vec<String>>,
    /// Imports against the layers; `None` for a crate without layers.
    pub against_layers: Option<Vec<String>>,
    /// Files without a layer.
    pub without_layer: Vec<String>,
    /// Functions above [`LONG_FUNCTION`], as `file function`, and their lines.
    pub long_functions: Vec<(String, usize)>,
    /// Files below [`SMALL_FILE`].
    pub small_files: Vec<String>,
    /// Public items, as `file name`, and whether tests or fuzz targets use the name; only for daemon, ctl and agent-lib.
    pub public_items: Option<Vec<(String, bool)>>,
}

impl Figures {
    /// Measures a crate of the workspace.
    pub fn of(krate: &str) -> Figures {
        Figures::of_sources(&Sources::read(krate))
    }

    fn of_sources(sources: &Sources) -> Figures {
        let krate = sources.krate.as_str();
        let layers = Layers::of(krate);
        let graph = Graph::new(sources, layers.and_then(|layers| layers.spread));
        let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        let inner = |layers: &Layers| {
            let files = sources.files.iter().filter(|file| !file.module.is_empty());
            let files = files.filter(|file| layers.layer_of(&file.path).is_none());
            files.map(|file| file.path.clone()).collect()
        };
        let long = sources.functions_above(LONG_FUNCTION).into_iter();
        let public = INNER.iter().find(|(name, _)| *name == krate).map(|(_, library)| {
            let used = words_of_tests(krate, library);
            let items = sources.public_items().into_iter();
            items.map(|(file, name)| (format!("{file} {name}"), used.contains(&name))).collect()
        });
        Figures {
            krate: krate.to_owned(),
            lines: sources.lines(),
            cycles: graph.cycles().into_iter().map(owned).collect(),
            against_layers: layers.map(|layers| layers.violations(&graph)),
            without_layer: layers.map(inner).unwrap_or_default(),
            long_functions: long.map(|long| (format!("{} {}", long.file, long.name), long.lines)).collect(),
            small_files: owned(sources.files_below(SMALL_FILE)),
            public_items: public,
        }
    }

    /// Number of files in the largest cycle; 1 where no file is in one.
    pub fn largest_cycle(&self) -> usize {
        self.cycles.first().map_or(1, Vec::len)
    }
}

/// Returns the words of all tests, benchmarks and fuzz targets that use the library of a crate. An item whose name is not among
/// them is unused.
fn words_of_tests(krate: &str, library: &str) -> BTreeSet<String> {
    let root = super::root();
    let mut files = Vec::new();
    for folder in [Path::new(krate).join("tests").as_path(), Path::new("tests"), Path::new("fuzz")] {
        list(&root.join(folder), &mut files);
    }
    let texts = files.iter().filter_map(|path| std::fs::read_to_string(path).ok());
    let texts = texts.filter(|text| text.contains(&format!("{library}::")));
    let is_letter = |letter: char| letter.is_alphanumeric() || letter == '_';
    texts.flat_map(|text| text.split(|c| !is_letter(c)).map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Returns the table, with a row for each crate and one for all. With `details` it lists the cycles, imports, functions and
/// files.
pub fn table(all: &[Figures], details: bool) -> String {
    let headings = [
        "crate",
        "lines",
        "largest cycle",
        "against layers",
        "functions > 100",
        "files < 60",
        "pub items",
        "in tests",
    ];
    let mut rows = vec![headings.map(str::to_owned)];
    let number = |number: Option<usize>| number.map_or("-".to_owned(), |number| number.to_string());
    let public = |figures: &Figures| figures.public_items.as_ref().map(Vec::len);
    let used =
        |figures: &Figures| figures.public_items.as_ref().map(|all| all.iter().filter(|item| item.1).count());
    let against = |figures: &Figures| figures.against_layers.as_ref().map(Vec::len);
    for figures in all {
        rows.push([
            figures.krate.clone(),
            figures.lines.to_string(),
            figures.largest_cycle().to_string(),
            number(against(figures)),
            figures.long_functions.len().to_string(),
            figures.small_files.len().to_string(),
            number(public(figures)),
            number(used(figures)),
        ]);
    }
    let sum = |of: &dyn Fn(&Figures) -> usize| all.iter().map(of).sum::<usize>().to_string();
    rows.push([
        "all".to_owned(),
        sum(&|figures| figures.lines),
        number(all.iter().map(Figures::largest_cycle).max()),
        sum(&|figures| against(figures).unwrap_or(0)),
        sum(&|figures| figures.long_functions.len()),
        sum(&|figures| figures.small_files.len()),
        sum(&|figures| public(figures).unwrap_or(0)),
        sum(&|figures| used(figures).unwrap_or(0)),
    ]);
    let mut text = String::new();
    for row in &rows {
        let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let cells = row.iter().enumerate().map(|(column, cell)| match column {
            0 => format!("{cell:<0$}", width(0)),
            _ => format!("  {cell:>0$}", width(column)),
        });
        let _ = writeln!(text, "{}", cells.collect::<String>());
    }
    for figures in all.iter().filter(|_| details) {
        let _ = writeln!(text, "\n{}", figures.krate);
        for cycle in &figures.cycles {
            let _ = writeln!(text, "  cycle of {}: {}", cycle.len(), cycle.join(" "));
        }
        for import in figures.against_layers.iter().flatten() {
            let _ = writeln!(text, "  against layers: {import}");
        }
        for (function, lines) in &figures.long_functions {
            let _ = writeln!(text, "  function of {lines} lines: {function}");
        }
        for file in &figures.small_files {
            let _ = writeln!(text, "  small file: {file}");
        }
        for (item, _) in figures.public_items.iter().flatten().filter(|(_, used)| !used) {
            let _ = writeln!(text, "  pub, in no test: {item}");
        }
    }
    text
}
