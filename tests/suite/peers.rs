//! Hostile peers on the agent socket and on the control socket, next to an well-behaved program. The well-behaved program stays
//! exact to the byte. The daemon stays small, closes received descriptors, and reports refused peers with reasons.
mod parts;
mod scene;

use gpumem_tests::live::hostile::{NOBODY, part, say_and_stay};
use gpumem_tests::live::{Daemon, Job, Machine, until};
use parts::{IDLE, LIED, played};
use rustix::process::{Resource, getrlimit};
use scene::{MIB, MOST_RSS_MIB, Scene, Times, p99};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Everything that a peer does here runs in a separate process of an unprivileged user.
#[test]
fn as_another_user() {
    let Some(part) = part() else { return };
    let path = |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_default());
    let again = || played(&part, &path("SOCKET"), &path("CONTROL"));
    let mut stays = again();
    println!("\n{} stay", stays.len());
    println!("\ndone");
    // Repeats while others are measured.
    while std::env::var_os("ONCE").is_none() {
        drop(stays);
        stays = again();
    }
    say_and_stay("over");
}

/// How users see false data.
#[derive(Clone, Copy, PartialEq)]
enum Mark {
    /// By a line of `doctor` and a flag of its row.
    Is,
    /// By a line of `doctor`: its sums are its own claims.
    Told,
    /// Not at all: nothing was used, or nothing was false. Its actions are within limits, or refused and counted.
    No,
}
use Mark::{Is, No, Told};

/// Part that a hostile peer plays, whether its process is marked, and the processor share that it may cost the daemon, in
/// addition to the share for well-behaved programs.
const PARTS: [(&str, Mark, f64); 13] = [
    ("silent", No, 0.25),
    ("half frames", No, BUSY),
    ("descriptors", No, BUSY),
    ("allocations", Is, BUSY),
    ("names", Is, BUSY),
    ("numbers", Is, BUSY),
    ("costly records", Is, BUSY),
    ("hungry segments", No, BUSY),
    ("memory", Is, BUSY),
    ("others' records", Told, BUSY),
    ("addresses", Is, BUSY),
    ("connects and disconnects", No, BUSY),
    // A fifth of the time is for answers to one user; the rest is what connections cost.
    ("control", No, 0.5),
];
/// One thread receives records, and two more write; a hostile peer can keep the first one busy.
const BUSY: f64 = 1.6;
/// Allowed delay for others beyond a factor of two, on an idle machine: the four batches of one user that may wait for
/// the ledger, and a read of all data. Without optimisation each takes some twenty times as long.
const GO: Duration = Duration::from_millis(if cfg!(debug_assertions) { 100 } else { 20 });
/// The same for a program that starts: it connects, is welcomed, and is read from its beginning.
const START: Duration = Duration::from_secs(1);

/// Runs these tests one at a time, because they measure.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn whatever_peers_do_others_are_served_and_the_daemon_stays_small() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut scene = Scene::new();
    let fds = scene.fds();
    let mut quiet = scene.measured(25);
    for (part, mark, share) in PARTS {
        if std::env::var("GPUMEM_PART").is_ok_and(|only| only != part) {
            continue;
        }
        let mut liars: Vec<Job> = (0..2).map(|_| scene.play(part)).collect();
        let busy = scene.measured(50);
        for liar in &mut liars {
            liar.wait_for("done");
            assert!(liar.is_running(), "{part}: {:?}", liar.said);
        }
        scene.is_exact(part);
        if mark != No {
            scene.is_marked(liars[0].pid(), mark == Is, part);
        }
        let (now, most) = (scene.status("VmRSS:") >> 10, scene.status("VmHWM:") >> 10);
        println!("{part}: RSS {now} MiB, at most {most} MiB, fds {}", scene.fds());
        assert!(most <= MOST_RSS_MIB, "{part}: {most} MiB");
        drop(liars);
        until(60, "the descriptors to be closed", || (scene.fds() <= fds + 2).then_some(()));
        // The quiet measurements before and after are combined, because other programs may have started to use the processors.
        let after = scene.measured(25);
        within(part, &quiet.with(&after), &busy);
        let (idle, more) = (quiet.share.max(after.share), busy.share - after.share);
        assert!(more < share, "{part}: {:.2} of a processor, {idle:.2} without", busy.share);
        quiet = after;
    }
    scene.is_exact("at the end");
    if std::env::var_os("GPUMEM_PART").is_some() {
        return;
    }
    counted(&scene);
}

/// Asserts that others waited at most twice as long, plus the allowed delay.
fn within(part: &str, quiet: &Times, busy: &Times) {
    assert!(
        quiet.answers.len() >= 50 && busy.answers.len() >= 50,
        "{part}: another user sends requests all the time"
    );
    for (what, quiet, busy, more) in [
        ("an allocation", &quiet.shown, &busy.shown, GO),
        ("an answer", &quiet.answers, &busy.answers, GO),
        ("a newcomer", &quiet.take_new, &busy.take_new, START),
    ] {
        let (quiet, p99) = (p99(quiet), p99(busy));
        println!("  {what}: {quiet:?}, then {p99:?} ({} times)", busy.len());
        gpumem_test_support::bar(&format!("{part}: {what}, 99th percentile"), p99, 2 * quiet + more);
    }
    println!("  the daemon {:.2} of a processor, then {:.2}", quiet.share, busy.share);
}

/// Asserts that each refusal is counted and reported with a remedy.
fn counted(scene: &Scene) {
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
    assert!(log < MIB, "messages about one user's peers do not fill the log: {log} bytes");
}

#[test]
fn the_address_of_another_is_a_liars_own_number_however_often_it_is_said() {
    /// Memory around the address, and the last claim about the address itself.
    const HELD: u64 = 95 * (1 << 30) + LIED;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut scene = Scene::new();
    let liars = [scene.play_once("addresses"), scene.play_once("addresses")];
    scene.is_exact("while others name its address");
    let tracked = |scene: &Scene, pid| scene.row(pid).and_then(|row| row["tracked_bytes"].as_u64());
    for liar in &liars {
        // Only the last claim about each address counts.
        until(60, "the hostile peer's book", || (tracked(&scene, liar.pid()) == Some(HELD)).then_some(()));
        scene.is_marked(liar.pid(), true, "addresses");
        let doctor = scene.doctor(&[&liar.pid().to_string()]);
        for words in ["allocate addresses that were allocated already", "free memory that was not allocated"]
        {
            assert!(doctor.contains(words), "{words}: {doctor}");
        }
    }
    // What the victim does with its address afterwards is not theirs either.
    scene.mixer.ok("free first; alloc first 96M");
    scene.is_exact("after it has used its address again");
    for liar in &liars {
        assert_eq!(tracked(&scene, liar.pid()), Some(HELD));
    }
}

#[test]
fn three_thousand_that_say_nothing_are_held_and_nobody_waits_for_them() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let config = "[agent]\nconnections = 8000\nconnections_per_uid = 4000\nconnections_without_hello = 16000\n\
                  hello_timeout_s = 600.0\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
    let mut scene = Scene::with(config);
    let (fds, quiet) = (scene.fds(), scene.measured(50));
    let idle = scene.play_once("silent");
    // As many as the descriptors of this machine allow: the daemon keeps three for each.
    let files = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX) as usize;
    let most = IDLE.min(files.saturating_sub(300) / 3);
    until(60, "them to be let in", || (scene.fds() >= fds + most).then_some(()));
    let busy = scene.measured(50);
    println!("{most} are silent: {} fds, RSS at most {} MiB", scene.fds(), scene.status("VmHWM:") >> 10);
    within("silent", &quiet, &busy);
    assert!(scene.status("VmHWM:") >> 10 <= 96, "{} KiB", scene.status("VmHWM:"));
    assert!(busy.share < quiet.share + 0.25, "{:.2} of a processor, {:.2} without", busy.share, quiet.share);
    drop(idle);
    until(60, "the descriptors to be closed", || (scene.fds() <= fds + 2).then_some(()));
    scene.is_exact("after them");
}

/// A control group with a memory limit, if one can be created; removed on drop.
struct Group(Option<PathBuf>);

impl Group {
    fn new(bytes: u64) -> Self {
        let root = Path::new("/sys/fs/cgroup");
        let name = format!("gpumem-test-{}", std::process::id());
        let places = [(root.join("memory"), "memory.limit_in_bytes"), (root.to_owned(), "memory.max")];
        Group(places.into_iter().find_map(|(place, limit)| {
            let group = place.join(&name);
            std::fs::create_dir(&group).ok()?;
            let is_limited = std::fs::write(group.join(limit), bytes.to_string()).is_ok();
            if !is_limited {
                let _ = std::fs::remove_dir(&group);
            }
            is_limited.then_some(group)
        }))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let Some(place) = &self.0 else { return };
        // It is busy until the kernel has removed its processes.
        until(10, "the group's end", || {
            (!place.exists() || std::fs::remove_dir(place).is_ok()).then_some(())
        });
    }
}

/// Tables of the configuration that is shipped.
fn shipped(names: &[&str]) -> String {
    let text = std::fs::read_to_string(project().join("config/gpumemd.toml")).expect("it is there");
    let of = |name: &&str| {
        let (_, rest) = text.split_once(&format!("\n[{name}]\n")).unwrap_or_else(|| panic!("no {name}"));
        format!("[{name}]\n{}\n", rest.split("\n[").next().unwrap_or_default())
    };
    names.iter().map(of).collect()
}

fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

#[test]
fn with_the_shipped_limits_floods_of_several_users_stay_below_the_units_memory() {
    const USERS: [u32; 3] = [NOBODY, 60_002, 60_003];
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let unit = std::fs::read_to_string(project().join("systemd/gpumemd.service")).expect("it is there");
    let most = unit.lines().find_map(|line| line.strip_prefix("MemoryMax=")?.strip_suffix('M'));
    let most: u64 = most.and_then(|mib| mib.parse().ok()).expect("MemoryMax=, in MiB");
    let machine = Machine::new(&["devices=1", "memory=64G"]);
    let group = Group::new(most << 20);
    let joins =
        group.0.as_ref().map_or("true".into(), |at| format!("echo $$ > {}/cgroup.procs", at.display()));
    println!("in a separate group: {}", group.0.is_some());
    let config = shipped(&["agent", "nvml", "runs", "control"]);
    let begins = format!("{joins} && exec \"$0\" \"$@\"");
    let daemon = Daemon::start_by(&machine, &["sh", "-c", &begins], &config);
    let scene = Scene::on(machine, daemon);
    let mut liars: Vec<Job> =
        USERS.iter().map(|&uid| scene.play_as(uid, "fills", &[("ONCE", "1".as_ref())])).collect();
    for liar in &mut liars {
        liar.wait_for("done");
    }
    // State up to the limit is kept; anything beyond is refused and reported.
    let refused = until(60, "a limit that is met", || {
        let text = scene.daemon.asked("/v1/metrics")?;
        let refused = "gpumemd_ledger_refused_records_total{reason=\"memory_mib\"} ";
        let of_all =
            text.as_str()?.lines().find_map(|line| line.strip_prefix(refused)?.parse::<f64>().ok())?;
        (of_all > 0.0).then_some(of_all)
    });
    // The well-behaved program's figures are unchanged; when views take long, they may be marked stale.
    let row = until(60, "the well-behaved program", || scene.row(scene.mixer.pid()));
    assert_eq!(row["tracked_bytes"], scene.held, "{row}");
    assert!(
        row["used_bytes"].as_u64() > Some(scene.held) && !row["flags"].to_string().contains("partial"),
        "{row}"
    );
    let highest = scene.status("VmHWM:") >> 10;
    println!("{highest} MiB at most, of {most}; refused {refused}");
    assert!(highest < most, "{highest} MiB, the unit has {most}");
}

#[test]
fn who_asks_all_the_time_has_a_share_of_the_processor_and_others_are_answered_as_before() {
    const TIME: Duration = Duration::from_secs(3);
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let scene = Scene::new();
    let _holds = scene.play_once("holds much");
    let measured = || {
        let before = scene.cpu();
        let time = scene.answer_time(TIME);
        (time, scene.cpu() - before)
    };
    let (quiet, idle) = measured();
    let _liar = scene.play_once("asks all the time");
    let waited = "gpumemd_control_waited_total";
    until(60, "the hostile peer to be kept waiting", || (scene.metric(waited) > 0.0).then_some(()));
    let (busy, with) = measured();
    println!(
        "answers in {quiet:?}, then {busy:?}; of the processor {idle:?}, then {with:?}; {} waited, RSS at most {} MiB",
        scene.metric(waited),
        scene.status("VmHWM:") >> 10
    );
    // A fifth of the time, and what may be taken at once.
    let most = idle + TIME.mul_f64(0.2) + Duration::from_millis(100);
    gpumem_test_support::bar("processor time of answers to one user", with, most.mul_f64(1.25));
    gpumem_test_support::bar(
        "an answer beside one who asks all the time",
        busy,
        2 * quiet + Duration::from_millis(5),
    );
    assert!(scene.status("VmHWM:") >> 10 <= MOST_RSS_MIB);
    assert!(scene.doctor(&[]).contains("raise control.share_per_uid"), "{}", scene.doctor(&[]));
}
