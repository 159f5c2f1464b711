//! Debian packages of programs that run next to gpumem: unpacked, and mounted over this machine's files
//! (tests/fleet/over.sh) for one command at a time. Nothing is installed.

use gpumem_test_support::skip;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Returns the folder in which `wanted` and missing dependencies are unpacked: target/tools/NAME. `None` with a message if they
/// are not available or cannot be mounted.
///
/// # Panics
/// If they are not available and GPUMEM_TOOLS_REQUIRED is set, because CI must not skip.
pub fn unpacked(name: &str, wanted: &[&str]) -> Option<PathBuf> {
    if !quiet(Command::new("unshare").args(["--mount", "--net", "--uts", "--pid", "--fork", "true"])) {
        skip("mount, network and PID namespaces cannot be made here", "sudo make test-all LANES=fleet");
        return None;
    }
    let found = unpack(name, wanted);
    if found.is_none() {
        skip(&format!("Debian's packages {wanted:?} cannot be fetched"), "apt-get update");
    }
    found
}

/// Returns the folder target/tools/NAME, in which npm has installed these packages; `file` is one of their files. `None` with a
/// message if npm cannot fetch them.
///
/// # Panics
/// If they are not available and GPUMEM_TOOLS_REQUIRED is set, because CI must not skip.
pub fn npm(name: &str, packages: &[&str], file: &str) -> Option<PathBuf> {
    // Tests of one process share the folder, and npm moves files while it installs.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _one = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = std::env::current_exe().ok()?.ancestors().nth(3)?.join("tools").join(name);
    let fetch = || {
        // Timeouts for a registry that does not answer: npm's own are minutes for each request.
        let mut npm = Command::new("timeout");
        npm.args(["100", "npm", "install", "--no-fund", "--no-audit", "--silent", "--prefer-offline"]);
        npm.args(["--fetch-timeout=15000", "--fetch-retries=4", "--fetch-retry-mintimeout=1000", "--prefix"]);
        quiet(npm.arg(&dir).args(packages))
    };
    let is_there =
        std::fs::create_dir_all(&dir).is_ok() && (dir.join(file).exists() || (0..4).any(|_| fetch()));
    if !is_there {
        skip(&format!("npm cannot fetch {packages:?}"), "apt-get install npm");
    }
    is_there.then_some(dir)
}

/// Returns the path of a program that cargo has built from a crate of its registry, in the folder target/tools/CRATE. `None` with a
/// message if cargo cannot fetch it.
///
/// # Panics
/// If it is not available and GPUMEM_TOOLS_REQUIRED is set, because CI must not skip.
pub fn cargo_installed(name: &str, version: &str, program: &str) -> Option<PathBuf> {
    let dir = std::env::current_exe().ok()?.ancestors().nth(3)?.join("tools").join(name);
    let path = dir.join("bin").join(program);
    let build = || {
        // Without optimisation, which takes longer than the program runs.
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["install", "--quiet", "--locked", "--debug", "--version", version, "--root"]);
        quiet(cargo.arg(&dir).arg(name))
    };
    let is_there = path.exists() || build() && path.exists();
    if !is_there {
        skip(
            &format!("cargo cannot fetch {name}"),
            &format!("cargo install --root {} {name}", dir.display()),
        );
    }
    is_there.then_some(path)
}

fn quiet(command: &mut Command) -> bool {
    let command = command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn unpack(name: &str, wanted: &[&str]) -> Option<PathBuf> {
    let place = std::env::current_exe().ok()?.ancestors().nth(3)?.join("tools").join(name);
    let root = place.join("root");
    if root.exists() {
        return Some(root);
    }
    std::fs::create_dir_all(place.join("debs")).ok()?;
    if !download(&place, wanted) {
        quiet(Command::new("apt-get").arg("update"));
        download(&place, wanted).then_some(())?;
    }
    // Some packages have their own lib/, which would hide the machine's link to usr/lib. Several test programs may do this at
    // once; the first to finish wins.
    let script = "set -e; new=new.$$; mkdir $new; for deb in debs/*.deb; do [ ! -e $deb ] || dpkg-deb -x $deb $new; done; \
                  if [ -d $new/lib ]; then cp -a $new/lib/. $new/usr/lib/; rm -r $new/lib; fi; \
                  mv -T $new root || test -d root";
    quiet(Command::new("sh").args(["-c", script]).current_dir(&place)).then_some(root)
}

fn download(place: &Path, wanted: &[&str]) -> bool {
    let mut simulate = Command::new("apt-get");
    simulate.args(["install", "-s", "--no-install-recommends"]).args(wanted);
    let Ok(output) = simulate.output() else { return false };
    let said = String::from_utf8_lossy(&output.stdout);
    let names: Vec<_> =
        said.lines().filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next()).collect();
    let mut get = Command::new("apt-get");
    // If no package is missing, nothing is mounted.
    output.status.success()
        && (names.is_empty() || quiet(get.arg("download").args(names).current_dir(place.join("debs"))))
}
