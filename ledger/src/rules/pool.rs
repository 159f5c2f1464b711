//! Booking rules of pools and of framework blocks.
//!
//! The agent polls the reserved bytes of a **driver pool**. Between polls they are at least the bytes of live allocations:
//! `reserved = max(last polled, highest live since)`.
//!
//! A **framework pool** has segments (segment.rs). Bytes of a segment are `idle` while they are in no block.

use crate::book::cells::{CellId, CellKey, IDLE, OPAQUE};
use crate::in_order;
use crate::roles::state::{End, RestatedBlock, list_of};
use crate::roles::undecided::NOT_LISTED;
use crate::rows::in_flight::InFlight;
use crate::rows::pool::Pool;
use crate::rows::row::{Extent, LARGE_BYTES, MAX_BYTES, NO_ADDRESS, Row};
use crate::rows::table::Home;
use crate::rules::holdings::Holdings;
use gpumem_model::run::Class;
use gpumem_wire::{Body, Flags, FreeState, MemoryKind, Phase, PoolOwner, Request, Role, Stamp};

/// Number of rows (40 bytes each) that the caches of one processor core are assumed to hold.
const CACHED_ROWS: usize = 16_384;

impl Holdings {
    /// Returns the index of a pool, creating it if no record has (default pools, late agent).
    #[inline]
    pub fn pool_index(&mut self, id: u64, owner: PoolOwner, book: u8) -> u32 {
        let index = match self.pool_of(id) {
            Some(index) => index,
            None => return self.add_pool(id, owner, book),
        };
        self.last_pool = index;
        index
    }

    #[cold]
    fn add_pool(&mut self, id: u64, owner: PoolOwner, book: u8) -> u32 {
        let index = self.pools.len() as u32;
        let (opaque, generation) = (owner == PoolOwner::Framework, self.generation);
        if self.pools.capacity() == 0 {
            self.pools.reserve_exact(1); // most processes have one pool
        }
        self.pools.push(Pool { id, owner, book, idle: IDLE, opaque, generation, ..Pool::default() });
        self.pool_ids.insert(id, index);
        index
    }

    /// Returns the index of a pool that was not destroyed.
    #[inline]
    pub fn pool_of(&self, id: u64) -> Option<u32> {
        match self.pools.get(self.last_pool as usize) {
            Some(last) if last.id == id && !last.gone => Some(self.last_pool),
            _ => self.pool_ids.get(&id).copied(),
        }
    }

    /// Returns the place of the row that a record is about to create or remove, if there are more rows than the processor's caches
    /// hold.
    #[inline]
    pub fn home_of(&self, body: &Body<'_>) -> Option<Home<'_>> {
        let (rows, address) = match *body {
            Body::BlockAlloc { address, pool, .. } | Body::BlockFree { address, pool, .. } => {
                (&self.pools.get(self.pool_of(pool)? as usize)?.blocks, address)
            }
            Body::AllocEnd { address, .. } | Body::FreeBegin { address } => (&self.allocations, address),
            _ => return None,
        };
        if rows.len() >= CACHED_ROWS { rows.home_of(address) } else { None }
    }

    /// Books a `PoolCreate`. `blocks`: the pool reports its blocks.
    pub fn pool_create(
        &mut self,
        id: u64,
        parent: u64,
        blocks: bool,
        owner: PoolOwner,
        stamp: &Stamp,
        book: u8,
    ) {
        let index = self.pool_index(id, owner, book);
        let parent =
            (parent != 0 && parent != id).then(|| self.pool_index(parent, PoolOwner::Framework, book));
        let generation = self.generation;
        let pool = &mut self.pools[index as usize];
        pool.owner = owner;
        pool.name = stamp.tag;
        pool.generation = generation;
        if pool.segments.is_empty() && pool.blocks.is_empty() {
            pool.opaque = owner == PoolOwner::Framework && !blocks;
            pool.parent = parent;
            if pool.is_framework() && pool.name != pool.cell_name {
                pool.cell_name = pool.name;
                pool.idle = self.cells.intern(CellKey { pool: pool.name, ..CellKey::plain(Class::PoolIdle) });
                let (book, idle) = (pool.book, pool.idle);
                self.books[usize::from(book)].add_unused_cell(idle);
            }
        } else if pool.opaque && blocks {
            self.open_pool(index);
        }
        if let Some(parent) = parent {
            let parent = &mut self.pools[parent as usize];
            if !parent.has_children {
                parent.has_children = true;
                let large = parent.blocks.iter().filter(|(_, row)| row.bytes >= LARGE_BYTES);
                parent.large_blocks = large.map(|(address, row)| (address, row.bytes)).collect();
            }
        }
    }

    pub fn pool_state(&mut self, id: u64, reserved: u64, used: u64, book: u8) {
        if reserved > MAX_BYTES || used > MAX_BYTES {
            self.anomalies.impossible += 1;
            return;
        }
        let index = self.pool_index(id, PoolOwner::Driver, book);
        let generation = self.generation;
        let pool = &mut self.pools[index as usize];
        pool.generation = generation;
        if pool.is_framework() {
            (pool.reserved, pool.used) = (reserved, used);
            pool.reported = Some((reserved, used));
        } else {
            pool.polled = reserved;
            let is_graphs = pool.owner == PoolOwner::Graph;
            self.set_reserved(index, if is_graphs { reserved.max(used) } else { reserved });
            if is_graphs {
                self.set_graphs_use(index, used);
            }
        }
    }

    /// Returns the change of a driver pool's booked bytes if `reserved` is its new reservation.
    pub fn pool_growth(&self, id: u64, reserved: u64) -> i64 {
        let (booked, used) = self.driver_pool(id);
        reserved.min(MAX_BYTES).max(used).wrapping_sub(booked) as i64
    }

    /// Returns the minimum growth of a driver pool's booked bytes if `bytes` more are allocated from it.
    pub fn pool_growth_for(&self, id: u64, bytes: u64) -> i64 {
        let (booked, used) = self.driver_pool(id);
        used.saturating_add(bytes.min(MAX_BYTES)).saturating_sub(booked) as i64
    }

    /// Returns booked and allocated bytes of a driver pool.
    fn driver_pool(&self, id: u64) -> (u64, u64) {
        let pool = self.pool_of(id).map(|index| &self.pools[index as usize]);
        pool.map_or((0, 0), |pool| (pool.reserved, pool.used))
    }

    /// Shifts the bytes of an opaque pool to its idle cell, because it now reports blocks.
    fn open_pool(&mut self, index: u32) {
        let pool = &mut self.pools[index as usize];
        pool.opaque = false;
        let (book, idle, bytes) = (pool.book, pool.idle, pool.backed_bytes as i64);
        self.book(book).shift(OPAQUE, idle, bytes);
    }

    /// Books a `PoolCheck`: keeps the owner's total and the ledger's, for views.
    pub fn pool_check(&mut self, id: u64, owner_bytes: u64) {
        match self.pool_of(id) {
            Some(index) => {
                let pool = &mut self.pools[index as usize];
                // The owner's total does not include pending blocks.
                let live = pool.block_bytes.wrapping_sub(pool.pending_bytes);
                pool.check = Some((owner_bytes, if pool.is_framework() { live } else { pool.used }));
            }
            None => self.anomalies.unknown_handles += 1,
        }
    }

    pub fn pool_destroy(&mut self, id: u64) {
        let Some(index) = self.pool_ids.remove(&id) else {
            self.anomalies.unknown_handles += 1;
            return;
        };
        self.end_pool(index);
    }

    fn empty_pool(&mut self, index: u32) {
        self.drop_blocks(index, |_| true);
        let starts: Vec<u64> = self.pools[index as usize].segments.keys().copied().collect();
        starts.into_iter().for_each(|start| self.take_segment((index, start)));
    }

    fn end_pool(&mut self, index: u32) {
        self.pools[index as usize].gone = true;
        if self.pools[index as usize].is_framework() {
            self.empty_pool(index);
        } else if self.pools[index as usize].owner == PoolOwner::Graph {
            self.set_graphs_use(index, 0);
            self.set_reserved(index, 0);
        } else if self.pools[index as usize].used == 0 {
            self.set_reserved(index, 0); // with live allocations, the driver keeps the pool until the last is freed
        }
    }

    /// Removes all pools on a device that was reset. A framework pool is only emptied, because its owner still exists.
    pub fn drop_pools(&mut self, book: u8) {
        let on_device: Vec<u32> = (0..self.pools.len() as u32)
            .filter(|&index| self.pools[index as usize].book == book && !self.pools[index as usize].gone)
            .collect();
        for index in on_device {
            if self.pools[index as usize].is_framework() {
                self.empty_pool(index);
                continue;
            }
            self.pool_ids.remove(&self.pools[index as usize].id);
            self.end_pool(index);
        }
    }

    /// Sets the bytes that CUDA graphs use. Launches of graphs are not reported, so these bytes are opaque.
    fn set_graphs_use(&mut self, index: u32, used: u64) {
        let pool = &mut self.pools[index as usize];
        let delta = used.wrapping_sub(pool.used) as i64;
        pool.used = used;
        let book = pool.book;
        self.book(book).shift(IDLE, OPAQUE, delta);
    }

    /// Sets the reserved bytes of a driver pool, which are at least its used bytes.
    fn set_reserved(&mut self, index: u32, polled: u64) {
        let pool = &mut self.pools[index as usize];
        let reserved = polled.max(pool.used);
        let delta = reserved.wrapping_sub(pool.reserved) as i64;
        pool.reserved = reserved;
        let book = pool.book;
        self.roles[usize::from(book)].iterations.add_reserved(delta);
        self.book(book).post(IDLE, delta);
    }

    #[inline]
    pub fn allocate_from_pool(&mut self, index: u32, cell: CellId, bytes: u64) {
        let pool = &mut self.pools[index as usize];
        pool.used = pool.used.wrapping_add(bytes);
        let (book, reserved, used) = (pool.book, pool.reserved, pool.used);
        if used > reserved {
            self.set_reserved(index, used);
        }
        self.book(book).shift(IDLE, cell, bytes as i64);
    }

    #[inline]
    pub fn free_to_pool(&mut self, index: u32, cell: CellId, bytes: u64) {
        let pool = &mut self.pools[index as usize];
        pool.used = pool.used.saturating_sub(bytes);
        let (book, is_over) = (pool.book, pool.gone && pool.used == 0);
        self.book(book).shift(cell, IDLE, bytes as i64);
        if is_over {
            self.set_reserved(index, 0);
        }
    }

    #[inline]
    pub fn block_alloc(
        &mut self,
        address: u64,
        bytes: u64,
        id: u64,
        use_as: (Role, Phase),
        stamp: &Stamp,
        book: u8,
    ) {
        if bytes > MAX_BYTES || address == NO_ADDRESS {
            self.anomalies.impossible += 1;
            return;
        }
        let index = self.pool_index(id, PoolOwner::Framework, book);
        let generation = self.generation;
        if self.pools[index as usize].opaque {
            self.open_pool(index);
        }
        let book = self.pools[index as usize].book;
        if use_as.0 == Role::Parameter {
            self.note_parameter(book, bytes);
        }
        let restated = stamp.flags.has(Flags::RESTATED);
        // Blocks that a resync restates, or that are older than the agent, were allocated in an earlier phase.
        let is_born = !restated && !stamp.flags.has(Flags::OLDER);
        let (role, list) = if is_born { self.role_at_birth(book, stamp, use_as) } else { (use_as.0, None) };
        let request = Request::of(stamp);
        let stream = request.map(|request| request.stream);
        let pool = &mut self.pools[index as usize];
        if let Some(request) = request {
            pool.streams |= 1 << request.stream.min(63);
            pool.private_pools |= 1 << request.pool.min(63);
        }
        let booked = if pool.backed_bytes == pool.segment_bytes && !self.unseen_segments {
            pool.segment_bytes > 0 // all segments are booked
        } else {
            pool.is_booked(address)
        };
        let slot = match pool.blocks.vacancy(address) {
            Ok(slot) => slot,
            Err(old) if old.seq == stamp.seq && stamp.seq != 0 => {
                old.generation = generation;
                return;
            }
            Err(_) => {
                self.anomalies.replaced += 1;
                self.take_block(index, address, false);
                return self.block_alloc(address, bytes, id, use_as, stamp, book);
            }
        };
        let (idle, name) = (pool.idle, pool.cell_name);
        let cell = self.cells.cell_in(Class::Block, stamp, (role, use_as.1), name);
        let exact = if use_as.0 == Role::Unknown { 0 } else { Row::EXACT | Row::BORN_EXACT };
        let owner = match list {
            Some(list) => {
                let from = (stream.unwrap_or_default(), stamp.thread);
                let roles = &mut self.roles[usize::from(book)];
                roles.add(&self.workspaces, list, role, (index, address), bytes, from)
            }
            None => NOT_LISTED,
        };
        let row = Row {
            seq: stamp.seq,
            bytes,
            cell,
            first_epoch: self.books[usize::from(book)].next_epoch(),
            owner,
            kind: MemoryKind::Unknown,
            book,
            generation,
            flags: exact | if booked { 0 } else { Row::UNBOOKED },
        };
        pool.blocks.fill(slot, address, row);
        if let Some(list) = list_of(use_as.1).filter(|_| restated && exact == 0) {
            let stream = stream.unwrap_or_default();
            self.restated.push(RestatedBlock {
                seq: stamp.seq,
                list,
                pool: index,
                address,
                stream,
                thread: stamp.thread,
            });
        }
        let has_children = pool.has_children;
        if has_children && bytes >= LARGE_BYTES {
            pool.large_blocks.insert(address, bytes);
        }
        pool.block_bytes = pool.block_bytes.wrapping_add(bytes);
        pool.unbooked_blocks += u32::from(!booked);
        if booked {
            self.book(book).shift(idle, cell, bytes as i64);
            self.note_row(Extent::Block(index, address), &row, 0, bytes);
            if has_children && self.unbacked_segments > 0 {
                self.back_segments(address, bytes, Some(index));
            }
        } else {
            self.count_unbooked(book, bytes as i64);
        }
    }

    #[inline]
    pub fn block_free(&mut self, address: u64, pool: u64, state: FreeState) {
        let Some(index) = self.pool_of(pool) else {
            self.anomalies.unknown_frees += 1;
            return;
        };
        if state == FreeState::Pending {
            match self.pools[index as usize].blocks.get(address).copied() {
                Some(row) if !row.is(Row::PENDING) => self.begin_pending(index, address, row),
                Some(_) => {}
                None => self.anomalies.unknown_frees += 1,
            }
        } else if !self.take_block(index, address, true) {
            self.anomalies.unknown_frees += 1;
        }
    }

    /// Marks a block as pending: the program frees it, but a CUDA stream still uses it. In the amounts at an earlier peak, the
    /// block stays in its old cell.
    fn begin_pending(&mut self, index: u32, address: u64, mut row: Row) {
        if row.owner != NOT_LISTED {
            // The program's use ends here, so the role is final.
            row = self.role_at_end(Extent::Block(index, address), &row, End::Pending);
        } else {
            self.note_role(&row, None);
        }
        let booked = row.bytes.saturating_sub(self.carved_bytes(Extent::Block(index, address)));
        let key = CellKey { pending: true, ..self.cells.keys[row.cell as usize] };
        let to = self.cells.intern(key);
        let since = self.books[usize::from(row.book)].next_epoch();
        self.waiting.insert(row.seq, (row.cell, since));
        if !row.is(Row::UNBOOKED) {
            self.book(row.book).shift(row.cell, to, booked as i64);
        }
        if let Some(row) = self.pools[index as usize].blocks.get_mut(address) {
            row.flags |= Row::PENDING;
            (row.cell, row.owner) = (to, NOT_LISTED);
        }
        self.count_pending(index, row.book, row.bytes as i64);
    }

    /// Counts bytes of blocks outside the book; negative bytes are subtracted.
    fn count_unbooked(&mut self, book: u8, bytes: i64) {
        let unbooked = &mut self.side_memory[usize::from(book)].unbooked_block_bytes;
        *unbooked = unbooked.wrapping_add(bytes);
    }

    /// Counts bytes of pending blocks in the pool and in the book; negative bytes are subtracted.
    fn count_pending(&mut self, index: u32, book: u8, bytes: i64) {
        let of_pool = &mut self.pools[index as usize].pending_bytes;
        *of_pool = of_pool.wrapping_add_signed(bytes);
        let of_book = &mut self.side_memory[usize::from(book)].pending_block_bytes;
        *of_book = of_book.wrapping_add(bytes);
    }

    /// Returns the addresses of the blocks that `wanted` selects, sorted.
    fn blocks_where(&self, index: u32, wanted: impl Fn(&Pool, u64, &Row) -> bool) -> Vec<u64> {
        let pool = &self.pools[index as usize];
        let blocks = pool.blocks.iter().filter(|(address, row)| wanted(pool, *address, row));
        in_order(blocks.map(|(address, _)| address))
    }

    /// Books the blocks of a pool whose segments are wholly booked now.
    pub fn book_blocks(&mut self, index: u32) {
        let has_memory = |pool: &Pool, address, row: &Row| row.is(Row::UNBOOKED) && pool.is_booked(address);
        for address in self.blocks_where(index, has_memory) {
            let pool = &mut self.pools[index as usize];
            let Some(row) = pool.blocks.get_mut(address) else { continue };
            row.flags &= !Row::UNBOOKED;
            row.first_epoch = self.books[usize::from(row.book)].next_epoch();
            let row = *row;
            pool.unbooked_blocks = pool.unbooked_blocks.saturating_sub(1);
            let (has_children, idle) = (pool.has_children, pool.idle);
            self.count_unbooked(row.book, -(row.bytes as i64));
            self.book(row.book).shift(idle, row.cell, row.bytes as i64);
            self.note_row(Extent::Block(index, address), &row, 0, row.bytes);
            if has_children && self.unbacked_segments > 0 {
                self.back_segments(address, row.bytes, Some(index));
            }
        }
    }

    /// Unbooks the blocks of a pool whose segments have lost memory.
    pub fn unbook_blocks(&mut self, index: u32) {
        let is_without_memory =
            |pool: &Pool, address, row: &Row| !row.is(Row::UNBOOKED) && !pool.is_booked(address);
        for address in self.blocks_where(index, is_without_memory) {
            let pool = &mut self.pools[index as usize];
            let Some(row) = pool.blocks.get_mut(address) else { continue };
            let row_before = *row;
            row.flags |= Row::UNBOOKED;
            pool.unbooked_blocks += 1;
            if pool.has_children {
                self.uncarve_all(Extent::Block(index, address), &row_before);
            } else {
                self.keep_residue(&row_before, row_before.bytes);
            }
            self.count_unbooked(row_before.book, row_before.bytes as i64);
            self.book(row_before.book).shift(row_before.cell, IDLE, row_before.bytes as i64);
            self.note_row(Extent::Block(index, address), &row_before, row_before.bytes, 0);
        }
    }

    /// Removes a block; returns whether it existed. `freed`: by the program, not together with its pool, segment or context.
    #[inline]
    pub fn take_block(&mut self, index: u32, address: u64, freed: bool) -> bool {
        let pool = &mut self.pools[index as usize];
        let Some(slot) = pool.blocks.find(address) else { return false };
        let mut row = pool.blocks.take(slot);
        if row.owner != NOT_LISTED {
            row = self.role_at_end(
                Extent::Block(index, address),
                &row,
                if freed { End::Freed } else { End::Removed },
            );
        } else {
            self.note_role(&row, None);
        }
        let pool = &mut self.pools[index as usize];
        pool.block_bytes = pool.block_bytes.wrapping_sub(row.bytes);
        let (has_children, idle) = (pool.has_children, pool.idle);
        if has_children {
            pool.large_blocks.remove(&address);
        }
        if row.is(Row::PENDING) {
            self.count_pending(index, row.book, -(row.bytes as i64));
        }
        if row.is(Row::UNBOOKED) {
            self.pools[index as usize].unbooked_blocks =
                self.pools[index as usize].unbooked_blocks.saturating_sub(1);
            self.count_unbooked(row.book, -(row.bytes as i64));
        } else {
            if has_children {
                self.uncarve_all(Extent::Block(index, address), &row);
            } else {
                self.keep_residue(&row, row.bytes);
            }
            self.book(row.book).shift(row.cell, idle, row.bytes as i64);
            self.note_row(Extent::Block(index, address), &row, row.bytes, 0);
        }
        if row.is(Row::PENDING) {
            self.waiting.remove(&row.seq);
        }
        true
    }

    fn drop_blocks(&mut self, index: u32, is_selected: impl Fn(&Row) -> bool) {
        let gone = self.pools[index as usize].blocks.iter().filter(|(_, row)| is_selected(row));
        for (_, address) in in_order(gone.map(|(address, row)| (row.seq, address))) {
            self.take_block(index, address, false);
        }
    }

    /// Removes blocks and segments that a resync did not restate.
    pub fn sweep_blocks(&mut self) {
        let generation = self.generation;
        // A segment that is an allocation is restated with it. If the free of the allocation is in flight, neither may be restated.
        let in_flight = in_order(self.in_flight.iter().filter_map(|(_, flight)| match flight {
            InFlight::Allocation { row, .. } if row.is(Row::SEGMENT) => Some(row.seq),
            _ => None,
        }));
        for index in 0..self.pools.len() as u32 {
            self.drop_blocks(index, |row| row.generation != generation);
            let segments = &self.pools[index as usize].segments;
            let gone: Vec<u64> = segments
                .iter()
                .filter(|(_, s)| s.generation != generation && in_flight.binary_search(&s.seq).is_err())
                .map(|(&start, _)| start)
                .collect();
            gone.into_iter().for_each(|start| self.take_segment((index, start)));
        }
    }

    /// Completes a resync: books the reservations of driver pools without the removed rows, removes empty pools that were not
    /// restated, and books blocks that came before their segments.
    pub fn sweep_pools(&mut self) {
        for index in 0..self.pools.len() as u32 {
            let pool = &self.pools[index as usize];
            let (again, polled) = (pool.generation == self.generation, pool.polled);
            if !pool.gone && !pool.is_framework() {
                if pool.owner == PoolOwner::Graph && !again {
                    self.set_graphs_use(index, 0);
                }
                self.set_reserved(index, if again { polled } else { 0 });
            }
            let pool = &mut self.pools[index as usize];
            let empty = pool.segments.is_empty() && pool.blocks.is_empty();
            if !pool.gone && !again && empty && (pool.is_framework() || pool.used == 0) {
                pool.gone = true;
                self.pool_ids.remove(&pool.id);
            }
        }
        // Outer pools first: their blocks are the memory of nested pools.
        for nested in [false, true] {
            for index in 0..self.pools.len() as u32 {
                if self.pools[index as usize].parent.is_some() == nested {
                    self.back_pool(index);
                }
            }
        }
    }

    /// Assigns booked memory to segments that are not wholly booked, then books the blocks in them.
    fn back_pool(&mut self, index: u32) {
        let pool = &self.pools[index as usize];
        if pool.backed_bytes != pool.segment_bytes {
            let unbacked = pool.segments.iter().filter(|(_, segment)| segment.backed < segment.bytes);
            let starts: Vec<u64> = unbacked.map(|(&start, _)| start).collect();
            starts.into_iter().for_each(|start| self.back_segment((index, start), 0, u64::MAX, true));
        }
        if self.pools[index as usize].unbooked_blocks > 0 {
            self.book_blocks(index);
        }
    }
}
