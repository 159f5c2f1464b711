//! The host's memory. It stands for the device's where a GPU has none of its own (unified memory: GB10, Jetson) and
//! NVML answers that device memory is not supported.

use super::answer::{Code, Memory};
use rustix::io::pread;
use std::fs::File;

/// The two amounts are in the first lines; the kernel writes about 1.5 KiB in all.
const READ_BYTES: usize = 4096;

/// /proc/meminfo, kept open: it is read as often as device memory.
#[derive(Debug, Default)]
pub(crate) struct HostMemory {
    file: Option<File>,
}

impl HostMemory {
    /// Reads the host's memory: MemTotal is the size, MemAvailable is free, and the difference is used.
    ///
    /// # Errors
    /// NOT_SUPPORTED, as NVML said of the device, where /proc/meminfo cannot be read.
    pub(crate) fn read(&mut self) -> Result<Memory, Code> {
        if self.file.is_none() {
            self.file = File::open("/proc/meminfo").ok();
        }
        let file = self.file.as_ref().ok_or(Code::NOT_SUPPORTED)?;
        let mut text = [0; READ_BYTES];
        let length = pread(file, &mut text, 0).map_err(|_| Code::NOT_SUPPORTED)?;
        parse(&text[..length]).ok_or(Code::NOT_SUPPORTED)
    }
}

/// Reads `MemTotal:   16384 kB` and `MemAvailable:` from the text of /proc/meminfo. `None` if one is missing.
fn parse(text: &[u8]) -> Option<Memory> {
    let text = String::from_utf8_lossy(text);
    let amount = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
        kib.checked_mul(1024)
    };
    let (total_bytes, available) = (amount("MemTotal")?, amount("MemAvailable")?);
    let free_bytes = available.min(total_bytes);
    let used_bytes = total_bytes - free_bytes;
    Some(Memory { total_bytes, free_bytes, used_bytes, reserved_bytes: None, is_unified: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_and_available_memory_are_read_and_add_up() {
        let text =
            b"MemTotal:       125514332 kB\nMemFree:         1000000 kB\nMemAvailable:   105514332 kB\n";
        let memory = parse(text).expect("two amounts");
        assert_eq!((memory.total_bytes, memory.free_bytes), (125_514_332 << 10, 105_514_332 << 10));
        assert_eq!(memory.used_bytes, 20_000_000 << 10);
        assert!(memory.is_unified && memory.reserved_bytes.is_none());
    }

    #[test]
    fn text_without_the_two_amounts_is_no_reading() {
        for text in [
            &b""[..],
            b"MemTotal: 4 kB\n",
            b"MemAvailable: 4 kB\n",
            b"MemTotal: 4 MB\nMemAvailable: 1 kB\n",
            b"MemTotal: -4 kB\nMemAvailable: 1 kB\n",
            b"MemTotal: 99999999999999999999 kB\nMemAvailable: 1 kB\n",
        ] {
            assert_eq!(parse(text), None, "{}", String::from_utf8_lossy(text));
        }
        // A container's view (lxcfs) may have more available than its limit.
        let odd = parse(b"MemTotal: 4 kB\nMemAvailable: 9 kB\n").expect("two amounts");
        assert_eq!((odd.used_bytes, odd.free_bytes), (0, 4096));
    }

    #[test]
    fn this_host_has_memory() {
        let memory = HostMemory::default().read().expect("/proc/meminfo");
        assert!(memory.used_bytes > 0 && memory.used_bytes + memory.free_bytes == memory.total_bytes);
    }
}
