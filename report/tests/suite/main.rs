//! Reports from outside: verdicts on growth, comparisons, pictures of runs in words.
#![allow(missing_docs)]

mod diff;
mod globs;
mod growth;
mod judge;
mod pytorch;
mod unsaid;
