//! Recordings of other tools, kept outside the project: tests read them through GPUMEM_SAMPLES.

use std::path::PathBuf;

/// A file among the samples; `None`, with a word why, where they are not.
///
/// # Panics
/// With GPUMEM_TOOLS_REQUIRED set, when the file is not there.
pub fn sample(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("GPUMEM_SAMPLES").filter(|folder| !folder.is_empty());
    let path = folder.map(|folder| PathBuf::from(folder).join(name)).filter(|path| path.exists());
    if path.is_none() {
        gpumem_test_support::skip(
            &format!("GPUMEM_SAMPLES has no {name}"),
            "make test GPUMEM_SAMPLES=FOLDER",
        );
    }
    path
}
