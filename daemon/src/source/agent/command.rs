//! Commands to agents: record, stop recording, pause, resume, dump. An agent executes one command at a time and reports the result.

use super::Agents;
use crate::agent_command::AgentCommand as Command;
use crate::os::lock;
use gpumem_ledger::ProcessKey;
use gpumem_wire::{Body, frame};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Time limit for the agent's answer. An agent that is busy sending, or is of an older version, does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

impl Command {
    /// Returns the record that the agent receives.
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

/// Path of the file that the agent wrote (empty if none), or why the command failed.
pub(crate) type CommandResult = Result<String, String>;

/// A command that is to be sent, and the channel for its result.
pub(super) type QueuedCommand = (Command, oneshot::Sender<CommandResult>);

/// Handle with which the daemon reaches the connection of an agent.
#[derive(Debug)]
pub(super) struct AgentHandle {
    commands: mpsc::Sender<QueuedCommand>,
    /// Channel for the process's newer connections. Each waits until this connection has ended or its socket is empty.
    successors: mpsc::Sender<oneshot::Sender<()>>,
    /// Sequence number of the agent's last record that was handed to the ledger.
    last_seq: Arc<AtomicU64>,
}

/// Receiving ends of the channels of an [`AgentHandle`], held by the agent's connection.
#[derive(Debug)]
pub(super) struct CommandInbox {
    pub commands: mpsc::Receiver<QueuedCommand>,
    pub successors: mpsc::Receiver<oneshot::Sender<()>>,
    pub last_seq: Arc<AtomicU64>,
    /// The last command sent, if its result has not arrived: its record kind, and the channel for the result.
    pub pending: Option<(u8, oneshot::Sender<CommandResult>)>,
}

impl CommandInbox {
    /// Searches the agent's frames for the result of the pending command, and passes the result on.
    pub(crate) fn find_result(&mut self, frames: &[u8]) {
        if self.pending.is_none() {
            return;
        }
        for record in frame::records(frames).filter_map(|record| record.ok()?.ok()) {
            let Body::Done { result, command, told } = record.body else { continue };
            let Some((_, requester)) = self.pending.take_if(|(kind, _)| *kind == command) else { continue };
            // An error of `send` means that the requester has disconnected.
            let _ = requester.send(match result {
                0 => Ok(told.to_owned()),
                _ if told.is_empty() => Err(format!("error {result}")),
                _ => Err(told.to_owned()),
            });
        }
    }
}

impl Agents {
    /// Lets an agent execute a command, and returns its result.
    pub(crate) async fn command(&self, key: ProcessKey, command: Command) -> CommandResult {
        let commands = lock(&self.handles).get(&key).map(|handle| handle.commands.clone());
        let (requester, result) = oneshot::channel();
        let no_agent = || "its agent is not connected".to_owned();
        let silent =
            || format!("its agent did not answer in {PATIENCE:?}: it is busy, or of an older version");
        commands.ok_or_else(no_agent)?.try_send((command, requester)).map_err(|_| silent())?;
        let answered = tokio::time::timeout(PATIENCE, result).await.map_err(|_| silent())?;
        answered.map_err(|_| no_agent())?
    }

    /// Returns the sequence number of the agent's last record handed to the ledger; `None` if the agent is not connected.
    pub(super) fn last_seq(&self, key: ProcessKey) -> Option<u64> {
        lock(&self.handles).get(&key).map(|handle| handle.last_seq.load(Ordering::Relaxed))
    }

    /// Adds a handle of an agent, so that commands reach its connection. Returns the receiving ends for the connection.
    pub(super) fn register(&self, key: ProcessKey) -> CommandInbox {
        let ((commands, inbox), (successors, queue)) = (mpsc::channel(4), mpsc::channel(1));
        let last_seq = Arc::new(AtomicU64::new(0));
        let handle = AgentHandle { commands, successors, last_seq: Arc::clone(&last_seq) };
        lock(&self.handles).insert(key, handle);
        CommandInbox { commands: inbox, successors: queue, last_seq, pending: None }
    }

    /// Waits until all packets of the process's earlier connection have been handed to the ledger. A process that has replaced its
    /// program (exec) has closed that connection. Its records must not be counted for the new program.
    pub(super) async fn wait_for_predecessor(&self, key: ProcessKey) {
        let earlier = lock(&self.handles).get(&key).map(|handle| handle.successors.clone());
        let (successor, empty) = oneshot::channel();
        if let Some(earlier) = earlier
            && earlier.send(successor).await.is_ok()
        {
            // An error means that the earlier connection has ended; a message means that its socket is empty.
            let _ = empty.await;
        }
    }

    /// Removes the agent's handle, unless a newer connection of its process has replaced it.
    pub(super) fn forget(&self, key: ProcessKey, last_seq: &Arc<AtomicU64>) {
        let mut handles = lock(&self.handles);
        if handles.get(&key).is_some_and(|handle| Arc::ptr_eq(&handle.last_seq, last_seq)) {
            handles.remove(&key);
        }
    }
}
