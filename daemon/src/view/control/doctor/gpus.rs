//! Makes findings about GPUs: why the memory of a GPU is not the sum of its processes, and why a process has no bytes.
//!
//! The driver's properties come first, then each device: problems, faults, unidentified processes, unaccounted bytes. A finding
//! states the fact, the cause and the remedy.

use super::finding::{Findings, finding, has, is_windows, mib, why_absent};
use crate::config::Tenants;
use crate::nvml_status::{DeviceStatus, UNREADABLE};
use crate::view::{Health, Viewer};
use gpumem_ledger::{AccountView, DeviceView, ProcessView, Snapshot};
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use gpumem_wire::Absence;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// Number of unaccounted bytes from which on they are reported. It is less than a context.
const UNACCOUNTED: u64 = 64 << 20;
/// Maximum number of pids in a text. Further ones are only counted.
const NAMED: usize = 8;
const USE_HOST_PID_NAMESPACE: &str = "run gpumemd in the host's PID namespace (hostPID, --pid=host)";
/// NVML's error code for a missing permission.
const NO_PERMISSION: u32 = 4;

pub(super) fn check_driver(health: &Health, out: &mut Vec<Finding>) {
    let fact = |name: &str| health.nvml.facts.get(name).map(String::as_str);
    let driver = fact("driver").unwrap_or("of unknown version");
    let mut nvml = Findings { subject: "nvml".to_owned(), out };
    let wrong_pids = match fact("pids") {
        Some("ForeignBytes") => Some(
            "the pids of this PID namespace with the bytes of whichever host process has the same number",
        ),
        Some("Foreign") => Some("the host's pids, which are other processes in this PID namespace"),
        _ => None,
    };
    if let Some(what) = wrong_pids {
        let text = format!("driver {driver} lists {what}: bytes per process are omitted");
        let fix = "run gpumemd in the host's PID namespace (hostPID, --pid=host), or update the driver to 565.57.01 or \
                   later";
        nvml.add(Check::NvmlPids, State::Warn, text, Some(fix));
    }
    if fact("long_records").is_some() {
        let text = format!(
            "driver {driver} is an early 535 release, which writes list records of 32 bytes instead of the documented 24: \
             gpumemd reads them as they are, other tools on this machine show wrong pids"
        );
        nvml.add(Check::NvmlRecords, State::Ok, text, Some("update the driver to 535.104.05 or later"));
    }
    if fact("confidential").is_some() {
        let which = match fact("protected") {
            Some(_) => "and so is their protected part (gpumemctl ps)",
            None => "but not their protected part: this driver has no detail list",
        };
        let text = format!(
            "confidential computing is on: bytes of processes are known, {which}; staging buffers of the driver belong to \
             no process"
        );
        nvml.add(Check::NvmlConfidential, State::Ok, text, None);
    }
    if is_windows(health, None) {
        let text = "this is WSL: Windows manages the GPU's memory and does not report bytes of processes; the device's \
                    totals are known and include memory that Windows uses";
        let fix = "start processes with `gpumemctl run -- ...`: tracked bytes are known";
        nvml.add(Check::DriverWsl, State::Warn, text, Some(fix));
    }
    if health.nvml.no_events {
        let text = "faults (Xid) and changes of MIG are not read any more: a call for events did not return";
        nvml.add(Check::NvmlEvents, State::Warn, text, Some("see dmesg; restart gpumemd to try again"));
    }
    for (gpu, why, fix) in &health.nvml.unnamed {
        let text = format!("exists and cannot be identified: {why}; it is not monitored");
        out.push(finding(Check::GpuUnnamed, State::Bad, format!("GPU {gpu}"), text, *fix));
    }
}

/// Returns a finding about the driver's accounting mode, which reports peaks of processes. It is only a hint, because only root
/// can switch the mode on, and for all users.
pub(super) fn accounting_finding(health: &Health) -> Option<Finding> {
    let on = health.nvml.devices.iter().filter(|device| has(device, "accounting")).count();
    let (text, fix) = match (on, health.nvml.devices.len()) {
        (_, 0) => return None,
        (0, _) => (
            "accounting mode is off: peaks of processes without an agent are only as exact as the sampling"
                .to_owned(),
            Some("root can switch it on before the processes start: nvidia-smi -am 1; gpumemd never does"),
        ),
        (on, all) => (
            format!(
                "accounting mode is on ({on} of {all} devices): reports compare the driver's own peaks with ours"
            ),
            None,
        ),
    };
    Some(finding(Check::Accounting, State::Ok, "accounting", text, fix))
}

/// Makes the findings about devices for one viewer.
pub(super) struct DeviceChecks<'a> {
    pub snapshot: &'a Snapshot,
    pub health: &'a Health,
    pub viewer: Viewer,
    pub tenants: Tenants,
    /// Whether the daemon runs in the host's PID namespace, so that it sees all processes.
    pub is_in_host_pid_namespace: bool,
}

impl DeviceChecks<'_> {
    fn pids(&self, pids: &[u32]) -> String {
        if !self.viewer.all && self.tenants == Tenants::Anonymous {
            return format!("{} processes", pids.len());
        }
        let named: Vec<String> = pids.iter().take(NAMED).map(u32::to_string).collect();
        let more = match pids.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let word = if pids.len() == 1 { "pid" } else { "pids" };
        format!("{word} {}{more}", named.join(", "))
    }

    fn processes(&self, device: &DeviceStatus) -> impl Iterator<Item = (&ProcessView, &AccountView)> {
        let index = self.snapshot.devices.iter().position(|view| view.name == device.name);
        let living = self.snapshot.running();
        living.filter_map(move |process| {
            let mut accounts = process.accounts.iter();
            Some((process, accounts.find(|account| index.is_some() && account.device == index)?))
        })
    }

    pub(crate) fn check(&self, device: &DeviceStatus, out: &mut Vec<Finding>) {
        let subject = format!("GPU {} ({})", device.index, device.name);
        let view = self.snapshot.devices.iter().find(|view| view.name == device.name);
        let mut out = Findings { subject, out };
        self.problem(device, &mut out);
        if let Some(view) = view.filter(|view| is_virtual(&view.model)) {
            let text = format!(
                "{} is a virtual GPU (vGPU): its host keeps part of the memory, other guests are not visible here, and events \
                 and accounting may be missing",
                view.model
            );
            out.add(Check::GpuVgpu, State::Ok, text, None);
        }
        if let Some(view) = view {
            unified(view, &mut out);
        }
        addressing(device, &mut out);
        memory_limits(device, &mut out);
        if let Some(view) = view {
            self.faults(view, &mut out);
        }
        health_events(device, &mut out);
        self.strangers(device, &mut out);
        if device.problem.is_none() {
            self.without_bytes(device, &mut out);
        }
        if let Some(view) = view {
            self.remainder(device, view, &mut out);
        }
        self.lists(device, &mut out);
    }

    fn problem(&self, device: &DeviceStatus, out: &mut Findings<'_>) {
        let hides = has(device, "hidden_instances");
        let monitor = "run gpumemd as root of the host, or privileged with NVIDIA_MIG_MONITOR_DEVICES=all, or make \
             the instances visible to it";
        match (&device.problem, device.code) {
            (Some(problem), Some(NO_PERMISSION)) if hides => {
                let text = format!(
                    "{problem}: MIG is on, and reading the whole GPU needs the right to monitor all of it"
                );
                out.add(Check::GpuMig, State::Warn, text, Some(monitor));
            }
            (Some(problem), _) => out.add(Check::Gpu, State::Warn, problem.clone(), device.remedy),
            (None, _) if hides => {
                let text =
                    "MIG is on and none of its instances is visible here: the GPU is shown as one device";
                out.add(Check::GpuMig, State::Warn, text, Some(monitor));
            }
            (None, _) => {}
        }
    }

    fn faults(&self, view: &DeviceView, out: &mut Findings<'_>) {
        let counts: Vec<_> = view.faults.counts().collect();
        let Some(last) = view.faults.latest().last() else { return };
        let named = counts.iter().map(|&(xid, count)| match xid {
            Some(xid) => format!(
                "{count} x {xid}{}",
                gpumem_model::ending::xid_words(xid).map(|words| format!(" ({words})")).unwrap_or_default()
            ),
            None => format!("{count} of other numbers"),
        });
        let age_s = self.snapshot.now_ns.saturating_sub(last.time_ns) / 1_000_000_000;
        let text = format!(
            "the driver reported faults (Xid): {}; the last one {age_s} s ago",
            named.collect::<Vec<_>>().join(", ")
        );
        let is_grave = counts.iter().any(|&(xid, _)| xid.is_some_and(|xid| !is_program_fault(xid)));
        let remedy = if is_grave {
            "see dmesg | grep Xid: memory read since then may be wrong; drain the GPU and reset it"
        } else {
            "a program caused it: find the program that ended at that time (dmesg | grep Xid names its pid)"
        };
        out.add(Check::GpuFaults, if is_grave { State::Bad } else { State::Warn }, text, Some(remedy));
    }

    /// Adds findings on memory of processes that have no start time, because /proc does not show them.
    fn strangers(&self, device: &DeviceStatus, out: &mut Findings<'_>) {
        let unidentified = self.processes(device).filter_map(|(process, account)| {
            let sample = account.latest.as_ref().filter(|_| process.key.start_ticks == 0)?;
            let is_listed = sample.used_bytes != Err(Absence::NotListed);
            is_listed.then(|| (process.key.pid, sample.used_bytes.unwrap_or(0)))
        });
        let (hidden, dead): (Vec<_>, Vec<_>) = unidentified.partition(|(pid, _)| is_hidden(*pid));
        let mut add = |processes: &[(u32, u64)], what: &str, remedy: &str| {
            if !processes.is_empty() {
                let (pids, bytes): (Vec<u32>, Vec<u64>) = processes.iter().copied().unzip();
                let (bytes, pids) = (mib(bytes.iter().sum()), self.pids(&pids));
                let text = format!("{bytes} are charged to {pids}, which {what}");
                out.add(Check::GpuStrangers, State::Warn, text, Some(remedy));
            }
        };
        match self.is_in_host_pid_namespace {
            true => add(
                &dead,
                "has ended: the driver has not freed the memory of a dead process",
                "find what keeps it: a child or another process with its memory mapped (fuser -v /dev/nvidia*), or a \
                 fault in dmesg; otherwise reset the GPU",
            ),
            false => add(
                &dead,
                "is not in this PID namespace: it is in another one, or has ended",
                USE_HOST_PID_NAMESPACE,
            ),
        }
        add(
            &hidden,
            "runs, but /proc does not show it to gpumemd",
            "/proc is mounted with hidepid: add gid= of gpumemd's group, or run it as root",
        );
    }

    fn without_bytes(&self, device: &DeviceStatus, out: &mut Findings<'_>) {
        if is_windows(self.health, Some(device)) {
            return; // the findings on the driver state this
        }
        let absent = Some(Err(Absence::NotAvailable));
        let processes = self.processes(device);
        let processes =
            processes.filter(|(_, account)| account.latest.as_ref().map(|of| of.used_bytes) == absent);
        let pids: Vec<u32> = processes.map(|(process, _)| process.key.pid).collect();
        if !pids.is_empty() {
            let (text, remedy) = why_absent(Absence::NotAvailable, self.health, Some(device));
            let text = format!("bytes of {} are unknown: {text}", self.pids(&pids));
            out.add(Check::GpuBytes, State::Warn, text, remedy);
        }
    }

    fn remainder(&self, device: &DeviceStatus, view: &DeviceView, out: &mut Findings<'_>) {
        // With unified memory, bytes that belong to no GPU process are normal, because the host uses them.
        let Some(agreed) = view.agreed.filter(|agreed| !agreed.reading.unified) else { return };
        let bytes = agreed.unaccounted_bytes;
        if bytes.unsigned_abs() < UNACCOUNTED {
            return;
        }
        let amount = mib(bytes.unsigned_abs());
        if bytes < 0 {
            let text = format!(
                "the sum of its processes is {amount} more than its used bytes: memory shared between processes (IPC) counts \
                 for each of them"
            );
            out.add(Check::GpuRemainder, State::Ok, text, None);
            return;
        }
        let mut why = Vec::new();
        let managed = self.processes(device).map(|(_, account)| account.beside.managed_bytes);
        let managed = managed.filter_map(|bytes| u64::try_from(bytes).ok()).sum::<u64>();
        if managed > 0 {
            why.push(format!(
                "managed memory (UVM), of which {} were allocated: its part on the GPU belongs to no process",
                mib(managed)
            ));
        }
        if has(device, "display") {
            why.push("frame buffers of the kernel, because it drives a display".to_owned());
        }
        if !self.is_in_host_pid_namespace {
            why.push("processes of other PID namespaces, which are not listed here".to_owned());
        }
        if let Some(node) = device.facts.get("numa_node") {
            why.push(format!(
                "pages of the kernel and of any process, because its memory is NUMA node {node} of the host"
            ));
        }
        if self.health.nvml.facts.contains_key("confidential") {
            why.push("staging buffers of confidential computing".to_owned());
        }
        let is_known = !why.is_empty();
        let (state, rest) = match is_known {
            true => (State::Ok, "or contexts of the driver itself"),
            false => (
                State::Warn,
                "contexts of the driver itself (display, UVM, MPS), managed memory of processes without an agent, or a \
                 process that is ending now",
            ),
        };
        why.push(rest.to_owned());
        let remedy = (!self.is_in_host_pid_namespace).then_some(USE_HOST_PID_NAMESPACE);
        let text = format!("{amount} in use belong to no process; possible causes: {}", why.join("; "));
        out.add(Check::GpuRemainder, state, text, remedy);
    }

    fn lists(&self, device: &DeviceStatus, out: &mut Findings<'_>) {
        if !device.mps.is_empty() {
            let server = |process: &&ProcessView| {
                let comm = process.facts.seen.get("comm").map_or("", String::as_str);
                comm.starts_with("nvidia-cuda-mps") // the kernel cuts names to 15 bytes
            };
            let server = self.snapshot.running().find(server);
            let server = server.map(|server| format!(" (server: {})", self.pids(&[server.key.pid])));
            let text = format!(
                "{} use it through MPS{}: from Volta on, clients and server have their own bytes; on older GPUs all bytes are \
                 the server's",
                self.pids(&device.mps),
                server.unwrap_or_default()
            );
            out.add(Check::GpuMps, State::Ok, text, None);
        }
        if !device.drawing.is_empty() {
            let text = format!(
                "{} also use it for graphics: their bytes are in two of NVML's lists and are counted once",
                self.pids(&device.drawing)
            );
            out.add(Check::GpuGraphics, State::Ok, text, None);
        }
    }
}

/// Adds a finding on how the GPU accesses host memory, and on the NUMA node of the GPU's memory.
fn addressing(device: &DeviceStatus, out: &mut Findings<'_>) {
    let fact = |name: &str| device.facts.get(name).map(String::as_str);
    let mode = fact("addressing").map(|mode| match mode {
        "ats" => "the GPU accesses host memory of processes (malloc) through their page tables (ATS); such memory is not in used bytes of any process",
        _ => "the GPU accesses host memory of processes (malloc) through the driver's copy of their page tables (HMM); such memory is not in used bytes of any process",
    });
    let node =
        fact("numa_node").map(|node| format!("its memory is NUMA node {node} of the host (numactl -H)"));
    let parts: Vec<String> = mode.map(str::to_owned).into_iter().chain(node).collect();
    if !parts.is_empty() {
        out.add(Check::GpuAddressing, State::Ok, parts.join("; "), None);
    }
}

/// Adds findings about GPU memory limits of control groups. A group counts as full if at most a tenth of its limit is left.
fn memory_limits(device: &DeviceStatus, out: &mut Findings<'_>) {
    let Some(fact) = device.facts.get("memory_limits") else { return };
    for entry in fact.split('\t') {
        if let Some((UNREADABLE, group)) = entry.split_once(' ') {
            let text = format!("the memory limit of a control group cannot be read: {group}");
            out.add(Check::GpuLimits, State::Ok, text, None);
            continue;
        }
        let mut words = entry.splitn(4, ' ');
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        let (Some(used), Some(soft), Some(hard)) = (number(), number(), number()) else { continue };
        let group = words.next().unwrap_or_default();
        let limit = |bytes: u64| if bytes == u64::MAX { "no limit".to_owned() } else { mib(bytes) };
        let text = format!(
            "control group {group} uses {} of {} (soft limit: {})",
            mib(used),
            limit(hard),
            limit(soft)
        );
        let is_full = hard != u64::MAX && used >= hard - hard / 10;
        let fix = "free memory of the group's processes (gpumemctl ps), or raise the limit: an allocation beyond it fails";
        let (state, fix) = if is_full { (State::Warn, Some(fix)) } else { (State::Ok, None) };
        out.add(Check::GpuLimits, state, text, fix);
    }
}

fn health_events(device: &DeviceStatus, out: &mut Findings<'_>) {
    let events = &device.health_events;
    if events.is_empty() {
        return;
    }
    let named: Vec<String> = events.iter().map(|event| format!("{} x {}", event.count, event.text)).collect();
    let text = format!("the driver reported health events since gpumemd started: {}", named.join(", "));
    let (state, remedy) = match events.iter().any(|event| event.is_grave) {
        true => (
            State::Bad,
            "drain the GPU, then do what nvidia-smi -q names under `GPU Recovery Action` (reset or reboot); dmesg has the cause",
        ),
        false => (
            State::Warn,
            "nvidia-smi -q -d PAGE_RETIREMENT,ROW_REMAPPER shows what is pending; reset the GPU when it is idle",
        ),
    };
    out.add(Check::GpuEvents, state, text, Some(remedy));
}

fn unified(view: &DeviceView, out: &mut Findings<'_>) {
    let Some(reading) = view.latest.filter(|reading| reading.unified) else { return };
    let text = format!(
        "unified memory: it uses the host's memory, for which NVML reports neither total nor used (GB10, Jetson, integrated \
         GPUs). Total, used and available ({}) are the host's, from /proc/meminfo; bytes of processes are NVML's, and the \
         rest of used is memory of the host",
        mib(reading.free_bytes)
    );
    out.add(Check::GpuUnified, State::Ok, text, None);
}

/// Returns whether a model is a virtual GPU, whose name ends with its profile: `NVIDIA A40-48Q`, `GRID T4-4C`.
fn is_virtual(model: &str) -> bool {
    let profile = model.rsplit_once('-').map_or("", |(_, profile)| profile);
    let size = profile.strip_suffix(['A', 'B', 'C', 'Q']).unwrap_or("");
    model.starts_with("GRID ") || !size.is_empty() && size.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns whether a process with this pid runs, although /proc does not show it.
fn is_hidden(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| matches!(test_kill_process(pid), Ok(()) | Err(Errno::PERM)))
}

/// Returns whether a program, and not the hardware, causes this Xid.
fn is_program_fault(xid: u64) -> bool {
    matches!(xid, 13 | 31 | 43 | 45)
}

#[cfg(test)]
mod tests {
    use super::is_virtual;

    #[test]
    fn profiles_of_virtual_gpus_are_told_from_products() {
        for model in ["NVIDIA A40-48Q", "GRID T4-4C", "NVIDIA A100-10C", "GRID V100D-32Q"] {
            assert!(is_virtual(model), "{model}");
        }
        for model in [
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA H100 80GB HBM3",
            "NVIDIA A100-PCIE-40GB MIG 1g.5gb",
            "Tesla T4",
            "A-",
            "",
        ] {
            assert!(!is_virtual(model), "{model}");
        }
    }
}
