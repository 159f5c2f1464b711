//! Requests the daemon's report of this process. Not for callbacks: it waits for the reply.

use crate::base::own_thread::{self, Uncancelled};
use crate::base::seccomp::syscalls_allowed;
use crate::driver::core::Core;
use crate::sender::{self, wait_readable};
use gpumem_wire::{AskKind, Body, Record, Stamp, frame};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

/// Timeout for sending all earlier records to the daemon, because its report should include them.
const SEND_TIMEOUT: Duration = Duration::from_millis(300);
const REPLY_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum size of a report, in bytes.
const LONGEST: usize = 64 << 20;

/// Returns the daemon's report of this process; `None` if no daemon answers or it has no report. `options`: `key=value` lines.
pub(crate) fn report(core: &'static Core, what: AskKind, options: &str) -> Option<String> {
    let _uncancelled = Uncancelled::now();
    sender::start(core);
    let head = core.recorder.ring.head();
    let start = Instant::now();
    while core.recorder.ring.sent() < head
        && start.elapsed() < SEND_TIMEOUT
        && (own_thread::connected() || !own_thread::TRIED.load(Acquire))
        && own_thread::is_running()
    {
        crate::base::wake::wake();
        std::thread::sleep(Duration::from_micros(500));
    }
    if !syscalls_allowed() {
        return None; // the calling thread may have a filter that the sender does not have
    }
    let options = format!("start_ticks={}\nseq={head}\n{options}", core.start_ticks);
    let stamp = Stamp { time_ns: core.recorder.clock.now(), thread: core.pid, ..Stamp::default() };
    let mut question = Vec::new();
    Record { stamp, body: Body::Ask { what, options: &options } }.append_frame(&mut question);
    let socket = sender::connect_anew(core)?;
    if sender::send_now(socket.0, &question) { read(socket.0) } else { None }
}

fn read(socket: RawFd) -> Option<String> {
    let start = Instant::now();
    let mut text = Vec::new();
    let mut buffer = vec![0_u8; frame::MAX_FRAME_BYTES];
    loop {
        let left = REPLY_TIMEOUT.checked_sub(start.elapsed())?;
        if !wait_readable(socket, left) {
            continue;
        }
        let packet = sender::receive_now(socket, &mut buffer).filter(|packet| !packet.is_empty())?;
        for record in frame::records(packet).flatten().flatten() {
            if let Body::Answer { result, last, text: piece } = record.body {
                text.extend_from_slice(piece);
                if result != 0 || text.len() > LONGEST {
                    return None;
                }
                if last {
                    return String::from_utf8(text).ok();
                }
            }
        }
    }
}
