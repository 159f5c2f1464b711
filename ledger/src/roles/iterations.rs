//! Memory held in each iteration (step) of a training run, by role, in a bounded table.
//!
//! Roles are known at the boundaries of phases: activations when backward begins, gradients when the optimizer begins. So the
//! bytes by role are measured at these boundaries, not at each record. Temporary bytes come from undecided.rs.

use crate::book::Book;
use crate::book::cells::{CellId, CellKey};
use crate::roles::parameters::Parameters;
use gpumem_model::iterations::{Iteration, Level, MAX_ROWS};
use gpumem_model::{iterations, parameters};
use gpumem_wire::Role;

#[derive(Debug, Default)]
pub(crate) struct Iterations {
    rows: Vec<Iteration>,
    /// Number of iterations (training steps) that one full row of the table covers.
    stride: u64,
    open: Option<Iteration>,
    /// Bytes that pools have reserved: at present, and the maximum in the current iteration.
    pool_reserved: Level,
    parameters: Parameters,
}

impl Iterations {
    /// Counts memory that a pool has reserved; negative if it has returned memory.
    pub fn add_reserved(&mut self, delta: i64) {
        self.pool_reserved.set(self.pool_reserved.last_bytes.wrapping_add(delta));
    }

    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Measures the bytes of each role that has a bit in `known`. The bytes of other roles include blocks whose role may still
    /// change, so they are not measured now.
    pub fn measure(&mut self, book: &Book, keys: &[CellKey], known: u16) {
        let Some(open) = &mut self.open else { return };
        self.parameters.measure(book, keys);
        for &role in Role::ALL.iter().filter(|role| known & 1 << role.to_code() != 0) {
            open.role_mut(role).into_iter().for_each(|level| level.set(book.by_role(role)));
        }
    }

    /// Measures the gradients that are live when the first forward pass of the open iteration begins.
    pub fn measure_kept_gradients(&mut self, book: &Book) {
        let bytes = book.by_role(Role::Gradient);
        self.open.iter_mut().for_each(|open| open.kept_gradients.set(bytes));
    }

    /// Counts a forward pass that begins, the `number`th without a backward pass, with the bytes that the passes before it have kept.
    pub fn add_pass(&mut self, number: u64, kept_bytes: i64) {
        let Some(open) = &mut self.open else { return };
        open.passes_at_once = open.passes_at_once.max(number);
        open.kept_activations.set(kept_bytes);
    }

    /// Subtracts `mistaken` bytes of a cell from the maximum of the gradients, if they were counted there. Negative bytes are
    /// added.
    pub fn correct_gradients(&mut self, cell: CellId, mistaken: i64, book: &Book) {
        let Some(open) = &mut self.open else { return };
        if self.parameters.correct_gradients(cell, mistaken) {
            open.gradients.correct(mistaken, book.by_role(Role::Gradient));
        }
    }

    /// Adds the maximum of temporary bytes in an ended phase to the open iteration.
    pub fn add_temporary(&mut self, bytes: i64, is_backward: bool) {
        let Some(open) = &mut self.open else { return };
        let level = if is_backward { &mut open.intermediate_gradients } else { &mut open.temporaries };
        level.reach(bytes);
    }

    pub fn lose(&mut self) {
        self.open.iter_mut().for_each(|open| open.partial = true);
    }

    /// Ends the open iteration, and begins another with these epoch and step numbers.
    pub fn begin(&mut self, (epoch, number): (u64, u64), time_ns: u64, book: &mut Book) {
        self.end(time_ns, book);
        book.restart_max();
        self.pool_reserved.peak_bytes = self.pool_reserved.last_bytes;
        self.open = Some(Iteration {
            epoch,
            first: number,
            last: number,
            count: 1,
            start_ns: time_ns,
            end_ns: time_ns,
            ..Iteration::default()
        });
    }

    /// Returns the number of the next iteration, for a program that does not number them.
    pub fn next_number(&self, epoch: u64) -> u64 {
        let last = self.open.as_ref().or(self.rows.last()).filter(|last| last.epoch == epoch);
        last.map_or(0, |last| last.last.saturating_add(1))
    }

    /// Returns the iteration in progress with its amounts until `time_ns`.
    fn close(&self, time_ns: u64, book: &Book) -> Option<Iteration> {
        let mut open = self.open?;
        open.end_ns = time_ns.max(open.start_ns);
        open.tracked = Level { peak_bytes: book.max_tracked.max(book.tracked), last_bytes: book.tracked };
        open.pool_reserved = self.pool_reserved;
        Some(open)
    }

    /// Adds a row (one iteration) to the table; merges neighbouring rows if there are too many.
    fn keep(&mut self, row: Iteration) {
        match self.rows.last_mut() {
            Some(last) if last.count < self.stride && last.epoch == row.epoch => return last.join(row),
            _ => {}
        }
        if self.rows.len() == MAX_ROWS {
            self.stride = self.stride.max(1).saturating_mul(2);
            self.merge(true);
            if self.rows.len() > MAX_ROWS / 4 * 3 {
                self.merge(false); // epochs shorter than a row
            }
        }
        self.rows.push(row);
    }

    /// Merges neighbours up to `stride` iterations; with `same_epoch` only those of one epoch.
    fn merge(&mut self, same_epoch: bool) {
        let old = std::mem::take(&mut self.rows);
        for row in old {
            match self.rows.last_mut() {
                Some(last) if last.count < self.stride && (last.epoch == row.epoch || !same_epoch) => {
                    last.join(row);
                }
                _ => self.rows.push(row),
            }
        }
    }

    pub fn restart(&mut self, now_ns: u64) {
        self.parameters.restart(now_ns);
        // If no iteration is open, the last row stays, because it determines the next number.
        let kept = usize::from(self.open.is_none());
        self.rows.drain(..self.rows.len().saturating_sub(kept));
        self.stride = 0;
    }

    pub fn end(&mut self, time_ns: u64, book: &Book) {
        if let Some(open) = self.close(time_ns, book) {
            self.parameters.close(open.start_ns, book);
            self.keep(open);
        }
        self.open = None;
    }

    pub fn view(&self, time_ns: u64, book: &Book) -> iterations::Iterations {
        iterations::Iterations { rows: self.rows.clone(), open: self.close(time_ns, book) }
    }

    /// Returns the individual parameters and gradients; `name` returns role and tag of a cell.
    pub fn parameters(&self, name: impl Fn(CellId) -> parameters::Column) -> parameters::Parameters {
        self.parameters.view(name)
    }

    pub fn bytes(&self) -> usize {
        self.parameters.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_bounded_uniform_and_lose_no_peak() {
        let mut book = Book::new();
        let mut kept = Iterations::default();
        for number in 0..10_001_u64 {
            kept.begin((0, number), number * 10, &mut book);
            kept.add_reserved(if number == 7_777 { 100 } else { 0 });
            kept.add_reserved(if number == 7_777 { -100 } else { 0 });
            kept.add_temporary(i64::try_from(number).unwrap(), true);
        }
        let iterations::Iterations { rows, open } = kept.view(100_005, &book);
        assert_eq!(open.map(|open| (open.first, open.end_ns)), Some((10_000, 100_005)));
        assert!((MAX_ROWS / 2..=MAX_ROWS).contains(&rows.len()));
        let stride = rows[0].count;
        assert!(rows[..rows.len() - 1].iter().all(|row| row.count == stride));
        assert_eq!(rows.iter().map(|row| row.count).sum::<u64>(), 10_000);
        for pair in rows.windows(2) {
            assert_eq!((pair[0].last + 1, pair[0].end_ns), (pair[1].first, pair[1].start_ns));
        }
        for row in &rows {
            assert_eq!(row.intermediate_gradients, Level { peak_bytes: row.last as i64, last_bytes: 0 });
            let burst = (row.first..=row.last).contains(&7_777);
            assert_eq!(row.pool_reserved, Level { peak_bytes: if burst { 100 } else { 0 }, last_bytes: 0 });
        }
    }
}
