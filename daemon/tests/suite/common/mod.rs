//! A daemon in this process, on its own sockets, and hand-made peers that connect to it.
#![allow(dead_code)] // each test uses a part

pub mod node;
pub mod peer;

use gpumemd::app::{self, Setup, Signals};
use gpumemd::config::{Config, Home, Settings};
use gpumemd::signals::Pulse;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

pub use gpumem_test_support::{DEADLINE as PATIENCE, wait_for};

/// A directory that is removed when the value is dropped.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("gpumemd-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Scratch(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns a port that was free just now.
pub fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port")
}

/// A daemon that runs in a thread of this process.
pub struct Daemon {
    pub scratch: Scratch,
    pub metrics: SocketAddr,
    end: UnixStream,
    reload: UnixStream,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

/// Starts a daemon with this configuration; `$DIR` in it is its directory.
pub fn start(config: &str) -> Daemon {
    start_in(Scratch::new(), config)
}

pub fn start_in(scratch: Scratch, config: &str) -> Daemon {
    let metrics = free_port();
    let file = scratch.join("gpumemd.toml");
    // Keys that the caller gives are kept; missing ones are added.
    let given = |section: &str, key: &str, value: String, text: String| {
        if text.contains(&format!("{key} =")) {
            return text;
        }
        let line = format!("{key} = {value}\n");
        match text.find(&format!("[{section}]\n")) {
            Some(at) => {
                let at = at + section.len() + 3;
                format!("{}{line}{}", &text[..at], &text[at..])
            }
            None => format!("{text}\n[{section}]\n{line}"),
        }
    };
    let dir = scratch.0.display().to_string();
    let mut text = format!("runtime_dir = \"{dir}/run\"\n{}", config.replace("$DIR", &dir));
    text = given("runs", "store", format!("\"{dir}/runs.sqlite\""), text);
    text = given("metrics", "listen", format!("\"{metrics}\""), text);
    text = given("nvml", "library", "\"/nonexistent/libnvidia-ml.so.1\"".into(), text);
    std::fs::write(&file, text).expect("a file");
    let setup = Setup { file: Some(file), private: false, home: Home::of_process(), service: false };
    start_as(scratch, metrics, setup)
}

pub fn start_as(scratch: Scratch, metrics: SocketAddr, setup: Setup) -> Daemon {
    let mut settings = setup.settings().expect("settings");
    settings.nvml.program = Some(env!("CARGO_BIN_EXE_gpumemd").into());
    settings.shown.young = Duration::ZERO; // processes of tests are always young
    let (tell, told) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(async {
            let (end, ended) = Pulse::pair()?;
            let (reload, reloaded) = Pulse::pair()?;
            tell.send((end, reload)).expect("the test listens");
            app::run(setup, settings, Signals { end: ended, reload: reloaded }).await
        });
        runtime.shutdown_background();
        result
    });
    let (end, reload) = told.recv().expect("the daemon starts");
    let daemon = Daemon { scratch, metrics, end, reload, thread: Some(thread) };
    wait_for("the daemon", || {
        let private = daemon.scratch.join("gpumem/control.sock");
        let answers = |path| UnixStream::connect(path).is_ok();
        (daemon.is_over() || answers(daemon.control_socket()) || answers(private)).then_some(())
    });
    daemon
}

impl Daemon {
    pub fn agent_socket(&self) -> PathBuf {
        self.scratch.join("run/agent.sock")
    }

    pub fn control_socket(&self) -> PathBuf {
        self.scratch.join("run/control.sock")
    }

    pub fn store(&self) -> PathBuf {
        self.scratch.join("runs.sqlite")
    }

    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the daemon and returns its result.
    pub fn end(&mut self) -> anyhow::Result<()> {
        let _ = self.end.write_all(b"x");
        self.result()
    }

    /// Waits until the daemon ends, and returns its result.
    pub fn result(&mut self) -> anyhow::Result<()> {
        let thread = self.thread.take().expect("it was not ended yet");
        wait_for("the daemon to end", || thread.is_finished().then_some(()));
        thread.join().expect("it does not panic")
    }

    pub fn reload(&mut self) {
        self.reload.write_all(b"x").expect("it listens");
    }

    pub fn config(&self) -> PathBuf {
        self.scratch.join("gpumemd.toml")
    }

    pub fn get(&self, path: &str) -> (u16, serde_json::Value) {
        self.ask("GET", path)
    }

    pub fn ask(&self, method: &str, path: &str) -> (u16, serde_json::Value) {
        let stream = UnixStream::connect(self.control_socket()).expect("a daemon");
        let (status, body) = http(stream, method, path);
        let value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
        (status, value)
    }

    pub fn scrape(&self) -> String {
        let stream = TcpStream::connect(self.metrics).expect("a daemon");
        let (status, body) = http(stream, "GET", "/metrics");
        assert_eq!(status, 200, "{body}");
        body
    }

    /// Returns the value of a series.
    pub fn metric(&self, series: &str) -> Option<f64> {
        metric(&self.scrape(), series)
    }

    /// Returns the runs that match a query, as the control API returns them.
    pub fn runs(&self, query: &str) -> Vec<gpumem_model::run::Run> {
        let (status, value) = self.get(&format!("/v1/runs{query}"));
        assert_eq!(status, 200, "{value}");
        serde_json::from_value(value).expect("runs")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.end.write_all(b"x");
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the value of a series in a scrape.
pub fn metric(scrape: &str, series: &str) -> Option<f64> {
    let line =
        scrape.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')))?;
    line[series.len()..].trim().parse().ok()
}

/// Sends a request. Returns status and body of the answer.
pub fn http(mut stream: impl Read + Write, method: &str, path: &str) -> (u16, String) {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, body.to_owned())
}

/// Returns the setup of a private daemon in `scratch`.
pub fn private(scratch: &Scratch, idle_exit_s: f64) -> Setup {
    let file = scratch.join("private.toml");
    let text = format!(
        "[private]\nidle_exit_s = {idle_exit_s}\n[nvml]\nlibrary = \"/nonexistent/libnvidia-ml.so.1\"\n"
    );
    std::fs::write(&file, text).expect("a file");
    let home = Home {
        runtime: Some(scratch.0.clone()),
        state: Some(scratch.0.clone()),
        store: None,
        ..Home::of_process()
    };
    Setup { file: Some(file), private: true, home, service: false }
}

pub fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, Path::new("test.toml")).map_err(|error| error.to_string())
}

pub fn settings(text: &str) -> Settings {
    Settings::of(&parse(text).expect("a configuration"), false, &Home::of_process()).expect("settings")
}
