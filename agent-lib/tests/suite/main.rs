//! The agent as a program uses it. Most tests need a separate process: `common::alone`.

mod autograd;
mod blind;
mod bootstrap;
mod common;
mod control;
mod driver_page;
mod exit;
mod fork_first;
mod frames;
mod frames_embedded;
mod full_names;
mod full_ring;
mod host_safety;
mod kinds;
mod libraries;
mod library;
mod line;
mod no_allocation;
mod no_system_call;
mod nvtx;
mod racing;
mod requested_files;
mod scoping;
mod session;
mod torch_blocks;
mod unsettled;
mod waking;

/// Counts for each thread, and only while [`common::counting::counted`] runs.
#[global_allocator]
static COUNTING: common::counting::Counting = common::counting::Counting;
