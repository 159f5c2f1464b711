//! The configuration: the file as typed ([`Config`]), and the settings as meant ([`Settings`]), with what the
//! file leaves open decided by who runs the daemon.
//!
//! A key that does not exist, or a value that makes no sense, is refused with file, line, key and what is
//! allowed.

mod check;
mod keys;
mod settings;

pub(crate) use keys::{Change, USUAL_PATH};
pub use keys::{Config, Error, Keys, Page, Tenants};
pub use settings::{Home, KernelSettings, NvmlSettings, ProcessSettings, Settings};
