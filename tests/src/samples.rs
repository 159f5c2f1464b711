//! Recordings of other tools, which are not part of the project; GPUMEM_SAMPLES names their folder.

use std::path::PathBuf;

/// Returns the path of a sample; `None` with a message if it is not available.
///
/// # Panics
/// If it is missing and GPUMEM_TOOLS_REQUIRED is set.
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
