//! docs/driver.md, generated from the table of driver calls.

use cupti_sys::ids;
use gpumem::sources::cupti::coverage::{Evidence, KINDS, UNHEARD};
use gpumem::sources::cupti::table::CALLS;
use std::fmt::Write;
use std::path::Path;

fn name_of(id: u32) -> &'static str {
    let name = ids::DRIVER.iter().find(|(_, number)| *number == id).map(|(name, _)| *name);
    name.unwrap_or_else(|| panic!("{id} has no name in cupti-sys"))
}

fn calls(ids: impl Iterator<Item = u32>) -> String {
    ids.map(|id| format!("`{}` {id}", name_of(id))).collect::<Vec<_>>().join(", ")
}

#[test]
fn every_call_has_its_place_on_the_page() {
    for (id, meaning) in CALLS {
        let kinds = KINDS.iter().filter(|kind| kind.meanings.contains(meaning)).count();
        assert_eq!(kinds, 1, "{}: {meaning:?} belongs to {kinds} kinds of coverage.rs", name_of(*id));
    }
    for (name, id) in ids::DRIVER {
        let heard = CALLS.iter().any(|(call, _)| call == id);
        let unheard = UNHEARD.iter().filter(|unheard| unheard.ids.contains(id)).count();
        assert_eq!(usize::from(heard) + unheard, 1, "{name} is in table.rs, or in UNHEARD of coverage.rs");
    }
}

fn page() -> String {
    let mut page = String::from(
        "# Driver calls: what is counted, and what is not

<!-- made by agent-lib/tests/suite/driver_page.rs from agent-lib/src/sources/cupti/: UPDATE_GOLDEN=1 -->

The agent subscribes to the CUDA driver's callbacks through CUPTI. For each kind of driver memory, this page lists the subscribed calls with
their callback ids and says which bytes are counted. Memory without a callback is in Untrackable.

Sources of each statement: NVIDIA's **headers**, NVIDIA's **documentation**, or an **assumption** that the named check of tests/gpu tests on
hardware.

## Subscribed calls
",
    );
    for kind in KINDS {
        let evidence = kind.evidence.iter().map(|evidence| match evidence {
            Evidence::Header => "headers",
            Evidence::Documentation => "documentation",
            Evidence::Belief => "assumption",
        });
        let evidence = evidence.collect::<Vec<_>>().join(", ");
        let ids = CALLS.iter().filter(|(_, meaning)| kind.meanings.contains(meaning)).map(|(id, _)| *id);
        let _ = write!(
            page,
            "\n### {}\n\n{}\n\nCalls: {}.\nSource: {evidence}; check: `{}`.\n",
            kind.name,
            kind.counted,
            calls(ids),
            kind.check
        );
    }
    page.push_str("\n## Other calls\n\n| calls | why they are not subscribed |\n|---|---|\n");
    for unheard in UNHEARD {
        let _ = writeln!(page, "| {} | {} |", calls(unheard.ids.iter().copied()), unheard.reason);
    }
    page
}

#[test]
fn the_page_is_what_the_table_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/driver.md");
    let fresh = page();
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        std::fs::write(&path, &fresh).expect("written");
    }
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(text == fresh, "docs/driver.md is stale: UPDATE_GOLDEN=1 writes it anew");
}
