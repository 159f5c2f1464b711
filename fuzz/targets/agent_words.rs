//! Texts that the agent receives: limits of a recording, and messages of NVTX.
#![no_main]
#![allow(dead_code)]

/// Paths of the agent's modules, as the included source expects them.
mod base {
    pub use gpumem::base::c_text;
}
mod driver {
    pub use gpumem::driver::core;
}
#[path = "../../agent-lib/src/sources/nvtx/text.rs"]
mod text;

use cupti_sys::nvtx::EventAttributes;
use gpumem::sources::api::recordings::RecordingLimits;
use libfuzzer_sys::fuzz_target;
use text::{Message, plain};

/// Decodes an event of its declared size in memory of exactly that size; its message, if any, is `text`.
fn event(bytes: &[u8], text: &[u8]) {
    let whole = size_of::<EventAttributes>();
    let mut image = vec![0_u8; whole];
    let from = bytes.len().min(whole);
    image[..from].copy_from_slice(&bytes[..from]);
    let at = std::mem::offset_of!(EventAttributes, message);
    image[at..at + 8].copy_from_slice(&(text.as_ptr() as u64).to_ne_bytes());
    let size = usize::from(u16::from_ne_bytes([bytes[2], bytes[3]])).clamp(8, whole);
    image[2..4].copy_from_slice(&(size as u16).to_ne_bytes());
    image.truncate(size);
    image.shrink_to_fit();
    // SAFETY: the image has its declared size, and the message ends with four zero bytes.
    if let Message::Bytes(message) = unsafe { Message::of(image.as_ptr().cast()) } {
        assert!(text.starts_with(message));
    }
}

fuzz_target!(|bytes: &[u8]| {
    if bytes.len() >= 8 {
        event(bytes, &[bytes, &[0; 8]].concat());
    }
    let text = String::from_utf8_lossy(bytes);
    if let Some((path, limits)) = RecordingLimits::of_command(&text) {
        assert!(!path.contains('\0') && text.starts_with(&path));
        assert!(limits.steps.is_none_or(|(first, last)| first <= last && last < u64::MAX));
        assert!(limits.for_ns != Some(0) || text.contains("for="));
        assert!(limits.max_bytes != Some(0));
        // Formatting is idempotent.
        let mut said = path.clone();
        let mut say = |part: String| said = format!("{said}\0{part}");
        limits.steps.into_iter().for_each(|(first, last)| say(format!("steps={first}:{last}")));
        limits.max_bytes.into_iter().for_each(|bytes| say(format!("max_size={bytes}")));
        let (same, again) = RecordingLimits::of_command(&said).expect("numbers");
        assert_eq!((same, again.steps, again.max_bytes), (path, limits.steps, limits.max_bytes));
    }
    // A zero-terminated text of wchar_t.
    let mut wide: Vec<u32> =
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
    wide.push(0);
    // SAFETY: it ends with 0.
    let (buffer, len) = unsafe { plain(wide.as_ptr()) };
    let narrow = std::str::from_utf8(&buffer[..len]).expect("whole characters");
    let end = wide.iter().position(|&one| one == 0).unwrap_or(0);
    assert_eq!(narrow.chars().count().min(end), narrow.chars().count());
    for (found, &given) in narrow.chars().zip(&wide) {
        assert_eq!(found, char::from_u32(given).unwrap_or('?'));
    }
});
