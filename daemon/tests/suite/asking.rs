//! Programs that request a report about themselves, and commands to agents.

use crate::common::peer::{
    Memory, Peer, allocation, device, now, own_start_ticks, record, resync, tag, watermark,
};
use crate::common::{Daemon, start, wait_for};
use gpumem_wire::{AskKind, Body, Stamp, frame};

fn question(what: AskKind, options: &str) -> Vec<u8> {
    let options = format!("start_ticks={}\n{options}", own_start_ticks());
    record(Stamp { time_ns: now(), ..Stamp::default() }, Body::Ask { what, options: &options })
}

/// Receives all pieces of an answer: the result and the text.
fn answer(peer: &Peer) -> (u16, String) {
    let mut text = String::new();
    loop {
        let packet = peer.receive().expect("an answer");
        for record in frame::records(&packet) {
            let Body::Answer { result, last, text: piece } = record.unwrap().unwrap().body else {
                panic!("no answer");
            };
            text += std::str::from_utf8(piece).expect("UTF-8");
            if last {
                peer.is_closed();
                return (result, text);
            }
        }
    }
}

fn ask(daemon: &Daemon, what: AskKind, options: &str) -> (u16, String) {
    let peer = Peer::connect(&daemon.agent_socket());
    assert!(peer.send(&question(what, options)));
    answer(&peer)
}

fn agent(daemon: &Daemon, memory: &Memory) -> Peer {
    let (peer, epoch) = Peer::welcomed(&daemon.agent_socket(), memory);
    for id in 1..=900_u32 {
        assert!(peer.send(&tag(id, &format!("model/layer.{id}/a-long-name-of-a-weight"))));
    }
    assert!(peer.send(&[device(), resync(epoch, 0, &[])].concat()));
    for seq in 1..=900 {
        let (stamp, body) = allocation(seq, seq << 20, seq as u32);
        assert!(peer.send(&record(stamp, body)));
    }
    assert!(peer.send(&watermark(900)));
    peer
}

#[test]
fn a_program_gets_its_own_report() {
    let daemon = start("");
    let (result, why) = ask(&daemon, AskKind::ReportText, "");
    assert_eq!((result, &*why), (2, "the daemon has no run of this process: it has not used a GPU so far"));

    let memory = Memory::new();
    let _peer = agent(&daemon, &memory);
    // The report includes the latest records.
    let (result, json) = ask(&daemon, AskKind::ReportJson, "seq=900\n");
    assert_eq!(result, 0, "{json}");
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(report["process"]["pid"], std::process::id(), "{report}");
    let (result, text) = ask(&daemon, AskKind::ReportText, "seq=900\nby=tag\n");
    assert!(result == 0 && text.contains("model/layer.900"), "{text}");
    let (result, csv) = ask(&daemon, AskKind::ReportText, "format=csv\nby=tag\nall=1\n");
    assert!(result == 0 && csv.len() > 50_000 && csv.ends_with('\n'), "in pieces: {}", csv.len());
    // A program may not know its start time.
    let peer = Peer::connect(&daemon.agent_socket());
    let body = Body::Ask { what: AskKind::ReportJson, options: "" };
    assert!(peer.send(&record(Stamp::default(), body)));
    assert_eq!(answer(&peer).0, 0);
    assert_eq!(ask(&daemon, AskKind::Unknown, "").0, 22);
    assert_eq!(ask(&daemon, AskKind::ReportText, "by=colour\n").0, 22);
    let asked = "gpumemd_agent_questions_total";
    wait_for("the count", || daemon.metric(asked).filter(|count| *count >= 6.0));
}

#[test]
fn nobody_gets_the_report_of_another_process() {
    let daemon = start("");
    for claim in ["start_ticks=0\n", "start_ticks=1\n", "start_ticks=many\n"] {
        let peer = Peer::connect(&daemon.agent_socket());
        let body = Body::Ask { what: AskKind::ReportText, options: claim };
        assert!(peer.send(&record(Stamp::default(), body)));
        peer.is_closed();
    }
    let refused = "gpumemd_agent_refused_total{reason=\"identity\"}";
    wait_for(refused, || daemon.metric(refused).filter(|count| *count >= 3.0));
}

#[test]
fn questions_take_the_seats_of_the_silent() {
    let daemon = start("");
    let peers: Vec<Peer> = (0..500).map(|_| Peer::connect(&daemon.agent_socket())).collect();
    for peer in &peers {
        let _ = peer.send(&question(AskKind::ReportText, ""));
    }
    drop(peers);
    wait_for("a seat", || {
        let peer = Peer::connect(&daemon.agent_socket());
        (peer.send(&question(AskKind::ReportText, "")) && peer.receive().is_some()).then_some(())
    });
}

#[test]
fn who_does_not_read_an_answer_keeps_nobody_waiting() {
    let daemon = start("");
    let memory = Memory::new();
    let _peer = agent(&daemon, &memory);
    // Clients that do not read large answers, and requests that wait for records that never come.
    let idle: Vec<Peer> = (0..4).map(|_| Peer::connect(&daemon.agent_socket())).collect();
    for (number, peer) in idle.iter().enumerate() {
        let options =
            if number % 2 == 0 { "format=csv\nall=1\nby=tag\n" } else { "seq=18446744073709551615\n" };
        assert!(peer.send(&question(AskKind::ReportText, options)));
    }
    let started = std::time::Instant::now();
    assert_eq!(ask(&daemon, AskKind::ReportJson, "").0, 0);
    gpumem_test_support::bar("the answer", started.elapsed(), std::time::Duration::from_secs(10));
}

fn told(peer: &Peer) -> (u8, Option<String>) {
    let packet = peer.receive().expect("a command");
    let record = frame::records(&packet).next().expect("one").unwrap().unwrap();
    let path = match record.body {
        Body::RecordControl { path, .. } | Body::Dump { path } => Some(path.to_owned()),
        _ => None,
    };
    (record.body.kind(), path)
}

#[test]
fn agents_are_told_to_record() {
    let daemon = start("");
    let memory = Memory::new();
    let (status, told_why) = daemon.ask("POST", &format!("/v1/record?pid={}&do=start", std::process::id()));
    assert_eq!(status, 404, "{told_why}");
    let peer = agent(&daemon, &memory);
    let path = |verb: &str| format!("/v1/record?pid={}&do={verb}", std::process::id());
    wait_for("the process", || (daemon.get("/v1/ps").1["processes"].as_array()?.len() == 1).then_some(()));
    for (verb, kind, wanted, done, expected) in [
        (
            "start&output=/tmp/a%20b",
            114,
            Some("/tmp/a b"),
            Body::Done { result: 0, command: 114, told: "/tmp/a b" },
            200,
        ),
        ("pause", 115, None, Body::Done { result: 0, command: 115, told: "" }, 200),
        ("resume", 116, None, Body::Done { result: 0, command: 116, told: "" }, 200),
        (
            "dump",
            117,
            Some(""),
            Body::Done { result: 17, command: 117, told: "/x: it is there already" },
            409,
        ),
        ("stop", 114, Some(""), Body::Done { result: 0, command: 114, told: "/tmp/a b" }, 200),
    ] {
        let asked = std::thread::scope(|scope| {
            let asked = scope.spawn(|| daemon.ask("POST", &path(verb)));
            assert_eq!(told(&peer), (kind, wanted.map(str::to_owned)));
            // The result of another command must not be returned for this one.
            let other = Body::Done { result: 5, command: 1, told: "" };
            assert!(peer.send(&[record(Stamp::default(), other), record(Stamp::default(), done)].concat()));
            asked.join().expect("an answer")
        });
        assert_eq!(asked.0, expected, "{verb}: {}", asked.1);
        match expected {
            200 => assert_eq!(asked.1["done"], *verb.split('&').next().unwrap()),
            _ => assert!(
                asked.1["error"].as_str().is_some_and(|why| why.contains("there already")),
                "{}",
                asked.1
            ),
        }
    }
    for (bad, status) in [
        ("/v1/record?do=start", 400),
        ("/v1/record?pid=1&do=start", 404),
        (&*path("explode"), 400),
        (&*path("start&output=here"), 400),
        (&*path("stop&output=/tmp/a"), 400),
        (&*path("stop&outptu=/tmp/a"), 400),
    ] {
        assert_eq!(daemon.ask("POST", bad).0, status, "{bad}");
    }
    assert_eq!(daemon.get(&path("stop")).0, 405);
    drop(peer);
    wait_for("the agent to be gone", || (daemon.ask("POST", &path("stop")).0 != 200).then_some(()));
}
