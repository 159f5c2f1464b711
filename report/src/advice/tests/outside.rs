//! Tests of advice on other processes and on children.

use super::*;
use crate::advice::outside;

#[test]
fn another_tenant_has_a_name_and_a_time() {
    let mut run = holding(&[(Role::Activation, "Net/a", 2)]);
    let oom = &mut run.devices[0].details.ooms[0];
    let other = Holder {
        pid: 7,
        user: Some("bob".into()),
        used_bytes: 13 * GIB,
        since_ns: Some(5),
        ..Holder::default()
    };
    oom.device.as_mut().expect("a device").holders = vec![Holder::default(), other];
    let growth = |run: &mut Run, bytes| {
        let device = run.devices[0].details.ooms[0].device.as_mut().expect("a device");
        (device.holders[1].growth_bytes, device.holders[1].growth_ns) = (Some(bytes), Some(60_000_000_000));
        of_kind(run, Kind::OtherProcess).expect("advice").formula
    };
    assert!(growth(&mut run, GIB).ends_with("; 1,024 MiB came in the last 60 s"));
    assert!(growth(&mut run, 0).ends_with("; unchanged in the last 60 s"));
    assert!(growth(&mut run, -GIB).ends_with("; it freed 1,024 MiB in the last 60 s"));
    let item = of_kind(&run, Kind::OtherProcess).expect("advice");
    assert!(item.sentence().contains("bob 7"), "{}", item.sentence());
    assert!(item.formula.contains("13,312 MiB and was first seen at "), "{}", item.formula);
    assert!(item.change.contains("another tenant"), "{}", item.change);
    let mut child = run.clone();
    child.process.pid = 7;
    let children = [child];
    let items = advice(&run, &Evidence { replay: None, children: &children }).0.items;
    let item = items.into_iter().find(|item| item.kind == Kind::OtherProcess).expect("advice");
    assert!(
        item.sentence().starts_with("End the program's own child process (bob 7)"),
        "{}",
        item.sentence()
    );
    run.process.facts.insert("ancestors".into(), "70,7,1".into());
    let sentence = of_kind(&run, Kind::OtherProcess).expect("advice").sentence();
    assert!(sentence.starts_with("Keep CUDA out of the program's own process (bob 7)"), "{sentence}");
}

#[test]
fn the_request_that_a_limit_refused_fits_without_it() {
    let mut run = holding(&[(Role::Activation, "Net/a", 5)]);
    let oom = &mut run.devices[0].details.ooms[0];
    (oom.kind, oom.asked_bytes, oom.device_free_bytes) = (OomKind::Pool, 2 << 30, Some(3 << 30));
    oom.device.as_mut().expect("a device").free_bytes = 3 * GIB;
    let (advice, text, _) = advice(&run, &Evidence::default());
    assert_eq!(advice.items[0].kind, Kind::PoolLimit);
    assert!(text.contains("\n   without it, the request fits with 1,024 MiB to spare: "), "{text}");
}

#[test]
fn a_tenant_that_holds_more_is_the_first_advice_on_a_full_device() {
    let mut run = holding(&[(Role::Activation, "Net/a", 5)]);
    let device = &mut run.devices[0];
    device.details.ooms.clear();
    device.peak = Moment { tracked_bytes: Some(5 * GIB), ..Moment::default() };
    device.peak.amounts = Amounts::from(vec![(0, 5 * GIB)]);
    device.last = device.peak.clone();
    device.reading = Some(DeviceReading {
        time_ns: 0,
        used_bytes: 15 << 30,
        free_bytes: 1 << 30,
        system_reserved_bytes: None,
        unified: false,
    });
    device.tenants = vec![(7, Some(10 << 30))];
    let found = items(&run);
    assert_eq!(found[0].kind, Kind::OtherProcess, "{found:?}");
    assert_eq!(found[1].kind, Kind::LargeOutput, "the process's own memory");
    assert!(found[0].sentence().contains("(pid 7)"), "{}", found[0].sentence());
    let since_ns = Some(60_000_000_000);
    let (growth_bytes, growth_ns) = (Some(2 << 30), Some(30_000_000_000));
    let holder =
        Holder { pid: 7, user: Some("ana".into()), since_ns, growth_bytes, growth_ns, used_bytes: 10 << 30 };
    run.devices[0].details.largest_tenant = Some(holder);
    let first = items(&run).remove(0);
    assert!(first.sentence().contains("(ana 7)"), "{}", first.sentence());
    assert!(first.formula.starts_with("it holds 10,240 MiB and was first seen at "), "{}", first.formula);
    assert!(first.formula.ends_with("; 2,048 MiB came in the last 30 s"), "{}", first.formula);
    let mut child = run.clone();
    child.process.facts.insert("ancestors".into(), "70,7,1".into());
    assert_eq!(items(&child)[0].kind, Kind::LargeOutput, "the process that started it is not a tenant");
    child.process.facts.insert("ancestors".into(), "70,1".into());
    child.devices[0].tenants = child.devices[0].tenants.iter().map(|(_, used)| (1, *used)).collect();
    assert_eq!(items(&child)[0].kind, Kind::OtherProcess, "process 1 has started all");
    // Another device of the process has a larger tenant and much free memory.
    let mut other = run.devices[0].clone();
    (other.ordinal, other.total_bytes) = (1, Some(64 << 30));
    other.reading = other.reading.map(|reading| DeviceReading { free_bytes: 40 << 30, ..reading });
    run.devices.push(other);
    let found = items(&run);
    assert!(found.iter().all(|item| item.device == Some(0)), "{found:?}");
    run.devices.truncate(1);
    run.devices[0].tenants = vec![(7, Some(1 << 30))];
    assert!(items(&run).iter().all(|item| item.kind != Kind::OtherProcess));
}

#[test]
fn idle_children_are_named_by_their_contexts() {
    let mut child = fragmented(&[]);
    child.coverage.covered = true;
    child.process.facts.insert("comm".into(), "pt_data_worker".into());
    let moment = Moment {
        tracked_bytes: Some(0),
        predates_bytes: Some(0),
        untrackable_bytes: Some(500 << 20),
        ..Moment::default()
    };
    (child.devices[0].peak, child.devices[0].last) = (moment.clone(), moment);
    let items = outside::idle(&[child.clone(), child]);
    assert_eq!((items.len(), items[0].saves_bytes), (1, Some([1000 << 20; 2])));
    assert!(items[0].sentence().contains("(pt_data_worker)"), "{}", items[0].sentence());
}
