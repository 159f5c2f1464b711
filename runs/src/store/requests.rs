//! Stores the streams of requests of runs (see the module `requests` of this crate): one row for each piece, compressed.

use super::error::{Result, RunId};
use super::file::Store;
use super::tables::{bits, damaged, execute, unsigned};
use crate::requests::Piece;
use miniz_oxide::deflate::compress_to_vec;
use miniz_oxide::inflate::decompress_to_vec_with_limit;
use rusqlite::params;

/// A store of an earlier version has no such table until a writer opens it.
const HAS_TABLE: &str = "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'request'";
/// Lowest level of compression, which is the fastest.
const LEVEL: u8 = 1;
/// Maximum size in bytes of a piece, more than the daemon writes.
const MAX_PIECE: usize = 64 << 20;

impl Store {
    /// Adds pieces to the stored allocator requests of a run, the oldest first. Deletes pieces before `piece.first`. Pieces that are
    /// stored already may be added again.
    pub fn add_requests(&mut self, id: RunId, pieces: &[Piece]) -> Result<()> {
        self.transaction(|db| {
            for piece in pieces {
                // Pieces with greater numbers are those of an earlier daemon.
                let delete = "DELETE FROM request WHERE run = ? AND (number < ? OR number >= ?)";
                execute(db, delete, params![id.0, bits(piece.first), bits(piece.number)])?;
                let body = compress_to_vec(&piece.bytes, LEVEL);
                let insert = "INSERT INTO request (run, number, body) SELECT id, ?, ? FROM run WHERE id = ?";
                execute(db, insert, params![bits(piece.number), body, id.0])?;
            }
            Ok(())
        })
    }

    /// Returns the pieces of the stream of a run, the oldest first; none if no requests were kept.
    pub fn requests(&self, id: RunId) -> Result<Vec<Vec<u8>>> {
        self.sql(|db| {
            if db.query_row(HAS_TABLE, [], |row| row.get::<_, i64>(0))? == 0 {
                return Ok(Vec::new());
            }
            let mut statement =
                db.prepare_cached("SELECT number, body FROM request WHERE run = ? ORDER BY number")?;
            let mut rows = statement.query([id.0])?;
            let (mut pieces, mut next) = (Vec::new(), None);
            while let Some(row) = rows.next()? {
                let number = unsigned(row, 0)?;
                // A piece is missing if the daemon could not write it. Those before it are of no use.
                if next.is_some_and(|next| next != number) {
                    pieces.clear();
                }
                next = Some(number.wrapping_add(1));
                let body = row.get_ref(1)?.as_blob()?;
                let piece = decompress_to_vec_with_limit(body, MAX_PIECE);
                pieces.push(
                    piece.map_err(|_| damaged(format!("piece {number} of the requests of run {}", id.0)))?,
                );
            }
            Ok(pieces)
        })
    }
}
