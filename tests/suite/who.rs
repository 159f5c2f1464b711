//! Owners of processes in real control groups, with the layouts of Kubernetes, Docker and Slurm.
use gpumem_tests::live::prometheus::{free_address, get};
use gpumem_tests::live::{Daemon, Machine, Mixer, until};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

const UID: &str = "0f5c1a2b_1111_4222_8333_4444aaaabbbb";

/// A tree of control groups for the test, removed on drop.
struct Groups(PathBuf);

impl Groups {
    /// Creates the tree in the first hierarchy that permits it; `None` if none does.
    fn new() -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let name = format!("gpumem-test-{}", std::process::id());
        let places = [root.join("freezer"), root.join("unified"), root.to_owned()];
        places.into_iter().map(|place| place.join(&name)).find_map(|place| {
            std::fs::create_dir(&place).ok()?;
            let groups = Groups(place);
            groups.0.join("cgroup.procs").exists().then_some(groups)
        })
    }

    fn make(&self, path: &str) -> PathBuf {
        let place = self.0.join(path);
        std::fs::create_dir_all(&place).expect("a group");
        place
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        fn remove(place: &Path) {
            let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
            entries.filter(|entry| entry.path().is_dir()).for_each(|entry| remove(&entry.path()));
            let _ = std::fs::remove_dir(place);
        }
        // A group is busy until the kernel has removed its processes.
        for _ in 0..50 {
            remove(&self.0);
            if !self.0.exists() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// Starts the program in a group.
fn in_group(machine: &Machine, mixer: &Command, group: &Path) -> Command {
    let mut command = machine.command("sh");
    command.args(["-c", "echo $$ > \"$1\" && exec \"$2\"", "sh"]);
    command.arg(group.join("cgroup.procs")).arg(mixer.get_program());
    for (name, value) in mixer.get_envs() {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    command
}

fn row(daemon: &Daemon, pid: u32) -> Option<Value> {
    let ps = daemon.asked("/v1/ps")?;
    ps["processes"].as_array()?.iter().find(|row| row["pid"] == pid).cloned()
}

/// Returns a process's owner once all expected facts are known.
fn who(daemon: &Daemon, pid: u32, expected: &[(&str, &str)]) -> Value {
    until(20, &format!("{expected:?}"), || {
        let who = row(daemon, pid)?["who"].take();
        expected.iter().all(|(name, value)| who[*name] == *value).then_some(who)
    })
}

#[test]
fn prolog_mapping_assigns_gpus_to_jobs() {
    let machine = Machine::new(&["devices=2"]);
    let jobs = machine.dir.join("jobs");
    std::fs::create_dir(&jobs).expect("a folder");
    for (gpu, job) in [("0", "4242\n"), ("1", "4243\n")] {
        std::fs::write(jobs.join(gpu), job).expect("written");
    }
    let config = format!("[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n[who]\njob_mapping = {jobs:?}\n");
    let daemon = Daemon::start(&machine, "daemon", &config);
    let mut mixer =
        Mixer::run(Mixer::command(&machine, &daemon).env("SLURM_JOB_ID", "7").env("SLURM_STEP_ID", "3"));
    mixer.ok("device 0; alloc a 8M");
    let given = who(&daemon, mixer.pid(), &[("slurm_job", "4242"), ("job", "4242")]);
    assert_eq!((given.get("slurm_step"), given.get("claimed")), (None, None), "{given}");
    // On GPUs of two jobs it has no unique job.
    mixer.ok("device 1; alloc b 8M");
    who(&daemon, mixer.pid(), &[("slurm_job", "7"), ("claimed", "job slurm_job slurm_step")]);
    mixer.end();
}

/// Lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn control_groups_identify_container_pod_and_job() {
        let Some(groups) = Groups::new() else {
            gpumem_test_support::skip(
                "no control group can be made here",
                "sudo make test-all LANES=privileged",
            );
            return;
        };
        let machine = Machine::new(&["devices=4"]);
        let names = machine.dir.join("containers");
        std::fs::create_dir(&names).expect("a folder");
        let address = free_address();
        let daemon = Daemon::start(
            &machine,
            "daemon",
            &format!(
                "[metrics]\nlisten = \"{address}\"\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n[who]\ncontainer_names = {names:?}\n"
            ),
        );
        let (id, other) = ("3f2a".repeat(16), "b01d".repeat(16));
        let places = [
            format!("kubepods-burstable-pod{UID}.slice/cri-containerd-{id}.scope"),
            format!("docker/{other}"),
            "slurm_n1/uid_0/job_8812/step_0".to_owned(),
            "user@1000.service/slurm/job_1/step_0".to_owned(),
        ];
        let mut mixers: Vec<Mixer> = places
            .iter()
            .enumerate()
            .map(|(gpu, place)| {
                let mut mixer = Mixer::command(&machine, &daemon);
                // All make the same claim; some have better evidence.
                mixer
                    .env("SLURM_JOB_ID", "7")
                    .env("SLURM_STEP_ID", "1")
                    .env("POD_NAME", "liar")
                    .env("POD_UID", "x\u{1b}[2J");
                let mut mixer = Mixer::run(&mut in_group(&machine, &mixer, &groups.make(place)));
                mixer.ok(&format!("device {gpu}; alloc a 8M"));
                mixer
            })
            .collect();
        let pid = |place: usize| mixers[place].pid();
        let uid = UID.replace('_', "-");

        // The kubelet writes its link a little later.
        let pod = who(&daemon, pid(0), &[("container", &id[..12]), ("pod_uid", &uid)]);
        assert_eq!(pod.get("pod"), None, "it claims to be of another pod: {pod}");
        std::os::unix::fs::symlink("/nowhere", names.join(format!("train-0_ml_worker-{id}.log")))
            .expect("a link");
        let named =
            [("pod", "train-0"), ("namespace", "ml"), ("container_name", "worker"), ("slurm_job", "7")];
        let pod = who(&daemon, pid(0), &named);
        assert_eq!(pod["claimed"], "job slurm_job slurm_step", "{pod}");

        let docker = who(&daemon, pid(1), &[("container", &other[..12])]);
        assert_eq!(docker["pod"], "liar", "there is no better evidence, and it is marked: {docker}");
        assert!(
            docker["claimed"].as_str().is_some_and(|claimed| claimed.split(' ').any(|name| name == "pod")),
            "{docker}"
        );

        let slurm = who(&daemon, pid(2), &[("slurm_job", "8812"), ("slurm_step", "0"), ("job", "8812")]);
        assert_eq!(slurm["claimed"], "pod pod_uid", "{slurm}");

        let forged = who(&daemon, pid(3), &[("slurm_job", "7")]);
        assert!(forged["claimed"].as_str().is_some_and(|claimed| claimed.contains("slurm_job")), "{forged}");

        // The same words in metrics, with nothing in them that a terminal would obey.
        let metrics = until(20, "metrics", || {
            get(address, "/metrics").filter(|text| text.contains("namespace=\"ml\""))
        });
        let info = |pid: u32| {
            let of = |line: &&str| {
                line.starts_with("gpumem_process_info{") && line.contains(&format!("pid=\"{pid}\""))
            };
            metrics.lines().find(of).unwrap_or_else(|| panic!("no info of {pid}")).to_owned()
        };
        for label in
            [format!("container=\"{}\"", &id[..12]), format!("pod_uid=\"{uid}\""), "pod=\"train-0\"".into()]
        {
            assert!(info(pid(0)).contains(&label), "{label}: {}", info(pid(0)));
        }
        assert!(
            info(pid(2)).contains("job_name=\"8812\"") && info(pid(2)).contains("slurm_step=\"0\""),
            "{}",
            info(pid(2))
        );
        assert!(!metrics.contains('\u{1b}'));

        // And in reports.
        let report = |arguments: &[&str]| {
            let output = daemon.ctl(&machine, arguments).output().expect("gpumemctl runs");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let text = report(&["report", "--verbose", &pid(0).to_string()]);
        assert!(text.lines().next().is_some_and(|head| head.contains("  pod ml/train-0  ")), "{text}");
        let document: Value =
            serde_json::from_str(&report(&["report", &pid(2).to_string(), "--json"])).expect("JSON");
        assert_eq!(document["who"]["slurm_job"], "8812");
        let job: Value = serde_json::from_str(&report(&["job", "8812", "--json"])).expect("JSON");
        assert_eq!(
            job["members"]
                .as_array()
                .map(|members| members.iter().map(|member| &member["pid"]).collect::<Vec<_>>()),
            Some(vec![&json!(pid(2))])
        );
        for mixer in &mut mixers {
            mixer.end();
        }
    }
}
