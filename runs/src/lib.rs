//! What both programs do with runs: make them from observations, keep them, report them.
//!
//! ```text
//! input, recording, import   a file -> observations
//! builder                    observations -> ledger -> Run (of gpumem-model), with its series
//! window                     a run as it was in a part of its life
//! rules                      rules files and presets: names of categories
//! export                     a run as a file, for another machine
//! diff                       two runs beside each other
//! report                     Run + rules -> one statement -> text, JSON, CSV
//! plot                       pictures of reports: SVG, PDF, PNG
//! store                      runs in an SQLite file, checkpointed while they go on
//! ```
//!
//! A report is made from a [`run::Run`] alone, so a live process, a stored run, a recording and an import
//! are told in the same words.
#![forbid(unsafe_code)]

pub mod builder;
pub mod diff;
pub mod export;
pub mod growth;
pub mod import;
pub mod input;
mod kept;
pub mod plot;
pub mod recording;
pub mod report;
pub mod rules;
pub mod store;
pub mod window;

pub use gpumem_model::{
    ending, gap, harmless, iterations, layers, marks, oom, own, parameters, part, pools, run, series,
    timeline, who,
};
