//! One packet off the socket, with what came beside it.

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Longest packet that is taken: senders stay below 60 KiB.
pub(crate) const MAX_PACKET_BYTES: usize = 64 << 10;

/// Descriptors for which there is room; the kernel closes those beyond.
const MAX_FDS: usize = 2;

/// What came.
#[derive(Debug, Default)]
pub(crate) struct Packet {
    /// Length of the bytes; 0: the peer has closed.
    pub len: usize,
    /// It was longer than the buffer.
    pub cut: bool,
    /// Descriptors, close-on-exec. Whoever does not want them drops them, which closes them.
    pub fds: Vec<OwnedFd>,
    /// There were more of them than there was room.
    pub more_fds: bool,
    /// This process has no descriptors left for what came.
    pub no_fds: bool,
}

/// Takes one packet, if there is one.
///
/// # Errors
/// `WouldBlock`, and what the system says.
pub(crate) fn receive(stream: &UnixStream, buffer: &mut [u8]) -> io::Result<Packet> {
    stream.try_io(Interest::READABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let message = recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut beside, flags)?;
        let mut packet = Packet {
            len: message.bytes,
            cut: message.flags.contains(ReturnFlags::TRUNC),
            more_fds: message.flags.contains(ReturnFlags::CTRUNC),
            ..Packet::default()
        };
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                packet.fds.extend(fds);
            }
        }
        if packet.more_fds && packet.fds.len() < MAX_FDS {
            (packet.more_fds, packet.no_fds) = (false, true);
        }
        Ok(packet)
    })
}
