//! config/slurm: prolog and epilog in a real Slurm, and alone with every possible job variable.
use gpumem_tests::live::programs::{copy_program, programs, write_script};
use gpumem_tests::live::{Machine, packages, until};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("config/slurm")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_real_slurm_runs_jobs_with_prolog_and_epilog() {
    let Some(packages) = packages::unpacked("slurm", &["slurmctld", "slurmd", "slurm-client"]) else {
        return;
    };
    let machine = Machine::new(&["devices=2"]);
    let folder = machine.dir.join("slurm");
    std::fs::create_dir(&folder).expect("a folder");
    for path in [machine.dir.clone(), folder.clone(), machine.sim(), machine.dir.join("truth")] {
        if path.exists() {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).expect("a mode");
        }
    }
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("written");
    write(
        "sim.env",
        &format!(
            "export GPUMEM_SIM={} LD_LIBRARY_PATH=/opt/fake/lib GPUMEM_SITES=0\n",
            machine.sim().display()
        ),
    );
    let store = folder.join("runs.sqlite");
    write(
        "daemon.toml",
        &format!(
            "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n[metrics]\nlisten = \"off\"\n[runs]\nstore = {store:?}\n"
        ),
    );
    write("commands", include_str!("../../fleet/jobs.sh"));
    let mut command = Command::new(scripts().join("../../tests/fleet/slurm.sh"));
    command.arg(&packages).arg(&folder).arg(scripts()).arg(&programs().ours).arg(&programs().fake);
    // Slurm's jobs inherit it and run as users who cannot write there.
    command.env_remove("TMPDIR");
    let output = command.arg(folder.join("commands")).output().expect("slurm.sh runs");
    let printed = text(&output);
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{printed}\n{errors}");
    assert!(output.status.success(), "{errors}");

    let part = |name: &str| {
        let begin = format!("== {name}\n");
        let rest = printed.split(&begin).nth(1).unwrap_or_else(|| panic!("no {name}"));
        rest.split("== ").next().unwrap_or_default().to_owned()
    };
    // The batch script and each task, in one job. The user's own settings have precedence.
    let library = "/opt/ours/libgpumem.so";
    assert_eq!(part("batch"), format!("{library} {library} 1\n"));
    let tasks = part("tasks");
    assert_eq!(tasks.matches(&format!("{library} 1 /tools/other.so\n")).count(), 2, "{tasks}");
    let report = part("report");
    assert!(report.contains("2 processes of job 1, all ended") && report.contains("\nsum "), "{report}");
    assert!(report.contains("\n0 ") && report.contains("\n1 "), "ranks: {report}");
    assert_eq!(part("copy"), report, "in the job's folder");
    assert_eq!(part("owners"), "alice 400\nalice 600\n");
    // Neither the name of the job nor a link in its folder leads anywhere.
    assert!(!folder.join("pwned").exists());
    assert_eq!(part("link"), "theirs\n");
    // Disabled, and a job without GPU memory: no agent, and no report.
    assert_eq!(part("off"), "none\n");
    assert_eq!(part("reports"), "1.node0.txt\n2.node0.txt\n");
    assert_eq!(part("node"), "idle\n", "no script has drained it");
}

/// One of the scripts, in a folder with these settings.
struct Script(PathBuf);

impl Script {
    fn with(settings: &str) -> Self {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("gpumem-slurm-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        for name in ["task-prolog.sh", "prolog.sh", "epilog.sh"] {
            copy_program(scripts().join(name), dir.join(name));
        }
        let settings = settings.replace("$DIR", &dir.display().to_string());
        std::fs::write(dir.join("gpumem.conf"), settings).expect("written");
        Script(dir)
    }

    fn run(&self, name: &str, environment: &[(&str, &str)]) -> Output {
        let mut command = Command::new(self.0.join(name));
        command.env_clear().env("PATH", "/usr/bin:/bin").envs(environment.iter().copied());
        let output = command.stdin(Stdio::null()).current_dir(&self.0).output().expect("it runs");
        assert!(output.status.success(), "{name} must not fail: {output:?}");
        output
    }

    /// A gpumemctl of ours.
    fn gpumemctl(&self, text: &str) {
        write_script(self.0.join("gpumemctl"), text);
    }

    fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.0.join(name)).ok()
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn task_prolog_prints_only_required_variables() {
    let script = Script::with("GPUMEM_LIBRARY=$DIR/libgpumem.so\n");
    let say = |environment: &[(&str, &str)]| text(&script.run("task-prolog.sh", environment));
    assert_eq!(say(&[("SLURM_JOB_ID", "7")]), "", "no library, nothing to load");
    let library = script.0.join("libgpumem.so");
    std::fs::write(&library, "").expect("written");
    let library = library.display();
    let both = format!("export CUDA_INJECTION64_PATH={library}\nexport NVTX_INJECTION64_PATH={library}\n");
    assert_eq!(say(&[("SLURM_JOB_ID", "7")]), format!("{both}export GPUMEM_JOB=7\n"));
    assert_eq!(say(&[("SLURM_JOB_ID", "7"), ("GPUMEM_DISABLE", "1")]), "");
    assert_eq!(
        say(&[("GPUMEM_JOB", "mine"), ("GPUMEM_DISABLE", "0"), ("CUDA_INJECTION64_PATH", "/x/libgpumem.so")]),
        both
    );
    let others = say(&[("CUDA_INJECTION64_PATH", "/o.so"), ("NVTX_INJECTION64_PATH", "/n.so")]);
    assert_eq!(
        others,
        format!("export GPUMEM_NEXT_INJECTION64_PATH=/o.so\nexport CUDA_INJECTION64_PATH={library}\n")
    );
    // Slurm would read two lines as two commands.
    let hostile = say(&[("CUDA_INJECTION64_PATH", "/o.so\nexport LD_PRELOAD=/o.so"), ("GPUMEM_JOB", "x")]);
    assert_eq!(hostile, both);
}

#[test]
fn mapping_files_list_the_jobs_of_each_gpu() {
    let script = Script::with("GPUMEM_JOB_MAPPING=$DIR/map\nGPUMEM_REPORTS=\n");
    let job = |id: &'static str, gpus: &'static str| [("SLURM_JOB_ID", id), ("SLURM_JOB_GPUS", gpus)];
    script.run("prolog.sh", &job("41", "0,1"));
    script.run("prolog.sh", &job("7", "1"));
    script.run("prolog.sh", &job("7", "1")); // each step runs it again
    script.run("prolog.sh", &job("8; touch pwned", "1"));
    script.run("prolog.sh", &job("9", "../../x,$(touch pwned),3"));
    let map = |gpu: &str| script.read(&format!("map/{gpu}"));
    assert_eq!([map("0"), map("1"), map("3")], ["41\n", "41\n7\n", "9\n"].map(|jobs| Some(jobs.to_owned())));
    script.run("epilog.sh", &job("41", ""));
    until(10, "the job to be taken out", || {
        (map("0").is_none() && map("1").as_deref() == Some("7\n")).then_some(())
    });
    script.run("epilog.sh", &job("7", ""));
    script.run("epilog.sh", &job("9", ""));
    until(10, "no jobs", || (map("1").is_none() && map("3").is_none()).then_some(()));
    assert!(!script.0.join("pwned").exists() && !script.0.join("map/pwned").exists());
    // Without settings there is none.
    let plain = Script::with("");
    plain.run("prolog.sh", &job("41", "0,1"));
    assert!(!plain.0.join("map").exists());
}

#[test]
fn epilog_succeeds_in_time_even_if_gpumemctl_fails() {
    let settings =
        "GPUMEM_PATH=$DIR\nGPUMEM_REPORTS=$DIR/reports\nGPUMEM_EPILOG_LIMIT=1\nGPUMEM_REPORT_TO_FOLDER=0\n";
    let script = Script::with(settings);
    let uid = own_uid();
    let job: [(&str, &str); 3] =
        [("SLURM_JOB_ID", "5"), ("SLURM_JOB_UID", &uid), ("SLURMD_NODENAME", "n/../1")];
    // gpumemctl is absent, fails or hangs: no report, no failure, no delay.
    for program in [None, Some("echo half; exit 3"), Some("echo half; exec sleep 600")] {
        if let Some(program) = program {
            script.gpumemctl(program);
        }
        let begun = Instant::now();
        script.run("epilog.sh", &job);
        gpumem_test_support::bar(
            &format!("an epilog with {program:?}"),
            begun.elapsed(),
            Duration::from_secs(8),
        );
        assert!(script.read("reports/5.node.txt").is_none(), "{program:?}");
    }
    script.gpumemctl("echo \"of $*\"");
    script.run("epilog.sh", &job);
    assert_eq!(script.read("reports/5.node.txt").as_deref(), Some("of report --job 5\n"));
    for id in ["", "5;touch pwned", "$(touch pwned)", "../5", "-1"] {
        script.run("epilog.sh", &[("SLURM_JOB_ID", id), ("SLURM_JOB_UID", "0;x")]);
    }
    assert!(!script.0.join("pwned").exists());
    let reports = std::fs::read_dir(script.0.join("reports")).expect("a folder");
    let mut names: Vec<_> = reports.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    assert_eq!(names, ["5.node.txt"], "nothing half done");
}

fn own_uid() -> String {
    let output = Command::new("id").arg("-u").output().expect("id runs");
    text(&output).trim().to_owned()
}
