//! What arrays cost, as far as their descriptions tell: the driver tiles and pads them, so these are estimates.

use cupti_sys::params::{Array2d, Array3d, format_bytes};

fn texels(width: usize, height: usize, depth: usize) -> u64 {
    [width, height, depth].iter().map(|&side| side.max(1) as u64).fold(1, u64::saturating_mul)
}

fn texel(format: u32, channels: u32) -> u64 {
    format_bytes(format) * u64::from(channels.max(1))
}

/// Bytes of an array with `count` levels, each half of the one before; 0 without memory of its own.
pub fn levels(array: &Array3d, count: u32) -> u64 {
    if array.flags & Array3d::UNBACKED != 0 {
        return 0;
    }
    let level = |level: u32| texels(array.width >> level, array.height >> level, array.depth >> level);
    let sum = (0..count.clamp(1, 32)).map(level).fold(0, u64::saturating_add);
    sum.saturating_mul(texel(array.format, array.channels))
}

/// Bytes of a flat array.
pub fn bytes(array: &Array2d) -> u64 {
    texels(array.width, array.height, 0).saturating_mul(texel(array.format, array.channels))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mipmaps_are_a_third_more_and_unbacked_arrays_nothing() {
        let array = Array3d { width: 64, height: 64, depth: 0, format: 0x20, channels: 4, flags: 0 };
        assert_eq!(levels(&array, 1), 64 * 64 * 16);
        assert_eq!(levels(&array, 3), (64 * 64 + 32 * 32 + 16 * 16) * 16);
        assert_eq!(levels(&Array3d { flags: 0x40, ..array }, 1), 0);
        assert_eq!(bytes(&Array2d { width: 10, height: 0, format: 0x10, channels: 1 }), 20);
    }
}
