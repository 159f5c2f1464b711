//! Reads the kernel's log, which is /dev/kmsg, a growing file or a pipe, without blocking and in bounded pieces.

use super::parse;
use rustix::buffer::spare_capacity;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum number of bytes in one read; more than the longest record of /dev/kmsg.
const PIECE: usize = 16 * 1024;
/// Maximum number of reads in one pass (each returns one record of /dev/kmsg). The next pass continues there.
const PIECES: usize = 512;
/// Maximum length of a line; longer lines are not from the kernel.
const LINE: usize = 8 * 1024;
/// Interval for opening the log again after an error (ns).
const RETRY_NS: u64 = 30_000_000_000;

/// The log, and the position up to which it has been read.
#[derive(Debug)]
pub(crate) struct Log {
    pub path: PathBuf,
    /// The open kernel log, or the error that prevents reading.
    open: std::io::Result<OpenLog>,
    /// Time at which opening is tried again after an error (ns).
    next_try_ns: u64,
}

#[derive(Debug)]
struct OpenLog {
    file: File,
    /// Whether each read returns exactly one record, as for /dev/kmsg.
    has_records: bool,
    inode: u64,
    is_regular: bool,
    /// Number of bytes up to which the file has been read.
    at: u64,
    /// Bytes of the last line, if it is incomplete.
    rest: Vec<u8>,
}

impl Log {
    /// Opens the log at its end, because earlier lines are about processes that have already ended.
    pub(crate) fn open(path: &Path) -> Self {
        Log { path: path.to_owned(), open: OpenLog::at(path, true), next_try_ns: 0 }
    }

    pub(crate) fn problem(&self) -> Option<String> {
        self.open.as_ref().err().map(ToString::to_string)
    }

    /// Returns the messages in the lines that were added since the last call.
    pub(crate) fn read(&mut self, now_ns: u64) -> Vec<String> {
        if self.open.is_err() && now_ns >= self.next_try_ns {
            self.next_try_ns = now_ns.saturating_add(RETRY_NS);
            self.open = OpenLog::at(&self.path, true);
        }
        let mut lines = Vec::new();
        let Ok(open) = &mut self.open else { return lines };
        match open.read(&mut lines) {
            // The file was rotated, so read the new one from its beginning.
            Ok(()) if open.was_replaced(&self.path) => self.open = OpenLog::at(&self.path, false),
            Ok(()) => {}
            Err(error) => self.open = Err(error),
        }
        lines
    }
}

impl OpenLog {
    fn at(path: &Path, from_end: bool) -> std::io::Result<Self> {
        let flags = OFlags::NONBLOCK.bits() as i32;
        let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let about = file.metadata()?;
        let mut at = 0;
        if from_end && !about.file_type().is_fifo() {
            at = file.seek(SeekFrom::End(0))?;
        }
        Ok(OpenLog {
            file,
            has_records: about.file_type().is_char_device(),
            inode: about.ino(),
            is_regular: about.is_file(),
            at,
            rest: Vec::new(),
        })
    }

    fn was_replaced(&self, path: &Path) -> bool {
        let is_other = |about: std::fs::Metadata| about.ino() != self.inode || about.len() < self.at;
        self.is_regular && std::fs::metadata(path).is_ok_and(is_other)
    }

    fn read(&mut self, lines: &mut Vec<String>) -> std::io::Result<()> {
        let mut piece = Vec::with_capacity(PIECE);
        for _ in 0..PIECES {
            piece.clear();
            let read = rustix::io::read(&self.file, spare_capacity(&mut piece));
            let bytes = match read.map_err(std::io::Error::from) {
                Ok(0) => return Ok(()),
                Ok(_) => piece.as_slice(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // The kernel overwrote records before they were read, so continue with the next ones.
                Err(error) if self.has_records && error.kind() == ErrorKind::BrokenPipe => continue,
                Err(error) => return Err(error),
            };
            self.at = self.at.saturating_add(bytes.len() as u64);
            if self.has_records {
                push(lines, bytes);
                continue;
            }
            let mut parts = bytes.split(|&byte| byte == b'\n');
            let last = parts.next_back().unwrap_or_default();
            for part in parts {
                if self.rest.len() <= LINE {
                    self.rest.extend_from_slice(part);
                    push(lines, &self.rest);
                }
                self.rest.clear();
            }
            if self.rest.len() <= LINE {
                self.rest.extend_from_slice(last);
            }
        }
        Ok(())
    }
}

/// Adds the message of a record or line, if it has one.
fn push(lines: &mut Vec<String>, record: &[u8]) {
    let text = String::from_utf8_lossy(record);
    lines.extend(parse::message(&text).filter(|line| !line.is_empty()).map(str::to_owned));
}
