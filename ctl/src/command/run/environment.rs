//! The other parts of the installation, and the variables that the command and its descendants inherit.
//!
//! The parts are next to this program (a build folder, a wheel, an unpacked archive), or where packages install them.

use crate::args::variable;
use crate::when::now_ns;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Ways<'a> {
    pub library: Option<&'a Path>,
    /// Agent socket of the daemon that answers.
    pub agent: Option<&'a Path>,
    /// Recording to write in place of reporting.
    pub record: Option<&'a Path>,
    pub name: Option<&'a str>,
}

#[derive(Debug)]
pub(crate) struct Variables {
    pub set: Vec<(&'static str, OsString)>,
    pub job: String,
}

/// Returns the variables. An existing job id is kept, so that a `run` inside another, or a prolog that sets the id, stays one
/// job.
pub(crate) fn variables(ways: &Ways<'_>) -> Variables {
    let mut set = Vec::new();
    let inherited = variable("GPUMEM_JOB").filter(|_| ways.name.is_none());
    let inherited = inherited.and_then(|job| job.into_os_string().into_string().ok());
    let job = inherited.unwrap_or_else(|| new_job(ways.name));
    set.push(("GPUMEM_JOB", OsString::from(&job)));
    if let Some(library) = ways.library {
        // libcuda loads only one library, so the agent loads the one that was configured before.
        if let Some(next) = variable("CUDA_INJECTION64_PATH").filter(|next| !is_agent(next, library)) {
            set.push(("GPUMEM_NEXT_INJECTION64_PATH", next.into()));
        }
        set.push(("CUDA_INJECTION64_PATH", library.into()));
        // NVTX has only one library and the other tool would not load ours, so it is left to that tool.
        if variable("NVTX_INJECTION64_PATH").is_none_or(|other| is_agent(&other, library)) {
            set.push(("NVTX_INJECTION64_PATH", library.into()));
        }
    }
    if let Some(record) = ways.record {
        set.push(("GPUMEM_RECORD", super::absolute(record).into()));
    } else if let Some(agent) = ways.agent {
        set.push(("GPUMEM_SOCKET", agent.into()));
    }
    Variables { set, job }
}

/// Returns whether a path is the agent or a copy of the agent. Loading it a second time would name everything twice.
fn is_agent(path: &Path, library: &Path) -> bool {
    path == library || path.file_name() == library.file_name()
}

/// Returns a unique job id, made from the time and our pid. It is unique on this machine, and in practice beyond.
fn new_job(name: Option<&str>) -> String {
    let unique = format!("{:x}-{:x}", now_ns() & 0x0fff_ffff_ffff_ffff, std::process::id());
    match name {
        Some(name) => format!("{name}.{unique}"),
        None => unique,
    }
}

pub(crate) const LIBRARY: &str = "libgpumem.so";
/// Name of the agent's folder, if several versions are installed.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the path of the agent, or the places that were searched.
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

/// Searches next to the program, in the folder of its version, and in that of the version in use. Links are resolved, so
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
