//! Answers programs that request a report about themselves: their first record is `Ask` instead of `Hello`. The daemon sends the
//! report of the process that the kernel names, in pieces, and closes the connection. The connection counts as one without a hello,
//! so one user's requests leave three quarters of these slots to others. Each user's requests are also rate-limited.

use super::{Agents, Refusal, frame_now};
use gpumem_ledger::ProcessKey;
use gpumem_wire::{AskKind, Body};
use rustix::net::SendFlags;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Maximum number of bytes of an answer in one packet.
const PIECE: usize = 48 << 10;
/// Timeout for the ledger to book the earlier records of the requesting program, which arrive on another connection.
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
/// Renders the report about a process for the user with this uid, within the user's rate limit. The string has the options of
/// the request.
pub(crate) type Answerer = Box<dyn Fn(ProcessKey, u32, AskKind, String) -> Answer + Send + Sync>;

/// Returns the value of a key in the options of a request, which are `key=value` lines.
pub(crate) fn option<'a>(options: &'a str, key: &str) -> Option<&'a str> {
    options
        .lines()
        .filter_map(|line| line.split_once('='))
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value)
}

/// A program's request for the report about itself.
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
                let _ = tokio::time::timeout(CATCH_UP, self.wait_for_records(question.key, seq)).await;
            }
            let answer = match self.answerer.get() {
                Some(answerer) => answerer(question.key, question.uid, question.what, question.options).await,
                None => Err(Unanswered { errno: 38, text: "this daemon answers no questions".into() }),
            };
            send(stream, &answer).await
        };
        match tokio::time::timeout(LONGEST, answering).await {
            Ok(sent) => sent.map_err(Refusal::System),
            Err(_) => Err(Refusal::Silent(LONGEST)),
        }
    }

    /// Waits until the records of the process up to `seq` were handed to the ledger, and the ledger has taken all queued batches.
    async fn wait_for_records(&self, key: ProcessKey, seq: u64) {
        let mut pause = Duration::from_millis(1);
        // `last_seq` is `None` for an agent that is not connected; it has no records to wait for.
        while self.last_seq(key).is_some_and(|last| last < seq)
            || self.inbox.capacity() < self.inbox.max_capacity()
        {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }
}

/// Sends an answer in pieces of at most [`PIECE`] bytes.
async fn send(stream: &UnixStream, answer: &Result<String, Unanswered>) -> std::io::Result<()> {
    let (result, mut rest) = match answer {
        Ok(text) => (0, text.as_bytes()),
        Err(why) => (why.errno, why.text.as_bytes()),
    };
    loop {
        let (text, after) = rest.split_at(rest.len().min(PIECE));
        let packet = frame_now(Body::Answer { result, last: after.is_empty(), text });
        // Not with `try_write`, which must not be called within `async_io`.
        let send = || Ok(rustix::net::send(stream, &packet, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?);
        stream.async_io(Interest::WRITABLE, send).await?;
        if after.is_empty() {
            return Ok(());
        }
        rest = after;
    }
}
