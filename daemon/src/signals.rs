//! Turns signals into bytes on a socket: a signal handler may do little else, and the event loop reads sockets anyway.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;
use std::io;
use std::os::unix::net::UnixStream;
use tokio::io::AsyncReadExt;

/// Signal handlers, and the sockets to which they write. Create this first: a SIGTERM before its handler is installed would kill
/// the daemon during its start.
#[derive(Debug)]
pub struct Signals {
    end: UnixStream,
    reload: UnixStream,
}

impl Signals {
    /// Installs the handlers.
    ///
    /// # Errors
    /// Errors of creating sockets or handlers.
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

    /// Returns two streams of events: requests to end, and requests to reload the configuration.
    ///
    /// # Errors
    /// Errors of registering the sockets with the event loop.
    pub fn listen(self) -> io::Result<(Pulse, Pulse)> {
        let pulse = |stream| tokio::net::UnixStream::from_std(stream).map(Pulse);
        Ok((pulse(self.end)?, pulse(self.reload)?))
    }
}

/// Stream of events without data. All events of a stream have the same meaning.
#[derive(Debug)]
pub struct Pulse(tokio::net::UnixStream);

impl Pulse {
    /// Waits for the next event. Several events since the last call count as one.
    pub(crate) async fn next(&mut self) {
        let mut bytes = [0; 16];
        if !matches!(self.0.read(&mut bytes).await, Ok(read) if read > 0) {
            // Not reached while the process lives, because the handler keeps the other end open.
            std::future::pending::<()>().await;
        }
    }

    /// Returns a stream and the socket that sends events to it, for tests.
    ///
    /// # Errors
    /// Errors of creating the sockets.
    pub fn pair() -> io::Result<(UnixStream, Pulse)> {
        let (sender, receiver) = UnixStream::pair()?;
        receiver.set_nonblocking(true)?;
        Ok((sender, Pulse(tokio::net::UnixStream::from_std(receiver)?)))
    }
}
