//! Processor time for answers: the answers to one user may take a share of one processor.
//!
//! The daemon's event loop serves all users. The time that a user's answers take there is charged to the user. The time of the
//! aggregator, the run writer and helper threads is charged too. A charge is paid off at the rate of the user's share. A user who
//! owes more than [`AT_ONCE`] waits before the next answer. Answers to one user are made one at a time, which also bounds their
//! memory.

use crate::clock;
use crate::os::lock;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, Semaphore};
use tokio::time::Instant;

/// Debt below which a user is answered at once. Most answers cost milliseconds, a large report some tens of milliseconds.
const AT_ONCE: Duration = Duration::from_millis(100);
/// Charge for reading a request and sending its answer.
const MIN_CHARGE: Duration = Duration::from_micros(50);
/// Maximum number of threads that make large answers at the same time.
const MAX_THREADS: usize = 2;

/// Processor time that a user owes, and the lock that is held while an answer to the user is made.
#[derive(Debug)]
struct UserAccount {
    line: Arc<AsyncMutex<()>>,
    owed: Mutex<Debt>,
}

#[derive(Debug)]
struct Debt {
    time: Duration,
    /// Time at which `time` (the processor time owed) was last reduced.
    paid: Instant,
}

impl Default for UserAccount {
    fn default() -> Self {
        let owed = Debt { time: Duration::ZERO, paid: Instant::now() };
        UserAccount { line: Arc::default(), owed: Mutex::new(owed) }
    }
}

impl UserAccount {
    /// Returns the processor time that the user owes now. In each second it falls by `share` of a second.
    fn debt(&self, share: f64) -> Duration {
        let (mut owed, now) = (lock(&self.owed), Instant::now());
        let paid = now.saturating_duration_since(owed.paid).mul_f64(share);
        (owed.time, owed.paid) = (owed.time.saturating_sub(paid), now);
        owed.time
    }
}

/// Handle that charges processor time to a user. Clones charge the same user; a default handle charges none.
#[derive(Debug, Clone, Default)]
pub struct CpuCharge(Arc<UserAccount>);

impl CpuCharge {
    fn add(&self, time: Duration) {
        let mut owed = lock(&self.0.owed);
        owed.time = owed.time.saturating_add(time);
    }

    /// Runs work on the event loop, which blocks all users. Charges the elapsed time, not the processor time.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = std::time::Instant::now();
        let done = work();
        self.add(began.elapsed());
        done
    }

    /// Runs work on another thread. Charges the processor time, so that waiting for disks is free.
    pub(crate) fn run_in_thread<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = clock::cpu();
        let done = work();
        self.add(clock::cpu().saturating_sub(began));
        done
    }

    /// Runs asynchronous work on the event loop. Charges the duration of each poll.
    pub(crate) async fn run_future<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| self.run(|| work.as_mut().poll(context))).await
    }
}

/// Permission to make one answer for a user. The user's next answer waits until this is dropped.
#[derive(Debug)]
pub(crate) struct AnswerSlot {
    pub charge: CpuCharge,
    pub waited: bool,
    line: Option<OwnedMutexGuard<()>>,
}

impl AnswerSlot {
    /// Lets the user's next answer begin, because this one now waits for something outside the daemon.
    pub(crate) fn release(&mut self) {
        self.line = None;
    }
}

/// Processor time that each user owes, and the limit of threads that make large answers.
#[derive(Debug)]
pub struct UserShares {
    users: Mutex<BTreeMap<u32, Arc<UserAccount>>>,
    threads: Semaphore,
}

impl Default for UserShares {
    fn default() -> Self {
        UserShares { users: Mutex::default(), threads: Semaphore::new(MAX_THREADS) }
    }
}

impl UserShares {
    /// Waits until the daemon may make another answer for the user. `share`: the user's share of one processor; `None`: no limit.
    pub(crate) async fn answer_slot(&self, uid: u32, share: Option<f64>) -> AnswerSlot {
        let Some(share) = share else {
            return AnswerSlot { charge: CpuCharge::default(), waited: false, line: None };
        };
        let user = self.user(uid, share);
        let line = Arc::clone(&user.line).lock_owned().await;
        let mut waited = false;
        // The debt is checked again after each wait, because earlier answers may have been charged meanwhile.
        while let Some(beyond) = user.debt(share).checked_sub(AT_ONCE).filter(|beyond| !beyond.is_zero()) {
            waited = true;
            tokio::time::sleep(beyond.div_f64(share)).await;
        }
        let charge = CpuCharge(user);
        charge.add(MIN_CHARGE);
        AnswerSlot { charge, waited, line: Some(line) }
    }

    /// Runs large work on another thread. Returns `None` if the daemon ends.
    pub(crate) async fn run_beside<T: Send + 'static>(
        &self,
        charge: &CpuCharge,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let _permit = self.threads.acquire().await.ok()?;
        let charge = charge.clone();
        tokio::task::spawn_blocking(move || charge.run_in_thread(work)).await.ok()
    }

    /// Returns the user's account, and removes other users without a debt.
    fn user(&self, uid: u32, share: f64) -> Arc<UserAccount> {
        let mut users = lock(&self.users);
        users.retain(|of, user| *of == uid || Arc::strong_count(user) > 1 || !user.debt(share).is_zero());
        Arc::clone(users.entry(uid).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Returns how many answers of 20 ms a user gets in ten seconds.
    async fn answers(shares: &UserShares, uid: u32, share: Option<f64>) -> usize {
        let end = Instant::now() + Duration::from_secs(10);
        let mut count = 0;
        while Instant::now() < end {
            let turn = shares.answer_slot(uid, share).await;
            // Time is paused while a test works, so the answer must advance it.
            tokio::time::sleep(20 * MS).await;
            turn.charge.add(20 * MS);
            count += 1;
        }
        count
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_all_the_time_gets_their_share_and_who_asks_now_and_then_is_not_kept() {
        let shares = UserShares::default();
        // On one connection or several: a fifth of ten seconds, which is 100 answers of 20 ms, plus answers below `AT_ONCE`.
        let ask = || answers(&shares, 7, Some(0.2));
        let all = tokio::join!(ask(), ask(), ask(), ask(), ask(), ask(), ask(), ask());
        let sum = all.0 + all.1 + all.2 + all.3 + all.4 + all.5 + all.6 + all.7;
        assert!((95..=115).contains(&sum), "{sum}");
        // This user still has a debt; another one does not.
        let began = Instant::now();
        assert!(!shares.answer_slot(8, Some(0.2)).await.waited);
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(answers(&shares, 0, None).await >= 499, "without a limit");
        // Users without a debt are removed.
        tokio::time::sleep(Duration::from_secs(60)).await;
        let again = shares.answer_slot(9, Some(0.2)).await;
        assert_eq!(shares.users.lock().unwrap().len(), 1);
        drop(again);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_of_a_user_are_made_one_at_a_time_and_those_of_others_beside() {
        let shares = UserShares::default();
        let mut first = shares.answer_slot(7, Some(0.2)).await;
        let second = tokio::time::timeout(MS, shares.answer_slot(7, Some(0.2))).await;
        assert!(second.is_err());
        assert!(tokio::time::timeout(MS, shares.answer_slot(8, Some(0.2))).await.is_ok());
        first.release();
        assert!(tokio::time::timeout(MS, shares.answer_slot(7, Some(0.2))).await.is_ok());
    }

    #[tokio::test]
    async fn what_a_thread_works_is_charged_and_what_it_waits_is_not() {
        let shares = UserShares::default();
        let turn = shares.answer_slot(7, Some(0.0001)).await;
        let spin = || {
            let began = clock::cpu();
            while clock::cpu() - began < 30 * MS {}
        };
        shares.run_beside(&turn.charge, spin).await.expect("it works");
        turn.charge.run_future(async { tokio::time::sleep(500 * MS).await }).await;
        let owed = turn.charge.0.debt(0.0001);
        assert!(owed >= 28 * MS && owed < 28 * MS + 30 * MS.mul_f64(8.0), "{owed:?}");
    }
}
