//! A clean Debian with a real systemd, booted in namespaces of this machine (tests/systemd/boot.sh).

use gpumem_tests::live::programs::{fake, programs};
use gpumem_tests::live::until;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

/// Reports why a test cannot run here. Panics with GPUMEM_TOOLS_REQUIRED set.
fn skip(why: &str) {
    gpumem_test_support::skip(why, "");
}

/// Returns the clean root, created once.
fn root() -> Option<&'static Path> {
    static ROOT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let root = ROOT.get_or_init(|| {
        let since = Instant::now();
        let output = Command::new(project().join("tests/tools/debian-root.sh")).output();
        let output = output.map_err(|error| error.to_string())?;
        println!("a Debian root: {:.1} s", since.elapsed().as_secs_f64());
        match String::from_utf8_lossy(&output.stdout).lines().last() {
            Some(path) if output.status.success() => Ok(path.into()),
            _ => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    });
    root.as_deref().map_err(|why| skip(why)).ok()
}

/// The package, and its previous version.
pub struct Packages {
    pub old: PathBuf,
    pub new: PathBuf,
}

pub const OLD: &str = "0.0.1";

/// Returns both packages, made of the programs that were built for tests.
pub fn packages() -> &'static Packages {
    static PACKAGES: OnceLock<Packages> = OnceLock::new();
    PACKAGES.get_or_init(|| {
        let since = Instant::now();
        let made = |version: Option<&str>| {
            let mut command = Command::new(project().join("packaging/deb.sh"));
            command.arg(&programs().ours).arg(programs().ours.join("packages"));
            // No compression: the package is read only once, and packing would take most of the time.
            command.env("DPKG_DEB_COMPRESSOR_TYPE", "none");
            if let Some(version) = version {
                command.env("VERSION", version);
            }
            let output = command.output().expect("deb.sh runs");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
        };
        let packages = Packages { old: made(Some(OLD)), new: made(None) };
        println!("two packages: {:.1} s", since.elapsed().as_secs_f64());
        packages
    })
}

/// A running machine, stopped on drop.
pub struct Boot {
    process: Child,
    init: u32,
    dir: PathBuf,
}

impl Boot {
    /// Boots a machine; `None`, after printing the reason, if that is not possible. `mode`: `v2` or `hybrid`.
    pub fn start(mode: &str) -> Option<Self> {
        let root = root()?;
        let since = Instant::now();
        let dir = std::env::temp_dir().join(format!("gpumem-boot-{}-{mode}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let mut command = Command::new(project().join("tests/systemd/boot.sh"));
        command.arg(root).arg(&dir).arg(mode).arg(&programs().ours).arg(fake());
        let log = std::fs::File::create(dir.join("log")).expect("a log");
        let mut process =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("bash");
        let init = until(30, "an init", || {
            if let Some(status) = process.try_wait().expect("a child") {
                return Some(Err(status.code()));
            }
            let outer = std::fs::read_to_string(dir.join("pid")).ok()?;
            let children = format!("/proc/{0}/task/{0}/children", outer.trim());
            std::fs::read_to_string(children).ok()?.split_whitespace().next()?.parse().ok().map(Ok)
        });
        let init: u32 = match init {
            Ok(init) => init,
            Err(code) => {
                let printed = std::fs::read_to_string(dir.join("log")).unwrap_or_default();
                let _ = std::fs::remove_dir_all(&dir);
                assert_eq!(code, Some(77), "{printed}");
                // This machine does not support the mode, so the test is skipped.
                gpumem_test_support::skip(printed.trim(), "");
                return None;
            }
        };
        let boot = Boot { process, init, dir };
        until(60, "a booted system", || {
            let (_, state) = boot.sh_may_fail("systemctl is-system-running");
            matches!(state.trim(), "running" | "degraded").then_some(())
        });
        assert_eq!(boot.sh("systemctl --failed --quiet --no-legend"), "", "failed units");
        println!("{mode}: booted in {:.1} s", since.elapsed().as_secs_f64());
        Some(boot)
    }

    /// Runs a script in the machine as root; returns whether it succeeded, and its output.
    pub fn sh_may_fail(&self, script: &str) -> (bool, String) {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.init.to_string(), "-m", "-u", "-i", "-n", "-p", "-C", "--"]);
        command.args(["sh", "-c", script]).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("LANG", "C.UTF-8").env("HOME", "/root").stdin(Stdio::null());
        let output = command.output().expect("nsenter");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        (output.status.success(), if output.status.success() { printed } else { printed + &errors })
    }

    /// Runs a script that must succeed, and returns its output.
    #[track_caller]
    pub fn sh(&self, script: &str) -> String {
        let (is_good, printed) = self.sh_may_fail(script);
        assert!(is_good, "{script}: {printed}\n{}", self.journal());
        printed
    }

    /// Returns the path of a machine's file on the host.
    pub fn file(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Returns a property of a unit.
    pub fn show(&self, unit: &str, property: &str) -> String {
        self.sh(&format!("systemctl show {unit} -P {property}")).trim().to_owned()
    }

    /// Returns the last log lines of gpumemd and of systemd about it.
    pub fn journal(&self) -> String {
        self.sh_may_fail("journalctl --no-pager -o cat -u gpumemd | tail -n 60").1
    }

    /// Returns the time of gpumemd's last log line with this word.
    pub fn logged(&self, word: &str) -> SystemTime {
        let script = format!("journalctl --no-pager -o short-unix -u gpumemd | grep '{word}' | tail -n 1");
        let line = self.sh(&script);
        let seconds = line.split(' ').next().and_then(|seconds| seconds.parse().ok());
        UNIX_EPOCH
            + Duration::from_secs_f64(seconds.unwrap_or_else(|| panic!("no line with {word}: {line:?}")))
    }

    /// Waits until the log has these words.
    #[track_caller]
    pub fn wait_for_log(&self, words: &[&str]) {
        let mut printed = String::new();
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            printed = self.journal();
            if printed.lines().any(|line| words.iter().all(|word| line.contains(word))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("no line with {words:?} in:\n{printed}");
    }
}

impl Drop for Boot {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.process.id().to_string()).status();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
