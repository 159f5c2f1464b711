//! A simulated machine: a folder with its file, its truth journal, and the programs that run on it.

use super::programs::{fake, programs};
use super::truth::{self, Truth};
use super::until;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};

/// A separate machine; its folder is deleted with it.
#[derive(Debug)]
pub struct Machine {
    /// The folder.
    pub dir: PathBuf,
}

impl Machine {
    /// Creates a machine with these keys (`devices=2`, `gpu0.fault=lost`: tests/fake-gpu/README.md).
    ///
    /// # Panics
    /// If it cannot be created.
    pub fn new(keys: &[&str]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("gpumem-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let machine = Machine { dir };
        machine.tool("init", &[keys, &[&format!("truth={}", machine.truth_path().display())]].concat());
        machine
    }

    fn truth_path(&self) -> PathBuf {
        self.dir.join("truth")
    }

    /// Path of its file, for $GPUMEM_SIM. In memory, because write-back to a disk would stall accesses.
    pub fn sim(&self) -> PathBuf {
        let name = self.dir.file_name().unwrap_or_default();
        Path::new("/dev/shm").join(name)
    }

    /// Runs the machine's tool (`set`, `show`, `hold`...) and returns its output.
    ///
    /// # Panics
    /// If it fails.
    pub fn tool(&self, verb: &str, words: &[&str]) -> String {
        let mut command = Command::new(fake().join("bin/fake-gpu"));
        let output = command.arg(verb).arg(self.sim()).args(words).output().expect("fake-gpu runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "fake-gpu {verb} {words:?}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Returns the number of process lists that NVML has made.
    ///
    /// # Panics
    /// If the machine's tool fails.
    pub fn lists(&self) -> u64 {
        let shown = self.tool("show", &[]);
        let count = shown.lines().find_map(|line| line.strip_prefix("lists=")).expect("a count");
        count.parse().expect("a number")
    }

    /// Changes keys at run time.
    pub fn set(&self, keys: &[&str]) {
        self.tool("set", keys);
    }

    /// Returns the journal so far. The machine detects ended processes only when it is queried.
    pub fn truth(&self) -> Vec<Truth> {
        self.tool("show", &[]);
        truth::read(&self.truth_path())
    }

    /// Returns the journal entries of ended processes.
    pub fn ends(&self) -> Vec<Truth> {
        self.tool("show", &[]);
        truth::ends(&self.truth_path())
    }

    /// Returns the latest entries.
    pub fn latest_truth(&self) -> Vec<Truth> {
        truth::read_end(&self.truth_path())
    }

    /// Empties the journal, which would grow large in an hour. Its writers append whole lines.
    ///
    /// # Panics
    /// If that fails.
    pub fn forget_truth(&self) {
        let journal =
            std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(self.truth_path());
        journal.and_then(|journal| journal.set_len(0)).expect("emptied");
    }

    /// Returns a program that sees this machine's driver. Its environment contains nothing of gpumem.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        for name in [
            "CUDA_INJECTION64_PATH",
            "NVTX_INJECTION64_PATH",
            "GPUMEM_SOCKET",
            "GPUMEM_CONTROL",
            "XDG_RUNTIME_DIR",
        ] {
            command.env_remove(name);
        }
        command.env("GPUMEM_SIM", self.sim()).env("LD_LIBRARY_PATH", programs().fake.join("lib"));
        command.env("GPUMEM_STORE", self.dir.join("runs.sqlite")).env("HOME", &self.dir);
        // Memory without a tag has no name in most tests; only sites.rs enables names.
        command.env("GPUMEM_SITES", "0");
        // On a busy machine the final records may take longer than the product's default waits.
        command.env("GPUMEM_EXIT_WAIT_MS", "2000");
        command
    }

    /// Returns a trainer without an agent.
    pub fn bare_trainer(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(programs().fake.join("bin/trainer"));
        command.args(arguments);
        command
    }

    /// Returns a trainer that reports to the daemon in `runtime`.
    pub fn trainer(&self, runtime: &Path, arguments: &[&str]) -> Command {
        self.covered(runtime, self.bare_trainer(arguments))
    }

    /// Returns a program that does everything that changes the gap (tests/gap), reporting to the daemon in `runtime`.
    pub fn gap(&self, runtime: &Path) -> Command {
        self.covered(runtime, self.command(programs().fake.join("bin/gap")))
    }

    fn covered(&self, runtime: &Path, mut command: Command) -> Command {
        command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
        command.env("GPUMEM_SOCKET", runtime.join("agent.sock"));
        command
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.sim());
        if !std::thread::panicking() && std::env::var_os("GPUMEM_KEEP").is_none() {
            let _ = std::fs::remove_dir_all(&self.dir);
        } else {
            eprintln!("kept: {}", self.dir.display());
        }
    }
}

/// A running program; killed on drop.
#[derive(Debug)]
pub struct Job {
    child: Child,
    lines: Receiver<String>,
    /// Lines printed so far.
    pub said: Vec<String>,
}

impl Job {
    /// Starts it and reads its standard output.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("started");
        let out = BufReader::new(child.stdout.take().expect("piped"));
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        Job { child, lines, said: Vec::new() }
    }

    /// Returns its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that contains `what`, and returns it.
    ///
    /// # Panics
    /// If it does not appear.
    pub fn wait_for(&mut self, what: &str) -> String {
        if let Some(line) = self.said.iter().find(|line| line.contains(what)) {
            return line.clone();
        }
        until(60, &format!("{what:?} from {:?}", self.child), || {
            while let Ok(line) = self.lines.try_recv() {
                self.said.push(line);
                if let Some(line) = self.said.last().filter(|line| line.contains(what)) {
                    return Some(line.clone());
                }
            }
            None
        })
    }

    /// Returns the lines printed since the last call.
    pub fn hear(&mut self) -> Vec<String> {
        let lines: Vec<String> = self.lines.try_iter().collect();
        self.said.extend(lines.iter().cloned());
        lines
    }

    /// Sends a signal by its name.
    ///
    /// # Panics
    /// If the process is gone.
    pub fn signal(&self, signal: &str) {
        let pid = self.pid().to_string();
        let status = Command::new("kill").args(["-s", signal, &pid]).status().expect("kill runs");
        assert!(status.success(), "kill -s {signal} {pid}");
    }

    /// Returns whether it is still running.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end and collects its whole output.
    ///
    /// # Panics
    /// If it does not end.
    pub fn end(&mut self) -> ExitStatus {
        let pid = self.pid();
        let status = until(120, &format!("the end of {pid}"), || self.child.try_wait().expect("waited for"));
        while let Ok(line) = self.lines.recv_timeout(std::time::Duration::from_secs(2)) {
            self.said.push(line);
        }
        status
    }

    /// Signals a trainer to finish, and waits for its successful end.
    pub fn enough(&mut self) {
        self.signal("TERM");
        self.finish();
    }

    /// Waits for a successful end.
    ///
    /// # Panics
    /// If it ends otherwise.
    pub fn finish(&mut self) {
        let status = self.end();
        assert!(status.success(), "{status} (signal {:?}): {:#?}", status.signal(), self.said);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
