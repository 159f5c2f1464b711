//! Every environment variable that the agent reads, except GPUMEM_FAULT of debug builds (fault_injection.rs). Each is read once,
//! while the agent starts, because the program may change it later.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// `1`: do nothing at all.
pub(crate) const DISABLE: &str = "GPUMEM_DISABLE";
/// The daemon's socket.
pub(crate) const SOCKET: &str = "GPUMEM_SOCKET";
/// Write a recording to this file instead of connecting; `%p` is the pid.
pub(crate) const RECORD: &str = "GPUMEM_RECORD";
/// Absolute paths of directories below which the daemon may have recordings and dumps created (`gpumemctl record`), with colons
/// between. Default: the current directory at the start of the agent, and that for temporary files.
pub(crate) const RECORD_DIRS: &str = "GPUMEM_RECORD_DIRS";
/// Name of the job that this process belongs to.
pub(crate) const JOB: &str = "GPUMEM_JOB";
/// Number of records that the ring holds before the sender must have sent them; rounded up to a power of two.
pub(crate) const RING_SLOTS: &str = "GPUMEM_RING_SLOTS";
/// Longest time in ms for which the end of the program waits until its last records are sent.
pub(crate) const EXIT_WAIT: &str = "GPUMEM_EXIT_WAIT_MS";
/// Number of live allocations and blocks that the live table has room for.
pub(crate) const LIVE_ROWS: &str = "GPUMEM_LIVE_ROWS";
/// Size in bytes of the memory for names of allocations.
pub(crate) const NAME_BYTES: &str = "GPUMEM_NAME_BYTES";
/// The libcupti to use.
pub(crate) const CUPTI_PATH: &str = "GPUMEM_CUPTI_PATH";
/// Another tool's injection library, to be loaded first.
pub(crate) const NEXT_INJECTION: &str = "GPUMEM_NEXT_INJECTION64_PATH";

/// `0`: nothing of PyTorch is observed (blocks, modules, backward pass, out-of-memory reports).
pub(crate) const TORCH: &str = "GPUMEM_TORCH";
/// `0`: no names from Python frames.
pub(crate) const FRAMES: &str = "GPUMEM_FRAMES";
/// `0`: no names for the backward pass.
pub(crate) const AUTOGRAD: &str = "GPUMEM_AUTOGRAD";
/// `0`: the agent runs no Python code in the interpreter, unless the program imports `gpumem`.
pub(crate) const PYTHON: &str = "GPUMEM_PYTHON";
/// `0`: NVTX ranges are not scopes.
pub(crate) const NVTX: &str = "GPUMEM_NVTX";
/// `0`: memory without another name is not named after the Python line or the function that allocated it.
pub(crate) const SITES: &str = "GPUMEM_SITES";
/// `0`: when PyTorch runs out of memory, the variables that keep tensors are not searched.
pub(crate) const KEEPERS: &str = "GPUMEM_KEEPERS";
/// `1`: memory of PyTorch modules also gets the program's source line: `report --by line`.
pub(crate) const LINES: &str = "GPUMEM_LINES";
/// NVTX domains whose ranges are scopes, in addition to the default one, separated by commas; `*` for all.
pub(crate) const NVTX_DOMAINS: &str = "GPUMEM_NVTX_DOMAINS";

/// `1`: NVTX ranges of the process (nvtxRangeStart to nvtxRangeEnd) name the memory of threads without another name.
pub(crate) const NVTX_RANGES: &str = "GPUMEM_NVTX_RANGES";
/// Read by NVTX: the injection library that it loads; usually libgpumem.so, as in CUDA_INJECTION64_PATH.
pub(crate) const NVTX_INJECTION: &str = "NVTX_INJECTION64_PATH";

/// Read by Kineto, PyTorch's profiler: if set, Kineto finalizes CUPTI some time after each trace.
pub(crate) const TEARDOWN: &str = "TEARDOWN_CUPTI";

/// Variables of rank, local rank and world size, for each launcher. The first launcher whose rank is set counts, because a
/// launcher started by another inherits its variables. For example, an `mpirun` in a Slurm job inherits SLURM_PROCID.
const RANKS: &[[&str; 3]] = &[
    ["RANK", "LOCAL_RANK", "WORLD_SIZE"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"],
    ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"],
    ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"],
    ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"],
];

const RANK_CLAIMS: [&str; 3] = ["rank", "local_rank", "world_size"];

/// Set in tasks of Slurm. A batch script is not a task, although its SLURM_PROCID is 0.
const SLURM_STEP: &str = "SLURM_STEP_ID";

/// Further variables of launchers, Kubernetes and PyTorch, with their names in the Hello, the agent's first message to the
/// daemon. POD_NAME and so on are conventional names for the downward API. The downward API does not provide the container's
/// name, and CONTAINER_NAME has other meanings elsewhere.
const CLAIMS: &[(&str, &str)] = &[
    ("job", JOB),
    ("slurm_job", "SLURM_JOB_ID"),
    ("slurm_step", SLURM_STEP),
    ("torchelastic_run_id", "TORCHELASTIC_RUN_ID"),
    ("pod", "POD_NAME"),
    ("namespace", "POD_NAMESPACE"),
    ("pod_uid", "POD_UID"),
    // Settings of PyTorch's allocator, for a replay of what the program requested.
    ("alloc_conf", "PYTORCH_ALLOC_CONF"),
    ("cuda_alloc_conf", "PYTORCH_CUDA_ALLOC_CONF"),
    // Settings of libraries, so that advice does not repeat them.
    ("cublas_workspace", "CUBLAS_WORKSPACE_CONFIG"),
    ("nccl_buffsize", "NCCL_BUFFSIZE"),
    ("module_loading", "CUDA_MODULE_LOADING"),
];

/// Returns `key=value` lines for a Hello; `get` returns the value of a variable.
fn claims(get: impl Fn(&str) -> Option<OsString>) -> String {
    let mut lines = String::new();
    let mut claim = |name: &str, variable: &str| {
        let value = get(variable);
        if let Some(line) = value.as_ref().and_then(|value| value.to_str()?.lines().next()) {
            lines.push_str(&format!("{name}={line}\n"));
        }
    };
    CLAIMS.iter().for_each(|(name, variable)| claim(name, variable));
    let is_task = |rank: &str| rank != "SLURM_PROCID" || get(SLURM_STEP).is_some();
    if let Some(variables) = RANKS.iter().find(|[rank, ..]| get(rank).is_some() && is_task(rank)) {
        RANK_CLAIMS.iter().zip(variables).for_each(|(name, variable)| claim(name, variable));
    }
    lines
}

/// Returns a line with the name of this program. After the process has ended, the daemon has no other source for its name.
fn program() -> String {
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    comm.lines().next().map_or_else(String::new, |comm| format!("comm={comm}\n"))
}

/// Socket of the system's daemon.
pub(crate) const SYSTEM_SOCKET: &str = "/run/gpumemd/agent.sock";

/// The agent's settings, as read from the environment.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    pub disabled: bool,
    /// Sockets on which a daemon may listen, in the order in which they are tried.
    pub sockets: Vec<PathBuf>,
    /// The last of `sockets`, if any user could have made its directory. The directory's owner is checked before connecting.
    pub doubtful_socket: Option<PathBuf>,
    pub record: Option<PathBuf>,
    /// The directories of GPUMEM_RECORD_DIRS, without symbolic links in their paths.
    pub record_dirs: Vec<PathBuf>,
    pub ring_slots: u64,
    pub exit_wait_ms: u64,
    pub live_rows: u64,
    pub name_bytes: u64,
    pub cupti: Option<PathBuf>,
    /// Values of CUDA_HOME, CUDA_PATH and CUDA_ROOT: CUDA toolkits, which may contain a libcupti.
    pub cuda_homes: Vec<PathBuf>,
    /// $CONDA_PREFIX.
    pub conda: Option<PathBuf>,
    pub next_injection: Option<PathBuf>,
    pub teardown: bool,
    pub layers: Layers,
    pub nvtx_domains: Vec<String>,
    pub nvtx_ranges: bool,
    pub nvtx_injection: Option<PathBuf>,
    /// `key=value` lines for the Hello.
    pub claims: String,
}

/// Switches of the layers (sources) of names. All but `lines` are on unless the environment sets `0`.
#[derive(Debug, Clone, Copy)]
pub struct Layers {
    pub torch: bool,
    pub(crate) frames: bool,
    pub(crate) autograd: bool,
    pub(crate) python: bool,
    pub nvtx: bool,
    pub sites: bool,
    pub(crate) keepers: bool,
    pub(crate) lines: bool,
}

impl Default for Layers {
    fn default() -> Self {
        Layers::read(|_| None)
    }
}

impl Layers {
    fn read(get: impl Fn(&str) -> Option<OsString>) -> Self {
        let on = |name| get(name).is_none_or(|value| value != "0");
        Layers {
            torch: on(TORCH),
            frames: on(FRAMES),
            autograd: on(AUTOGRAD),
            python: on(PYTHON),
            nvtx: on(NVTX),
            sites: on(SITES),
            keepers: on(KEEPERS),
            lines: get(LINES).is_some_and(|value| value != "0"),
        }
    }
}

fn get(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn path(name: &str) -> Option<PathBuf> {
    get(name).map(Into::into)
}

fn is_set(name: &str) -> bool {
    get(name).is_some_and(|value| value != "0")
}

/// Whether this program is an MPS server, which uses the GPU for other programs. An agent in it would observe all those programs.
/// The server inherits the variables of the shell or job that started its control daemon.
///
/// The server is recognized by its file. Its name in the kernel (comm) is cut to 15 bytes, can be changed, and equals that of the
/// control daemon.
fn is_mps_server() -> bool {
    let program = std::fs::read_link("/proc/self/exe").ok();
    // If an update has replaced the file of the running program, the name ends in " (deleted)".
    let name = program.as_ref().and_then(|program| program.file_name()?.to_str());
    name.is_some_and(|name| name.split(' ').next() == Some("nvidia-cuda-mps-server"))
}

fn number(name: &str, default: u64, low: u64, high: u64) -> u64 {
    let value = get(name).and_then(|value| value.to_str()?.parse::<u64>().ok());
    value.map_or(default, |value| value.clamp(low, high))
}

/// Returns the absolute directories of [`RECORD_DIRS`] that exist; by default the current directory and that for temporary files.
fn record_dirs(get: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let dirs: Vec<PathBuf> = match get(RECORD_DIRS) {
        Some(dirs) => std::env::split_paths(&dirs).filter(|dir| dir.is_absolute()).collect(),
        None => {
            let temporary = get("TMPDIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
            std::env::current_dir().into_iter().chain([temporary]).collect()
        }
    };
    dirs.iter().filter_map(|dir| std::fs::canonicalize(dir).ok()).collect()
}

fn with_pid(path: &OsStr, pid: u32) -> PathBuf {
    path.to_str().map_or_else(|| path.into(), |text| text.replace("%p", &pid.to_string()).into())
}

impl Settings {
    pub(crate) fn read(pid: u32, uid: u32) -> Self {
        let socket = path(SOCKET);
        let doubtful_socket =
            socket.is_none().then(|| PathBuf::from(format!("/tmp/gpumem-{uid}/agent.sock")));
        let users = path("XDG_RUNTIME_DIR").map(|directory| directory.join("gpumem/agent.sock"));
        let usual = || users.into_iter().chain([SYSTEM_SOCKET.into()]).chain(doubtful_socket.clone());
        let sockets = socket.map_or_else(|| usual().collect(), |socket| vec![socket]);
        Settings {
            disabled: is_set(DISABLE) || is_mps_server(),
            sockets,
            doubtful_socket,
            record: get(RECORD).map(|path| with_pid(&path, pid)),
            record_dirs: record_dirs(get),
            ring_slots: number(RING_SLOTS, 1 << 16, 2, 1 << 24),
            exit_wait_ms: number(EXIT_WAIT, 50, 0, 60000),
            live_rows: number(LIVE_ROWS, 1 << 18, 1, 1 << 24),
            name_bytes: number(NAME_BYTES, 8 << 20, 4096, 1 << 30) & !7,
            cupti: path(CUPTI_PATH),
            cuda_homes: ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].into_iter().filter_map(path).collect(),
            conda: path("CONDA_PREFIX"),
            next_injection: path(NEXT_INJECTION),
            teardown: is_set(TEARDOWN),
            layers: Layers::read(get),
            nvtx_domains: get(NVTX_DOMAINS)
                .map(|value| value.to_string_lossy().split(',').map(|name| name.trim().to_owned()).collect())
                .unwrap_or_default(),
            nvtx_ranges: is_set(NVTX_RANGES),
            nvtx_injection: path(NVTX_INJECTION),
            claims: claims(get) + &program(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> String {
        let of =
            |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| value.into());
        claims(of).replace('\n', " ")
    }

    #[test]
    fn ranks_are_of_one_launcher() {
        let slurm = [("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")];
        let step = [("SLURM_STEP_ID", "2"), ("SLURM_LOCALID", "0"), ("SLURM_STEP_NUM_TASKS", "8")];
        let mpi = [("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "16")];
        let torch = [("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")];
        assert_eq!(of(&slurm), "slurm_job=7 ", "a batch script is not a rank");
        let task = [&slurm[..], &step].concat();
        assert_eq!(of(&task), "slurm_job=7 slurm_step=2 rank=0 local_rank=0 world_size=8 ");
        let in_task = [&task[..], &mpi].concat();
        assert_eq!(
            of(&in_task),
            "slurm_job=7 slurm_step=2 rank=5 world_size=16 ",
            "mpirun's, not that of its orted"
        );
        let all = [&in_task[..], &torch].concat();
        assert_eq!(of(&all), "slurm_job=7 slurm_step=2 rank=3 local_rank=1 world_size=4 ");
        assert_eq!(of(&[("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")]), "", "of no rank");
    }

    #[test]
    fn files_are_created_below_the_current_and_the_temporary_directory_unless_others_are_named() {
        let dirs = |variables: &[(&str, &str)]| {
            let of = |name: &str| variables.iter().find(|(other, _)| *other == name);
            record_dirs(|name| of(name).map(|(_, value)| value.into()))
        };
        let real = |path: &str| std::fs::canonicalize(path).expect("a directory");
        assert_eq!(dirs(&[]), [real("."), real("/tmp")]);
        assert_eq!(dirs(&[("TMPDIR", "/var/tmp"), ("HOME", "/root")]), [real("."), real("/var/tmp")]);
        assert_eq!(dirs(&[("TMPDIR", "/nonexistent")]), [real(".")]);
        // Named directories replace the default; relative ones would depend on the current directory.
        assert_eq!(dirs(&[(RECORD_DIRS, "/usr:relative:/nonexistent"), ("TMPDIR", "/tmp")]), [real("/usr")]);
    }

    #[test]
    fn a_claim_is_one_line() {
        assert_eq!(of(&[("POD_NAME", "a\nslurm_job=1"), ("POD_NAMESPACE", "")]), "pod=a ");
    }
}
