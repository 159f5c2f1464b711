//! Switches the terminal to raw mode and to its alternate screen, and restores its state afterwards, also after a panic.

use anyhow::{Context, Result};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Escape sequences: alternate screen, no cursor, no automatic line wrap.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[?7l";
/// Escape sequences that revert [`ENTER`].
const LEAVE: &[u8] = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l";

/// The terminal's state to restore; `None` while `top` has not changed it. It is global, because the panic hook needs it too.
static SAVED: Mutex<Option<Saved>> = Mutex::new(None);

struct Saved {
    input: OwnedFd,
    output: File,
    modes: Termios,
}

fn saved() -> MutexGuard<'static, Option<Saved>> {
    SAVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the source of keys: standard input, or the terminal itself if standard input is redirected.
pub(crate) fn input() -> Result<File> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Ok(File::from(stdin.as_fd().try_clone_to_owned()?));
    }
    File::open("/dev/tty").context("no terminal to type at (/dev/tty); --once prints one frame")
}

pub(crate) fn output() -> Result<File> {
    Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?))
}

/// The terminal while it is in raw mode; dropping it restores the terminal.
pub(crate) struct Terminal {
    input: OwnedFd,
    output: File,
}

impl Terminal {
    /// Switches the terminal of `input` and `output`.
    pub(crate) fn open(input: &impl AsFd, output: File) -> Result<Self> {
        let terminal = Terminal { input: input.as_fd().try_clone_to_owned()?, output };
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            previous(panic);
        }));
        terminal.enter()?;
        Ok(terminal)
    }

    /// Enables raw mode: keys arrive at once and without echo. Keys such as Ctrl-C still send signals.
    pub(crate) fn enter(&self) -> Result<()> {
        let modes = tcgetattr(&self.input).context("the terminal's modes")?;
        let mut ours = modes.clone();
        ours.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        ours.special_codes[SpecialCodeIndex::VMIN] = 1;
        ours.special_codes[SpecialCodeIndex::VTIME] = 0;
        // After SIGSTOP the state was not restored, so the terminal may be in raw mode already. The first saved state is kept.
        if saved().is_none() {
            let (input, output) = (self.input.try_clone()?, self.output.try_clone()?);
            *saved() = Some(Saved { input, output, modes });
        }
        tcsetattr(&self.input, OptionalActions::Drain, &ours).context("the terminal's modes")?;
        Ok(self.write(ENTER)?)
    }

    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        (&self.output).write_all(bytes)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal's state, if it was changed.
pub(crate) fn restore() {
    if let Some(Saved { input, mut output, modes }) = saved().take() {
        // Writing fails only if the terminal was closed.
        let _ = output.write_all(LEAVE);
        let _ = tcsetattr(&input, OptionalActions::Drain, &modes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use std::io::Read;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn a_panic_in_any_thread_leaves_the_terminal_as_it_was() {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&master).expect("ours");
        unlockpt(&master).expect("open");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let path = std::path::Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
        let slave = File::options().read(true).write(true).open(path).expect("its other end");
        let modes = |of: &File| tcgetattr(of).expect("modes").local_modes;
        let before = modes(&slave);
        let terminal = Terminal::open(&slave, slave.try_clone().expect("a copy")).expect("taken");
        assert_ne!(modes(&slave), before);
        let panicked = std::thread::spawn(|| panic!("on purpose")).join();
        assert!(panicked.is_err());
        assert_eq!(modes(&slave), before);
        let expected = [ENTER, LEAVE].concat();
        let mut written = vec![0; expected.len()];
        File::from(master).read_exact(&mut written).expect("text");
        assert_eq!(written, expected);
        drop(terminal);
    }
}
