//! A disk without room, and one that fails.

use super::{Node, can};
use gpumem_model::run::State;
use gpumem_runs::store::Store;
use gpumem_tests::live::{Job, replay, until};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A file system of 12 MiB.
struct Small(PathBuf);

impl Small {
    fn new(name: &str) -> Option<Small> {
        let path = std::env::temp_dir().join(format!("gpumem-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=12m", "none"]).arg(&path);
        let small = Small(path);
        can("mounting a file system", &mut mount).then_some(small)
    }

    fn fill(&self) -> PathBuf {
        let path = self.0.join("filling");
        let mut file = std::fs::File::create(&path).expect("a file");
        while file.write(&[0; 4096]).is_ok_and(|written| written > 0) {}
        path
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l"]).arg(&self.0).stderr(Stdio::null()).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

fn on(folder: &Path) -> String {
    let (record, store) = (folder.join("all.gpumem"), folder.join("runs.sqlite"));
    format!("record = {record:?}\n[runs]\nstore = {store:?}\ncheckpoint_every_s = 0.2\n")
}

/// Runs briefly; returns its pid after it ended with some memory.
fn short(node: &Node) -> u32 {
    let arguments = ["--devices", "0", "--steps", "20", "--step-ms", "1"];
    let mut job = Job::start(&mut node.machine.trainer(&node.daemon.runtime, &arguments));
    job.finish();
    job.pid()
}

struct Strace(Child);

impl Drop for Strace {
    fn drop(&mut self) {
        // strace detaches only if it is asked to end.
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = self.0.wait();
    }
}

/// Lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn failing_disk_is_reported_survived_and_recovers() {
        if !can("strace", Command::new("strace").args(["-e", "trace=none", "true"])) {
            return;
        }
        let node = Node::plain(&["devices=1"], "[runs]\ncheckpoint_every_s = 0.1\n");
        let lives = node.holding("0");
        node.until_value("gpumemd_store_writes_total", |writes| writes >= 1.0);
        let calls = "fsync,fdatasync,pwrite64,ftruncate";
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={calls}")]);
        strace.args(["-e", &format!("inject={calls}:error=EIO"), "-p", &node.daemon.job.pid().to_string()]);
        let strace = Strace(strace.stderr(Stdio::null()).spawn().expect("strace runs"));
        // The run of a process that does nothing is not written.
        let during = short(&node);
        node.until_value("gpumemd_store_errors_total", |errors| errors >= 2.0);
        node.until_value("gpumemd_recording_lost_total", |lost| lost > 0.0);
        node.until_value("gpumemd_store_waiting", |waiting| waiting >= 1.0);
        assert!(node.doctor().contains("wait in memory"), "{}", node.doctor());
        drop(strace);
        node.until_value("gpumemd_source_up{source=\"store\"}", |up| up == 1.0);
        node.until_value("gpumemd_store_waiting", |waiting| waiting == 0.0);
        node.until_covered(&[&lives]);
        assert!(node.value("gpumemd_store_set_aside_total") <= Some(1.0));
        let Node { machine, mut daemon, .. } = node;
        daemon.stop();
        let store = Store::open_read_only(machine.dir.join("runs.sqlite")).expect("a store");
        store.check().expect("it is whole");
        for pid in [during, lives.pid()] {
            let line = store.list().expect("runs").into_iter().find(|run| run.pid == pid).expect("its run");
            assert_eq!(store.load(line.id).expect("a run").coverage.lost, 0);
        }
        assert_eq!(replay(&daemon.recording).rejected, 0, "no frame is cut");
    }

    #[test]
    fn full_disk_is_reported_and_only_its_recording_has_gaps() {
        let Some(small) = Small::new("full") else { return };
        let node = Node::plain(&["devices=1"], &on(&small.0));
        let mut lives = node.holding("0");
        let before = short(&node);
        node.until_value("gpumemd_store_writes_total", |writes| writes >= 2.0);
        let filling = small.fill();
        let during = short(&node);
        node.until_value("gpumemd_source_up{source=\"store\"}", |up| up == 0.0);
        node.until_value("gpumemd_recording_lost_total", |lost| lost > 0.0);
        node.until_value("gpumemd_store_waiting", |waiting| waiting >= 1.0);
        let reported = node.doctor();
        assert!(
            reported.contains("no room for the run")
                && reported.contains("records are missing in the recording"),
            "{reported}"
        );
        node.until_covered(&[&lives]);
        std::fs::remove_file(filling).expect("room again");
        node.until_value("gpumemd_source_up{source=\"store\"}", |up| up == 1.0);
        node.until_value("gpumemd_store_waiting", |waiting| waiting == 0.0);
        until(20, "the recording", || {
            let lost = node.value("gpumemd_recording_lost_total")?;
            std::thread::sleep(std::time::Duration::from_millis(300));
            (node.value("gpumemd_recording_lost_total")? == lost).then_some(())
        });
        let after = short(&node);
        lives.enough();
        node.until_value("gpumemd_runs_finished_total", |ended| ended == 4.0);
        let mut daemon = node.daemon;
        daemon.stop();
        let truths = node.machine.truth();
        let store = Store::open_read_only(small.0.join("runs.sqlite")).expect("a store");
        store.check().expect("it is whole");
        for pid in [before, during, after, lives.pid()] {
            let line = store.list().expect("runs").into_iter().find(|run| run.pid == pid).expect("its run");
            assert!(matches!(line.state, State::Closed { .. }), "{line:?}");
            let run = store.load(line.id).expect("a run");
            let end = truths.iter().find(|truth| truth.is_end() && truth.pid == pid).expect("its end");
            assert_eq!(run.devices[0].last.tracked_bytes.map(|_| run.coverage.lost), Some(0));
            let device = &run.devices[0];
            let sum: i64 = device.peak.amounts.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(device.peak.tracked_bytes, Some(sum));
            assert!(device.peak.tracked_bytes >= Some(end.tracked), "{:?} {}", device.peak, end.tracked);
        }
        // It continues with its earlier state, and is exact again once agents have resent theirs.
        let replay = replay(&small.0.join("all.gpumem"));
        assert_eq!(replay.rejected, 0, "no frame is cut");
        let compared = replay.compare(&truths, Some(after));
        assert!(compared.exact > 0, "{compared:?}");
        let of_it = || replay.samples.iter().filter(|(key, ..)| key.pid == after);
        assert!(of_it().all(|(.., sample)| !sample.partial), "nothing is missing of what came after");
        let compared = replay.compare(&truths, Some(lives.pid()));
        println!("{compared:?}");
        let newest = replay.samples.iter().rfind(|(key, ..)| key.pid == lives.pid()).expect("samples");
        assert!(!newest.2.partial && compared.exact > 0, "{compared:?}");
    }
}
