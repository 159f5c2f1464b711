//! NVTX as programs have it: the Python package, NVIDIA's libraries of two versions, and the agent, on the simulated machine.
//! They are downloaded for the test, from the registry that pip uses.
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Daemon, Machine, until};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Downloads. The first library is of version 2, the second one of version 3.
const WHEELS: [&str; 3] = ["nvtx==0.2.17", "nvidia-nvtx-cu12==12.1.105", "nvidia-nvtx==13.4.92"];

const PROGRAM: &str = r#"
import ctypes, glob, os, sys
import nvtx

on = os.environ["GPUMEM_NVTX"] == "1"

cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
for result in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)):
    assert result == 0, result

def alloc(mib):
    assert cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(mib << 20)) == 0

def library(name):
    found = glob.glob(sys.argv[1] + "/nvidia/**/" + name, recursive=True)
    loaded = ctypes.CDLL(found[0])
    loaded.nvtxRangePushA.argtypes = [ctypes.c_char_p]
    loaded.nvtxRangePushW.argtypes = [ctypes.c_wchar_p]
    return loaded

with nvtx.annotate("train"):
    with nvtx.annotate("forward", domain="ours"):
        alloc(1)
    with nvtx.annotate("noise", domain="another"):
        alloc(2)
    nvtx.push_range("pushed")
    alloc(4)
    nvtx.pop_range()
    old = library("libnvToolsExt.so*")
    assert old.nvtxRangePushA(b"old") == (1 if on else -2)
    alloc(8)
    new = library("libnvtx3interop.so*")
    assert new.nvtxRangePushW("n\u00e9w") == (2 if on else -2)
    alloc(16)
    assert new.nvtxRangePop() == (2 if on else -2)
    assert old.nvtxRangePop() == (1 if on else -2)
alloc(32)
print("done", flush=True)
sys.stdin.readline()
"#;

/// The folder with all packages; `None` with a skip if they are not available.
fn packages() -> Option<PathBuf> {
    let this = std::env::current_exe().expect("this program's path");
    let dir = this.ancestors().nth(3).expect("target").join("tools/nvtx");
    if !dir.join("nvtx").exists() {
        let _ = std::fs::create_dir_all(&dir);
        let pip = |extra: &[&str]| {
            let mut command = Command::new("python3");
            command.args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--disable-pip-version-check",
                "--target",
            ]);
            command.arg(&dir).args(extra).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        pip(&WHEELS);
    }
    let found = dir.join("nvtx").exists() && dir.join("nvidia").exists();
    if !found {
        gpumem_test_support::skip(
            &format!("{WHEELS:?} cannot be had with python3 -m pip"),
            "apt-get install python3-pip",
        );
    }
    found.then_some(dir)
}

/// Bytes by tag, in MiB, of the latest moment.
fn tags(machine: &Machine, daemon: &Daemon, pid: u32) -> Option<BTreeMap<String, i64>> {
    let output = daemon.ctl(machine, &["report", &pid.to_string(), "--json"]).output().ok()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    let cells = report["devices"][0]["last"]["cells"].as_array()?;
    let tag = |cell: &serde_json::Value| cell["tag"].as_str().unwrap_or_default().to_owned();
    let mut tags = BTreeMap::new();
    for cell in cells {
        *tags.entry(tag(cell)).or_insert(0) += cell["bytes"].as_i64().unwrap_or(0) >> 20;
    }
    Some(tags)
}

#[test]
fn real_nvtx_libraries_name_allocations() {
    let Some(packages) = packages() else { return };
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n");
    let program = machine.dir.join("program.py");
    std::fs::write(&program, PROGRAM).expect("written");
    let run = |domains: &str, on: &str, wanted: &[(&str, i64)]| {
        let library = programs().ours.join("libgpumem.so");
        let mut command = machine.command("python3");
        command.arg(&program).arg(&packages).env("PYTHONPATH", Path::new(&packages));
        command.env("CUDA_INJECTION64_PATH", &library).env("NVTX_INJECTION64_PATH", &library);
        command.env("GPUMEM_SOCKET", daemon.runtime.join("agent.sock"));
        command.env("GPUMEM_NVTX_DOMAINS", domains).env("GPUMEM_NVTX", on);
        let mut child = command.stdin(Stdio::piped()).spawn().expect("python3 runs");
        let wanted: BTreeMap<String, i64> = wanted.iter().map(|&(tag, mib)| (tag.to_owned(), mib)).collect();
        until(30, &format!("{wanted:?}"), || {
            let running = matches!(child.try_wait(), Ok(None));
            assert!(running, "the program has ended");
            (tags(&machine, &daemon, child.id()).as_ref() == Some(&wanted)).then_some(())
        });
        drop(child.stdin.take());
        assert!(child.wait().expect("it ends").success());
    };
    let deeper = [("train/pushed", 4), ("train/old", 8), ("train/old/n\u{e9}w", 16), ("", 32)];
    run("ours", "1", &[&[("train/forward", 1), ("train", 2)], &deeper[..]].concat());
    run("*", "1", &[&[("train/forward", 1), ("train/noise", 2)], &deeper[..]].concat());
    run("*", "0", &[("", 63)]);
}
