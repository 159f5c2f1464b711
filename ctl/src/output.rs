//! Where answers go: standard output, fitted to a terminal and plain in a pipe, or a file.

use crate::exit;
use anyhow::{Context, Result, bail};
use clap::Args;
use gpumem_report::text::clean;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Where a report goes.
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
    /// The file, unless it is standard output.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.file.as_deref().filter(|path| *path != Path::new("-"))
    }
}

/// Columns of the terminal; `None` when output is piped.
pub(crate) fn width() -> Option<usize> {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    terminal_size::terminal_size_of(&stdout).map(|(width, _)| usize::from(width.0))
}

/// Whether the user's locale has more characters than those of ASCII.
pub(crate) fn unicode() -> bool {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

/// Writes everything, now.
///
/// # Errors
/// What the system says, a closed pipe among it.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes a document where it was asked for: into a file, which is there whole or not at all, or to standard output. What
/// is no text goes to no terminal.
///
/// # Errors
/// The file is there already and was not meant, it cannot be written, or what the system says of standard output.
pub(crate) fn deliver(bytes: &[u8], output: &Output) -> Result<()> {
    let Some(path) = output.path() else {
        let is_text = std::str::from_utf8(bytes).is_ok() && !bytes.starts_with(b"%PDF");
        if !is_text && io::stdout().is_terminal() {
            bail!("this is no text for a terminal: give a file (-o FILE), or redirect it");
        }
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()?;
        return Ok(());
    };
    write_file(path, bytes, output.force).with_context(|| path.display().to_string())
}

/// The same of a text that is not made before it is written.
///
/// # Errors
/// As [`deliver`].
pub(crate) fn deliver_by(write: &dyn Fn(&mut dyn Write) -> io::Result<()>, output: &Output) -> Result<()> {
    let Some(path) = output.path() else {
        let mut out = BufWriter::new(io::stdout().lock());
        write(&mut out)?;
        out.flush()?;
        return Ok(());
    };
    fill_file(path, write, output.force).with_context(|| path.display().to_string())
}

fn write_file(path: &Path, bytes: &[u8], force: bool) -> Result<()> {
    fill_file(path, &|out| out.write_all(bytes), force)
}

fn fill_file(path: &Path, write: &dyn Fn(&mut dyn Write) -> io::Result<()>, force: bool) -> Result<()> {
    let fill = |file: File| -> Result<()> {
        let mut out = BufWriter::new(file);
        write(&mut out)?;
        out.flush().map_err(Into::into)
    };
    // A link is followed; a pipe or a device cannot be replaced, and takes what is written.
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
        // A file system that cannot refuse: it was looked at above.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            fs::rename(&beside.0, &target).map_err(Into::into)
        }
        Err(error) => Err(io::Error::from(error).into()),
    }
}

fn exists() -> anyhow::Error {
    anyhow::anyhow!("is there already: give another name, or --force to replace it")
}

/// A file beside the one that is meant, gone when it has not become that one.
struct Beside(PathBuf);

impl Beside {
    fn of(target: &Path) -> Result<Self> {
        let name = target.file_name().context("names no file")?;
        // A name may be as long as a file system allows.
        let kept: String = name.to_string_lossy().chars().take(32).collect();
        Ok(Beside(target.with_file_name(format!(".{kept}.{}.part", std::process::id()))))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0); // after a rename there is none
    }
}

/// Says on standard error what went wrong, with causes that are not said already, and returns the exit
/// code. Names in it may come from strangers.
pub(crate) fn complain(error: &anyhow::Error) -> u8 {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    let lines: Vec<String> = text.lines().map(clean).collect();
    // Standard error may be full or closed: the exit code still tells.
    let _ = writeln!(io::stderr(), "gpumemctl: {}", lines.join("\n"));
    exit::code(error)
}

/// Says what is wrong with the arguments, or what was asked of them. A file's name may have come among them by a pattern of the shell,
/// from whoever named the file.
pub(crate) fn explain(help_or_error: &clap::Error) {
    let is_harmless =
        |argument: std::ffi::OsString| argument.to_str().is_some_and(|text| clean(text) == *text);
    if !help_or_error.use_stderr() || std::env::args_os().all(is_harmless) {
        let _ = help_or_error.print();
        return;
    }
    let text = help_or_error.render().to_string();
    let lines: Vec<String> = text.trim_end().lines().map(clean).collect();
    let _ = writeln!(io::stderr(), "{}", lines.join("\n"));
}

/// Whether the reader of our output has gone.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(broken)
}

#[cfg(test)]
mod tests {
    use super::*;

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
