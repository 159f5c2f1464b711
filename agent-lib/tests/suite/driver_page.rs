//! docs/driver.md: what the driver tells of each kind of memory and what it does not, made from the table of calls.

use cupti_sys::ids;
use gpumem::cupti::coverage::{Evidence, KINDS, UNHEARD};
use gpumem::cupti::table::CALLS;
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
        assert_eq!(usize::from(heard) + unheard, 1, "{name} is listened to, or coverage.rs says why not");
    }
}

fn page() -> String {
    let mut page = String::from(
        "# What the driver tells, and what it does not

<!-- made by agent-lib/tests/suite/driver_page.rs from agent-lib/src/cupti/: UPDATE_GOLDEN=1 -->

The agent subscribes to the CUDA driver's callbacks through CUPTI. This page lists each kind of driver memory: the calls that are listened
to, with their callback ids, and what is booked of them. Memory that no callback tells of is in Untrackable.

*Evidence*: **header** and **documentation** are NVIDIA's; **belief** is settled on hardware by the named check of tests/gpu.

## Calls that are listened to
",
    );
    for kind in KINDS {
        let evidence = kind.evidence.iter().map(|evidence| match evidence {
            Evidence::Header => "header",
            Evidence::Documentation => "documentation",
            Evidence::Belief => "belief",
        });
        let evidence = evidence.collect::<Vec<_>>().join(", ");
        let ids = CALLS.iter().filter(|(_, meaning)| kind.meanings.contains(meaning)).map(|(id, _)| *id);
        let _ = write!(
            page,
            "\n### {}\n\n{}\n\nCalls: {}.\nEvidence: {evidence}; check: `{}`.\n",
            kind.name,
            kind.booked,
            calls(ids),
            kind.check
        );
    }
    page.push_str("\n## Calls that are not\n\n| calls | why, and what is shown |\n|---|---|\n");
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
