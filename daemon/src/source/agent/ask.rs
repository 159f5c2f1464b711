//! A program that asks about itself: a connection whose first record is `Ask` instead of `Hello`. It gets the report of the process that the
//! kernel names, in pieces, and the connection ends. It counts among those that have not said hello, so one user's questions leave
//! three quarters of these to the others; and each user has turns.

use super::{Agents, Refusal};
use crate::clock;
use gpumem_ledger::ProcessKey;
use gpumem_wire::{AskKind, Body, Record, Stamp};
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;
use tokio::net::UnixStream;

/// Bytes of an answer in one packet.
const PIECE: usize = 48 << 10;
/// What the asker has recorded is waited for that long at most: its words and its question come by two ways.
const CATCH_UP: Duration = Duration::from_millis(500);
/// Time to render, and to read the answer.
const LONGEST: Duration = Duration::from_secs(20);

/// Why there is no answer: an errno, and words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unanswered {
    /// ENOENT, EINVAL ...
    pub errno: u16,
    /// For people.
    pub text: String,
}

/// A view's answer to a process.
pub(crate) type Answer = Pin<Box<dyn Future<Output = Result<String, Unanswered>> + Send>>;
/// Renders what a process of a user asks about itself, when it is their turn; the text has options, `key=value` lines.
pub(crate) type Answerer = Box<dyn Fn(ProcessKey, u32, AskKind, String) -> Answer + Send + Sync>;

/// The value of an option.
pub(crate) fn option<'a>(options: &'a str, key: &str) -> Option<&'a str> {
    options
        .lines()
        .filter_map(|line| line.split_once('='))
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value)
}

/// Who asks what.
#[derive(Debug)]
pub(super) struct Question {
    pub key: ProcessKey,
    pub uid: u32,
    pub what: AskKind,
    pub options: String,
}

impl Agents {
    /// Answers, and closes.
    pub(super) async fn answer(&self, stream: &UnixStream, question: Question) -> Result<(), Refusal> {
        let answering = async {
            let seq = option(&question.options, "seq").and_then(|seq| seq.parse().ok());
            if let Some(seq) = seq {
                let _ = tokio::time::timeout(CATCH_UP, self.heard_up_to(question.key, seq)).await;
            }
            let answer = self.rendered(question).await;
            tell(stream, &answer).await
        };
        match tokio::time::timeout(LONGEST, answering).await {
            Ok(told) => told.map_err(Refusal::System),
            Err(_) => Err(Refusal::Silent(LONGEST)),
        }
    }

    async fn rendered(&self, question: Question) -> Result<String, Unanswered> {
        match self.answerer.get() {
            Some(answerer) => answerer(question.key, question.uid, question.what, question.options).await,
            None => Err(Unanswered { errno: 38, text: "this daemon answers no questions".into() }),
        }
    }

    /// Resolves when the ledger has what the process recorded up to `seq`.
    async fn heard_up_to(&self, key: ProcessKey, seq: u64) {
        let mut pause = Duration::from_millis(1);
        // An agent that never said hello has said nothing that could come.
        while self.heard(key).is_some_and(|heard| heard < seq)
            || self.inbox.capacity() < self.inbox.max_capacity()
        {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }
}

async fn tell(stream: &UnixStream, answer: &Result<String, Unanswered>) -> std::io::Result<()> {
    let (result, text) = match answer {
        Ok(text) => (0, text.as_bytes()),
        Err(why) => (why.errno, why.text.as_bytes()),
    };
    let pieces = text.len().div_ceil(PIECE).max(1);
    for piece in 0..pieces {
        let text = &text[piece * PIECE..text.len().min((piece + 1) * PIECE)];
        let stamp = Stamp { time_ns: clock::now_ns(), ..Stamp::default() };
        let body = Body::Answer { result, last: piece + 1 == pieces, text };
        let mut packet = Vec::new();
        Record { stamp, body }.append_frame(&mut packet);
        loop {
            stream.writable().await?;
            match stream.try_write(&packet) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                written => {
                    written?;
                    break;
                }
            }
        }
    }
    Ok(())
}
