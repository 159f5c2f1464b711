//! The run store: stored runs can be loaded unchanged, whatever happens to the writer, the file or the disk.

mod crash;
mod deltas;
mod files;
mod requests;
mod room;
mod round_trip;
mod schemas;
mod support;
