//! Importers from outside: what each format gives, and what hostile files do.
#![allow(missing_docs)]

mod import_hostile;
mod imports;
mod torch_snapshot;
