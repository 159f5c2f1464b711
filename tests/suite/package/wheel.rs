//! The wheel as a complete installation: without root, a compiler, or any other file of gpumem.

use super::sbom;
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Machine, until};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const NOBODY: u32 = 65534;

/// A training script that prints its observations as `key=value` lines.
const TRAIN: &str = r#"
import ctypes, sys, time
late = "late" in sys.argv
if not late:
    import gpumem
cuda = ctypes.CDLL("libcuda.so.1")
def begin():
    assert cuda.cuInit(0) == 0
    context = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
def take(size):
    address = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
begin()
if late:
    take(32 << 20)
    import gpumem
    for _ in range(100):
        missed = gpumem.status()["missed"]
        if missed and missed[0]["bytes"] is not None:
            break
        time.sleep(0.1)
    print("missed=%s" % (missed[0]["bytes"] >= 32 << 20))
with gpumem.scope("model"):
    take(64 << 20)
print("state=" + gpumem.status()["state"])
tracked = gpumem.snapshot()["devices"][0]["tracked_bytes"]
print("tracked=%d" % tracked)
# As of its last sample, which may be older than the memory.
last = None
for _ in range(100):
    report = gpumem.report("json")
    last = report and report["devices"] and report["devices"][0]["last"]
    if report is None or last and last["tracked_bytes"] == tracked:
        break
    time.sleep(0.1)
print("report=%s" % (last and last["tracked_bytes"]))
"#;

/// What a session of a user has, and this test started; daemons that it left are ended with it.
struct Home {
    machine: Machine,
}

impl Home {
    fn new() -> Self {
        let machine = Machine::new(&["devices=1"]);
        let home = Home { machine };
        for name in ["run", "home"] {
            std::fs::create_dir_all(home.path(name)).expect("a folder");
        }
        if is_root() {
            for path in [home.machine.dir.clone(), home.path("run"), home.path("home")] {
                std::os::unix::fs::chown(&path, Some(NOBODY), Some(NOBODY)).expect("given away");
            }
            std::fs::set_permissions(home.machine.sim(), PermissionsExt::from_mode(0o666)).expect("shared");
        }
        for name in ["run", "home"] {
            std::fs::set_permissions(home.path(name), PermissionsExt::from_mode(0o700)).expect("private");
        }
        home
    }

    fn path(&self, name: &str) -> PathBuf {
        self.machine.dir.join(name)
    }

    /// A program of the user's own.
    fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = self.machine.command(program);
        command.env("HOME", self.path("home")).env("XDG_RUNTIME_DIR", self.path("run"));
        command.env_remove("GPUMEM_STORE").env_remove("PYTHONPATH").env("PYTHONDONTWRITEBYTECODE", "1");
        command.current_dir(self.path("home"));
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // The private daemon ends once it is idle for a while: too late for a folder that is removed.
        let socket = self.path("run/gpumem");
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let here = self.path("run").into_os_string().into_encoded_bytes();
            let is_ours =
                line.ends_with(b"--private\0") && environment.windows(here.len()).any(|part| part == here);
            if is_ours && let Some(pid) = entry.file_name().to_str() {
                let _ = Command::new("kill").arg(pid).status();
            }
        }
        let _ = std::fs::remove_dir_all(socket);
    }
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

fn output_text(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&text).into_owned()
}

/// The project's folder.
fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the project")
}

fn done(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", output_text(&output));
    output_text(&output)
}

#[test]
fn pip_install_is_a_complete_installation() {
    let home = Home::new();
    let package =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("agent-lib/python");
    let mut build = Command::new("python3");
    build.arg(package.join("build_wheel.py")).arg("--programs").arg(&programs().ours);
    build.arg("--out").arg(&home.machine.dir).env("PYTHONDONTWRITEBYTECODE", "1");
    let wheel = done(&mut build).trim().to_owned();
    // It lists its components (PEP 770).
    let unpacked = home.path("unpacked");
    done(Command::new("python3").args(["-m", "zipfile", "-e", &wheel]).arg(&unpacked));
    let stem = format!("gpumem-{}", env!("CARGO_PKG_VERSION"));
    let reported = std::fs::read(unpacked.join(format!("{stem}.dist-info/sboms/gpumem.cdx.json")))
        .expect("a list of parts");
    let program = |name: &str| unpacked.join(format!("{stem}.data/scripts/{name}"));
    let (daemon, ctl, mcp, library) = (
        program("gpumemd"),
        program("gpumemctl"),
        program("gpumem-mcp"),
        unpacked.join("gpumem/libgpumem.so"),
    );
    sbom::check(
        &reported,
        "pkg:pypi/gpumem",
        &[("gpumemd", &daemon), ("gpumemctl", &ctl), ("gpumem-mcp", &mcp), ("libgpumem.so", &library)],
    );
    std::fs::write(home.path("train.py"), TRAIN).expect("written");
    done(home.command("python3").args(["-m", "venv", "venv"]));
    let bin = home.path("home/venv/bin");
    let pip = ["install", "--quiet", "--no-index", "--disable-pip-version-check", &wheel];
    done(home.command(bin.join("pip")).args(pip));

    // With the wheel's own programs: no daemon is running.
    let mut run = home.command(bin.join("gpumemctl"));
    run.args(["run", "--"]).arg(bin.join("python")).arg(home.path("train.py"));
    let text = done(&mut run);
    let has = |line: &str| text.lines().any(|other| other == line);
    assert!(has("state=covered") && has(&format!("tracked={}", 64 << 20)), "{text}");
    assert!(has(&format!("report={}", 64 << 20)), "the program asks about itself: {text}");
    let ps = until(10, "the run", || {
        let text = done(home.command(bin.join("gpumemctl")).args(["runs"]));
        text.contains("train.py").then_some(text)
    });
    assert!(ps.contains("train.py"), "{ps}");

    // And by the import alone, with the daemon that is there now.
    let text = done(home.command(bin.join("python")).arg(home.path("train.py")));
    assert!(text.contains("state=covered") && text.contains(&format!("report={}", 64 << 20)), "{text}");

    // After CUDA is initialised: late, with the number of missed bytes.
    let text = done(home.command(bin.join("python")).arg(home.path("train.py")).arg("late"));
    let all = ["state=late", "missed=True", &format!("tracked={}", 64 << 20)];
    assert!(all.iter().all(|line| text.lines().any(|other| other == *line)), "{text}");

    done(home.command(bin.join("pip")).args(["uninstall", "--quiet", "--yes", "gpumem"]));
    let left: Vec<_> = [
        "bin/gpumemd",
        "bin/gpumemctl",
        "bin/gpumem-mcp",
        concat!("lib/gpumem/", env!("CARGO_PKG_VERSION"), "/libgpumem.so"),
    ]
    .into_iter()
    .filter(|name| home.path("home/venv").join(name).exists())
    .collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Of what glibc has had since 2.17 nothing is asked for that the wheel's build does not replace: its programs run on old systems.
#[test]
fn new_glibc_symbols_are_replaced() {
    let python = project().join("agent-lib/python");
    let replaced = ["wheel/old_glibc.c", "build_wheel.py"]
        .map(|file| std::fs::read_to_string(python.join(file)).expect("text"))
        .concat();
    let is_replaced = |name: &str| {
        [format!("OLD({name},"), format!("__wrap_{name}("), format!("\"{name}\",")]
            .iter()
            .any(|word| replaced.contains(word))
    };
    let mut seen = 0;
    for program in ["gpumemd", "gpumemctl", "gpumem-mcp"] {
        let reported = done(Command::new("objdump").arg("-T").arg(programs().ours.join(program)));
        for (version, name) in
            reported.lines().filter_map(|line| line.split_once("GLIBC_2.")?.1.split_once(' '))
        {
            let version =
                version.trim_end_matches(')').split('.').next().and_then(|minor| minor.parse::<u32>().ok());
            if version.is_some_and(|minor| minor > 17) {
                seen += 1;
                assert!(is_replaced(name.trim()), "{program} asks for {name}, of glibc 2.{version:?}");
            }
        }
    }
    assert!(seen > 10, "objdump listed {seen}");
}
