//! Times in which the agent saw nothing, as a run keeps them.

use gpumem_ledger as ledger;
use serde::{Deserialize, Serialize};

/// A time in which the agent saw nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlindWindow {
    /// From when.
    pub from_ns: u64,
    /// Until when; absent while it lasts.
    pub to_ns: Option<u64>,
    /// Why, in words.
    pub why: String,
}

impl From<&ledger::BlindWindow> for BlindWindow {
    fn from(window: &ledger::BlindWindow) -> Self {
        let by = window.by.as_str();
        let why = match (window.cause, by) {
            (ledger::BlindCause::Held, "") => "another CUPTI client held CUPTI".to_owned(),
            (ledger::BlindCause::Held, by) => format!("{by} held CUPTI"),
            (ledger::BlindCause::Paused, "") => "paused by the program".to_owned(),
            (ledger::BlindCause::Refused | ledger::BlindCause::Disarmed, "") => "not known why".to_owned(),
            (_, why) => why.to_owned(),
        };
        BlindWindow { from_ns: window.from_ns, to_ns: window.to_ns, why }
    }
}
