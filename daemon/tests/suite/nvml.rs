//! The NVML source with the simulated GPU machine (tests/fake-gpu): the real poller, a real library, real processes, and every
//! fault that the simulation has.
mod faults;
mod machine;
mod watcher;

use gpumem_wire::Absence;
use gpumemd::config::NvmlSettings;
use machine::{Holder, Machine, start_ticks};
use std::time::Duration;
use watcher::Watcher;

const MIB: u64 = 1 << 20;

fn quick() -> NvmlSettings {
    NvmlSettings {
        memory_hz: 50,
        list_interval: Duration::from_millis(100),
        list_budget: 0.5,
        call_timeout: Duration::from_millis(400),
        hang_retry: Duration::from_secs(1),
        ..NvmlSettings::default()
    }
}

#[tokio::test]
async fn every_process_has_its_bytes_its_start_and_its_facts() {
    let machine = Machine::new(&["devices=2", "gpu1.name=Other GPU"]);
    let (one, two) = (Holder::new(), Holder::new());
    machine.hold(one.pid(), 0, 300 * MIB);
    machine.hold(one.pid(), 1, 30 * MIB);
    machine.hold(two.pid(), 1, 7 * MIB);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("both devices are read", |seen| seen.readings(0) >= 2 && seen.readings(1) >= 2).await;
    assert_eq!(watcher.seen.rows(0), [(one.pid(), Ok(300 * MIB), 1)]);
    let mut expected = [(one.pid(), Ok(30 * MIB), 1), (two.pid(), Ok(7 * MIB), 1)];
    expected.sort_unstable_by_key(|row| row.0);
    assert_eq!(watcher.seen.rows(1), expected);
    for holder in [&one, &two] {
        assert_eq!(watcher.seen.started[&holder.pid()], start_ticks(holder.pid()));
        let facts = &watcher.seen.facts[&holder.pid()];
        assert!(facts.contains("comm=sleep\n"), "{facts}");
        assert!(facts.contains(&format!("ancestors={},", std::process::id())), "{facts}");
    }
    assert!(!watcher.seen.facts_came_late, "facts come before the first sample");
    watcher
        .until("the command lines are read", |seen| seen.facts[&one.pid()].contains("command=sleep 1000"))
        .await;
    let status = watcher.nvml.status();
    assert!(status.up && status.reason.contains("driver 570.172.08, 2 devices"), "{status:?}");
    assert_eq!(status.devices[1].model, "Other GPU");
    assert_eq!(status.devices[1].name.to_string(), "GPU-51006d75-1a7e-4d00-8000-475055000001");
    assert!(status.devices.iter().all(|device| device.problem.is_none() && device.list_read_ns.is_some()));
    assert_eq!(status.devices[0].total_bytes, Some(85_520_809_984));
    assert_eq!(watcher.seen.used(1), 37 * MIB);
}

#[tokio::test]
async fn a_process_that_ends_is_told_and_its_pid_is_free_again() {
    let machine = Machine::new(&["devices=1"]);
    let holder = Holder::new();
    let pid = holder.pid();
    machine.hold(pid, 0, MIB);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("it is seen", |seen| seen.readings(0) >= 1 && !seen.rows(0).is_empty()).await;
    let key = watcher.processes.identify(pid).expect("alive");
    drop(holder);
    let gone = tokio::time::timeout(Duration::from_secs(10), watcher.processes.next_ended())
        .await
        .expect("told")
        .key;
    assert_eq!(gone, key);
    watcher.until("its row is gone", |seen| seen.rows(0).is_empty()).await;
}

#[tokio::test]
async fn a_lost_gpu_takes_nobody_with_it_and_comes_back() {
    let machine = Machine::new(&["devices=2"]);
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, MIB);
    machine.hold(holder.pid(), 1, 2 * MIB);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("both are read", |seen| seen.readings(0) >= 1 && seen.readings(1) >= 1).await;
    machine.set("gpu0.fault=lost");
    let lost = Err(Absence::GpuLost);
    watcher.until("the reason is there", |seen| seen.rows(0) == [(holder.pid(), lost, 0)]).await;
    let status = watcher.nvml.status();
    assert!(status.up, "{status:?}");
    assert_eq!(status.devices[0].problem.as_deref(), Some("the GPU is lost"));
    assert_eq!(status.devices[1].problem, None);
    watcher.stays_fresh(1).await;
    assert_eq!(watcher.seen.rows(1), [(holder.pid(), Ok(2 * MIB), 1)]);
    machine.set("gpu0.fault=none");
    watcher.until("it is read again", |seen| seen.rows(0) == [(holder.pid(), Ok(MIB), 1)]).await;
    assert_eq!(watcher.nvml.status().devices[0].problem, None);
    assert_eq!(watcher.nvml.status().counters.restarts, 0);
}

#[tokio::test]
async fn a_hung_gpu_is_left_alone_and_the_others_go_on() {
    let machine = Machine::new(&["devices=2"]);
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, MIB);
    machine.hold(holder.pid(), 1, 2 * MIB);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("both are read", |seen| seen.readings(0) >= 1 && seen.readings(1) >= 1).await;
    let first = watcher.nvml.status().poller_pid.expect("a poller");
    machine.set("gpu0.fault=hang");
    let late = Err(Absence::Timeout);
    watcher.until("the reason is there", |seen| seen.rows(0) == [(holder.pid(), late, 0)]).await;
    let problem = watcher.nvml.status().devices[0].problem.clone().expect("a problem");
    assert!(problem.starts_with("a call did not return; skipped for "), "{problem}");
    watcher.stays_fresh(1).await;
    assert_eq!(watcher.seen.rows(1), [(holder.pid(), Ok(2 * MIB), 1)]);
    let status = watcher.nvml.status();
    assert!(status.up && status.counters.hangs >= 1 && status.counters.restarts >= 1, "{status:?}");
    assert_ne!(status.poller_pid, Some(first));
    assert_eq!(status.devices[0].slot, 0, "devices keep their slots over pollers");
    machine.set("gpu0.fault=none");
    watcher.until("it is read again", |seen| seen.rows(0) == [(holder.pid(), Ok(MIB), 1)]).await;
    watcher.until("it is fine", |seen| seen.problems.get(&0).is_none_or(Option::is_none)).await;
    assert_eq!(watcher.nvml.status().devices[0].problem, None);
    assert!(!watcher.seen.number_fell, "readings are numbered on over pollers");
}

#[tokio::test]
async fn a_hung_gpu_that_is_tried_again_holds_nobody_up() {
    let machine = Machine::new(&["devices=2"]);
    let call_timeout = Duration::from_millis(1600);
    let mut watcher = Watcher::start(&machine, NvmlSettings { call_timeout, ..quick() });
    watcher.until("both are read", |seen| seen.readings(0) >= 1 && seen.readings(1) >= 1).await;
    machine.set("gpu0.fault=hang");
    let nvml = watcher.nvml.clone();
    watcher.until("it is noticed", |_| nvml.status().counters.hangs == 1).await;
    watcher.stays_fresh(1).await;
    let (poller, _) = (watcher.nvml.status().poller_pid, watcher.seen.take_longest_gap(1));
    watcher.until("it is tried twice", |_| nvml.status().counters.hangs == 3).await;
    let gap = watcher.seen.take_longest_gap(1);
    assert!(gap < call_timeout, "{gap:?}");
    let status = watcher.nvml.status();
    assert_eq!((status.poller_pid, status.counters.restarts), (poller, 1), "{status:?}");
    let problem = status.devices[0].problem.as_deref();
    assert_eq!(problem, Some("a call did not return; skipped for 4 s"));
    assert!(machine.clients() <= 2, "the poller, and a probe at most");
    machine.set("gpu0.fault=none");
    let before = watcher.seen.readings(0);
    watcher.until("it is read again", |seen| seen.readings(0) > before + 2).await;
    let status = watcher.nvml.status();
    assert_eq!((status.counters.restarts, status.devices[0].problem.as_deref()), (1, None));
    machine::until("the probe is gone", || async { machine.clients() == 1 }).await;
}

#[tokio::test]
async fn where_only_lists_hang_memory_goes_on() {
    let machine = Machine::new(&["devices=2"]);
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, MIB);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("both are read", |seen| seen.readings(0) >= 1 && seen.readings(1) >= 1).await;
    machine.set("gpu0.fault_list=hang");
    let nvml = watcher.nvml.clone();
    watcher.until("it is tried again", |_| nvml.status().counters.hangs >= 2).await;
    let (poller, before) = (watcher.nvml.status().poller_pid, watcher.seen.memory_reads(0));
    machine.hold(holder.pid(), 0, 64 * MIB);
    watcher.until("memory goes on", |seen| seen.memory_reads(0) > before + 20).await;
    assert_eq!(watcher.seen.used(0), 64 * MIB);
    let status = watcher.nvml.status();
    let problem = status.devices[0].problem.clone().expect("a problem");
    assert!(problem.starts_with("process list: a call did not return; skipped for "), "{problem}");
    watcher.stays_fresh(1).await;

    // Then all calls hang, then only lists: the probe distinguishes them.
    machine.set("gpu0.fault=hang");
    watcher
        .until("memory hangs too", |_| {
            nvml.status().devices[0].problem.as_deref().is_some_and(|problem| problem.starts_with("a call"))
        })
        .await;
    watcher.stays_fresh(1).await;
    machine.set("gpu0.fault=none");
    let before = watcher.seen.memory_reads(0);
    watcher.until("memory goes on", |seen| seen.memory_reads(0) > before + 20).await;
    assert_ne!(watcher.nvml.status().devices[0].problem, None);
    machine.set("gpu0.fault_list=none");
    watcher.until("it is read again", |seen| seen.rows(0) == [(holder.pid(), Ok(64 * MIB), 1)]).await;
    assert_eq!(watcher.nvml.status().devices[0].problem, None);
    assert_ne!(watcher.nvml.status().poller_pid, poller, "the whole GPU hung once in between");
    assert!(watcher.seen.open.is_empty() && !watcher.seen.number_fell);
}

#[tokio::test]
async fn a_list_that_hangs_ends_its_reading() {
    let machine = Machine::new(&["devices=2"]);
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, MIB);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("both are read", |seen| seen.readings(0) >= 1 && seen.readings(1) >= 1).await;
    machine.set("gpu0.fault_list=hang");
    let late = Err(Absence::Timeout);
    watcher.until("the reason is there", |seen| seen.rows(0) == [(holder.pid(), late, 0)]).await;
    watcher.stays_fresh(1).await;
    assert!(watcher.seen.open.is_empty(), "{:?}", watcher.seen.open);
}

#[tokio::test]
async fn bytes_that_are_not_available_are_absent() {
    let machine = Machine::new(&["devices=1", "fault=bytes_unavailable"]);
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, MIB);
    let mut watcher = Watcher::start(&machine, quick());
    let absent = Err(Absence::NotAvailable);
    watcher.until("it is absent", |seen| seen.rows(0) == [(holder.pid(), absent, 1)]).await;
    assert_eq!(watcher.nvml.status().devices[0].problem, None, "that is not a fault of the device");
}

#[tokio::test]
async fn a_list_without_permission_says_so_and_memory_goes_on() {
    let machine = Machine::new(&["devices=1"]);
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, MIB);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("it is seen", |seen| seen.rows(0) == [(holder.pid(), Ok(MIB), 1)]).await;
    machine.set("fault_list=no_permission");
    let absent = Err(Absence::NoPermission);
    watcher.until("it is absent", |seen| seen.rows(0) == [(holder.pid(), absent, 0)]).await;
    let problem = watcher.nvml.status().devices[0].problem.clone();
    assert_eq!(problem.as_deref(), Some("process list: no permission"));
    let before = watcher.seen.memory_reads(0);
    watcher.until("memory goes on", |seen| seen.memory_reads(0) > before + 10).await;
}

#[tokio::test]
async fn lists_that_grow_while_they_are_read_are_whole() {
    let machine = Machine::new(&["devices=1", "ghosts=60", "nvml.race=30"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("many readings", |seen| seen.readings(0) >= 20).await;
    assert_eq!((watcher.seen.failed_readings, watcher.seen.rows(0).len()), (0, 60));
    machine.set("ghosts=1500");
    watcher.until("all of them", |seen| seen.rows(0).len() == 1500).await;
    let strangers = watcher.seen.rows(0).iter().all(|row| watcher.seen.started[&row.0] == 0);
    assert!(strangers, "nobody knows when a process began that is not in /proc");
}

#[tokio::test]
async fn a_process_that_computes_and_draws_counts_once() {
    let machine = Machine::new(&["devices=1", "graphics=1", "mps=1"]);
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, 5 * MIB);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("it is in all lists", |seen| seen.rows(0) == [(holder.pid(), Ok(5 * MIB), 7)]).await;
}

#[tokio::test]
async fn a_partitioned_gpu_is_its_instances_and_nothing_is_there_twice() {
    let machine = Machine::new(&["devices=2", "gpu0.mig=3"]);
    let whole = Holder::new();
    machine.hold(whole.pid(), 1, 3 * MIB);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("all are read", |seen| (0..4).all(|slot| seen.readings(slot) >= 1)).await;
    let devices = watcher.nvml.status().devices;
    let names: Vec<String> = devices.iter().map(|device| device.name.to_string()).collect();
    assert_eq!((names.len(), devices[0].index, devices[2].index, devices[3].index), (4, 0, 0, 1));
    assert!(
        names[..3].iter().all(|name| name.starts_with("MIG-")) && names[3].starts_with("GPU-"),
        "{names:?}"
    );
    let (first, third) = (machine.trainer(&names[0]), machine.trainer(&names[2]));
    let row = |holder: &Holder| (holder.pid(), Ok(machine.used(holder.pid(), 0)), 1);
    let expected = [vec![row(&first)], vec![], vec![row(&third)], vec![(whole.pid(), Ok(3 * MIB), 1)]];
    watcher
        .until("each is on its instance", |seen| {
            (0..4).all(|slot| seen.rows(slot) == expected[usize::from(slot)])
        })
        .await;
    assert!(watcher.seen.used(0) >= machine.used(first.pid(), 0));
}

#[tokio::test]
async fn old_drivers_tell_the_same() {
    for (library, reserved) in [("lib-470", false), ("lib-v1", false), ("lib-535", true)] {
        let machine = Machine::new(&["devices=1", "ghosts=3"]);
        let holder = Holder::new();
        machine.hold(holder.pid(), 0, 5 * MIB);
        let settings = NvmlSettings { library: Some(Machine::library(library)), trust_pids: true, ..quick() };
        let mut watcher = Watcher::start(&machine, settings);
        watcher.until(library, |seen| seen.readings(0) >= 2).await;
        for ghosts in [3, 40, 200] {
            machine.set(&format!("ghosts={ghosts}"));
            watcher.until(library, |seen| seen.rows(0).len() == ghosts + 1).await;
            let rows = watcher.seen.rows(0);
            assert!(rows.contains(&(holder.pid(), Ok(5 * MIB), 1)), "{library}: {rows:?}");
            let right = |row: &&(u32, Result<u64, Absence>, u8)| row.1 == Ok(256 * MIB) && row.0 >= 5_000_000;
            assert_eq!(rows.iter().filter(right).count(), ghosts, "{library}");
        }
        assert_eq!(watcher.seen.reserved.is_some(), reserved, "{library}");
        assert_eq!(watcher.seen.failed_readings, 0, "{library}");
    }
}

#[tokio::test]
async fn a_driver_may_come_go_and_come_again() {
    let machine = Machine::new(&["devices=1", "nvml.driver=absent"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher
        .until("it is absent", |seen| {
            seen.source == Some((false, "nvml: libnvidia-ml.so.1: the driver is not loaded".to_owned()))
        })
        .await;
    machine.set("nvml.driver=ok");
    watcher.until("it is there", |seen| seen.readings(0) >= 1).await;
    assert!(watcher.nvml.status().up);
    machine.set("fault=lost");
    machine.set("nvml.driver=mismatch");
    watcher.nvml.release(Duration::from_secs(1));
    let newer =
        "nvml: libnvidia-ml.so.1: library and driver are of different versions; reload the driver or reboot";
    watcher.until("it is another version", |seen| seen.source == Some((false, newer.to_owned()))).await;
    machine.set("fault=none");
    machine.set("nvml.driver=ok");
    let before = watcher.seen.readings(0);
    watcher.until("it is there again", |seen| seen.readings(0) > before).await;
    assert_eq!(watcher.nvml.status().counters.restarts, 0, "no poller was lost for that");
}

#[tokio::test]
async fn released_means_that_nobody_holds_the_driver() {
    let machine = Machine::new(&["devices=1"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("it is read", |seen| seen.readings(0) >= 1).await;
    assert_eq!(machine.clients(), 1);
    watcher.nvml.release(Duration::from_secs(2));
    watcher
        .until("it is released", |seen| {
            seen.source == Some((false, "nvml: released for 2 s: on request".to_owned()))
        })
        .await;
    assert_eq!(machine.clients(), 0);
    assert!(watcher.nvml.status().released_until_ns.is_some());
    let before = watcher.seen.readings(0);
    watcher.until("it is read again", |seen| seen.readings(0) > before).await;
    assert_eq!(watcher.nvml.status().released_until_ns, None);
    watcher.nvml.release(Duration::from_secs(3600));
    watcher.until("it is released", |seen| !seen.source.as_ref().is_some_and(|(up, _)| *up)).await;
    watcher.nvml.resume();
    let before = watcher.seen.readings(0);
    watcher.until("it is read again", |seen| seen.readings(0) > before).await;
}

#[tokio::test]
async fn driver_that_is_being_unbound_finds_nobody_who_holds_it() {
    let machine = Machine::new(&["devices=1"]);
    let mut watcher = Watcher::start(&machine, quick());
    machine::until("events to be listened for", || async { machine.calls("nvmlSystemRegisterEvents") >= 1 })
        .await;
    machine.unbind(0x100);
    let why = "nvml: released for 60 s: the driver is being unbound from GPU 0x100";
    watcher.until("it is released", |seen| seen.source == Some((false, why.to_owned()))).await;
    assert_eq!(machine.clients(), 0);
    assert!(watcher.nvml.status().released_until_ns.is_some());
    watcher.nvml.resume();
    let before = watcher.seen.readings(0);
    watcher.until("it is read again", |seen| seen.readings(0) > before).await;
    assert_eq!(watcher.nvml.status().released_until_ns, None);
}

#[tokio::test]
async fn a_poller_that_is_killed_is_replaced() {
    let machine = Machine::new(&["devices=1"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("it is read", |seen| seen.readings(0) >= 1).await;
    let pid = watcher.nvml.status().poller_pid.expect("a poller");
    machine::kill(pid);
    let before = watcher.seen.readings(0);
    watcher.until("it is read again", |seen| seen.readings(0) > before + 2).await;
    let status = watcher.nvml.status();
    assert!(status.up && status.counters.restarts == 1, "{status:?}");
    assert!(watcher.seen.open.is_empty() && !watcher.seen.number_fell);
    let nvml = watcher.nvml.clone();
    watcher.until("totals are told", |_| nvml.status().counters.calls.list_calls > 0).await;
}

#[tokio::test]
async fn what_a_lost_poller_said_of_a_device_does_not_outlive_it() {
    let machine = Machine::new(&["devices=1", "fault_list=no_permission"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("it is told", |seen| seen.problems.get(&0).is_some_and(Option::is_some)).await;
    machine::kill(watcher.nvml.status().poller_pid.expect("a poller"));
    machine.set("fault_list=none");
    watcher.until("it is fine", |seen| seen.problems.get(&0).is_some_and(Option::is_none)).await;
    assert_eq!(watcher.nvml.status().devices[0].problem, None);
}

#[tokio::test]
async fn a_program_that_is_no_poller_is_no_outage() {
    let machine = Machine::new(&["devices=1"]);
    for (script, expected) in [
        ("#!/bin/sh\nexit 3\n", "nvml: the poller ended and is being replaced"),
        (
            "#!/bin/sh\nprintf 'this is not a frame at all'; exec sleep 1000\n",
            "nvml: the poller wrote invalid data and was replaced",
        ),
    ] {
        let program = machine.script("not-a-poller", script);
        let mut watcher = Watcher::start(&machine, NvmlSettings { program: Some(program), ..quick() });
        watcher.until(expected, |seen| seen.source == Some((false, expected.to_owned()))).await;
        assert!(!watcher.nvml.status().up);
    }
    let program = Some(machine.dir().join("nowhere"));
    let mut watcher = Watcher::start(&machine, NvmlSettings { program, ..quick() });
    let starts = "nvml: the poller cannot be started: ";
    watcher
        .until("it is told", |seen| seen.source.as_ref().is_some_and(|(_, why)| why.starts_with(starts)))
        .await;
}

#[tokio::test]
async fn the_poller_ends_with_its_parent() {
    let machine = Machine::new(&["devices=1"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("it is read", |seen| seen.readings(0) >= 1).await;
    let pid = watcher.nvml.status().poller_pid.expect("a poller");
    drop(watcher);
    machine::until("the poller is gone", || async { !machine::is_alive(pid) }).await;
    assert_eq!(machine.clients(), 0);
}

#[tokio::test]
async fn who_asks_for_a_list_gets_it_soon() {
    let machine = Machine::new(&["devices=2"]);
    let settings = NvmlSettings { list_interval: Duration::from_secs(60), ..quick() };
    let mut watcher = Watcher::start(&machine, settings);
    watcher.until("both are read", |seen| seen.readings(0) == 1 && seen.readings(1) == 1).await;
    let device = watcher.nvml.status().devices[1].name;
    watcher.nvml.hint(device);
    watcher.until("it is read", |seen| seen.readings(1) == 2).await;
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, 100 * MIB);
    watcher.until("memory moved", |seen| seen.rows(0) == [(holder.pid(), Ok(100 * MIB), 1)]).await;
    assert_eq!((watcher.seen.readings(0), watcher.seen.readings(1)), (2, 2));
}

#[tokio::test]
async fn an_agents_word_leads_to_a_list_within_twenty_milliseconds() {
    let machine = Machine::new(&["devices=8", "nvml.list_us=300", "nvml.memory_us=12"]);
    let mut watcher = Watcher::start(&machine, NvmlSettings::default());
    watcher.until("all are read", |seen| (0..8).all(|slot| seen.readings(slot) >= 1)).await;
    let device = watcher.nvml.status().devices[5].name;
    let mut waits = Vec::new();
    for pause_ms in [400, 3, 400, 15, 400, 150, 400, 40] {
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        let asked = gpumemd::clock::now_ns();
        watcher.nvml.hint(device);
        watcher
            .until("it is listed", |seen| seen.begun[&5].last().is_some_and(|&begun| begun >= asked))
            .await;
        let begun = watcher.seen.begun[&5].iter().find(|&&begun| begun >= asked).expect("listed");
        waits.push((begun - asked) as f64 / 1e6);
    }
    println!("from a hint to its list, ms: {waits:.2?}");
    waits.sort_unstable_by(f64::total_cmp);
    let median = Duration::from_secs_f64(waits[waits.len() / 2] / 1e3);
    gpumem_test_support::bar("from a hint to its list, median", median, Duration::from_millis(20));
}

#[tokio::test]
async fn lists_keep_to_their_budget_while_memory_is_fast() {
    let machine = Machine::new(&["devices=4", "nvml.memory_us=12", "nvml.list_us=3000", "latency=sleep"]);
    let settings =
        NvmlSettings { memory_hz: 100, list_interval: Duration::from_millis(100), ..NvmlSettings::default() };
    let mut watcher = Watcher::start(&machine, settings);
    watcher.until("all are read", |seen| (0..4).all(|slot| seen.readings(slot) >= 1)).await;
    let (before, began) = (watcher.nvml.status().counters, watcher.seen.memory_reads(0));
    let start = std::time::Instant::now();
    // Number of wake-ups that this machine allows a thread with the same interval.
    let floor = std::thread::spawn(move || {
        let mut turns = 0;
        while start.elapsed() < Duration::from_secs(4) {
            std::thread::sleep(Duration::from_millis(10));
            turns += 1;
        }
        f64::from(turns) / start.elapsed().as_secs_f64()
    });
    watcher.until("four seconds are over", |_| start.elapsed() >= Duration::from_secs(4)).await;
    let floor = floor.join().expect("a count");
    let counters = watcher.nvml.status().counters;
    let seconds = start.elapsed().as_secs_f64();
    let share = (counters.calls.list_ns - before.calls.list_ns) as f64 / 1e9 / seconds;
    // Totals are written each second, so they may include one second more than was measured.
    assert!(share > 0.008 && share < 0.0275, "{share}: {counters:?}");
    assert!(counters.calls.deferred > before.calls.deferred);
    let rate = (watcher.seen.memory_reads(0) - began) as f64 / seconds;
    assert!(rate < 110.0, "{rate}");
    let every = |rate: f64| Duration::from_secs_f64(1.0 / rate);
    gpumem_test_support::bar("between two memory readings", every(rate), every(0.6 * floor));
}
