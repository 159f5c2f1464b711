//! What both programs do with runs: make them from observations, keep them, report them.
//!
//! ```text
//! input, recording, import   a file -> observations
//! builder                    observations -> ledger -> Run, with its series
//! run, blind, gap, series      the life of one process: what is stored and what is reported
//! timeline, marks            what was held over time, by cell; moments with names
//! own                        the program's own counters, and the times of its ranges
//! window                     a run as it was in a part of its life
//! layers, oom                  how memory got its names; what is known of memory that ran out
//! ending                       what else ended a process: host memory, a fault of the driver's
//! iterations, pools            what each training step held; pools and what their owners say
//! parameters                   parameters and gradients one by one, over the iterations
//! part                       a life that is kept in a run per day
//! rules                      rules files and presets: names of categories
//! export                     a run as a file, for another machine
//! diff                       two runs beside each other
//! report                     Run + rules -> one statement -> text, JSON, CSV
//! harmless                   words of strangers on their way to people
//! plot                       pictures of reports: SVG, PDF, PNG
//! store                      runs in an SQLite file, checkpointed while they go on
//! ```
//!
//! A report is made from a [`run::Run`] alone, so a live process, a stored run, a recording and an import
//! are told in the same words.
#![forbid(unsafe_code)]

mod blind;
pub mod builder;
pub mod diff;
pub mod ending;
pub mod export;
pub mod gap;
pub mod growth;
pub mod harmless;
pub mod import;
pub mod input;
pub mod iterations;
mod kept;
pub mod layers;
pub mod marks;
pub mod oom;
pub mod own;
pub mod parameters;
mod part;
pub mod plot;
pub mod pools;
pub mod recording;
pub mod report;
pub mod rules;
pub mod run;
pub mod series;
pub mod store;
pub mod timeline;
mod weight;
pub mod who;
pub mod window;
