//! Shared parts of the tests: CUPTI's side and the daemon's side of the agent.
#![allow(dead_code)]

pub mod counting;
pub mod cupti;
pub mod daemon;
pub mod pythons;
pub mod torch;
