//! Limits and properties of this process: the number of file descriptors, its PID namespace, its heap, locks.
//!
//! The number of descriptors is limited, and agents use most of them. Some are reserved for the daemon's own files and sockets.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of descriptors for each agent: its connection, its memory, its pidfd.
const PER_AGENT: usize = 3;
/// Reserved descriptors: about 30 for the daemon, store and poller; a dozen while it starts a process; 64 connections each for
/// metrics and control. The rest is for pidfds of processes without an agent.
const OWN: usize = 224;
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Raises the soft limit of open files to the hard limit. Shells set the soft limit to 1,024.
pub fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit of open files cannot be raised");
    }
}

/// Returns the limit of agents' connections, lowered if too few descriptors would be left for other uses.
pub(crate) fn fit_connections(connections: usize) -> usize {
    let files = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |files| files as usize);
    connections.min(agents(files))
}

fn agents(files: usize) -> usize {
    (files.saturating_sub(OWN) / PER_AGENT).max(1)
}

/// Returns whether an error means that no descriptor was free. Such an error does not depend on the opened file or process.
pub(crate) fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    let lacks = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|error| lacks.contains(&error))
}

/// Locks a mutex. A panic while it was locked does not matter: each change of the protected data is complete or harmless.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Logs a shortage of descriptors at most once in [`LOG_INTERVAL`].
#[derive(Debug, Default)]
pub(crate) struct DescriptorShortage(Mutex<Option<Instant>>);

impl DescriptorShortage {
    /// Records a shortage and logs it if none was logged recently. `what` is the effect of the shortage, for the log.
    pub(crate) fn note(&self, what: &str, error: &dyn std::fmt::Display) {
        let mut logged = lock(&self.0);
        if logged.is_none_or(|logged| logged.elapsed() >= LOG_INTERVAL) {
            *logged = Some(Instant::now());
            tracing::warn!(%error, "{what}");
        }
    }
}

/// Returns whether this process is in the host's PID namespace, whose pids the driver reports. The kernel gives the first
/// namespace this number (`PROC_PID_INIT_INO`).
pub(crate) fn is_in_host_pid_namespace() -> bool {
    std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == "pid:[4026531836]")
}

/// Lets all threads use the heap of the main thread. Several heaps keep more free memory.
#[cfg(target_env = "gnu")]
pub fn use_one_heap() {
    // SAFETY: the call takes no pointers, and it takes malloc's locks.
    #[allow(unsafe_code)]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

#[cfg(target_env = "gnu")]
pub fn trim_heap() {
    // SAFETY: the call takes no pointers, and it takes malloc's locks.
    #[allow(unsafe_code)]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Unmaps this program's code. The kernel maps pages again as they are executed, so that code which only the start needed, or a
/// rare request, does not stay resident.
pub fn unmap_code() {
    let (Ok(maps), Ok(program)) =
        (std::fs::read_to_string("/proc/self/smaps"), std::fs::read_link("/proc/self/exe"))
    else {
        return;
    };
    for range in code_of(&maps, &program.to_string_lossy()) {
        // SAFETY: the range is a private mapping of a file without own pages, so its pages equal those of the file.
        #[allow(unsafe_code)]
        let _ = unsafe {
            rustix::mm::madvise(range.start as *mut _, range.len(), rustix::mm::Advice::LinuxDontNeed)
        };
    }
}

/// Returns the ranges of addresses in /proc/self/smaps at which this file is mapped as code that cannot be written, and that have
/// no pages of their own: breakpoints of a debugger or of a tracer are in such pages.
fn code_of(maps: &str, file: &str) -> Vec<Range<usize>> {
    let code = |line: &str| {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let is_code = words.next()? == "r-xp" && words.nth(3)?.trim_start() == file;
        let address = |text| usize::from_str_radix(text, 16).ok();
        Some(address(start)?..address(end)?).filter(|_| is_code)
    };
    let (mut found, mut mapping) = (Vec::new(), None);
    for line in maps.lines() {
        match line.strip_prefix("Anonymous:") {
            Some(own) => found.extend(mapping.take().filter(|_| own.trim_start() == "0 kB")),
            None => mapping = code(line).or(mapping),
        }
    }
    found
}

/// Returns the number of bytes that malloc has in use, for a daemon below 4 GiB. Does not use mallinfo2, which glibc has only
/// since 2.33.
#[cfg(target_env = "gnu")]
pub fn heap_bytes_in_use() -> Option<u64> {
    // SAFETY: the call takes no pointers, and it takes malloc's locks.
    #[allow(unsafe_code)]
    let info = unsafe { libc::mallinfo() };
    Some(u64::from(info.uordblks.cast_unsigned()) + u64::from(info.hblkhd.cast_unsigned()))
}

/// Does nothing, because only glibc has a function for this.
#[cfg(not(target_env = "gnu"))]
pub fn use_one_heap() {}

/// Does nothing, because only glibc has a function for this.
#[cfg(not(target_env = "gnu"))]
pub fn trim_heap() {}

/// Returns `None`, because only glibc has a function for this.
#[cfg(not(target_env = "gnu"))]
pub fn heap_bytes_in_use() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_the_program_is_unmapped() {
        let mapping =
            |line: &str, own_kb: u32| format!("{line}\nSize: 4 kB\nAnonymous:    {own_kb} kB\nVmFlags: rd\n");
        let maps = [
            mapping("1000-2000 r--p 00000000 fe:00 7       /a program", 0),
            mapping("2000-4000 r-xp 00001000 fe:00 7       /a program", 0),
            mapping("4000-5000 rw-p 00003000 fe:00 7       /a program", 4),
            mapping("5000-6000 r-xp 00000000 fe:00 8       /a library", 0),
            mapping("6000-7000 rwxp 00000000 fe:00 7       /a program", 0),
            mapping("7000-8000 r-xp 00004000 fe:00 7       /a program", 4), // with a breakpoint
            mapping("8000-9000 r-xp 00000000 00:00 0 ", 0),
        ];
        let found = code_of(&maps.concat(), "/a program");
        assert!(matches!(found[..], [Range { start: 0x2000, end: 0x4000 }]), "{found:?}");
        let own = std::fs::read_to_string("/proc/self/smaps").expect("maps");
        let program = std::fs::read_link("/proc/self/exe").expect("a link");
        assert!(!code_of(&own, &program.to_string_lossy()).is_empty());
        unmap_code();
    }

    #[test]
    fn agents_leave_descriptors_to_the_rest() {
        assert_eq!((agents(65_536), agents(1024)), (21_770, 266));
        for files in [0, 24, 224, 227] {
            assert_eq!(agents(files), 1, "{files}");
        }
        assert!(agents(usize::MAX) > 1 << 60);
    }
}
