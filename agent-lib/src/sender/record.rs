//! Handles requests of the program and the daemon: recordings to a file while the daemon stays connected, dumps (the current
//! state as a file), and muting (records are withheld).

use super::link::Link;
use super::{Progress, Sender};
use crate::record::status;
use crate::sources::api::recordings::{self, RecordingLimits, RecordingReply, RecordingRequest};
use gpumem_wire::{Body, ByeReason, Record, Stamp, WITHHELD};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

/// Maximum number of attempts to send a consistent state while the program continues.
const TRIES: usize = 50;

/// A recording of a range of training steps, while its first step has not begun.
#[derive(Debug)]
pub(super) struct StepWindow {
    /// Link to the recording's file, which contains only its header and Hello so far.
    link: Link,
    path: PathBuf,
    /// Numbers of the first and the last step to record.
    steps: (u64, u64),
    limits: RecordingLimits,
}

/// Result of a request: the path of the file written, or the reply that states the error.
type Outcome = Result<PathBuf, RecordingReply>;

fn refusal(errno: i32, text: String) -> RecordingReply {
    RecordingReply { errno: errno as u16, told: text }
}

fn busy(path: &Path, why: &str) -> Outcome {
    Err(refusal(libc::EBUSY, format!("{}: {why}", path.display())))
}

fn written(path: PathBuf, is_whole: bool) -> Outcome {
    if is_whole {
        Ok(path)
    } else {
        Err(RecordingReply::failed(&path, &io::Error::from_raw_os_error(libc::EIO)))
    }
}

impl Sender {
    /// Handles all requests of the program; returns whether there were any.
    pub(super) fn handle_requests(&mut self) -> bool {
        let mut any = false;
        while let Some((number, request)) = recordings::next_request() {
            any = true;
            let outcome = self.handle_request(request);
            recordings::done(number, outcome);
        }
        self.end_when_due();
        self.dump_when_due();
        any
    }

    /// Handles a command of the daemon and replies to it. `request` is `None` if it has a limit unknown to this agent.
    pub(super) fn command(&mut self, command: u8, request: Option<RecordingRequest>) {
        let outcome = match request {
            Some(RecordingRequest::Start(path, _) | RecordingRequest::Dump { path, .. })
                if let Err(refused) = self.may_create(&path) =>
            {
                refused
            }
            Some(request) => self.handle_request(request),
            None => refusal(
                libc::EINVAL,
                "this agent does not support a requested limit of the \
                 recording"
                    .to_owned(),
            ),
        };
        let body = Body::Done { result: outcome.errno, command, told: &outcome.told };
        self.send(body);
        self.flush();
    }

    fn handle_request(&mut self, request: RecordingRequest) -> RecordingReply {
        let outcome = match request {
            RecordingRequest::Start(path, limits) => self.start_recording(&path, limits),
            RecordingRequest::Step(number) => self.step(number),
            RecordingRequest::Stop => {
                let outcome = self.stop_recording();
                recordings::set_next_step(u64::MAX);
                self.ended = None;
                outcome
            }
            RecordingRequest::Mute(by_daemon) => {
                self.muted_by_daemon = by_daemon.unwrap_or(self.muted_by_daemon);
                self.apply_mute();
                Ok(PathBuf::new())
            }
            RecordingRequest::Dump { path, finished } => {
                let outcome = match self.link.recording().map(Path::to_owned) {
                    Some(recording) if path.is_empty() => self.write_out(recording),
                    _ => self.dump(&path),
                };
                if finished && outcome.is_ok() {
                    let _ = self.stop_recording();
                }
                outcome
            }
        };
        outcome.map_or_else(|failed| failed, |path| RecordingReply::done(&path))
    }

    /// Returns an error if the server is neither root, nor this program's user, nor the system's daemon, or if the program's
    /// environment does not permit files in that directory.
    fn may_create(&self, name: &str) -> Result<(), RecordingReply> {
        if let Some(uid) = self.link.stranger() {
            let text = format!(
                "the server of this program's agent runs as user {uid}, which is neither root nor the program's user: no file is created for it"
            );
            return Err(refusal(libc::EPERM, text));
        }
        recordings::check_permitted(self.core, name)
    }

    fn start_recording(&mut self, name: &str, limits: RecordingLimits) -> Outcome {
        if let Some(recording) = self.link.recording() {
            let is_it = name.is_empty() || std::path::absolute(name).is_ok_and(|path| path == recording);
            if is_it && limits == RecordingLimits::default() {
                return Ok(recording.to_owned());
            }
            if self.link.is_recording_beside() {
                return busy(recording, "a recording is already running");
            }
        }
        if let Some(window) = &self.window {
            return busy(
                &window.path,
                &format!("a recording that begins at step {} is already requested", window.steps.0),
            );
        }
        let (link, path) = self.create_link(name)?;
        self.ended = None;
        let Some(steps) = limits.steps else { return self.begin_recording(link, path, limits) };
        self.window = Some(StepWindow { link, path: path.clone(), steps, limits });
        recordings::set_next_step(steps.0);
        Ok(path)
    }

    fn create_link(&self, name: &str) -> Result<(Link, PathBuf), RecordingReply> {
        let (file, path) = recordings::create(self.core, name)?;
        let link = Link::to_file(self.core, file);
        link.map_err(|error| RecordingReply::failed(&path, &error)).map(|link| (link, path.clone()))
    }

    /// Starts a recording: writes the state, and from now on each packet. `link` leads to a new file with its header.
    fn begin_recording(&mut self, link: Link, path: PathBuf, limits: RecordingLimits) -> Outcome {
        self.send_new();
        self.flush();
        let (link, is_whole, written_to) = self.write_state_to(link, self.progress.packed_seq);
        let is_whole = is_whole && self.catch_up(written_to.packed_seq);
        let path = written(path, is_whole)?;
        let bytes = std::fs::metadata(&path).map_or(0, |about| about.len());
        if limits.max_bytes.is_some_and(|limit| bytes > limit) {
            // The file is the agent's own, and its path was not returned yet.
            let _ = std::fs::remove_file(&path);
            let text = format!(
                "{}: the state at the start has {bytes} bytes, more than the maximum size",
                path.display()
            );
            return Err(refusal(libc::EFBIG, text));
        }
        // Names added while the state was written are sent twice on one of the links, which does no harm.
        self.progress.names_sent = self.progress.names_sent.min(written_to.names_sent);
        self.link.record_beside(link, path.clone(), bytes, limits.max_bytes);
        self.record_until_ns =
            limits.for_ns.map_or(0, |for_ns| self.core.recorder.clock.now().saturating_add(for_ns));
        Ok(path)
    }

    /// Starts the recording that waits for this step, or ends the one whose last step was the previous step.
    fn step(&mut self, number: u64) -> Outcome {
        if let Some(window) = self.window.take_if(|window| number >= window.steps.0) {
            let (_, last) = window.steps;
            if number > last {
                // The program has skipped all steps of the window.
                self.window = Some(window);
                self.cancel_window();
                return Ok(PathBuf::new());
            }
            recordings::set_next_step(last + 1);
            return self.begin_recording(window.link, window.path, window.limits);
        }
        recordings::set_next_step(u64::MAX);
        self.stop_recording()
    }

    /// Cancels a recording that waits for its first step; returns whether there was one.
    pub(super) fn cancel_window(&mut self) -> bool {
        let Some(window) = self.window.take() else { return false };
        recordings::set_next_step(u64::MAX);
        // The file is the agent's own, and has no records.
        let _ = std::fs::remove_file(&window.path);
        true
    }

    /// Ends the additional recording if it has reached its limit of time or size.
    fn end_when_due(&mut self) {
        let is_late = self.record_until_ns != 0 && self.core.recorder.clock.now() >= self.record_until_ns;
        if self.link.is_recording_beside() && (is_late || self.link.is_beside_full()) {
            let _ = self.stop_recording();
            recordings::set_next_step(u64::MAX);
        }
    }

    /// Sends the records up to number `seq` on the main link. Without a main link they are skipped.
    fn catch_up(&mut self, seq: u64) -> bool {
        for _ in 0..TRIES {
            if self.progress.packed_seq >= seq {
                break;
            }
            if self.link.is_up() {
                self.send_records(seq);
                self.flush();
            } else {
                self.progress.packed_seq = seq;
            }
        }
        if !self.link.is_up() {
            self.core.recorder.ring.set_sent(self.progress.packed_seq);
        }
        self.progress.packed_seq == seq
    }

    fn stop_recording(&mut self) -> Outcome {
        self.record_until_ns = 0;
        if self.cancel_window() {
            return Ok(PathBuf::new());
        }
        let Some(path) =
            self.link.recording().filter(|_| self.link.is_recording_beside()).map(Path::to_owned)
        else {
            // The file of a recording that has ended at its limit is returned to the first request to stop it.
            return Ok(self.ended.take().unwrap_or_default());
        };
        let outcome = self.write_out(path.clone());
        self.ended = Some(path.clone());
        let (stamp, body) = (self.core.recorder.stamp(), Body::Bye { reason: ByeReason::Requested });
        match self.link.end_beside(&Record { stamp, body }) {
            Ok(()) => outcome,
            Err(error) => Err(RecordingReply::failed(&path, &error)),
        }
    }

    /// Writes all records made so far to the current recording.
    fn write_out(&mut self, path: PathBuf) -> Outcome {
        let head = self.core.recorder.ring.head();
        for _ in 0..TRIES {
            self.send_new();
            if self.progress.packed_seq >= head {
                break;
            }
        }
        self.flush();
        written(path, self.link.recording().is_some() && self.progress.packed_seq >= head)
    }

    /// Writes the current state to a file of its own. The main link is not affected.
    fn dump(&mut self, name: &str) -> Outcome {
        let (link, path) = self.create_link(name)?;
        self.flush();
        let (mut link, is_whole, written_to) = self.write_state_to(link, self.core.recorder.ring.head());
        let stamp = self.core.recorder.stamp();
        for body in [
            Body::Watermark { last_seq: written_to.packed_seq, in_flight_since_ns: 0 },
            Body::Bye { reason: ByeReason::Requested },
        ] {
            link.frame(&Record { stamp, body });
        }
        written(path, link.flush() && is_whole)
    }

    /// Writes names, state, and the records after `packed_seq` to another link. The main link is not affected. Returns the other
    /// link, whether the state is complete, and what was written.
    fn write_state_to(&mut self, other: Link, packed_seq: u64) -> (Link, bool, Progress) {
        let link = std::mem::replace(&mut self.link, other);
        let progress = Progress { packed_seq, ..Progress::default() };
        let main = std::mem::replace(&mut self.progress, progress);
        self.dumping = true;
        self.send_changes();
        self.progress.resync = Some(self.epoch);
        for _ in 0..TRIES {
            let Some(epoch) = self.progress.resync else { break };
            self.send_state(epoch);
        }
        let is_whole = self.progress.resync.is_none() && self.link.flush();
        let other = std::mem::replace(&mut self.link, link);
        self.dumping = false;
        (other, is_whole, std::mem::replace(&mut self.progress, main))
    }

    fn dump_when_due(&mut self) {
        let period_ns = recordings::DUMP_PERIOD_NS.load(Relaxed);
        let now = self.core.recorder.clock.now();
        if period_ns == 0 || super::finishing() || !status::armed() {
            self.next_dump_ns = 0;
            return;
        }
        if self.next_dump_ns == 0 {
            self.next_dump_ns = now + period_ns;
        }
        if now >= self.next_dump_ns {
            self.next_dump_ns = now + period_ns;
            // A failure is ignored: the next dump may succeed.
            let _ = self.dump(&recordings::dump_file());
        }
    }

    /// Begins or ends muting (records are withheld), as the program and the daemon request it.
    pub(super) fn apply_mute(&mut self) {
        let muted = recordings::is_muted() || self.muted_by_daemon;
        match (self.progress.muted_since, muted) {
            (None, true) => {
                let head = self.core.recorder.ring.head();
                self.send_records(head);
                self.flush();
                self.progress.muted_since = Some(self.progress.packed_seq + 1);
            }
            (Some(_), false) => {
                self.send_records(self.core.recorder.ring.head()); // skips the muted records
                self.send_withheld_count();
                self.progress.muted_since = None;
                self.progress.resync = Some(self.epoch);
            }
            _ => {}
        }
    }

    /// Sends how many records were withheld since `muted_since`.
    pub(super) fn send_withheld_count(&mut self) {
        let Some(first_seq) = self.progress.muted_since else { return };
        let count = (self.progress.packed_seq + 1).saturating_sub(first_seq);
        if count > 0 {
            let stamp = Stamp { context: WITHHELD, ..self.core.recorder.stamp() };
            self.link.frame(&Record { stamp, body: Body::Lost { count, first_seq } });
            self.progress.muted_since = Some(self.progress.packed_seq + 1);
        }
    }
}
