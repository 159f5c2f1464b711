//! Recordings of other tools, kept outside the project: tests read them through GPUMEM_SAMPLES.

use std::path::PathBuf;

/// A file among the samples; `None`, with a word why, where they are not.
///
/// # Panics
/// With GPUMEM_SAMPLES_REQUIRED set, when the file is not there: CI must not skip.
pub fn sample(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("GPUMEM_SAMPLES").filter(|folder| !folder.is_empty());
    let path = folder.map(|folder| PathBuf::from(folder).join(name)).filter(|path| path.exists());
    if path.is_none() {
        let required = std::env::var_os("GPUMEM_SAMPLES_REQUIRED").is_some();
        assert!(!required, "GPUMEM_SAMPLES has no {name}");
        eprintln!("skipped: GPUMEM_SAMPLES has no {name}");
    }
    path
}
