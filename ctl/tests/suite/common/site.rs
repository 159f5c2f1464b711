//! An installation of gpumemctl, to run commands with.

use super::{FakeDaemon, Folder};
use rustix::process::Signal;
use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A folder with an installation: the program, an agent that is only a file name, and a daemon that listens at the default
/// socket.
pub struct Site {
    pub folder: Folder,
    pub daemon: Option<FakeDaemon>,
}

impl Site {
    pub fn new(name: &str) -> Self {
        let site = Site::without_daemon(name);
        let daemon = FakeDaemon::at(&site.folder.path("gpumem/control.sock"));
        daemon.says(
            "GET /v1/doctor",
            200,
            r#"{"version":"0","pid":1,"uptime_s":1,"facts":[],"findings":[]}"#,
        );
        Site { daemon: Some(daemon), ..site }
    }

    pub fn without_daemon(name: &str) -> Self {
        let folder = Folder::new(name);
        let bin = folder.path("bin");
        fs::create_dir_all(&bin).expect("a folder");
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_gpumemctl")).arg(&bin).status();
        assert!(copied.expect("cp").success());
        fs::write(bin.join("libgpumem.so"), "").expect("a file");
        Site { folder, daemon: None }
    }

    pub fn library(&self) -> String {
        let library = self.folder.path("bin/libgpumem.so").canonicalize().expect("a library");
        library.to_string_lossy().into_owned()
    }

    pub fn daemon(&self) -> &FakeDaemon {
        self.daemon.as_ref().expect("a daemon")
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.folder.path("bin/gpumemctl"));
        self.folder.settle(&mut command);
        // A separate process group, so that signals to the group do not end the test.
        command.arg("run").args(args).process_group(0);
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("gpumemctl")
    }

    pub fn sh(&self, script: &str) -> Output {
        self.run(&["--quiet", "--", "sh", "-c", script])
    }
}

/// Returns whether a signal is ignored here, as under nohup or in a background job of a script. A shell cannot trap an ignored
/// signal, and its children are not ended by it.
pub fn is_ignored(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("status");
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a mask");
    let mask = u64::from_str_radix(mask.trim(), 16).expect("a mask");
    let ignored = mask & (1 << (signal.as_raw() - 1)) != 0;
    if ignored {
        gpumem_test_support::skip(
            &format!("signal {} is ignored where this test was started", signal.as_raw()),
            "",
        );
    }
    ignored
}

/// Writes a program by another process. A descriptor open for writing in this process would be inherited by children of other
/// tests, and the file could not be executed ("text file busy").
pub fn program(path: &Path, text: &str) {
    let mut writer = Command::new("sh");
    writer.args(["-c", "rm -f \"$0\"; cat > \"$0\"; chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut writer = writer.spawn().expect("sh");
    writer.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("a write");
    assert!(writer.wait().expect("an end").success());
}
