//! What the daemon does with its run store: parts of long lives, room, faults below it, and kill -9.
mod faults;
mod kept;
mod kills;
mod many;
mod program;
mod room;
