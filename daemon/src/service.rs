//! Connection to the service manager (systemd), if there is one. systemd gets notifications of the daemon's state, and keeps
//! agents' connections for the next daemon.

use crate::aggregator::SnapshotReader;
use crate::clock;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, sendmsg_addr, socket_with,
};
use sd_notify::NotifyState;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// Number of descriptors that are stored under one name.
pub(crate) const KEPT: usize = 3;
/// Delays before each attempt to send a message, in ms. systemd's socket holds few unread messages.
const RETRY_DELAYS_MS: [u64; 6] = [0, 2, 10, 50, 200, 800];

/// Sends a notification to systemd. A failure is only logged.
pub(crate) fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "systemd cannot be notified");
    }
}

/// Sends the watchdog notification while the ledger works, with a short status. Problems of the sources or the disk do not
/// trigger a restart. A stalled ledger does, even if everything else works.
pub(crate) async fn watchdog(reader: SnapshotReader, status: impl Fn() -> String) {
    let timeout = sd_notify::watchdog_enabled().unwrap_or(Duration::from_secs(30));
    loop {
        // The status must be one line: a library's text could contain line breaks, and systemd takes each line for a message.
        let status = status().replace(char::is_control, " ");
        let stalled = Duration::from_nanos(clock::now_ns().saturating_sub(reader.ticked_ns()));
        if stalled < timeout / 2 {
            notify(&[NotifyState::Watchdog, NotifyState::Status(&status)]);
        } else {
            tracing::error!(still = ?stalled, "the ledger has stalled");
        }
        tokio::time::sleep(timeout / 4).await;
    }
}

/// Asks systemd to store these descriptors and to pass them to the next daemon. Returns whether the request was sent. systemd
/// keeps them even if the other end is closed, because unread data must still be read.
pub(crate) async fn keep(name: &str, fds: &[BorrowedFd<'_>; KEPT]) -> bool {
    send_with_retries(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}\n"), fds).await
}

/// Asks systemd to remove the descriptors that are stored under a name.
pub(crate) async fn forget(name: &str) {
    send_with_retries(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"), &[]).await;
}

async fn send_with_retries(message: &str, fds: &[BorrowedFd<'_>]) -> bool {
    let mut result = Ok(());
    for wait_ms in RETRY_DELAYS_MS {
        if wait_ms > 0 {
            tokio::time::sleep(Duration::from_millis(wait_ms)).await;
        }
        result = send(message, fds);
        if !result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            break;
        }
    }
    if let Err(error) = &result {
        tracing::debug!(%error, words = message, "systemd cannot be notified");
    }
    result.is_ok()
}

/// Sends one message to systemd without waiting. sd_notify could send descriptors only with a further dependency.
fn send(message: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let path = std::env::var_os("NOTIFY_SOCKET").ok_or(Errno::NOTCONN)?;
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(path.as_bytes())?,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KEPT))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::MSGSIZE.into());
    }
    sendmsg_addr(&socket, &address, &[IoSlice::new(message.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
