//! Opens input files and reads their lines in bounded memory. The files may be damaged or hostile.

use gpumem_model::units::plural;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Number of bytes at the start of a file from which the format is recognised. Real training logs have some 100 KB of other text
/// before the first record.
pub const HEAD_BYTES: usize = 1 << 20;
/// Maximum length of a line in bytes; a longer line is skipped.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Maximum number of bytes of a longer line that are skipped. If the end of the line does not follow within them, reading stops.
const MAX_SKIP_BYTES: u64 = 256 << 20;

/// Why a file cannot be read as a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {}", why_not_open(path, source))]
    Open { path: PathBuf, source: io::Error },
    /// The path is a directory or another special file.
    #[error("{path}: is a {what}, not a file; give the recording or log itself")]
    NotAFile { path: PathBuf, what: &'static str },
    #[error("{path}: is empty; a recording begins with the letters GPUMEMR, a log has lines")]
    Empty { path: PathBuf },
    #[error("{path}: {what}; the known formats are: {known}")]
    Unrecognised { path: PathBuf, what: String, known: String },
    /// The file contains no record of the format that was given or guessed.
    #[error("{path}: no {format} record in {}; one looks like: {example}", plural(*lines, "line"))]
    NothingFound { path: PathBuf, format: &'static str, lines: u64, example: &'static str },
    /// The file can be read, but it lacks the data that a run needs.
    #[error("{path}: {what}")]
    Unsuitable { path: PathBuf, what: String },
    /// The text is not UTF-8, but can be converted.
    #[error("{path}: is {encoding} text and must be UTF-8; convert it: iconv -f {encoding} -t UTF-8")]
    Encoding { path: PathBuf, encoding: &'static str },
    /// The bytes at `offset` are invalid in the file's binary format.
    #[error("{path}: at byte {offset}: {what}")]
    Malformed { path: PathBuf, offset: u64, what: String },
    #[error(
        "{path}: recording of format version {found}; this program reads version {supported}: use the gpumemctl of the agent that wrote it"
    )]
    Version { path: PathBuf, found: u16, supported: u16 },
    #[error("{path}: damaged at byte {offset}: {what}")]
    Damaged { path: PathBuf, offset: u64, what: String },
    #[error(
        "{path}: run of format {found}; this program reads up to {supported}: use a gpumemctl at least as new as the one that exported it"
    )]
    Newer { path: PathBuf, found: u64, supported: u64 },
    #[error("{path}: at byte {offset}: {source}")]
    Read { path: PathBuf, offset: u64, source: io::Error },
}

/// An open file whose beginning has been read and checked.
pub struct Input {
    /// Path of the file as the user gave it.
    pub path: PathBuf,
    head: Vec<u8>,
    rest: Box<dyn BufRead + Send>,
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input").field("path", &self.path).finish_non_exhaustive()
    }
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
        Input::new(path, BufReader::with_capacity(1 << 18, file))
    }

    /// Reads the content from `reader`; `path` is the file's name in messages.
    pub fn new(path: &Path, reader: impl BufRead + Send + 'static) -> Result<Self, Error> {
        let mut rest: Box<dyn BufRead + Send> = Box::new(reader);
        let mut head = Vec::new();
        let read = rest.by_ref().take(HEAD_BYTES as u64).read_to_end(&mut head);
        read.map_err(|source| Error::Read { path: path.into(), offset: 0, source })?;
        // Windows editors may put a byte order mark before UTF-8; no format has one.
        if head.starts_with(b"\xef\xbb\xbf") {
            head.drain(..3);
        }
        if head.is_empty() {
            return Err(Error::Empty { path: path.into() });
        }
        if let Some(encoding) = utf16_encoding(&head) {
            return Err(Error::Encoding { path: path.into(), encoding });
        }
        Ok(Input { path: path.into(), head, rest })
    }

    /// Returns the first bytes, at most [`HEAD_BYTES`].
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Describes the type of a file that matches no format, for messages.
    pub fn describe(&self) -> String {
        let known: [(&[u8], &str); 9] = [
            (b"\x7fELF", "a program or library (ELF)"),
            (b"\x1f\x8b", "compressed (gzip): unpack it first"),
            (b"\x28\xb5\x2f\xfd", "compressed (zstd): unpack it first"),
            (b"\xfd7zXZ", "compressed (xz): unpack it first"),
            (b"BZh", "compressed (bzip2): unpack it first"),
            (b"PK\x03\x04", "a zip archive: unpack it first"),
            (b"SQLite format 3", "an SQLite database; a run store is read with --store"),
            (b"\x80\x04", "a Python pickle, and no snapshot of PyTorch's memory"),
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
            None => "is text in which no line has a known format".into(),
        }
    }

    /// Returns a reader of the whole content, from the first byte.
    pub fn into_reader(self) -> impl BufRead + Send {
        io::Cursor::new(self.head).chain(self.rest)
    }
}

/// Returns why a file cannot be opened, and what would be right.
fn why_not_open(path: &Path, source: &io::Error) -> String {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = parent.display();
    let right = "give a recording, log, snapshot or exported run; gpumemctl runs lists the stored runs";
    match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory if parent.is_dir() => {
            format!("no such file in the folder {folder}; {right}")
        }
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            format!("no such file, because {folder} is not a folder; {right}")
        }
        // Tags, paths and command lines in a recording are for its owner: access is advised for one user, not for all.
        io::ErrorKind::PermissionDenied => {
            "permission denied: its owner or an administrator can give you access (setfacl -m u:NAME:r on the file, u:NAME:x on its folders)".to_owned()
        }
        _ => source.to_string(),
    }
}

/// Returns the name of the encoding if the text is UTF-16. Recognises its byte order mark, or the zero bytes of ASCII letters.
fn utf16_encoding(head: &[u8]) -> Option<&'static str> {
    if head.starts_with(&[0xFF, 0xFE]) || head.starts_with(&[0xFE, 0xFF]) {
        return Some("UTF-16");
    }
    match head.first_chunk::<6>().map(|head| head.map(|byte| byte != 0)) {
        Some([true, false, true, false, true, false]) => Some("UTF-16LE"),
        Some([false, true, false, true, false, true]) => Some("UTF-16BE"),
        _ => None,
    }
}

/// A line of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// The line without its end. A byte that is not UTF-8 is escaped, such as `\xE9`, so that different names stay different.
    Text(std::borrow::Cow<'a, str>),
    /// The line is longer than 1 MiB and was skipped. The next line follows.
    TooLong,
    /// The line has no end within 256 MiB, as in a hole of a sparse file. Callers stop here, because reading on would take too
    /// long.
    Endless,
}

fn text(line: &[u8]) -> std::borrow::Cow<'_, str> {
    use std::fmt::Write;
    if let Ok(text) = std::str::from_utf8(line) {
        return text.into();
    }
    let mut escaped = String::new();
    for chunk in line.utf8_chunks() {
        escaped.push_str(chunk.valid());
        for byte in chunk.invalid() {
            let _ = write!(escaped, "\\x{byte:02X}");
        }
    }
    escaped.into()
}

/// Reads lines of an arbitrary file in bounded memory.
#[derive(Debug)]
pub struct Lines<R> {
    reader: R,
    buffer: Vec<u8>,
    /// Number of bytes consumed.
    pub offset: u64,
}

impl<R: BufRead> Lines<R> {
    pub fn new(reader: R) -> Self {
        Lines { reader, buffer: Vec::new(), offset: 0 }
    }

    /// Returns the next line, or `None` at the end.
    pub fn next_line(&mut self) -> io::Result<Option<Line<'_>>> {
        self.buffer.clear();
        let read = self.reader.by_ref().take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut self.buffer)?;
        if read == 0 {
            return Ok(None);
        }
        self.offset += read as u64;
        if self.buffer.last() == Some(&b'\n') {
            self.buffer.pop();
            if self.buffer.last() == Some(&b'\r') {
                self.buffer.pop();
            }
        } else if read == MAX_LINE_BYTES {
            let skipped = self.reader.by_ref().take(MAX_SKIP_BYTES).skip_until(b'\n')? as u64;
            self.offset += skipped;
            return Ok(Some(if skipped < MAX_SKIP_BYTES { Line::TooLong } else { Line::Endless }));
        }
        Ok(Some(Line::Text(text(&self.buffer))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8]) -> Vec<String> {
        let mut lines = Lines::new(bytes);
        let mut found = Vec::new();
        while let Some(line) = lines.next_line().expect("memory") {
            found.push(match line {
                Line::Text(text) => text.into_owned(),
                Line::TooLong | Line::Endless => "too long".into(),
            });
        }
        found
    }

    #[test]
    fn access_to_a_file_is_given_to_one_user_only() {
        let (path, source) = ("train.gpumem".into(), io::ErrorKind::PermissionDenied.into());
        let message = Error::Open { path, source }.to_string();
        assert!(
            message.starts_with("train.gpumem: permission denied: its owner or an administrator"),
            "{message}"
        );
        assert!(message.contains("setfacl -m u:NAME:r") && !message.contains("chmod"), "{message}");
    }

    #[test]
    fn lines_of_any_kind_are_read() {
        assert_eq!(lines(b"a\r\nb\n\nc"), ["a", "b", "", "c"]);
        assert_eq!(lines(b"caf\xe9\ncaf\xe8\n"), ["caf\\xE9", "caf\\xE8"], "two names stay two");
        assert_eq!(lines(b""), Vec::<String>::new());
    }

    #[test]
    fn what_follows_a_line_without_end_is_read() {
        let mut bytes = vec![0; MAX_LINE_BYTES * 3];
        bytes.extend_from_slice(b"\nafter\n");
        assert_eq!(lines(&bytes), ["too long", "after"]);
        let exact = [vec![b'x'; MAX_LINE_BYTES - 1], b"\nafter".to_vec()].concat();
        assert_eq!(lines(&exact)[1], "after");
    }

    #[test]
    fn utf_16_is_recognised_without_its_mark() {
        assert_eq!(utf16_encoding(b"[\0m\0e\0m\0"), Some("UTF-16LE"));
        assert_eq!(utf16_encoding(b"\0[\0m\0e\0m"), Some("UTF-16BE"));
        assert_eq!(utf16_encoding(b"[mem] Allocate"), None);
    }
}
