//! Makes the answers for pages, each once for all clients, so that a hundred open pages cost as much as one. An answer is cached
//! for a short time. Only one answer is made at a time, and making answers may take only a share of the time.

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

const MAX_BYTES: usize = 8 << 20;
/// Pause after making an answer, as a multiple of the time that making it took. So answers take at most 4 % of the time, unless
/// [`LONGEST_PAUSE`] limits the pause.
const PAUSE_FACTOR: u32 = 25;
/// Limit of the pause after making an answer, so that pages are updated on slow machines too.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Time for which a client waits until its answer is made. Afterwards it must retry.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum age of a cached answer. An older one is never sent.
const MAX_AGE: Duration = Duration::from_secs(15);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageData {
    Devices,
    Processes,
    Report(ProcessKey),
    Drawn(ProcessKey),
}

impl PageData {
    /// Returns the maximum age of this answer if the daemon has time to make a new one.
    fn max_age(self) -> Duration {
        match self {
            PageData::Devices | PageData::Processes => Duration::from_millis(250),
            PageData::Report(_) | PageData::Drawn(_) => Duration::from_secs(1),
        }
    }
}

#[derive(Debug)]
pub(super) struct CachedResponse {
    pub body: Bytes,
    pub tag: HeaderValue,
    at: Instant,
}

/// Settings on which an answer depends. A cached answer is valid only if they are unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CacheSettings(Page, Tenants, usize);

impl CacheSettings {
    fn of(shown: &ViewSettings) -> Self {
        CacheSettings(shown.page, shown.tenants, Arc::as_ptr(&shown.rules) as usize)
    }
}

struct CacheEntry {
    what: PageData,
    under: CacheSettings,
    made: Arc<CachedResponse>,
    used: Instant,
}

/// Cache of answers, and the time from which on the next one may be made.
#[derive(Default)]
pub(crate) struct ResponseCache {
    entries: Mutex<Vec<CacheEntry>>,
    /// Time from which on the next answer may be made. Locked while an answer is made.
    next_at: tokio::sync::Mutex<Option<Instant>>,
    /// Number of answers generated so far; part of each answer's ETag.
    number: std::sync::atomic::AtomicU64,
}

impl ResponseCache {
    pub(super) async fn get(
        &self,
        context: &Arc<ViewContext>,
        what: PageData,
    ) -> Result<Arc<CachedResponse>, Refused> {
        let shown = context.shown();
        let under = CacheSettings::of(&shown);
        if let Some(made) = self.find(what, under, what.max_age()) {
            return Ok(made);
        }
        if let PageData::Report(key) | PageData::Drawn(key) = what {
            process::check(context, key, shown.tenants)?;
        }
        match tokio::time::timeout(TIMEOUT, self.make(context, what)).await {
            Ok(made) => made,
            // The daemon is busy, so an older answer is returned. The page shows the age of its numbers.
            Err(_) => self.find(what, under, MAX_AGE).ok_or_else(|| {
                Refused::new(StatusCode::SERVICE_UNAVAILABLE, "the daemon is busy: retry later")
            }),
        }
    }

    async fn make(&self, context: &Arc<ViewContext>, what: PageData) -> Result<Arc<CachedResponse>, Refused> {
        let shown = context.shown();
        let under = CacheSettings::of(&shown);
        let mut next_at = self.next_at.lock().await;
        // The answer may have been made for another client meanwhile.
        if let Some(made) = self.find(what, under, what.max_age()) {
            return Ok(made);
        }
        if let Some(next) = *next_at {
            tokio::time::sleep_until(next.into()).await;
        }
        let began = Instant::now();
        let body = match what {
            PageData::Devices => node::answer(context, shown, false).await?,
            PageData::Processes => node::answer(context, shown, true).await?,
            PageData::Report(key) => process::answer(context, shown, key, false).await?,
            PageData::Drawn(key) => process::answer(context, shown, key, true).await?,
        };
        *next_at = Some(Instant::now() + (body.cost * PAUSE_FACTOR).min(LONGEST_PAUSE));
        drop(next_at);
        let number = self.number.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // The start time makes the tags of different daemons differ.
        let tag = format!("\"{:x}.{number:x}\"", context.stats.started_ns);
        let tag = HeaderValue::from_str(&tag).unwrap_or(HeaderValue::from_static("\"\""));
        let made = Arc::new(CachedResponse { body: body.text.into(), tag, at: began });
        self.insert(CacheEntry { what, under, made: Arc::clone(&made), used: Instant::now() });
        Ok(made)
    }

    fn find(
        &self,
        what: PageData,
        under: CacheSettings,
        newer_than: Duration,
    ) -> Option<Arc<CachedResponse>> {
        let mut entries = lock(&self.entries);
        let found = entries.iter_mut().find(|entry| entry.what == what && entry.under == under)?;
        found.used = Instant::now();
        (found.made.at.elapsed() < newer_than).then(|| Arc::clone(&found.made))
    }

    fn insert(&self, new: CacheEntry) {
        let mut entries = lock(&self.entries);
        entries.retain(|old| old.what != new.what && old.made.at.elapsed() < MAX_AGE);
        entries.push(new);
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.used));
        let mut bytes = 0;
        entries.retain(|entry| {
            bytes += entry.made.body.len();
            bytes <= MAX_BYTES
        });
    }
}

/// A text, and the time that making it took, without times of waiting.
pub(super) struct Text {
    pub text: String,
    pub cost: Duration,
}

/// Makes a text on another thread, so that it does not block the event loop.
pub(super) async fn make_in_thread(make: impl FnOnce() -> String + Send + 'static) -> Result<Text, Refused> {
    let timed = move || {
        let began = Instant::now();
        let text = make();
        Text { text, cost: began.elapsed() }
    };
    let failed = |_| Refused::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer could not be generated");
    tokio::task::spawn_blocking(timed).await.map_err(failed)
}
