//! The run store: what goes in comes out, whatever happens to the writer, the file or the disk.

mod crash;
mod files;
mod room;
mod round_trip;
mod schemas;
mod support;
