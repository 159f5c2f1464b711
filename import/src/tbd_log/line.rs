//! Parses the memory annotations and readings in one line of a training log.

use crate::feed::{MAX_BYTES, MIB};

#[derive(Debug, PartialEq)]
pub(super) enum Annotation<'a> {
    Allocation {
        bytes: u64,
        tag: &'a str,
        /// Whether the line states only whole MiB.
        estimated: bool,
    },
    Device {
        free_mib: u64,
        total_mib: u64,
    },
    Release,
    /// Text that mentions an allocation but cannot be parsed.
    Unreadable,
}

/// Returns all annotations of a line. A line may have several, because the threads of a program may write to the same line.
pub(super) fn annotations(line: &str) -> Vec<Annotation<'_>> {
    let mut found = Vec::new();
    let mut rest = line;
    while let Some(at) = rest.find("Allocate") {
        let before = &rest[..at];
        let after = &rest[at + "Allocate".len()..];
        let end = after.find("[mem] ").unwrap_or(after.len());
        let (this, next) = after.split_at(end);
        match allocation(this) {
            Some(annotation) => found.push(annotation),
            // The word `Allocate` alone is not an annotation, because logs contain it in other contexts.
            None if before.ends_with("[mem] ") || this.contains("GPU memory (") => {
                found.push(Annotation::Unreadable);
            }
            None => {}
        }
        rest = next;
    }
    if line.contains(" MB GPU global memory free") {
        found.push(device(line).unwrap_or(Annotation::Unreadable));
    }
    if line.contains("[mem] Release GPU memory") {
        found.push(Annotation::Release);
    }
    found
}

fn allocation(text: &str) -> Option<Annotation<'_>> {
    let (number, rest) = text.strip_prefix(' ')?.split_once(' ')?;
    let number: u64 = number.parse().ok()?;
    let (unit, rest) = rest.split_once(" GPU memory (")?;
    let (bytes, estimated) = match unit {
        "bytes" => (number, false),
        "MB" => (number.checked_mul(MIB)?, true),
        _ => return None,
    };
    // A tag may contain brackets, and text may follow. So the tag ends at `).` or, without it, at the last bracket.
    let tag = &rest[..rest.find(").").or_else(|| rest.rfind(')'))?];
    (bytes <= MAX_BYTES).then_some(Annotation::Allocation { bytes, tag, estimated })
}

fn device(line: &str) -> Option<Annotation<'_>> {
    let (before, after) = line.split_once(" MB GPU global memory free, total ")?;
    let free_mib = before.rsplit(' ').next()?.parse().ok()?;
    let total_mib = after.split(' ').next()?.parse().ok()?;
    (free_mib <= total_mib && total_mib < 1 << 40).then_some(Annotation::Device { free_mib, total_mib })
}

/// nvidia-smi's reading for one process. The MiB are absent if they cannot be parsed, or if the line names the process more than
/// once. Such a process uses several GPUs, which the line does not name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessReading<'a> {
    pub name: &'a str,
    pub pid: u32,
    pub mib: Option<u64>,
}

/// Returns the `NAME-pid_PID=MIB` readings of a line, and the number of readings that cannot be parsed.
pub(super) fn readings(line: &str) -> (Vec<ProcessReading<'_>>, u64) {
    let mut found: Vec<ProcessReading<'_>> = Vec::new();
    let mut unreadable = 0;
    let Some((_, usage)) = line.split_once("Memory Usage:") else { return (found, 0) };
    for word in usage.split_ascii_whitespace() {
        let Some((name, rest)) = word.rsplit_once("-pid_") else { continue };
        let (pid, mib) = rest.split_once('=').unwrap_or((rest, ""));
        let mib = mib.parse().ok().filter(|mib| *mib < MAX_BYTES / MIB);
        unreadable += u64::from(mib.is_none());
        match pid.parse() {
            Ok(0) | Err(_) => unreadable += u64::from(mib.is_some()),
            Ok(pid) => match found.iter_mut().find(|reading| reading.pid == pid) {
                Some(twice) => twice.mib = None,
                None => found.push(ProcessReading { name, pid, mib }),
            },
        }
    }
    (found, unreadable)
}

/// Returns the number in `Batch [NUMBER]`.
pub(super) fn batch(line: &str) -> Option<u64> {
    line.split_once("Batch [")?.1.split_once(']')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_form_of_annotation() {
        let one = |line| annotations(line).pop();
        let allocation = |bytes, tag, estimated| Some(Annotation::Allocation { bytes, tag, estimated });
        assert_eq!(one("[mem] Allocate 32 bytes GPU memory (in_arg:w)."), allocation(32, "in_arg:w", false));
        assert_eq!(one("x Allocate 3 MB GPU memory (proposal)."), allocation(3 << 20, "proposal", true));
        assert_eq!(one("[mem] Allocate 32 bytes GPU memory (a (b) c)."), allocation(32, "a (b) c", false));
        assert_eq!(one("[mem] Allocate 32 bytes GPU memory (a). and (b) too"), allocation(32, "a", false));
        assert_eq!(one("[mem] Allocate 32 bytes GPU memory (a) cut"), allocation(32, "a", false));
        assert_eq!(
            one("[mem] 10 MB GPU global memory free, total 12 MB."),
            Some(Annotation::Device { free_mib: 10, total_mib: 12 })
        );
        assert_eq!(one("[mem] Release GPU memory."), Some(Annotation::Release));
        assert_eq!(one("[mem] finished binding."), None);
        assert_eq!(one("Allocate more workers"), None);
    }

    #[test]
    fn unreadable_annotations_are_told() {
        for line in [
            "[mem] Allocate x bytes GPU memory (t).",
            "[mem] Allocate -3 bytes GPU memory (t).",
            "[mem] Allocate 99999999999999999999999 bytes GPU memory (t).",
            "[mem] Allocate 18446744073709551615 bytes GPU memory (t).",
            "[mem] Allocate 32 bytes GPU memory (t",
            "[mem] Allocate 32 bytes",
            "Allocate 3 GB GPU memory (t).",
        ] {
            assert_eq!(annotations(line), [Annotation::Unreadable], "{line}");
        }
        for line in ["[mem] 13 MB GPU global memory free, total 12 MB.", "[mem] x MB GPU global memory free"]
        {
            assert_eq!(annotations(line), [Annotation::Unreadable], "{line}");
        }
    }

    #[test]
    fn two_records_in_one_line_are_two() {
        let line = "[mem] Allocate 1 bytes GPU memory (a).[mem] Allocate 2 bytes GPU memory (b).";
        assert_eq!(annotations(line).len(), 2);
    }

    #[test]
    fn readings_name_their_process() {
        let line = "Batch [50]\tMemory Usage: \tpython3-pid_12898=3933\tmy-app-pid_7=1\tPower: 85.21 W";
        let reading = |name, pid, mib| ProcessReading { name, pid, mib };
        assert_eq!(
            readings(line),
            (vec![reading("python3", 12898, Some(3933)), reading("my-app", 7, Some(1))], 0)
        );
        assert_eq!(batch(line), Some(50));
        assert_eq!(readings("Memory Usage: nothing"), (vec![], 0));
        let unclear = "Memory Usage: a-pid_5=N/A b-pid_0=9 c-pid_7=1 c-pid_7=2 d-pid_8=393MiB";
        let expected = vec![reading("a", 5, None), reading("c", 7, None), reading("d", 8, None)];
        assert_eq!(readings(unclear), (expected, 3));
    }
}
