//! Launchers that pass the variables to programs, and places where the variables must have no effect.
use gpumem_tests::live::programs::{copy_program, programs};
use gpumem_tests::live::{Daemon, Job, Machine, packages, torch, until};
use std::path::Path;
use std::process::Command;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
/// Runs until it is signalled to finish.
const LONG: &[&str] = &["--steps", "1000000", "--step-ms", "5"];

/// The row of a process in `gpumemctl ps`, once it has one.
fn row(machine: &Machine, daemon: &Daemon, pid: u32) -> String {
    until(20, "a row of the process", || {
        let output = daemon.ctl(machine, &["ps"]).output().expect("gpumemctl runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let is_it = |line: &&str| line.split_whitespace().any(|word| word == pid.to_string());
        text.lines().find(is_it).map(str::to_owned)
    })
}

#[test]
fn mps_server_never_loads_the_agent() {
    let machine = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut trainer = Job::start(&mut machine.trainer(&daemon.runtime, LONG));
    trainer.wait_for("ready");
    // The same program, under the server's name.
    let server = machine.dir.join("nvidia-cuda-mps-server");
    copy_program(programs().fake.join("bin/trainer"), &server);
    let mut command = machine.command(&server);
    command.args(LONG).env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
    command.env("GPUMEM_SOCKET", daemon.runtime.join("agent.sock"));
    let mut served = Job::start(&mut command);
    served.wait_for("ready");
    until(20, "a covered trainer", || {
        row(&machine, &daemon, trainer.pid()).contains(" covered ").then_some(())
    });
    let served_row = row(&machine, &daemon, served.pid());
    assert!(served_row.contains(" uncovered "), "{served_row}");
    // It has no thread of the agent, only the library.
    let threads = |pid: u32| {
        let entries = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
        let comm = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("comm")).ok();
        entries.flatten().filter_map(comm).filter(|comm| comm.starts_with("gpumem")).count()
    };
    assert_eq!((threads(trainer.pid()), threads(served.pid())), (1, 0));
    let sockets = |pid: u32| {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
        let target = |entry: std::fs::DirEntry| std::fs::read_link(entry.path()).ok();
        let is_ours = |target: &std::path::PathBuf| {
            ["socket:", "memfd:"].iter().any(|word| target.to_string_lossy().contains(word))
        };
        entries.flatten().filter_map(target).filter(is_ours).count()
    };
    assert!(sockets(trainer.pid()) >= 2 && sockets(served.pid()) == 0);
}

/// Ray and notebook kernels are many packages: tests/fleet/launchers.py takes any interpreter that has them.
#[test]
fn launchers_pass_variables_on_as_documented() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("fleet/launchers.py");
    let machine = Machine::new(&["devices=1"]);
    let (mut command, beside) = match packages::unpacked("launchers", &["openmpi-bin", "sudo"]) {
        Some(packages) => {
            let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("fleet/over.sh"));
            command.arg(packages).arg(&machine.dir).arg("python3");
            (command, &["sudo ", "sudo --preserve-env=", "mpirun -x"][..])
        }
        None => (Command::new("python3"), &[][..]),
    };
    command.arg(script);
    let wheel = torch::versions().first().and_then(|version| torch::wheel(version));
    if let Some(wheel) = &wheel {
        command.arg(wheel.dir.join("venv/bin/python"));
        let path = std::env::join_paths([wheel.dir.join("lib"), programs().fake.join("lib")]).expect("paths");
        command.env("LD_LIBRARY_PATH", path);
    }
    let output = command.output().expect("the script runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    print!("{printed}");
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    let torchrun = wheel.iter().map(|_| "torchrun ");
    for name in beside.iter().copied().chain(torchrun).chain(["env -i ", "multiprocessing "]) {
        assert!(printed.lines().any(|line| line.starts_with(name)), "{name} is missing:\n{printed}");
    }
}
