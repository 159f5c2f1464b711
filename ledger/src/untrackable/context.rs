//! Cost of contexts apart from their allocations, and division of a step's bytes among its events.

use crate::Map;
use crate::book::rounding::{GRANULE, whole_granules};
use crate::untrackable::change::{BookedAs, Share};
use crate::untrackable::event::{Event, What};
use gpumem_model::gap::UntrackableParts;

/// Maximum number of contexts of a process on a device that are kept separately; all others share one.
const MAX_CONTEXTS: usize = 256;
/// Maximum number of modules whose sizes are kept, for unloads that do not report them.
const MAX_MODULES: usize = 65_536;
/// Maximum accepted size of a model or module; a peer that reports more is wrong.
const MAX_BYTES: u64 = 1 << 46;

/// Default limits of a context (CUDA: 1 KiB for each thread, 1 MiB, 8 MiB). They are part of the context's own cost, so the
/// models count only the excess.
const STACK: u64 = 1 << 10;
const PRINTF: u64 = 1 << 20;
const HEAP: u64 = 8 << 20;

#[derive(Debug, Default)]
struct Context {
    id: u32,
    /// Its creation was reported; for other contexts only modules or limits were reported.
    is_made: bool,
    /// Bytes booked for creating it.
    base: i64,
    /// Bytes booked for its modules, and their loadable bytes.
    code: i64,
    need: u64,
    local: i64,
    heaps: i64,
    /// Limits that were set; `None` for the default.
    stack: Option<u64>,
    printf: Option<u64>,
    heap: Option<u64>,
    /// Stack bytes that the model expects but no step has shown yet.
    owed: Option<(i64, Event)>,
    /// Loadable bytes by module id.
    modules: Map<u64, u64>,
    claim: Claim,
}

/// Events of a context in the step being divided.
#[derive(Debug, Default)]
struct Claim {
    created: Option<Event>,
    loaded: u64,
    unloaded: u64,
    /// The largest load or unload.
    module: Option<(u64, Event)>,
    stack: Option<(u64, Event)>,
    printf: Option<(u64, Event)>,
    heap: Option<(u64, Event)>,
}

impl Context {
    fn parts(&self) -> UntrackableParts {
        UntrackableParts {
            context_bytes: self.base,
            modules_bytes: self.code,
            local_memory_bytes: self.local,
            heaps_bytes: self.heaps,
            ..UntrackableParts::default()
        }
    }
}

/// Returns the bytes of stacks above the default, for all threads that the device can run at once.
fn stacks(limit: Option<u64>, threads: u64) -> i64 {
    let above = limit.unwrap_or(STACK).saturating_sub(STACK);
    whole_granules(above.saturating_mul(threads).min(MAX_BYTES) as i64)
}

fn above(limit: Option<u64>, default: u64) -> i64 {
    limit.unwrap_or(default).saturating_sub(default).min(MAX_BYTES) as i64
}

/// Returns the maximum difference between a measured step and its model.
fn tolerance(model: i64) -> i64 {
    (model / 10).saturating_abs().saturating_add(GRANULE)
}

fn granules(bytes: u64) -> i64 {
    whole_granules(bytes.min(MAX_BYTES) as i64)
}

#[derive(Debug, Default)]
pub(super) struct Contexts {
    all: Vec<Context>,
    /// Number of modules in all contexts.
    modules: usize,
}

impl Contexts {
    pub fn booked(&self) -> UntrackableParts {
        let parts = self.all.iter().map(Context::parts);
        parts.fold(UntrackableParts::default(), |sum, parts| sum.combine(parts, i64::wrapping_add))
    }

    /// Returns loadable bytes that no step has shown yet: lazy loading loads code on first use.
    pub fn unseen_modules(&self) -> i64 {
        let unseen = self.all.iter().map(|context| granules(context.need).wrapping_sub(context.code).max(0));
        unseen.fold(0, i64::saturating_add)
    }

    fn context(&mut self, id: u32) -> &mut Context {
        let known = self.all.iter().position(|context| context.id == id);
        let at = known.unwrap_or_else(|| {
            if self.all.len() < MAX_CONTEXTS {
                self.all.push(Context { id, ..Context::default() });
            }
            self.all.len() - 1
        });
        &mut self.all[at]
    }

    fn forget(&mut self, id: u32) -> UntrackableParts {
        let Some(at) = self.all.iter().position(|context| context.id == id) else {
            return UntrackableParts::default();
        };
        let gone = self.all.swap_remove(at);
        self.modules -= gone.modules.len();
        gone.parts()
    }

    /// Applies events whose bytes are unknown: changes only the state of the contexts.
    pub fn pass(&mut self, events: &[Event], threads: u64) {
        self.share(0, events, threads, true);
    }

    /// Divides a step of `bytes` among its events. If `in_doubt`, no bytes are booked to events; destroyed contexts still return
    /// the bytes booked for them.
    pub fn share(&mut self, bytes: i64, events: &[Event], threads: u64, in_doubt: bool) -> Vec<Share> {
        let mut shares = Vec::new();
        let mut rest = bytes;
        for event in events {
            let gone = self.claim(event);
            if gone != UntrackableParts::default() {
                let back = gone.sum().wrapping_neg();
                rest = rest.wrapping_sub(back);
                shares.push(Share { event: *event, bytes: back, kind: BookedAs::Measured, expected: None });
            }
        }
        let created = self.all.iter().filter(|context| context.claim.created.is_some()).count();
        let deal =
            Deal { in_doubt, created: created > 0, threads, alone: created == 0 && self.is_one_limit() };
        let is_claimed = self.all.iter().any(Context::is_claimed);
        for context in &mut self.all {
            context.share_limits(&mut rest, &deal, &mut shares);
        }
        for context in &mut self.all {
            context.share_modules(&mut rest, &deal, &mut shares);
        }
        let mut left = created as i64;
        for context in &mut self.all {
            let Some(event) = context.claim.created else { continue };
            let share = if in_doubt { 0 } else { rest / left };
            (rest, left) = (rest.wrapping_sub(share), left - 1);
            context.base = context.base.wrapping_add(share);
            shares.push(Share { event, bytes: share, kind: BookedAs::Measured, expected: None });
        }
        if !in_doubt && !is_claimed {
            self.pay_owed(rest, &mut shares);
        }
        self.all.iter_mut().for_each(|context| context.claim = Claim::default());
        shares
    }

    /// Whether a single limit is the only request: then it gets all measured bytes.
    fn is_one_limit(&self) -> bool {
        let limits = self.all.iter().map(|context| context.claim.limits()).sum::<usize>();
        limits == 1 && self.all.iter().all(|context| context.claim.module.is_none())
    }

    /// Books growth to stacks that the model expects: the driver allocates them only when a kernel needs them.
    fn pay_owed(&mut self, rest: i64, shares: &mut Vec<Share>) {
        let pays = |context: &&mut Context| {
            let owed = context.owed.map_or(0, |(owed, _)| owed);
            owed > 0 && rest > 0 && rest.abs_diff(owed) <= tolerance(owed).unsigned_abs()
        };
        let Some(context) = self.all.iter_mut().find(pays) else { return };
        let Some((owed, event)) = context.owed.take() else { return };
        context.local = context.local.wrapping_add(rest);
        shares.push(Share { event, bytes: rest, kind: BookedAs::Measured, expected: Some(owed) });
    }

    /// Notes the request of an event. Returns the bytes booked for contexts that end with it.
    fn claim(&mut self, event: &Event) -> UntrackableParts {
        let id = event.context;
        match event.what {
            What::Created => {
                let context = self.context(id);
                if !std::mem::replace(&mut context.is_made, true) {
                    context.claim.created = Some(*event);
                }
            }
            What::Existed => self.context(id).is_made = true,
            What::Destroyed => return self.forget(id),
            What::Reset | What::Exec => {
                let booked = self.booked();
                self.all.clear();
                self.modules = 0;
                return booked;
            }
            What::Loaded { module, bytes } => {
                let is_room = self.modules < MAX_MODULES;
                let context = self.context(id);
                let is_new = is_room && context.modules.insert(module, bytes).is_none();
                context.claim.loaded = context.claim.loaded.saturating_add(bytes.min(MAX_BYTES));
                context.claim.note_module(bytes, event);
                self.modules += usize::from(is_new);
            }
            What::Unloaded { module, bytes } => {
                let context = self.context(id);
                let known = context.modules.remove(&module);
                let bytes = known.unwrap_or(bytes);
                context.claim.unloaded = context.claim.unloaded.saturating_add(bytes.min(MAX_BYTES));
                context.claim.note_module(bytes, event);
                self.modules -= usize::from(known.is_some());
            }
            What::Stack(limit) => self.context(id).claim.stack = Some((limit, *event)),
            What::Printf(limit) => self.context(id).claim.printf = Some((limit, *event)),
            What::Heap(limit) => self.context(id).claim.heap = Some((limit, *event)),
            What::Creating | What::Imported(_) | What::Other(_) => {}
        }
        UntrackableParts::default()
    }
}

impl Claim {
    fn note_module(&mut self, bytes: u64, event: &Event) {
        if self.module.is_none_or(|(largest, _)| bytes >= largest) {
            self.module = Some((bytes, *event));
        }
    }

    fn limits(&self) -> usize {
        [self.stack, self.printf, self.heap].iter().flatten().count()
    }
}

/// Conditions that apply to all shares of one step.
struct Deal {
    in_doubt: bool,
    /// A context was created: only models and upper bounds separate its cost from that of other events.
    created: bool,
    threads: u64,
    alone: bool,
}

impl Deal {
    /// Returns the share of a limit with model value `model`, if `rest` is left.
    fn limit(&self, rest: i64, model: i64) -> (i64, BookedAs) {
        if self.in_doubt || model == 0 {
            (0, BookedAs::Model)
        } else if self.created {
            (model, BookedAs::Model)
        } else if self.alone && rest.wrapping_sub(model).unsigned_abs() <= tolerance(model).unsigned_abs() {
            (rest, BookedAs::Measured)
        } else if model > 0 {
            (model.min(rest.max(0)), BookedAs::Model)
        } else {
            (model.max(rest.min(0)), BookedAs::Model)
        }
    }
}

impl Context {
    fn is_claimed(&self) -> bool {
        let claim = &self.claim;
        claim.created.is_some() || claim.module.is_some() || claim.limits() > 0
    }

    fn share_limits(&mut self, rest: &mut i64, deal: &Deal, shares: &mut Vec<Share>) {
        if let Some((limit, event)) = self.claim.stack {
            let model = stacks(Some(limit), deal.threads).wrapping_sub(stacks(self.stack, deal.threads));
            let owed = self.owed.take().map_or(0, |(owed, _)| owed);
            let (bytes, kind) = deal.limit(*rest, model);
            // Never returns more bytes than were booked.
            let bytes = bytes.max(self.local.wrapping_neg().min(0));
            self.stack = Some(limit);
            self.local = self.local.wrapping_add(bytes);
            let missing = model.saturating_sub(bytes).saturating_add(owed);
            let is_missing = !deal.in_doubt && kind == BookedAs::Model && missing > 0;
            self.owed = is_missing.then_some((missing, event));
            *rest = rest.wrapping_sub(bytes);
            shares.push(Share { event, bytes, kind, expected: Some(model) });
        }
        let (printf, heap) = (self.claim.printf, self.claim.heap);
        for (claim, limit, default) in [(printf, &mut self.printf, PRINTF), (heap, &mut self.heap, HEAP)] {
            let Some((new, event)) = claim else { continue };
            let model = above(Some(new), default).wrapping_sub(above(*limit, default));
            let (bytes, kind) = deal.limit(*rest, model);
            let bytes = bytes.max(self.heaps.wrapping_neg().min(0));
            *limit = Some(new);
            self.heaps = self.heaps.wrapping_add(bytes);
            *rest = rest.wrapping_sub(bytes);
            shares.push(Share { event, bytes, kind, expected: Some(model) });
        }
    }

    fn share_modules(&mut self, rest: &mut i64, deal: &Deal, shares: &mut Vec<Share>) {
        let Some((_, event)) = self.claim.module else { return };
        let (loaded, unloaded) = (self.claim.loaded, self.claim.unloaded);
        let with = self.need.saturating_add(loaded).min(MAX_BYTES);
        let most = granules(with).wrapping_sub(granules(self.need));
        let least = self.code.max(0).min(granules(unloaded)).wrapping_neg();
        self.need = with.saturating_sub(unloaded);
        let bound = granules(self.need);
        let change = match deal {
            Deal { in_doubt: true, .. } => 0,
            Deal { created: true, .. } => most,
            _ => (*rest).clamp(least, most),
        };
        // Unloaded modules keep no bytes; the others keep at most their loadable bytes.
        let code = self.code.wrapping_add(change).min(bound).max(0);
        let bytes = code.wrapping_sub(self.code);
        self.code = code;
        *rest = rest.wrapping_sub(bytes);
        let expected = most.wrapping_add(if unloaded > 0 { least } else { 0 });
        shares.push(Share { event, bytes, kind: BookedAs::UpperBound, expected: Some(expected) });
    }
}
