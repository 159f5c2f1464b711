//! Tests of runs through the public interface: builder, store, windows and exports.
#![allow(missing_docs)]

mod builder;
mod export;
mod parts;
mod select;
mod store;
mod window;
