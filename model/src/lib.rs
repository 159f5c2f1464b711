#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod blocks;
pub mod cell;
pub mod checks;
pub mod control;
pub mod coverage;
pub mod device;
pub mod ending;
pub mod escape;
pub mod fields;
pub mod gap;
pub mod growth;
pub mod iterations;
pub mod layers;
pub mod moment;
pub mod names;
pub mod oom;
pub mod owner;
pub mod parameters;
pub mod program_data;
pub mod run;
pub mod series;
pub mod time;
pub mod timeline;
pub mod units;
pub mod window;
