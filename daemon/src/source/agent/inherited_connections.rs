//! Connections that outlive the daemon. The service manager keeps three descriptors of each accepted agent and hands them to the
//! next daemon, so that no agent notices a restart:
//!
//! ```text
//! agent-PID-START-NUMBER   name of all three: pid, start time in ticks, inode of the hello's file
//!   the connection         with all unread packets
//!   the agent's memory     as it came with the hello
//!   the hello              a sealed file made by the daemon, with the hello's frame as handed to the ledger
//! ```
//!
//! Only this daemon can store descriptors (`NotifyAccess=main`). They are checked like a peer's data nevertheless:
//! credentials of the connection from the kernel, start time in /proc, seals of the memory.

use super::memory;
use super::packet::MAX_PACKET_BYTES;
use crate::service;
use gpumem_ledger::ProcessKey;
use gpumem_wire::frame;
use rustix::fs::{FileType, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::io::{pread, pwrite};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Prefix of the names under which the service manager keeps descriptors.
const PREFIX: &str = "agent-";

/// A connection that the service manager kept.
#[derive(Debug)]
pub(crate) struct InheritedConnection {
    pub name: String,
    /// Pid and start time of the process that the kernel reported for the socket when the connection was accepted.
    pub key: ProcessKey,
    pub socket: OwnedFd,
    pub memory: OwnedFd,
    pub hello: Vec<u8>,
}

/// Asks the service manager to keep a connection. Returns the name for it, or `None` if the service manager was not reached.
/// Errors: The file for the hello cannot be made.
pub(crate) async fn store(
    socket: impl AsFd,
    memory: &memory::Memory,
    key: ProcessKey,
    hello: &[u8],
) -> io::Result<Option<String>> {
    let file = memfd_create("hello", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    if pwrite(&file, hello, 0)? != hello.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let name = format!("{PREFIX}{}-{}-{}", key.pid, key.start_ticks, fstat(&file)?.st_ino);
    let fds: [BorrowedFd<'_>; service::KEPT] = [socket.as_fd(), memory.as_fd(), file.as_fd()];
    Ok(service::keep(&name, &fds).await.then_some(name))
}

/// Groups the descriptors into connections, sorted by the times of their hellos. Also returns the names of unusable descriptors.
/// The order matters: the daemon may have ended between two programs of one process (exec). Then records of the first must
/// precede the second one's hello.
pub(crate) fn group(handed: Vec<(String, OwnedFd)>) -> (Vec<InheritedConnection>, Vec<String>) {
    let mut by_name = BTreeMap::<String, Vec<OwnedFd>>::new();
    for (name, fd) in handed {
        by_name.entry(name).or_default().push(fd);
    }
    let (mut connections, mut unusable) = (Vec::new(), Vec::new());
    for (name, fds) in by_name {
        match connection_of(&name, fds) {
            Some(connection) => connections.push(connection),
            None => unusable.push(name),
        }
    }
    connections.sort_by_key(|connection| hello_time_ns(&connection.hello));
    (connections, unusable)
}

/// Returns the time in a hello (ns). Returns 0 if the hello is invalid, which sorts it first.
fn hello_time_ns(hello: &[u8]) -> u64 {
    let hello = frame::records(hello).next().and_then(|record| record.ok()?.ok());
    hello.map_or(0, |hello| hello.stamp.time_ns)
}

/// Returns the connection whose descriptors these are; `None` if one is missing or cannot be read.
fn connection_of(name: &str, fds: Vec<OwnedFd>) -> Option<InheritedConnection> {
    let mut numbers = name.strip_prefix(PREFIX)?.split('-');
    let key = ProcessKey { pid: numbers.next()?.parse().ok()?, start_ticks: numbers.next()?.parse().ok()? };
    let inode: u64 = numbers.next()?.parse().ok()?;
    let (mut socket, mut memory, mut hello) = (None, None, None);
    for fd in fds {
        let about = fstat(&fd).ok()?;
        match FileType::from_raw_mode(about.st_mode) {
            FileType::Socket => socket = Some(fd),
            _ if about.st_ino == inode => hello = Some(read(&fd)?),
            _ => memory = Some(fd),
        }
    }
    Some(InheritedConnection { name: name.to_owned(), key, socket: socket?, memory: memory?, hello: hello? })
}

fn read(file: &OwnedFd) -> Option<Vec<u8>> {
    let is_sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::WRITE));
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    let len = pread(file, &mut bytes[..], 0).ok().filter(|_| is_sealed)?;
    bytes.truncate(len);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn memfd(bytes: &[u8], seals: SealFlags) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        pwrite(&file, bytes, 0).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn the_older_of_two_connections_of_a_process_comes_first_whatever_their_names() {
        use gpumem_wire::{Body, MAJOR, MINOR, Record, Stamp};
        let open = || memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let name = |hello: &OwnedFd| format!("agent-7-99-{}", fstat(hello).unwrap().st_ino);
        let mut hellos = [open(), open()];
        hellos.sort_by_key(name);
        let mut handed = Vec::new();
        // Sorted by name the younger one would be first.
        for (hello, time_ns) in hellos.into_iter().zip([2000, 1000]) {
            let versions = u64::from(MAJOR) << 16 | u64::from(MINOR);
            let body = Body::Hello { start_ticks: 99, versions, capabilities: 0, instance: 1, claims: "" };
            let mut frame = Vec::new();
            Record { stamp: Stamp { time_ns, ..Stamp::default() }, body }.append_frame(&mut frame);
            pwrite(&hello, &frame, 0).unwrap();
            fcntl_add_seals(&hello, SealFlags::WRITE).unwrap();
            let (socket, _) = UnixStream::pair().unwrap();
            let fds = [socket.into(), memfd(b"memory", SealFlags::empty())];
            let name = name(&hello);
            handed.extend(fds.into_iter().chain([hello]).map(|fd| (name.clone(), fd)));
        }
        let (kept, unusable) = group(handed);
        assert!(unusable.is_empty());
        let times: Vec<u64> = kept.iter().map(|kept| hello_time_ns(&kept.hello)).collect();
        assert_eq!(times, [1000, 2000]);
    }

    fn three(seals: SealFlags) -> (String, Vec<OwnedFd>) {
        let (socket, _) = UnixStream::pair().unwrap();
        let hello = memfd(b"hello", seals);
        let name = format!("agent-7-99-{}", fstat(&hello).unwrap().st_ino);
        (name, vec![memfd(b"memory", SealFlags::empty()), hello, socket.into()])
    }

    #[test]
    fn three_of_one_name_are_a_connection_in_whatever_order() {
        let (name, mut fds) = three(SealFlags::WRITE);
        fds.rotate_left(1);
        let handed = fds.into_iter().map(|fd| (name.clone(), fd)).collect();
        let (kept, unusable) = group(handed);
        assert!(unusable.is_empty());
        assert_eq!(kept[0].key, ProcessKey { pid: 7, start_ticks: 99 });
        assert_eq!((kept[0].hello.as_slice(), &kept[0].name), (b"hello".as_slice(), &name));
        let mut bytes = [0; 6];
        assert_eq!(pread(&kept[0].memory, &mut bytes, 0), Ok(6));
        assert_eq!(&bytes, b"memory");
    }

    #[test]
    fn what_is_not_whole_is_named_so_that_it_can_be_forgotten() {
        let (name, fds) = three(SealFlags::empty());
        let mut handed: Vec<_> = fds.into_iter().map(|fd| (name.clone(), fd)).collect();
        let (other, mut fds) = three(SealFlags::WRITE);
        fds.pop();
        handed.extend(fds.into_iter().map(|fd| (other.clone(), fd)));
        let strange = ["stored", "agent-7", "agent-x-1-2"];
        handed.extend(strange.map(|name| (name.to_owned(), memfd(b"", SealFlags::WRITE))));
        let (kept, mut unusable) = group(handed);
        assert!(kept.is_empty());
        let mut expected: Vec<_> = strange.map(str::to_owned).into_iter().chain([name, other]).collect();
        unusable.sort();
        expected.sort();
        assert_eq!(unusable, expected);
    }
}
