//! CUPTI's callbacks: the source of driver calls. No type of CUPTI leaves this folder.
//!
//! ```text
//! table.rs      which calls are listened to, and what each means: adding one is a line
//! decode.rs     callback of a call -> booking        kinds.rs     the same for seldom calls, and sizes of arrays
//! effects.rs    booking: the state of the driver, then the features that follow driver calls
//! coverage.rs   how each kind of call is counted: docs/driver.md
//! resource.rs   contexts, modules, graph nodes
//! find.rs       which libcupti to use
//! subscribe.rs  subscription and its refusals          pulse.rs     whether it is alive
//! ```

pub mod coverage;
pub(crate) mod decode;
mod effects;
pub(crate) mod find;
mod kinds;
pub(crate) mod pulse;
mod resource;
pub(crate) mod subscribe;
pub mod table;

pub use decode::callback;
