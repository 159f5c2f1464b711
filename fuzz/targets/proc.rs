//! Text of /proc. Program names may contain any byte, and must not shift other fields.
#![no_main]
#![allow(dead_code)]

#[path = "../../daemon/src/source/process/parse.rs"]
mod parse;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(stat) = parse::stat(bytes) {
        assert!(
            bytes.windows(stat.comm.len().max(1)).any(|window| window == stat.comm) || stat.comm.is_empty()
        );
        let _ = stat.has_ended();
    }
    // A name of arbitrary bytes, in a line as the kernel writes it.
    let name = &bytes[..bytes.len().min(15)];
    let mut line = b"4711 (".to_vec();
    line.extend_from_slice(name);
    line.extend_from_slice(b") S 17 4711 4711 34816 4711 4194560 1 2 3 4 5 6 7 8 20 0 3 0 987654 10 11 12\n");
    let stat = parse::stat(&line).expect("a line of the kernel's");
    assert_eq!((stat.comm.as_slice(), stat.state, stat.parent_pid), (name, b'S', 17));
    assert_eq!((stat.threads, stat.start_ticks), (3, 987_654));

    let _ = parse::status(bytes);
    if let Some(path) = parse::cgroup(bytes) {
        assert!(!path.is_empty() && !path.contains(&b'\n'));
    }
    if let Some(command) = parse::command(bytes) {
        assert!(!command.contains('\n') && !command.contains('\u{1b}'));
    }
    let told = parse::line(bytes);
    assert!(!told.chars().any(char::is_control), "{told:?}");
    let text = String::from_utf8_lossy(bytes);
    if let Some(user) = parse::user_name(&text, 1000) {
        assert!(!user.is_empty() && !user.contains([':', '\n']));
    }
});
