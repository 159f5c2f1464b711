//! Finds the place of a run in the store. An earlier daemon may have stored the beginning of the run.

use super::join_runs;
use super::write_queue::QueuedRun;
use gpumem_ledger::ProcessKey;
use gpumem_model::run::{Run, State};
use gpumem_runs::store::{NewestPart, RunId, Store, StoreError};
use std::sync::Arc;

/// A run whose process this daemon has not finished writing.
#[derive(Default)]
pub(super) struct OpenRun {
    /// The process; `None` until the run is written or found in the store.
    pub key: Option<ProcessKey>,
    /// Id of the run in the store; `None` while the store is closed.
    pub id: Option<RunId>,
    /// Whether this daemon has written to the stored run.
    pub is_ours: bool,
    /// The uid of the run in the store, if it differs from the uid in the ledger (see [`is_of_another`]).
    pub stored_uid: Option<String>,
    pub earlier: EarlierRun,
}

/// What the store had of a run when this daemon wrote the run for the first time.
#[derive(Debug, Clone, Default)]
pub(super) struct EarlierRun {
    /// Number of the part of the run that is being written; a long run is stored in parts.
    pub part: u32,
    /// Number that this daemon gives the same part. It counts from 1, even if the store has parts of an earlier daemon.
    pub own_part: u32,
    /// Run that an earlier daemon stored: this part, or the previous part if that is complete (rolled).
    pub before: Option<Arc<Run>>,
}

/// Returns what an earlier daemon stored of a live process; `None` if that is nothing, or if it cannot be read.
pub(super) fn of_live_process(store: &Store, uid: &str) -> Option<EarlierRun> {
    let NewestPart { id, part, is_rolled } = store.newest(uid).ok()??;
    let before = Arc::new(store.load(id).ok()?);
    // The final run of a short process was written before this request, so there is nothing to continue.
    let is_ended = matches!(before.state, State::Closed { .. });
    (!is_ended).then(|| EarlierRun { part: part + u32::from(is_rolled), own_part: 1, before: Some(before) })
}

/// Writes a run, and adds the requests that wait with it.
pub(super) fn write(store: &mut Store, open: &mut OpenRun, queued: &QueuedRun) -> Result<(), StoreError> {
    write_run(store, open, queued)?;
    match open.id.filter(|_| !queued.requests.is_empty()) {
        Some(id) => store.add_requests(id, &queued.requests),
        None => Ok(()),
    }
}

fn write_run(store: &mut Store, open: &mut OpenRun, queued: &QueuedRun) -> Result<(), StoreError> {
    if open.earlier.before.as_ref().is_some_and(|before| is_of_another(before, &queued.run)) {
        *open = OpenRun { stored_uid: Some(uid_with_user(queued)), ..OpenRun::default() };
    }
    let Some(id) = open.id.map_or_else(|| begin(store, open, queued), |id| Ok(Some(id)))? else {
        return Ok(());
    };
    let joined = open.earlier.joined(&queued.run);
    let run = joined.as_ref().unwrap_or(&queued.run);
    let write = if queued.is_final { Store::close } else { Store::checkpoint };
    match write(store, id, run) {
        // The run was deleted from the store meanwhile.
        Err(StoreError::UnknownRun { .. }) => {
            open.id = None;
            begin(store, open, queued)?.map_or(Ok(()), |id| write(store, id, run))
        }
        result => result,
    }
}

/// Returns whether the stored run is another user's. If a process had ended before its connection was accepted, only the process
/// itself states its start time. So it must not write to another user's run.
fn is_of_another(stored: &Run, run: &Run) -> bool {
    matches!((stored.process.uid, run.process.uid), (Some(stored), Some(user)) if stored != user)
}

fn uid_with_user(queued: &QueuedRun) -> String {
    format!("{}:{}", queued.uid, queued.run.process.uid.unwrap_or_default())
}

/// Returns the id of a run that the store already had; `None` if the run has been added to the store now. An earlier daemon may
/// have stored it, or this one before the store failed or the run's part ended.
fn begin(store: &mut Store, open: &mut OpenRun, queued: &QueuedRun) -> Result<Option<RunId>, StoreError> {
    let mut uid = open.stored_uid.clone().unwrap_or_else(|| queued.uid.clone());
    if !open.is_ours
        && let Some(NewestPart { id, .. }) = store.newest(&uid)?
        && is_of_another(&store.load_head(id)?, &queued.run)
    {
        uid = uid_with_user(queued);
    }
    if uid != queued.uid {
        open.stored_uid = Some(uid.clone());
    }
    let (id, part) = match store.newest(&uid)? {
        Some(NewestPart { id, part, is_rolled }) => {
            if !open.is_ours {
                // After a complete part, a run that this daemon has split itself does not continue the stored data.
                let is_continued = !is_rolled || queued.run.coverage.part.is_none();
                open.earlier.before = if is_continued { Some(Arc::new(store.load(id)?)) } else { None };
            }
            if is_rolled { (None, part + 1) } else { (Some(id), part) }
        }
        None => (None, own_part(&queued.run)),
    };
    (open.earlier.part, open.earlier.own_part) = (part, own_part(&queued.run));
    if id.is_none() {
        let joined = open.earlier.joined(&queued.run);
        let store_new = if queued.is_final { Store::insert_part } else { Store::begin_part };
        open.id = Some(store_new(store, joined.as_ref().unwrap_or(&queued.run), &uid, part)?);
    } else {
        open.id = id;
    }
    open.is_ours = true;
    Ok(id)
}

impl EarlierRun {
    /// Returns the run joined with the data of an earlier daemon, with the store's part number; `None` if `run` needs no change.
    pub(crate) fn joined(&self, run: &Run) -> Option<Run> {
        let later_parts = own_part(run).saturating_sub(self.own_part);
        let before = self.before.as_ref().filter(|_| later_parts == 0);
        let mut joined = before.map(|before| join_runs::join_runs(before, run));
        let number = self.part.saturating_add(later_parts);
        let is_counted = |run: &Run| run.coverage.part.is_none_or(|part| part.number == number);
        if !joined.as_ref().map_or(is_counted(run), is_counted) {
            let run = joined.get_or_insert_with(|| run.clone());
            run.coverage.part.iter_mut().for_each(|part| part.number = number);
        }
        joined
    }

    /// Returns the place of the parts that follow the complete part that was written.
    pub(crate) fn after_roll(&self) -> EarlierRun {
        EarlierRun { before: None, ..self.clone() }
    }
}

fn own_part(run: &Run) -> u32 {
    run.coverage.part.map_or(1, |part| part.number)
}
