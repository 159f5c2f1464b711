//! CUPTI's callbacks: the source of driver calls. Types of CUPTI are used only in this folder.
//!
//! ```text
//! table.rs      the subscribed calls and the meaning of each: adding a call takes one line
//! decode.rs     decodes callbacks of calls             kinds.rs     the same for less frequent calls, and sizes of arrays
//! effects.rs    updates the driver's state, then the features that follow driver calls
//! resource.rs   contexts, modules, graph nodes
//! find.rs       finds the libcupti to use
//! subscribe.rs  subscribes, and reports why it cannot   pulse.rs     checks that callbacks still arrive
//! ```

pub(crate) mod decode;
mod effects;
pub(crate) mod find;
mod kinds;
pub(crate) mod pulse;
mod resource;
pub(crate) mod subscribe;
pub mod table;

pub use decode::callback;
