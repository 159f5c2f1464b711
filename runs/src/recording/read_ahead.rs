//! Reads a recording and decodes its records on a thread of its own, some pieces ahead of the caller. The memory of the pieces is
//! bounded.

use gpumem_wire::{Body, Record, frame};
use std::io::{self, ErrorKind, Read};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope};

/// Size of a buffer in bytes: more than the longest frame, and more than the buffer of [`Input`](crate::input::Input), which large
/// reads then pass by. Fuzzing uses less, because it reads many small files.
const BUFFER_BYTES: usize = if cfg!(fuzzing) { 66 << 10 } else { 512 << 10 };
const _: () = assert!(BUFFER_BYTES > frame::PREFIX_BYTES + frame::MAX_FRAME_BYTES);
/// Number of buffers: one is filled, one is with the caller, the others wait.
const BUFFERS: usize = 4;

/// A failed read: offset in the file, and the error.
pub(super) type ReadError = (u64, io::Error);

/// Consecutive bytes of a recording: whole frames, and in the last piece of a cut or damaged recording also the rest.
pub(super) struct Piece {
    buffer: Vec<u8>,
    /// Length of the piece in the buffer.
    len: usize,
    /// Length of the piece's whole frames.
    pub whole: usize,
    /// Records that need no bytes of the piece and have the origin of the record before them: nearly all.
    pub plain: Vec<Record<'static>>,
    /// For each other frame: number of plain records before it, and its offset in the piece.
    others: Vec<(usize, usize)>,
}

impl Piece {
    fn new() -> Self {
        Piece { buffer: vec![0; BUFFER_BYTES], len: 0, whole: 0, plain: Vec::new(), others: Vec::new() }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    /// Returns the frames that are not decoded, in order: number of plain records before the frame, and the bytes from the frame on.
    pub fn others(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.others.iter().map(|(before, offset)| (*before, &self.bytes()[*offset..]))
    }

    /// Decodes the whole frames among the first `len` bytes of the buffer.
    fn decode(&mut self, len: usize) {
        let bytes = &self.buffer[..len];
        let mut rest = bytes;
        self.plain.clear();
        self.others.clear();
        while let Ok(Some((slot, payload, after))) = frame::split_frame(rest) {
            match Record::decode(slot, &[]) {
                Ok(record) if payload.is_empty() && !concerns_origin(&record.body) => self.plain.push(record),
                _ => self.others.push((self.plain.len(), len - rest.len())),
            }
            rest = after;
        }
        (self.len, self.whole) = (len, len - rest.len());
    }
}

/// Returns whether the code that finds the process of each record must see a record; the others have the origin of the record before them.
fn concerns_origin(body: &Body<'_>) -> bool {
    matches!(body, Body::Origin { .. } | Body::Hello { .. } | Body::ClockAnchor { .. } | Body::Device { .. })
}

/// The pieces of a recording, in order.
pub(super) struct Pieces {
    full: Receiver<Result<Piece, ReadError>>,
    empty: SyncSender<Piece>,
    /// The piece that the caller reads.
    present: Piece,
}

impl Pieces {
    /// Starts reading at the first frame, which is at `offset` in the file. Fails if the thread cannot be started.
    pub fn start<'s>(
        scope: &'s Scope<'s, '_>,
        reader: impl Read + Send + 's,
        offset: u64,
    ) -> Result<Self, ReadError> {
        let (filled, full) = sync_channel(BUFFERS);
        let (empty, free) = sync_channel(BUFFERS);
        let thread = Builder::new().name("read-ahead".into());
        let spawned = thread.spawn_scoped(scope, move || fill(reader, offset, &free, &filled));
        let unread =
            |error| (offset, io::Error::other(format!("no thread to read it can be started: {error}")));
        spawned.map_err(unread)?;
        for _ in 1..BUFFERS {
            let _ = empty.send(Piece::new());
        }
        Ok(Pieces { full, empty, present: Piece::new() })
    }

    /// Returns the next piece; `None` at the end.
    pub fn next(&mut self) -> Result<Option<&Piece>, ReadError> {
        let Ok(next) = self.full.recv() else { return Ok(None) };
        let read = std::mem::replace(&mut self.present, next?);
        // Fails if the thread has read all.
        let _ = self.empty.send(read);
        Ok(Some(&self.present))
    }
}

/// Reads pieces until the end, a damaged frame or an error, or until the receiver has been dropped.
fn fill(
    mut reader: impl Read,
    mut offset: u64,
    free: &Receiver<Piece>,
    filled: &SyncSender<Result<Piece, ReadError>>,
) {
    // Begin of a frame that is not read completely.
    let mut begun = Vec::new();
    while let Ok(mut piece) = free.recv() {
        let buffer = &mut piece.buffer;
        let mut end = begun.len();
        buffer[..end].copy_from_slice(&begun);
        let (len, is_last) = loop {
            match reader.read(&mut buffer[end..]) {
                Ok(0) => break (end, true),
                Ok(read) => end += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    let _ = filled.send(Err((offset + end as u64, error)));
                    return;
                }
            }
            match whole_frames(&buffer[..end]) {
                None => break (end, true),
                Some(0) => {}
                Some(len) => break (len, false),
            }
        };
        begun.clear();
        begun.extend_from_slice(&buffer[len..end]);
        offset += len as u64;
        piece.decode(len);
        if filled.send(Ok(piece)).is_err() || is_last {
            return;
        }
    }
}

/// Returns the length of the whole frames at the begin of `bytes`; `None` if a frame is damaged.
fn whole_frames(bytes: &[u8]) -> Option<usize> {
    let mut rest = bytes;
    loop {
        match frame::split_frame(rest) {
            Ok(Some((_, _, after))) => rest = after,
            Ok(None) | Err(frame::Error::Cut { .. }) => return Some(bytes.len() - rest.len()),
            Err(frame::Error::Length(_)) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_wire::{Body, Record, Stamp};
    use std::thread::scope;

    /// Returns at most `step` bytes for each read, and an error at the offset `fails_at`.
    struct Steps<'b> {
        rest: &'b [u8],
        step: usize,
        fails_at: usize,
    }

    impl Read for Steps<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.fails_at == 0 {
                return Err(io::Error::other("a broken disk"));
            }
            let len = self.rest.len().min(self.step).min(buffer.len()).min(self.fails_at);
            let (read, rest) = self.rest.split_at(len);
            buffer[..len].copy_from_slice(read);
            (self.rest, self.fails_at) = (rest, self.fails_at - len);
            Ok(len)
        }
    }

    /// Returns frames of many lengths, in all twice as long as all buffers, and the offset of each frame.
    fn frames() -> (Vec<u8>, Vec<usize>) {
        let (mut bytes, mut starts) = (Vec::new(), Vec::new());
        while bytes.len() < 2 * BUFFERS * BUFFER_BYTES {
            starts.push(bytes.len());
            let path = "x".repeat(starts.len() * 7919 % 50_000);
            Record { stamp: Stamp::default(), body: Body::Tag { path: &path } }.append_frame(&mut bytes);
        }
        (bytes, starts)
    }

    /// Returns all pieces, and the offset of a failed read.
    fn pieces(bytes: &[u8], step: usize, fails_at: usize) -> (Vec<Vec<u8>>, Option<u64>) {
        scope(|scope| {
            let reader = Steps { rest: bytes, step, fails_at };
            let mut pieces = Pieces::start(scope, reader, 100).expect("a thread");
            let mut all = Vec::new();
            loop {
                match pieces.next() {
                    Ok(Some(piece)) => all.push(piece.bytes().to_vec()),
                    Ok(None) => return (all, None),
                    Err((offset, _)) => return (all, Some(offset)),
                }
            }
        })
    }

    #[test]
    fn pieces_have_whole_frames_for_any_size_of_reads() {
        let (bytes, _) = frames();
        for step in [4999, 70_000, usize::MAX] {
            let (pieces, error) = pieces(&bytes, step, usize::MAX);
            assert!(pieces.concat() == bytes && error.is_none(), "{step}");
            assert!(pieces.iter().all(|piece| whole_frames(piece) == Some(piece.len())), "{step}");
        }
    }

    #[test]
    fn cut_recording_is_delivered_to_its_last_byte() {
        let (bytes, starts) = frames();
        let last = starts[starts.len() - 1];
        for end in [last + 1, last + 3, last + 40, bytes.len() - 1] {
            assert!(pieces(&bytes[..end], usize::MAX, usize::MAX).0.concat() == bytes[..end], "{end}");
        }
    }

    #[test]
    fn damaged_frame_is_delivered_after_all_frames_before_it() {
        let (mut bytes, starts) = frames();
        let start = starts[starts.len() / 2];
        bytes[start..start + 4].copy_from_slice(&5_u32.to_le_bytes());
        let (pieces, error) = pieces(&bytes, 4999, usize::MAX);
        let delivered = pieces.concat();
        assert!(delivered.len() >= start + 4 && bytes.starts_with(&delivered) && error.is_none());
        assert_eq!(whole_frames(&pieces[pieces.len() - 1]), None);
    }

    #[test]
    fn failed_read_has_its_offset_after_the_frames_before_it() {
        let (bytes, starts) = frames();
        let start = starts[starts.len() / 2];
        let (pieces, error) = pieces(&bytes, 4999, start + 30);
        assert!(pieces.concat() == bytes[..start]);
        assert_eq!(error, Some(100 + start as u64 + 30));
    }

    #[test]
    fn thread_ends_when_the_caller_stops() {
        let (bytes, _) = frames();
        scope(|scope| {
            let reader = Steps { rest: &bytes, step: 70_000, fails_at: usize::MAX };
            let mut pieces = Pieces::start(scope, reader, 0).expect("a thread");
            assert!(pieces.next().expect("a read").is_some());
        });
    }
}
