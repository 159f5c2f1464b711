//! Recording of what the daemon sees, on a thread of its own: a slow disk must not slow the ledger. What it
//! cannot keep up with is counted and missing, and the reader sees that by the holes in `seq`.

use crate::source::Batch;
use crate::stats::{Count, Stats};
use gpumem_runs::recording::Writer;
use gpumem_wire::{Record, frame};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Batches that may wait for the disk: at 60 KiB each, 15 MiB at most.
const WAITING: usize = 256;
/// What was recorded is handed to the system that often: what a crash of the daemon can cost.
const FLUSH: Duration = Duration::from_millis(100);

/// A recording that goes on; dropping it ends it.
#[derive(Debug)]
pub struct Recorder {
    batches: Option<SyncSender<Batch>>,
    thread: Option<JoinHandle<()>>,
    stats: Arc<Stats>,
}

impl Recorder {
    /// Begins a recording. The file must not be there yet: a restart must not overwrite what the last life
    /// recorded. `%t` in the path becomes the seconds since 1970.
    ///
    /// # Errors
    /// What the system says about the file.
    pub fn start(path: &Path, stats: Arc<Stats>) -> io::Result<Self> {
        let path = expand(path);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let writer = Writer::new(file)?;
        let (batches, inbox) = sync_channel(WAITING);
        let counted = Arc::clone(&stats);
        let run = move || record(writer, &inbox, &path, &counted);
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(run)?;
        Ok(Recorder { batches: Some(batches), thread: Some(thread), stats })
    }

    /// Takes a batch; never waits.
    pub fn take(&self, batch: Batch) {
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
            // It has counted what went wrong.
            let _ = thread.join();
        }
    }
}

fn record(mut writer: Writer<File>, inbox: &Receiver<Batch>, path: &Path, stats: &Stats) {
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
            let records = frame::records(&batch.frames).filter_map(|record| record.ok()?.ok());
            let mut count = 0;
            for record in records {
                count += 1;
                result = result.and_then(|()| write(&mut writer, &batch, &record, broken));
            }
            let lost = broken || result.is_err();
            stats.add(if lost { Count::RecordingLost } else { Count::Recorded }, count);
        }
        if !broken && flushed.elapsed() >= FLUSH {
            flushed = Instant::now();
            result = result.and_then(|()| writer.flush());
        }
        if let Err(error) = result {
            // A frame may be half written: nothing after it could be read.
            tracing::error!(path = %path.display(), %error, "the recording ends here");
            broken = true;
        }
    }
    if !broken && let Err(error) = writer.flush() {
        tracing::error!(path = %path.display(), %error, "the end of the recording is missing");
    }
}

fn write(writer: &mut Writer<File>, batch: &Batch, record: &Record<'_>, broken: bool) -> io::Result<()> {
    if broken { Ok(()) } else { writer.write(batch.origin, record) }
}

fn expand(path: &Path) -> PathBuf {
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seconds = seconds.map_or(0, |since| since.as_secs()).to_string();
    match path.to_str() {
        Some(text) => text.replace("%t", &seconds).into(),
        None => path.to_owned(),
    }
}
