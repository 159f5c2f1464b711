//! An agent that is loaded after some training. It adopts PyTorch's existing memory from PyTorch's own list; from then on the
//! figures are the same as with an agent from the start.
use gpumem_tests::live::attribution::{attribution, owned};
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::torch;
use gpumem_tests::live::torch::Wheel;
use gpumem_tests::live::{Daemon, Job, Machine, replay};
use gpumem_wire::Role;
use std::path::Path;
use std::process::Command;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

#[test]
fn late_agent_adopts_earlier_blocks() {
    comes_late("expandable_segments:False");
}

#[test]
fn late_agent_adopts_expandable_segments() {
    comes_late("expandable_segments:True");
}

/// Newer releases have a setting for the size of mapped pieces, which are unmapped one by one.
#[test]
fn adopted_pieces_are_freed_separately() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        let has_setting = wheel.is_from(2, 11);
        for mib in [12, 20, 30, 40].into_iter().filter(|mib| *mib == 20 || has_setting) {
            let machine = torch::machine(&[]);
            let mut daemon = Daemon::start(&machine, "daemon", FAST);
            let size = if mib == 20 { String::new() } else { format!(",large_segment_size_mb:{mib}") };
            let settings = format!("expandable_segments:True{size}");
            let mut command = late(&wheel, &machine, &daemon, "late_pieces.py", &settings);
            let mut job = Job::start(command.arg(mib.to_string()));
            let printed = torch::finished(&mut job);
            daemon.wait_for_the_end_of(&machine, &[&job]);
            daemon.stop();
            let moments = torch::moments(&daemon.recording, job.pid());
            for (moment, printed) in torch::beside(&moments, &printed) {
                torch::agree(&format!("torch {version}, {mib} MiB, {}", moment.name), moment, printed);
            }
            let process = replay(&daemon.recording).process(job.pid()).clone();
            assert_eq!(process.odd, Default::default(), "{mib} MiB: nothing odd");
        }
    }
}

/// Returns the program's command with these settings of the allocator.
fn late(wheel: &Wheel, machine: &Machine, daemon: &Daemon, program: &str, settings: &str) -> Command {
    let mut command = wheel.bare(machine, program, &[]);
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent-lib/python");
    command.env("GPUMEM_PACKAGE", package).env("PYTORCH_CUDA_ALLOC_CONF", settings);
    command.env("GPUMEM_LIBRARY", programs().ours.join("libgpumem.so"));
    command.env("GPUMEM_SOCKET", daemon.runtime.join("agent.sock"));
    command
}

/// Another client has CUPTI: frees of adopted memory would not be seen, so nothing is adopted.
#[test]
fn blocked_agent_adopts_nothing() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        let machine = torch::machine(&[]);
        let mut daemon = Daemon::start(&machine, "daemon", FAST);
        let mut command = late(&wheel, &machine, &daemon, "late.py", "expandable_segments:True");
        let mut job = Job::start(command.env("GPUMEM_SIM_CUPTI", "subscribe:39"));
        let printed = torch::finished(&mut job);
        assert!(printed.iter().any(|line| line["state"] == "blocked"), "{printed:?}");
        daemon.wait_for_the_end_of(&machine, &[&job]);
        daemon.stop();
        let process = replay(&daemon.recording).process(job.pid()).clone();
        assert!(!process.coverage.covered, "torch {version}: {:?}", process.coverage);
        for account in &process.accounts {
            let sample = account.latest.as_ref().expect("a sample");
            assert_eq!(
                (account.tracked_bytes, sample.tracked_bytes),
                (0, None),
                "torch {version}: {sample:?}"
            );
        }
    }
}

fn comes_late(settings: &str) {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        let machine = torch::machine(&[]);
        let mut daemon = Daemon::start(&machine, "daemon", FAST);
        let mut command = late(&wheel, &machine, &daemon, "late.py", settings);
        let mut job = Job::start(&mut command);
        let printed = torch::finished(&mut job);
        daemon.wait_for_the_end_of(&machine, &[&job]);
        daemon.stop();

        // Exact to the byte, from the first moment on.
        let moments = torch::moments(&daemon.recording, job.pid());
        for (moment, printed) in torch::beside(&moments, &printed) {
            torch::agree(&format!("torch {version}, {}", moment.name), moment, printed);
            assert_eq!(printed["state"], "late");
        }
        let process = replay(&daemon.recording).process(job.pid()).clone();
        assert_eq!(process.odd, Default::default(), "nothing odd");
        assert!(process.coverage.late && process.coverage.lost == 0, "{:?}", process.coverage);
        // Nothing that NVML charges is unexplained; only the contexts predate the agent.
        for account in &process.accounts {
            let last = account.complete.as_ref().expect("a sample");
            assert_eq!(last.untrackable_bytes(), Some(0), "torch {version}: {last:?}");
            assert!(last.predates_bytes > 0, "torch {version}: {last:?}");
            assert!(account.steps.is_empty(), "torch {version}: {:?}", account.steps);
        }

        // Objects that the program still has get their name and role, also those from before the agent.
        let names = attribution(&daemon.recording, job.pid());
        for line in printed.iter().filter(|line| line["check"].is_string()) {
            let check = line["check"].as_str().unwrap_or_default();
            let of = |what, role| owned(&names.live[check], line, what, role);
            for (what, role) in [
                ("parameter", Role::Parameter),
                ("gradient", Role::Gradient),
                ("optimizer_state", Role::OptimizerState),
            ] {
                let owned = of(what, role);
                println!("torch {version}, {check}: {what} {} {} {}", owned.count, owned.named, owned.known);
                assert_eq!((owned.named, owned.known), (owned.count, owned.count), "{check}: {owned:?}");
            }
        }
        // Activations and workspaces have only this name.
        let older = |check: &str| {
            let mut blocks = names.live[check].values();
            blocks.any(|block| block.tag == "before the agent" && block.role == Role::Unknown)
        };
        assert!(older("attached"), "torch {version}");
    }
}
