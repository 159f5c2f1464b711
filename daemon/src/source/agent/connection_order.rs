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
use std::sync::{Arc, Mutex};
use tokio::net::UnixStream;
use tokio::sync::watch;

/// Connections of one process by number. The value is the socket if nothing was read from it, or `None` once data is being read.
type ProcessConnections = BTreeMap<u64, Option<Arc<UnixStream>>>;

#[derive(Debug, Default)]
struct Connections {
    /// Number of the connection that was added last, of any process.
    last: u64,
    by_pid: HashMap<u32, ProcessConnections>,
}

/// Connections that are not accepted yet.
#[derive(Debug, Default)]
pub(crate) struct ConnectionOrder {
    connections: Mutex<Connections>,
    /// Notified when a connection leaves the order or its data is read.
    moved: watch::Sender<()>,
}

/// Position of a connection in the order of its process; removed when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionPlace {
    order: Arc<ConnectionOrder>,
    pid: u32,
    number: u64,
}

impl ConnectionOrder {
    /// Adds a connection as the last one of `pid`. `idle` is the socket of a new connection: later connections
    /// need not wait for it while it holds no data. They wait for one inherited from an earlier daemon (`None`).
    pub(crate) fn join(self: &Arc<Self>, pid: u32, idle: Option<Arc<UnixStream>>) -> ConnectionPlace {
        let mut connections = lock(&self.connections);
        connections.last += 1;
        let number = connections.last;
        connections.by_pid.entry(pid).or_default().insert(number, idle);
        ConnectionPlace { order: Arc::clone(self), pid, number }
    }
}

impl ConnectionPlace {
    /// Marks that data of this connection is about to be read; later connections wait from now on.
    pub(crate) fn mark_active(&self) {
        self.change(|connections| drop(connections.insert(self.number, None)));
    }

    /// Marks that the socket turned out to be empty, so that later connections need not wait.
    pub(crate) fn mark_idle(&self, stream: &Arc<UnixStream>) {
        self.change(|connections| drop(connections.insert(self.number, Some(Arc::clone(stream)))));
    }

    fn change(&self, change: impl FnOnce(&mut ProcessConnections)) {
        let by_pid = &mut lock(&self.order.connections).by_pid;
        let connections = by_pid.entry(self.pid).or_default();
        change(connections);
        if connections.is_empty() {
            by_pid.remove(&self.pid);
        }
        self.order.moved.send_replace(());
    }

    /// Waits until no earlier connection of the process has unread or unaccepted data.
    pub(crate) async fn reached(&self) {
        let may_pass = |idle: &Option<Arc<UnixStream>>| idle.as_ref().is_some_and(is_empty);
        let is_reached = || {
            let connections = lock(&self.order.connections);
            let of_process = connections.by_pid.get(&self.pid);
            of_process.is_none_or(|all| all.range(..self.number).all(|(_, earlier)| may_pass(earlier)))
        };
        // An error would mean that the order no longer exists, so there is no earlier connection.
        let _ = self.order.moved.subscribe().wait_for(|()| is_reached()).await;
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.change(|connections| drop(connections.remove(&self.number)));
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
        let order = Arc::new(ConnectionOrder::default());
        let [one, two, three, other] = [7, 7, 7, 8].map(|pid| order.join(pid, None));
        assert_eq!([&one, &two, &three, &other].map(is_reached), [true, false, false, true]);
        // A connection that gives up its place does not let the next one pass.
        drop(two);
        assert!(!is_reached(&three));
        drop(one);
        assert!(is_reached(&three));
        drop((three, other));
        assert!(lock(&order.connections).by_pid.is_empty());
    }

    #[tokio::test]
    async fn who_says_nothing_is_passed() {
        let order = Arc::new(ConnectionOrder::default());
        let ((mut theirs, silent), (other, closed)) = (pair(), pair());
        let (one, two) = (order.join(7, Some(Arc::clone(&silent))), order.join(7, Some(closed)));
        let three = order.join(7, None);
        assert!(is_reached(&three));
        // Sent and not read; being read; found empty.
        theirs.write_all(b"hello").expect("room");
        assert!(!is_reached(&three));
        one.mark_active();
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
        let order = Arc::new(ConnectionOrder::default());
        let (one, two) = (order.join(7, None), order.join(7, None));
        let waiting = tokio::spawn(async move { two.reached().await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(one);
        waiting.await.expect("it ends");
    }
}
