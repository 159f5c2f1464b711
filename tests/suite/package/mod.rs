//! Lane `package`: what users install, and what is in it.

mod deb;
mod root;
mod sbom;
mod supply;
mod wheel;
