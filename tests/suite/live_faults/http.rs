//! Clients of the metrics that send nothing, or half a request, and reconnect.

use super::Node;
use gpumem_tests::live::prometheus::get;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Holds this many half requests open until `enough`; closed ones reconnect at once.
fn crowd(address: SocketAddr, size: usize, enough: &AtomicBool, opened: &AtomicUsize) {
    let mut held: Vec<TcpStream> = Vec::new();
    while !enough.load(Ordering::Relaxed) {
        held.retain_mut(|stream| {
            !matches!(stream.read(&mut [0; 64]), Ok(0)) // what would block is held
        });
        while held.len() < size && !enough.load(Ordering::Relaxed) {
            let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(2)) else { break };
            opened.fetch_add(1, Ordering::Relaxed);
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHos");
            let _ = stream.set_nonblocking(true);
            held.push(stream);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn eight_hundred_silent_clients_block_no_scrape() {
    let node = Node::plain(&["devices=1"], "");
    node.until_value("gpumemd_source_up{source=\"nvml\"}", |up| up == 1.0);
    let before = node.open_files();
    let (enough, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let crowds: Vec<_> = (0..8)
        .map(|_| {
            let (address, enough, opened) = (node.address, Arc::clone(&enough), Arc::clone(&opened));
            std::thread::spawn(move || crowd(address, 100, &enough, &opened))
        })
        .collect();
    node.until_value("gpumemd_http_refused_total{reason=\"connections\"}", |count| count > 800.0);
    let (mut times, mut files) = (Vec::new(), 0);
    for _ in 0..10 {
        let since = Instant::now();
        let is_whole = get(node.address, "/metrics").is_some_and(|text| text.contains("gpumemd_source_up"));
        assert!(is_whole, "a scrape found no place");
        times.push(since.elapsed());
        files = files.max(node.open_files());
    }
    enough.store(true, Ordering::Relaxed);
    crowds.into_iter().for_each(|crowd| crowd.join().expect("a crowd"));
    times.sort();
    println!(
        "{} connections of strangers; scrapes {:?} to {:?}, {} descriptors more",
        opened.load(Ordering::Relaxed),
        times[0],
        times[9],
        files - before
    );
    gpumem_test_support::bar("a scrape beside 800 silent connections", times[5], Duration::from_secs(1));
    assert!(files <= before + 72, "{files} descriptors, {before} before");
    assert!(node.doctor().contains("connections were closed because all were taken"), "{}", node.doctor());
}
