//! Reasons for refusing a peer, and for ending an agent's connection.

use super::frames::Fault;
use super::memory;
use super::packet::MAX_PACKET_BYTES;
use super::peer::IdentityError;
use crate::os::is_out_of_descriptors;
use crate::stats::Count;
use gpumem_wire::MAJOR;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("it sent no hello in {0:?}")]
    Silent(Duration),
    #[error("it sent no hello while too many other peers had not sent one")]
    Crowd,
    #[error("it closed before its hello")]
    EarlyEnd,
    #[error("its first packet is not a hello{0}")]
    NoHello(String),
    #[error("it uses protocol version {0}, this daemon uses {MAJOR}")]
    Version(u64),
    #[error("{0}")]
    Identity(#[from] IdentityError),
    #[error("it sent {0} descriptors instead of one")]
    Descriptors(usize),
    #[error("the daemon has no free descriptor for its memory")]
    NoDescriptor,
    #[error("{0}")]
    Memory(#[from] memory::MemoryError),
    #[error("all connections are taken")]
    NoSlot,
    #[error("{0}")]
    System(#[from] std::io::Error),
    #[error("the daemon is ending")]
    ShuttingDown,
}

impl Refusal {
    pub(super) fn count(&self) -> Option<Count> {
        Some(match self {
            refusal if refusal.is_out_of_descriptors() => Count::AcceptFailures,
            Refusal::Silent(_) => Count::RefusedSilent,
            Refusal::Crowd => Count::RefusedWaiting,
            Refusal::EarlyEnd | Refusal::System(_) => Count::RefusedEarlyEnd,
            Refusal::NoHello(_) => Count::RefusedHello,
            Refusal::Version(_) => Count::RefusedVersion,
            Refusal::Identity(IdentityError::Gone(_)) => Count::RefusedGone,
            Refusal::Identity(_) => Count::RefusedIdentity,
            Refusal::Descriptors(_) => Count::RefusedDescriptors,
            Refusal::NoDescriptor => Count::AcceptFailures,
            Refusal::Memory(memory::MemoryError::TooLarge(..)) => Count::RefusedSize,
            Refusal::Memory(_) => Count::RefusedMemory,
            Refusal::NoSlot => Count::RefusedFull,
            Refusal::ShuttingDown => return None,
        })
    }

    /// Returns whether the daemon had too few descriptors, so that the peer is not at fault.
    pub(super) fn is_out_of_descriptors(&self) -> bool {
        match self {
            Refusal::NoDescriptor => true,
            Refusal::System(error) | Refusal::Identity(IdentityError::System(error)) => {
                is_out_of_descriptors(error)
            }
            _ => false,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionEnd {
    #[error("it closed the connection")]
    Closed,
    #[error("the process ended")]
    Gone,
    #[error("{0}")]
    Fault(Fault),
    #[error("a packet is longer than {MAX_PACKET_BYTES} bytes")]
    Oversize,
    #[error("it sent descriptors after its hello message")]
    Descriptors,
    #[error("{0}")]
    System(std::io::Error),
    #[error("the daemon is ending")]
    ShuttingDown,
}

impl ConnectionEnd {
    /// Returns the counter for this reason if only a broken or hostile peer causes it; otherwise `None`.
    pub(super) fn count(&self) -> Option<Count> {
        match self {
            ConnectionEnd::Fault(Fault::Framing(_)) => Some(Count::DroppedFraming),
            ConnectionEnd::Fault(Fault::Payload(_)) => Some(Count::DroppedPayload),
            ConnectionEnd::Fault(Fault::Time { .. }) => Some(Count::DroppedTime),
            ConnectionEnd::Oversize => Some(Count::DroppedOversize),
            ConnectionEnd::Descriptors => Some(Count::DroppedDescriptors),
            ConnectionEnd::Closed
            | ConnectionEnd::Gone
            | ConnectionEnd::System(_)
            | ConnectionEnd::ShuttingDown => None,
        }
    }
}
