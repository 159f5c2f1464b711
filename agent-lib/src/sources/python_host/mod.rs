//! The agent's Python code in the program's interpreter: which code runs there, and when.

pub(crate) mod bootstrap;
pub(crate) mod idle;
pub(crate) mod run;
