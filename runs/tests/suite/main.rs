//! Runs from outside: builder, store, importers, windows, comparisons and exports.
#![allow(missing_docs)]

mod builder;
mod diff;
mod export;
mod growth;
mod import_hostile;
mod imports;
mod judge;
mod parts;
mod pytorch;
mod select;
mod store;
mod torch_snapshot;
mod unsaid;
mod window;
