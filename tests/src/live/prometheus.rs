//! A real Prometheus and its promtool: installed ones, or else those of Debian's package, unpacked without installation.

use super::machine::Job;
use super::until;
use gpumem_test_support::skip;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// Returns the path of the program `name`; `None` with a message if it is not available.
///
/// # Panics
/// If it is not available and GPUMEM_TOOLS_REQUIRED is set, because CI must not skip.
pub fn tool(name: &str) -> Option<PathBuf> {
    let found = search(name).or_else(|| Some(debian()?.join("usr/bin").join(name)));
    let found = found.filter(|path| path.exists());
    if found.is_none() {
        skip(
            &format!("there is no {name}, and Debian's package cannot be fetched"),
            "apt-get install prometheus",
        );
    }
    found
}

fn search(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.exists())
}

/// Returns the folder in which Debian's package is unpacked.
fn debian() -> Option<&'static Path> {
    static DIR: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIR.get_or_init(|| {
        let this = std::env::current_exe().ok()?;
        let dir = this.ancestors().nth(3)?.join("tools/prometheus");
        let quiet = |command: &mut Command| {
            let command = command.current_dir(&dir).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        if !dir.join("usr/bin/promtool").exists() {
            std::fs::create_dir_all(&dir).ok()?;
            let download = || quiet(Command::new("apt-get").args(["download", "prometheus"]));
            if !download() {
                quiet(Command::new("apt-get").arg("update"));
                download();
            }
            quiet(Command::new("sh").args(["-c", "dpkg-deb -x prometheus_*.deb ."]));
        }
        Some(dir)
    })
    .as_deref()
}

/// Returns an address without a listener.
///
/// # Panics
/// If there is none.
pub fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address")
}

/// Returns the body of GET `path`; `None` unless the reply is 200.
pub fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    if !head.starts_with("HTTP/1.1 200") {
        return None;
    }
    if !head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return Some(body.to_owned());
    }
    let (mut rest, mut whole) = (body, String::new());
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).ok().filter(|&size| size > 0);
        let Some(chunk) = size.and_then(|size| after.get(..size)) else { break };
        whole += chunk;
        rest = after.get(chunk.len() + 2..)?;
    }
    Some(whole)
}

/// Returns promtool's complaints about an exposition; empty if there are none.
///
/// # Panics
/// If promtool does not run.
pub fn check_metrics(promtool: &Path, text: &str) -> String {
    let mut command = Command::new(promtool);
    command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("promtool runs");
    child.stdin.take().expect("piped").write_all(text.as_bytes()).expect("written");
    let output = child.wait_with_output().expect("ended");
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A server that scrapes one target every second.
#[derive(Debug)]
pub struct Server {
    _job: Job,
    address: SocketAddr,
}

impl Server {
    /// Starts a server with its data in `dir`.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn start(program: &Path, dir: &Path, target: SocketAddr) -> Self {
        Server::of_fleet(program, dir, &[target])
    }

    /// Starts a server with several targets.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn of_fleet(program: &Path, dir: &Path, targets: &[SocketAddr]) -> Self {
        let targets: Vec<String> = targets.iter().map(|target| format!("'{target}'")).collect();
        let targets = targets.join(", ");
        let config = format!(
            "global: {{scrape_interval: 1s}}\nscrape_configs:\n- job_name: gpumemd\n  static_configs: [{{targets: [{targets}]}}]\n"
        );
        Server::with_config(program, dir, &config)
    }

    /// Starts a server with this configuration.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn with_config(program: &Path, dir: &Path, config: &str) -> Self {
        let address = free_address();
        let file = dir.join("prometheus.yml");
        std::fs::write(&file, config).expect("written");
        let mut command = Command::new(program);
        command.arg(format!("--config.file={}", file.display()));
        command.arg(format!("--storage.tsdb.path={}", dir.join("tsdb").display()));
        command.arg(format!("--web.listen-address={address}"));
        command.stderr(std::fs::File::create(dir.join("prometheus.log")).expect("a log"));
        let job = Job::start(&mut command);
        until(60, "an answering Prometheus", || get(address, "/-/ready"));
        Server { _job: job, address }
    }

    /// Returns the reply of its API.
    pub fn ask(&self, path: &str) -> Option<serde_json::Value> {
        serde_json::from_str(&get(self.address, path)?).ok()
    }

    /// Returns its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the samples of an instant query, as labels and value.
    ///
    /// # Panics
    /// If the query is refused.
    pub fn query(&self, query: &str) -> Vec<(serde_json::Value, f64)> {
        let encode = |byte: u8| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => char::from(byte).to_string(),
            byte => format!("%{byte:02X}"),
        };
        let encoded: String = query.bytes().map(encode).collect();
        let answer = self.ask(&format!("/api/v1/query?query={encoded}"));
        let answer = answer.unwrap_or_else(|| panic!("refused: {query}"));
        let result = answer["data"]["result"].as_array().expect("a vector").clone();
        let value =
            |sample: &serde_json::Value| sample["value"][1].as_str().and_then(|text| text.parse().ok());
        result.iter().filter_map(|sample| Some((sample["metric"].clone(), value(sample)?))).collect()
    }
}
