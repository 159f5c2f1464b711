//! The structure of the project's source: parsed files, import graph, layers, figures. tests/suite/tidy compares the figures with
//! their limits; the program `figures` (`make figures`) prints them.
//!
//! ```text
//! source    files of a crate, parsed, without test items
//! graph     which file imports from which; cycles
//! layers    the layers of each crate, and imports against them
//! figures   the figures of all crates as a table
//! ```

pub mod figures;
pub mod graph;
pub mod layers;
pub mod source;

use std::path::{Path, PathBuf};

/// The root of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// Folders of the workspace's crates that are part of the product, as the root manifest lists them.
pub fn product_crates() -> Vec<String> {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("a manifest");
    let members = manifest.split_once("members = [").and_then(|(_, rest)| rest.split_once(']'));
    let members = members.expect("members").0.split(',').map(|name| name.trim().trim_matches('"').to_owned());
    members.filter(|name| !name.is_empty() && !name.starts_with("tests")).collect()
}
