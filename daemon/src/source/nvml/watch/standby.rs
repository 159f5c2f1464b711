//! Handles pollers besides the current one: stuck ones, and one that opens GPUs again.

use super::super::answer::Code;
use super::super::call_state::Call;
use super::super::hung::{HungDevices, PendingCall};
use super::super::protocol::{Command, limit};
use super::super::translate::PollerState;
use super::{MAX_STUCK, Poller, Watch};
use crate::os::lock;
use gpumem_wire::frame::records;
use gpumem_wire::{Body, NONE_DEVICE};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::time::timeout;
use tracing::warn;

/// Poller whose current call has not returned, while another one (its substitute) reads the other GPUs.
pub(super) struct Stuck {
    pub poller: Poller,
    /// The translator's state for this poller, used again if the poller continues.
    pub state: PollerState,
    /// The stuck call and its GPU; `None` for a call that reads events.
    pub pending: Option<PendingCall>,
}

impl Watch {
    /// Handles a long call: starts another poller for the other GPUs and only watches this one. Returns the poller to read from now
    /// on: the substitute, or `poller` if a substitute would not help or cannot be started.
    pub(super) async fn substitute(&mut self, poller: Poller) -> Option<Poller> {
        let call = poller.call_state.call();
        let (pending, state) = {
            let mut translator = lock(&self.translator);
            let pending = HungDevices::pending(call, &translator);
            let devices = &translator.status.devices;
            let has_other =
                |gpu: u16| devices.iter().any(|device| device.index != gpu && device.problem.is_none());
            let is_worth_it = match (call, pending) {
                // Opening a GPU that is not known yet may take seconds, because the driver initializes it.
                (Call::Index(gpu), _) => devices.iter().any(|device| device.index == gpu) && has_other(gpu),
                (_, Some(pending)) => has_other(pending.target.index),
                (Call::Events, _) => true,
                _ => false,
            };
            if !is_worth_it || !translator.status.up || self.stuck.len() >= MAX_STUCK {
                return Some(poller);
            }
            if let Some(pending) = pending {
                self.hung.suspect(pending, &mut translator);
            }
            (pending, translator.begin_poller())
        };
        self.next = None;
        self.stuck.push(Stuck { poller, state, pending });
        match self.launch() {
            Ok(substitute) => {
                self.translator().status.poller_pid = substitute.child.id();
                self.send().await;
                Some(substitute)
            }
            Err(error) => {
                warn!(%error, "an nvml poller is stuck, and starting a second one failed");
                self.return_to_stuck()
            }
        }
    }

    /// Checks whether stuck calls have returned or timed out. Returns the poller to read from now on.
    pub(super) async fn check_stuck(&mut self, mut poller: Poller, tick: Duration) -> Poller {
        let mut place = 0;
        while place < self.stuck.len() {
            let is_only = self.stuck.len() == 1;
            let stuck = &mut self.stuck[place].poller;
            let stalled = stuck.call_state.stalled_for(tick);
            let has_died = !matches!(stuck.child.try_wait(), Ok(None));
            let has_returned = !has_died && stalled.is_zero();
            if has_returned && is_only {
                // The call was only slow: continue with the first poller, because only that has opened all GPUs.
                if let Some(first) = self.return_to_stuck() {
                    poller = first; // dropping the substitute kills it
                    self.send().await;
                }
                continue;
            }
            if !has_died && !has_returned && stalled < limit(stuck.call_state.call(), &self.settings) {
                place += 1;
                continue;
            }
            let Stuck { poller: stuck, pending, .. } = self.stuck.remove(place);
            if has_returned {
                // Do not return to this poller: others are stuck, and its next call may be for one of their GPUs.
                self.end_pending(pending);
            } else {
                warn!(?pending, has_died, left_behind = stuck.child.id(), "nvml poller lost");
                self.give_up(pending, has_died);
            }
            self.send().await;
        }
        poller
    }

    /// Handles a stuck call that has timed out, or whose poller has died.
    fn give_up(&mut self, pending: Option<PendingCall>, has_died: bool) {
        let translator = &mut *lock(&self.translator);
        translator.status.counters.hangs += u64::from(!has_died);
        translator.status.counters.restarts += 1;
        let Some(pending) = pending else {
            translator.status.no_events = true;
            return;
        };
        let code = if has_died { Code::UNKNOWN } else { Code::TIMEOUT };
        self.hung.avoid(pending, code, translator);
        // Start a new poller that has opened the device, because its memory can still be read; only its lists hang.
        self.hung.needs_reopen |= matches!(pending.call, Call::Lists(_));
    }

    /// Handles a stuck call that has returned while another poller is read. The next poller opens its GPU.
    fn end_pending(&mut self, pending: Option<PendingCall>) {
        if let Some(pending) = pending {
            self.hung.returned(pending, &mut lock(&self.translator));
            self.hung.needs_reopen = true;
        }
    }

    /// Makes the poller that became stuck last the current one again. Returns it; `None` if no poller is stuck.
    fn return_to_stuck(&mut self) -> Option<Poller> {
        let Stuck { poller, state, pending } = self.stuck.pop()?;
        let translator = &mut *lock(&self.translator);
        translator.status.poller_pid = poller.child.id();
        translator.end_readings(pending.map(|pending| pending.target.index).as_slice());
        translator.resume_poller(state);
        if let Some(pending) = pending {
            self.hung.returned(pending, translator);
        }
        Some(poller)
    }

    /// Kills the stuck pollers. The next poller opens their GPUs.
    pub(super) fn abandon_stuck(&mut self) {
        for stuck in std::mem::take(&mut self.stuck) {
            self.end_pending(stuck.pending);
        }
    }

    /// Starts the poller that opens GPUs again, if one is needed. If that poller is running and one of its calls has timed out,
    /// kills it.
    pub(super) fn check_next(&mut self, tick: Duration) {
        if let Some(next) = &mut self.next {
            if next.call_state.stalled_for(tick) >= limit(next.call_state.call(), &self.settings) {
                self.next = None;
                self.hung.relapse();
            }
        } else if self.hung.needs_reopen
            && self.stuck.is_empty()
            && self.translator().status.released_until_ns.is_none()
        {
            self.hung.needs_reopen = false;
            self.next = self.launch().ok();
            if self.next.is_none() {
                self.hung.relapse();
            }
        }
    }

    /// Replaces the previous poller by `poller`, which has opened all GPUs.
    pub(super) async fn replace(&mut self, mut previous: Poller, poller: &Poller) {
        {
            let mut translator = self.translator();
            translator.begin_poller();
            translator.end_readings(&[]);
            translator.status.poller_pid = poller.child.id();
        }
        self.send().await;
        previous.send(Command::Quit).await;
        // The previous poller shuts NVML down, or is killed after this time.
        tokio::spawn(async move {
            let _ = timeout(Duration::from_millis(500), previous.child.wait()).await;
        });
    }
}

/// Reads from the poller that is to replace the current one until it has opened the library. Returns whether that succeeded, so
/// that it may take over. Waits for ever if there is no such poller.
pub(super) async fn read_next(next: &mut Option<Poller>) -> bool {
    let Some(next) = next else { return std::future::pending().await };
    loop {
        if !matches!(next.stdout.read_buf(&mut next.unread).await, Ok(count) if count > 0) {
            return false;
        }
        for record in records(&next.unread) {
            let Ok(Ok(record)) = record else { break };
            if let Body::Source { up, .. } = record.body
                && record.stamp.device == NONE_DEVICE
            {
                return up;
            }
        }
    }
}
