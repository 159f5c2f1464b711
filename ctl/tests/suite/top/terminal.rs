//! A terminal with a program as session leader. The tests read the screen from the program's output, as a terminal would.

use crate::common::until;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A terminal with a program as session leader.
pub struct Terminal {
    master: File,
    slave: File,
    pub child: Child,
    parser: Arc<Mutex<vt100::Parser>>,
    pub written: Arc<Mutex<Vec<u8>>>,
    over: Arc<AtomicBool>,
}

impl Terminal {
    pub fn new(command: Command, (columns, rows): (u16, u16)) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
        grantpt(&master).expect("ours");
        unlockpt(&master).expect("open");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let path = Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
        let slave = File::options().read(true).write(true).open(path).expect("its other end");
        let master = File::from(master);
        let end = || slave.try_clone().expect("a copy");
        let mut leader = Command::new("setsid");
        leader.arg("--ctty").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => leader.env(name, value),
                None => leader.env_remove(name),
            };
        }
        let parser = Arc::new(Mutex::new(vt100::Parser::new(cells(rows), cells(columns), 0)));
        let written = Arc::default();
        let mut terminal = Terminal {
            child: {
                resize(&master, columns, rows);
                leader.stdin(end()).stdout(end()).stderr(end()).spawn().expect("setsid")
            },
            master: master.try_clone().expect("a copy"),
            slave,
            parser,
            written,
            over: Arc::default(),
        };
        terminal.listen(master);
        terminal
    }

    fn listen(&mut self, mut master: File) {
        let (parser, written) = (Arc::clone(&self.parser), Arc::clone(&self.written));
        let over = Arc::clone(&self.over);
        std::thread::spawn(move || {
            let mut buffer = [0; 65536];
            while !over.load(Ordering::Relaxed) {
                let wait = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                if poll(&mut [PollFd::new(&master, PollFlags::IN)], Some(&wait)).is_ok_and(|ready| ready == 0)
                {
                    continue;
                }
                let Ok(read @ 1..) = master.read(&mut buffer) else { break };
                written.lock().expect("bytes").extend_from_slice(&buffer[..read]);
                parser.lock().expect("a screen").process(&buffer[..read]);
            }
        });
    }

    pub fn types(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("typed");
    }

    pub fn resize(&self, columns: u16, rows: u16) {
        self.parser.lock().expect("a screen").screen_mut().set_size(cells(rows), cells(columns));
        resize(&self.master, columns, rows);
    }

    pub fn lines(&self) -> Vec<String> {
        let parser = self.parser.lock().expect("a screen");
        let (_, columns) = parser.screen().size();
        parser.screen().rows(0, columns.into()).map(|line| line.trim_end().to_owned()).collect()
    }

    pub fn text(&self) -> String {
        self.lines().join("\n")
    }

    /// Waits for the shell's prompt, because earlier input may be lost.
    pub fn prompts(&self) {
        self.until("the shell's prompt", |text| text.trim_end().ends_with('>'));
    }

    /// Returns the characters of the cells in reversed colours, which are the selected ones.
    pub fn selected(&self) -> String {
        let parser = self.parser.lock().expect("a screen");
        let screen = parser.screen();
        let (rows, columns) = (screen.size().0.get(), screen.size().1.get());
        let cells = (0..rows).flat_map(|row| (0..columns).filter_map(move |column| screen.cell(row, column)));
        cells.filter(|cell| cell.inverse()).map(|cell| cell.contents().to_owned()).collect()
    }

    /// Waits until the screen contains these words.
    pub fn shows(&self, words: &str) -> String {
        self.until(words, |text| text.contains(words))
    }

    pub fn until(&self, what: &str, is: impl Fn(&str) -> bool) -> String {
        let since = std::time::Instant::now();
        loop {
            let text = self.text();
            if is(&text) {
                return text;
            }
            assert!(since.elapsed() < gpumem_test_support::DEADLINE, "{what:?} is not seen:\n{text}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    pub fn bytes(&self) -> usize {
        self.written.lock().expect("bytes").len()
    }

    /// Returns whether the terminal's modes are restored.
    pub fn is_given_back(&self) -> bool {
        let modes = tcgetattr(&self.slave).expect("modes").local_modes;
        let parser = self.parser.lock().expect("a screen");
        let screen = parser.screen();
        modes.contains(LocalModes::ICANON | LocalModes::ECHO)
            && !screen.alternate_screen()
            && !screen.hide_cursor()
    }

    /// Returns how often these words were written.
    pub fn count_written(&self, words: &str) -> usize {
        String::from_utf8_lossy(&self.written.lock().expect("bytes")).matches(words).count()
    }

    /// Signals the program, which has replaced setsid(1).
    pub fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).expect("a pid");
        rustix::process::kill_process(pid, signal).expect("sent");
    }

    pub fn end(mut self) -> i32 {
        let status = until("an end", || self.child.try_wait().expect("a child"));
        until("the terminal given back", || self.is_given_back().then_some(()));
        status.code().or(status.signal().map(|signal| 128 + signal)).expect("a status")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.over.store(true, Ordering::Relaxed);
    }
}

fn cells(number: u16) -> std::num::NonZero<u16> {
    std::num::NonZero::new(number).expect("a size")
}

fn resize(master: &File, columns: u16, rows: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(master, size).expect("a size");
}
