//! Our Python in the program's interpreter: which code runs there, and when.

pub(crate) mod bootstrap;
pub(crate) mod idle;
pub(crate) mod run;
