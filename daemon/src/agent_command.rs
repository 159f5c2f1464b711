//! Commands to agents: views give them, and the agent source sends them.

/// Command to the agent (the library of this project) in one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentCommand {
    /// Write a recording to this file. If the path is empty, the agent chooses it.
    Start(String),
    Stop,
    /// Stop sending records of events.
    Pause,
    /// Send records of events again.
    Resume,
    /// Write the agent's state to this file. If the path is empty, the agent chooses it.
    Dump(String),
}
