//! Sends new names and records, and then the watermark: the number up to which the records are complete.

use super::{Sender, finishing};
use crate::base::clock::MARGIN_NS;
use crate::base::ring::Made;
use crate::record::status::{self, StatusReport};
use crate::sources::api::recordings::{RecordingLimits, RecordingRequest};
use crate::threads;
use gpumem_wire::{Body, ByeReason, Flags, Record, Stamp, frame};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Longest wait for a thread to finish a record; after it, the round ends and a later one continues.
pub(super) const PATIENCE: Duration = Duration::from_millis(20);
/// How many slots ahead of the reader are prefetched: they lie in the caches of other cores.
const AHEAD: u64 = 8;
/// Maximum number of records in a round, so that a busy program does not delay the watermark.
const ROUND: u64 = 16 * 1024;

impl Sender {
    pub(super) fn say(&mut self, body: Body<'_>) -> bool {
        let stamp = Stamp { time_ns: self.core.recorder.clock.now(), ..Stamp::default() };
        self.link.frame(&Record { stamp, body })
    }

    /// Sends names, records, state and watermark. Returns whether there was anything but a heartbeat.
    pub(super) fn send_new(&mut self) -> bool {
        let mut busy = false;
        while self.link.is_up() {
            // The order matters: a call in flight at `now` is either still in flight or has its number up to `head`.
            let now = self.core.recorder.clock.now() - MARGIN_NS;
            let in_flight_since_ns = threads::moving_since_ns();
            let head = self.core.recorder.ring.head();
            let until = head.min(self.progress.taken + ROUND);
            let before = self.progress.taken;
            self.core.devices.introduce_awaited(&self.core.recorder, self.thread);
            let whole = self.send_names(Flags(0)) && self.send_records(until);
            busy |= self.progress.taken > before;
            self.send_state();
            if whole && self.progress.taken == head && self.progress.muted_since.is_none() {
                let body = Body::Watermark { last_seq: head, in_flight_since_ns };
                let stamp = Stamp { time_ns: now, ..Stamp::default() };
                self.link.frame(&Record { stamp, body });
            }
            self.flush();
            if !whole || self.progress.taken == head {
                break;
            }
        }
        busy
    }

    /// Sends the packet and releases its slots in the ring.
    pub(super) fn flush(&mut self) -> bool {
        let sent = self.link.flush();
        if sent && !self.dumping {
            self.core.recorder.ring.set_sent(self.progress.taken);
        }
        sent
    }

    pub(super) fn send_names(&mut self, flags: Flags) -> bool {
        let end = self.core.recorder.names.end();
        while self.progress.names_sent < end {
            let start = self.link.packet().len();
            let next = self.core.recorder.names.copy(self.progress.names_sent, end, self.link.packet());
            mark(&mut self.link.packet()[start..], flags);
            if next == self.progress.names_sent && start == 0 {
                return true; // its thread has not finished writing it; a later round sends it
            }
            self.progress.names_sent = next;
            if self.progress.names_sent < end && !self.flush() {
                return false;
            }
        }
        true
    }

    /// Sends finished records up to `until`; a missing number counts as a loss. Returns false if not all could be sent.
    pub(super) fn send_records(&mut self, until: u64) -> bool {
        if self.progress.muted_since.is_some() {
            // Muted: skips the records once their writers have finished.
            let is_quiet = self.progress.taken >= until || threads::quiesce(until, PATIENCE);
            self.progress.taken = if is_quiet { self.progress.taken.max(until) } else { self.progress.taken };
            return is_quiet;
        }
        let mut quiet = 0;
        while self.progress.taken < until {
            let seq = self.progress.taken + 1;
            self.core.recorder.ring.expect_to_read(seq + AHEAD);
            let ring = &self.core.recorder.ring;
            match ring.made(seq, until, &mut quiet, |until| threads::quiesce(until, PATIENCE)) {
                Made::Unfinished => return false,
                Made::Record(row) => {
                    if frame::PREFIX_BYTES + row.len() * 8 > self.link.room() && !self.flush() {
                        return false;
                    }
                    self.link.slot(&row);
                }
                Made::Lost => self.progress.losses = true,
            }
            self.progress.taken = seq;
        }
        true
    }

    pub(super) fn send_state(&mut self) {
        if self.progress.layers_version != Some(status::layers_version()) {
            self.progress.layers_version = Some(status::layers_version());
            for status::LayerReport { layer, state, reason } in status::layers() {
                self.say(Body::Layer { layer, state, reason: &reason });
            }
        }
        let refused = self.core.recorder.live.refused.load(Relaxed) + threads::refused();
        let is_full = self.core.recorder.names.refused.load(Relaxed) > 0; // a flag: a count would grow all the time
        let told = (self.core.astray.load(Relaxed), refused, is_full);
        let version = status::version();
        if self.progress.state_version == Some(version) && self.told == told {
            return;
        }
        self.progress.state_version = Some(version);
        self.told = told;
        self.say_state(self.progress.state_said);
    }

    /// Sends the reports of the agent's state after the number `after`.
    pub(super) fn say_state(&mut self, after: u64) {
        let (astray, refused, is_full) = self.told;
        let said = status::reports_after(after, self.core.recorder.clock.now());
        for (index, StatusReport { number, time_ns, state, result, mut detail }) in
            said.iter().cloned().enumerate()
        {
            let rows = format!("{} rows found no place: the state is incomplete", refused + astray);
            let names = "the table of names is full: new names are dropped".to_owned();
            let more = [(refused + astray > 0, rows), (is_full, names)];
            for (_, more) in more.into_iter().filter(|(so, _)| *so && index + 1 == said.len()) {
                detail = if detail.is_empty() { more } else { format!("{detail}; {more}") };
            }
            self.progress.state_said = number;
            let stamp = Stamp { time_ns, ..Stamp::default() };
            self.link.frame(&Record { stamp, body: Body::Agent { result, state, detail: &detail } });
        }
    }

    fn obey_daemon(&mut self, body: &Body<'_>) {
        let wish = match *body {
            Body::RecordControl { on: true, path } => {
                RecordingLimits::of_command(path).map(|(path, limits)| RecordingRequest::Start(path, limits))
            }
            Body::RecordControl { on: false, .. } => Some(RecordingRequest::Stop),
            Body::Dump { path } => Some(RecordingRequest::Dump { path: path.to_owned(), finished: false }),
            Body::Pause {} => Some(RecordingRequest::Mute(Some(true))),
            Body::Resume {} => Some(RecordingRequest::Mute(Some(false))),
            _ => return,
        };
        self.command(body.kind(), wish);
    }

    pub(super) fn say_bye(&mut self, reason: ByeReason) {
        self.forget_window();
        if self.link.is_up() {
            self.say_state(self.progress.state_said);
            self.say_skipped();
            self.say(Body::Bye { reason });
            self.flush();
        }
    }

    /// Handles a welcome. A second one is from a daemon that inherited the connection; it gets all reports again.
    fn be_welcomed(&mut self, epoch: u64) {
        self.link.be_welcomed();
        if std::mem::replace(&mut self.epoch, epoch) != 0 {
            self.progress.layers_version = None;
        }
    }

    /// Reads the daemon's commands. Unknown ones are ignored.
    pub(super) fn listen(&mut self) {
        let mut buffer = [0_u8; 8192];
        while let Some(packet) = self.link.receive(&mut buffer) {
            for record in frame::records(packet).flatten().flatten() {
                match record.body {
                    Body::Welcome { epoch, .. } => self.be_welcomed(epoch),
                    Body::ResyncRequest { epoch } => self.progress.resync = Some(epoch),
                    body => self.obey_daemon(&body),
                }
            }
            if finishing() {
                return;
            }
        }
    }
}

/// Sets flags on every frame in a sequence.
fn mark(frames: &mut [u8], flags: Flags) {
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
