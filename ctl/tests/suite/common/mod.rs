//! Shared parts of the tests of gpumemctl.
#![allow(dead_code)] // each test program uses its part

pub mod site;

use gpumem_import::read_file;
use gpumem_model::run::Run;
use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A temporary folder, deleted on drop. Its path is short, because sockets need short paths.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gpctl-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }
    /// Returns a gpumemctl command whose store and runtime directory are in this folder.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpumemctl"));
        self.settle(&mut command);
        command.args(args);
        command
    }
    pub fn settle(&self, command: &mut Command) {
        for name in
            ["GPUMEM_JOB", "GPUMEM_SOCKET", "GPUMEM_CONTROL", "GPUMEM_RECORD", "CUDA_INJECTION64_PATH"]
        {
            command.env_remove(name);
        }
        command
            .env("GPUMEM_STORE", self.path("runs.sqlite"))
            .env("XDG_RUNTIME_DIR", &self.0)
            .stdin(Stdio::null());
    }
    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("gpumemctl")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// Returns exit code and message of a command that must fail, with nothing on standard output and no panic.
pub fn failure(output: &Output) -> (i32, String) {
    let message = stderr(output);
    assert!(output.stdout.is_empty() && !message.contains("panicked"), "{output:?}");
    (output.status.code().expect("an exit, not a signal"), message)
}

/// Waits until `look` returns a value.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(since.elapsed() < Duration::from_secs(20), "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log")
}

/// Returns a run for a daemon's reply.
pub fn run_of(pid: u32, job: &str, rank: Option<u32>) -> Run {
    let mut run = read_file(&shipped(), None).expect("a log").remove(0);
    run.source.kind = "daemon".into();
    run.source.origin = "node7".into();
    run.process.pid = pid;
    run.process.start_ticks = u64::MAX >> 1;
    run.process.uid = Some(u64::from(rustix::process::getuid().as_raw()));
    run.process.claims.insert("job".into(), job.into());
    if let Some(rank) = rank {
        run.process.claims.insert("rank".into(), rank.to_string());
    }
    run
}

/// Replies of the fake daemon by request.
pub type Answers = HashMap<String, (u16, String)>;

/// A daemon that gives prepared replies, and records the requests.
pub struct FakeDaemon {
    pub asked: Arc<Mutex<Vec<String>>>,
    pub answers: Arc<Mutex<Answers>>,
}

impl FakeDaemon {
    /// Listens at a path; creates its directory.
    pub fn at(socket: &Path) -> Self {
        fs::create_dir_all(socket.parent().expect("a directory")).expect("a directory");
        let listener = UnixListener::bind(socket).expect("a socket");
        let daemon = FakeDaemon { asked: Arc::default(), answers: Arc::default() };
        let (asked, answers) = (Arc::clone(&daemon.asked), Arc::clone(&daemon.answers));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                answer(stream, &asked, &answers);
            }
        });
        daemon
    }

    pub fn says(&self, request: &str, status: u16, body: impl ToString) -> &Self {
        self.answers.lock().expect("answers").insert(request.to_owned(), (status, body.to_string()));
        self
    }

    pub fn runs(&self, request: &str, runs: &[&Run]) -> &Self {
        self.says(&format!("GET /v1/runs{request}"), 200, serde_json::to_string(runs).expect("JSON"))
    }

    pub fn was_asked(&self) -> Vec<String> {
        self.asked.lock().expect("requests").clone()
    }
}

fn answer(mut stream: UnixStream, asked: &Mutex<Vec<String>>, answers: &Mutex<Answers>) {
    let mut lines = BufReader::new(stream.try_clone().expect("a copy")).lines();
    let Some(Ok(first)) = lines.next() else { return };
    while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
    let request = first.trim_end_matches(" HTTP/1.1").to_owned();
    let known = answers.lock().expect("answers");
    let exact = known.get(&request).cloned();
    // `?*` matches any query.
    let any = || known.get(&format!("{}?*", request.split('?').next().unwrap_or(""))).cloned();
    let empty = request.starts_with("GET /v1/runs").then(|| (200, "[]".to_owned()));
    let (status, body) =
        exact.or_else(any).or(empty).unwrap_or((404, r#"{"error":"no such path"}"#.to_owned()));
    drop(known);
    asked.lock().expect("requests").push(request);
    let text = if status == 0 {
        body
    } else {
        let length = body.len();
        format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}")
    };
    let _ = stream.write_all(text.as_bytes());
}

/// Quotes a path for a shell, because the repository may be in a folder whose name has a space.
pub fn quoted(path: &str) -> String {
    if path.contains(' ') { format!("'{path}'") } else { path.to_owned() }
}
