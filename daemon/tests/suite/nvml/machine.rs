//! A simulated machine, and processes that hold its memory.

use gpumem_test_support::simulated_gpu;
use std::future::Future;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A simulated machine; its files are removed when it is dropped.
pub struct Machine {
    dir: PathBuf,
}

impl Machine {
    pub fn new(keys: &[&str]) -> Machine {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("machine-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&dir).expect("a folder");
        let machine = Machine { dir };
        machine.tool("init", keys);
        machine
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn file(&self) -> PathBuf {
        self.dir.join("sim")
    }

    fn tool(&self, what: &str, words: &[&str]) -> String {
        let tool = simulated_gpu().join("bin/fake-gpu");
        let output =
            Command::new(tool).arg(what).arg(self.file()).args(words).output().expect("the tool runs");
        assert!(output.status.success(), "{what} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    pub fn set(&self, word: &str) {
        self.tool("set", &[word]);
    }

    pub fn hold(&self, pid: u32, device: u32, bytes: u64) {
        self.tool("hold", &[&pid.to_string(), &device.to_string(), &bytes.to_string()]);
    }

    pub fn xid(&self, device: u32, number: u32) {
        self.tool("xid", &[&device.to_string(), &number.to_string()]);
    }

    pub fn event(&self, device: u32, kind: u32, data: u32) {
        self.tool("event", &[&device.to_string(), &kind.to_string(), &data.to_string()]);
    }

    /// Simulates unbinding the driver from the GPU with this id.
    pub fn unbind(&self, gpu: u32) {
        self.tool("unbind", &[&gpu.to_string()]);
    }

    /// Returns how many times a function of NVML has been called.
    pub fn calls(&self, name: &str) -> u64 {
        let line = format!("call {name} ");
        self.show().lines().find_map(|text| text.strip_prefix(&line)?.parse().ok()).unwrap_or(0)
    }

    pub fn show(&self) -> String {
        self.tool("show", &[])
    }

    /// Starts a program that uses CUDA on the visible devices, and keeps running.
    pub fn trainer(&self, visible: &str) -> Holder {
        let out = simulated_gpu();
        let mut child = Command::new(out.join("bin/trainer"))
            .args(["--steps", "2", "--hold", "1000"])
            .env("GPUMEM_SIM", self.file())
            .env("LD_LIBRARY_PATH", out.join("lib"))
            .env("CUDA_VISIBLE_DEVICES", visible)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the trainer runs");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        assert!(lines.any(|line| line.expect("text").starts_with("holding")), "it did its steps");
        Holder(child)
    }

    /// Returns the bytes that a process holds on a device, according to the simulation.
    pub fn used(&self, pid: u32, device: u32) -> u64 {
        self.tool("used", &[&pid.to_string(), &device.to_string()]).trim().parse().expect("a number")
    }

    /// Returns the number of processes that have NVML open.
    pub fn clients(&self) -> u32 {
        let text = self.show();
        let line = text.lines().find_map(|line| line.strip_prefix("nvml.clients=")).expect("a line");
        line.parse().expect("a number")
    }

    pub fn library(variant: &str) -> PathBuf {
        simulated_gpu().join(variant).join("libnvidia-ml.so.1")
    }

    /// Written by another process. A child that another test forks meanwhile would keep a file of this process open for writing,
    /// and it could not be executed ("text file busy").
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.join(name);
        let words = "printf %s \"$0\" > \"$1\" && chmod 755 \"$1\"";
        let written = Command::new("sh").args(["-c", words, text]).arg(&path).status().expect("sh runs");
        assert!(written.success());
        path
    }

    /// Returns `gpumemd` on this machine as a script, because all tests share the environment of the test program.
    pub fn program(&self) -> PathBuf {
        let text = format!(
            "#!/bin/sh\nGPUMEM_SIM='{}' LD_LIBRARY_PATH='{}' exec '{}' \"$@\"\n",
            self.file().display(),
            simulated_gpu().join("lib").display(),
            env!("CARGO_BIN_EXE_gpumemd")
        );
        self.script("gpumemd", &text)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A process that holds memory in the simulation.
pub struct Holder(Child);

impl Holder {
    pub fn new() -> Holder {
        Holder(Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().expect("sleep runs"))
    }
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn start_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let (_, fields) = stat.rsplit_once(") ").expect("a line");
    fields.split(' ').nth(19).expect("field 22").parse().expect("a number")
}

pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with('Z'))
}

pub fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().expect("kill runs").success());
}

/// Waits until the condition holds.
pub async fn until<F: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> F) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so().await {
        assert!(Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
