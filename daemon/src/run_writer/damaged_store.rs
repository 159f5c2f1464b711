//! Handles a store that cannot be repaired: renames it, never deletes it, and starts a new one.

use crate::clock;
use gpumem_runs::store::StoreError;
use std::path::{Path, PathBuf};

/// Number of file system errors in a row after which the store's file counts as damaged. A transient error of a network file
/// system is over by the third try; a bad block is not.
const TRIES: u32 = 3;
/// Maximum number of new names that are tried for the damaged file.
const NAMES: u32 = 100;

/// Decides whether the store is damaged. Reset by each successful write.
#[derive(Debug, Default)]
pub(super) struct DamagedStore {
    /// Number of errors since the last successful write.
    failures: u32,
    /// Whether the store was replaced and no write to the new one has succeeded. Then the file is not the cause of errors.
    is_new: bool,
}

impl DamagedStore {
    /// Counts an error. Returns whether the store is damaged and must be replaced.
    pub(super) fn add_error(&mut self, error: &StoreError) -> bool {
        let tries = match error {
            StoreError::Damaged { .. } => 1,
            StoreError::Unreadable { .. } => TRIES,
            _ => return false,
        };
        self.failures += 1;
        let is_damaged = !self.is_new && self.failures >= tries;
        self.is_new |= is_damaged;
        is_damaged
    }
}

/// Renames the store and its side files. Returns the new path.
pub(super) fn set_aside(path: &Path, why: &StoreError) -> Result<PathBuf, StoreError> {
    let seconds = clock::wall().as_secs();
    let named = |end: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    };
    let names = (0..NAMES).map(|number| match number {
        0 => format!(".damaged-{seconds}"),
        number => format!(".damaged-{seconds}-{number}"),
    });
    let free = names.into_iter().find(|name| !named(name).exists()).unwrap_or_else(|| ".damaged".into());
    let aside = named(&free);
    std::fs::rename(path, &aside).map_err(|source| StoreError::Io { path: path.to_owned(), source })?;
    for side in ["-wal", "-shm", "-deltas"] {
        // The side files may not exist. The write-ahead log must be renamed with its store, or the new store would use it.
        let _ = std::fs::rename(named(side), named(&format!("{free}{side}")));
    }
    tracing::error!(error = %why, aside = %aside.display(), "the damaged store is set aside, and a new one begun");
    Ok(aside)
}

/// Returns whether an error may be temporary: no space, no free descriptor, a missing directory. Then the write is retried.
pub(super) fn may_pass(error: &StoreError) -> bool {
    matches!(error, StoreError::DiskFull { .. } | StoreError::Io { .. } | StoreError::Sqlite { .. })
}

pub(super) fn remedy(error: &StoreError) -> &'static str {
    match error {
        StoreError::DiskFull { .. } => "make room on its file system; gpumemd retries",
        StoreError::NewerVersion { .. } => "run the newer gpumemd, or name another file in runs.store",
        StoreError::NotAStore { .. } => "move that file away, or name another one in runs.store",
        _ => "gpumemd retries",
    }
}
