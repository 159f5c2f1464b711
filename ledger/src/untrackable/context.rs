//! Memory that contexts cost apart from their allocations, and the division of a step's bytes among its events.

use crate::Map;
use crate::book::rounding::{GRANULE, whole_granules};
use crate::untrackable::change::{BookedAs, Share};
use crate::untrackable::event::{Event, What};
use gpumem_model::gap::UntrackableParts;

/// Maximum number of contexts of an account; further ones share the last.
const MAX_CONTEXTS: usize = 256;
/// Maximum number of modules whose sizes are kept. Sizes are kept because the record of an unload may have none.
const MAX_MODULES: usize = 65_536;
/// Maximum accepted result of a model or size of a module; a larger one comes from a wrong report.
const MAX_BYTES: u64 = 1 << 46;

/// Default limits of a context in CUDA: stack bytes of a thread, printf buffer, malloc heap. Their memory is part of the
/// context's own cost, so models count only what exceeds them.
const STACK: u64 = 1 << 10;
const PRINTF: u64 = 1 << 20;
const HEAP: u64 = 8 << 20;

#[derive(Debug, Default)]
struct Context {
    id: u32,
    /// Whether the context's creation was reported, not only its modules or limits.
    is_created: bool,
    /// Bytes attributed to the creation of the context.
    base: i64,
    /// Bytes attributed to the modules of the context.
    code: i64,
    /// Loadable bytes (size of loadable sections) of these modules.
    loadable: u64,
    /// Bytes attributed to stacks of kernels.
    local: i64,
    /// Bytes attributed to the printf buffer and the malloc heap.
    heaps: i64,
    /// Limits that were set; `None` for the default.
    stack: Option<u64>,
    printf: Option<u64>,
    heap: Option<u64>,
    /// Stack bytes that the model expects but no step has shown yet, and the event that set the limit.
    missing: Option<(i64, Event)>,
    /// Loadable bytes by module id.
    modules: Map<u64, u64>,
    changes: ContextChanges,
}

/// Changes that the events of one step (change of the untrackable bytes) make to a context.
#[derive(Debug, Default)]
struct ContextChanges {
    created: Option<Event>,
    /// Loadable bytes of the modules that were loaded in the step.
    loaded: u64,
    /// Loadable bytes of the modules that were unloaded in the step.
    unloaded: u64,
    /// Loadable bytes and event of the step's largest load or unload.
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

/// Returns the maximum difference between measured bytes and their model at which both count as equal.
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

    /// Returns the loadable bytes of modules that no step has shown yet; with lazy loading, code is loaded on first use.
    pub fn unseen_modules(&self) -> i64 {
        let unseen =
            self.all.iter().map(|context| granules(context.loadable).wrapping_sub(context.code).max(0));
        unseen.fold(0, i64::saturating_add)
    }

    fn context(&mut self, id: u32) -> &mut Context {
        let index = self.all.iter().position(|context| context.id == id);
        let at = index.unwrap_or_else(|| {
            if self.all.len() < MAX_CONTEXTS {
                self.all.push(Context { id, ..Context::default() });
            }
            self.all.len() - 1
        });
        &mut self.all[at]
    }

    fn remove(&mut self, id: u32) -> UntrackableParts {
        let Some(at) = self.all.iter().position(|context| context.id == id) else {
            return UntrackableParts::default();
        };
        let gone = self.all.swap_remove(at);
        self.modules -= gone.modules.len();
        gone.parts()
    }

    /// Applies events without attributing bytes to them.
    pub fn pass(&mut self, events: &[Event], threads: u64) {
        self.share(0, events, threads, true);
    }

    /// Divides a step of `bytes` among its events. If `in_doubt`, events get no bytes; the end of a context still subtracts the
    /// bytes attributed to it.
    pub fn share(&mut self, bytes: i64, events: &[Event], threads: u64, in_doubt: bool) -> Vec<Share> {
        let mut shares = Vec::new();
        let mut rest = bytes;
        for event in events {
            let gone = self.apply(event);
            if gone != UntrackableParts::default() {
                let back = gone.sum().wrapping_neg();
                rest = rest.wrapping_sub(back);
                shares.push(Share { event: *event, bytes: back, kind: BookedAs::Measured, expected: None });
            }
        }
        let created = self.all.iter().filter(|context| context.changes.created.is_some()).count();
        let is_single_limit = created == 0 && self.has_single_limit();
        let step = StepConditions { in_doubt, created: created > 0, threads, is_single_limit };
        let has_changes = self.all.iter().any(Context::has_changes);
        for context in &mut self.all {
            context.share_limits(&mut rest, &step, &mut shares);
        }
        for context in &mut self.all {
            context.share_modules(&mut rest, &step, &mut shares);
        }
        let mut left = created as i64;
        for context in &mut self.all {
            let Some(event) = context.changes.created else { continue };
            let share = if in_doubt { 0 } else { rest / left };
            (rest, left) = (rest.wrapping_sub(share), left - 1);
            context.base = context.base.wrapping_add(share);
            shares.push(Share { event, bytes: share, kind: BookedAs::Measured, expected: None });
        }
        if !in_doubt && !has_changes {
            self.share_missing(rest, &mut shares);
        }
        self.all.iter_mut().for_each(|context| context.changes = ContextChanges::default());
        shares
    }

    /// Whether the step changes a single limit and no modules. Then the limit may get all measured bytes.
    fn has_single_limit(&self) -> bool {
        let limits = self.all.iter().map(|context| context.changes.limits()).sum::<usize>();
        limits == 1 && self.all.iter().all(|context| context.changes.module.is_none())
    }

    /// Attributes growth without an event to missing stack bytes, which the driver allocates only when a kernel needs them.
    fn share_missing(&mut self, rest: i64, shares: &mut Vec<Share>) {
        let matches = |context: &&mut Context| {
            let missing = context.missing.map_or(0, |(missing, _)| missing);
            missing > 0 && rest > 0 && rest.abs_diff(missing) <= tolerance(missing).unsigned_abs()
        };
        let Some(context) = self.all.iter_mut().find(matches) else { return };
        let Some((missing, event)) = context.missing.take() else { return };
        context.local = context.local.wrapping_add(rest);
        shares.push(Share { event, bytes: rest, kind: BookedAs::Measured, expected: Some(missing) });
    }

    /// Applies an event to the contexts. Returns the bytes attributed to contexts that end with it.
    fn apply(&mut self, event: &Event) -> UntrackableParts {
        let id = event.context;
        match event.what {
            What::Created => {
                let context = self.context(id);
                if !std::mem::replace(&mut context.is_created, true) {
                    context.changes.created = Some(*event);
                }
            }
            What::Existed => self.context(id).is_created = true,
            What::Destroyed => return self.remove(id),
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
                context.changes.loaded = context.changes.loaded.saturating_add(bytes.min(MAX_BYTES));
                context.changes.note_module(bytes, event);
                self.modules += usize::from(is_new);
            }
            What::Unloaded { module, bytes } => {
                let context = self.context(id);
                let loaded = context.modules.remove(&module);
                let bytes = loaded.unwrap_or(bytes);
                context.changes.unloaded = context.changes.unloaded.saturating_add(bytes.min(MAX_BYTES));
                context.changes.note_module(bytes, event);
                self.modules -= usize::from(loaded.is_some());
            }
            What::Stack(limit) => self.context(id).changes.stack = Some((limit, *event)),
            What::Printf(limit) => self.context(id).changes.printf = Some((limit, *event)),
            What::Heap(limit) => self.context(id).changes.heap = Some((limit, *event)),
            What::Creating | What::Imported(_) | What::Other(_) => {}
        }
        UntrackableParts::default()
    }
}

impl ContextChanges {
    fn note_module(&mut self, bytes: u64, event: &Event) {
        if self.module.is_none_or(|(largest, _)| bytes >= largest) {
            self.module = Some((bytes, *event));
        }
    }

    fn limits(&self) -> usize {
        [self.stack, self.printf, self.heap].iter().flatten().count()
    }
}

struct StepConditions {
    /// Whether events get no bytes.
    in_doubt: bool,
    /// Whether a context was created. Then other events get the bytes of their model or upper bound.
    created: bool,
    /// Maximum number of threads that the device can run at once.
    threads: u64,
    /// Whether the change of one limit is the only event with bytes.
    is_single_limit: bool,
}

impl StepConditions {
    /// Returns the bytes of a limit's change; `model`: its expected bytes, `rest`: bytes of the step that are not divided yet.
    fn limit(&self, rest: i64, model: i64) -> (i64, BookedAs) {
        if self.in_doubt || model == 0 {
            (0, BookedAs::Model)
        } else if self.created {
            (model, BookedAs::Model)
        } else if self.is_single_limit
            && rest.wrapping_sub(model).unsigned_abs() <= tolerance(model).unsigned_abs()
        {
            (rest, BookedAs::Measured)
        } else if model > 0 {
            (model.min(rest.max(0)), BookedAs::Model)
        } else {
            (model.max(rest.min(0)), BookedAs::Model)
        }
    }
}

impl Context {
    fn has_changes(&self) -> bool {
        let changes = &self.changes;
        changes.created.is_some() || changes.module.is_some() || changes.limits() > 0
    }

    fn share_limits(&mut self, rest: &mut i64, step: &StepConditions, shares: &mut Vec<Share>) {
        if let Some((limit, event)) = self.changes.stack {
            let model = stacks(Some(limit), step.threads).wrapping_sub(stacks(self.stack, step.threads));
            let before = self.missing.take().map_or(0, |(missing, _)| missing);
            let (bytes, kind) = step.limit(*rest, model);
            // A lower limit subtracts at most the bytes that were attributed.
            let bytes = bytes.max(self.local.wrapping_neg().min(0));
            self.stack = Some(limit);
            self.local = self.local.wrapping_add(bytes);
            let missing = model.saturating_sub(bytes).saturating_add(before);
            let is_missing = !step.in_doubt && kind == BookedAs::Model && missing > 0;
            self.missing = is_missing.then_some((missing, event));
            *rest = rest.wrapping_sub(bytes);
            shares.push(Share { event, bytes, kind, expected: Some(model) });
        }
        let (printf, heap) = (self.changes.printf, self.changes.heap);
        for (claim, limit, default) in [(printf, &mut self.printf, PRINTF), (heap, &mut self.heap, HEAP)] {
            let Some((new, event)) = claim else { continue };
            let model = above(Some(new), default).wrapping_sub(above(*limit, default));
            let (bytes, kind) = step.limit(*rest, model);
            let bytes = bytes.max(self.heaps.wrapping_neg().min(0));
            *limit = Some(new);
            self.heaps = self.heaps.wrapping_add(bytes);
            *rest = rest.wrapping_sub(bytes);
            shares.push(Share { event, bytes, kind, expected: Some(model) });
        }
    }

    fn share_modules(&mut self, rest: &mut i64, step: &StepConditions, shares: &mut Vec<Share>) {
        let Some((_, event)) = self.changes.module else { return };
        let (loaded, unloaded) = (self.changes.loaded, self.changes.unloaded);
        let with = self.loadable.saturating_add(loaded).min(MAX_BYTES);
        let max_growth = granules(with).wrapping_sub(granules(self.loadable));
        let max_loss = self.code.max(0).min(granules(unloaded)).wrapping_neg();
        self.loadable = with.saturating_sub(unloaded);
        let bound = granules(self.loadable);
        let change = match step {
            StepConditions { in_doubt: true, .. } => 0,
            StepConditions { created: true, .. } => max_growth,
            _ => (*rest).clamp(max_loss, max_growth),
        };
        // The remaining modules keep at most their loadable bytes.
        let code = self.code.wrapping_add(change).min(bound).max(0);
        let bytes = code.wrapping_sub(self.code);
        self.code = code;
        *rest = rest.wrapping_sub(bytes);
        let expected = max_growth.wrapping_add(if unloaded > 0 { max_loss } else { 0 });
        shares.push(Share { event, bytes, kind: BookedAs::UpperBound, expected: Some(expected) });
    }
}
