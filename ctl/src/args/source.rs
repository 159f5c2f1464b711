//! Arguments that select the daemon or the run store, and the places where these are otherwise searched.

use crate::exit::Kind;
use clap::Args;
use gpumem_model::escape::quoted;
use gpumem_report::text::escape;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DataSource {
    #[command(flatten)]
    pub store: StorePath,
    #[command(flatten)]
    pub socket: SocketPath,
}

impl DataSource {
    /// Returns the options as words of a command line.
    pub(crate) fn words(&self) -> Vec<String> {
        [self.socket.words(), self.store.words()].concat()
    }
}

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct SocketPath {
    /// Control socket of the daemon, or its directory [default: $GPUMEM_CONTROL, then the user's and the
    /// system's runtime directory]
    #[arg(long = "socket", value_name = "DIR|FILE", help_heading = "Data source")]
    socket: Option<PathBuf>,
}

impl SocketPath {
    pub(crate) fn as_deref(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    /// Returns the option as words of a command line; empty if it was not given.
    pub(crate) fn words(&self) -> Vec<String> {
        option_words("--socket", self.as_deref())
    }
}

/// Returns an option with a path as words of a command line; empty without a path.
fn option_words(name: &str, path: Option<&Path>) -> Vec<String> {
    path.map(|path| vec![name.to_owned(), path.to_string_lossy().into_owned()]).unwrap_or_default()
}

/// Returns words quoted for a shell, each with a blank before it, as the end of a suggested command.
pub(crate) fn quoted_suffix(words: &[String]) -> String {
    words.iter().map(|word| format!(" {}", quoted(word))).collect()
}

/// Returns the error for a device name that is wrong. `what` is the problem, `known` are index and UUID of the devices.
pub(crate) fn no_device(name: &str, what: &str, known: impl Iterator<Item = (u32, String)>) -> anyhow::Error {
    let known: BTreeSet<(u32, String)> = known.collect();
    let known: Vec<String> =
        known.iter().map(|(index, uuid)| format!("{index} ({})", escape(uuid))).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    Kind::NotFound.error(format!("{} {what}; there are: {known}", escape(name)))
}

/// Returns an environment variable as a path; `None` if it is unset or empty.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct StorePath {
    /// Path of the run store [default: $GPUMEM_STORE, $XDG_STATE_HOME/gpumem/runs.sqlite, ~/.local/state/gpumem/runs.sqlite]
    #[arg(long = "store", value_name = "FILE", help_heading = "Data source")]
    given: Option<PathBuf>,
}

/// Path of the system daemon's run store.
const SYSTEM_STORE: &str = "/var/lib/gpumemd/runs.sqlite";

impl StorePath {
    /// Returns the option as words of a command line; empty if it was not given.
    pub(crate) fn words(&self) -> Vec<String> {
        option_words("--store", self.given.as_deref())
    }

    /// Returns whether the command line or the environment names the store.
    pub(crate) fn is_named(&self) -> bool {
        self.named().is_some()
    }

    fn named(&self) -> Option<PathBuf> {
        self.given.clone().or_else(|| variable("GPUMEM_STORE"))
    }

    /// Returns the system daemon's store; `None` if another store is named, or if the user may not read it.
    fn system(&self) -> Option<PathBuf> {
        let may_read = self.named().is_none() && std::fs::File::open(SYSTEM_STORE).is_ok();
        may_read.then(|| SYSTEM_STORE.into())
    }

    /// Returns the store to read: like [`path`](Self::path), but the system daemon's store if the user has none.
    pub(crate) fn readable(&self) -> anyhow::Result<PathBuf> {
        match self.path() {
            Ok(path) if path.exists() => Ok(path),
            usual => self.system().map_or(usual, Ok),
        }
    }

    /// Returns all existing stores: the user's and the system daemon's, or only the one that is named.
    pub(crate) fn all_readable(&self) -> anyhow::Result<Vec<PathBuf>> {
        let mut all = vec![self.readable()?];
        all.retain(|path| path.exists());
        all.extend(self.system().filter(|system| !all.contains(system)));
        Ok(all)
    }

    /// Returns the named store or the default one. The default needs HOME or XDG_STATE_HOME; fails if neither is set.
    pub(crate) fn path(&self) -> anyhow::Result<PathBuf> {
        let absolute = |name: &str| variable(name).filter(|path| path.is_absolute());
        let state = || absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
        let usual = || Some(state()?.join("gpumem/runs.sqlite"));
        const NO_STORE: &str = "no run store: neither HOME nor XDG_STATE_HOME is set; give --store FILE";
        self.named().or_else(usual).ok_or_else(|| Kind::Store.error(NO_STORE))
    }
}
