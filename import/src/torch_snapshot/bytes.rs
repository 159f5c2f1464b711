//! Reads a file byte by byte for the pickle machine. Counts the position, and does not rely on lengths that the file claims.

use std::io::{self, Read};

/// Maximum length of a string, number or line; the longest names of a snapshot have some kilobytes.
pub(super) const MAX_PIECE_BYTES: u64 = 1 << 20;
/// Size of the buffer. It is small for fuzzing, so that small files test the ends of buffers.
const BUFFER_BYTES: usize = if cfg!(fuzzing) { 64 } else { 1 << 18 };

/// Why reading stopped.
#[derive(Debug)]
pub(super) enum Fault {
    /// The file is invalid: offset and reason.
    Bad { offset: u64, what: String },
    /// Reading the file failed: offset and the system's error.
    Io { offset: u64, source: io::Error },
}

/// Reads the bytes of a file from its beginning.
#[derive(Debug)]
pub(super) struct Bytes<R> {
    reader: R,
    buffer: Vec<u8>,
    at: usize,
    /// File offset of the first byte in the buffer.
    base: u64,
}

impl<R: Read> Bytes<R> {
    pub fn new(reader: R) -> Self {
        Bytes { reader, buffer: Vec::new(), at: 0, base: 0 }
    }

    /// Returns the number of bytes read, which is the current position.
    pub fn offset(&self) -> u64 {
        self.base + self.at as u64
    }

    /// Returns an error at the current position.
    pub fn bad(&self, what: impl Into<String>) -> Fault {
        Fault::Bad { offset: self.offset(), what: what.into() }
    }

    /// Returns whether there is more input. If so, the buffer contains at least one byte after the call.
    pub fn has_more(&mut self) -> Result<bool, Fault> {
        if self.at < self.buffer.len() {
            return Ok(true);
        }
        self.base += self.buffer.len() as u64;
        self.at = 0;
        self.buffer.resize(BUFFER_BYTES, 0);
        loop {
            match self.reader.read(&mut self.buffer) {
                Ok(read) => {
                    self.buffer.truncate(read);
                    return Ok(read > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    self.buffer.clear();
                    return Err(Fault::Io { offset: self.base, source });
                }
            }
        }
    }

    #[inline]
    pub fn next(&mut self) -> Result<Option<u8>, Fault> {
        if self.at >= self.buffer.len() && !self.has_more()? {
            return Ok(None);
        }
        let byte = self.buffer.get(self.at).copied();
        self.at += 1;
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
        if let Some(found) = self.buffer.get(self.at..).and_then(|rest| rest.first_chunk::<N>()) {
            self.at += N;
            return Ok(*found);
        }
        let mut array = [0; N];
        for byte in &mut array {
            *byte = self.byte()?;
        }
        Ok(array)
    }

    /// Reads `len` bytes into `piece`. Memory is allocated only as bytes arrive.
    pub fn piece(&mut self, len: u64, piece: &mut Vec<u8>) -> Result<(), Fault> {
        if len > MAX_PIECE_BYTES {
            let what = format!("a value of {len} bytes: at most {MAX_PIECE_BYTES} are read");
            return Err(self.bad(what));
        }
        piece.clear();
        let mut left = len as usize;
        while left > 0 {
            if !self.has_more()? {
                return Err(self.ends());
            }
            let rest = self.buffer.get(self.at..).unwrap_or_default();
            let found = rest.get(..left.min(rest.len())).unwrap_or_default();
            piece.extend_from_slice(found);
            self.at += found.len();
            left -= found.len();
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
