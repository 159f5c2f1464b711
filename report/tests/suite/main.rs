//! Tests of reports: verdicts on growth, comparisons, text reports.

mod diff;
mod globs;
mod growth;
mod judge;
mod pytorch;
mod redacted;
mod unsaid;
