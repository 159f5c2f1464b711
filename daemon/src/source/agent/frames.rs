//! Checks the frames of an agent's packet once, before anything else uses them: framing, record kinds, text and times. All other
//! rules belong to the ledger, which accepts any record that passes these checks.

use gpumem_wire::{Body, CodecError, Flags, MAX_TAG_BYTES, NONE_DEVICE, Record, SLOT_BYTES, Slot, frame};

/// How far a record's time may be ahead of the arrival of its packet, in ns. A peer that sends times in the far future would
/// make all later records look old.
const AHEAD_NS: u64 = 2_000_000_000;

/// Number of bytes allocated on a device after which NVML should be queried again.
const GROWTH_BYTES: u64 = 64 << 20;

/// Maximum number of device slots that an agent may name: more than any machine has, but few enough to bound the memory.
const MAX_DEVICES: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error("{0}")]
    Framing(frame::Error),
    /// A record of the kind with this number has invalid text or a tag that is too long.
    #[error("record kind {0} has an invalid payload")]
    Payload(u8),
    #[error("the time of a record of kind {kind} is {ahead_ms} ms later than the latest accepted time")]
    Time { kind: u8, ahead_ms: u64 },
}

/// Splits the claims in a hello (data that the process claims about itself) into the program's name and the others. The name is
/// used only if /proc does not have it.
pub(crate) fn split_program(claims: &str) -> (String, Option<&str>) {
    let program = claims.lines().find_map(|line| line.strip_prefix("comm="));
    let others = claims.split_inclusive('\n').filter(|line| !line.starts_with("comm="));
    (others.collect(), program)
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PacketCounts {
    /// Number of skipped records of kinds that this daemon does not know.
    pub unknown: u64,
    /// Number of skipped records of kinds that agents may not send.
    pub forbidden: u64,
    /// Number of skipped records: definitions of devices beyond the limit, or with another UUID for a known slot.
    pub devices: u64,
    /// Number of costly records: for each, the ledger walks most data of the process.
    pub costly: u64,
}

/// Whether agents may send records of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Permission {
    Allowed,
    Forbidden,
    /// The record's kind is unknown to this daemon.
    Unknown,
}

/// Returns for each record kind whether agents may send it. Kinds of the daemon's own sources, such as NVML samples, would let a
/// peer report about other processes. `Hello` comes once and is checked elsewhere.
const fn permissions() -> [Permission; 256] {
    let mut table = [Permission::Unknown; 256];
    let mut at = 0;
    while at < Body::KINDS.len() {
        let kind = Body::KINDS[at].1;
        table[kind as usize] = match kind {
            1 | 2 | 7 | 96..=127 => Permission::Forbidden,
            _ => Permission::Allowed,
        };
        at += 1;
    }
    table
}
static PERMISSIONS: [Permission; 256] = permissions();

const DEVICE: u8 = 3;
const TAG: u8 = 4;
const ALLOC_END: u8 = 16;
const ALLOC_FAILED: u8 = 19;
const VMM_CREATE: u8 = 32;
const CONTEXT_CREATE: u8 = 40;
const POOL_STATE: u8 = 25;
const DRIVER_EVENT: u8 = 64;
const RESYNC_BEGIN: u8 = 82;
const RESYNC_END: u8 = 83;

/// Checks the packets of one agent, and keeps what later packets depend on.
#[derive(Debug)]
pub(crate) struct PacketChecker {
    /// Highest sequence number received so far.
    pub last_seq: u64,
    /// Whether sequence numbers were skipped and no complete resync followed, or a resync is incomplete. Then the live table in
    /// the agent's memory has data that the received records lack.
    pub has_gaps: bool,
    /// Number of ns added to every time of the peer, because the peer may live in another time namespace.
    rebase_ns: i64,
    /// UUID of each device slot that the agent has defined.
    devices: [Option<[u8; 16]>; MAX_DEVICES],
    /// Number of bytes allocated on the device of each slot since NVML was last asked to query it.
    grown: [u64; MAX_DEVICES],
    /// Device slots (bits) on which so much was allocated that NVML should read them; cleared by [`PacketChecker::take_hints`].
    hints: u64,
}

impl PacketChecker {
    pub(crate) fn new(rebase_ns: i64) -> Self {
        let (devices, grown) = ([None; MAX_DEVICES], [0; MAX_DEVICES]);
        PacketChecker { last_seq: 0, has_gaps: false, rebase_ns, devices, grown, hints: 0 }
    }

    /// Checks a packet. Returns the frames that agents may send, with times converted to the daemon's clock.
    /// Errors: [`Fault`]: the packet is invalid as a whole.
    pub(crate) fn check(&mut self, packet: Vec<u8>, now_ns: u64) -> Result<(Vec<u8>, PacketCounts), Fault> {
        let mut counts = PacketCounts::default();
        let latest_ns = now_ns.saturating_add(AHEAD_NS);
        // Copy the packet only if something must be removed or changed; almost every packet is passed on unchanged.
        let mut out: Option<Vec<u8>> = (self.rebase_ns != 0).then(|| Vec::with_capacity(packet.len()));
        let mut rest = packet.as_slice();
        while let Some((slot, payload, after)) = frame::split_frame(rest).map_err(Fault::Framing)? {
            let whole = &rest[..rest.len() - after.len()];
            let keep = self.take(slot, payload, latest_ns, &mut counts)?;
            match (&mut out, keep) {
                (Some(out), true) => {
                    let at = out.len();
                    out.extend_from_slice(whole);
                    self.rebase(&mut out[at + frame::PREFIX_BYTES..]);
                }
                (None, false) => out = Some(packet[..packet.len() - rest.len()].to_vec()),
                _ => {}
            }
            rest = after;
        }
        Ok((out.unwrap_or(packet), counts))
    }

    /// Checks a record whose time may be at most `latest_ns`. Returns whether the record is passed on to the ledger.
    fn take(
        &mut self,
        slot: &Slot,
        payload: &[u8],
        latest_ns: u64,
        counts: &mut PacketCounts,
    ) -> Result<bool, Fault> {
        let kind = slot[60];
        let skipped = match PERMISSIONS[usize::from(kind)] {
            Permission::Allowed => None,
            Permission::Forbidden => Some(&mut counts.forbidden),
            Permission::Unknown => Some(&mut counts.unknown),
        };
        if let Some(skipped) = skipped {
            *skipped += 1;
            return Ok(false);
        }
        let time_ns = word(slot, 8).saturating_add_signed(self.rebase_ns);
        if time_ns > latest_ns {
            return Err(Fault::Time { kind, ahead_ms: (time_ns - latest_ns) / 1_000_000 });
        }
        if !payload.is_empty() {
            match Record::decode(slot, payload) {
                Err(CodecError::Payload(kind)) => return Err(Fault::Payload(kind)),
                _ if kind == TAG && payload.len() > MAX_TAG_BYTES => return Err(Fault::Payload(kind)),
                _ => {}
            }
        }
        if kind == DEVICE && !self.name_device(slot) {
            counts.devices += 1;
            return Ok(false);
        }
        let seq = word(slot, 0);
        if seq != 0 && !Flags(slot[62]).has(Flags::RESTATED) {
            self.has_gaps |= self.last_seq.checked_add(1) != Some(seq);
            self.last_seq = self.last_seq.max(seq);
        }
        match kind {
            RESYNC_BEGIN => self.has_gaps = true,
            RESYNC_END => self.has_gaps = false,
            _ => self.note_growth(kind, slot),
        }
        counts.costly += u64::from(is_costly(kind));
        Ok(true)
    }

    /// Stores the UUID that the agent gives a slot. Returns false if the slot has another UUID or is too high.
    fn name_device(&mut self, slot: &Slot) -> bool {
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&word(slot, 16).to_be_bytes());
        uuid[8..].copy_from_slice(&word(slot, 32).to_be_bytes());
        match self.devices.get_mut(usize::from(slot[61])) {
            Some(known) => *known.get_or_insert(uuid) == uuid,
            None => false,
        }
    }

    /// Handles records after which NVML's last reading of a device is outdated: marks the device for NVML to query.
    fn note_growth(&mut self, kind: u8, slot: &Slot) {
        let device = slot[61];
        if device == NONE_DEVICE || usize::from(device) >= MAX_DEVICES {
            return;
        }
        let grown = &mut self.grown[usize::from(device)];
        let is_outdated = match kind {
            CONTEXT_CREATE | DRIVER_EVENT | ALLOC_FAILED => true,
            ALLOC_END | VMM_CREATE | POOL_STATE => {
                *grown = grown.saturating_add(if kind == POOL_STATE { 0 } else { word(slot, 24) });
                *grown >= GROWTH_BYTES
            }
            _ => false,
        };
        if is_outdated {
            *grown = 0;
            self.hints |= 1 << device;
        }
    }

    /// Returns the UUIDs of devices that NVML should query, and forgets them.
    pub(crate) fn take_hints(&mut self) -> impl Iterator<Item = [u8; 16]> + '_ {
        let hints = std::mem::take(&mut self.hints);
        let devices = self.devices.iter().enumerate();
        devices.filter(move |(slot, _)| hints & 1 << slot != 0).filter_map(|(_, uuid)| *uuid)
    }

    /// Converts the time of a record to the daemon's clock.
    fn rebase(&self, slot: &mut [u8]) {
        if let Some(time) = slot.get_mut(8..16).and_then(|bytes| bytes.first_chunk_mut::<8>()) {
            *time = u64::from_le_bytes(*time).saturating_add_signed(self.rebase_ns).to_le_bytes();
        }
    }
}

/// Maximum number of costly records in one batch.
const COSTLY_PER_BATCH: u64 = 4;

/// Returns whether records of this kind make the ledger walk much data of the process. Steps walk all sums by tag and pool. Ends
/// of contexts, resyncs and ends of pools walk all live allocations. Refused allocations walk all memory.
fn is_costly(kind: u8) -> bool {
    const KINDS: [u8; 9] = [26, 41, 49, 53, 57, 58, 72, RESYNC_BEGIN, RESYNC_END];
    KINDS.contains(&kind) || kind == ALLOC_FAILED
}

/// Splits frames into pieces with at most [`COSTLY_PER_BATCH`] costly records each.
pub(crate) fn split(frames: &[u8]) -> Vec<Vec<u8>> {
    let mut pieces = vec![Vec::new()];
    let (mut rest, mut costly) = (frames, 0);
    while let Ok(Some((slot, _, after))) = frame::split_frame(rest) {
        costly += u64::from(is_costly(slot[60]));
        if costly > COSTLY_PER_BATCH {
            costly = 1;
            pieces.push(Vec::new());
        }
        if let Some(piece) = pieces.last_mut() {
            piece.extend_from_slice(&rest[..rest.len() - after.len()]);
        }
        rest = after;
    }
    pieces
}

/// Returns the 64-bit word at this byte of a record.
pub(super) fn word(slot: &Slot, at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&slot[at.min(SLOT_BYTES - 8)..][..8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_wire::{DeviceIdKind, MemoryKind, Reading, Stamp};

    fn packet(records: &[(Stamp, Body<'_>)]) -> Vec<u8> {
        let mut out = Vec::new();
        records.iter().for_each(|&(stamp, body)| Record { stamp, body }.append_frame(&mut out));
        out
    }

    fn alloc(seq: u64, bytes: u64) -> (Stamp, Body<'static>) {
        let memory = MemoryKind::Device;
        let body = Body::AllocEnd { address: seq << 20, bytes, pool: 0, took_us: 1, memory };
        (Stamp { seq, time_ns: 5, device: 0, ..Stamp::default() }, body)
    }

    fn device(slot: u8, uuid_high: u64) -> (Stamp, Body<'static>) {
        let total_bytes = Reading::of(1);
        let body =
            Body::Device { uuid_high, uuid_low: 2, total_bytes, ordinal: 0, id: DeviceIdKind::Gpu, name: "" };
        (Stamp { device: slot, ..Stamp::default() }, body)
    }

    #[test]
    fn what_is_for_agents_goes_on_as_it_is() {
        let sent = packet(&[alloc(1, 10), alloc(2, 20)]);
        let mut checker = PacketChecker::new(0);
        let (frames, _) = checker.check(sent.clone(), 10).unwrap();
        assert_eq!(frames, sent);
        assert_eq!((checker.last_seq, checker.has_gaps), (2, false));
        checker.check(packet(&[alloc(4, 1)]), 10).unwrap();
        assert_eq!((checker.last_seq, checker.has_gaps), (4, true));
    }

    #[test]
    fn numbers_may_end() {
        let mut checker = PacketChecker::new(0);
        let sent = packet(&[alloc(u64::MAX, 1), alloc(1, 1)]);
        assert_eq!(checker.check(sent.clone(), 10).unwrap().0, sent);
        assert_eq!((checker.last_seq, checker.has_gaps), (u64::MAX, true));
    }

    #[test]
    fn host_records_and_unknown_kinds_are_left_out() {
        let gone = (
            Stamp { thread: 1, ..Stamp::default() },
            Body::ProcessGone { start_ticks: 1, status: Reading(None) },
        );
        let hello = Body::Hello { start_ticks: 1, versions: 0, capabilities: 0, instance: 0, claims: "" };
        let mut sent = packet(&[alloc(1, 10), gone, alloc(2, 20), (Stamp::default(), hello)]);
        let at = sent.len() + frame::PREFIX_BYTES + 60;
        sent.extend(packet(&[(Stamp::default(), Body::Marker {})]));
        sent[at] = 250;
        let (frames, seen) = PacketChecker::new(0).check(sent, 10).unwrap();
        assert_eq!(frames, packet(&[alloc(1, 10), alloc(2, 20)]));
        assert_eq!((seen.forbidden, seen.unknown), (2, 1));
    }

    #[test]
    fn every_kind_is_decided() {
        for &(name, kind) in Body::KINDS {
            let host = matches!(kind, 96..=127) || matches!(name, "Hello" | "ClockAnchor" | "Origin");
            let expected = if host { Permission::Forbidden } else { Permission::Allowed };
            assert_eq!(PERMISSIONS[usize::from(kind)], expected, "{name}");
        }
        assert_eq!(PERMISSIONS[0], Permission::Unknown);
    }

    #[test]
    fn faults() {
        let check = |bytes: &[u8]| PacketChecker::new(0).check(bytes.to_vec(), 10).unwrap_err();
        assert!(matches!(check(&[1, 2, 3]), Fault::Framing(frame::Error::Cut { .. })));
        assert!(matches!(check(&[255; 200]), Fault::Framing(frame::Error::Length(_))));
        let sent = packet(&[alloc(1, 10)]);
        assert!(matches!(check(&sent[..sent.len() - 1]), Fault::Framing(frame::Error::Cut { .. })));
        let long = "x".repeat(MAX_TAG_BYTES + 1);
        assert_eq!(check(&packet(&[(Stamp::default(), Body::Tag { path: &long })])), Fault::Payload(TAG));
        let mut text = packet(&[(Stamp::default(), Body::Tag { path: "abc" })]);
        *text.last_mut().unwrap() = 0xff;
        assert_eq!(check(&text), Fault::Payload(TAG));
        let late = Stamp { time_ns: u64::MAX, ..Stamp::default() };
        assert!(matches!(check(&packet(&[(late, Body::Marker {})])), Fault::Time { kind: 74, .. }));
    }

    #[test]
    fn what_is_costly_comes_in_small_pieces_and_in_order() {
        let step = |number| (Stamp { seq: number, ..Stamp::default() }, Body::Step { number });
        let records: Vec<_> = (1..=11).map(step).chain([alloc(12, 1), alloc(13, 1)]).collect();
        let sent = packet(&records);
        assert_eq!(PacketChecker::new(0).check(sent.clone(), 10).unwrap().1.costly, 11);
        let pieces = split(&sent);
        let counts: Vec<_> = pieces.iter().map(|piece| frame::records(piece).count()).collect();
        assert_eq!((counts, pieces.concat()), (vec![4, 4, 5], sent));
        assert_eq!(split(&packet(&[alloc(1, 1)])).len(), 1);
    }

    #[test]
    fn a_slot_names_one_device() {
        let mut checker = PacketChecker::new(0);
        let sent = packet(&[device(0, 7), device(0, 7), device(0, 8), device(200, 9)]);
        let (frames, seen) = checker.check(sent, 10).unwrap();
        assert_eq!((frame::records(&frames).count(), seen.devices), (2, 2));
    }

    #[test]
    fn growth_is_worth_a_look_once() {
        let mut checker = PacketChecker::new(0);
        checker.check(packet(&[device(0, 7), alloc(1, GROWTH_BYTES - 1)]), 10).unwrap();
        assert_eq!(checker.take_hints().count(), 0);
        checker.check(packet(&[alloc(2, 1)]), 10).unwrap();
        assert_eq!(
            checker.take_hints().collect::<Vec<_>>(),
            [[0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 2]]
        );
        assert_eq!(checker.take_hints().count(), 0);
    }

    #[test]
    fn times_of_another_namespace_are_moved() {
        let mut checker = PacketChecker::new(100);
        let (frames, _) = checker.check(packet(&[alloc(1, 10)]), 10).unwrap();
        let (slot, ..) = frame::split_frame(&frames).unwrap().unwrap();
        assert_eq!(word(slot, 8), 105);
    }
}
