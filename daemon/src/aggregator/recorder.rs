//! Writes all records that the daemon receives to a file. It has its own thread, so that a slow disk does not slow the ledger.
//! Records that do not fit in the queue are dropped and counted; readers see the gaps in `seq`. A full or failing disk leaves
//! only complete frames in the file. When the disk works again, the recording continues, and agents are asked to resend their
//! state.

use crate::aggregator::batch::Batch;
use crate::clock;
use crate::stats::{Count, Stats};
use gpumem_ledger::Ledger;
use gpumem_runs::recording::Writer;
use gpumem_wire::{Absence, Body, Reading, Record, Stamp, frame};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Maximum number of queued batches. Each has up to 60 KiB, so the queue takes at most 15 MiB.
const WAITING: usize = 256;
/// Interval for flushing to the kernel. A crash of the daemon loses at most the records of one interval.
const FLUSH: Duration = Duration::from_millis(100);
/// Interval for trying to write again after an error.
const RETRY: Duration = Duration::from_secs(1);

/// A recording in progress. Dropping it ends the recording.
#[derive(Debug)]
pub struct Recorder {
    batches: Option<SyncSender<Batch>>,
    thread: Option<JoinHandle<()>>,
    stats: Arc<Stats>,
}

impl Recorder {
    /// Starts a recording. The file must not exist, because a restart must not overwrite an earlier recording. `%t` in the path
    /// is replaced by the seconds since 1970. `resumed` is notified when the recording continues after a gap.
    pub(crate) fn start(path: &Path, stats: Arc<Stats>, resumed: Arc<Notify>) -> io::Result<Self> {
        let path = expand(path);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let writer = Writer::new(WholeWrites { file, bytes: 0 })?;
        let (batches, inbox) = sync_channel(WAITING);
        let counted = Arc::clone(&stats);
        let run = move || record(writer, &inbox, &path, &counted, &resumed);
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(run)?;
        Ok(Recorder { batches: Some(batches), thread: Some(thread), stats })
    }

    /// Queues a batch for writing without blocking. If the queue is full, counts the records as lost.
    pub(crate) fn take(&self, batch: Batch) {
        if let Some(batches) = &self.batches
            && let Err(error) = batches.try_send(batch)
        {
            let (std::sync::mpsc::TrySendError::Full(batch)
            | std::sync::mpsc::TrySendError::Disconnected(batch)) = error;
            self.stats.add(Count::RecordingLost, frame::records(&batch.frames).count() as u64);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // Ignore the result: the thread has already counted its errors.
            let _ = thread.join();
        }
    }
}

/// Wrapper of the file that does each write completely or not at all, because readers cannot read past a partial frame.
#[derive(Debug)]
struct WholeWrites {
    file: File,
    bytes: u64,
}

impl Write for WholeWrites {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(error) = self.file.write_all_at(bytes, self.bytes) {
            // A part may have been written. It is cut off, and the next write starts at the same offset.
            let _ = self.file.set_len(self.bytes);
            return Err(error);
        }
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn record(
    mut writer: Writer<WholeWrites>,
    inbox: &Receiver<Batch>,
    path: &Path,
    stats: &Stats,
    resumed: &Notify,
) {
    let mut broken = false;
    let mut flushed = Instant::now();
    loop {
        let batch = match inbox.recv_timeout(FLUSH) {
            Ok(batch) => Some(batch),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let mut result = Ok(());
        if let Some(batch) = batch {
            for record in frame::records(&batch.frames).filter_map(|record| record.ok()?.ok()) {
                // The record whose write failed stays in the writer's buffer. Later records are dropped, so that the buffer does
                // not grow.
                let is_lost = broken || result.is_err();
                if !is_lost {
                    result = writer.write(batch.origin, &record);
                }
                stats.add(if is_lost { Count::RecordingLost } else { Count::Recorded }, 1);
            }
        }
        if result.is_ok() && flushed.elapsed() >= if broken { RETRY } else { FLUSH } {
            flushed = Instant::now();
            result = writer.flush();
            if broken && result.is_ok() {
                tracing::info!(path = %path.display(), "the recording continues");
                broken = false;
                resumed.notify_one();
            }
        }
        if let Err(error) = result
            && !std::mem::replace(&mut broken, true)
        {
            tracing::error!(path = %path.display(), %error, "the recording cannot be written; retrying");
        }
    }
    if let Err(error) = writer.flush() {
        tracing::error!(path = %path.display(), %error, "the last records are missing in the recording");
    }
}

fn expand(path: &Path) -> PathBuf {
    match path.to_str() {
        Some(text) => text.replace("%t", &clock::wall().as_secs().to_string()).into(),
        None => path.to_owned(),
    }
}

/// Appends a record of the daemon's own sources to the frames for a recording.
pub(super) fn append_for_recording(record: &Record<'_>, ledger: &Ledger, frames: &mut Vec<u8>) {
    match record.body {
        // The aggregator makes its own such record when it closes the run, which is later. The recording must have the record at
        // that position.
        Body::ProcessGone { .. } => {}
        // A recording may begin after the reading to which this record refers.
        Body::SameProcesses {} => {
            for (key, used) in ledger.same_as_before(record.stamp.device) {
                let body = Body::ProcessSample {
                    start_ticks: key.start_ticks,
                    used_bytes: Reading::of(used),
                    absence: Absence::default(),
                    lists: 0, // not known here
                };
                Record { stamp: Stamp { thread: key.pid, ..record.stamp }, body }.append_frame(frames);
            }
        }
        _ => record.append_frame(frames),
    }
}
