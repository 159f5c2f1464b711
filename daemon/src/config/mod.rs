//! The configuration: the file ([`Config`]), and the settings derived from it ([`Settings`]). Values that the file leaves open
//! depend on the user who runs the daemon.
//!
//! An unknown key or an invalid value is refused with file, line, key and the allowed values.

mod check;
mod keys;
mod settings;

pub(crate) use keys::{Change, USUAL_PATH};
pub use keys::{Config, ControlLimits, Error, KernelSettings, Keys, Page, ProcessSettings, Tenants};
pub use settings::{Home, NvmlSettings, Settings, ViewSettings};
