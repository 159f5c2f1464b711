//! Variables that the command and its descendants inherit.

use std::ffi::OsString;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The available means of reporting.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ways<'a> {
    /// Path of libgpumem.so.
    pub library: Option<&'a Path>,
    /// Agent socket of the daemon that answers.
    pub agent: Option<&'a Path>,
    /// Recording to write in place of reporting.
    pub record: Option<&'a Path>,
    /// Name of the job.
    pub name: Option<&'a str>,
}

/// The variables to set.
#[derive(Debug)]
pub(crate) struct Variables {
    /// Names and values.
    pub set: Vec<(&'static str, OsString)>,
    /// Id of the job.
    pub job: String,
}

/// Returns the variables. An existing job id is kept, so that a `run` inside another, or a prolog that sets the id, stays one
/// job.
pub(crate) fn variables(ways: &Ways<'_>) -> Variables {
    let there = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let mut set = Vec::new();
    let inherited =
        there("GPUMEM_JOB").and_then(|job| job.into_string().ok()).filter(|_| ways.name.is_none());
    let job = inherited.unwrap_or_else(|| new_job(ways.name));
    set.push(("GPUMEM_JOB", OsString::from(&job)));
    if let Some(library) = ways.library {
        // libcuda loads only one library, so the agent loads the one that was configured before.
        if let Some(next) = there("CUDA_INJECTION64_PATH").filter(|next| !is_agent(Path::new(next), library))
        {
            set.push(("GPUMEM_NEXT_INJECTION64_PATH", next));
        }
        set.push(("CUDA_INJECTION64_PATH", library.into()));
        // NVTX has only one library and the other tool would not load ours, so it is left to that tool.
        if there("NVTX_INJECTION64_PATH").is_none_or(|other| is_agent(Path::new(&other), library)) {
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

/// Returns whether a path is the agent or another copy of it. Loading it after itself would name everything twice.
fn is_agent(path: &Path, library: &Path) -> bool {
    path == library || path.file_name() == library.file_name()
}

/// Returns a unique job id, made from the time and our pid. It is unique on this machine, and in practice beyond.
fn new_job(name: Option<&str>) -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let unique = format!("{:x}-{:x}", since & 0x0fff_ffff_ffff_ffff, std::process::id());
    match name {
        Some(name) => format!("{name}.{unique}"),
        None => unique,
    }
}
