//! Tests of reports: verdicts on growth, comparisons, text reports.
#![allow(missing_docs)]

mod diff;
mod globs;
mod growth;
mod judge;
mod pytorch;
mod redacted;
mod unsaid;
