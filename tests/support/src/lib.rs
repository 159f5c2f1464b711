//! Helpers for the tests of all crates. Has no dependencies, so any crate may use it.
//!
//! ```text
//! skip    a test that cannot run here reports the reason, and is counted
//! alone   a test that needs a separate process
//! wait    waiting for a condition
//! bar     time limit, checked on a quiet machine only
//! waits   for how long this machine keeps a program waiting for a processor
//! gpu     the simulated GPU machine, built
//! copy    this test program where every user may execute it
//! ```

use std::any::type_name;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long a test waits for a condition before it fails. Far longer than any condition takes, so that a busy machine fails no test.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// Returns `limit`, or a multiple of it if more tasks want a processor than there are: as many times as long.
pub fn on_this_machine(limit: Duration) -> Duration {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    limit.mul_f64((load / processors as f64).max(1.0))
}

/// File to which [`skip`] appends a line for each skip; set by tests/tools/lanes.py, which counts them.
const SKIPS: &str = "GPUMEM_TEST_SKIPS";
/// Name of the test that this process runs alone; set by [`alone`].
const ALONE: &str = "GPUMEM_TEST_ALONE";

/// Records that the calling test cannot run here, completely or in part. `command` provides the missing requirement; it is
/// empty if no command does.
///
/// # Panics
/// With GPUMEM_TOOLS_REQUIRED set: there every skip is a failure.
#[track_caller]
pub fn skip(reason: &str, command: &str) {
    let how = if command.is_empty() { String::new() } else { format!(" (get it with: {command})") };
    assert!(std::env::var_os("GPUMEM_TOOLS_REQUIRED").is_none(), "skipped although required: {reason}{how}");
    eprintln!("skipped: {reason}{how}");
    let thread = std::thread::current();
    let test = std::env::var(ALONE).ok().or_else(|| thread.name().map(str::to_owned)).unwrap_or_default();
    if let Some(file) = std::env::var_os(SKIPS) {
        let line = format!("{test}\t{}\t{command}\n", reason.replace(['\n', '\t'], " "));
        let file = OpenOptions::new().append(true).create(true).open(file);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file of skips can be written");
    }
}

/// Returns whether there is a C++ compiler. Otherwise records that the calling test skips its checks of C++.
#[track_caller]
pub fn has_cxx() -> bool {
    let has = Command::new("c++").arg("--version").output().is_ok();
    if !has {
        skip("there is no C++ compiler", "apt-get install g++");
    }
    has
}

/// Runs the body of a test in a separate process, because it changes process-wide state: the agent, the allocator,
/// signal handlers. Call it from the test function with a closure: the closure's type contains the test's name.
///
/// # Panics
/// When that process fails; its output is in the message.
#[track_caller]
pub fn alone<F: FnOnce()>(body: F) {
    let path = type_name::<F>().trim_end_matches("::{{closure}}");
    let (_, test) = path.split_once("::").expect("a test inside of a module");
    if std::env::var(ALONE).is_ok_and(|name| name == test) {
        return body();
    }
    let output = Command::new(std::env::current_exe().expect("this program's path"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(ALONE, test)
        .stdin(Stdio::null())
        .output()
        .expect("this program can be started");
    let out = String::from_utf8_lossy(&output.stdout);
    let told = format!("{out}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{test}: {}\n{told}", output.status);
    println!("{told}");
}

/// Waits until `condition` returns something, and returns that.
///
/// # Panics
/// After [`DEADLINE`] (see [`on_this_machine`]), with `what` in the message.
#[track_caller]
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        let waited = began.elapsed();
        assert!(
            waited < DEADLINE || waited < on_this_machine(DEADLINE),
            "not within {} s: {what}",
            waited.as_secs()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Measures for how long this machine keeps a program waiting for a processor, until it is dropped. A bound on the product's own
/// clock holds on a busy machine if such a wait is added for each of its steps.
#[derive(Debug)]
pub struct ProcessorWait(Arc<AtomicU64>);

impl ProcessorWait {
    /// Starts measuring in a thread.
    #[must_use]
    pub fn measure() -> Self {
        const SLEEP: Duration = Duration::from_millis(20);
        const WORK: Duration = Duration::from_millis(2);
        let longest_ns = Arc::new(AtomicU64::new(0));
        let measured = Arc::downgrade(&longest_ns);
        std::thread::spawn(move || {
            while let Some(longest_ns) = measured.upgrade() {
                let began = Instant::now();
                std::thread::sleep(SLEEP);
                let mut waited = began.elapsed().saturating_sub(SLEEP);
                let (working, mut last) = (Instant::now(), Instant::now());
                while working.elapsed() < WORK {
                    waited = waited.max(last.elapsed());
                    last = Instant::now();
                }
                longest_ns.fetch_max(waited.as_nanos() as u64, Ordering::Relaxed);
            }
        });
        ProcessorWait(longest_ns)
    }

    /// Returns the longest wait so far.
    #[must_use]
    pub fn longest(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Prints a duration. With GPUMEM_TEST_BARS set, as in `make bench` on a quiet machine, it must not exceed `most`. On a
/// shared machine a duration does not measure the program.
///
/// # Panics
/// With that variable set, when it took longer.
#[track_caller]
pub fn bar(what: &str, took: Duration, most: Duration) {
    println!("{what}: {took:.2?}, bar {most:.2?}");
    let is_checked = std::env::var_os("GPUMEM_TEST_BARS").is_some();
    assert!(!is_checked || took <= most, "{what}: took {took:.2?}, may take {most:.2?}");
}

/// The folder of the simulated GPU machine, with `lib/` and `bin/`: built if it is not up to date. tests/tools/lanes.py has built it before
/// it starts a test.
///
/// # Panics
/// When it cannot be built.
pub fn simulated_gpu() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the workspace");
        let this = std::env::current_exe().expect("this program's path");
        // target/PROFILE/deps/this-test, or target/PROFILE/bench.
        let profile = this.ancestors().skip(1).find(|folder| !folder.ends_with("deps")).expect("a profile");
        let fake = profile.parent().expect("target").join("fake-gpu");
        if std::env::var_os("GPUMEM_TEST_BUILT").is_some() {
            return fake;
        }
        // One at a time: other test programs may be about to build the same files.
        std::fs::create_dir_all(&fake).expect("a folder");
        let lock = std::fs::File::create(fake.join("lock")).expect("a file");
        lock.lock().expect("the lock of the folder");
        for part in ["fake-gpu", "trainer", "mixer", "gap"] {
            let mut out = OsString::from("OUT=");
            // make does not support spaces in paths: a relative path has none.
            out.push(fake.strip_prefix(root).map_or(fake.clone(), |below| Path::new("../..").join(below)));
            let mut make = Command::new("make");
            make.arg("-s").arg("-C").arg(root.join("tests").join(part)).arg(out);
            assert!(make.status().expect("make runs").success(), "tests/{part} cannot be built: see above");
        }
        fake
    })
}

/// A copy of this test program that every user may execute, whatever the modes of the folders above the original. Removed with its
/// value.
#[derive(Debug)]
pub struct SharedCopy(PathBuf);

impl SharedCopy {
    /// Makes the copy in the folder for temporary files. Another process writes it. A child that another thread forks
    /// at that moment would inherit the file open for writing, and such a file cannot be executed.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn of_this_program() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("gpumem-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let copy = std::env::temp_dir().join(name);
        let from = std::env::current_exe().expect("this program's path");
        let status = Command::new("install").args(["-m", "755"]).arg(from).arg(&copy).status();
        assert!(status.expect("install runs").success(), "no copy at {}", copy.display());
        SharedCopy(copy)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SharedCopy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
