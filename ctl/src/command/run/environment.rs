//! What the command and everything that it starts inherit.

use std::ffi::OsString;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// What is there to report with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ways<'a> {
    /// libgpumem.so.
    pub library: Option<&'a Path>,
    /// The agent socket of the daemon that answers.
    pub agent: Option<&'a Path>,
    /// The recording to write instead.
    pub record: Option<&'a Path>,
    /// A name for the job.
    pub name: Option<&'a str>,
}

/// Variables to set.
#[derive(Debug)]
pub(crate) struct Variables {
    /// Name and value.
    pub set: Vec<(&'static str, OsString)>,
    /// The job's id.
    pub job: String,
}

/// The variables. A job that is there already is kept, so that a `run` inside another, or a prolog that
/// names the job, stays one job.
pub(crate) fn variables(ways: &Ways<'_>) -> Variables {
    let there = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let mut set = Vec::new();
    let inherited =
        there("GPUMEM_JOB").and_then(|job| job.into_string().ok()).filter(|_| ways.name.is_none());
    let job = inherited.unwrap_or_else(|| new_job(ways.name));
    set.push(("GPUMEM_JOB", OsString::from(&job)));
    if let Some(library) = ways.library {
        // libcuda loads one library only: the agent hands over to the one that was to be loaded.
        if let Some(next) = there("CUDA_INJECTION64_PATH").filter(|next| !is_agent(Path::new(next), library))
        {
            set.push(("GPUMEM_NEXT_INJECTION64_PATH", next));
        }
        set.push(("CUDA_INJECTION64_PATH", library.into()));
        // Another tool's place for ranges is left to it: NVTX has one, and hands over to nobody.
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

/// The agent itself, or another copy of it: loading it after itself would name everything twice.
fn is_agent(path: &Path, library: &Path) -> bool {
    path == library || path.file_name() == library.file_name()
}

/// Unique on this machine and, for all that matters, beyond it: when, and who.
fn new_job(name: Option<&str>) -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let unique = format!("{:x}-{:x}", since & 0x0fff_ffff_ffff_ffff, std::process::id());
    match name {
        Some(name) => format!("{name}.{unique}"),
        None => unique,
    }
}
