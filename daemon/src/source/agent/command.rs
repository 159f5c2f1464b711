//! Commands to agents: record, stop recording, pause, resume, dump. One at a time for an agent; it says what became of it.

use super::Agents;
use gpumem_ledger::ProcessKey;
use gpumem_wire::{Body, Record, frame};
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// An agent that does not answer: it is busy sending, or of an older version.
const PATIENCE: Duration = Duration::from_secs(10);

/// What an agent is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Command {
    /// Write a recording to this file; empty for a name of its own.
    Start(String),
    /// No longer.
    Stop,
    /// Keep the history to itself.
    Pause,
    /// Tell it again.
    Resume,
    /// Write its state to this file; empty for a name of its own.
    Dump(String),
}

impl Command {
    pub(super) fn body(&self) -> Body<'_> {
        match self {
            Command::Start(path) => Body::RecordControl { on: true, path },
            Command::Stop => Body::RecordControl { on: false, path: "" },
            Command::Pause => Body::Pause {},
            Command::Resume => Body::Resume {},
            Command::Dump(path) => Body::Dump { path },
        }
    }
}

/// Why a command was not obeyed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Disobeyed {
    /// No agent of that process is connected.
    #[error("it has no agent that is connected")]
    NoAgent,
    /// It did not answer.
    #[error("its agent did not answer in {PATIENCE:?}: it is busy, or of an older version")]
    Silent,
    /// It could not.
    #[error("{0}")]
    Failed(String),
}

/// The file that was written, where there is one; or why not.
pub(crate) type Obeyed = Result<String, Disobeyed>;

/// A command on its way, and who waits for what becomes of it.
pub(super) type Errand = (Command, oneshot::Sender<Obeyed>);

/// An agent that is connected.
#[derive(Debug)]
pub(super) struct Speaker {
    errands: mpsc::Sender<Errand>,
    /// Newer connections of the process, each of which waits for this one: until it is over, or has nothing left to be read.
    successors: mpsc::Sender<oneshot::Sender<()>>,
    /// Last record that was handed to the ledger.
    heard: Arc<AtomicU64>,
}

/// The connection's end of a [`Speaker`].
#[derive(Debug)]
pub(super) struct Ear {
    pub errands: mpsc::Receiver<Errand>,
    pub successors: mpsc::Receiver<oneshot::Sender<()>>,
    pub heard: Arc<AtomicU64>,
    /// The command that was sent last, until the agent says what became of it.
    pub waiting: Option<(u8, oneshot::Sender<Obeyed>)>,
}

impl Ear {
    /// Looks for the word that somebody waits for.
    pub(crate) fn listen(&mut self, frames: &[u8]) {
        if self.waiting.is_none() {
            return;
        }
        for record in frame::records(frames).filter_map(|record| record.ok()?.ok()) {
            self.hear(&record);
        }
    }

    fn hear(&mut self, record: &Record<'_>) {
        let Body::Done { result, command, told } = record.body else { return };
        let Some((_, tell)) = self.waiting.take_if(|(kind, _)| *kind == command) else { return };
        let told = match result {
            0 => Ok(told.to_owned()),
            _ if told.is_empty() => Err(Disobeyed::Failed(format!("error {result}"))),
            _ => Err(Disobeyed::Failed(told.to_owned())),
        };
        // Who asked may have gone away.
        let _ = tell.send(told);
    }
}

impl Agents {
    /// Tells an agent what to do, and waits until it says what became of it.
    ///
    /// # Errors
    /// [`Disobeyed`].
    pub(crate) async fn command(&self, key: ProcessKey, command: Command) -> Obeyed {
        let errands = self.speakers().get(&key).map(|speaker| speaker.errands.clone());
        let (tell, told) = oneshot::channel();
        let sent = errands.ok_or(Disobeyed::NoAgent)?.try_send((command, tell));
        sent.map_err(|_| Disobeyed::Silent)?;
        match tokio::time::timeout(PATIENCE, told).await {
            Ok(Ok(told)) => told,
            Ok(Err(_)) => Err(Disobeyed::NoAgent),
            Err(_) => Err(Disobeyed::Silent),
        }
    }

    /// The last record of an agent that was handed on; `None` if it is not connected.
    pub(super) fn heard(&self, key: ProcessKey) -> Option<u64> {
        self.speakers().get(&key).map(|speaker| speaker.heard.load(Ordering::Relaxed))
    }

    /// An agent is there.
    pub(super) fn introduce(&self, key: ProcessKey) -> Ear {
        let (errands, inbox) = mpsc::channel(4);
        let (successors, queue) = mpsc::channel(1);
        let heard = Arc::new(AtomicU64::new(0));
        let speaker = Speaker { errands, successors, heard: Arc::clone(&heard) };
        self.speakers().insert(key, speaker);
        Ear { errands: inbox, successors: queue, heard, waiting: None }
    }

    /// Waits until everything that came on an earlier connection of the process has been handed on. A process that became another
    /// program (exec) has closed that one, and what it left must not be taken for the new program's.
    pub(super) async fn succeed(&self, key: ProcessKey) {
        let earlier = self.speakers().get(&key).map(|speaker| speaker.successors.clone());
        let (tell, told) = oneshot::channel();
        if let Some(earlier) = earlier
            && earlier.send(tell).await.is_ok()
        {
            // An error says that it is over; a word, that it is open and empty.
            let _ = told.await;
        }
    }

    /// It is gone, unless another connection of its process came meanwhile.
    pub(super) fn forget(&self, key: ProcessKey, heard: &Arc<AtomicU64>) {
        let mut speakers = self.speakers();
        if speakers.get(&key).is_some_and(|speaker| Arc::ptr_eq(&speaker.heard, heard)) {
            speakers.remove(&key);
        }
    }

    fn speakers(&self) -> std::sync::MutexGuard<'_, std::collections::HashMap<ProcessKey, Speaker>> {
        self.speakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
