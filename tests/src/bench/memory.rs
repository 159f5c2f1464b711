//! Peak memory of a program, as the kernel reports it.

use super::programs::silenced;
use std::process::Command;
use std::time::Duration;

/// Polling interval: the kernel drops the figure when the program ends.
const EVERY: Duration = Duration::from_micros(500);

/// Runs a program that must succeed. Returns the highest resident bytes that were read.
pub fn peak_bytes(command: &mut Command) -> u64 {
    let mut child = silenced(command).spawn().expect("a program");
    let path = format!("/proc/{}/status", child.id());
    let mut peak_kb = 0;
    loop {
        if let Some(status) = child.try_wait().expect("its end") {
            assert!(status.success(), "{command:?}: {status}");
            return peak_kb * 1024;
        }
        let status = std::fs::read_to_string(&path).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let seen = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        peak_kb = peak_kb.max(seen.unwrap_or(0));
        std::thread::sleep(EVERY);
    }
}
