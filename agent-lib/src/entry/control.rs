//! Exported functions that start the sender and send it a request, and `gpumem_configure`.

use crate::base::own_thread::Uncancelled;
use crate::driver::core::Core;
use crate::record::recorder;
use crate::sender;
use crate::sources::api::recordings::{
    DUMP_PERIOD_NS, MEMORY_OFF, MUTES, RecordingReply, RecordingRequest, concerns_step, request_with_timeout,
    slot,
};
use std::sync::atomic::Ordering::*;
use std::time::Duration;

/// Shortest period of periodic dumps, in seconds.
const LEAST_PERIOD_S: f64 = 0.1;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the sender's reply to the request at a step; the next step repeats the request.
const STEP_TIMEOUT: Duration = Duration::from_secs(1);

fn switch(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Some(true),
        "0" | "false" | "off" | "no" => Some(false),
        _ => None,
    }
}

pub(crate) fn configure(core: &'static Core, key: &str, value: &str) -> bool {
    let class = match key {
        "marks" => recorder::MARKS,
        "ranges" => recorder::RANGES,
        "api" => recorder::API,
        "memory" => {
            let Some(on) = switch(value) else { return false };
            let off = u32::from(!on);
            return MEMORY_OFF.swap(off, AcqRel) == off
                || post(core, RecordingRequest::Mute(None)).errno == 0;
        }
        "record_file" | "dump_file" => {
            let Some(mut slot) = slot() else { return false };
            let place = if key == "record_file" { &mut slot.record_file } else { &mut slot.dump_file };
            value.clone_into(place);
            return !value.contains('\0');
        }
        "record_steps" | "record_for" | "record_max_size" => {
            let Some(mut slot) = slot() else { return false };
            return slot.limits.set(key.trim_start_matches("record_"), value);
        }
        "dump_period" => {
            let seconds =
                value.parse::<f64>().ok().filter(|seconds| *seconds == 0.0 || *seconds >= LEAST_PERIOD_S);
            let Some(seconds) = seconds.filter(|seconds| *seconds <= 1e6) else { return false };
            DUMP_PERIOD_NS.store((seconds * 1e9) as u64, Relaxed);
            sender::start(core);
            return true;
        }
        _ => return false,
    };
    switch(value).map(|is_on| recorder::set_recorded(class, is_on)).is_some()
}

/// Starts a recording with the file and limits that `configure` has set. Returns whether it is open now, or waits for its first
/// step.
pub(crate) fn start(core: &'static Core) -> bool {
    let request = slot().map(|slot| RecordingRequest::Start(slot.record_file.clone(), slot.limits));
    request.is_some_and(|request| post(core, request).errno == 0)
}

pub(crate) fn mute(core: &'static Core) {
    if MUTES.fetch_add(1, AcqRel) == 0 {
        post(core, RecordingRequest::Mute(None));
    }
}

pub(crate) fn unmute(core: &'static Core) {
    let less = MUTES.fetch_update(AcqRel, Acquire, |mutes| mutes.checked_sub(1));
    if less == Ok(1) {
        post(core, RecordingRequest::Mute(None));
    }
}

/// Starts the sender if necessary, and returns its reply to the request.
pub(crate) fn post(core: &'static Core, request: RecordingRequest) -> RecordingReply {
    let _uncancelled = Uncancelled::now();
    sender::start(core);
    request_with_timeout(request, REQUEST_TIMEOUT)
}

/// Notifies the sender that a step begins, if a recording has to begin or end with it. Called before the step is recorded.
#[inline(always)]
pub(crate) fn step(core: &'static Core, number: u64) {
    if concerns_step(number) {
        crossed(core, number);
    }
}

#[cold]
fn crossed(core: &'static Core, number: u64) {
    let _uncancelled = Uncancelled::now();
    sender::start(core);
    // If the sender does not reply in time, the recording begins or ends with the next step.
    let _ = request_with_timeout(RecordingRequest::Step(number), STEP_TIMEOUT);
}
