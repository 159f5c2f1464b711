//! Reads device memory and process lists from NVML in a child process (the poller).
//!
//! A call into a failing driver may never return, and an open NVML blocks GPU resets. So the daemon never opens NVML; the child
//! `gpumemd nvml-poller` does. The child can be killed, abandoned and replaced.
//!
//! ```text
//! watch.rs       the parent: starts, reads, supervises and replaces the poller
//! hung.rs        devices whose calls hang, and the process that probes them
//! translate.rs   converts the poller's frames to frames for the ledger
//! poller.rs      the child: commands in, frames out
//! session.rs     reads the devices of one opened library
//! schedule.rs    decides which call is next; pure, takes the time as an argument
//! library.rs     finds, opens and closes the library; lists devices
//! answer.rs      NVML's answers: numbers, error codes and their texts
//! raw.rs         calls that nvml-wrapper lacks or handles badly: unsafe code
//! call_state.rs  the poller's current call, readable while it hangs
//! protocol.rs    arguments and messages between the poller and its parent
//! ```

mod answer;
mod call_state;
mod hung;
mod library;
mod poller;
mod protocol;
mod raw;
mod schedule;
mod session;
mod translate;
mod watch;

pub use poller::poller_main;
pub use watch::Nvml;
