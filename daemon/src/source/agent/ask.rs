//! Answers programs that request a report about themselves: their first record is `Ask` instead of `Hello`. The daemon sends the
//! report of the process that the kernel names, in pieces, and closes the connection. It counts as a connection without a hello,
//! so one user's requests leave three quarters of the slots to others. Each user's requests are also rate-limited.

use super::{Agents, Refusal};
use crate::clock;
use crate::source::frame_of;
use gpumem_ledger::ProcessKey;
use gpumem_wire::{AskKind, Body, Stamp};
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;
use tokio::net::UnixStream;

/// Maximum number of bytes of an answer in one packet.
const PIECE: usize = 48 << 10;
/// Time limit for the ledger to process what the requesting program has sent before, on its other connection.
const CATCH_UP: Duration = Duration::from_millis(500);
/// Time limit for rendering the answer and for the client to read it.
const LONGEST: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unanswered {
    /// Error number of Linux, for example ENOENT or EINVAL.
    pub errno: u16,
    pub text: String,
}

pub(crate) type Answer = Pin<Box<dyn Future<Output = Result<String, Unanswered>> + Send>>;
/// Renders the report about a process for the user with this uid, within the user's rate limit. The text has the options.
pub(crate) type Answerer = Box<dyn Fn(ProcessKey, u32, AskKind, String) -> Answer + Send + Sync>;

pub(crate) fn option<'a>(options: &'a str, key: &str) -> Option<&'a str> {
    options
        .lines()
        .filter_map(|line| line.split_once('='))
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value)
}

#[derive(Debug)]
pub(super) struct Question {
    pub key: ProcessKey,
    pub uid: u32,
    pub what: AskKind,
    pub options: String,
}

impl Agents {
    /// Sends the answer to a request. The caller closes the connection.
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

    /// Waits until the ledger has the process's records up to `seq`.
    async fn heard_up_to(&self, key: ProcessKey, seq: u64) {
        let mut pause = Duration::from_millis(1);
        // `heard` is `None` for an agent that is not connected; it has no records to wait for.
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
        let packet = frame_of(stamp, body);
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
