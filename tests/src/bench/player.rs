//! A process that plays an agent: this program again, because a daemon expects one agent in each process.

use super::cost::now_ns;
use super::peer::{Peer, packed};
use super::traffic::{Stream, Traffic};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// First argument of such a process.
pub const NAME: &str = "play-an-agent";

/// Returns the command of a process with `rows` live blocks of `tags` tags, without starting it.
///
/// # Panics
/// If this program cannot be found.
pub fn command(socket: &Path, uuid: &str, rows: u64, tags: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.arg(NAME).arg(socket).args([uuid, &rows.to_string(), &tags.to_string()]);
    command
}

/// Sends live memory, reports on standard output that it has, and then sends only watermarks.
///
/// # Panics
/// If the daemon ends: such a process ends with its daemon.
pub fn play(arguments: &[String]) {
    let [socket, uuid, rows, tags] = arguments else { panic!("{NAME} SOCKET UUID ROWS TAGS") };
    let (rows, tags) = (rows.parse().expect("a number"), tags.parse().expect("a number"));
    let peer = Peer::connect(Path::new(socket), uuid, tags);
    let mut traffic = Traffic::new(Stream::Blocks, rows, tags);
    traffic.time_ns = now_ns();
    let packets = packed(&traffic.fill());
    packets.iter().for_each(|packet| peer.send(packet));
    println!("said");
    loop {
        peer.watermark(traffic.seq);
        std::thread::sleep(Duration::from_millis(100));
    }
}
