//! How complete the numbers of a process are, and what a part of a long life begins with.
//!
//! A process that lives for days is kept in a run per day: each part has the resolution that a day has, and is over when its day is. A part
//! begins with what is held at that time. Peaks, series, timeline, iterations, OOM records and counts are its own; changes of the
//! untrackable memory and growth points are those of the whole life so far, because they explain what is held now.

use crate::fields::{fields, plain};
use crate::layers::LayerSaid;
use serde::{Deserialize, Serialize};

fields! {
    /// How complete the numbers are. Kept as JSON in the store: a field that a stored run does not have gets its default.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Coverage {
        /// An agent or a log reported the process's allocations.
        covered: bool                => part carry, join or,           add or,   redact keep;
        /// The agent attached after the first allocation.
        late: bool                   => part carry, join or,           add or,   redact keep;
        /// Other CUPTI client that holds the subscription; with a `blocked_code` other than 39, why the agent was refused.
        blocked_by: Option<String>   => part carry, join last,         add any,  redact hide_client;
        /// CUPTI's result code of the refusal.
        blocked_code: Option<u16>    => part carry, join last,         add skip, redact keep;
        /// Intervals in which the agent saw no driver calls; of many, the longest.
        blind: Vec<BlindWindow>      => part carry, join later_blind,  add skip, redact each(hide_why);
        /// Number of such intervals.
        blind_count: u64             => part since, join sum,          add sum,  redact keep;
        /// Total length of those that have ended.
        blind_ns: u64                => part since, join sum,          add sum,  redact keep;
        /// The agent had seen memory before such an interval: sums and peaks are inexact since then, and no resync heals that.
        blind_doubt: bool            => part carry, join or,           add or,   redact keep;
        /// Records were lost, and no resync has completed since.
        partial_state: bool          => part carry, join last,         add or,   redact keep;
        /// Records were lost at some time: peaks are lower bounds.
        partial_history: bool        => part carry, join or,           add or,   redact keep;
        /// Ordered records applied.
        events: u64                  => part since, join sum,          add sum,  redact keep;
        /// Of those, driver allocations that succeeded.
        allocations: u64             => part since, join sum,          add sum,  redact keep;
        /// Their bytes, frees not subtracted.
        allocated_bytes: u64         => part since, join sum,          add sum,  redact keep;
        /// Lines or records of the input that could not be read.
        rejected: u64                => part since, join sum,          add sum,  redact keep;
        /// Ordered records lost.
        lost: u64                    => part since, join sum,          add sum,  redact keep;
        /// Ordered records that the agent kept back on request (pause, mute): no losses.
        withheld: u64                => part since, join sum,          add sum,  redact keep;
        /// The source ends here on purpose, a snapshot or a recording that was stopped; the process may have gone on.
        complete: bool               => part carry, join last,         add skip, redact keep;
        /// Records that contradicted the known state.
        odd: u64                     => part since, join sum,          add sum,  redact keep;
        /// Samples of NVML; counted anew in each part, as the series is.
        samples: u64                 => part carry, join sum,          add sum,  redact keep;
        /// Of those, taken while memory moved.
        torn_samples: u64            => part carry, join sum,          add sum,  redact keep;
        /// Of those, closed without records of the agent.
        stale_samples: u64           => part since, join sum,          add sum,  redact keep;
        /// Driver allocations that failed.
        failed_allocations: u64      => part since, join sum,          add sum,  redact keep;
        /// Training steps that the process reported.
        steps: u64                   => part since, join sum,          add sum,  redact keep;
        /// State of each way of naming memory, as the agent reported it last.
        layers: Vec<LayerSaid>       => part carry, join last,         add skip, redact each(LayerSaid::hide_reason);
        /// OOM records that are in no device's list, because there were too many.
        ooms_dropped: u64            => part carry, join sum,          add sum,  redact keep;
        /// Moments that the program or a user named, by time.
        marks: Vec<Mark>             => part carry, join append,       add skip, redact clear;
        /// Marks that are not kept, because there were too many.
        marks_dropped: u64           => part carry, join sum,          add skip, redact clear;
        /// Programs that the process was, oldest first: the first and the latest.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        programs: Vec<Program>       => part carry, join later_programs, add skip, redact keep;
        /// Which part of a long life the run is; absent for one that is the whole of it, or its beginning.
        #[serde(skip_serializing_if = "Option::is_none")]
        part: Option<Part>           => part carry, join first,        add skip, redact keep;
    }
}

/// CUPTI's result code where another client holds the subscription.
pub const SUBSCRIPTION_HELD: u16 = 39;

fn hide_client(client: &mut Option<String>) {
    client.iter_mut().for_each(String::clear);
}

fn hide_why(window: &mut BlindWindow) {
    window.why = "the agent saw nothing".to_owned();
}

/// An interval that lasted when the earlier run ended is in the later one, too.
fn later_blind(earlier: &mut Vec<BlindWindow>, later: Vec<BlindWindow>) {
    earlier.retain(|window| later.iter().all(|other| other.from_ns != window.from_ns));
    earlier.extend(later);
}

fn later_programs(earlier: &mut Vec<Program>, later: Vec<Program>) {
    earlier.retain(|program| later.iter().all(|other| other.instance != program.instance));
    earlier.extend(later);
}

fields! {
    /// An interval in which the agent saw no driver calls.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub struct BlindWindow {
        /// Its begin.
        from_ns: u64;
        /// Its end; absent while it lasts.
        to_ns: Option<u64>;
        /// Why, in words.
        why: String;
    }
}

fields! {
    /// A moment with a name: times can be given by it.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Mark {
        /// When it was made.
        time_ns: u64;
        /// Its name; absent if a loss took it.
        name: Option<String>;
        /// Who made it: `program` (`gpumem.mark` and the like), or `gpumemctl`.
        by: String;
    }
}

/// One of the programs that a process was, one after another by exec().
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its agent's number of it.
    pub instance: u16,
    /// Number of its latest record that arrived, counted from 1.
    pub heard: u64,
}

/// Which part of a life a run is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Part {
    /// From 1; the first part has no `Part`.
    pub number: u32,
    /// When it began.
    pub began_ns: u64,
    /// Ordered records, applied or lost, of the parts before.
    pub events_before: u64,
}

plain!(Program, Part);

/// What was counted before a part began.
#[derive(Debug, Clone)]
pub struct Before {
    part: Part,
    counts: Coverage,
}

impl Before {
    /// What the next part begins with: `coverage` is that of the part that ends, `before` what was counted before that.
    pub fn after(before: Option<&Before>, coverage: &Coverage, now_ns: u64) -> Self {
        let mut counts = before.map_or_else(Coverage::default, |before| before.counts.clone());
        counts.add(coverage);
        counts.partial_state = coverage.partial_state;
        let part = Part {
            number: before.map_or(1, |before| before.part.number) + 1,
            began_ns: now_ns,
            events_before: counts.events.saturating_add(counts.lost),
        };
        Before { part, counts }
    }

    /// Makes the counts of a life those of the part.
    pub fn leave_out(&self, coverage: &mut Coverage) {
        coverage.begin_part(&self.counts);
        coverage.blind.retain(|window| window.to_ns.is_none_or(|to_ns| to_ns > self.part.began_ns));
        // Its peak begins with what was known when it began.
        coverage.partial_history =
            coverage.lost > 0 || coverage.partial_state || self.counts.partial_state || coverage.blind_doubt;
        coverage.part = Some(self.part);
    }
}
