//! Tests of the importers' public API: the runs from each format, and the handling of hostile files.

mod import_hostile;
mod imports;
mod torch_snapshot;
