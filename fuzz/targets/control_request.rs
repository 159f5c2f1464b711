//! Requests to the daemon: queries of the control API, paths and hosts of the page.
#![no_main]

use gpumemd::view::{control, page};
use libfuzzer_sys::fuzz_target;

/// Percent-encodes a word as gpumemctl does.
fn escaped(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$'()*+,;:@/".contains(&byte);
    let digit = |digit: u8| char::from(b"0123456789ABCDEF"[usize::from(digit)]);
    let mut text = String::with_capacity(3 * word.len());
    for byte in word.bytes() {
        match plain(byte) {
            true => text.push(char::from(byte)),
            false => text.extend(['%', digit(byte >> 4), digit(byte & 15)]),
        }
    }
    text
}

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let (_, limited, plain) = control::fuzz_query(&text);
    if limited {
        let first = text.split('&').find(|pair| pair.starts_with("max_size="));
        assert!(first.is_none_or(|pair| !pair.starts_with("max_size=-")));
    }
    if let Some(plain) = plain {
        assert!(plain.len() <= text.len());
        assert_eq!(control::fuzz_query(&escaped(&plain)).2.as_deref(), Some(&*plain));
    }
    // Any word survives encoding and parsing of a query.
    assert_eq!(control::fuzz_query(&escaped(&text)).2.as_deref(), Some(&*text));
    assert!(control::fuzz_query(&format!("job={}", escaped(&text))).0);

    let (path, host) = text.split_once('\n').unwrap_or((&text, ""));
    let (_, ours) = page::fuzz_request(path, host, "node7", &["*.svc.cluster.local".to_owned()]);
    if ours {
        let name = host.to_ascii_lowercase();
        let service = name.split(':').next().is_some_and(|name| name.ends_with(".svc.cluster.local"));
        let known = name.starts_with("node7") || name.contains("localhost") || name.starts_with('[');
        let address = name.starts_with(|first: char| first.is_ascii_digit());
        assert!(known || address || service, "{host:?} must be rejected");
    }
});
