//! How complete the numbers of a process are, and the counts with which a part of a long life begins.
//!
//! A process that runs for days is stored as one run for each day, called a part. A part has the resolution of a whole run and is
//! final when its day ends. It begins with the memory held at that time. Peaks, series, timeline, iterations, OOM records and
//! counts belong to the part. Changes of the untrackable bytes and growth points cover the whole life so far, because they
//! explain the memory held now.

use crate::fields::{fields, plain};
use crate::layers::LayerReport;
use serde::{Deserialize, Serialize};

fields! {
    /// How complete the numbers of a run are. Stored as JSON; a field missing in a stored run gets its default.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Coverage {
        /// Whether an agent or a log reported the process's allocations.
        covered: bool                => part carry, join or,           add or,   redact keep;
        /// Whether the agent started after the first allocation.
        late: bool                   => part carry, join or,           add or,   redact keep;
        /// Name of the CUPTI client that keeps the agent out. If `blocked_code` is not 39, why CUPTI refused the agent.
        blocked_by: Option<String>   => part carry, join last,         add any,  redact hide_client;
        /// Result code with which CUPTI refused the agent.
        blocked_code: Option<u16>    => part carry, join last,         add skip, redact keep;
        /// Blind intervals, in which the agent saw no driver calls; only the longest if there are many.
        blind: Vec<BlindWindow>      => part carry, join later_blind,  add skip, redact each(hide_why);
        /// Number of blind intervals.
        blind_count: u64             => part since, join sum,          add sum,  redact keep;
        /// Total length of the blind intervals that have ended (ns).
        blind_ns: u64                => part since, join sum,          add sum,  redact keep;
        /// Whether a blind interval began or ended after the agent had seen driver calls on a GPU. Sums and peaks are inexact since
        /// then; no resync corrects them.
        blind_doubt: bool            => part carry, join or,           add or,   redact keep;
        /// Whether records were lost and no resync (the agent restates its live rows) has completed since.
        partial_state: bool          => part carry, join last,         add or,   redact keep;
        /// Whether records were lost at any time, so that peaks are lower bounds.
        partial_history: bool        => part carry, join or,           add or,   redact keep;
        /// Number of received records that have a sequence number (allocations, frees, ...).
        events: u64                  => part since, join sum,          add sum,  redact keep;
        /// Number of successful driver allocations.
        allocations: u64             => part since, join sum,          add sum,  redact keep;
        /// Bytes of the successful driver allocations; frees are not subtracted.
        allocated_bytes: u64         => part since, join sum,          add sum,  redact keep;
        /// Number of lines or records of the input that could not be read.
        rejected: u64                => part since, join sum,          add sum,  redact keep;
        /// Number of records with a sequence number that were lost.
        lost: u64                    => part since, join sum,          add sum,  redact keep;
        /// Number of records with a sequence number that the agent withheld on request (pause, mute). They do not count as lost.
        withheld: u64                => part since, join sum,          add sum,  redact keep;
        /// Whether the source ends on purpose (a snapshot, or a recording that was stopped). The process may have continued.
        complete: bool               => part carry, join last,         add skip, redact keep;
        /// Number of records that contradicted the known state.
        odd: u64                     => part since, join sum,          add sum,  redact keep;
        /// Number of NVML samples; restarts at 0 in each part, like the series.
        samples: u64                 => part carry, join sum,          add sum,  redact keep;
        /// Number of NVML samples taken while memory changed.
        torn_samples: u64            => part carry, join sum,          add sum,  redact keep;
        /// Number of NVML samples closed without the agent's records up to their time.
        stale_samples: u64           => part since, join sum,          add sum,  redact keep;
        /// Number of driver allocations that failed.
        failed_allocations: u64      => part since, join sum,          add sum,  redact keep;
        /// Number of training steps that the process reported.
        steps: u64                   => part since, join sum,          add sum,  redact keep;
        /// State of each naming layer (a source of names, such as NVTX or Python frames), as the agent last reported it.
        layers: Vec<LayerReport>       => part carry, join last,         add skip, redact each(LayerReport::hide_reason);
        /// Number of OOM records that were dropped because there were too many.
        ooms_dropped: u64            => part carry, join sum,          add sum,  redact keep;
        /// Marks (named moments) that the program or a user set, by time.
        marks: Vec<Mark>             => part carry, join append,       add skip, redact clear;
        /// Number of marks that were dropped because there were too many.
        marks_dropped: u64           => part carry, join sum,          add skip, redact clear;
        /// Programs that the process executed, in order; only the first and the latest if there are many.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        programs: Vec<Program>       => part carry, join later_programs, add skip, redact keep;
        /// Which part of a long life the run is; absent for a whole life and for its first part.
        #[serde(skip_serializing_if = "Option::is_none")]
        part: Option<Part>           => part carry, join first,        add skip, redact keep;
    }
}

/// Maximum number of blind intervals that are kept; of more, the shortest are dropped.
const MAX_BLIND: usize = 32;

impl Coverage {
    /// Returns the total length of all blind intervals (ns); an open one counts up to `now_ns`.
    pub fn blind_total_ns(&self, now_ns: u64) -> u64 {
        let open_ns = self.open_blind().map_or(0, |window| now_ns.saturating_sub(window.from_ns));
        self.blind_ns.saturating_add(open_ns)
    }

    /// Returns the blind interval that has not ended yet.
    pub fn open_blind(&self) -> Option<&BlindWindow> {
        self.blind.last().filter(|window| window.to_ns.is_none())
    }

    /// Begins a blind interval, unless one with the same reason is open. An open one with another reason ends.
    pub fn begin_blind(&mut self, from_ns: u64, why: String) {
        if self.open_blind().is_some_and(|window| window.why == why) {
            return;
        }
        self.end_blind(from_ns);
        let length = |window: &BlindWindow| window.to_ns.unwrap_or(u64::MAX) - window.from_ns;
        let shortest = (0..self.blind.len()).min_by_key(|&index| length(&self.blind[index]));
        if let Some(shortest) = shortest.filter(|_| self.blind.len() >= MAX_BLIND) {
            self.blind.remove(shortest);
        }
        self.blind_count += 1;
        self.blind.push(BlindWindow { from_ns, to_ns: None, why });
    }

    /// Ends the open blind interval; one of length 0 is removed.
    pub fn end_blind(&mut self, to_ns: u64) {
        let Some(window) = self.blind.last_mut().filter(|window| window.to_ns.is_none()) else { return };
        let lasted_ns = to_ns.saturating_sub(window.from_ns);
        window.to_ns = Some(to_ns.max(window.from_ns));
        self.blind_ns = self.blind_ns.saturating_add(lasted_ns);
        if lasted_ns == 0 {
            self.blind.pop();
            self.blind_count -= 1;
        }
    }
}

/// CUPTI's result code if another client holds the subscription.
pub const SUBSCRIPTION_HELD: u16 = 39;

fn hide_client(client: &mut Option<String>) {
    client.iter_mut().for_each(String::clear);
}

fn hide_why(window: &mut BlindWindow) {
    window.why = "the agent saw nothing".to_owned();
}

/// Joins intervals; one that was still open at the end of the earlier run is also in the later run and is kept once.
fn later_blind(earlier: &mut Vec<BlindWindow>, later: Vec<BlindWindow>) {
    earlier.retain(|window| later.iter().all(|other| other.from_ns != window.from_ns));
    earlier.extend(later);
}

fn later_programs(earlier: &mut Vec<Program>, later: Vec<Program>) {
    earlier.retain(|program| later.iter().all(|other| other.instance != program.instance));
    earlier.extend(later);
}

fields! {
    /// A blind interval, in which the agent saw no driver calls.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct BlindWindow {
        from_ns: u64;
        /// End of the interval; absent while it lasts.
        to_ns: Option<u64>;
        why: String;
    }
}

fields! {
    /// A named moment; options of gpumemctl that take a time also accept its name.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Mark {
        time_ns: u64;
        /// Name of the mark; absent if the record of the name was lost.
        name: Option<String>;
        /// Who set the mark: `program` (`gpumem.mark` and similar) or `gpumemctl`.
        by: String;
    }
}

/// One of the programs that a process executed in turn by exec().
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Number that the program's agent gave the program.
    pub instance: u16,
    /// Number of the program's latest record that arrived, counted from 1.
    pub heard: u64,
}

/// Position of a run among the parts of its process's life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Part {
    /// Number of the part, from 2; the first part has no `Part`.
    pub number: u32,
    pub began_ns: u64,
    /// Number of records with a sequence number in earlier parts, received or lost.
    pub events_before: u64,
}

plain!(Program, Part);

/// Counts of a process at the begin of a part (see the module's documentation).
#[derive(Debug, Clone)]
pub struct PartStart {
    part: Part,
    counts: Coverage,
}

impl PartStart {
    /// Returns the start counts of the next part. `coverage` is that of the ending part, `before` are the ending part's start
    /// counts.
    pub fn after(before: Option<&PartStart>, coverage: &Coverage, now_ns: u64) -> Self {
        let mut counts = before.map_or_else(Coverage::default, |before| before.counts.clone());
        counts.add(coverage);
        counts.partial_state = coverage.partial_state;
        let part = Part {
            number: before.map_or(1, |before| before.part.number) + 1,
            began_ns: now_ns,
            events_before: counts.events.saturating_add(counts.lost),
        };
        PartStart { part, counts }
    }

    /// Reduces the counts of a whole life to those of this part.
    pub fn subtract(&self, coverage: &mut Coverage) {
        coverage.begin_part(&self.counts);
        coverage.blind.retain(|window| window.to_ns.is_none_or(|to_ns| to_ns > self.part.began_ns));
        // The part's peak starts with the amounts at its begin. So only losses since then make it a lower bound, and earlier ones
        // that no resync had corrected by then.
        coverage.partial_history =
            coverage.lost > 0 || coverage.partial_state || self.counts.partial_state || coverage.blind_doubt;
        coverage.part = Some(self.part);
    }
}
