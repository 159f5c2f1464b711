//! Lane `package`: the packages that users install, and their contents.

mod deb;
mod root;
mod rpm;
mod sbom;
mod supply;
mod wheel;
