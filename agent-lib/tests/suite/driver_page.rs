//! docs/driver.md describes every driver call in cupti-sys: its counting, or the reason why it is not subscribed.

use cupti_sys::ids;
use gpumem::sources::cupti::table::{CALLS, Meaning};
use std::collections::BTreeMap;
use std::path::Path;

/// The page's two parts: a section for each kind of subscribed call, and a row for each group of other calls.
fn parts() -> (Vec<String>, Vec<String>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/driver.md");
    let page = std::fs::read_to_string(path).expect("docs/driver.md");
    let (subscribed, others) = page.split_once("\n## Other calls\n").expect("two parts");
    let sections = subscribed.split("\n### ").skip(1).map(str::to_owned).collect();
    let rows = others.lines().filter(|line| line.starts_with("| `")).map(str::to_owned).collect();
    (sections, rows)
}

/// Parses "`name` id, `name` id".
fn calls(list: &str) -> impl Iterator<Item = (&str, u32)> {
    list.split(", ").map(|call| {
        let (name, id) = call.split_once("` ").unwrap_or_else(|| panic!("docs/driver.md: no call: {call}"));
        (name.trim_start_matches('`'), id.parse().expect("a number"))
    })
}

fn line<'a>(section: &'a str, start: &str) -> &'a str {
    let found = section.lines().find_map(|line| line.strip_prefix(start));
    found.unwrap_or_else(|| panic!("docs/driver.md: no line \"{start}\" in: {section}"))
}

#[test]
fn every_call_is_on_the_page_once() {
    let (sections, rows) = parts();
    let mut told = BTreeMap::new();
    for (section, text) in sections.iter().enumerate() {
        for call in calls(line(text, "Calls: ").trim_end_matches('.')) {
            assert!(
                told.insert(call, Some(section)).is_none(),
                "{call:?} is in two sections of docs/driver.md"
            );
        }
    }
    for row in &rows {
        for call in calls(row[2..].split(" | ").next().expect("a cell")) {
            assert!(told.insert(call, None).is_none(), "{call:?} has two places in docs/driver.md");
        }
    }
    assert_eq!(told.len(), ids::DRIVER.len(), "docs/driver.md lists calls that cupti-sys does not have");
    for call in ids::DRIVER {
        let section = told.get(call).unwrap_or_else(|| panic!("{call:?} is missing in docs/driver.md"));
        let is_subscribed = CALLS.iter().any(|(id, _)| *id == call.1);
        assert_eq!(
            section.is_some(),
            is_subscribed,
            "{call:?}: subscribed or not, by table.rs and docs/driver.md"
        );
    }
    let mut places: Vec<(Meaning, usize)> = Vec::new();
    for (id, meaning) in CALLS {
        let section = told.iter().find_map(|((_, number), section)| section.filter(|_| number == id));
        let section = section.expect("checked above");
        match places.iter().find(|(known, _)| known == meaning) {
            Some((_, known)) => assert_eq!(*known, section, "{meaning:?} is described in two sections"),
            None => places.push((*meaning, section)),
        }
    }
}

#[test]
fn every_section_names_its_sources_and_its_check() {
    for section in parts().0 {
        let (sources, check) = line(&section, "Source: ").split_once("; check: `").expect("both");
        assert!(check.ends_with("`.") && check.contains('.'), "{check}");
        for source in sources.split(", ") {
            assert!(["headers", "documentation", "assumption"].contains(&source), "{source}");
        }
    }
}
