//! The memory that one process holds: rows of live memory, and books with its bytes by cell. The booking rules in the other files
//! of this folder work on this state.

use crate::Map;
use crate::base::quota::{list, map, sorted};
use crate::book::cells::{CellId, CellTable};
use crate::book::{Book, Window};
use crate::roles::state::WorkspaceSizes;
use crate::roles::state::{PhaseReports, RestatedBlock, Roles};
use crate::rows::block_ring::{BlockRing, OwnBytes};
use crate::rows::in_flight::{InFlight, InFlights};
use crate::rows::pool::{Carved, Pool, Segment};
use crate::rows::row::{
    AnomalyCounts, Backing, BackingId, Extent, Mapping, PeakResidue, PeakResidues, Row, is_charged,
    side_bytes,
};
use crate::rows::table::RowTable;
use gpumem_model::blocks::Blocks;
use gpumem_model::growth::PINNED_CELLS;
use gpumem_model::iterations::Iterations;
use gpumem_model::names::Named;
use gpumem_model::parameters::{Column, Parameters};
use gpumem_model::run::SideMemory;
use gpumem_wire::{Flags, MemoryKind, Phase, Role, Stamp};
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Holdings {
    pub cells: CellTable,
    /// Books of the process, one for each device that it uses.
    pub books: Vec<Book>,
    /// Windows (10 ms each) that have ended, with the indices of their books.
    pub windows: Vec<(u8, Window)>,
    window_ns: u64,
    pub side_memory: Vec<SideMemory>,
    pub(super) allocations: RowTable,
    /// Address and bytes of the allocations of at least [`LARGE_BYTES`](crate::rows::row::LARGE_BYTES), to find them by an
    /// address inside.
    pub(super) large: BTreeMap<u64, u64>,
    /// Frees, unmaps and releases that have not returned.
    pub in_flight: InFlights,
    /// Bytes that the calls in `in_flight` may already have freed, for each book.
    pub in_flight_bytes: Vec<i64>,
    pub(super) handles: Map<u64, BackingId>,
    pub(super) backings: Map<BackingId, Backing>,
    pub(super) mappings: BTreeMap<u64, Mapping>,
    /// Pools by index; destroyed pools stay as empty entries.
    pub pools: Vec<Pool>,
    pub(super) pool_ids: Map<u64, u32>,
    /// Index of the pool of the last block; most records concern the same pool.
    pub(super) last_pool: u32,
    /// Bytes that segments took from each extent (piece of booked memory).
    pub(super) carved: Map<Extent, Carved>,
    /// Whether unreported segments may exist, because the agent was late or records were lost.
    pub unseen_segments: bool,
    /// Number of segments that are not wholly booked; a later allocation may be their memory.
    pub(super) unbacked_segments: u32,
    /// Pending blocks (freed, but a CUDA stream may still use them) by birth number: the cell before the free, and the epoch of
    /// the free.
    pub(super) waiting: Map<u64, (CellId, u32)>,
    /// Rows freed since the peak whose role was not final, for each book.
    pub(super) residues: Vec<PeakResidues>,
    pub(super) roles: Vec<Roles>,
    pub phases: PhaseReports,
    pub workspaces: WorkspaceSizes,
    /// Whether a forward pass began with the current block.
    pub pass_begins: bool,
    /// Blocks with a phase that were unknown before the resync in progress.
    pub(super) restated: Vec<RestatedBlock>,
    /// Ids of libraries whose driver allocations are scratch memory.
    pub(super) scratch_libraries: Vec<u16>,
    /// Number of the last resync, modulo 256.
    pub(super) generation: u8,
    /// Frees that began up to this record number may have ended in lost records; cleared by a resync.
    pub(super) doubtful_before: Option<u64>,
    /// Records up to this number may refer to rows that a resync has removed, which is not an anomaly.
    pub forgiven_until: u64,
    pub anomalies: AnomalyCounts,
    /// Time of the record that is being booked (ns).
    pub now_ns: u64,
    /// Books that the current record touched, one bit for each.
    touched: u64,
    /// Whether the rows are a mix of several moments, so that no peak is recorded: a resync is in progress, or records that were
    /// made during it have not all arrived.
    pub mixed: bool,
    /// Whether a resync has ended, but allocations that it did not restate are not removed yet: records of their frees may still
    /// arrive.
    pub(super) unswept: bool,
    /// Books touched while `mixed`, one bit for each.
    unsettled: u64,
    /// The last changes of live memory, if a reader of a file wants them.
    pub block_ring: Option<Box<BlockRing>>,
    /// Numbers and roles of blocks that the program has freed since the last [`take_roles`](Self::take_roles), if a reader of a file
    /// wants them.
    pub freed_roles: Option<Vec<(u64, Role)>>,
}

impl Holdings {
    pub fn new(window_ns: u64) -> Self {
        Holdings { window_ns, ..Holdings::default() }
    }

    /// Clears the history of all books; their state before `now_ns` can no longer be restored.
    pub fn restart_history(&mut self, now_ns: u64) {
        for (book, &in_flight) in self.books.iter_mut().zip(&self.in_flight_bytes) {
            book.history.restart(now_ns, in_flight);
        }
    }

    #[inline]
    pub fn has_driver_rows(&self) -> bool {
        !self.allocations.is_empty() || !self.backings.is_empty() || !self.mappings.is_empty()
    }

    pub fn iterations(&self, book: usize, time_ns: u64) -> Iterations {
        let both = self.roles.get(book).zip(self.books.get(book));
        both.map(|(roles, book)| roles.iterations.view(time_ns, book)).unwrap_or_default()
    }

    pub fn parameters(&self, book: usize) -> Parameters {
        let name = |cell: CellId| {
            let key = &self.cells.keys[cell as usize];
            let tag = self.cells.name(key).as_deref().map(str::to_owned);
            Column { role: key.role.name().unwrap_or_default().to_owned(), tag }
        };
        self.roles.get(book).map(|roles| roles.iterations.parameters(name)).unwrap_or_default()
    }

    /// Notes in the ring that the own bytes of a row, without those in segments, have changed.
    #[inline]
    pub fn note_row(&mut self, extent: Extent, row: &Row, before: u64, bytes: u64) {
        if self.block_ring.is_some() {
            let now = self.own_bytes(extent, *row, bytes);
            self.block_ring.iter_mut().for_each(|ring| ring.note_row(row.book, before, now));
        }
    }

    /// Notes the role of a block that the program frees.
    #[inline]
    pub fn note_role(&mut self, row: &Row, role: Option<Role>) {
        if let Some(freed) = &mut self.freed_roles {
            freed.push((row.seq, role.unwrap_or(self.cells.keys[row.cell as usize].role)));
        }
    }

    /// Returns the numbers and roles of blocks that the program has freed since the last call; with `live`, also those of all live
    /// blocks.
    pub fn take_roles(&mut self, live: bool) -> Vec<(u64, Role)> {
        let mut roles = self.freed_roles.as_mut().map(std::mem::take).unwrap_or_default();
        if live {
            let rows = self.pools.iter().flat_map(|pool| pool.blocks.iter().map(|(_, row)| row));
            roles.extend(rows.map(|row| (row.seq, self.cells.keys[row.cell as usize].role)));
        }
        roles
    }

    /// Returns the own bytes of a row. A block that waits for a stream counts in the cell that it had before. It takes a copy of the
    /// row, so that a caller without a ring can keep its row in registers.
    fn own_bytes(&self, extent: Extent, row: Row, bytes: u64) -> OwnBytes {
        let address = match extent {
            Extent::Allocation(address, _) | Extent::Block(_, address) => address,
            Extent::Backing(_) => 0,
        };
        let waiting = if row.is(Row::PENDING) { self.waiting.get(&row.seq) } else { None };
        OwnBytes { seq: row.seq, address, bytes, cell: waiting.map_or(row.cell, |(cell, _)| *cell) }
    }

    /// Returns the blocks of a book in the time that the ring covers; none without a ring.
    pub fn blocks(&self, book: u8) -> Blocks {
        let Some(ring) = &self.block_ring else { return Blocks::default() };
        let bound = self.allocations.iter().map(|(address, row)| (address, *row));
        let in_flight = self.in_flight.iter().filter_map(|(_, flight)| match flight {
            InFlight::Allocation { address, row } => Some((*address, *row)),
            _ => None,
        });
        let allocations =
            bound.chain(in_flight).map(|(address, row)| (Extent::Allocation(address, row.seq), row));
        let backings = self.backings.iter().map(|(&id, backing)| (Extent::Backing(id), backing.row));
        let blocks = (0..).zip(&self.pools).flat_map(|(index, pool)| {
            pool.blocks.iter().map(move |(address, row)| (Extent::Block(index, address), *row))
        });
        let live = allocations
            .chain(backings)
            .chain(blocks)
            .filter(|(_, row)| row.book == book && !row.is(Row::UNBOOKED) && is_charged(row.kind));
        let own = live.map(|(extent, row)| {
            self.own_bytes(extent, row, row.bytes.saturating_sub(self.carved_bytes(extent)))
        });
        let tracked = self.books.get(usize::from(book)).map_or(0, |book| book.tracked);
        ring.blocks(book, own.filter(|own| own.bytes > 0), tracked)
    }

    /// Whether times are line numbers of a log. Then each time is a separate window.
    pub fn is_ordinal(&self) -> bool {
        self.window_ns == 1
    }

    pub fn timeline(&self, book: usize) -> gpumem_model::timeline::Timeline {
        self.books.get(book).map(|book| book.timeline(&self.cells, !self.mixed)).unwrap_or_default()
    }

    pub fn rows(&self) -> usize {
        let in_pools = self.pools.iter().map(|pool| pool.blocks.len() + pool.segments.len());
        let own = [self.allocations.len(), self.backings.len(), self.mappings.len(), self.pools.len()];
        own.iter().sum::<usize>() + in_pools.sum::<usize>()
    }

    /// Removes every row. Books, their peaks and the cells stay.
    pub fn remove_all(&mut self) {
        for seq in self.in_flight.begun(|_| true) {
            self.free_end(seq, 0);
        }
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        self.sweep_blocks();
        self.drop_allocations(|row| row.generation != generation);
        self.sweep_vmm();
        self.sweep_pools();
        self.residues.iter_mut().for_each(PeakResidues::clear);
        (self.mixed, self.unswept) = (false, false);
        self.unseen_segments = false;
        (self.doubtful_before, self.forgiven_until) = (None, 0);
    }

    /// Restarts peaks, timelines and iterations with the amounts held now.
    pub fn begin_part(&mut self, now_ns: u64) {
        // While a resync mixes old and new rows, the books may contain more bytes than the process holds.
        let start_ns = (!self.mixed).then_some(now_ns);
        self.books.iter_mut().for_each(|book| book.restart(start_ns, self.window_ns));
        self.residues.iter_mut().for_each(PeakResidues::clear);
        self.roles.iter_mut().for_each(|roles| roles.iterations.restart(now_ns));
    }

    /// Adds a book for one more device (GPU or MIG instance); the caller allows at most 64.
    pub fn add_book(&mut self) -> u8 {
        if self.books.is_empty() {
            // Most processes use one device, and the lists' usual first growth would be to four elements.
            self.books.reserve_exact(1);
            self.side_memory.reserve_exact(1);
            self.residues.reserve_exact(1);
            self.roles.reserve_exact(1);
        }
        self.books.push(Book::new());
        self.side_memory.push(SideMemory::default());
        self.in_flight_bytes.push(0);
        self.residues.push(PeakResidues::default());
        self.roles.push(Roles::default());
        (self.books.len() - 1) as u8
    }

    /// Returns a book and marks it as touched by the current record.
    #[inline]
    pub fn book(&mut self, book: u8) -> &mut Book {
        self.touched |= 1 << (book & 63);
        let book = &mut self.books[usize::from(book)];
        book.history.begin_record(self.now_ns);
        book
    }

    /// Counts bytes of a row whose kind NVML does not charge to the process, outside the book; returns false for charged kinds.
    pub fn count_side_memory(&mut self, row: &Row, bytes: i64) -> bool {
        let memory = &mut self.side_memory[usize::from(row.book)];
        let Some(amount) = side_bytes(memory, row.kind) else { return false };
        *amount = amount.wrapping_add(bytes);
        if row.kind == MemoryKind::Pinned {
            let book = &mut self.books[usize::from(row.book)];
            book.pinned = memory.pinned_bytes;
            book.post_pinned(row.cell, bytes);
        }
        true
    }

    /// Returns the cells with the most live pinned memory, the largest first, each with its bytes.
    pub fn pinned_cells(&self, book: usize) -> Vec<(CellId, i64)> {
        let cells = self.books.get(book).into_iter().flat_map(|book| &book.pinned_cells);
        let mut cells: Vec<(CellId, i64)> = cells.map(|(cell, bytes)| (*cell, *bytes)).collect();
        cells.sort_by_key(|(cell, bytes)| (std::cmp::Reverse(*bytes), *cell));
        cells.truncate(PINNED_CELLS);
        cells
    }

    /// Finishes a record: records peaks, and ends windows. Returns the touched books, one bit for each.
    #[inline]
    pub fn settle(&mut self, time_ns: u64) -> u64 {
        let touched = std::mem::take(&mut self.touched);
        if self.mixed {
            self.unsettled |= touched;
            return touched;
        }
        let mut rest = touched | std::mem::take(&mut self.unsettled);
        while rest != 0 {
            let book = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            if let Some(ring) = &mut self.block_ring {
                ring.note_tracked(book as u8, self.books[book].tracked);
            }
            if time_ns >= self.books[book].window_end_ns
                && let Some(over) = self.books[book].roll(time_ns, self.window_ns, &self.cells)
            {
                self.windows.push((book as u8, over));
            }
            if self.books[book].settle(time_ns) {
                self.residues[book].clear();
            }
        }
        touched
    }

    /// Adds timeline points for books that were not touched for long, before a record of `time_ns` is booked. Returns the time of
    /// the next check.
    #[cold]
    pub fn end_silences(&mut self, time_ns: u64) -> u64 {
        if !self.mixed {
            self.books.iter_mut().for_each(|book| book.end_silence(time_ns, &self.cells));
        }
        time_ns.saturating_add(self.window_ns)
    }

    /// Keeps bytes and cell of a row that is about to be removed, if it was live at the peak and its role is not final.
    #[inline]
    pub fn keep_residue(&mut self, row: &Row, booked: u64) {
        let book = &self.books[usize::from(row.book)];
        if booked == 0 || row.is(Row::EXACT) || !book.live_at_peak(row.first_epoch) {
            return;
        }
        let residue = PeakResidue { bytes: booked, cell: self.cell_at_peak(row) };
        self.residues[usize::from(row.book)].keep(row.seq, residue);
    }

    /// Returns the cell of a live row at the peak. A block that became pending after the peak was in another cell then.
    pub fn cell_at_peak(&self, row: &Row) -> CellId {
        let waiting = if row.is(Row::PENDING) { self.waiting.get(&row.seq) } else { None };
        let before = waiting.filter(|(_, since)| !self.books[usize::from(row.book)].live_at_peak(*since));
        before.map_or(row.cell, |(cell, _)| *cell)
    }

    /// Shifts all bytes that segments took from an extent back to the extent's own cell. The extent is about to be removed; its
    /// segments stay without memory.
    pub fn uncarve_all(&mut self, extent: Extent, row: &Row) {
        let carved = if self.carved.is_empty() { None } else { self.carved.remove(&extent) };
        let Some(carved) = carved else {
            self.keep_residue(row, row.bytes);
            return;
        };
        let at_peak = carved.at_peak(&self.books[usize::from(row.book)]);
        self.keep_residue(row, row.bytes.saturating_sub(at_peak));
        self.book(row.book).count_returned(carved.returned_bytes().wrapping_neg());
        let mut own = row.bytes.saturating_sub(carved.total());
        for (key, bytes) in carved.parts {
            let cell = self.remove_part(key, extent, bytes);
            self.book(row.book).shift(cell, row.cell, bytes as i64);
            self.note_row(extent, row, own, own + bytes);
            own += bytes;
        }
    }

    pub fn carved_bytes(&self, extent: Extent) -> u64 {
        self.carved.get(&extent).map_or(0, Carved::total)
    }

    /// Books a `Retag`: a new tag or role of the row with birth number `seq`.
    pub fn retag(&mut self, address: u64, pool: u64, seq: u64, stamp: &Stamp, use_as: (Role, Phase)) {
        let pool_index = if pool == 0 { None } else { self.pool_of(pool) };
        let block = pool_index.and_then(|index| {
            let row = self.pools[index as usize].blocks.get(address).filter(|row| row.seq == seq)?;
            Some((Extent::Block(index, address), *row))
        });
        // Driver allocations are found by address, handles by birth number.
        let found = block.or_else(|| {
            let row = self.allocations.get(address).filter(|row| row.seq == seq);
            row.map(|row| (Extent::Allocation(address, seq), *row))
        });
        let found = found.or_else(|| Some((Extent::Backing(seq), self.backings.get(&seq)?.row)));
        // If a resync restates a row whose free seems to be in flight, the free has failed, and its end was lost.
        let restated = stamp.flags.has(Flags::RESTATED);
        let found = found.or_else(|| {
            let row = if restated { self.in_flight.row_mut(seq) } else { None };
            Some((Extent::Allocation(address, seq), *row?))
        });
        match found {
            Some((extent, row)) => self.retag_row(extent, row, stamp, use_as),
            None => self.retag_residue(seq, stamp, use_as),
        }
    }

    fn retag_row(&mut self, extent: Extent, row: Row, stamp: &Stamp, use_as: (Role, Phase)) {
        let mut reported = (use_as.0 != Role::Unknown).then_some(use_as.0);
        if let Some(role) = reported {
            self.row_mut(extent).into_iter().for_each(|row| row.flags |= Row::EXACT);
            if role == Role::Parameter {
                self.roles[usize::from(row.book)].knows_parameters = true;
                self.note_parameter(row.book, row.bytes);
            }
        } else if stamp.flags.has(Flags::RESTATED) && row.is(Row::EXACT) && !row.is(Row::BORN_EXACT) {
            // An earlier retag has not reached the agent's row, because a free was in flight that failed.
            self.row_mut(extent).into_iter().for_each(|row| row.flags &= !Row::EXACT);
            reported = Some(Role::Unknown);
        }
        let use_as = (reported, use_as.1);
        let to = self.renamed(row.cell, stamp, use_as);
        let peak_to = self.renamed(self.cell_at_peak(&row), stamp, use_as);
        self.recell(extent, row, (to, peak_to));
    }

    /// Assigns a derived role to a block, now and at the peak.
    pub fn derive(&mut self, extent: Extent, row: Row, role: Role) {
        let to = self.cells.with_role(row.cell, role);
        let peak_to = self.cells.with_role(self.cell_at_peak(&row), role);
        self.recell(extent, row, (to, peak_to));
    }

    /// Moves a row to other cells. `to`: its new cell now, and its new cell at the peak.
    pub fn recell(&mut self, extent: Extent, row: Row, to: (CellId, CellId)) {
        if to.0 != row.cell {
            self.move_row(extent, &row, to);
            self.row_mut(extent).into_iter().for_each(|row| row.cell = to.0);
        }
    }

    /// Shifts the bytes of a row to another cell, now and at the peak, except bytes that segments took.
    pub fn move_row(&mut self, extent: Extent, row: &Row, (to, peak_to): (CellId, CellId)) {
        let peak_cell = self.cell_at_peak(row);
        if row.is(Row::PENDING)
            && let Some((before, _)) = self.waiting.get_mut(&row.seq)
        {
            *before = peak_to;
        }
        if row.is(Row::UNBOOKED) {
            return;
        }
        if row.kind == MemoryKind::Pinned {
            let book = &mut self.books[usize::from(row.book)];
            book.post_pinned(row.cell, -(row.bytes as i64));
            book.post_pinned(to, row.bytes as i64);
        } else if is_charged(row.kind) {
            let book = &self.books[usize::from(row.book)];
            let carved = self.carved.get(&extent);
            let now = row.bytes.saturating_sub(carved.map_or(0, Carved::total));
            let at_peak = row.bytes.saturating_sub(carved.map_or(0, |carved| carved.at_peak(book)));
            let live = book.live_at_peak(row.first_epoch);
            let is_whole = carved.is_none() && !row.is(Row::PENDING);
            let book = self.book(row.book);
            book.shift(row.cell, to, now as i64);
            if live {
                book.rename_at_peak(peak_cell, peak_to, at_peak as i64);
            }
            if is_whole {
                let book = &mut self.books[usize::from(row.book)];
                book.rename_past(row.first_epoch, (row.cell, to), now as i64, &self.cells);
            }
        }
    }

    pub(super) fn row_mut(&mut self, extent: Extent) -> Option<&mut Row> {
        match extent {
            Extent::Block(index, address) => self.pools[index as usize].blocks.get_mut(address),
            Extent::Allocation(address, seq) => {
                let bound = self.allocations.get_mut(address).filter(|row| row.seq == seq);
                // The bytes stay booked while their free is in flight.
                bound.or_else(|| self.in_flight.row_mut(seq))
            }
            Extent::Backing(id) => self.backings.get_mut(&id).map(|backing| &mut backing.row),
        }
    }

    /// Books a `Retag` of a row that was removed: only amounts at the peak change.
    fn retag_residue(&mut self, seq: u64, stamp: &Stamp, use_as: (Role, Phase)) {
        for index in 0..self.residues.len() {
            let Some(residue) = self.residues[index].get_mut(seq).copied() else { continue };
            let reported = (use_as.0 != Role::Unknown).then_some(use_as.0);
            let to = self.renamed(residue.cell, stamp, (reported, use_as.1));
            self.book(index as u8).rename_at_peak(residue.cell, to, residue.bytes as i64);
            if let Some(residue) = self.residues[index].get_mut(seq) {
                residue.cell = to;
            }
            return;
        }
    }

    /// Returns the cell that differs from `from` by the values of a `Retag`. The first tag stays as the origin.
    fn renamed(&mut self, from: CellId, stamp: &Stamp, (role, phase): (Option<Role>, Phase)) -> CellId {
        let mut key = self.cells.keys[from as usize];
        if stamp.flags.has(Flags::RESTATED) {
            // A tag other than the first is never inherited.
            key.inherited &= stamp.tag == key.tag && stamp.stack == 0;
            (key.tag, key.origin) = (stamp.tag, stamp.stack);
        } else if stamp.tag != 0 {
            key.inherited = false; // a retag is explicit
            if stamp.tag != key.tag {
                if key.origin == 0 {
                    key.origin = key.tag;
                }
                key.tag = stamp.tag;
                if key.origin == key.tag {
                    key.origin = 0; // the bytes have their first name again
                }
            }
        }
        key.role = role.unwrap_or(key.role);
        if phase != Phase::Unknown {
            key.phase = phase;
        }
        self.cells.intern(key)
    }

    pub fn bytes(&self) -> usize {
        let rows = self.allocations.bytes()
            + map(&self.handles)
            + map(&self.backings)
            + map(&self.carved)
            + self.carved.len() * 64
            + map(&self.waiting)
            + map(&self.pool_ids)
            + self.large.len() * sorted(16)
            + self.mappings.len() * sorted(8 + size_of::<Mapping>())
            + self.in_flight.bytes();
        let pools = self.pools.iter().map(|pool| {
            pool.blocks.bytes()
                + pool.large_blocks.len() * sorted(16)
                // A segment also has entries in `parts` and in `carved`.
                + pool.segments.len() * sorted(8 + size_of::<Segment>() + 96)
        });
        let cells = self.cells.bytes() + self.block_ring.as_ref().map_or(0, |ring| ring.bytes());
        let books = self.books.iter().map(|book| book.bytes());
        let roles =
            self.roles.iter().map(|roles| roles.undecided.bytes() + roles.iterations.bytes()).sum::<usize>()
                + self.residues.iter().map(|residues| residues.bytes()).sum::<usize>();
        let lists = list(&self.pools) + list(&self.restated);
        rows + lists + pools.sum::<usize>() + cells + books.sum::<usize>() + roles
    }
}
