//! Signals, as bytes in a socket: a handler may do nothing else, and the loop reads sockets anyway.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;
use std::io;
use std::os::unix::net::UnixStream;
use tokio::io::AsyncReadExt;

/// The sockets that the handlers write to. Made before anything else: a SIGTERM that comes earlier than its
/// handler would kill the daemon in the middle of its start.
#[derive(Debug)]
pub struct Signals {
    end: UnixStream,
    reload: UnixStream,
}

impl Signals {
    /// Installs the handlers.
    ///
    /// # Errors
    /// What the system says.
    pub fn install() -> io::Result<Self> {
        let (end, ended) = UnixStream::pair()?;
        let (reload, reloaded) = UnixStream::pair()?;
        pipe::register(SIGTERM, ended.try_clone()?)?;
        pipe::register(SIGINT, ended)?;
        pipe::register(SIGHUP, reloaded)?;
        end.set_nonblocking(true)?;
        reload.set_nonblocking(true)?;
        Ok(Signals { end, reload })
    }

    /// Two streams of what was asked: to end, and to read the configuration again.
    ///
    /// # Errors
    /// What the system says.
    pub fn listen(self) -> io::Result<(Pulse, Pulse)> {
        let pulse = |stream| tokio::net::UnixStream::from_std(stream).map(Pulse);
        Ok((pulse(self.end)?, pulse(self.reload)?))
    }
}

/// Something that happens again and again.
#[derive(Debug)]
pub struct Pulse(tokio::net::UnixStream);

impl Pulse {
    /// Waits for the next time; several that came meanwhile are one.
    pub(crate) async fn next(&mut self) {
        let mut bytes = [0; 16];
        if !matches!(self.0.read(&mut bytes).await, Ok(read) if read > 0) {
            // The handler holds the other end for as long as the process lives.
            std::future::pending::<()>().await;
        }
    }

    /// One that happens when `sender` is written to: for tests.
    ///
    /// # Errors
    /// What the system says.
    pub fn pair() -> io::Result<(UnixStream, Pulse)> {
        let (sender, receiver) = UnixStream::pair()?;
        receiver.set_nonblocking(true)?;
        Ok((sender, Pulse(tokio::net::UnixStream::from_std(receiver)?)))
    }
}
