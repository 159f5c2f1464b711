//! Finds libgpumem.so and gpumemd, and makes the variables that the command and its descendants inherit.
//!
//! Both files are next to gpumemctl (in a build folder, a wheel, an unpacked archive), or where packages install them.

use crate::args::{Run, variable};
use crate::when::now_ns;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Returns the job's id. Without a name an inherited id is kept, so that a `run` inside another one, or a Slurm prolog that sets
/// the id, makes no second job. A new id has the time and our pid, which makes it unique on this machine and in practice beyond.
pub(crate) fn job(name: Option<&str>) -> String {
    let inherited = variable("GPUMEM_JOB").filter(|_| name.is_none());
    if let Some(job) = inherited.and_then(|job| job.into_os_string().into_string().ok()) {
        return job;
    }
    let unique = format!("{:x}-{:x}", now_ns() & 0x0fff_ffff_ffff_ffff, std::process::id());
    match name {
        Some(name) => format!("{name}.{unique}"),
        None => unique,
    }
}

/// Returns the variables for the command. `library` is the agent's path, `agent` the daemon's socket for agents.
pub(crate) fn variables(
    job: &str,
    library: Option<&Path>,
    agent: Option<&Path>,
    args: &Run,
) -> Vec<(&'static str, OsString)> {
    let mut set = vec![("GPUMEM_JOB", OsString::from(job))];
    if let Some(library) = library {
        // libcuda loads only one library, so the agent itself loads the library that the variable named before.
        if let Some(next) = variable("CUDA_INJECTION64_PATH").filter(|next| !is_agent(next, library)) {
            set.push(("GPUMEM_NEXT_INJECTION64_PATH", next.into()));
        }
        set.push(("CUDA_INJECTION64_PATH", library.into()));
        // NVTX has only one library and another tool would not load ours, so a variable that names another tool is kept.
        if variable("NVTX_INJECTION64_PATH").is_none_or(|other| is_agent(&other, library)) {
            set.push(("NVTX_INJECTION64_PATH", library.into()));
        }
    }
    let record = args.record.as_deref().map(|record| ("GPUMEM_RECORD", super::absolute(record).into()));
    set.extend(record.or_else(|| Some(("GPUMEM_SOCKET", agent?.into()))));
    set
}

/// Returns whether a path is the agent or a copy of the agent. Loading it a second time would name everything twice.
fn is_agent(path: &Path, library: &Path) -> bool {
    path == library || path.file_name() == library.file_name()
}

pub(crate) const LIBRARY: &str = "libgpumem.so";
/// Name of the agent's folder below lib/gpumem.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the path of the agent. The error is a text on the places that were searched.
pub(crate) fn library() -> Result<PathBuf, String> {
    if let Some(named) = variable("GPUMEM_LIBRARY") {
        let named = super::absolute(&named);
        let why = format!("$GPUMEM_LIBRARY is {}", named.display());
        return if named.is_file() { Ok(named) } else { Err(why) };
    }
    let Some(folder) = own_folder() else { return Err("the folder of gpumemctl is unknown".into()) };
    found_from(&folder)
        .ok_or_else(|| format!("not in {0} nor in {0}/../lib/gpumem/{VERSION}", folder.display()))
}

/// Searches the agent next to gpumemctl, in the folder of gpumemctl's version, and in that of the version in use (`current`). The
/// link `current` is resolved, so that a job keeps the version with which it began after an update.
fn found_from(folder: &Path) -> Option<PathBuf> {
    let versions = folder.join("../lib/gpumem");
    let places = [folder.to_owned(), versions.join(VERSION), versions.join("current")];
    places.iter().find_map(|place| place.join(LIBRARY).canonicalize().ok())
}

/// Returns the daemon's program: next to gpumemctl, else from PATH.
pub(crate) fn daemon() -> Option<PathBuf> {
    const PROGRAM: &str = "gpumemd";
    let beside = own_folder().map(|folder| folder.join(PROGRAM)).filter(|path| is_program(path));
    beside.or_else(|| in_path(Path::new(PROGRAM)))
}

/// Returns the path of a program, searched as execvp(3) does.
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
