//! Where the other parts of an installation are, seen from this program: beside it (a build folder, a wheel,
//! an unpacked archive) or where packages put them.

use std::path::{Path, PathBuf};

/// The agent.
pub const LIBRARY: &str = "libgpumem.so";

/// Where the agent is; if nowhere, what was looked at.
///
/// # Errors
/// The places, in words.
pub fn find() -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("GPUMEM_LIBRARY").filter(|value| !value.is_empty()) {
        let named = super::absolute(Path::new(&named));
        return if named.is_file() {
            Ok(named)
        } else {
            Err(format!("$GPUMEM_LIBRARY is {}", named.display()))
        };
    }
    let Some(folder) = own_folder() else { return Err("the program's own place is not known".into()) };
    let places = [folder.join(LIBRARY), folder.join("../lib/gpumemd").join(LIBRARY)];
    let found = places.iter().find_map(|place| place.canonicalize().ok());
    found.ok_or_else(|| format!("not in {0} nor in {0}/../lib/gpumemd", folder.display()))
}

/// The daemon's program: beside this one, else as a shell finds it.
pub fn daemon() -> Option<PathBuf> {
    const PROGRAM: &str = "gpumemd";
    let beside = own_folder().map(|folder| folder.join(PROGRAM)).filter(|path| is_program(path));
    beside.or_else(|| in_path(Path::new(PROGRAM)))
}

/// A program as execvp(3) finds it.
pub fn in_path(name: &Path) -> Option<PathBuf> {
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
