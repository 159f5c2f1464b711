//! What the daemon does with its run store: parts of long lives, room, faults below it, and kill -9.
#![allow(missing_docs)]

mod common;
#[path = "store/faults.rs"]
mod faults;
#[path = "store/kept.rs"]
mod kept;
#[path = "store/kills.rs"]
mod kills;
#[path = "store/program.rs"]
mod program;
#[path = "store/room.rs"]
mod room;
