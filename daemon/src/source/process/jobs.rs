//! Jobs of GPUs, as a batch system's prolog writes them for dcgm-exporter: a folder with a file per GPU, called by NVML's index
//! (`3`) or index and GPU instance (`3.7`), with the id of a job in each line.
//!
//! The files speak of devices and not of processes. So they count only where they can mean one job, and only for processes that
//! began after the file was written: one that outlived its job must not be taken for the next one's.

use rustix::fs::{Mode, OFlags, open};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Bytes read of a file.
const BYTES: u64 = 64 << 10;
/// Start times have ticks of 10 ms, and a file's time is that of the kernel's last one.
const SLACK: Duration = Duration::from_secs(1);

/// A GPU or an instance of one, as the files are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// NVML's index.
    pub index: u32,
    /// Of an instance.
    pub instance: Option<u32>,
}

/// The one job that all of these GPUs were given to before the process began; `None` where that is not so, or not known.
pub(crate) fn of(directory: &Path, gpus: &[Gpu], began: SystemTime) -> Option<String> {
    let mut jobs = gpus.iter().map(|gpu| of_gpu(directory, *gpu, began));
    let first = jobs.next()??;
    jobs.all(|job| job.as_ref() == Some(&first)).then_some(first)
}

fn of_gpu(directory: &Path, gpu: Gpu, began: SystemTime) -> Option<String> {
    let name = match gpu.instance {
        Some(instance) => format!("{}.{instance}", gpu.index),
        None => gpu.index.to_string(),
    };
    // Neither a pipe nor a link may keep us or lead us away.
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

/// The job in all lines that are not empty.
fn one_job(text: &str) -> Option<&str> {
    let mut jobs = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let job = jobs.next().filter(|job| is_id(job))?;
    jobs.all(|other| other == job).then_some(job)
}

fn is_id(job: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+:@[]".contains(&byte);
    (1..=64).contains(&job.len()) && job.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

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
        let job = |gpus: &[Gpu], began| of(&dir, gpus, began);
        assert_eq!(job(&[gpu(0)], now).as_deref(), Some("7"));
        assert_eq!(job(&[gpu(0), gpu(1)], now).as_deref(), Some("7"));
        assert_eq!(job(&[Gpu { index: 2, instance: Some(7) }], now).as_deref(), Some("9"));
        assert_eq!(job(&[gpu(0), gpu(2)], now), None, "two jobs");
        assert_eq!(job(&[gpu(0), gpu(5)], now), None, "one GPU is nobody's");
        assert_eq!(job(&[], now), None);
        assert_eq!(job(&[gpu(0)], now - Duration::from_secs(60)), None, "it is older than the file");
        // What is no file is not read, and does not stop us.
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
