//! The daemon's run store: parts of long lives, limits, disk faults, and kill -9.
mod faults;
mod kept;
mod kills;
mod many;
mod program;
mod room;
