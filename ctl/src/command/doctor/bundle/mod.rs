//! `gpumemctl doctor --bundle`: an archive for support, without personal data.
//!
//! The archive never has command lines, environments, tags, categories or jobs. A process has its pid, user, device and bytes.

mod redact;

use super::findings::{self, DoctorReport};
use crate::args::Doctor as Args;
use crate::client::Daemon;
use crate::output::print;
use crate::when::now_ns;
use anyhow::{Context, Result, bail};
use gpumem_model::control::{Finding, Ps};
use gpumem_model::escape::escape;
use gpumem_report::plot::crc32;
use miniz_oxide::deflate::compress_to_vec;
use redact::Redactor;
use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Maximum number of bytes at the end of a log that are read.
const LOG_BYTES: u64 = 64 << 10;
/// Maximum number of lines of a log that are included.
const LOG_LINES: usize = 200;

/// Prints the list of contents and writes the archive, which must be a new file.
pub(super) fn write(args: &Args, report: &DoctorReport) -> Result<()> {
    let now_s = now_ns().unsigned_abs() / 1_000_000_000;
    let path = match &args.bundle {
        Some(Some(path)) => path.clone(),
        _ => PathBuf::from(format!("gpumem-doctor-{now_s}.tar.gz")),
    };
    if path.symlink_metadata().is_ok() {
        bail!("{}: exists already: give another name", path.display());
    }
    let daemon = Daemon::find(args.socket.as_deref()).ok();
    let ps = daemon.as_ref().and_then(|daemon| daemon.ps().ok()).unwrap_or_default();
    let environment = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    let users = if args.keep_names { Vec::new() } else { users(&ps) };
    let redactor = Redactor::new(&users, environment);
    let mut parts = vec![
        part("versions.txt", "versions of gpumem, the kernel and the driver", versions(report)),
        part("doctor.txt", "the findings of doctor", findings::text(report, None)),
        part("doctor.json", "the same findings as JSON", findings::json(report)),
        part("driver.txt", "the driver's own files, device files and their modes", driver()),
        part("processes.txt", "pid, user, device, state and bytes; no command", processes(&ps)),
    ];
    if let Some(text) = report.fact("configuration").and_then(|path| fs::read_to_string(path).ok()) {
        let (text, left_out) = redact::settings(&text);
        let what = format!("the known settings, without comments; {left_out} other lines left out");
        parts.push(part("config.toml", &what, text));
    }
    if let Some(text) = daemon.as_ref().and_then(|daemon| daemon.metrics().ok()) {
        let (text, left_out) = redact::metrics(&text);
        let what = format!(
            "the daemon's metrics; {left_out} series with names of people, programs or tags left out"
        );
        parts.push(part("metrics.prom", &what, text));
    }
    if let Some(log) = log(report) {
        parts.push(part("log.txt", "the end of the daemon's log", log));
    }
    for part in &mut parts {
        part.text = redactor.text(&part.text);
    }
    let mut list = String::new();
    for Part { name, what, text } in &parts {
        list += &format!("  {name:<14} {:>7} bytes  {what}\n", text.len());
    }
    list.push_str("not included: command lines, environments, tags, categories, jobs\n");
    list.push_str(match users.is_empty() {
        true => "user names are kept\n",
        false => "users are named user-XXXXXX, the same in all files (--keep-names keeps them)\n",
    });
    print(&format!("{} will contain:\n{list}", escape(&path.display().to_string())))?;
    let mut files = vec![("contents.txt", list.as_str())];
    files.extend(parts.iter().map(|part| (part.name, part.text.as_str())));
    let packed = pack(&files, now_s);
    let context = || path.display().to_string();
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).with_context(context)?;
    file.write_all(&packed).with_context(context)?;
    print(&format!("written: {} bytes, readable by you alone\n", packed.len()))
}

/// A file of the archive, and its description in the list of contents.
struct Part {
    name: &'static str,
    what: String,
    text: String,
}

fn part(name: &'static str, what: &str, text: String) -> Part {
    Part { name, what: what.to_owned(), text }
}

/// Returns user names that may occur in the archive's texts.
fn users(ps: &Ps) -> Vec<String> {
    let mut users: Vec<String> = ps.processes.iter().filter_map(|row| row.user.clone()).collect();
    users.extend(["USER", "LOGNAME"].into_iter().filter_map(|name| std::env::var(name).ok()));
    // Invalid UTF-8 in one name must not prevent the redaction of the others.
    let accounts = fs::read("/etc/passwd").unwrap_or_default();
    let accounts = String::from_utf8_lossy(&accounts);
    // User ids from 1000 to 64999 are of people; names of system accounts are not personal.
    let people = accounts.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, id) = (fields.next()?, fields.nth(1)?.parse::<u32>().ok()?);
        (1000..65_000).contains(&id).then(|| name.to_owned())
    });
    users.extend(people);
    users.sort();
    users.dedup();
    users
}

fn versions(report: &DoctorReport) -> String {
    let daemon = match &report.daemon {
        Some((_, doctor)) => format!("gpumemd {}, up {} s", doctor.version, doctor.uptime_s),
        None => "gpumemd does not answer".to_owned(),
    };
    let kernel = rustix::system::uname();
    let kernel = [kernel.sysname(), kernel.release(), kernel.machine()].map(|word| word.to_string_lossy());
    let mut lines =
        vec![concat!("gpumemctl ", env!("CARGO_PKG_VERSION")).to_owned(), daemon, kernel.join(" ")];
    let system = fs::read_to_string("/etc/os-release").unwrap_or_default();
    lines.extend(system.lines().filter(|line| line.starts_with("PRETTY_NAME=")).map(str::to_owned));
    let is_of_driver = |of: &&Finding| ["nvml", "driver", "driver.versions"].contains(&of.id.as_str());
    let driver = report.findings.iter().filter(is_of_driver);
    lines.extend(driver.map(|finding| format!("{}: {}", finding.id, finding.text)));
    lines.join("\n") + "\n"
}

fn driver() -> String {
    let mut text = String::new();
    for file in ["/proc/driver/nvidia/version", "/proc/driver/nvidia/params"] {
        let content = fs::read_to_string(file);
        text +=
            &content.map_or_else(|error| format!("{file}: {error}\n"), |text| format!("{file}\n{text}\n"));
    }
    let entries = fs::read_dir("/dev").into_iter().flatten().flatten();
    let mut nodes: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    nodes.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("nvidia")));
    nodes.sort();
    for path in nodes {
        if let Ok(node) = path.metadata() {
            let (path, mode) = (path.display(), node.permissions().mode() & 0o7777);
            text += &format!("{path} mode {mode:04o} user {} group {}\n", node.uid(), node.gid());
        }
    }
    text
}

fn processes(ps: &Ps) -> String {
    let bytes = |bytes: Option<i64>| bytes.map_or("-".to_owned(), |bytes| bytes.to_string());
    let mut text = "device pid user flags used_bytes tracked_bytes why\n".to_owned();
    for row in &ps.processes {
        let device = ps.devices.get(row.device).map_or("-", |device| device.uuid.as_str());
        let [user, why] = [&row.user, &row.why].map(|text| text.as_deref().unwrap_or("-"));
        let used = bytes(row.used_bytes.and_then(|bytes| i64::try_from(bytes).ok()));
        let (pid, flags, tracked) = (row.pid, row.flags.join(","), bytes(row.tracked_bytes));
        text += &format!("{device} {pid} {user} {flags} {used} {tracked} {why}\n");
    }
    text
}

/// Returns the end of the daemon's log. A private daemon's is a file next to its sockets, the system's is in the journal.
fn log(report: &DoctorReport) -> Option<String> {
    let beside = report.daemon.as_ref().map(|(control, _)| control.with_file_name("gpumemd.log"));
    if let Some(text) = beside.and_then(|path| end_of(&path).ok()) {
        return Some(text);
    }
    let mut command = Command::new("journalctl");
    command.args(["--unit=gpumemd", "--lines=200", "--no-pager", "--output=short-iso", "--quiet"]);
    command.arg("--no-hostname");
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success() && !text.trim().is_empty()).then_some(text)
}

fn end_of(path: &Path) -> std::io::Result<String> {
    let mut file = fs::File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    let last = lines.get(lines.len().saturating_sub(LOG_LINES)..).unwrap_or_default();
    Ok(last.join("\n") + "\n")
}

const BLOCK: usize = 512;
/// The best usual compression of miniz_oxide, because the files are small.
const DEFLATE_LEVEL: u8 = 9;

/// Packs files, each with name and content, into a .tar.gz: ustar headers, deflated in one member (RFC 1952). Names must be short
/// ASCII. `time_s` is the files' time of change, in s since 1970.
fn pack(files: &[(&str, &str)], time_s: u64) -> Vec<u8> {
    let mut tar = Vec::new();
    for (name, content) in files {
        tar.extend(tar_header(name, content.len(), time_s));
        tar.extend(content.as_bytes());
        tar.resize(tar.len().next_multiple_of(BLOCK), 0);
    }
    tar.resize(tar.len() + 2 * BLOCK, 0);
    // The gzip header: deflate, no name, no time, highest compression, Unix.
    let mut packed = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 2, 3];
    packed.extend(compress_to_vec(&tar, DEFLATE_LEVEL));
    packed.extend(crc32(tar.iter()).to_le_bytes());
    packed.extend((tar.len() as u32).to_le_bytes());
    packed
}

fn tar_header(name: &str, bytes: usize, time_s: u64) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let mut put = |at: usize, text: &[u8]| {
        for (place, byte) in header.iter_mut().skip(at).zip(text) {
            *place = *byte;
        }
    };
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0"); // user id 0, because the real user must not be visible
    put(116, b"0000000\0");
    put(124, format!("{bytes:011o}\0").as_bytes());
    put(136, format!("{time_s:011o}\0").as_bytes());
    put(148, b"        0");
    put(257, b"ustar\x0000");
    // The checksum is computed with blanks in the checksum's own field.
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    for (place, byte) in header.iter_mut().skip(148).zip(format!("{sum:06o}\0 ").bytes()) {
        *place = byte;
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_the_known_ones() {
        let header = tar_header("a.txt", 8, 0);
        assert_eq!(
            (&header[..6], &header[124..136], header[156]),
            (&b"a.txt\0"[..], &b"00000000010\0"[..], b'0')
        );
    }
}
