#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod builder;
pub mod export;
pub mod input;
mod live_series;
mod readings;
pub mod recording;
pub mod requests;
pub mod store;
mod tenants;
mod varint;
