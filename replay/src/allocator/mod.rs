//! Model of the caching allocator of one device. A request gets the smallest free block that fits, split if it is too large.

mod addresses;
mod blocks;
mod expand;
mod pools;
mod release;

pub use addresses::SegmentAddresses;

use crate::event::{Device, PoolId, PoolKind, RequestId, StreamId};
use crate::figures::{Failure, Figures};
use crate::release::{Fraction, Rules};
use crate::settings::{SMALL, Settings};
use addresses::AddressSpace;
pub(crate) use blocks::Number;
use blocks::{Block, NONE, PoolRef, Segment, Slab, State};
use foldhash::HashMap;
use pools::{Key, Pair, Pool};

/// A request after rounding.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    bytes: u64,
    stream: StreamId,
    /// Pool that serves the request.
    pool: PoolRef,
    /// Bytes to request from the driver if no free block fits.
    segment_bytes: u64,
    /// Whether expandable segments may serve it.
    may_expand: bool,
}

/// Result of requesting memory from the driver.
enum Grown {
    Block(Number),
    Failed,
    /// The request fails at once, without a driver call and without releasing memory first (`throw_on_cudamalloc_oom`).
    Rejected,
}

#[derive(Clone, Debug)]
pub(crate) struct Allocator {
    rules: Rules,
    settings: Settings,
    device: Device,
    /// Maximum number of bytes that the process may reserve; `None` for no limit.
    allowed: Option<u64>,
    /// Reserved bytes above which unused segments are returned to the driver; `None` if never.
    collection_limit: Option<u64>,
    blocks: Slab<Block>,
    segments: Slab<Segment>,
    pairs: Vec<Pair>,
    /// Index in `pairs` of each private pool.
    pair_of: HashMap<PoolId, usize>,
    /// Private pools to which requests currently go (captures and `use_mem_pool`).
    scopes: Vec<PoolId>,
    /// Blocks that were freed but that other streams may still use, in the order of their frees.
    pending: Vec<(RequestId, Number)>,
    /// Addresses of segments that are not expandable, and address ranges of those that are.
    addresses: AddressSpace,
    ranges: AddressSpace,
    /// Number of blocks and segments created so far.
    made: u64,
    pub(crate) figures: Figures,
}

impl Allocator {
    pub(crate) fn new(
        rules: Rules,
        settings: Settings,
        fraction: Option<f64>,
        device: Device,
        addresses: SegmentAddresses,
    ) -> Self {
        let mut allocator = Allocator {
            rules,
            settings,
            device,
            allowed: None,
            collection_limit: None,
            blocks: Slab::default(),
            segments: Slab::default(),
            pairs: vec![Pair::default()],
            pair_of: [(0, 0)].into_iter().collect(),
            scopes: Vec::new(),
            pending: Vec::new(),
            addresses: AddressSpace::of_segments(addresses),
            ranges: AddressSpace::of_ranges(addresses),
            made: 0,
            figures: Figures::default(),
        };
        if let Some(fraction) = fraction {
            allocator.set_fraction(fraction);
        }
        allocator
    }

    pub(crate) fn set_fraction(&mut self, fraction: f64) {
        let share = fraction * self.device.total_bytes as f64;
        let share = match self.rules.fraction {
            Fraction::Down => share as u64,
            Fraction::Nearest => share.round() as u64,
        };
        let is_full = fraction >= 1.0;
        self.allowed = (!is_full).then_some(share);
        let threshold = self.settings.collection_threshold;
        let collects = threshold > 0.0 && (!is_full || self.rules.full_fraction_collects);
        self.collection_limit = collects.then_some((threshold * share as f64) as u64);
    }

    pub(crate) fn set_other_bytes(&mut self, bytes: u64) {
        self.device.other_bytes = bytes;
    }

    pub(crate) fn begin_pool(&mut self, id: PoolId, kind: PoolKind) -> usize {
        let pair = Pair { kind: Some(kind), ..Pair::default() };
        let index = self.pairs.len();
        self.pairs.push(pair);
        self.pair_of.insert(id, index);
        index
    }

    pub(crate) fn end_pool(&mut self, id: PoolId) {
        let Some(&index) = self.pair_of.get(&id).filter(|index| **index > 0) else { return };
        self.pairs[index].has_ended = true;
        if matches!(self.pairs[index].kind, Some(PoolKind::User { .. })) {
            self.release_pair(index);
        }
    }

    pub(crate) fn begin_scope(&mut self, id: PoolId) {
        self.scopes.push(id);
    }

    pub(crate) fn end_scope(&mut self, id: PoolId) {
        if let Some(place) = self.scopes.iter().rposition(|scope| *scope == id) {
            self.scopes.remove(place);
        }
    }

    /// Returns whether the cache must not be released for a request of this pool.
    fn is_captured(&self, pool: PoolId) -> bool {
        if !self.rules.user_pools_release {
            return !self.scopes.is_empty();
        }
        self.scopes.contains(&pool) && self.pairs[self.pair_of[&pool]].kind == Some(PoolKind::Graph)
    }

    /// Serves a request for memory. `event` is the number of its event, for the report of a failure.
    pub(crate) fn request(
        &mut self,
        bytes: u64,
        stream: StreamId,
        pool: PoolId,
        event: u64,
    ) -> Result<Number, Failure> {
        let pair = match self.pair_of.get(&pool) {
            Some(&pair) => pair,
            None => self.begin_pool(pool, PoolKind::Graph),
        };
        let peak_before = self.figures.reserved.peak;
        let rounded = self.settings.round(bytes, self.rules);
        let is_large = rounded > SMALL;
        let segment_bytes = self.settings.segment_bytes(rounded);
        let pool_ref = PoolRef { pair, is_large };
        let may_expand = self.settings.expandable_segments && !self.pairs[pair].has_own_allocator();
        let wanted = Wanted { bytes: rounded, stream, pool: pool_ref, segment_bytes, may_expand };
        let Some(block) = self.find(&wanted).or_else(|| self.obtain(&wanted, pool)) else {
            let failure = Failure {
                event,
                rounded_bytes: rounded,
                segment_bytes,
                reserved_bytes: self.figures.reserved.now,
                allocated_bytes: self.figures.allocated.now,
            };
            self.figures.ooms += 1;
            self.figures.failure.get_or_insert(failure);
            return Err(failure);
        };
        let block = self.hand_out(block, &wanted, bytes);
        if self.figures.reserved.peak > peak_before {
            self.figures.allocated_at_peak = self.figures.allocated.now;
        }
        Ok(block)
    }

    /// Removes the best free block for a request from its pool and returns it; `None` if no block fits.
    fn find(&mut self, wanted: &Wanted) -> Option<Number> {
        if self.collection_limit.is_some() {
            self.pool_mut(wanted.pool).searches += 1;
        }
        let pool = self.pool(wanted.pool);
        let mut key = pool.best(wanted.stream, wanted.bytes)?;
        let is_expandable = |key: &Key| self.segments[self.blocks[key.block].segment].is_expandable;
        if is_expandable(&key) && wanted.may_expand {
            // Size that the block would have if the unmapped memory after it were mapped.
            let reach = |key: &Key| {
                let right = self.blocks[key.block].right;
                let more = right != NONE && self.blocks[right].state == State::Unmapped;
                key.bytes + if more { self.blocks[right].bytes } else { 0 }
            };
            while is_expandable(&key)
                && let Some(next) = pool.after(&key)
                && reach(&next) < reach(&key)
            {
                key = next;
            }
        } else {
            while is_expandable(&key) {
                key = pool.after(&key)?;
            }
        }
        let largest = match self.settings.max_split_bytes {
            None => u64::MAX,
            Some(max_split) if wanted.bytes < max_split => max_split,
            Some(_) => wanted.bytes.saturating_add(self.settings.non_split_rounding_bytes),
        };
        if key.bytes >= largest {
            return None;
        }
        self.pool_mut(wanted.pool).free.remove(&key);
        Some(key.block)
    }

    /// Gets memory from the driver for a request that no free block fits. Releases free memory and retries if necessary.
    fn obtain(&mut self, wanted: &Wanted, pool: PoolId) -> Option<Number> {
        self.collect();
        match self.grow(wanted) {
            Grown::Block(block) => return Some(block),
            Grown::Rejected => return None,
            Grown::Failed => {}
        }
        if self.rules.pools_serve_before_release {
            self.find_for_shortage(wanted).or_else(|| self.release_and_grow(wanted, pool))
        } else {
            self.release_and_grow(wanted, pool).or_else(|| self.find_for_shortage(wanted))
        }
    }

    /// Releases free memory for a request, and gets memory from the driver.
    fn release_and_grow(&mut self, wanted: &Wanted, pool: PoolId) -> Option<Number> {
        if self.release_oversize(wanted)
            && let Grown::Block(block) = self.grow(wanted)
        {
            return Some(block);
        }
        if self.is_captured(pool) {
            return None;
        }
        self.empty_cache(None);
        self.figures.retries += 1;
        match self.grow(wanted) {
            Grown::Block(block) => Some(block),
            Grown::Failed | Grown::Rejected => None,
        }
    }

    /// Removes a free block from a pool that the program lets serve other requests when memory is short (`use_on_oom`). Such a pool
    /// serves requests to the default pool only.
    fn find_for_shortage(&mut self, wanted: &Wanted) -> Option<Number> {
        if wanted.pool.pair != 0 || !self.rules.has_pools_for_shortage {
            return None;
        }
        let may_expand = wanted.may_expand && self.rules.pools_serve_expandable;
        (1..self.pairs.len()).find_map(|pair| {
            let pool = PoolRef { pair, ..wanted.pool };
            let serves = self.pairs[pair].serves_shortage();
            serves.then(|| self.find(&Wanted { pool, may_expand, ..*wanted })).flatten()
        })
    }

    /// Requests a new segment from the driver, or maps more pages of an expandable segment.
    fn grow(&mut self, wanted: &Wanted) -> Grown {
        let needed = self.figures.reserved.now + wanted.segment_bytes;
        if self.allowed.is_some_and(|allowed| needed > allowed) {
            return Grown::Failed;
        }
        if self.settings.throw_on_oom {
            let share = self.settings.fraction.unwrap_or(1.0) * self.device.total_bytes as f64;
            if needed > share as u64 {
                return Grown::Rejected;
            }
        }
        let expands = wanted.may_expand && (wanted.pool.pair == 0 || self.rules.private_pools_expand);
        let block = if expands { self.expand(wanted) } else { self.new_segment(wanted) };
        block.map_or(Grown::Failed, Grown::Block)
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.figures.reserved.now + self.device.other_bytes + bytes <= self.device.total_bytes
    }

    fn new_segment(&mut self, wanted: &Wanted) -> Option<Number> {
        let bytes = wanted.segment_bytes;
        if !self.has_room(bytes) {
            return None;
        }
        self.figures.reserved.add(bytes);
        self.figures.segments.add(1);
        self.figures.device_allocs += 1;
        let address = self.addresses.take(bytes);
        Some(self.begin_segment(wanted, address, bytes, State::Free))
    }

    /// Makes a segment with one block. The block is not in the pool's set of free blocks yet.
    fn begin_segment(&mut self, wanted: &Wanted, address: u64, bytes: u64, state: State) -> Number {
        self.made += 1;
        let is_expandable = state == State::Unmapped;
        let segment = self.segments.insert(Segment { address, bytes, order: self.made, is_expandable });
        self.pairs[wanted.pool.pair].segments += 1;
        self.new_block(Block {
            segment,
            address,
            bytes,
            requested: 0,
            left: NONE,
            right: NONE,
            order: 0,
            searches: 0,
            pool: wanted.pool,
            stream: wanted.stream,
            state,
        })
    }

    fn new_block(&mut self, mut block: Block) -> Number {
        self.made += 1;
        block.order = self.made;
        let (left, right) = (block.left, block.right);
        let number = self.blocks.insert(block);
        if left != NONE {
            self.blocks[left].right = number;
        }
        if right != NONE {
            self.blocks[right].left = number;
        }
        number
    }

    /// Assigns the block `found`, which is not in a pool's set, to the program. Splits it if the rules say so.
    fn hand_out(&mut self, found: Number, wanted: &Wanted, requested: u64) -> Number {
        let block = &self.blocks[found];
        let rest = block.bytes - wanted.bytes;
        let pair = &self.pairs[block.pool.pair];
        let is_expandable = self.settings.expandable_segments && !pair.has_own_allocator();
        let splits = !pair.no_split() && self.settings.splits(wanted.bytes, rest, is_expandable);
        let number = if splits {
            let left = Block { bytes: wanted.bytes, right: found, ..*block };
            let rest = &mut self.blocks[found];
            rest.address += wanted.bytes;
            rest.bytes -= wanted.bytes;
            let number = self.new_block(left);
            self.insert_free(found);
            number
        } else {
            found
        };
        let block = &mut self.blocks[number];
        (block.state, block.requested) = (State::Allocated, requested);
        let bytes = block.bytes;
        self.figures.allocated.add(bytes);
        self.figures.active.add(bytes);
        self.figures.requested.add(requested);
        number
    }

    /// Frees the block of a request. `pending` is the request's id if other streams may still use the memory.
    pub(crate) fn free(&mut self, number: Number, pending: Option<RequestId>) {
        self.figures.allocated.remove(self.blocks[number].bytes);
        match pending {
            Some(id) => {
                self.blocks[number].state = State::Pending;
                self.pending.push((id, number));
            }
            None => self.give_back(number),
        }
    }

    /// Makes the memory of a pending free available, unless `empty_cache` has done so already.
    pub(crate) fn return_pending(&mut self, id: RequestId) {
        if let Some(place) = self.pending.iter().position(|(pending, _)| *pending == id) {
            let (_, number) = self.pending.remove(place);
            self.give_back(number);
        }
    }

    fn give_back(&mut self, number: Number) {
        let block = &mut self.blocks[number];
        block.state = State::Free;
        let (bytes, requested) = (block.bytes, std::mem::take(&mut block.requested));
        self.figures.active.remove(bytes);
        self.figures.requested.remove(requested);
        self.merge(number);
        self.insert_free(number);
    }

    /// Merges a block with adjacent blocks of the same state. The block must not be in a pool's set; it keeps its number.
    fn merge(&mut self, number: Number) {
        let state = self.blocks[number].state;
        for is_left in [true, false] {
            let block = &self.blocks[number];
            let other = if is_left { block.left } else { block.right };
            if other == NONE || self.blocks[other].state != state {
                continue;
            }
            match state {
                State::Unmapped => self.remove_unmapped(other),
                _ => self.remove_free(other),
            }
            let merged = self.blocks[other];
            let beyond = if is_left { merged.left } else { merged.right };
            let block = &mut self.blocks[number];
            block.bytes += merged.bytes;
            if is_left {
                (block.address, block.left) = (merged.address, beyond);
            } else {
                block.right = beyond;
            }
            if beyond != NONE {
                let neighbour = &mut self.blocks[beyond];
                *(if is_left { &mut neighbour.right } else { &mut neighbour.left }) = number;
            }
            self.blocks.remove(other);
        }
    }

    fn pool(&self, PoolRef { pair, is_large }: PoolRef) -> &Pool {
        &self.pairs[pair].pools[usize::from(is_large)]
    }

    fn pool_mut(&mut self, PoolRef { pair, is_large }: PoolRef) -> &mut Pool {
        &mut self.pairs[pair].pools[usize::from(is_large)]
    }

    fn key(&self, number: Number) -> Key {
        Key::new(number, &self.blocks[number], &self.segments, self.rules.tie_break)
    }

    fn insert_free(&mut self, number: Number) {
        let key = self.key(number);
        let index = self.blocks[number].pool;
        self.blocks[number].searches = self.pool(index).searches;
        self.pool_mut(index).free.insert(key);
    }

    fn remove_free(&mut self, number: Number) {
        let key = self.key(number);
        self.pool_mut(self.blocks[number].pool).free.remove(&key);
    }

    fn insert_unmapped(&mut self, number: Number) {
        let block = &self.blocks[number];
        let (index, entry) = (block.pool, (block.stream, block.address, number));
        self.pool_mut(index).unmapped.insert(entry);
    }

    fn remove_unmapped(&mut self, number: Number) {
        let block = &self.blocks[number];
        let (index, entry) = (block.pool, (block.stream, block.address, number));
        self.pool_mut(index).unmapped.remove(&entry);
    }
}
