//! A real Podman starts containers as described in docs/containers.md: with CDI, and with volumes.
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Machine, packages};
use std::path::Path;

#[test]
fn containers_report_with_one_directory_of_the_hosts() {
    let Some(packages) = packages::unpacked("podman", &["podman", "crun"]) else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let machine = Machine::new(&["devices=1"]);
    let store = machine.dir.join("runs.sqlite");
    let config = format!(
        "runtime_dir = \"/run/gpumemd\"\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n[metrics]\nlisten = \"off\"\n\
         [runs]\nstore = {store:?}\n"
    );
    std::fs::write(machine.dir.join("daemon.toml"), config).expect("written");
    let mut command = machine.command(root.join("tests/fleet/over.sh"));
    command.arg(packages).arg(&machine.dir).arg(root.join("tests/fleet/containers.sh")).arg(&machine.dir);
    command.arg(&programs().ours).arg(&programs().fake).arg(root.join("config/kubernetes/injection/cdi"));
    let output = command.env_remove("LD_LIBRARY_PATH").output().expect("over.sh runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success());
    let part = |name: &str| {
        let rest = printed.split(&format!("== {name}\n")).nth(1).unwrap_or_else(|| panic!("no {name}"));
        rest.split("== ").next().unwrap_or_default().to_owned()
    };
    for way in ["cdi", "volumes"] {
        let inside = part(way);
        // The program is root and pid 1 of its namespace; it sees the agents' socket, and cannot write next to it.
        assert!(inside.starts_with("pid 1: agent.sock\n") && !inside.contains("written"), "{inside}");
        let report = part(&format!("report {way}"));
        assert!(report.contains("\ndata: complete"), "{report}");
    }
    assert!(part("off").contains("steps=30"), "{}", part("off"));
    assert!(part("report off").contains("no job off"), "switched off: {}", part("report off"));
}
