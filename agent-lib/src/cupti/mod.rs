//! CUPTI's callbacks: the source of driver calls. No type of CUPTI leaves this folder.
//!
//! ```text
//! table.rs      which calls are listened to, and what each means: adding one is a line
//! decode.rs     callback -> booking
//! find.rs       which libcupti to use
//! subscribe.rs  subscription, its refusals and its retries
//! ```

pub mod decode;
pub mod find;
pub mod subscribe;
pub mod table;

pub use decode::callback;
