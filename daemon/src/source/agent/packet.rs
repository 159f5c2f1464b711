//! Reads one packet and the descriptors sent with it from the socket.

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Maximum number of bytes of an accepted packet; agents send less than 60 KiB.
pub(crate) const MAX_PACKET_BYTES: usize = 64 << 10;

/// Maximum number of descriptors received with a packet; the kernel closes further ones.
const MAX_FDS: usize = 2;

#[derive(Debug, Default)]
pub(crate) struct Packet {
    /// Length of the data in bytes; 0 means that the peer has closed the connection.
    pub len: usize,
    /// Whether the packet was longer than the buffer and was truncated.
    pub cut: bool,
    /// Descriptors received with the packet (close-on-exec). Dropping them closes them.
    pub fds: Vec<OwnedFd>,
    /// Whether the peer sent more descriptors than [`MAX_FDS`].
    pub more_fds: bool,
    /// Whether this process had no free descriptor for a received one.
    pub no_fds: bool,
}

/// Reads one packet.
/// Errors: `WouldBlock` if no packet has arrived, and other errors of recvmsg.
pub(crate) fn receive(stream: &UnixStream, buffer: &mut [u8]) -> io::Result<Packet> {
    stream.try_io(Interest::READABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let message = recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags)?;
        let mut packet = Packet {
            len: message.bytes,
            cut: message.flags.contains(ReturnFlags::TRUNC),
            more_fds: message.flags.contains(ReturnFlags::CTRUNC),
            ..Packet::default()
        };
        for message in ancillary.drain() {
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
