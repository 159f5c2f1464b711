//! The model from outside: what is written is read as it was.
#![allow(missing_docs)]

mod control;
