//! The connections of a process, in the order in which they came.
//!
//! A process that becomes another program (exec) leaves a connection behind and comes with the next one, and may do so again
//! before the first was read to its end. Each is served by a task of its own, so each stands in a line until those before it
//! are known: a program that was welcomed after the one that followed it would be taken for the one that runs.
//!
//! Nobody waits for those who say nothing: what an earlier program had to say was in its socket before the next one came.

use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::UnixStream;
use tokio::sync::watch;

/// By number, the socket of each that has said nothing so far; none of those that have.
type Line = BTreeMap<u64, Option<Arc<UnixStream>>>;

#[derive(Debug, Default)]
struct Standing {
    last: u64,
    by_pid: HashMap<u32, Line>,
}

/// Who stands where.
#[derive(Debug, Default)]
pub(crate) struct ConnectionOrder {
    standing: Mutex<Standing>,
    /// Somebody has left, or spoken.
    moved: watch::Sender<()>,
}

/// A place in the line of a process; left when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionPlace {
    lines: Arc<ConnectionOrder>,
    pid: u32,
    number: u64,
}

impl ConnectionOrder {
    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last place in the line of `pid`, for who comes on `silent`, or has said hello to an earlier life of this daemon.
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
    /// What is in its socket is about to be read: whoever came later waits from now on.
    pub(crate) fn speaks(&self) {
        self.lines.change(self.pid, |line| drop(line.insert(self.number, None)));
    }

    /// There was nothing in its socket.
    pub(crate) fn mark_idle(&self, stream: &Arc<UnixStream>) {
        let silent = Some(Arc::clone(stream));
        self.lines.change(self.pid, |line| drop(line.insert(self.number, silent)));
    }

    /// Waits until nobody stands before it who has something to say.
    pub(crate) async fn reached(&self) {
        let may_pass = |silent: &Option<Arc<UnixStream>>| silent.as_ref().is_some_and(is_empty);
        let is_reached = || {
            let standing = self.lines.standing();
            standing
                .by_pid
                .get(&self.pid)
                .is_none_or(|line| line.range(..self.number).all(|(_, one)| may_pass(one)))
        };
        // An error would say that the lines are gone, and nobody stands there any more.
        let _ = self.lines.moved.subscribe().wait_for(|()| is_reached()).await;
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.lines.change(self.pid, |line| drop(line.remove(&self.number)));
    }
}

/// Whether the socket is open and everything in it has been read. The kernel is asked: what tokio knows may be older.
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
        // Who gives up does not let the next one pass.
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
        // Said, and not read so far; being read; read, and it was nothing.
        theirs.write_all(b"hello").expect("room");
        assert!(!is_reached(&three));
        one.speaks();
        silent.readable().await.expect("a socket");
        assert_eq!(silent.try_read(&mut [0; 8]).ok(), Some(5));
        assert!(!is_reached(&three));
        one.mark_idle(&silent);
        assert!(is_reached(&three));
        // One that has closed its socket has an end that must be read.
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
