//! Files of expected output under tests/golden, and the switch that writes them.

use std::path::PathBuf;

/// Returns the path of a file under tests/golden.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

/// Returns whether this run may write golden files: `UPDATE_GOLDEN=1`.
pub fn update() -> bool {
    std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1")
}

/// Returns lower-case hex, two digits for each byte.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes everything");
        text
    })
}

/// Decodes [`hex`]; `None` if the text is not hex.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
    Some(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// Compares a text with a golden file; with `UPDATE_GOLDEN=1` writes it.
///
/// # Panics
/// If they differ; prints both.
pub fn check(name: &str, text: &str) {
    let path = path(name);
    if update() {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(&path, text).expect("written");
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, golden, "{}: differs; if that is meant, UPDATE_GOLDEN=1 writes it anew", path.display());
}
