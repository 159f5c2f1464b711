//! Reads the bytes of a pickle file and counts the position. Does not rely on lengths that the file claims.

use std::io::{self, BufRead, BufReader, Read};

/// Maximum length of a string, number or line; the longest names of a snapshot have some kilobytes.
pub(super) const MAX_PIECE_BYTES: u64 = 1 << 20;
/// Size of the buffer. Fuzzing uses a small one, so that its small inputs cross the end of the buffer too.
const BUFFER_BYTES: usize = if cfg!(fuzzing) { 64 } else { 1 << 18 };

/// Why reading stopped.
#[derive(Debug)]
pub(super) enum Fault {
    /// The file is invalid at byte `offset`; `what` is the reason.
    Bad { offset: u64, what: String },
    /// The system could not read the file at byte `offset`.
    Io { offset: u64, source: io::Error },
}

/// Reads the bytes of a file from its beginning.
#[derive(Debug)]
pub(super) struct Bytes<R> {
    reader: BufReader<R>,
    offset: u64,
}

impl<R: Read> Bytes<R> {
    pub fn new(reader: R) -> Self {
        Bytes { reader: BufReader::with_capacity(BUFFER_BYTES, reader), offset: 0 }
    }

    /// Returns the number of bytes read, which is the current position.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    fn consume(&mut self, bytes: usize) {
        self.reader.consume(bytes);
        self.offset += bytes as u64;
    }

    /// Returns an error at the current position.
    pub fn bad(&self, what: impl Into<String>) -> Fault {
        Fault::Bad { offset: self.offset, what: what.into() }
    }

    /// Returns whether there is more input. If so, the buffer contains at least one byte after the call.
    pub fn has_more(&mut self) -> Result<bool, Fault> {
        loop {
            match self.reader.fill_buf() {
                Ok(buffer) => return Ok(!buffer.is_empty()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(Fault::Io { offset: self.offset, source }),
            }
        }
    }

    #[inline]
    pub fn next(&mut self) -> Result<Option<u8>, Fault> {
        if self.reader.buffer().is_empty() && !self.has_more()? {
            return Ok(None);
        }
        let byte = self.reader.buffer().first().copied();
        self.consume(1);
        Ok(byte)
    }

    fn ends(&self) -> Fault {
        self.bad("the file ends here, in the middle of a value: it was cut off")
    }

    #[inline]
    pub fn byte(&mut self) -> Result<u8, Fault> {
        self.next()?.ok_or_else(|| self.ends())
    }

    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        if let Some(&found) = self.reader.buffer().first_chunk::<N>() {
            self.consume(N);
            return Ok(found);
        }
        let mut array = [0; N];
        for byte in &mut array {
            *byte = self.byte()?;
        }
        Ok(array)
    }

    /// Reads `len` bytes into `piece`. Allocates memory only for bytes that the file really contains.
    pub fn piece(&mut self, len: u64, piece: &mut Vec<u8>) -> Result<(), Fault> {
        if len > MAX_PIECE_BYTES {
            let what = format!("a value of {len} bytes; the maximum is {MAX_PIECE_BYTES}");
            return Err(self.bad(what));
        }
        piece.clear();
        let mut left = len as usize;
        while left > 0 {
            if !self.has_more()? {
                return Err(self.ends());
            }
            let buffer = self.reader.buffer();
            let count = left.min(buffer.len());
            piece.extend_from_slice(buffer.get(..count).unwrap_or_default());
            self.consume(count);
            left -= count;
        }
        Ok(())
    }

    /// Reads the rest of a line into `piece`, without the line end.
    pub fn line(&mut self, piece: &mut Vec<u8>) -> Result<(), Fault> {
        piece.clear();
        loop {
            match self.byte()? {
                b'\n' => break,
                byte => piece.push(byte),
            }
            if piece.len() as u64 > MAX_PIECE_BYTES {
                return Err(self.bad(format!("a line of more than {MAX_PIECE_BYTES} bytes")));
            }
        }
        if piece.last() == Some(&b'\r') {
            piece.pop();
        }
        Ok(())
    }
}
