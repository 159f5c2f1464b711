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
fn the_reference_of_the_c_api_is_its_headers() {
    references::c_api();
}

#[test]
fn the_reference_of_python_is_its_docstrings() {
    references::python_api();
}

#[test]
fn the_reference_of_variables_is_what_programs_read() {
    references::environment();
}

#[test]
fn what_the_documents_show_is_run() {
    blocks::all();
}

#[test]
fn each_page_is_found_and_leads_somewhere() {
    blocks::links();
}

/// Lane `prometheus`.
mod prometheus {
    #[test]
    fn queries_and_configurations_are_prometheus_own() {
        if let Some(promtool) = gpumem_tests::live::prometheus::tool("promtool") {
            super::blocks::of_prometheus(&promtool);
        }
    }
}
