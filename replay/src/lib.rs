//! What PyTorch's CUDA caching allocator would have done with a program's requests under other settings, on another device, or
//! in another release.
//!
//! Recorded requests go in ([`Event`]), figures come out ([`Figures`]). The model has one device, the native backend, and the
//! rules of the releases 2.0 to 2.15 ([`Rules`]). It does no input or output, and its memory is bounded by the live blocks.
#![forbid(unsafe_code)]

mod allocator;
mod event;
mod figures;
mod release;
mod replay;
mod settings;

pub use event::{Device, Event, PoolId, PoolKind, RequestId, StreamId};
pub use figures::{Failure, Figures};
pub use release::{Fraction, Release, Rules, TieBreak, UnknownRelease};
pub use replay::{EventReturn, Fault, Options, Replay, SegmentAddresses};
pub use settings::{Backend, Settings, SettingsError};
