//! What arrays cost, as far as their descriptions tell: the driver tiles and pads them, so these are estimates. An array of a format that
//! is not known has 0 bytes: what NVML charges for it stays in Untrackable.

use cupti_sys::params::{Array2d, Array3d, Pixel, pixel};

/// Pixels or blocks on each side: at least one.
fn count(sides: [usize; 3]) -> u64 {
    sides.iter().map(|&side| side.max(1) as u64).fold(1, u64::saturating_mul)
}

fn size([width, height, depth]: [usize; 3], format: u32, channels: u32) -> u64 {
    match pixel(format) {
        Some(Pixel::Channel(bytes)) => {
            count([width, height, depth]).saturating_mul(bytes).saturating_mul(channels.max(1).into())
        }
        Some(Pixel::Bits(bits)) => count([width, height, depth]).saturating_mul(bits).div_ceil(8),
        Some(Pixel::Block(bytes)) => {
            count([width.div_ceil(4), height.div_ceil(4), depth]).saturating_mul(bytes)
        }
        None => 0,
    }
}

/// Bytes of an array with `count` levels, each half of the one before; 0 without memory of its own.
pub fn levels(array: &Array3d, count: u32) -> u64 {
    if array.flags & Array3d::UNBACKED != 0 {
        return 0;
    }
    let level = |level: u32| {
        let sides = [array.width, array.height, array.depth].map(|side| side >> level);
        size(sides, array.format, array.channels)
    };
    (0..count.clamp(1, 32)).map(level).fold(0, u64::saturating_add)
}

/// Bytes of a flat array.
pub fn bytes(array: &Array2d) -> u64 {
    size([array.width, array.height, 0], array.format, array.channels)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SQUARE: Array3d = Array3d { width: 64, height: 64, depth: 0, format: 0x20, channels: 4, flags: 0 };

    #[test]
    fn mipmaps_are_a_third_more_and_unbacked_arrays_nothing() {
        assert_eq!(levels(&SQUARE, 1), 64 * 64 * 16);
        assert_eq!(levels(&SQUARE, 3), (64 * 64 + 32 * 32 + 16 * 16) * 16);
        assert_eq!(levels(&Array3d { flags: 0x40, ..SQUARE }, 1), 0);
        assert_eq!(bytes(&Array2d { width: 10, height: 0, format: 0x10, channels: 1 }), 20);
    }

    #[test]
    fn a_format_decides_what_a_pixel_takes() {
        let of = |format, channels| levels(&Array3d { format, channels, ..SQUARE }, 1);
        // UNORM_INT8X4, SNORM_INT16X2, NV12, P010, AYUV, Y416: the channels are part of the format.
        let formats =
            [(0xc2, 4, 4.0), (0xca, 2, 4.0), (0xb0, 3, 1.5), (0x9f, 3, 3.0), (0xa8, 4, 4.0), (0xb1, 4, 8.0)];
        for (format, channels, bytes) in formats {
            assert_eq!(of(format, channels), (64.0 * 64.0 * bytes) as u64, "{format:#x}");
        }
        // BC1 and BC7: 4 x 4 pixels.
        assert_eq!((of(0x91, 4), of(0x9d, 4)), (16 * 16 * 8, 16 * 16 * 16));
        let small = Array3d { width: 2, height: 5, format: 0x9d, ..SQUARE };
        assert_eq!(levels(&small, 1), 2 * 16, "blocks are whole");
        assert_eq!(of(0x7f, 4), 0, "unknown");
    }
}
