//! Lane `python`: other interpreters and third-party Python packages.

mod nvtx_libraries;
mod real;
