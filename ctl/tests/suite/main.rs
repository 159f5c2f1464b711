//! Tests of gpumemctl's command line.

mod cli;
mod common;
mod compare;
mod completions;
mod headings;
mod hostile;
mod imports;
mod job;
mod live;
mod oom;
mod pictures;
mod run;
mod terminal;
mod top;
mod whatif;
mod window;
