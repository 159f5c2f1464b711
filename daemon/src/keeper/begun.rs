//! A run's place in the store: begun by this life of the daemon, or by an earlier one.

use super::lives;
use super::shelf::Waiting;
use gpumem_runs::run::Run;
use gpumem_runs::store::{Newest, RunId, Store, StoreError};
use std::sync::Arc;

/// A run that is being written.
#[derive(Default)]
pub(super) struct Open {
    /// Its place in the store; none while that is closed.
    pub id: Option<RunId>,
    /// This life has written to it.
    pub is_ours: bool,
    pub earlier: Earlier,
}

/// What the store knew of a run when this life of the daemon began it.
#[derive(Debug, Clone, Default)]
pub(super) struct Earlier {
    /// Which part of its life it is.
    pub part: u32,
    /// What an earlier life of the daemon had written: of this part, or if it has rolled, of the one before.
    pub before: Option<Arc<Run>>,
}

pub(super) fn write(store: &mut Store, open: &mut Open, of: &Waiting) -> Result<(), StoreError> {
    let id = match open.id {
        Some(id) => id,
        None => begin(store, open, of)?,
    };
    let joined = open.earlier.joined(&of.run);
    let run = joined.as_ref().unwrap_or(&of.run);
    let write = if of.over { Store::close } else { Store::checkpoint };
    match write(store, id, run) {
        // Somebody deleted it.
        Err(StoreError::UnknownRun { .. }) => {
            open.id = None;
            let id = begin(store, open, of)?;
            write(store, id, run)
        }
        result => result,
    }
}

/// The run's place in the store. A life that is there already was begun by an earlier life of the daemon, or by this one
/// before the store broke or the run rolled.
fn begin(store: &mut Store, open: &mut Open, of: &Waiting) -> Result<RunId, StoreError> {
    let in_this_life = of.run.coverage.part.map_or(1, |part| part.number);
    let (id, part) = match store.newest(&of.uid)? {
        Some(Newest { id, part, is_rolled: false }) => {
            if !open.is_ours {
                open.earlier.before = Some(Arc::new(store.load(id)?));
            }
            (Some(id), part)
        }
        Some(Newest { id, part, is_rolled: true }) => {
            if !open.is_ours {
                let is_next = of.run.coverage.part.is_none();
                open.earlier.before = if is_next { Some(Arc::new(store.load(id)?)) } else { None };
            }
            (None, part + 1)
        }
        None => (None, in_this_life),
    };
    open.earlier.part = part;
    let id = match id {
        Some(id) => id,
        None => {
            let joined = open.earlier.joined(&of.run);
            store.begin_part(joined.as_ref().unwrap_or(&of.run), &of.uid, part)?
        }
    };
    (open.id, open.is_ours) = (Some(id), true);
    Ok(id)
}

impl Earlier {
    /// The run with what an earlier life of the daemon saw, and its number as the store counts; none if it is that already.
    pub fn joined(&self, run: &Run) -> Option<Run> {
        let mut joined = self.before.as_ref().map(|before| lives::joined(before, run));
        let is_counted = |run: &Run| run.coverage.part.is_none_or(|part| part.number == self.part);
        if !joined.as_ref().map_or(is_counted(run), is_counted) {
            let run = joined.get_or_insert_with(|| run.clone());
            run.coverage.part.iter_mut().for_each(|part| part.number = self.part);
        }
        joined
    }
}
