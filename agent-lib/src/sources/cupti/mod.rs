//! CUPTI's callbacks: the source of driver calls. Types of CUPTI are used only in this folder.

pub(crate) mod decode;
mod effects;
pub(crate) mod find;
mod kinds;
mod resource;
pub(crate) mod subscribe;
pub mod table;

pub use decode::callback;
