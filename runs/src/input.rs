//! Files as strangers hand them over: opened carefully, looked at first, read in bounded pieces.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Bytes looked at to guess a format. The first record of a real training log lies some 100 KB behind its
/// banner.
pub const HEAD_BYTES: usize = 1 << 20;
/// Longest line that is read; the rest of a longer one is skipped and counted.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// Why a file cannot be read as a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened.
    #[error("{path}: {source}")]
    Open {
        /// As given.
        path: PathBuf,
        /// From the system.
        source: io::Error,
    },
    /// A directory or the like.
    #[error("{path}: is a {what}, not a file; give the recording or log itself")]
    NotAFile {
        /// As given.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Nothing in it.
    #[error("{path}: is empty; a recording begins with the letters GPUMEMR, a log has lines")]
    Empty {
        /// As given.
        path: PathBuf,
    },
    /// No format fits.
    #[error("{path}: {what}; known are: {known}")]
    Unrecognised {
        /// As given.
        path: PathBuf,
        /// What it seems to be.
        what: String,
        /// Names of formats.
        known: String,
    },
    /// The format was given or guessed, and the file has nothing of it.
    #[error("{path}: no {format} record in {lines} lines; one looks like: {example}")]
    NothingFound {
        /// As given.
        path: PathBuf,
        /// Format.
        format: &'static str,
        /// Lines read.
        lines: u64,
        /// A line as it should be.
        example: &'static str,
    },
    /// The text is not UTF-8 but something that can be converted.
    #[error("{path}: is {encoding} text, UTF-8 is read; convert it: iconv -f {encoding} -t UTF-8")]
    Encoding {
        /// As given.
        path: PathBuf,
        /// Its encoding.
        encoding: &'static str,
    },
    /// A recording of another major version.
    #[error(
        "{path}: recording of format {found}, this program reads {supported}; use a gpumemctl of that version"
    )]
    Version {
        /// As given.
        path: PathBuf,
        /// Major version in the file.
        found: u16,
        /// Ours.
        supported: u16,
    },
    /// Reading failed half-way.
    #[error("{path}: at byte {offset}: {source}")]
    Read {
        /// As given.
        path: PathBuf,
        /// Bytes read before.
        offset: u64,
        /// From the system.
        source: io::Error,
    },
}

/// An opened file whose beginning has been looked at.
#[derive(Debug)]
pub struct Input {
    /// As given.
    pub path: PathBuf,
    head: Vec<u8>,
    file: BufReader<File>,
}

impl Input {
    /// Opens a file and reads its beginning.
    ///
    /// # Errors
    /// See [`Error`]; among them empty files, directories, and text in UTF-16.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let open_error = |source| Error::Open { path: path.into(), source };
        let kind = std::fs::metadata(path).map_err(open_error)?.file_type();
        if kind.is_dir() {
            return Err(Error::NotAFile { path: path.into(), what: "directory" });
        }
        let file = File::open(path).map_err(open_error)?;
        let mut file = BufReader::with_capacity(1 << 18, file);
        let mut head = Vec::new();
        let read = file.by_ref().take(HEAD_BYTES as u64).read_to_end(&mut head);
        read.map_err(|source| Error::Read { path: path.into(), offset: 0, source })?;
        if head.is_empty() {
            return Err(Error::Empty { path: path.into() });
        }
        if let [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] = head[..] {
            return Err(Error::Encoding { path: path.into(), encoding: "UTF-16" });
        }
        Ok(Input { path: path.into(), head, file })
    }

    /// The first bytes, up to [`HEAD_BYTES`].
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// What the file seems to be, for a person whose file no format fits.
    pub fn describe(&self) -> String {
        let known: [(&[u8], &str); 9] = [
            (b"\x7fELF", "a program or library (ELF)"),
            (b"\x1f\x8b", "compressed (gzip): unpack it first"),
            (b"\x28\xb5\x2f\xfd", "compressed (zstd): unpack it first"),
            (b"\xfd7zXZ", "compressed (xz): unpack it first"),
            (b"BZh", "compressed (bzip2): unpack it first"),
            (b"PK\x03\x04", "a zip archive: unpack it first"),
            (b"SQLite format 3", "an SQLite database; a run store is read with --store"),
            (b"\x80\x04", "a Python pickle"),
            (b"%PDF", "a PDF"),
        ];
        if let Some((_, what)) = known.iter().find(|(magic, _)| self.head.starts_with(magic)) {
            return format!("is {what}");
        }
        if self.head.iter().all(|&byte| byte == 0) {
            return "holds only zero bytes (a hole in a sparse file?)".into();
        }
        match self.head.iter().position(|&byte| byte == 0) {
            Some(offset) => format!("is binary data (a zero byte at offset {offset})"),
            None => "is text without a line that any format knows".into(),
        }
    }

    /// Everything, from the first byte on.
    pub fn into_reader(self) -> impl BufRead {
        io::Cursor::new(self.head).chain(self.file)
    }
}

/// A line as it was found.
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// The line without its end, lossless or with replacement characters.
    Text(std::borrow::Cow<'a, str>),
    /// It was longer than [`MAX_LINE_BYTES`]; what follows its end is read.
    TooLong,
    /// It was longer than that and holds zero bytes: not a log any more.
    Binary,
}

/// Lines of a file that may hold anything, in bounded memory.
#[derive(Debug)]
pub struct Lines<R> {
    reader: R,
    buffer: Vec<u8>,
    /// Number of the line that was last given out, from 1.
    pub number: u64,
    /// Bytes consumed.
    pub offset: u64,
}

impl<R: BufRead> Lines<R> {
    /// Lines of `reader`.
    pub fn new(reader: R) -> Self {
        Lines { reader, buffer: Vec::new(), number: 0, offset: 0 }
    }

    /// The next line, or `None` at the end.
    ///
    /// # Errors
    /// What the reader says.
    pub fn next_line(&mut self) -> io::Result<Option<Line<'_>>> {
        self.buffer.clear();
        let read = self.reader.by_ref().take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut self.buffer)?;
        if read == 0 {
            return Ok(None);
        }
        self.offset += read as u64;
        self.number += 1;
        if self.buffer.last() == Some(&b'\n') {
            self.buffer.pop();
            if self.buffer.last() == Some(&b'\r') {
                self.buffer.pop();
            }
        } else if read == MAX_LINE_BYTES {
            if self.buffer.contains(&0) {
                return Ok(Some(Line::Binary));
            }
            self.skip_line()?;
            return Ok(Some(Line::TooLong));
        }
        Ok(Some(Line::Text(String::from_utf8_lossy(&self.buffer))))
    }

    fn skip_line(&mut self) -> io::Result<()> {
        loop {
            let available = self.reader.fill_buf()?;
            let (used, found) = match available.iter().position(|&byte| byte == b'\n') {
                Some(end) => (end + 1, true),
                None => (available.len(), available.is_empty()),
            };
            self.reader.consume(used);
            self.offset += used as u64;
            if found {
                return Ok(());
            }
        }
    }
}
