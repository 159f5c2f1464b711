//! Answers for pages, each made once for all clients. A hundred open pages cost as much as one: an answer is cached for a short
//! time, one is made at a time, and making them is limited to a share of the time.

use super::{node, process};
use crate::config::{Page, Tenants};
use crate::os::lock;
use crate::view::{Refused, ViewContext, ViewSettings};
use gpumem_ledger::ProcessKey;
use hyper::StatusCode;
use hyper::body::Bytes;
use hyper::header::HeaderValue;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MOST_KEPT: usize = 8 << 20;
/// Pause after making an answer, as a multiple of the time that it took, so that answers take 4 % of the time.
const REST: u32 = 25;
/// Limit of that pause, so that pages are updated on slow machines too.
const LONGEST_REST: Duration = Duration::from_secs(5);
/// Time limit for waiting until an answer is made; afterwards the client must retry.
const PATIENCE: Duration = Duration::from_secs(3);
const OLDEST: Duration = Duration::from_secs(15);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Devices,
    Processes,
    Report(ProcessKey),
    Drawn(ProcessKey),
}

impl What {
    /// Returns the maximum age of this answer if the daemon has time to make a new one.
    fn fresh(self) -> Duration {
        match self {
            What::Devices | What::Processes => Duration::from_millis(250),
            What::Report(_) | What::Drawn(_) => Duration::from_secs(1),
        }
    }
}

#[derive(Debug)]
pub(super) struct CachedResponse {
    pub body: Bytes,
    pub tag: HeaderValue,
    at: Instant,
}

/// Settings that must be the same for a cached answer to be valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Under(Page, Tenants, usize);

impl Under {
    fn of(shown: &ViewSettings) -> Self {
        Under(shown.page, shown.tenants, Arc::as_ptr(&shown.rules) as usize)
    }
}

struct Kept {
    what: What,
    under: Under,
    made: Arc<CachedResponse>,
    asked: Instant,
}

/// Cache of the answers.
#[derive(Default)]
pub(crate) struct ResponseCache {
    kept: Mutex<Vec<Kept>>,
    /// Locked while an answer is made; the time from which the next one may be made.
    turn: tokio::sync::Mutex<Option<Instant>>,
    number: std::sync::atomic::AtomicU64,
}

impl ResponseCache {
    pub(super) async fn get(
        &self,
        context: &Arc<ViewContext>,
        what: What,
    ) -> Result<Arc<CachedResponse>, Refused> {
        let shown = context.shown();
        let under = Under::of(&shown);
        if let Some(made) = self.find(what, under, what.fresh()) {
            return Ok(made);
        }
        if let What::Report(key) | What::Drawn(key) = what {
            process::is_there(context, key, shown.tenants)?;
        }
        match tokio::time::timeout(PATIENCE, self.make(context, what, shown, under)).await {
            Ok(made) => made,
            // Other answers are being made, or the daemon is busy: return an older answer. The page shows the age of its numbers.
            Err(_) => self.find(what, under, OLDEST).ok_or_else(busy),
        }
    }

    async fn make(
        &self,
        context: &Arc<ViewContext>,
        what: What,
        shown: ViewSettings,
        under: Under,
    ) -> Result<Arc<CachedResponse>, Refused> {
        let mut turn = self.turn.lock().await;
        // Another client may have had the answer made meanwhile.
        if let Some(made) = self.find(what, under, what.fresh()) {
            return Ok(made);
        }
        if let Some(next) = *turn {
            tokio::time::sleep_until(next.into()).await;
        }
        let began = Instant::now();
        let body = match what {
            What::Devices => node::devices(context, shown).await?,
            What::Processes => node::processes(context, shown).await?,
            What::Report(key) => process::report(context, shown, key).await?,
            What::Drawn(key) => process::drawn(context, shown, key).await?,
        };
        *turn = Some(Instant::now() + (body.cost * REST).min(LONGEST_REST));
        drop(turn);
        let number = self.number.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // The start time makes the tags of different daemons differ.
        let tag = format!("\"{:x}.{number:x}\"", context.stats.started_ns);
        let tag = HeaderValue::from_str(&tag).unwrap_or(HeaderValue::from_static("\"\""));
        let made = Arc::new(CachedResponse { body: body.text.into(), tag, at: began });
        self.keep(Kept { what, under, made: Arc::clone(&made), asked: Instant::now() });
        Ok(made)
    }

    fn find(&self, what: What, under: Under, newer_than: Duration) -> Option<Arc<CachedResponse>> {
        let mut kept = lock(&self.kept);
        let found = kept.iter_mut().find(|kept| kept.what == what && kept.under == under)?;
        found.asked = Instant::now();
        (found.made.at.elapsed() < newer_than).then(|| Arc::clone(&found.made))
    }

    fn keep(&self, new: Kept) {
        let mut kept = lock(&self.kept);
        kept.retain(|old| old.what != new.what && old.made.at.elapsed() < OLDEST);
        kept.push(new);
        kept.sort_by_key(|kept| std::cmp::Reverse(kept.asked));
        let mut bytes = 0;
        kept.retain(|kept| {
            bytes += kept.made.body.len();
            bytes <= MOST_KEPT
        });
    }
}

fn busy() -> Refused {
    Refused::new(StatusCode::SERVICE_UNAVAILABLE, "the daemon is busy: retry later")
}

/// A text and the time for making it, without waiting.
pub(super) struct Text {
    pub text: String,
    pub cost: Duration,
}

/// Makes a text on another thread, so that it does not block the event loop.
pub(super) async fn aside(make: impl FnOnce() -> String + Send + 'static) -> Result<Text, Refused> {
    let timed = move || {
        let began = Instant::now();
        let text = make();
        Text { text, cost: began.elapsed() }
    };
    let failed = |_| Refused::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer could not be generated");
    tokio::task::spawn_blocking(timed).await.map_err(failed)
}
