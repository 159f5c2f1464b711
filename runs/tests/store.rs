//! The run store: what goes in comes out, whatever happens to the writer, the file or the disk.

#[path = "store/crash.rs"]
mod crash;
#[path = "store/files.rs"]
mod files;
#[path = "store/room.rs"]
mod room;
#[path = "store/round_trip.rs"]
mod round_trip;
#[path = "store/schemas.rs"]
mod schemas;
#[path = "store/support.rs"]
mod support;
