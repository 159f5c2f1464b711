//! The documents: generated pages match the source, and their examples are executed.
mod blocks;
mod checks;
mod references;
mod stage;

use std::path::Path;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

#[test]
fn c_reference_matches_the_header() {
    references::c_api();
}

#[test]
fn python_reference_matches_the_docstrings() {
    references::python_api();
}

#[test]
fn variable_reference_matches_the_programs() {
    references::environment();
}

#[test]
fn examples_of_the_documents_run() {
    blocks::all();
}

#[test]
fn every_page_is_linked_and_its_links_resolve() {
    blocks::links();
}

/// Lane `prometheus`.
mod prometheus {
    #[test]
    fn promtool_accepts_queries_and_configurations() {
        if let Some(promtool) = gpumem_tests::live::prometheus::tool("promtool") {
            super::blocks::of_prometheus(&promtool);
        }
    }
}
