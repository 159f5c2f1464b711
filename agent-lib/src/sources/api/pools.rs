//! Pools of frameworks, as reported by the program: segments, and the blocks carved from them.

use crate::base::row::{Key, RowCopy, RowExtra, device_of, key_of, kind, kind_of};
use crate::driver::core::Core;
use crate::record::recorder::RecordContext;
use crate::threads::Thread;
use gpumem_wire::{Body, FreeState, NONE_DEVICE, Phase, PoolOwner, Role};

/// Start and length of a part of a segment that remains when its middle is removed.
type Piece = (u64, u64);

impl Core {
    fn pool_device(&self, pool: u64) -> u8 {
        self.recorder.live.get(Key::Pool(pool)).map_or(NONE_DEVICE, |row| device_of(&row.row))
    }

    fn in_pool(&self, thread: &Thread, pool: u64) -> RecordContext {
        RecordContext { device: self.pool_device(pool), ..self.here(thread) }
    }

    pub(crate) fn pool_create(&self, thread: &Thread, name: &[u8], ordinal: i32, parent: u64) -> u64 {
        let pool = self.new_pool_id();
        let device = u32::try_from(ordinal).map_or(NONE_DEVICE, |ordinal| self.device(ordinal));
        let at = RecordContext { tag: self.recorder.names.intern(0, name), device, ..RecordContext::NOWHERE };
        let body = Body::PoolCreate { pool, parent, reports_blocks: 0, owner: PoolOwner::Framework };
        self.recorder.insert(thread, at, body, Key::Pool(pool), RowExtra::default());
        pool
    }

    pub(crate) fn pool_destroy(&self, thread: &Thread, pool: u64) {
        let at = RecordContext::on(self.pool_device(pool));
        self.recorder.record(thread, at, Body::PoolDestroy { pool }, |recorder, _| {
            recorder.live.remove(Key::Pool(pool));
            recorder.live.remove_where(|taken| {
                let carved = matches!(kind_of(&taken.row), kind::SEGMENT_ADD | kind::BLOCK_ALLOC);
                (carved && taken.row[4] == pool).then(|| key_of(taken)).flatten()
            });
        });
    }

    pub(crate) fn segment_add(&self, thread: &Thread, pool: u64, address: u64, bytes: u64) {
        let body = Body::SegmentAdd { address, bytes, pool };
        let (at, key) = (self.in_pool(thread, pool), Key::Segment(pool, address));
        self.recorder.insert(thread, at, body, key, RowExtra::default());
    }

    /// Records a range that the pool gave back: one segment, several, or a part of one.
    pub(crate) fn segment_remove(&self, thread: &Thread, pool: u64, address: u64, bytes: u64) {
        let body = Body::SegmentRemove { address, bytes, pool };
        self.recorder.record(thread, self.in_pool(thread, pool), body, |_, _| self.cut(pool, address, bytes));
    }

    fn cut(&self, pool: u64, address: u64, bytes: u64) {
        let whole = |row: &RowCopy| bytes == 0 || row.row[3] == bytes;
        let key = Key::Segment(pool, address);
        if self.recorder.live.get(key).is_some_and(|row| whole(&row)) {
            self.recorder.live.remove(key);
            return;
        }
        // A part, or several: checks every segment of the pool.
        let end = address.saturating_add(bytes);
        let touched = self.recorder.live.scan().filter(|taken| {
            let (start, len) = (taken.row[2], taken.row[3]);
            kind_of(&taken.row) == kind::SEGMENT_ADD
                && taken.row[4] == pool
                && start < end
                && start.saturating_add(len) > address
        });
        for taken in touched {
            let (start, stop) = (taken.row[2], taken.row[2].saturating_add(taken.row[3]));
            self.recorder.live.remove(Key::Segment(pool, start));
            let left: Piece = (start, address.saturating_sub(start));
            let right: Piece = (end, stop.saturating_sub(end));
            for (start, bytes) in [left, right].into_iter().filter(|(_, bytes)| *bytes > 0) {
                let mut row = taken.row;
                (row[2], row[3]) = (start, bytes);
                self.recorder.live.insert(Key::Segment(pool, start), &row, taken.beside);
            }
        }
    }

    #[inline]
    pub(crate) fn block_alloc(&self, thread: &Thread, pool: u64, address: u64, bytes: u64, stream: u32) {
        // SAFETY: only the calling thread uses its own data; the reference ends with the statement.
        let noted = unsafe { thread.own() }.block_pool == pool;
        if !noted {
            // Marks the pool as one that reports blocks: byte 58 of its slot is `reports_blocks`.
            self.recorder.live.update(Key::Pool(pool), 7, |word, _| word | 1 << 16);
            // SAFETY: as above.
            unsafe { thread.own() }.block_pool = pool;
        }
        let at = RecordContext { context: stream, ..self.in_pool(thread, pool) };
        let body = Body::BlockAlloc { address, bytes, pool, use_as: (Role::Unknown, Phase::Unknown) };
        self.recorder.insert(thread, at, body, Key::Block(pool, address), RowExtra::default());
    }

    #[inline]
    pub(crate) fn block_free(&self, thread: &Thread, pool: u64, address: u64, pending: bool) {
        let state = if pending { FreeState::Pending } else { FreeState::Done };
        let (at, key) = (RecordContext::NOWHERE, Key::Block(pool, address));
        let body = Body::BlockFree { address, pool, state };
        match pending {
            true => self.recorder.record(thread, at, body, |recorder, _| recorder.live.set_pending(key)),
            false => self.recorder.remove(thread, at, body, key),
        };
    }

    pub(crate) fn pool_state(&self, thread: &Thread, pool: u64, reserved_bytes: u64, used_bytes: u64) {
        let at = RecordContext::on(self.pool_device(pool));
        self.recorder.note(thread, at, Body::PoolState { pool, reserved_bytes, used_bytes, took_us: 0 });
    }

    pub(crate) fn pool_check(&self, thread: &Thread, pool: u64, total_bytes: u64) {
        let at = RecordContext::on(self.pool_device(pool));
        self.recorder.note(thread, at, Body::PoolCheck { pool, total_bytes });
    }

    /// Changes the tag, role or phase of a block. With pool 0 it is whatever lies at `address`: a block of PyTorch, else an
    /// allocation. Blocks are tried first, because the first block of a segment has the address of the segment's allocation.
    pub(crate) fn retag(&self, thread: &Thread, pool: u64, address: u64, path: &[u8], use_as: (Role, Phase)) {
        let tag = if path.is_empty() { 0 } else { self.recorder.names.intern(0, path) };
        let has_block = |pool: &u64| self.recorder.live.get(Key::Block(*pool, address)).is_some();
        let torch = || self.torch.pools().map(|pool| pool.id).find(has_block).unwrap_or(0);
        let pool = if pool == 0 { torch() } else { pool };
        let key = if pool == 0 { Key::Allocation(address) } else { Key::Block(pool, address) };
        let block_seq = self.recorder.live.get(key).map_or(0, |row| row.seq());
        self.say_retag(thread, key, Body::Retag { address, block_seq, pool, use_as }, tag);
    }
}
