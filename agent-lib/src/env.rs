//! Every environment variable that the agent reads. They are read once, while it starts, on the thread that starts it:
//! later the program may be changing them.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// `1`: do nothing at all.
pub const DISABLE: &str = "GPUMEM_DISABLE";
/// The daemon's socket.
pub const SOCKET: &str = "GPUMEM_SOCKET";
/// Write a recording to this file instead of connecting; `%p` is the pid.
pub const RECORD: &str = "GPUMEM_RECORD";
/// Name of the job that this process belongs to.
pub const JOB: &str = "GPUMEM_JOB";
/// Slots in the ring; a power of two.
pub const RING_SLOTS: &str = "GPUMEM_RING_SLOTS";
/// Rows in the live table.
pub const LIVE_ROWS: &str = "GPUMEM_LIVE_ROWS";
/// Bytes for names.
pub const NAME_BYTES: &str = "GPUMEM_NAME_BYTES";
/// The libcupti to use.
pub const CUPTI_PATH: &str = "GPUMEM_CUPTI_PATH";
/// Another tool's injection library, to be loaded first.
pub const NEXT_INJECTION: &str = "GPUMEM_NEXT_INJECTION64_PATH";

/// `0` switches a layer of names off: everything about PyTorch.
pub const TORCH: &str = "GPUMEM_TORCH";
/// `0`: no names from Python frames.
pub const FRAMES: &str = "GPUMEM_FRAMES";
/// `0`: no names for the backward pass.
pub const AUTOGRAD: &str = "GPUMEM_AUTOGRAD";
/// `0`: no code of ours runs in the interpreter unless the program imports `gpumem`.
pub const PYTHON: &str = "GPUMEM_PYTHON";
/// `0`: NVTX ranges are not scopes.
pub const NVTX: &str = "GPUMEM_NVTX";
/// `0`: what nothing names is not called after the function that asked for it.
pub const SITES: &str = "GPUMEM_SITES";
/// NVTX domains whose ranges are scopes beside the default one, with commas between; `*` for all.
pub const NVTX_DOMAINS: &str = "GPUMEM_NVTX_DOMAINS";

/// `1`: NVTX ranges that are started and ended, which belong to the process, are the tag of threads without another one.
pub const NVTX_RANGES: &str = "GPUMEM_NVTX_RANGES";
/// What NVTX loads; usually this library, as the driver's variable names it.
pub const NVTX_INJECTION: &str = "NVTX_INJECTION64_PATH";

/// Kineto's: it finalizes CUPTI some time after each trace.
pub const TEARDOWN: &str = "TEARDOWN_CUPTI";

/// Facts about rank and job that launchers leave in the environment, and what a Hello calls them. The first that is
/// set counts.
const CLAIMS: &[(&str, &[&str])] = &[
    ("job", &[JOB]),
    ("rank", &["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]),
    ("local_rank", &["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    ("world_size", &["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]),
    ("slurm_job", &["SLURM_JOB_ID"]),
    ("slurm_step", &["SLURM_STEP_ID"]),
    ("torchelastic_run_id", &["TORCHELASTIC_RUN_ID"]),
];

/// What was read.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// See [`DISABLE`].
    pub disabled: bool,
    /// Where the daemon may listen, best first.
    pub sockets: Vec<PathBuf>,
    /// The last of `sockets` lies in a directory that anybody could have made: its owner is looked at first.
    pub doubtful_socket: Option<PathBuf>,
    /// See [`RECORD`].
    pub record: Option<PathBuf>,
    /// See [`RING_SLOTS`].
    pub ring_slots: u64,
    /// See [`LIVE_ROWS`].
    pub live_rows: u64,
    /// See [`NAME_BYTES`].
    pub name_bytes: u64,
    /// See [`CUPTI_PATH`].
    pub cupti: Option<PathBuf>,
    /// Places where toolkits and environments keep a libcupti.
    pub cuda_homes: Vec<PathBuf>,
    /// $CONDA_PREFIX.
    pub conda: Option<PathBuf>,
    /// See [`NEXT_INJECTION`].
    pub next_injection: Option<PathBuf>,
    /// See [`TEARDOWN`].
    pub teardown: bool,
    /// Which layers of names may work.
    pub layers: Layers,
    /// See [`NVTX_DOMAINS`].
    pub nvtx_domains: Vec<String>,
    /// See [`NVTX_RANGES`].
    pub nvtx_ranges: bool,
    /// See [`NVTX_INJECTION`].
    pub nvtx_injection: Option<PathBuf>,
    /// `key=value` lines for the Hello.
    pub claims: String,
}

/// Kill switches; all are on unless the environment says `0`.
#[derive(Debug, Clone, Copy)]
pub struct Layers {
    /// See [`TORCH`].
    pub torch: bool,
    /// See [`FRAMES`].
    pub frames: bool,
    /// See [`AUTOGRAD`].
    pub autograd: bool,
    /// See [`PYTHON`].
    pub python: bool,
    /// See [`NVTX`].
    pub nvtx: bool,
    /// See [`SITES`].
    pub sites: bool,
}

impl Default for Layers {
    fn default() -> Self {
        Layers { torch: true, frames: true, autograd: true, python: true, nvtx: true, sites: true }
    }
}

impl Layers {
    fn read() -> Self {
        let on = |name| get(name).is_none_or(|value| value != "0");
        Layers {
            torch: on(TORCH),
            frames: on(FRAMES),
            autograd: on(AUTOGRAD),
            python: on(PYTHON),
            nvtx: on(NVTX),
            sites: on(SITES),
        }
    }
}

fn get(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// An MPS server makes contexts for other users' programs: the kernel gives their memory to them, and whoever listens inside it
/// listens to all of them. It inherits the variables from the shell or job that started its control daemon. By its file: a
/// kernel's name of 15 letters is also that of the control daemon, which never calls the driver, and can be changed.
fn serves_others() -> bool {
    let program = std::fs::read_link("/proc/self/exe").ok();
    // What was replaced by an update while it runs ends in " (deleted)".
    let name = program.as_ref().and_then(|program| program.file_name()?.to_str());
    name.is_some_and(|name| name.split(' ').next() == Some("nvidia-cuda-mps-server"))
}

fn number(name: &str, default: u64, low: u64, high: u64) -> u64 {
    let value = get(name).and_then(|value| value.to_str()?.parse::<u64>().ok());
    value.map_or(default, |value| value.clamp(low, high))
}

/// `%p` in the file's name is the pid.
fn with_pid(path: &OsStr, pid: u32) -> PathBuf {
    match path.to_str() {
        Some(text) => text.replace("%p", &pid.to_string()).into(),
        None => path.into(),
    }
}

impl Settings {
    /// Reads the environment.
    pub fn read(pid: u32, uid: u32) -> Self {
        let mut sockets = Vec::new();
        let mut doubtful_socket = None;
        match get(SOCKET) {
            Some(path) => sockets.push(path.into()),
            None => {
                if let Some(directory) = get("XDG_RUNTIME_DIR") {
                    sockets.push(PathBuf::from(directory).join("gpumem/agent.sock"));
                }
                sockets.push("/run/gpumemd/agent.sock".into());
                let doubtful = PathBuf::from(format!("/tmp/gpumem-{uid}/agent.sock"));
                sockets.push(doubtful.clone());
                doubtful_socket = Some(doubtful);
            }
        }
        let mut claims = String::new();
        for (claim, names) in CLAIMS {
            let value = names.iter().find_map(|name| get(name));
            if let Some(value) = value.as_ref().and_then(|value| value.to_str()) {
                let line = value.lines().next().unwrap_or_default();
                claims.push_str(&format!("{claim}={line}\n"));
            }
        }
        let homes = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];
        Settings {
            disabled: get(DISABLE).is_some_and(|value| value != "0") || serves_others(),
            sockets,
            doubtful_socket,
            record: get(RECORD).map(|path| with_pid(&path, pid)),
            ring_slots: number(RING_SLOTS, 1 << 16, 2, 1 << 24),
            live_rows: number(LIVE_ROWS, 1 << 18, 1, 1 << 24),
            name_bytes: number(NAME_BYTES, 8 << 20, 4096, 1 << 30) & !7,
            cupti: get(CUPTI_PATH).map(Into::into),
            cuda_homes: homes.iter().filter_map(|name| get(name)).map(Into::into).collect(),
            conda: get("CONDA_PREFIX").map(Into::into),
            next_injection: get(NEXT_INJECTION).map(Into::into),
            teardown: get(TEARDOWN).is_some_and(|value| value != "0"),
            layers: Layers::read(),
            nvtx_domains: get(NVTX_DOMAINS)
                .map(|value| value.to_string_lossy().split(',').map(|name| name.trim().to_owned()).collect())
                .unwrap_or_default(),
            nvtx_ranges: get(NVTX_RANGES).is_some_and(|value| value != "0"),
            nvtx_injection: get(NVTX_INJECTION).map(Into::into),
            claims,
        }
    }
}
