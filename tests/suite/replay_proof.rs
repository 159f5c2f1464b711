//! Programs and settings of the comparison of `whatif` with real runs (torch/replay.rs), and its table in docs/whatif.md.
use gpumem_replay::Release;
use gpumem_tests::structure::root;
use std::fs;

/// Releases that are compared if $GPUMEM_TORCH_VERSIONS names no others. Only 2.12 chooses between equal free blocks by their age.
pub(crate) const VERSIONS: [&str; 3] = ["2.4.1", "2.12.1", "2.15.0"];

/// A program of tests/torch/replay.py.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    /// First release line that can run it.
    since: u16,
    /// Whether results depend on when a stream finishes.
    pub(crate) has_streams: bool,
}

const fn program(name: &'static str) -> Program {
    Program { name, since: 1, has_streams: false }
}

const fn with_streams(name: &'static str) -> Program {
    Program { has_streams: true, ..program(name) }
}

/// Threads of this program make requests in an order that differs from run to run.
pub(crate) const WITH_THREADS: &str = "threads";

pub(crate) const PROGRAMS: [Program; 18] = [
    program("gpt"),
    program("checkpointed"),
    program("fragmenting"),
    program("resnet"),
    program("recurrent"),
    program("experts"),
    program("adversarial"),
    program("graphs"),
    with_streams("streams"),
    with_streams("loader"),
    program("generate"),
    program("lora"),
    with_streams("hostile"),
    program("edges"),
    with_streams("crossing"),
    program("captures"),
    Program { since: 8, ..program("mempools") },
    program(WITH_THREADS),
];

/// Programs whose requests are compared in a test of their own: they catch errors, or change the limit, which a recording does not
/// have.
pub(crate) const WITH_LIMITS: [&str; 2] = ["retried", "fractions"];

/// Returns the programs that a release can run.
pub(crate) fn programs(release: Release) -> impl Iterator<Item = &'static Program> {
    PROGRAMS.iter().filter(move |program| Release::new(program.since) <= release)
}

/// Returns the settings that a release has.
pub(crate) fn settings(release: Release) -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(move |setting| Release::new(setting.since) <= release)
}

/// A setting: its name, the process's share of the device, bytes that something else takes, the text.
pub(crate) struct Setting {
    pub(crate) name: &'static str,
    pub(crate) fraction: Option<f64>,
    pub(crate) taken_bytes: u64,
    pub(crate) text: &'static str,
    /// First release line that has it.
    pub(crate) since: u16,
}

pub(crate) const fn plain(name: &'static str, text: &'static str) -> Setting {
    Setting { name, fraction: None, taken_bytes: 0, text, since: 1 }
}

const fn share(name: &'static str, fraction: f64, text: &'static str) -> Setting {
    Setting { fraction: Some(fraction), ..plain(name, text) }
}

pub(crate) const SETTINGS: [Setting; 14] = [
    plain("default", ""),
    plain("expandable", "expandable_segments:True"),
    plain("split32", "max_split_size_mb:32"),
    plain("round4", "roundup_power2_divisions:4"),
    plain("roundlist", "roundup_power2_divisions:[1:2,4:8,16:4,>:2]"),
    share("collection", 0.04, "garbage_collection_threshold:0.6"),
    share("fraction", 0.05, ""),
    share("expandablefraction", 0.035, "expandable_segments:True"),
    share("splitfraction", 0.045, "max_split_size_mb:24"),
    share("collectionsplit", 0.045, "garbage_collection_threshold:0.5,max_split_size_mb:32"),
    Setting { taken_bytes: 15_300_000_000, ..plain("small", "") },
    Setting { taken_bytes: 15_500_000_000, ..plain("smallexpandable", "expandable_segments:True") },
    Setting { since: 11, ..plain("segment64", "large_segment_size_mb:64") },
    Setting { since: 6, ..plain("rounding64", "max_split_size_mb:24,max_non_split_rounding_mb:64") },
];

impl Setting {
    /// Returns the argument of tests/torch/replay.py.
    pub(crate) fn argument(&self) -> String {
        let fraction = self.fraction.map(|fraction| format!("@{fraction}")).unwrap_or_default();
        let taken = if self.taken_bytes > 0 { format!("-{}", self.taken_bytes) } else { String::new() };
        format!("{}{fraction}{taken}={}", self.name, self.text)
    }

    /// Returns whether it limits no memory.
    pub(crate) fn is_unlimited(&self) -> bool {
        self.fraction.is_none() && self.taken_bytes == 0
    }
}

/// Row of the table: numbers of programs, settings, and runs in each of three comparisons.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    version: String,
    counts: [usize; 5],
}

impl Row {
    /// Returns the row of a release whose runs are all equal.
    fn of(version: &str, release: Release) -> Self {
        let settings = settings(release).count();
        let (all, late) =
            (programs(release).count(), programs(release).filter(|program| program.has_streams).count());
        Row {
            version: version.to_owned(),
            counts: [all, settings, (all - 1) * settings, late * settings, settings],
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let version = cells.next().filter(|version| version.starts_with("2."))?;
        let count = |cell: &str| {
            let equal =
                cell.split_once(" of ").map_or(cell, |(equal, all)| if equal == all { all } else { "" });
            equal.parse().ok()
        };
        let counts = cells.map(count).collect::<Option<Vec<usize>>>()?;
        Some(Row { version: version.to_owned(), counts: counts.try_into().ok()? })
    }

    fn text(&self) -> String {
        let [programs, settings, runs @ ..] = self.counts;
        let runs = runs.map(|runs| format!("{runs} of {runs}")).join(" | ");
        format!("| {} | {programs} | {settings} | {runs} |", self.version)
    }
}

fn page() -> String {
    fs::read_to_string(root().join("docs/whatif.md")).expect("the page")
}

/// Checks the row of a release whose runs have been compared, or writes it.
pub(crate) fn check_row(version: &str, release: Release) {
    let row = Row::of(version, release);
    if std::env::var_os("UPDATE_GOLDEN").is_none() {
        let found = page().lines().filter_map(Row::parse).find(|found| found.version == version);
        assert!(found.is_none_or(|found| found == row), "docs/whatif.md lacks: {}", row.text());
        return;
    }
    let page = page();
    let (rows, mut lines): (Vec<&str>, Vec<&str>) = page.lines().partition(|line| Row::parse(line).is_some());
    let mut rows: Vec<Row> = rows.into_iter().filter_map(Row::parse).collect();
    rows.retain(|other| other.version != version);
    rows.push(row);
    rows.sort_by_key(|row| row.version.parse::<Release>().expect("a release"));
    let rows: Vec<String> = rows.iter().map(Row::text).collect();
    let head = lines.iter().position(|line| line.starts_with("| PyTorch | programs |")).expect("the table");
    lines.splice(head + 2..head + 2, rows.iter().map(String::as_str));
    fs::write(root().join("docs/whatif.md"), lines.join("\n") + "\n").expect("written");
}

#[test]
fn table_of_the_page_has_the_programs_and_settings_of_the_comparison() {
    let page = page();
    let rows: Vec<Row> = page.lines().filter_map(Row::parse).collect();
    for version in VERSIONS {
        let row = Row::of(version, version.parse().expect("a release"));
        assert!(rows.contains(&row), "docs/whatif.md lacks: {}", row.text());
    }
    // Other releases may have been compared before the last programs were added.
    for row in &rows {
        let [programs, settings, equal, late, with_threads] = row.counts;
        let now = Row::of(&row.version, row.version.parse().expect("a release")).counts;
        assert!(programs <= now[0] && settings <= now[1] && late <= now[3], "{}", row.text());
        assert_eq!((equal, with_threads, late % settings), ((programs - 1) * settings, settings, 0));
    }
    let (_, measured) = page.split_once("## Measurements").expect("the section");
    for Program { name, .. } in &PROGRAMS {
        assert!(measured.contains(&format!("`{name}`")), "docs/whatif.md does not describe {name}");
    }
}
