use super::*;
use gpumem_wire::Body;
use gpumem_wire::frame::records;
use std::process::{Child, Command};
use std::time::Instant;

fn sleeper() -> Child {
    Command::new("sleep").arg("1000").spawn().expect("sleep runs")
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn facts_of(frames: &[u8]) -> Vec<(u32, String)> {
    let facts = |record: gpumem_wire::Record<'_>| match record.body {
        Body::ProcessFacts { facts, .. } => Some((record.stamp.thread, facts.to_owned())),
        _ => None,
    };
    records(frames).filter_map(|record| facts(record.expect("a frame").expect("a record"))).collect()
}

#[test]
fn a_process_is_the_same_until_it_ends_and_nobody_after_that() {
    let processes = Processes::new();
    let mut child = sleeper();
    let pid = child.id();
    let key = processes.identify(pid).expect("alive");
    assert!(key.start_ticks > 0);
    assert_eq!(processes.identify(pid), Some(key));
    assert_eq!(processes.facts(key).map(|facts| facts.parent_pid), Some(std::process::id()));
    child.kill().expect("killed");
    until("it has ended", || {
        processes.sweep();
        processes.is_empty()
    });
    // A reading that began earlier may still name the ended process, whether its parent has waited for it or not.
    assert_eq!(processes.identify(pid), Some(key));
    child.wait().expect("waited");
    assert_eq!(processes.identify(pid), Some(key));
    assert!(processes.is_empty() && processes.facts(key).is_none());
}

#[test]
fn what_has_ended_before_it_was_seen_is_nobody() {
    let processes = Processes::new();
    let mut child = sleeper();
    child.kill().expect("killed");
    let is_zombie = || facts::read_stat(Path::new("/proc"), child.id()).is_some_and(|stat| stat.has_ended());
    until("it is a zombie", is_zombie);
    assert_eq!(processes.identify(child.id()), None);
    let start_ticks = facts::read_stat(Path::new("/proc"), child.id()).expect("a zombie").start_ticks;
    let mut frames = Vec::new();
    processes.last_facts(ProcessKey { pid: child.id(), start_ticks }, &mut frames);
    let told = facts_of(&frames);
    assert!(matches!(&told[..], [(pid, facts)] if *pid == child.id() && facts.contains("comm=")), "{told:?}");
    child.wait().expect("waited");
    assert_eq!(processes.identify(child.id()), None);
    for nobody in [0, u32::MAX, i32::MAX as u32] {
        assert_eq!(processes.identify(nobody), None);
    }
}

#[test]
fn facts_of_what_has_ended_since_are_told() {
    let processes = Processes::new();
    let mut child = sleeper();
    processes.identify(child.id()).expect("alive");
    child.kill().expect("killed");
    child.wait().expect("waited");
    until("it has ended", || {
        processes.sweep();
        processes.is_empty()
    });
    let mut frames = Vec::new();
    processes.take_facts(1, &mut frames);
    let told = facts_of(&frames);
    assert!(matches!(&told[..], [(pid, facts)] if *pid == child.id() && facts.contains("comm=")), "{told:?}");
    frames.clear();
    processes.take_facts(1, &mut frames);
    assert!(frames.is_empty());
}

#[test]
fn facts_are_told_once_and_the_command_line_when_it_is_known() {
    let processes = Processes::new();
    let mut child = sleeper();
    // The child is still this program until its exec().
    until("it sleeps", || {
        facts::read_stat(Path::new("/proc"), child.id()).is_some_and(|stat| stat.comm == b"sleep")
    });
    processes.identify(child.id()).expect("alive");
    processes.identify(child.id()).expect("alive");
    let mut all = Vec::new();
    until("the command line has been read", || {
        let mut frames = Vec::new();
        processes.take_facts(1, &mut frames);
        all.extend(facts_of(&frames));
        all.last().is_some_and(|(_, facts)| facts.contains("command="))
    });
    assert!(all.len() <= 2, "{all:?}");
    assert!(
        all.iter().all(|(pid, facts)| *pid == child.id() && facts.starts_with("comm=sleep\n")),
        "{all:?}"
    );
    assert!(all.last().expect("facts").1.contains("command=sleep 1000\n"));
    let mut frames = Vec::new();
    processes.take_facts(1, &mut frames);
    assert!(frames.is_empty());
    child.kill().expect("killed");
    child.wait().expect("waited");
}

#[test]
fn without_a_pidfd_the_start_time_decides() {
    let processes = Processes::new();
    let mut child = sleeper();
    let key = processes.identify(child.id()).expect("alive");
    {
        let mut table = processes.lock();
        table.live.get_mut(&key.pid).expect("known").pidfd = None;
        table.without_pidfd += 1;
    }
    assert_eq!(processes.identify(child.id()), Some(key));
    processes.sweep_without_pidfd();
    assert_eq!(processes.len(), 1);
    child.kill().expect("killed");
    child.wait().expect("waited");
    processes.sweep_without_pidfd();
    assert!(processes.is_empty());
    assert_eq!(processes.lock().without_pidfd, 0);
}

#[tokio::test]
async fn every_end_is_told_once() {
    let processes = Processes::new();
    let mut children: Vec<Child> = (0..100).map(|_| sleeper()).collect();
    let mut keys: Vec<ProcessKey> =
        children.iter().map(|child| processes.identify(child.id()).expect("alive")).collect();
    for child in &mut children {
        child.kill().expect("killed");
        child.wait().expect("waited");
    }
    let mut told = Vec::new();
    for _ in 0..keys.len() {
        // Dropping the future in between loses nothing.
        let _ = tokio::time::timeout(Duration::ZERO, std::future::pending::<()>()).await;
        told.push(
            tokio::time::timeout(Duration::from_secs(20), processes.next_ended()).await.expect("told").key,
        );
    }
    keys.sort_unstable();
    told.sort_unstable();
    assert_eq!(told, keys);
    assert!(tokio::time::timeout(Duration::from_millis(50), processes.next_ended()).await.is_err());
}

#[test]
fn names_and_jobs_are_found_when_they_are_there() {
    let dir = std::env::temp_dir().join(format!("gpumemd-seek-{}", std::process::id()));
    let (names, jobs) = (dir.join("names"), dir.join("jobs"));
    std::fs::create_dir_all(&names).expect("a folder");
    std::fs::create_dir_all(&jobs).expect("a folder");
    std::fs::write(jobs.join("0"), "7\n").expect("written");
    let settings = ProcessSettings { container_names: Some(names.clone()), job_mapping: Some(jobs.clone()) };
    let processes = Processes::with(settings);
    let mut child = sleeper();
    let key = processes.identify(child.id()).expect("alive");
    let said = |processes: &Processes| {
        processes.read_late_facts();
        let mut frames = Vec::new();
        processes.take_facts(1, &mut frames);
        facts_of(&frames).pop().map(|(_, facts)| facts).unwrap_or_default()
    };
    // The command line follows later, together with all other facts.
    until("the command line has been read", || said(&processes).contains("command="));
    processes.note_gpu(key, Gpu { index: 0, instance: None });
    assert!(said(&processes).contains("mapped_job=7\n"));
    assert!(!said(&processes).contains("mapped_job"), "told once");
    // On a second GPU without a job, the job is unknown.
    processes.note_gpu(key, Gpu { index: 1, instance: None });
    assert!(said(&processes).contains("mapped_job=\n"));
    std::fs::write(jobs.join("1"), "7\n").expect("written");
    assert!(said(&processes).contains("mapped_job=7\n"));

    // As if the control group of the process were a container's, whose file in /var/log/containers appears a little later.
    let id = "ab".repeat(32);
    {
        let mut table = processes.lock();
        let entry = table.live.get_mut(&key.pid).expect("known");
        Arc::make_mut(&mut entry.facts).place.container = Some(id.clone());
        let facts = Arc::clone(&entry.facts);
        entry.late = LateFacts::of_container(&processes.inner.settings, &facts);
    }
    assert_eq!(said(&processes), "");
    std::fs::write(names.join(format!("train-0_ml_worker-{id}.log")), "").expect("written");
    let facts = said(&processes);
    for line in ["container=abababababab\n", "pod=train-0\n", "namespace=ml\n", "container_name=worker\n"] {
        assert!(facts.contains(line), "{facts}");
    }
    assert!(processes.lock().live[&key.pid].late.is_none());
    child.kill().expect("killed");
    child.wait().expect("waited");
    std::fs::remove_dir_all(&dir).expect("removed");
}
