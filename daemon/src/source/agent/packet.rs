//! Reads one packet with its descriptors from the socket.

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Longest accepted packet; agents send less than 60 KiB.
pub(crate) const MAX_PACKET_BYTES: usize = 64 << 10;

/// Room for descriptors; the kernel closes further ones.
const MAX_FDS: usize = 2;

#[derive(Debug, Default)]
pub(crate) struct Packet {
    /// Length of the data; 0: the peer has closed.
    pub len: usize,
    /// Whether it was longer than the buffer.
    pub cut: bool,
    /// Descriptors, close-on-exec. Dropping them closes them.
    pub fds: Vec<OwnedFd>,
    pub more_fds: bool,
    /// Whether this process had no free descriptors for them.
    pub no_fds: bool,
}

/// Reads one packet.
/// Errors: `WouldBlock` without a packet, and other errors of recvmsg.
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
