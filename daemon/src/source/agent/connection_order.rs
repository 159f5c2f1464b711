//! Keeps the connections of each process in order.
//!
//! A process that executes another program (exec) leaves a connection behind and makes a new one. It may do so again before the
//! first connection was read to its end. Each connection is served by its own task, so each task waits until the earlier
//! connections are accepted. Otherwise an earlier program that is accepted late would be taken for the current one.
//!
//! A connection with an empty socket delays no others: an earlier program's records were in its socket before the next program
//! connected.

use crate::os::lock;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::net::UnixStream;
use tokio::sync::watch;

/// Connections of one process by number. The value is the socket if nothing was read from it, or `None` once data is being read.
type Line = BTreeMap<u64, Option<Arc<UnixStream>>>;

#[derive(Debug, Default)]
struct Standing {
    last: u64,
    by_pid: HashMap<u32, Line>,
}

/// Connections that are not accepted yet, grouped by pid.
#[derive(Debug, Default)]
pub(crate) struct ConnectionOrder {
    standing: Mutex<Standing>,
    /// Notified when a connection leaves the order or its data is read.
    moved: watch::Sender<()>,
}

/// Position of a connection in the order of its process; removed when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionPlace {
    lines: Arc<ConnectionOrder>,
    pid: u32,
    number: u64,
}

impl ConnectionOrder {
    fn standing(&self) -> MutexGuard<'_, Standing> {
        lock(&self.standing)
    }

    /// Adds a connection as the last one of `pid`. `silent` is the socket of a new connection, or `None` for one inherited from
    /// an earlier daemon.
    pub(crate) fn join(self: &Arc<Self>, pid: u32, silent: Option<Arc<UnixStream>>) -> ConnectionPlace {
        let mut standing = self.standing();
        standing.last += 1;
        let number = standing.last;
        standing.by_pid.entry(pid).or_default().insert(number, silent);
        ConnectionPlace { lines: Arc::clone(self), pid, number }
    }

    fn change(&self, pid: u32, change: impl FnOnce(&mut Line)) {
        let mut standing = self.standing();
        let line = standing.by_pid.entry(pid).or_default();
        change(line);
        if line.is_empty() {
            standing.by_pid.remove(&pid);
        }
        drop(standing);
        self.moved.send_replace(());
    }
}

impl ConnectionPlace {
    /// Marks that data of this connection is about to be read; later connections wait from now on.
    pub(crate) fn speaks(&self) {
        self.lines.change(self.pid, |line| drop(line.insert(self.number, None)));
    }

    /// Marks that the socket turned out to be empty, so that later connections need not wait.
    pub(crate) fn mark_idle(&self, stream: &Arc<UnixStream>) {
        let silent = Some(Arc::clone(stream));
        self.lines.change(self.pid, |line| drop(line.insert(self.number, silent)));
    }

    /// Waits until no earlier connection of the process has unread or unaccepted data.
    pub(crate) async fn reached(&self) {
        let may_pass = |silent: &Option<Arc<UnixStream>>| silent.as_ref().is_some_and(is_empty);
        let is_reached = || {
            let standing = self.lines.standing();
            standing
                .by_pid
                .get(&self.pid)
                .is_none_or(|line| line.range(..self.number).all(|(_, one)| may_pass(one)))
        };
        // An error would mean that the order no longer exists, so there is no earlier connection.
        let _ = self.lines.moved.subscribe().wait_for(|()| is_reached()).await;
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.lines.change(self.pid, |line| drop(line.remove(&self.number)));
    }
}

/// Returns whether the socket is open and has no unread data. Asks the kernel, because tokio's state may be outdated.
pub(crate) fn is_empty(socket: &impl AsFd) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    rustix::net::recv(socket, &mut [0; 1][..], flags).is_err_and(|error| error == Errno::WOULDBLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::io::Write;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn is_reached(place: &ConnectionPlace) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        pin!(place.reached()).as_mut().poll(&mut context) == Poll::Ready(())
    }

    fn pair() -> (std::os::unix::net::UnixStream, Arc<UnixStream>) {
        let (theirs, ours) = std::os::unix::net::UnixStream::pair().expect("sockets");
        ours.set_nonblocking(true).expect("a socket");
        (theirs, Arc::new(UnixStream::from_std(ours).expect("a socket")))
    }

    #[test]
    fn each_waits_for_all_that_came_before_it() {
        let lines = Arc::new(ConnectionOrder::default());
        let [one, two, three, other] = [7, 7, 7, 8].map(|pid| lines.join(pid, None));
        assert_eq!([&one, &two, &three, &other].map(is_reached), [true, false, false, true]);
        // A connection that gives up its place does not let the next one pass.
        drop(two);
        assert!(!is_reached(&three));
        drop(one);
        assert!(is_reached(&three));
        drop((three, other));
        assert!(lines.standing().by_pid.is_empty());
    }

    #[tokio::test]
    async fn who_says_nothing_is_passed() {
        let lines = Arc::new(ConnectionOrder::default());
        let ((mut theirs, silent), (other, closed)) = (pair(), pair());
        let (one, two) = (lines.join(7, Some(Arc::clone(&silent))), lines.join(7, Some(closed)));
        let three = lines.join(7, None);
        assert!(is_reached(&three));
        // Sent and not read; being read; found empty.
        theirs.write_all(b"hello").expect("room");
        assert!(!is_reached(&three));
        one.speaks();
        silent.readable().await.expect("a socket");
        assert_eq!(silent.try_read(&mut [0; 8]).ok(), Some(5));
        assert!(!is_reached(&three));
        one.mark_idle(&silent);
        assert!(is_reached(&three));
        // A closed socket has an end that must be read.
        drop(other);
        assert!(!is_reached(&three));
        drop(two);
        assert!(is_reached(&three));
    }

    #[tokio::test]
    async fn who_waits_is_told() {
        let lines = Arc::new(ConnectionOrder::default());
        let (one, two) = (lines.join(7, None), lines.join(7, None));
        let waiting = tokio::spawn(async move { two.reached().await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(one);
        waiting.await.expect("it ends");
    }
}
