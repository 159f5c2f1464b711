//! Each limit of the configuration that one peer can reach: `gpumemctl doctor` names the key. Limits of the control socket do not
//! apply to root, and root may run these tests; see tests/suite/peers.rs.

use crate::common;
use crate::common::peer::{Memory, Peer, allocation, device, resync, tag};
use crate::common::{Daemon, start, wait_for};
use gpumem_model::control::Doctor;
use std::net::TcpStream;

/// Values that must stay alive while doctor runs.
type Held = Vec<Box<dyn std::any::Any>>;

/// A key with a small limit, and a function that reaches it.
struct Case {
    key: &'static str,
    config: &'static str,
    meet: fn(&Daemon) -> Held,
}

fn held<T: 'static>(things: impl IntoIterator<Item = T>) -> Held {
    things.into_iter().map(|thing| Box::new(thing) as Box<dyn std::any::Any>).collect()
}

/// Connects agents up to the limit, and one more peer, which is refused.
fn one_too_many(daemon: &Daemon) -> Held {
    let memory = Memory::new();
    let (first, _) = Peer::welcomed(&daemon.agent_socket(), &memory);
    Peer::connect(&daemon.agent_socket()).is_closed();
    held([first])
}

fn say_nothing(daemon: &Daemon) -> Held {
    let peers = [Peer::connect(&daemon.agent_socket()), Peer::connect(&daemon.agent_socket())];
    peers[1].is_closed();
    held(peers)
}

fn say_nothing_for_long(daemon: &Daemon) -> Held {
    Peer::connect(&daemon.agent_socket()).is_closed();
    Held::new()
}

fn hand_over_memory(daemon: &Daemon) -> Held {
    use common::peer::{VERSIONS, hello, own_start_ticks};
    use std::os::fd::AsFd;
    let (memory, peer) = (Memory::new(), Peer::connect(&daemon.agent_socket()));
    peer.send_with(&hello(own_start_ticks(), VERSIONS), &[memory.fd.as_fd()]);
    peer.is_closed();
    Held::new()
}

/// Sends three times the bytes that are allowed in a tenth of a second.
fn send_much(daemon: &Daemon) -> Held {
    let memory = Memory::new();
    let (peer, _) = Peer::welcomed(&daemon.agent_socket(), &memory);
    let word = tag(1, &"n".repeat(200));
    let packet = word.repeat((60 << 10) / word.len());
    (0..6).for_each(|_| assert!(peer.send(&packet)));
    held([peer])
}

/// Makes more live allocations than the limit allows.
fn allocate_much(daemon: &Daemon) -> Held {
    let memory = Memory::new();
    let (peer, epoch) = Peer::welcomed(&daemon.agent_socket(), &memory);
    assert!(peer.send(&[device(), resync(epoch, 0, &[])].concat()));
    for packet in 0..64 {
        let records = (1..=256).map(|at| allocation(packet * 256 + at, 512, 0));
        let bytes: Vec<u8> = records.flat_map(|(stamp, body)| common::peer::record(stamp, body)).collect();
        assert!(peer.send(&bytes));
    }
    held([peer])
}

fn scrape_at_once(daemon: &Daemon) -> Held {
    let scrapers: Vec<TcpStream> =
        (0..3).map(|_| TcpStream::connect(daemon.metrics).expect("a socket")).collect();
    held(scrapers)
}

const CASES: [Case; 9] = [
    Case { key: "agent.connections;", config: "[agent]\nconnections = 1\n", meet: one_too_many },
    Case {
        key: "agent.connections_per_uid",
        config: "[agent]\nconnections_per_uid = 1\n",
        meet: one_too_many,
    },
    Case {
        key: "agent.connections_without_hello",
        config: "[agent]\nconnections_without_hello = 1\n",
        meet: say_nothing,
    },
    Case {
        key: "agent.hello_timeout_s",
        config: "[agent]\nhello_timeout_s = 0.2\n",
        meet: say_nothing_for_long,
    },
    Case { key: "agent.shared_mib", config: "[agent]\nshared_mib = 0\n", meet: hand_over_memory },
    Case { key: "agent.mib_per_s", config: "[agent]\nmib_per_s = 1\n", meet: send_much },
    Case { key: "agent.rows_per_process", config: "[agent]\nrows_per_process = 1000\n", meet: allocate_much },
    Case {
        key: "agent.memory_mib_per_uid",
        config: "[agent]\nmemory_mib_per_uid = 1\n",
        meet: allocate_much,
    },
    Case { key: "metrics.connections", config: "[metrics]\nconnections = 1\n", meet: scrape_at_once },
];

#[test]
fn doctor_names_the_key_of_each_limit_that_was_met() {
    for Case { key, config, meet } in CASES {
        let daemon = start(config);
        let fixes = || {
            let doctor: Doctor = serde_json::from_value(daemon.get("/v1/doctor").1).expect("Doctor");
            let fixes = doctor.findings.into_iter().filter_map(|finding| finding.fix);
            fixes.filter(|fix| fix.contains(key)).collect::<Vec<String>>()
        };
        assert_eq!(fixes(), Vec::<String>::new(), "{key}: before");
        let _held = meet(&daemon);
        wait_for(key, || (!fixes().is_empty()).then_some(()));
    }
}
