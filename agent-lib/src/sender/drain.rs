//! Sends new names and records, and then a watermark: the number up to which all records were sent. Receives commands.

use super::{Sender, finishing};
use crate::base::clock::MARGIN_NS;
use crate::base::ring::Made;
use crate::record::status::{self, StatusReport};
use crate::sources::api::recordings::{RecordingLimits, RecordingRequest};
use crate::threads;
use gpumem_wire::{Body, ByeReason, Flags, Record, Stamp, frame};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Timeout for a thread to finish its record. After it, the round ends, and a later round continues.
pub(super) const QUIESCE_TIMEOUT: Duration = Duration::from_millis(20);
/// Number of ring slots that are prefetched before they are read, because they lie in the caches of other cores.
const PREFETCHED: u64 = 8;
/// Maximum number of records in one pass. Each pass reads time and head anew. A pass that reaches the head sends a watermark.
const MAX_RECORDS: u64 = 16 * 1024;

impl Sender {
    /// Sends `body` as a record without a number. Returns false if the link has ended.
    pub(super) fn send(&mut self, body: Body<'_>) -> bool {
        self.link.frame(&Record { stamp: self.core.recorder.stamp(), body })
    }

    /// Sends names, records, changed reports and a watermark. Returns whether there were new records.
    pub(super) fn send_new(&mut self) -> bool {
        let mut busy = false;
        while self.link.is_up() {
            // The order matters: a driver call in flight at `now` is still in flight when `in_flight_since_ns` is read, or its
            // record has a number up to `head`.
            let now = self.core.recorder.clock.now() - MARGIN_NS;
            let in_flight_since_ns = threads::moving_since_ns();
            let head = self.core.recorder.ring.head();
            let until = head.min(self.progress.packed_seq + MAX_RECORDS);
            let before = self.progress.packed_seq;
            self.core.devices.introduce_awaited(&self.core.recorder, self.thread);
            let whole = self.send_names(Flags(0)) && self.send_records(until);
            busy |= self.progress.packed_seq > before;
            self.send_changes();
            if whole && self.progress.packed_seq == head && self.progress.muted_since.is_none() {
                let body = Body::Watermark { last_seq: head, in_flight_since_ns };
                let stamp = Stamp { time_ns: now, ..Stamp::default() };
                self.link.frame(&Record { stamp, body });
            }
            self.flush();
            if !whole || self.progress.packed_seq == head {
                break;
            }
        }
        busy
    }

    /// Sends the current packet. Then writers may reuse the ring slots of its records.
    pub(super) fn flush(&mut self) -> bool {
        let sent = self.link.flush();
        if sent && !self.dumping {
            self.core.recorder.ring.set_sent(self.progress.packed_seq);
        }
        sent
    }

    pub(super) fn send_names(&mut self, flags: Flags) -> bool {
        let end = self.core.recorder.names.end();
        while self.progress.names_sent < end {
            let start = self.link.packet.len();
            let next = self.core.recorder.names.copy(self.progress.names_sent, end, &mut self.link.packet);
            set_flags(&mut self.link.packet[start..], flags);
            if next == self.progress.names_sent && start == 0 {
                return true; // a thread has not finished writing the next name; a later round sends it
            }
            self.progress.names_sent = next;
            if self.progress.names_sent < end && !self.flush() {
                return false;
            }
        }
        true
    }

    /// Sends the finished records up to number `until`. A missing number counts as a loss. Returns false if some could not be
    /// sent.
    pub(super) fn send_records(&mut self, until: u64) -> bool {
        if self.progress.muted_since.is_some() {
            // While muted, records are skipped once their writers have finished.
            let is_quiet = self.progress.packed_seq >= until || threads::quiesce(until, QUIESCE_TIMEOUT);
            if is_quiet {
                self.progress.packed_seq = self.progress.packed_seq.max(until);
            }
            return is_quiet;
        }
        let mut quiet = 0;
        while self.progress.packed_seq < until {
            let seq = self.progress.packed_seq + 1;
            self.core.recorder.ring.expect_to_read(seq + PREFETCHED);
            let ring = &self.core.recorder.ring;
            match ring.made(seq, until, &mut quiet, |until| threads::quiesce(until, QUIESCE_TIMEOUT)) {
                Made::Unfinished => return false,
                Made::Record(row) => {
                    if frame::PREFIX_BYTES + row.len() * 8 > self.link.room() && !self.flush() {
                        return false;
                    }
                    self.link.slot(&row);
                }
                Made::Lost => self.progress.has_losses = true,
            }
            self.progress.packed_seq = seq;
        }
        true
    }

    /// Sends the state of the agent and of each source of names, if it has changed.
    pub(super) fn send_changes(&mut self) {
        if self.progress.layers_version != Some(status::layers_version()) {
            self.progress.layers_version = Some(status::layers_version());
            for status::LayerReport { layer, state, reason } in status::layers() {
                self.send(Body::Layer { layer, state, reason: &reason });
            }
            if let Some(models) = status::models() {
                self.send(Body::Models { models: &models });
            }
        }
        let refused = self.core.recorder.live.refused.load(Relaxed) + threads::refused();
        let is_full = self.core.recorder.names.refused.load(Relaxed) > 0; // not the count, which would be sent with each change
        let shortages = (self.core.unrestored_rows.load(Relaxed), refused, is_full);
        let version = status::version();
        if self.progress.state_version == Some(version) && self.shortages == shortages {
            return;
        }
        self.progress.state_version = Some(version);
        self.shortages = shortages;
        self.send_reports(self.progress.reports_sent);
    }

    /// Sends the reports of the agent's state with numbers above `after`, and at least the last one.
    pub(super) fn send_reports(&mut self, after: u64) {
        let (unrestored, refused, is_full) = self.shortages;
        let mut reports = status::reports_after(after, self.core.recorder.clock.now());
        if let Some(StatusReport { detail, .. }) = reports.last_mut() {
            let rows = format!("{} rows found no place: the state is incomplete", refused + unrestored);
            let names = "the table of names is full: new names are dropped".to_owned();
            for (_, more) in [(refused + unrestored > 0, rows), (is_full, names)].iter().filter(|(so, _)| *so)
            {
                *detail = if detail.is_empty() { more.clone() } else { format!("{detail}; {more}") };
            }
        }
        for StatusReport { number, time_ns, state, result, detail } in reports {
            self.progress.reports_sent = number;
            let stamp = Stamp { time_ns, ..Stamp::default() };
            self.link.frame(&Record { stamp, body: Body::Agent { result, state, detail: &detail } });
        }
    }

    fn handle_command(&mut self, body: &Body<'_>) {
        let request = match *body {
            Body::RecordControl { on: true, path } => {
                RecordingLimits::of_command(path).map(|(path, limits)| RecordingRequest::Start(path, limits))
            }
            Body::RecordControl { on: false, .. } => Some(RecordingRequest::Stop),
            Body::Dump { path } => Some(RecordingRequest::Dump { path: path.to_owned(), finished: false }),
            Body::Pause {} => Some(RecordingRequest::Mute(Some(true))),
            Body::Resume {} => Some(RecordingRequest::Mute(Some(false))),
            _ => return,
        };
        self.command(body.kind(), request);
    }

    pub(super) fn send_bye(&mut self, reason: ByeReason) {
        self.cancel_window();
        if self.link.is_up() {
            self.send_reports(self.progress.reports_sent);
            self.send_withheld_count();
            self.send(Body::Bye { reason });
            self.flush();
        }
    }

    /// Receives and handles the daemon's commands; ignores unknown ones.
    pub(super) fn receive_commands(&mut self) {
        let mut buffer = [0_u8; 8192];
        while let Some(packet) = self.link.receive(&mut buffer) {
            for record in frame::records(packet).flatten().flatten() {
                match record.body {
                    Body::Welcome { epoch, .. } => {
                        self.link.be_welcomed();
                        // A second Welcome comes from a daemon that inherited the connection, and has no reports yet.
                        if std::mem::replace(&mut self.epoch, epoch) != 0 {
                            self.progress.layers_version = None;
                        }
                    }
                    Body::ResyncRequest { epoch } => self.progress.resync = Some(epoch),
                    body => self.handle_command(&body),
                }
            }
            if finishing() {
                return;
            }
        }
    }
}

fn set_flags(frames: &mut [u8], flags: Flags) {
    let mut at = 0;
    while flags != Flags(0)
        && let Some(prefix) = frames.get(at..).and_then(|rest| rest.first_chunk::<4>())
    {
        let len = u32::from_le_bytes(*prefix) as usize;
        if let Some(byte) = frames.get_mut(at + frame::PREFIX_BYTES + 62) {
            *byte |= flags.0;
        }
        at += frame::PREFIX_BYTES + len;
    }
}
