//! Output of documents: to standard output, formatted for a terminal or a pipe, or to a file.

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

/// Returns columns and rows of the terminal; `None` if the output is not a terminal or does not report them.
pub(crate) fn size() -> Option<(usize, usize)> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then(|| (size.ws_col.into(), size.ws_row.into()))
}

/// Returns the width of the terminal in columns; `None` if the output is not a terminal.
pub(crate) fn width() -> Option<usize> {
    size().map(|(width, _)| width)
}

pub(crate) fn unicode() -> bool {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes a document to a file or to standard output. A file is written atomically. Binary documents are not written to a
/// terminal.
pub(crate) fn deliver(bytes: &[u8], output: &Output) -> Result<()> {
    let is_text = std::str::from_utf8(bytes).is_ok() && !bytes.starts_with(b"%PDF");
    if output.path().is_none() && !is_text && io::stdout().is_terminal() {
        bail!("this cannot be shown on a terminal: give a file (-o FILE), or redirect it");
    }
    deliver_by(&|out| out.write_all(bytes), output)
}

/// Like [`deliver`], for a document that is produced while it is written.
pub(crate) fn deliver_by(write: &dyn Fn(&mut dyn Write) -> io::Result<()>, output: &Output) -> Result<()> {
    let Some(path) = output.path() else {
        let mut out = BufWriter::new(io::stdout().lock());
        write(&mut out)?;
        out.flush()?;
        return Ok(());
    };
    fill_file(path, write, output.force).with_context(|| path.display().to_string())
}

fn fill_file(path: &Path, write: &dyn Fn(&mut dyn Write) -> io::Result<()>, force: bool) -> Result<()> {
    let fill = |file: File| -> Result<()> {
        let mut out = BufWriter::new(file);
        write(&mut out)?;
        out.flush().map_err(Into::into)
    };
    // A link is followed. A pipe or device cannot be replaced and is written directly.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let there = fs::metadata(&target).ok();
    match &there {
        Some(there) if there.is_dir() => bail!("is a folder: name a file in it"),
        Some(there) if !there.is_file() => {
            return fill(OpenOptions::new().write(true).open(&target)?);
        }
        Some(_) if !force => return Err(exists()),
        _ => {}
    }
    let beside = Beside::of(&target)?;
    let file = File::create_new(&beside.0)?;
    if let Some(there) = there {
        file.set_permissions(there.permissions())?;
    }
    fill(file)?;
    if force {
        fs::rename(&beside.0, &target)?;
        return Ok(());
    }
    match renameat_with(CWD, &beside.0, CWD, &target, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::EXIST) => Err(exists()),
        // The file system does not support this flag. The file did not exist at the check above.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            fs::rename(&beside.0, &target).map_err(Into::into)
        }
        Err(error) => Err(io::Error::from(error).into()),
    }
}

fn exists() -> anyhow::Error {
    anyhow::anyhow!("is there already: give another name, or --force to replace it")
}

/// A temporary file next to the target. It is deleted unless it was renamed to the target.
struct Beside(PathBuf);

impl Beside {
    fn of(target: &Path) -> Result<Self> {
        let name = target.file_name().context("names no file")?;
        // The target's name may have the maximum length of the file system already.
        let kept: String = name.to_string_lossy().chars().take(32).collect();
        Ok(Beside(target.with_file_name(format!(".{kept}.{}.part", std::process::id()))))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0); // does not exist after the rename
    }
}

/// Prints an error on standard error, with causes that its text does not contain yet, and returns the exit code. The text is
/// cleaned, because names in it may be untrusted.
pub(crate) fn complain(error: &anyhow::Error) -> u8 {
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

/// Prints an argument error or help. Errors are cleaned, because a file name among the arguments may come from a shell pattern
/// and thus from another user.
pub(crate) fn explain(help_or_error: &clap::Error) {
    let is_harmless =
        |argument: std::ffi::OsString| argument.to_str().is_some_and(|text| escape(text) == *text);
    if !help_or_error.use_stderr() || std::env::args_os().all(is_harmless) {
        let _ = help_or_error.print();
        return;
    }
    let text = help_or_error.render().to_string();
    let lines: Vec<String> = text.trim_end().lines().map(escape).collect();
    let _ = writeln!(io::stderr(), "{}", lines.join("\n"));
}

/// Returns whether the reader of the output has closed the pipe.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(broken)
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
        assert!(write_file(&dir.join("no/such"), b"", true).is_err());
        write_file(Path::new("/dev/null"), b"gone", false).expect("a device takes it");
        assert_eq!(fs::read_dir(&dir).expect("a folder").count(), 2, "nothing is left beside them");
        fs::remove_dir_all(&dir).expect("removed");
    }
}
