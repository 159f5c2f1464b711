//! Data that cluster software writes about processes: names of pods (Kubernetes) and jobs of GPUs (batch systems).
//!
//! For every container, the kubelet makes a link `POD_NAMESPACE_CONTAINER-ID.log` in /var/log/containers. The same id is in the
//! path of the process's control group. So the names are certain even on GPUs that pods share, and no request is needed. The
//! kubelet's pod-resources API knows devices but no processes. Only file names are read, no logs.
//!
//! Jobs come from files that a batch system's prolog writes for dcgm-exporter: a folder with a file for each GPU, named by NVML's
//! index (`3`) or by index and GPU instance (`3.7`), with a job id in each line.
//!
//! The files name devices, not processes. So they count only if they allow one job, and only for processes that began after the
//! file was written. Otherwise a process that outlived its job would be assigned to the next job.

use rustix::fs::{Mode, OFlags, open};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Maximum number of directory entries read; a node has fewer containers.
const ENTRIES: usize = 16_384;

/// Names of a pod's container in Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNames {
    pub pod: String,
    pub namespace: String,
    pub container: String,
}

/// Returns the names of each container, by its id, as the file names in `directory` have them.
pub(crate) fn find_pods(directory: &Path) -> HashMap<String, PodNames> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().take(ENTRIES).flatten();
    entries.filter_map(|entry| pod_of_file(&entry.file_name())).collect()
}

/// Returns the id of a container, and the names that its file name has.
fn pod_of_file(name: &OsStr) -> Option<(String, PodNames)> {
    let (rest, id) = name.to_str()?.strip_suffix(".log")?.rsplit_once('-')?;
    // Names in Kubernetes have no underscore.
    let [pod, namespace, container] = rest.split('_').collect::<Vec<_>>()[..] else { return None };
    let are_names = [pod, namespace, container].into_iter().all(is_pod_name);
    let names = || PodNames { pod: pod.into(), namespace: namespace.into(), container: container.into() };
    are_names.then(|| (id.into(), names()))
}

fn is_pod_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    (1..=253).contains(&name.len()) && name.bytes().all(is_plain)
}

/// Maximum number of bytes read from a file that assigns a GPU to jobs.
const BYTES: u64 = 64 << 10;
/// Tolerance: start times have ticks of 10 ms, and a file's time is that of the kernel's last timer tick.
const SLACK: Duration = Duration::from_secs(1);

/// A GPU, or a GPU instance, as named by the files of a batch system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// NVML's index of the GPU.
    pub index: u32,
    /// Number of the GPU instance; `None` for a whole GPU.
    pub instance: Option<u32>,
}

/// Returns the job to which all `gpus` were assigned before the process began; `None` if there is no job or more than one.
pub(crate) fn job_of_gpus(directory: &Path, gpus: &[Gpu], began: SystemTime) -> Option<String> {
    let mut jobs = gpus.iter().map(|gpu| job_of_gpu(directory, *gpu, began));
    let first = jobs.next()??;
    jobs.all(|job| job.as_ref() == Some(&first)).then_some(first)
}

fn job_of_gpu(directory: &Path, gpu: Gpu, began: SystemTime) -> Option<String> {
    let name = match gpu.instance {
        Some(instance) => format!("{}.{instance}", gpu.index),
        None => gpu.index.to_string(),
    };
    // Opening the file must neither block on a pipe nor follow a link.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(open(directory.join(name), flags, Mode::empty()).ok()?);
    let about = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    if about.modified().ok()? > began.checked_add(SLACK)? {
        return None;
    }
    let mut text = String::new();
    file.take(BYTES).read_to_string(&mut text).ok()?;
    one_job(&text).map(str::to_owned)
}

/// Returns the job if all non-empty lines name the same job.
fn one_job(text: &str) -> Option<&str> {
    let mut jobs = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let job = jobs.next().filter(|job| is_job_id(job))?;
    jobs.all(|other| other == job).then_some(job)
}

fn is_job_id(job: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+:@[]".contains(&byte);
    (1..=64).contains(&job.len()) && job.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_names_pod_namespace_and_container() {
        let id = "ab".repeat(32);
        let of = |name: &str| {
            pod_of_file(OsStr::new(name)).map(|(id, names)| (names.pod, names.namespace, names.container, id))
        };
        let owned = |name: &str| name.to_owned();
        assert_eq!(
            of(&format!("train-bert-0_ml-team_worker-1-{id}.log")),
            Some((owned("train-bert-0"), owned("ml-team"), owned("worker-1"), id))
        );
        for odd in [
            "a_b_c.log",
            "a_b_c_d-1.log",
            "a_b-1.log",
            "A_b_c-1.log",
            "a__c-1.log",
            "a_b_c-1",
            "../a_b_c-1.log",
            "",
        ] {
            assert_eq!(of(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_folder_is_looked_through_once() {
        let dir = std::env::temp_dir().join(format!("gpumemd-names-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a folder");
        let (one, two) = ("1".repeat(64), "2".repeat(64));
        // Like the kubelet's links: their targets do not exist here.
        std::os::unix::fs::symlink("/nowhere", dir.join(format!("a_b_c-{one}.log"))).expect("a link");
        let found = find_pods(&dir);
        assert_eq!(found.get(&two), None);
        assert_eq!(found.get(&one).map(|names| &*names.pod), Some("a"));
        fs::remove_dir_all(&dir).expect("removed");
        assert!(find_pods(&dir).is_empty());
    }

    #[test]
    fn a_file_may_mean_one_job() {
        assert_eq!(one_job("8812\n"), Some("8812"));
        assert_eq!(one_job("\n 8812 \n8812"), Some("8812"));
        assert_eq!(one_job("1234[7].pbs"), Some("1234[7].pbs"));
        for none in ["", "\n\n", "1\n2\n", "a b", "x\",job=\"y", "\u{1b}[2J"] {
            assert_eq!(one_job(none), None, "{none:?}");
        }
    }

    #[test]
    fn jobs_of_gpus_are_those_of_the_time_when_the_process_began() {
        let dir = std::env::temp_dir().join(format!("gpumemd-jobs-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a folder");
        let gpu = |index| Gpu { index, instance: None };
        fs::write(dir.join("0"), "7\n").expect("written");
        fs::write(dir.join("1"), "7\n").expect("written");
        fs::write(dir.join("2"), "8\n").expect("written");
        fs::write(dir.join("2.7"), "9\n").expect("written");
        let now = SystemTime::now();
        let job = |gpus: &[Gpu], began| job_of_gpus(&dir, gpus, began);
        assert_eq!(job(&[gpu(0)], now).as_deref(), Some("7"));
        assert_eq!(job(&[gpu(0), gpu(1)], now).as_deref(), Some("7"));
        assert_eq!(job(&[Gpu { index: 2, instance: Some(7) }], now).as_deref(), Some("9"));
        assert_eq!(job(&[gpu(0), gpu(2)], now), None, "two jobs");
        assert_eq!(job(&[gpu(0), gpu(5)], now), None, "one GPU is nobody's");
        assert_eq!(job(&[], now), None);
        assert_eq!(job(&[gpu(0)], now - Duration::from_secs(60)), None, "it is older than the file");
        // Files that are not regular are not read, and do not block.
        std::os::unix::fs::symlink(dir.join("0"), dir.join("3")).expect("a link");
        rustix::fs::mknodat(rustix::fs::CWD, dir.join("4"), rustix::fs::FileType::Fifo, Mode::RUSR, 0)
            .expect("a pipe");
        fs::create_dir(dir.join("6")).expect("a folder");
        for index in [3, 4, 6] {
            assert_eq!(job(&[gpu(index)], now), None, "{index}");
        }
        fs::remove_dir_all(&dir).expect("removed");
    }
}
