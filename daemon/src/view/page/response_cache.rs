//! What pages ask for, made once for all who ask. A hundred open pages cost what one costs: an answer is kept for a moment, one
//! is made at a time, and making them has a share of the time.

use super::{node, process};
use crate::config::{Page, Tenants};
use crate::view::{ViewContext, ViewSettings};
use gpumem_ledger::ProcessKey;
use hyper::StatusCode;
use hyper::body::Bytes;
use hyper::header::HeaderValue;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of answers that are kept.
const MOST_KEPT: usize = 8 << 20;
/// What took so long to make is not made again before this many times that: 4 % of the time.
const REST: u32 = 25;
/// But pages go on, however slow the machine is.
const LONGEST_REST: Duration = Duration::from_secs(5);
/// Who waits longer for their turn is told to come again.
const PATIENCE: Duration = Duration::from_secs(3);
/// An answer that is older is not given any more, however long others take.
const OLDEST: Duration = Duration::from_secs(15);

/// Something that pages ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Devices,
    Processes,
    Report(ProcessKey),
    Drawn(ProcessKey),
}

impl What {
    /// It is as new as that at least, when the daemon has time.
    fn fresh(self) -> Duration {
        match self {
            What::Devices | What::Processes => Duration::from_millis(250),
            What::Report(_) | What::Drawn(_) => Duration::from_secs(1),
        }
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Refused(pub StatusCode, pub String);

/// An answer.
#[derive(Debug)]
pub(super) struct CachedResponse {
    pub body: Bytes,
    pub tag: HeaderValue,
    at: Instant,
}

/// What must be the same for an answer to be given again.
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

/// Where answers lie.
#[derive(Default)]
pub(crate) struct ResponseCache {
    kept: Mutex<Vec<Kept>>,
    /// Who has it makes something; when the next one may.
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
            // Others are looked at, or the daemon has much to do: the page says how old its numbers are.
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
        // While this one waited, another one may have made it.
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
        // Another daemon's answers have other tags.
        let tag = format!("\"{:x}.{number:x}\"", context.stats.started_ns);
        let tag = HeaderValue::from_str(&tag).unwrap_or(HeaderValue::from_static("\"\""));
        let made = Arc::new(CachedResponse { body: body.text.into(), tag, at: began });
        self.keep(Kept { what, under, made: Arc::clone(&made), asked: Instant::now() });
        Ok(made)
    }

    fn find(&self, what: What, under: Under, newer_than: Duration) -> Option<Arc<CachedResponse>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.iter_mut().find(|kept| kept.what == what && kept.under == under)?;
        found.asked = Instant::now();
        (found.made.at.elapsed() < newer_than).then(|| Arc::clone(&found.made))
    }

    fn keep(&self, new: Kept) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
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
    Refused(StatusCode::SERVICE_UNAVAILABLE, "the daemon has much to do: ask again".to_owned())
}

/// A text, and what it cost to make: what it waited for is not counted.
pub(super) struct Text {
    pub text: String,
    pub cost: Duration,
}

/// Makes it beside the loop, where it holds up nobody.
pub(super) async fn aside(make: impl FnOnce() -> String + Send + 'static) -> Result<Text, Refused> {
    let timed = move || {
        let began = Instant::now();
        let text = make();
        Text { text, cost: began.elapsed() }
    };
    tokio::task::spawn_blocking(timed)
        .await
        .map_err(|_| Refused(StatusCode::INTERNAL_SERVER_ERROR, "the answer could not be made".to_owned()))
}
