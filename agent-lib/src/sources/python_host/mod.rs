//! Our Python in the program's interpreter: which code runs there, and when.

pub mod bootstrap;
pub mod idle;
pub mod run;
