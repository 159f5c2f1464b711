//! A pid that is given out again.

use super::{QUICK, can};
use gpumem_runs::store::Store;
use gpumem_tests::live::{Daemon, Job, Machine, replay, until};
use std::process::Command;

/// A process with an agent; when it is told so it is killed, and one without gets its pid.
const SCRIPT: &str = r#"
"$@" --devices 0 > /dev/null & first=$!
echo "first $first"
until [ -e "$GO" ]; do sleep 0.02; done
kill -9 $first; wait $first 2> /dev/null
unset CUDA_INJECTION64_PATH
for try in $(seq 100); do
    echo $((first - 1)) > /proc/sys/kernel/ns_last_pid
    "$@" --devices 1 > /dev/null & second=$!
    [ $second = $first ] && break
    kill -9 $second; wait $second 2> /dev/null
done
echo "second $second"
wait
"#;

/// Lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn nothing_of_a_process_is_told_under_the_next_with_its_pid() {
        let machine = Machine::new(&["devices=2"]);
        let Some(mut daemon) = Daemon::start_elsewhere(&machine, "daemon", QUICK) else {
            can("PID namespaces", &mut Command::new("false"));
            return;
        };
        // unshare has one child: the daemon, which is 1 in there.
        let unshare = daemon.job.pid();
        let children = std::fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
        let inner = children.ok().and_then(|children| children.trim().parse::<u32>().ok()).expect("a child");
        let trainer = machine.trainer(&daemon.runtime, &["--steps", "5", "--step-ms", "1", "--hold", "600"]);
        let go = machine.dir.join("go");
        let mut command = machine.command("nsenter");
        command.args(["--target", &inner.to_string(), "--pid", "--mount", "bash", "-c", SCRIPT, "bash"]);
        command.arg(trainer.get_program()).args(trainer.get_args()).env("GO", &go);
        command.envs(trainer.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut job = Job::start(&mut command);
        let pid =
            |line: String| line.rsplit_once(' ').and_then(|(_, pid)| pid.parse::<u32>().ok()).expect("a pid");
        let first = pid(job.wait_for("first "));
        let rows = || -> Vec<serde_json::Value> {
            let ps = daemon.asked("/v1/ps").unwrap_or_default();
            ps["processes"].as_array().cloned().unwrap_or_default()
        };
        until(30, "the first, to the last byte", || {
            rows().iter().find(|row| row["pid"] == first && row["untrackable_bytes"].is_i64()).map(|_| ())
        });
        std::fs::write(&go, "").expect("a file");
        let second = pid(job.wait_for("second "));
        if first != second {
            can("a pid that is given out again", &mut Command::new("false"));
            return;
        }
        // From now on only the second one: not a single look may mix them.
        until(30, "the second", || {
            let rows = rows();
            assert!(rows.len() <= 2, "{rows:?}");
            rows.iter().find(|row| row["device"] == 1 && row["used_bytes"].is_u64()).map(|_| ())
        });
        until(30, "the end of the first", || rows().iter().all(|row| row["device"] == 1).then_some(()));
        let row = rows().remove(0);
        assert_eq!((&row["pid"], &row["flags"][0]), (&second.into(), &"uncovered".into()), "{row}");
        assert!(row["tracked_bytes"].is_null(), "{row}");
        // One of them has lived for a few hundredths of a second when the other comes.
        let ctl = |daemon: &Daemon| {
            let stop = Command::new("kill").arg(inner.to_string()).status();
            assert!(stop.is_ok_and(|status| status.success()));
            let _ = daemon;
        };
        ctl(&daemon);
        daemon.job.end();
        let store = Store::open_read_only(machine.dir.join("runs.sqlite")).expect("a store");
        let runs: Vec<_> =
            store.list().expect("runs").iter().map(|line| store.load(line.id).expect("a run")).collect();
        let covered: Vec<_> = runs.iter().filter(|run| run.coverage.covered).collect();
        assert!(
            covered.len() == 1 && covered[0].devices.len() == 1 && covered[0].devices[0].ordinal == 0,
            "{runs:?}"
        );
        let uncovered = runs.iter().filter(|run| !run.coverage.covered);
        assert!(uncovered.clone().count() >= 1 && uncovered.clone().all(|run| run.devices.len() == 1));
        let starts: std::collections::BTreeSet<_> = runs.iter().map(|run| run.process.start_ticks).collect();
        assert_eq!(starts.len(), runs.len(), "each has its own start");
        let compared = replay(&daemon.recording).compare(&machine.truth(), Some(first));
        println!("{} runs, {compared:?}", runs.len());
        assert!(compared.exact > 0 && compared.uncovered > 0, "{compared:?}");
    }
}
