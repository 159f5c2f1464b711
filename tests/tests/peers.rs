//! Peers that do their worst on the agent socket and on the control socket, beside an honest program: it is heard as before, to
//! the byte; the daemon stays small, closes what it was given, and says whom it refused and why.
#![allow(missing_docs)]

#[path = "peers/parts.rs"]
mod parts;
#[path = "peers/scene.rs"]
mod scene;

use gpumem_tests::live::hostile::{part, say_and_stay};
use gpumem_tests::live::{Job, crowd, until};
use parts::played;
use scene::{MIB, MOST_RSS_MIB, Scene};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Everything that a peer does here is done by a process of its own, of a user who has nothing.
#[test]
fn as_somebody_else() {
    let Some(part) = part() else { return };
    let path = |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_default());
    let stays = played(&part, &path("SOCKET"), &path("CONTROL"));
    println!("\n{} stay", stays.len());
    say_and_stay("done");
}

#[test]
fn whatever_peers_do_others_are_served_and_the_daemon_stays_small() {
    let mut scene = Scene::new();
    let quiet = scene.latency();
    let fds = scene.fds();
    for part in [
        "says nothing",
        "half frames",
        "descriptors",
        "allocations",
        "names",
        "numbers",
        "costly words",
        "memory",
        "others' words",
        "comings and goings",
        "control",
    ] {
        if std::env::var("GPUMEM_PART").is_ok_and(|only| only != part) {
            continue;
        }
        let began = Instant::now();
        let mut liars: Vec<Job> = (0..2).map(|_| scene.play(part)).collect();
        let busy = scene.latency();
        for liar in &mut liars {
            liar.wait_for("done");
        }
        let took = began.elapsed();
        scene.is_exact(part);
        let (now, most) = (scene.status("VmRSS:") >> 10, scene.status("VmHWM:") >> 10);
        println!(
            "{part}: {took:?}, latency {quiet:?} -> {busy:?}, RSS {now} MiB, at most {most} MiB, fds {}",
            scene.fds()
        );
        assert!(most <= MOST_RSS_MIB, "{part}: {most} MiB");
        // Others than these may want the processors, and then everything takes so much longer.
        let crowd = crowd();
        let most = (2 * quiet + Duration::from_millis(50)).mul_f64(crowd);
        assert!(busy < most, "{part}: {quiet:?}, then {busy:?}, in a crowd of {crowd}");
        if ["allocations", "names", "numbers"].contains(&part) {
            scene.is_marked(liars[0].pid(), part);
        }
        drop(liars);
        until(60, "the descriptors to be closed", || (scene.fds() <= fds + 2).then_some(()));
    }
    scene.is_exact("at the end");
    if std::env::var_os("GPUMEM_PART").is_some() {
        return;
    }
    // Each refusal has its count, and what a person can do about it.
    for (family, reason) in [
        ("agent_refused", "connections_without_hello"),
        ("agent_refused", "no_hello"),
        ("agent_refused", "descriptors"),
        ("agent_refused", "memory"),
        ("agent_refused", "identity"),
        ("agent_dropped", "descriptors"),
        ("ledger_refused_records", "memory_mib_per_uid"),
        ("agent_records_skipped", "not_for_agents"),
        ("control_refused", "connections_per_uid"),
    ] {
        let series = format!("gpumemd_{family}_total{{reason=\"{reason}\"}}");
        assert!(scene.metric(&series) > 0.0, "{series}");
    }
    let doctor = scene.doctor(&[]);
    for words in
        ["agent.connections_without_hello", "agent.memory_mib_per_uid", "control.connections_per_uid"]
    {
        assert!(doctor.contains(&format!("raise {words}")), "{words}: {doctor}");
    }
    let log = std::fs::metadata(scene.machine.dir.join("daemon.log")).expect("a log").len();
    assert!(log < MIB, "what is said of one user's peers does not fill the log: {log} bytes");
}

#[test]
fn who_asks_all_the_time_has_a_share_of_the_processor_and_others_are_answered_as_before() {
    const TIME: Duration = Duration::from_secs(3);
    let scene = Scene::new();
    let mut holds = scene.play("holds much");
    holds.wait_for("done");
    let measured = || {
        let before = scene.cpu();
        let time = scene.answer_time(TIME);
        (time, scene.cpu() - before)
    };
    let (quiet, idle) = measured();
    let _liar = scene.play("asks all the time");
    let waited = "gpumemd_control_waited_total";
    until(60, "the liar to be kept waiting", || (scene.metric(waited) > 0.0).then_some(()));
    let (busy, with) = measured();
    println!(
        "answers in {quiet:?}, then {busy:?}; of the processor {idle:?}, then {with:?}; {} waited, RSS at most {} MiB",
        scene.metric(waited),
        scene.status("VmHWM:") >> 10
    );
    // A fifth of the time, and what may be taken at once.
    let most = idle + TIME.mul_f64(0.2) + Duration::from_millis(100);
    assert!(with < most.mul_f64(1.25), "{with:?} of the processor, {most:?} are their share");
    assert!(busy < 2 * quiet + Duration::from_millis(5).mul_f64(crowd()), "{quiet:?}, then {busy:?}");
    assert!(scene.status("VmHWM:") >> 10 <= MOST_RSS_MIB);
    assert!(scene.doctor(&[]).contains("raise control.share_per_uid"), "{}", scene.doctor(&[]));
}
