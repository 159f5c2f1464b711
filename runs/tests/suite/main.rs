//! Tests of runs through the public interface: builder, store, windows and exports.

mod builder;
mod export;
mod parts;
mod repeats;
mod select;
mod store;
mod window;
