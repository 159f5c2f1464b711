//! Numbers as LEB128 varints of 64 bits.

pub(crate) fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends a signed number, zigzag-coded: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
pub(crate) fn put_signed(out: &mut Vec<u8>, value: i64) {
    put(out, zigzag(value));
}

/// Appends a size of memory: in units of 512 bytes, shifted left by one; or 1 and the bytes.
pub(crate) fn put_size(out: &mut Vec<u8>, bytes: u64) {
    if bytes.is_multiple_of(512) {
        put(out, bytes >> 9 << 1);
    } else {
        put(out, 1);
        put(out, bytes);
    }
}

/// Appends the difference of two addresses, like a size but signed.
pub(crate) fn put_distance(out: &mut Vec<u8>, bytes: i64) {
    if bytes % 512 == 0 {
        put(out, zigzag(bytes / 512) << 1);
    } else {
        put(out, 1);
        put_signed(out, bytes);
    }
}

/// Takes a varint from the beginning of `from`; `None` if it is invalid.
pub(crate) fn take(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = from.split_first()?;
        *from = rest;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return None;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Takes a signed number; `None` if it is invalid.
pub(crate) fn take_signed(from: &mut &[u8]) -> Option<i64> {
    take(from).map(unzigzag)
}

/// Takes a size of memory; `None` if it is invalid.
pub(crate) fn take_size(from: &mut &[u8]) -> Option<u64> {
    match take(from)? {
        1 => take(from),
        units => (units >> 1).checked_mul(512),
    }
}

/// Takes the difference of two addresses; `None` if it is invalid.
pub(crate) fn take_distance(from: &mut &[u8]) -> Option<i64> {
    match take(from)? {
        1 => take_signed(from),
        units => unzigzag(units >> 1).checked_mul(512),
    }
}

fn zigzag(value: i64) -> u64 {
    (value.wrapping_shl(1) ^ (value >> 63)).cast_unsigned()
}

fn unzigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ (value & 1).cast_signed().wrapping_neg()
}
