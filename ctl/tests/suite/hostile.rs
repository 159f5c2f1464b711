//! gpumemctl on files that could cost much time or memory. Each reader, with 300 MB of address space, must end soon and give a
//! reason.
#[path = "../../../import/tests/suite/import_hostile/examples.rs"]
mod examples;

use examples::example;
use gpumem_import::FORMATS;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Enough for the program, but not for memory that grows with a file.
const ADDRESS_SPACE_KB: u32 = 300_000;
/// Timeout for a busy machine.
const SOON: Duration = Duration::from_secs(120);

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gpumemctl-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    /// Creates a sparse file of this size that begins with `head`.
    fn hole(&self, head: &[u8], bytes: u64) -> String {
        let path = self.0.join("file");
        let mut file = fs::File::create(&path).expect("a file");
        file.write_all(head).expect("a head");
        file.set_len(bytes.max(head.len() as u64)).expect("a hole");
        path.to_string_lossy().into_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the report on a file read as `format`, or else the error message.
fn told(format: &str, file: &str) -> Result<String, String> {
    let line = format!(
        "ulimit -v {ADDRESS_SPACE_KB}; exec '{}' report --format {format} '{file}'",
        env!("CARGO_BIN_EXE_gpumemctl")
    );
    let start = Instant::now();
    let output: Output = Command::new("sh")
        .args(["-c", &line])
        .env("GPUMEM_CONTROL", "/nonexistent/control.sock")
        .stdin(Stdio::null())
        .output()
        .expect("sh");
    let took = start.elapsed();
    gpumem_test_support::bar(format, took, SOON);
    let message = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(!message.contains("panicked"), "{format}: {message}");
    match output.status.code() {
        Some(0) => Ok(String::from_utf8(output.stdout).expect("UTF-8")),
        Some(4) => Err(message),
        other => panic!("{format}: ended with {other:?}: {message}"),
    }
}

#[test]
fn ten_gigabytes_of_nothing_behind_any_format_cost_little() {
    let folder = Folder::new("holes");
    for format in FORMATS {
        let whole = example(format.name);
        for head in [&whole[..], &whole[..whole.len() / 2], b""] {
            let file = folder.hole(head, 10 << 30);
            // Bytes after a complete file may be skipped, but the report must mention them.
            if let Ok(text) = told(format.name, &file) {
                assert!(!head.is_empty() && text.contains("note: "), "{}: {text}", format.name);
            }
        }
    }
}

#[test]
fn pickles_that_want_all_memory_are_refused() {
    let folder = Folder::new("pickles");
    let head = b"\x80\x04}X\x08\x00\x00\x00segments";
    let nested = |unit: &[u8], times: usize| [&head[..], &unit.repeat(times)].concat();
    let bombs = [
        // Values that need more memory than their bytes: lists, nested lists and tuples, memo entries.
        nested(b"]", 20_000_000),
        nested(b"]Na", 8_000_000),
        nested(b")\x94", 10_000_000),
        nested(b"(", 20_000_000),
        nested(b"N\x94", 10_000_000),
        nested(b"K\x00\x85", 8_000_000),
        // A string that is longer than the file.
        nested(b"\x8d\xff\xff\x0f\x00\x00\x00\x00\x00", 40),
        nested(b"X\xff\xff\xff\xff", 1),
    ];
    for (which, bomb) in bombs.iter().enumerate() {
        let message = told("torch-snapshot", &folder.hole(bomb, 0)).expect_err("refused");
        assert!(message.contains(": at byte "), "{which}: {message}");
    }
    // Ten values of a few bytes each, which refer to the same value repeatedly.
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let long = "x".repeat(1 << 20);
    let names = [
        &b"\x80\x04"[..],
        &text(&long),
        b"q\x010",
        b"}(",
        &text("device_traces"),
        b"](](",
        &[b"}(", &text("action")[..], b"h\x01", &text("user_metadata"), b"h\x01u"].concat().repeat(20_000),
        b"eeu.",
    ]
    .concat();
    let report = told("torch-snapshot", &folder.hole(&names, 0));
    assert!(report.is_err_and(|message| message.contains("nothing was allocated")));
}

#[test]
fn a_snapshot_whose_numbers_are_huge_is_read() {
    let folder = Folder::new("huge");
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let number = |number: u64| [&b"\x8a\x08"[..], &number.to_le_bytes()].concat();
    // 20,000 expandable segments of a terabyte each, and a history that maps and unmaps as much.
    let mut pickle = b"\x80\x04}(".to_vec();
    pickle.extend([text("segments"), b"](".to_vec()].concat());
    for segment in 0..20_000_u64 {
        pickle.extend(b"}(");
        pickle.extend(
            [text("address"), number((segment + 1) << 40), text("total_size"), number(1 << 40)].concat(),
        );
        pickle.extend([text("is_expandable"), b"\x88u".to_vec()].concat());
    }
    pickle.extend([b"e".to_vec(), text("device_traces"), b"](](".to_vec()].concat());
    for entry in 0..40_000_u64 {
        let action = ["segment_map", "segment_unmap"][entry as usize % 2];
        pickle.extend(
            [b"}(".to_vec(), text("action"), text(action), text("addr"), number(0x7f_0000_0000_0000)]
                .concat(),
        );
        pickle.extend([text("size"), number(40 << 30), b"u".to_vec()].concat());
    }
    pickle.extend(b"eeu.");
    let report = told("torch-snapshot", &folder.hole(&pickle, 0)).expect("numbers are numbers");
    assert!(report.contains("tracked"), "{report}");
}
