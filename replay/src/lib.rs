//! Computes what PyTorch's CUDA caching allocator would have done with a program's requests under other settings, on another
//! device, or in another release.
//!
//! The input is recorded requests ([`Event`]), the output is [`Figures`]. The model has one device and the native backend, with
//! the rules of the releases 2.0 to 2.15 ([`Rules`]). For `backend:cudaMallocAsync`, the figures are lower bounds. The crate does
//! no input or output, and its memory is bounded by the live blocks.
#![forbid(unsafe_code)]

mod allocator;
mod driver_pool;
mod event;
mod figures;
mod release;
mod replay;
mod settings;

pub use event::{Device, Event, PoolId, PoolKind, RequestId, StreamId};
pub use figures::{Failure, Fault, Figures};
pub use release::{Fraction, Release, Rules, TieBreak, UnknownRelease};
pub use replay::{EventReturn, Options, Replay, SegmentAddresses};
pub use settings::{Backend, Settings, SettingsError};
