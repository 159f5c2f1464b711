//! Faults of the driver and their effects: every code of NVML, events, accounting, replaced libraries.

use super::machine::{self, Holder, Machine};
use super::watcher::Watcher;
use super::{MIB, quick};
use gpumem_test_support::ProcessorWait;
use gpumem_wire::Absence;
use gpumemd::config::NvmlSettings;
use std::time::Duration;

/// Steps from a call that hangs to the next reading of another GPU, each of which may wait for a processor.
const WAITS: u32 = 8;

/// NVML's codes with a part of the text that users must see.
const CODES: [(u32, &str); 16] = [
    (1, "not initialised"),
    (2, "invalid argument"),
    (3, "not supported"),
    (4, "no permission"),
    (6, "not found"),
    (7, "kept growing"),
    (9, "not loaded"),
    (10, "timeout"),
    (15, "lost"),
    (16, "reset"),
    (18, "different versions"),
    (19, "in use"),
    (25, "version mismatch"),
    (27, "not ready"),
    (28, "GPU not found"),
    (999, "unknown error"),
];

fn is_of_library(code: u32) -> bool {
    matches!(code, 1 | 9 | 18)
}

#[tokio::test]
async fn every_code_of_a_gpu_has_its_words_and_passes_and_is_no_other_gpus() {
    let codes: Vec<_> = CODES.into_iter().filter(|(code, _)| !is_of_library(*code)).collect();
    let well = codes.len() as u8;
    let machine = Machine::new(&[&format!("devices={}", well + 1)]);
    let holder = Holder::new();
    (0..=well).for_each(|device| machine.hold(holder.pid(), device.into(), MIB));
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("all are read", |seen| (0..=well).all(|slot| seen.readings(slot) >= 1)).await;
    for (device, (code, _)) in codes.iter().enumerate() {
        machine.set(&format!("gpu{device}.fault=code:{code}"));
    }
    let nvml = watcher.nvml.clone();
    watcher
        .until("each is told", |seen| {
            let devices = nvml.status().devices;
            let told = codes.iter().zip(&devices).all(|((_, words), device)| {
                device.problem.as_deref().is_some_and(|problem| problem.contains(words))
            });
            told && (0..well).all(|slot| seen.rows(slot).iter().all(|row| row.1.is_err()))
        })
        .await;
    watcher.stays_fresh(well).await;
    let status = nvml.status();
    assert!(status.up && status.devices[usize::from(well)].problem.is_none(), "{status:?}");
    for ((code, _), device) in codes.iter().zip(&status.devices) {
        assert!(device.code == Some(*code) && device.remedy.is_some(), "{code}: {device:?}");
    }
    machine.set("fault=none");
    let is_read = [(holder.pid(), Ok(MIB), 1)];
    watcher.until("all are read again", |seen| (0..=well).all(|slot| seen.rows(slot) == is_read)).await;
    watcher
        .until("all are well", |_| nvml.status().devices.iter().all(|device| device.problem.is_none()))
        .await;
    assert_eq!(nvml.status().counters.restarts, 0, "no poller was lost for any of it");
    assert!(watcher.seen.reserved.is_some(), "the newest version of the call is used as before");
}

#[tokio::test]
async fn every_code_of_the_library_is_waited_out() {
    for (code, words) in CODES.into_iter().filter(|(code, _)| is_of_library(*code)) {
        let machine = Machine::new(&["devices=1"]);
        let mut watcher = Watcher::start(&machine, quick());
        watcher.until("it is read", |seen| seen.readings(0) >= 1).await;
        machine.set(&format!("fault=code:{code}"));
        let is_told = |source: &Option<(bool, String)>| {
            source.as_ref().is_some_and(|(up, reason)| !up && reason.contains(words))
        };
        watcher.until(&format!("code {code} is told"), |seen| is_told(&seen.source)).await;
        assert!(watcher.nvml.status().remedy.is_some());
        machine.set("fault=none");
        let before = watcher.seen.readings(0);
        watcher.until(&format!("code {code} has passed"), |seen| seen.readings(0) > before).await;
        assert_eq!(watcher.nvml.status().counters.restarts, 0);
    }
}

#[tokio::test]
async fn every_code_at_the_start_is_waited_out() {
    let mut all: Vec<_> = CODES
        .iter()
        .map(|(code, words)| {
            let machine = Machine::new(&["devices=1", &format!("nvml.driver=code:{code}")]);
            let watcher = Watcher::start(&machine, quick());
            (*words, machine, watcher)
        })
        .collect();
    for (words, machine, watcher) in &mut all {
        let is_told = |source: &Option<(bool, String)>| {
            source.as_ref().is_some_and(|(up, reason)| !up && reason.contains(*words))
        };
        watcher.until(&format!("{words} is told"), |seen| is_told(&seen.source)).await;
        assert!(watcher.nvml.status().remedy.is_some());
        machine.set("nvml.driver=ok");
    }
    for (words, _, watcher) in &mut all {
        watcher.until(&format!("{words} has passed"), |seen| seen.readings(0) >= 1).await;
    }
}

#[tokio::test]
async fn a_library_that_was_replaced_is_the_one_that_is_opened() {
    let machine = Machine::new(&["devices=1"]);
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, MIB);
    let installed = machine.dir().join("libnvidia-ml.so.1");
    let install = |variant: &str| {
        let new = machine.dir().join("new");
        std::fs::copy(Machine::library(variant), &new).expect("copied");
        std::fs::rename(new, &installed).expect("installed");
    };
    install("lib-470");
    let settings = NvmlSettings { library: Some(installed.clone()), trust_pids: true, ..quick() };
    let mut watcher = Watcher::start(&machine, settings);
    let driver = |source: &Option<(bool, String)>, name: &str| {
        source.as_ref().is_some_and(|(up, reason)| *up && reason.contains(name))
    };
    watcher.until("the old driver is read", |seen| driver(&seen.source, "driver 470.")).await;
    watcher.until("it is read", |seen| seen.rows(0) == [(holder.pid(), Ok(MIB), 1)]).await;
    let poller = watcher.nvml.status().poller_pid;
    // A package upgrade: library and module have different versions until the module is reloaded.
    install("lib");
    machine.set("nvml.driver=mismatch");
    let before = watcher.seen.readings(0);
    watcher.until("what is open goes on", |seen| seen.readings(0) > before + 5).await;
    watcher.nvml.release(std::time::Duration::from_secs(1));
    watcher
        .until("the mismatch is told", |seen| {
            seen.source.as_ref().is_some_and(|(up, reason)| !up && reason.contains("different versions"))
        })
        .await;
    let remedy = watcher.nvml.status().remedy.expect("something can be done");
    assert!(remedy.contains("reload the nvidia modules"), "{remedy}");
    assert!(watcher.seen.reserved.is_none(), "so far the old library was read");
    machine.set("nvml.driver=ok");
    watcher.until("the new driver is read", |seen| driver(&seen.source, "driver 570.")).await;
    watcher.until("by its newest calls", |seen| seen.reserved.is_some()).await;
    watcher.until("it is read", |seen| seen.rows(0) == [(holder.pid(), Ok(MIB), 1)]).await;
    let status = watcher.nvml.status();
    assert_eq!((status.poller_pid, status.counters.restarts), (poller, 0), "{status:?}");
    assert!(!watcher.seen.number_fell && machine.clients() == 1);
}

#[tokio::test]
async fn a_gpu_that_is_lost_from_the_start_is_told_and_found_later() {
    let machine = Machine::new(&["devices=2", "gpu0.fault=lost"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("the other is read", |seen| seen.readings(0) >= 1).await;
    let reason = watcher.nvml.status().reason;
    assert!(reason.contains("1 device; GPU 0 cannot be identified: the GPU is lost"), "{reason}");
    let status = watcher.nvml.status();
    assert!(matches!(&*status.unnamed, [(0, why, Some(_))] if why == "the GPU is lost"), "{status:?}");
    machine::until("events are registered", || async { machine.calls("nvmlEventSetWait_v2") >= 1 }).await;
    machine.set("gpu0.fault=none");
    machine.event(1, 0x100, 0); // checks sooner than by its interval
    watcher.until("both are read", |seen| seen.readings(0) >= 1 && seen.readings(1) >= 1).await;
    assert!(watcher.nvml.status().unnamed.is_empty());
}

#[tokio::test]
async fn faults_are_told_and_a_gpu_without_events_costs_the_others_none() {
    let machine = Machine::new(&["devices=3", "gpu1.fault_events=unknown"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("all are read", |seen| (0..3).all(|slot| seen.readings(slot) >= 2)).await;
    machine::until("events are registered", || async { machine.calls("nvmlEventSetWait_v2") >= 2 }).await;
    machine.xid(1, 13);
    machine.xid(2, 79);
    machine.xid(0, 31);
    watcher.until("they are told", |seen| seen.faults.len() >= 2).await;
    let mut faults = watcher.seen.faults.clone();
    faults.sort_unstable();
    assert_eq!(faults, [(0, 31), (2, 79)]);
    let before = machine.calls("nvmlEventSetWait_v2");
    let start = std::time::Instant::now();
    watcher.until("two seconds are over", |_| start.elapsed().as_secs() >= 2).await;
    let calls = machine.calls("nvmlEventSetWait_v2") - before;
    assert!((2..=14).contains(&calls), "at the pace of readings, not of waiting: {calls}");
}

#[tokio::test]
async fn a_call_for_events_that_hangs_costs_the_events_and_nothing_else() {
    let machine = Machine::new(&["devices=2"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("both are read", |seen| seen.readings(0) >= 1 && seen.readings(1) >= 1).await;
    machine.set("gpu1.fault_events=hang");
    let nvml = watcher.nvml.clone();
    watcher.until("it is noticed", |_| nvml.status().no_events).await;
    watcher.stays_fresh(0).await;
    watcher.stays_fresh(1).await;
    let status = nvml.status();
    assert!(status.up && status.counters.restarts == 1, "{status:?}");
    assert!(status.devices.iter().all(|device| device.problem.is_none()), "{status:?}");
}

/// Calls for one GPU do not return, and opening it again does not either.
#[tokio::test]
async fn healthy_gpus_are_read_while_another_hangs() {
    let machine = Machine::new(&["devices=3"]);
    let settings = NvmlSettings { call_timeout: Duration::from_secs(5), ..quick() };
    let mut watcher = Watcher::start(&machine, settings);
    watcher.until("all are read", |seen| (0..3).all(|slot| seen.readings(slot) >= 2)).await;
    let nvml = watcher.nvml.clone();
    let is_pending = |slot: usize| {
        nvml.status().devices[slot].problem.as_deref() == Some("an NVML call has not returned so far")
    };
    // By the poller's own time stamps, a reading of a healthy GPU is never older than a second and two periods.
    let waits = ProcessorWait::measure();
    let bound = Duration::from_secs(1) + 2 * Duration::from_secs(1) / quick().memory_hz;
    let is_in_time = |watcher: &mut Watcher, slot: u8| {
        let (gap, longest) = (watcher.seen.take_longest_gap(slot), waits.longest());
        println!("GPU {slot}: longest gap {gap:?}, bound {bound:?}, a processor was waited for {longest:?}");
        assert!(gap <= bound + WAITS * longest, "GPU {slot}: {gap:?}, waits of {longest:?}");
    };
    for slot in 0..3 {
        let _ = watcher.seen.take_longest_gap(slot);
    }
    machine.set("gpu1.fault_open=hang");
    machine.set("gpu1.fault=hang");
    watcher.until("the call is noticed", |_| is_pending(1)).await;
    watcher.stays_fresh(0).await;
    watcher.stays_fresh(2).await;
    assert!(is_pending(1), "all that within the first call's timeout");
    assert_eq!(nvml.status().counters.hangs, 0);
    is_in_time(&mut watcher, 0);
    is_in_time(&mut watcher, 2);

    // A second GPU hangs while the first one still does.
    machine.set("gpu2.fault_list=hang");
    watcher.until("the call is noticed", |_| is_pending(2)).await;
    watcher.stays_fresh(0).await;
    assert!(is_pending(2) && machine.clients() <= 4, "{:?}", nvml.status());
    watcher.until("both are given up", |_| nvml.status().counters.hangs >= 2).await;
    watcher.stays_fresh(0).await;
    let memory = watcher.seen.memory_reads(2);
    watcher
        .until("memory is still read where only lists hang", |seen| seen.memory_reads(2) > memory + 5)
        .await;
    is_in_time(&mut watcher, 0);

    machine.set("gpu1.fault_open=none");
    machine.set("fault=none");
    machine.set("fault_list=none");
    watcher.until("all are well", |_| nvml.status().devices.iter().all(|of| of.problem.is_none())).await;
    for slot in 0..3 {
        watcher.stays_fresh(slot).await;
    }
    is_in_time(&mut watcher, 0);
    machine::until("one poller is left", || async { machine.clients() == 1 }).await;
    assert!(watcher.seen.open.len() <= 1 && !watcher.seen.number_fell);
}

#[tokio::test]
async fn slow_call_goes_on_with_the_poller_that_made_it() {
    let machine = Machine::new(&["devices=2"]);
    let holder = Holder::new();
    machine.hold(holder.pid(), 0, MIB);
    let settings = NvmlSettings { call_timeout: Duration::from_secs(20), ..quick() };
    let mut watcher = Watcher::start(&machine, settings);
    watcher.until("both are read", |seen| seen.readings(0) >= 1 && seen.readings(1) >= 1).await;
    let nvml = watcher.nvml.clone();
    let poller = nvml.status().poller_pid;
    machine.set("gpu0.fault_list=hang");
    watcher.until("a substitute reads the other", |_| nvml.status().poller_pid != poller).await;
    watcher.stays_fresh(1).await;
    machine.set("gpu0.fault_list=none");
    watcher.until("the first one goes on", |_| nvml.status().poller_pid == poller).await;
    watcher.stays_fresh(0).await;
    watcher.stays_fresh(1).await;
    assert_eq!(watcher.seen.rows(0), [(holder.pid(), Ok(MIB), 1)]);
    let status = nvml.status();
    assert!(status.devices.iter().all(|device| device.problem.is_none()), "{status:?}");
    assert_eq!((status.counters.hangs, status.counters.restarts), (0, 0));
    machine::until("the substitute is gone", || async { machine.clients() == 1 }).await;
    assert!(!watcher.seen.number_fell);
}

/// With one GPU nothing else can be read, so the source reports that it is stalled.
#[tokio::test]
async fn source_is_stalled_while_its_only_gpu_hangs() {
    let machine = Machine::new(&["devices=1"]);
    let settings = NvmlSettings { call_timeout: Duration::from_secs(20), ..quick() };
    let mut watcher = Watcher::start(&machine, settings);
    watcher.until("it is read", |seen| seen.readings(0) >= 1).await;
    assert_eq!(watcher.nvml.status().stalled_since_ns, None);
    machine.set("gpu0.fault=hang");
    let nvml = watcher.nvml.clone();
    watcher.until("it is stalled", |_| nvml.status().stalled_since_ns.is_some()).await;
    machine.set("gpu0.fault=none");
    watcher.until("it goes on", |_| nvml.status().stalled_since_ns.is_none()).await;
    watcher.stays_fresh(0).await;
}

#[tokio::test]
async fn a_changed_partition_is_found_at_once() {
    let machine = Machine::new(&["devices=1"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("it is read", |seen| seen.readings(0) >= 2).await;
    machine::until("events are registered", || async { machine.calls("nvmlEventSetWait_v2") >= 1 }).await;
    machine.set("gpu0.mig=2");
    machine.event(0, 0x100, 0);
    watcher.until("its instances are read", |seen| seen.readings(1) >= 1 && seen.readings(2) >= 1).await;
    let status = watcher.nvml.status();
    assert_eq!(status.devices.len(), 3);
    assert_eq!(status.devices[0].problem.as_deref(), Some("no longer there"));
    assert_eq!(status.counters.restarts, 0);
}

#[tokio::test]
async fn accounting_is_told_while_a_process_lives_and_once_after_it() {
    let machine = Machine::new(&["devices=1", "accounting=1", "accounting_extra=64M"]);
    let mut watcher = Watcher::start(&machine, quick());
    watcher.until("it is read", |seen| seen.readings(0) >= 1).await;
    assert!(watcher.nvml.status().devices[0].facts.contains_key("accounting"));
    let trainer = machine.trainer("0");
    let pid = trainer.pid();
    watcher.until("its peak is told", |seen| seen.accounted.contains_key(&(0, pid))).await;
    let used = machine.used(pid, 0);
    watcher.until("it is listed", |seen| seen.rows(0) == [(pid, Ok(used), 1)]).await;
    let before = watcher.seen.readings(0);
    watcher.until("it is read on", |seen| seen.readings(0) > before + 5).await;
    let told = watcher.seen.accounted[&(0, pid)].clone();
    assert!(*told.last().expect("some") >= used + 64 * MIB && told.is_sorted(), "{told:?}, {used}");
    drop(trainer);
    watcher.until("it is told once more", |seen| seen.accounted[&(0, pid)].len() > told.len()).await;
    let before = watcher.seen.readings(0);
    watcher.until("it is read on", |seen| seen.readings(0) > before + 5).await;
    assert_eq!(watcher.seen.accounted[&(0, pid)].len(), told.len() + 1, "once");
    assert_eq!(machine.calls("nvmlDeviceSetAccountingMode"), 0, "the mode is nobody's business but root's");
}

#[tokio::test]
async fn what_a_machine_is_like_is_kept_for_doctor() {
    let machine = Machine::new(&[
        "devices=3",
        "nvml.wsl=1",
        "nvml.cc=1",
        "gpu0.display=1",
        "gpu0.graphics=1",
        "gpu1.mps=1",
        "gpu1.unified=1",
        "gpu2.mig=2",
        "gpu2.mig_hidden=1",
    ]);
    let holder = Holder::new();
    for device in 0..2 {
        machine.hold(holder.pid(), device, MIB);
    }
    let mut watcher = Watcher::start(&machine, quick());
    let absent = Err(Absence::NotAvailable);
    watcher
        .until("all are read", |seen| seen.rows(1) == [(holder.pid(), absent, 5)] && seen.readings(2) > 0)
        .await;
    let status = watcher.nvml.status();
    assert!(status.facts.contains_key("confidential"), "{:?}", status.facts);
    let [screen, shared, hidden] = status.devices.as_slice() else { panic!("three: {status:?}") };
    assert!(["display", "windows"].iter().all(|name| screen.facts.contains_key(*name)), "{screen:?}");
    assert_eq!((&screen.drawing, &screen.mps), (&vec![holder.pid()], &vec![]));
    assert_eq!((&shared.mps, shared.code), (&vec![holder.pid()], None));
    assert!(hidden.facts.contains_key("hidden_instances"), "{hidden:?}");
    assert!(!shared.facts.contains_key("accounting"));
}
