//! All actors, and the fate of every process.

use super::actor::{Actor, Kind, Way};
use super::{Clients, Random};
use crate::live::Machine;
use crate::live::mixer::now_ns;
use gpumem_ledger::ProcessKey;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;

/// A process of the test.
#[derive(Debug, Clone)]
pub struct Life {
    /// Process id.
    pub pid: u32,
    /// Start time in ticks; unknown for processes that the test did not start itself.
    pub start_ticks: Option<u64>,
    /// The process had the agent.
    pub is_covered: bool,
    /// Time at which it was known to be alive.
    pub from_ns: u64,
    /// Time of its end, and the exit status if known.
    pub end: Option<(u64, Option<ExitStatus>)>,
    /// It was seen at a moment of rest.
    pub was_seen: bool,
    /// Whether it was idle from the last checkpoint until its end, so that its run must end with the memory of that
    /// checkpoint.
    pub is_still: bool,
}

/// The actors.
#[derive(Debug)]
pub struct Troupe {
    places: Vec<Option<(Actor, usize)>>,
    /// All processes so far.
    pub lives: Vec<Life>,
    socket: PathBuf,
    devices: usize,
}

impl Troupe {
    /// Makes a troupe with empty places.
    pub fn new(places: usize, devices: usize, socket: PathBuf) -> Self {
        Troupe { places: (0..places).map(|_| None).collect(), lives: Vec::new(), socket, devices }
    }

    /// Returns the running actors.
    pub fn living(&self) -> impl Iterator<Item = &Actor> {
        self.places.iter().flatten().map(|(actor, _)| actor)
    }

    fn living_mut(&mut self) -> impl Iterator<Item = &mut Actor> {
        self.places.iter_mut().flatten().map(|(actor, _)| actor)
    }

    /// Fills every empty place.
    pub fn fill(&mut self, machine: &Machine, random: &mut Random) {
        let empty: Vec<usize> = (0..self.places.len()).filter(|&at| self.places[at].is_none()).collect();
        // All are started before the first is waited for.
        for &at in &empty {
            self.start(at, machine, random);
        }
        for &at in &empty {
            if let Some((actor, _)) = &mut self.places[at] {
                actor.is_ready();
            }
        }
    }

    fn start(&mut self, at: usize, machine: &Machine, random: &mut Random) {
        let kind = match random.below(16) {
            0 => Kind::Bare,
            1 => Kind::Narrow,
            2 | 3 => Kind::Trainer,
            _ => Kind::Covered,
        };
        let actor = Actor::start(machine, &self.socket, kind, random, self.devices);
        let ProcessKey { pid, start_ticks } = actor.key;
        self.lives.push(Life {
            pid,
            start_ticks: Some(start_ticks),
            is_covered: kind.is_covered(),
            from_ns: now_ns(),
            end: None,
            was_seen: false,
            is_still: false,
        });
        self.places[at] = Some((actor, self.lives.len() - 1));
    }

    /// Lets one actor start, end, or act.
    pub fn act(&mut self, machine: &Machine, random: &mut Random) {
        let at = random.below(self.places.len() as u64) as usize;
        let Some((actor, _)) = &mut self.places[at] else {
            self.start(at, machine, random);
            if let Some((actor, _)) = &mut self.places[at] {
                actor.is_ready();
            }
            return;
        };
        if random.below(16) == 0 {
            let way = match random.below(8) {
                0 | 1 => Way::Quit(random.below(2) * 3),
                2 => Way::Leave(random.below(2) * 4),
                3 => Way::Crash(11),
                4 => Way::Crash(6),
                5 => Way::Crash(random.one_of(&[4, 7, 8, 15])),
                6 => Way::Kill,
                _ => Way::KillAtWork,
            };
            self.end(at, way);
        } else if let Some((pid, is_program)) = actor.act(random) {
            let end = Some((now_ns(), None));
            // These children end soon; a forked child is not a process of the driver.
            if is_program {
                self.lives.push(Life {
                    pid,
                    start_ticks: None,
                    is_covered: true,
                    from_ns: now_ns(),
                    end,
                    was_seen: false,
                    is_still: false,
                });
            }
        }
    }

    /// Ends the actor at `at`.
    pub fn end(&mut self, at: usize, way: Way) {
        if let Some((mut actor, life)) = self.places[at].take() {
            let status = actor.end(way);
            let life = &mut self.lives[life];
            life.end = Some((now_ns(), Some(status)));
            if let (Way::Crash(signal), false) = (way, actor.kind == Kind::Trainer || actor.is_stopped) {
                assert_eq!(status.signal(), Some(signal as i32), "{:?}", actor.key);
            }
        }
    }

    /// Kills `count` actors at once.
    pub fn kill(&mut self, count: usize, random: &mut Random) {
        let mut places: Vec<usize> = (0..self.places.len()).collect();
        random.shuffle(&mut places);
        places.truncate(count);
        places.into_iter().for_each(|at| self.end(at, Way::Kill));
    }

    /// Stops `count` actors, or continues all.
    pub fn freeze(&mut self, count: Option<usize>) {
        match count {
            Some(count) => self.living_mut().take(count).for_each(|actor| actor.stop(true)),
            None => self.living_mut().filter(|actor| actor.is_stopped).for_each(|actor| actor.stop(false)),
        }
    }

    /// Stops all activity: nothing changes after the return.
    pub fn rest(&mut self) {
        self.freeze(None);
        self.living_mut().for_each(Actor::rest);
        // The reserved bytes of driver pools are polled at most ten times a second.
        std::thread::sleep(std::time::Duration::from_millis(120));
        self.living_mut().for_each(Actor::settle);
    }

    /// Marks the running actors as seen by the daemon.
    pub fn were_seen(&mut self) {
        let lives: Vec<usize> = self.places.iter().flatten().map(|(_, life)| *life).collect();
        lives.into_iter().for_each(|life| self.lives[life].was_seen = true);
    }

    /// Ends all actors in different ways, right after a checkpoint.
    pub fn end_all(&mut self, random: &mut Random) {
        for at in 0..self.places.len() {
            let way = random.one_of(&[Way::Quit(0), Way::Leave(0), Way::Kill, Way::Crash(6)]);
            if let Some((actor, life)) = &self.places[at] {
                // A trainer continues to run, and exit handlers free memory.
                self.lives[*life].is_still = actor.kind != Kind::Trainer && !matches!(way, Way::Quit(_));
            }
            self.end(at, way);
        }
    }

    /// Gives the clients pids to query.
    pub fn tell(&self, clients: &Clients) {
        clients.know(self.living().map(|actor| actor.key.pid).collect());
    }
}
