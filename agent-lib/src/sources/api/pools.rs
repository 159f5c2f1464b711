//! Records pools of frameworks as the program reports them: segments, and the blocks that lie in them.

use crate::base::row::{Key, RowExtra, device_of, key_of, kind, kind_of};
use crate::driver::core::Core;
use crate::record::recorder::RecordContext;
use crate::threads::Thread;
use gpumem_wire::{Body, FreeState, NONE_DEVICE, Phase, PoolOwner, Role};

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
            recorder.live.remove_where(|copy| {
                let has_pool = matches!(kind_of(&copy.row), kind::SEGMENT_ADD | kind::BLOCK_ALLOC);
                (has_pool && copy.row[4] == pool).then(|| key_of(copy)).flatten()
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
        let key = Key::Segment(pool, address);
        if self.recorder.live.get(key).is_some_and(|copy| bytes == 0 || copy.row[3] == bytes) {
            self.recorder.live.remove(key);
            return;
        }
        // The range is a part of a segment, or several segments: checks every segment of the pool.
        let end = address.saturating_add(bytes);
        for copy in self.recorder.live.scan() {
            let (start, stop) = (copy.row[2], copy.row[2].saturating_add(copy.row[3]));
            let is_ours = kind_of(&copy.row) == kind::SEGMENT_ADD && copy.row[4] == pool;
            if !is_ours || start >= end || stop <= address {
                continue;
            }
            self.recorder.live.remove(Key::Segment(pool, start));
            let (before, after) = (address.saturating_sub(start), stop.saturating_sub(end));
            for (start, bytes) in [(start, before), (end, after)].into_iter().filter(|(_, bytes)| *bytes > 0)
            {
                let mut row = copy.row;
                (row[2], row[3]) = (start, bytes);
                self.recorder.live.insert(Key::Segment(pool, start), &row, copy.beside);
            }
        }
    }

    #[inline]
    pub(crate) fn block_alloc(&self, thread: &Thread, pool: u64, address: u64, bytes: u64, stream: u32) {
        // SAFETY: only the calling thread uses its own data; the reference ends with the statement.
        let last_pool = std::mem::replace(unsafe { &mut thread.own().block_pool }, pool);
        if last_pool != pool {
            // Sets `reports_blocks`, byte 58 of the pool's row.
            self.recorder.live.update(Key::Pool(pool), 7, |word, _| word | 1 << 16);
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

    /// Changes the tag, role or phase of a block. With pool 0, changes those of PyTorch's block at `address`, or else of the
    /// allocation. The first block of a segment has the same address as the allocation, so blocks are tried first.
    pub(crate) fn retag(&self, thread: &Thread, pool: u64, address: u64, path: &[u8], use_as: (Role, Phase)) {
        let tag = if path.is_empty() { 0 } else { self.recorder.names.intern(0, path) };
        let has_block = |pool: &u64| self.recorder.live.get(Key::Block(*pool, address)).is_some();
        let torch_pool = || self.torch.pools().map(|pool| pool.id).find(has_block).unwrap_or(0);
        let pool = if pool == 0 { torch_pool() } else { pool };
        let key = if pool == 0 { Key::Allocation(address) } else { Key::Block(pool, address) };
        self.record_retag(thread, key, self.recorder.live.find_row(key), use_as, tag);
    }
}
