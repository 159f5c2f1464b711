//! `gpumemctl run` on a terminal: signals from keys, and job control of the shell.

use crate::common::site::{Site, is_ignored};
use rustix::process::Signal;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[test]
fn the_terminal_is_the_commands_own() {
    if is_ignored(Signal::INT) {
        return;
    }
    if Command::new("script").arg("--version").output().is_err() {
        return gpumem_test_support::skip(
            "script(1) makes the terminal, and is not here",
            "apt-get install bsdutils",
        );
    }
    let site = Site::new("terminal");
    let gpumemctl = site.folder.text("bin/gpumemctl");
    let script = site.folder.path("on-terminal.sh");
    let text = "trap 'echo INT' INT\n\
                test -t 0 && test -t 1 && test -t 2 && echo terminal\n\
                set -- $(sed 's/.*) //' /proc/$$/stat)\n\
                test $3 = $6 && echo foreground\n\
                echo ready\n\
                read line || read line; echo \"line $line\"\nexit 5\n";
    fs::write(&script, text).expect("a script");
    let line = format!("exec '{gpumemctl}' run --quiet -- sh '{}'", script.display());
    let mut command = Command::new("script");
    site.folder.settle(&mut command);
    command.args(["-qec", &line, "/dev/null"]).env("SHELL", "/bin/sh");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script");
    let mut stdin = child.stdin.take().expect("a pipe");
    let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut said = String::new();
    while !said.contains("ready") {
        assert!(output.read_line(&mut said).expect("a line") > 0, "{said}");
    }
    assert!(said.contains("terminal") && said.contains("foreground"), "{said}");
    stdin.write_all(b"\x03").expect("Ctrl-C");
    while !said.contains("INT\r\n") {
        assert!(output.read_line(&mut said).expect("a line") > 0, "{said}");
    }
    stdin.write_all(b"typed\n").expect("a line");
    output.read_to_string(&mut said).expect("text");
    assert!(said.contains("line typed"), "{said}");
    assert_eq!(said.matches("INT\r\n").count(), 1, "the terminal's Ctrl-C arrives once: {said}");
    assert_eq!(child.wait().expect("an end").code(), Some(5));
}

/// A shell with job control on its own terminal.
struct Terminal {
    child: Child,
    stdin: std::process::ChildStdin,
    said: Arc<Mutex<String>>,
}

impl Terminal {
    fn new(site: &Site) -> Option<Self> {
        let there = |name: &str| Command::new(name).arg("--version").output().is_ok();
        if !there("script") || !there("bash") {
            return None;
        }
        let mut command = Command::new("script");
        site.folder.settle(&mut command);
        command.args(["-qec", "PS1='> ' exec bash --norc --noprofile -i", "/dev/null"]).env("TERM", "dumb");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script");
        let stdin = child.stdin.take().expect("a pipe");
        let mut output = child.stdout.take().expect("a pipe");
        let said = Arc::new(Mutex::new(String::new()));
        let all = Arc::clone(&said);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut buffer) {
                all.lock().expect("text").push_str(&String::from_utf8_lossy(&buffer[..read]));
            }
        });
        Some(Terminal { child, stdin, said })
    }

    /// Waits for the shell's prompt, because earlier input may be lost.
    fn prompts(&self) {
        let began = Instant::now();
        while !self.said.lock().expect("text").ends_with("> ") {
            let said = self.said.lock().expect("text").clone();
            assert!(began.elapsed() < gpumem_test_support::DEADLINE, "no prompt: {said:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Types keys and waits for output that follows.
    fn types(&mut self, keys: &str, answer: &str) {
        let before = self.said.lock().expect("text").len();
        self.stdin.write_all(keys.as_bytes()).expect("typed");
        let since = Instant::now();
        while !self.said.lock().expect("text")[before..].contains(answer) {
            let said = self.said.lock().expect("text").clone();
            assert!(since.elapsed() < gpumem_test_support::DEADLINE, "{answer:?} did not come: {said:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn a_shell_stops_continues_and_ends_it_as_any_job() {
    if is_ignored(Signal::INT) {
        return;
    }
    let site = Site::new("jobs");
    let Some(mut terminal) = Terminal::new(&site) else {
        return gpumem_test_support::skip(
            "script(1) and bash make the terminal, and are not here",
            "apt-get install bsdutils",
        );
    };
    let script = site.folder.path("job.sh");
    fs::write(&script, "echo begun\nwhile :; do read x && echo \"<$x>\"; done\n").expect("a script");
    let gpumemctl = site.folder.text("bin/gpumemctl");
    terminal.types(&format!("'{gpumemctl}' run --quiet -- sh '{}'\n", script.display()), "begun\r\n");
    terminal.types("one\n", "<one>");
    terminal.types("\x1a", "Stopped");
    terminal.prompts();
    terminal.types("echo shell$((1 + 1))\n", "shell2");
    terminal.prompts();
    terminal.types("fg\n", "run --quiet");
    terminal.types("two\n", "<two>");
    terminal.types("\x03", "^C");
    terminal.prompts();
    terminal.types("echo code$?\n", "code130");
    terminal.prompts();
    terminal.types("exit 0\n", "exit");
    assert!(terminal.child.wait().expect("an end").success());
}
