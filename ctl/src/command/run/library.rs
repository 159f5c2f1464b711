//! Finds the other parts of the installation: next to this program (a build folder, a wheel, an unpacked archive), or where
//! packages install them.

use std::path::{Path, PathBuf};

/// File name of the agent.
pub(crate) const LIBRARY: &str = "libgpumem.so";
/// Name of the agent's folder, if several versions are installed.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the path of the agent.
///
/// # Errors
/// If it is not found; lists the places that were searched.
pub(crate) fn find() -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("GPUMEM_LIBRARY").filter(|value| !value.is_empty()) {
        let named = super::absolute(Path::new(&named));
        return if named.is_file() {
            Ok(named)
        } else {
            Err(format!("$GPUMEM_LIBRARY is {}", named.display()))
        };
    }
    let Some(folder) = own_folder() else { return Err("the program's own place is not known".into()) };
    found_from(&folder)
        .ok_or_else(|| format!("not in {0} nor in {0}/../lib/gpumem/{VERSION}", folder.display()))
}

/// Searches next to the program, in the folder of its own version, and in that of the version in use. Links are resolved, so
/// processes never get a path through `current`. So a job keeps the version with which it began, and installations preserve that
/// version for it.
fn found_from(folder: &Path) -> Option<PathBuf> {
    let versions = folder.join("../lib/gpumem");
    let places = [folder.to_owned(), versions.join(VERSION), versions.join("current")];
    places.iter().find_map(|place| place.join(LIBRARY).canonicalize().ok())
}

/// Returns the daemon's program: next to this one, else from PATH.
pub(crate) fn daemon() -> Option<PathBuf> {
    const PROGRAM: &str = "gpumemd";
    let beside = own_folder().map(|folder| folder.join(PROGRAM)).filter(|path| is_program(path));
    beside.or_else(|| in_path(Path::new(PROGRAM)))
}

/// Returns a program as execvp(3) finds it.
pub(crate) fn in_path(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 || name.is_absolute() {
        return Some(name.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

fn own_folder() -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.parent()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_agent_of_the_own_version_is_found_before_that_in_use() {
        let root = std::env::temp_dir().join(format!("gpumemctl-library-{}", std::process::id()));
        let versions = root.join("lib/gpumem");
        let put = |folder: &Path| {
            fs::create_dir_all(folder).expect("a folder");
            fs::write(folder.join(LIBRARY), "").expect("a file");
        };
        let bin = root.join("bin");
        fs::create_dir_all(&bin).expect("a folder");
        assert_eq!(found_from(&bin), None);
        put(&versions.join("9.9.9"));
        std::os::unix::fs::symlink("9.9.9", versions.join("current")).expect("a link");
        let real = root.canonicalize().expect("a folder");
        let of = |version: &str| Some(real.join("lib/gpumem").join(version).join(LIBRARY));
        assert_eq!(found_from(&bin), of("9.9.9"), "never by the name `current`");
        put(&versions.join(VERSION));
        assert_eq!(found_from(&bin), of(VERSION));
        put(&bin);
        assert_eq!(found_from(&bin), Some(real.join("bin").join(LIBRARY)));
        fs::remove_dir_all(root).expect("removed");
    }
}
