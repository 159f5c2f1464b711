//! Writes the output of commands to standard output or to a file, and errors to standard error.

use crate::exit;
use anyhow::{Context, Result, bail};
use clap::Args;
use gpumem_report::text::escape;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Output {
    /// Write to this file (-: standard output)
    #[arg(long = "output", short = 'o', value_name = "FILE", help_heading = "Output")]
    file: Option<PathBuf>,
    /// Replace an existing file
    #[arg(long, requires = "file", help_heading = "Output")]
    pub force: bool,
}

impl Output {
    pub(crate) fn path(&self) -> Option<&Path> {
        self.file.as_deref().filter(|path| *path != Path::new("-"))
    }
}

/// Returns columns and rows of the terminal; `None` if standard output is not a terminal, or one that does not report its size.
pub(crate) fn size() -> Option<(u16, u16)> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}

/// Returns the width of the terminal in columns; `None` as in [`size`].
pub(crate) fn width() -> Option<usize> {
    size().map(|(width, _)| width.into())
}

/// Returns whether the locale's encoding is UTF-8.
pub(crate) fn unicode() -> bool {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Writes a document to standard output, or to a file that appears only when it is complete. Terminals get no binary document.
pub(crate) fn deliver(bytes: &[u8], output: &Output) -> Result<()> {
    let is_text = std::str::from_utf8(bytes).is_ok() && !bytes.starts_with(b"%PDF");
    if output.path().is_none() && !is_text && io::stdout().is_terminal() {
        bail!(
            "this output is binary and cannot be shown on a terminal: give a file (-o FILE), or redirect it"
        );
    }
    deliver_stream(&|out| out.write_all(bytes), output)
}

type WriteDocument<'a> = &'a dyn Fn(&mut dyn Write) -> io::Result<()>;

/// Like [`deliver`], for a text document that `write` produces piece by piece.
pub(crate) fn deliver_stream(write: WriteDocument<'_>, output: &Output) -> Result<()> {
    let Some(path) = output.path() else {
        let mut out = BufWriter::new(io::stdout().lock());
        write(&mut out)?;
        return Ok(out.flush()?);
    };
    fill_file(path, write, output.force).with_context(|| path.display().to_string())
}

fn fill_file(path: &Path, write: WriteDocument<'_>, force: bool) -> Result<()> {
    let fill = |file: File| -> Result<()> {
        let mut out = BufWriter::new(file);
        write(&mut out)?;
        Ok(out.flush()?)
    };
    // If `path` is a symbolic link, the file that it names is replaced. A pipe or device is written directly.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let existing = fs::metadata(&target).ok();
    match &existing {
        Some(existing) if existing.is_dir() => bail!("is a folder: name a file in it"),
        Some(existing) if !existing.is_file() => {
            return fill(OpenOptions::new().write(true).open(&target)?);
        }
        Some(_) if !force => return Err(exists()),
        _ => {}
    }
    let temporary = TemporaryFile::for_target(&target)?;
    let file = File::create_new(&temporary.0).map_err(|error| cannot_create(&target, error))?;
    if let Some(existing) = existing {
        file.set_permissions(existing.permissions())?;
    }
    fill(file)?;
    if force {
        return Ok(fs::rename(&temporary.0, &target)?);
    }
    match renameat_with(CWD, &temporary.0, CWD, &target, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::EXIST) => Err(exists()),
        // The file system does not support NOREPLACE. The target did not exist at the check above, so the temporary file is renamed
        // without this flag.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => Ok(fs::rename(&temporary.0, &target)?),
        Err(error) => Err(io::Error::from(error).into()),
    }
}

/// Returns why no file can be created beside `target`, and what would be right.
fn cannot_create(target: &Path, error: io::Error) -> anyhow::Error {
    let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = parent.display();
    match error.kind() {
        io::ErrorKind::NotFound => {
            anyhow::anyhow!("{folder} does not exist: make it, or name a file in another folder")
        }
        io::ErrorKind::NotADirectory => {
            // A part of the path is a file: the longest that exists.
            let file = parent.ancestors().find(|path| path.exists()).unwrap_or(parent).display();
            anyhow::anyhow!("{file} is not a folder: name a file in another folder")
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            anyhow::anyhow!("you may not write in {folder}: name a file in another folder")
        }
        _ => error.into(),
    }
}

fn exists() -> anyhow::Error {
    anyhow::anyhow!("exists already: give another name, or --force to replace it")
}

/// Path of a temporary file in the folder of the target. The file is deleted unless it was renamed to the target.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn for_target(target: &Path) -> Result<Self> {
        let name = target.file_name().context("names no file")?;
        // The target's name may already have the maximum length of the file system.
        let start: String = name.to_string_lossy().chars().take(32).collect();
        Ok(TemporaryFile(target.with_file_name(format!(".{start}.{}.part", std::process::id()))))
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0); // fails after the rename, because the path is gone
    }
}

/// Prints an error on standard error, with causes that its text does not contain yet. Returns the exit code. The text is
/// escaped, because names in it may be untrusted.
pub(crate) fn print_error(error: &anyhow::Error) -> u8 {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    let lines: Vec<String> = text.lines().map(escape).collect();
    // Standard error may be closed or full; the exit code still reports the failure.
    let _ = writeln!(io::stderr(), "gpumemctl: {}", lines.join("\n"));
    exit::code(error)
}

/// Prints an argument error or help. Errors are escaped, because a shell pattern may expand to file names of other users.
pub(crate) fn print_parse_error(help_or_error: &clap::Error) {
    let is_clean = |argument: std::ffi::OsString| argument.to_str().is_some_and(|text| escape(text) == *text);
    if !help_or_error.use_stderr() || std::env::args_os().all(is_clean) {
        let _ = help_or_error.print();
        return;
    }
    let text = help_or_error.render().to_string();
    let lines: Vec<String> = text.trim_end().lines().map(escape).collect();
    let _ = writeln!(io::stderr(), "{}", lines.join("\n"));
}

/// Returns whether the reader of the output has closed the pipe.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_file(path: &Path, bytes: &[u8], force: bool) -> Result<()> {
        fill_file(path, &|out| out.write_all(bytes), force)
    }

    #[test]
    fn a_file_is_there_whole_and_none_is_replaced_unasked() {
        let dir = std::env::temp_dir().join(format!("gpumemctl-output-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a folder");
        let path = dir.join("n".repeat(255));
        write_file(&path, b"first", false).expect("written");
        let refused = write_file(&path, b"second", false).unwrap_err();
        assert!(refused.to_string().contains("--force"), "{refused}");
        assert_eq!(fs::read(&path).expect("there"), b"first");
        write_file(&path, b"second", true).expect("replaced");
        assert_eq!(fs::read(&path).expect("there"), b"second");

        let link = dir.join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        write_file(&link, b"third", true).expect("replaced");
        assert_eq!(fs::read(&path).expect("there"), b"third", "what the link names");
        assert!(fs::symlink_metadata(&link).expect("there").is_symlink());

        assert!(write_file(&dir, b"", true).unwrap_err().to_string().contains("folder"));
        let absent = write_file(&dir.join("no/such"), b"", true).unwrap_err().to_string();
        assert!(absent.contains("/no does not exist: make it, or name"), "{absent}");
        for below in ["such", "no/such"] {
            let in_file = write_file(&link.join(below), b"", true).unwrap_err().to_string();
            assert!(in_file.ends_with("/link is not a folder: name a file in another folder"), "{in_file}");
        }
        write_file(Path::new("/dev/null"), b"gone", false).expect("a device takes it");
        assert_eq!(fs::read_dir(&dir).expect("a folder").count(), 2, "nothing is left beside them");
        fs::remove_dir_all(&dir).expect("removed");
    }
}
