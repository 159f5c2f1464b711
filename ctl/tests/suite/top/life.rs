//! Signals, job control, a daemon that goes away, and names from strangers.

use super::terminal::Terminal;
use super::{Site, machine};
use crate::common::{run_of, until};
use rustix::process::Signal;
use std::fs;
use std::process::Command;
use std::sync::Arc;

#[test]
fn a_daemon_that_is_gone_is_said_and_one_that_is_back_is_heard() {
    let site = Site::new("top-gone");
    // A wide terminal, because the message contains the socket's path, which may be long.
    let mut top = site.top((200, 24), &[]);
    top.shows("python train.py rank 3");
    let aside = site.folder.path("gpumem/aside");
    fs::rename(&site.socket, &aside).expect("gone");
    top.until("the reason above the last known processes", |text| {
        ["no answer for", "trying again", "60021"].iter().all(|words| text.contains(words))
    });
    fs::rename(&aside, &site.socket).expect("back");
    top.until("an answer", |text| !text.contains("no answer for"));
    site.daemon.says("GET /v1/ps", 500, r#"{"error":"on fire\u001b[2J"}"#);
    top.shows("on fire");
    site.daemon.says("GET /v1/ps", 0, "what is this");
    top.shows("does not answer in HTTP");
    site.tells(&machine());
    top.until("an answer", |text| !text.contains("no answer for"));
    top.types("\x03");
    assert_eq!(top.end(), 0, "Ctrl-C leaves");
}

#[test]
fn signals_end_it_and_the_terminal_is_given_back() {
    let site = Site::new("top-signals");
    for (signal, number) in [(Signal::TERM, 15), (Signal::QUIT, 3), (Signal::HUP, 1)] {
        let top = site.top((80, 24), &[]);
        top.shows("60021");
        top.signal(signal);
        assert_eq!(top.end(), 128 + number);
    }
    let mut top = site.top((80, 24), &[]);
    top.shows("60021");
    top.signal(Signal::STOP);
    top.signal(Signal::CONT);
    until("another whole frame", || (top.count_written("\x1b[2J") >= 2).then_some(()));
    top.types("\x0c");
    until("a third", || (top.count_written("\x1b[2J") >= 3).then_some(()));
    // The terminal is closed: its processes get a signal, or read end of file.
    let Terminal { child, .. } = &mut top;
    let mut child = std::mem::replace(child, Command::new("true").spawn().expect("true"));
    drop(top);
    until("an end", || child.try_wait().expect("a child"));
}

#[test]
fn a_shell_stops_it_and_lets_it_go_on() {
    let site = Site::new("top-jobs");
    let mut shell = site.folder.command(&[]);
    let gpumemctl = shell.get_program().to_string_lossy().into_owned();
    shell = Command::new("bash");
    site.folder.settle(&mut shell);
    shell.args(["--norc", "--noprofile", "-i"]).env("PS1", "> ").env("LANG", "C.UTF-8").env("TERM", "xterm");
    let mut top = Terminal::new(shell, (80, 24));
    top.types(&format!("'{gpumemctl}' top --interval 0.1\n"));
    top.shows("python train.py rank 3");
    top.types("\x1a");
    top.shows("Stopped");
    assert_eq!(top.count_written("\x1b[?1049l"), 1);
    top.prompts();
    top.types("echo shell$((1 + 1))\n");
    top.shows("shell2");
    top.prompts();
    top.types("fg\n");
    let text = top.shows("python train.py rank 3");
    assert!(!text.contains("shell2"), "{text}");
    top.types("q");
    until("the shell", || (top.count_written("\x1b[?1049l") == 2).then_some(()));
    top.prompts();
    top.types("echo code$?\n");
    top.shows("code0");
    top.prompts();
    top.types("exit 0\n");
    assert_eq!(top.end(), 0);
}

#[test]
fn strangers_names_do_nothing() {
    let site = Site::new("top-hostile");
    let mut ps = machine();
    let bad = "evil\u{1b}]0;title\u{7}\u{1b}[2J\u{202e}\u{9b}31m\r\n漢字 名前 x\u{301} end";
    ps.devices[0].model = bad.into();
    ps.devices[1].why = Some(bad.into());
    for process in &mut ps.processes {
        (process.user, process.command) = (Some(bad.into()), Some(bad.into()));
    }
    ps.processes[2].flags = vec![bad.into(); 9];
    site.tells(&ps);
    let mut run = run_of(41873, bad, Some(3));
    run.process.facts.insert("command".into(), bad.into());
    run.cells.iter_mut().for_each(|cell| cell.tag = Some(format!("{bad}/{bad}")));
    site.daemon.runs("?pid=41873", &[&run]);
    let mut top = site.top((130, 30), &[]);
    top.shows("漢字");
    top.types("/evil\r");
    top.shows("/evil");
    top.types("\r\t\t");
    top.shows("tracked over time");
    top.types("a\x1b[Fgoxi");
    top.types("q");
    top.signal(Signal::TERM);
    let written = Arc::clone(&top.written);
    top.end();
    let written = String::from_utf8(written.lock().expect("bytes").clone()).expect("UTF-8");
    for bad in ["\x1b]", "\u{7}", "\u{9b}", "\u{202e}"] {
        assert!(!written.contains(bad), "{bad:?}");
    }
}
