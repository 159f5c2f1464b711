//! Counters of the daemon. One table names all counters, so that views show all of them and sources cannot use unknown names.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counts {
    ($( $family:literal, $help:literal { $( $(#[$doc:meta])* $count:ident $(= $reason:literal)? ),* $(,)? } )*) => {
        /// A counter.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Count { $( $( $(#[$doc])* $count, )* )* }

        impl Count {
            /// Every counter with its metric, the metric's help, and its `reason` label.
            pub const ALL: &'static [(Count, &'static str, &'static str, Option<&'static str>)] = &[
                $( $( (Count::$count, $family, $help, counts!(@reason $($reason)?)), )* )*
            ];
        }
    };
    (@reason) => { None };
    (@reason $reason:literal) => { Some($reason) };
}

counts! {
    "gpumemd_agent_packets_total", "Packets that agents sent." { Packets }
    "gpumemd_agent_bytes_total", "Bytes that agents sent." { Bytes }
    "gpumemd_records_total", "Records handed to the ledger." { Records }
    "gpumemd_agent_connections_total", "Agents that were welcomed." { Welcomed }
    "gpumemd_agent_resumed_total", "Of those, agents whose connection an earlier life of the daemon had left." { Resumed }
    "gpumemd_agent_questions_total", "Programs that asked about themselves and were answered." { Asked }
    "gpumemd_agent_refused_total", "Peers on the agent socket that were not welcomed, by reason." {
        RefusedFull = "connections",
        RefusedUid = "connections_of_uid",
        RefusedWaiting = "connections_without_hello",
        RefusedSilent = "timeout",
        RefusedEarlyEnd = "ended",
        RefusedGone = "gone",
        RefusedHello = "no_hello",
        RefusedVersion = "version",
        RefusedIdentity = "identity",
        RefusedMemory = "memory",
        RefusedSize = "memory_size",
        RefusedDescriptors = "descriptors",
    }
    "gpumemd_agent_waited_total", "Times that an agent was read later because it had sent more than agent.mib_per_s." { AgentWaited }
    "gpumemd_agent_dropped_total", "Agents whose connection was ended for what they sent, by reason." {
        DroppedFraming = "framing",
        DroppedOversize = "oversize",
        DroppedPayload = "payload",
        DroppedTime = "time",
        DroppedDescriptors = "descriptors",
    }
    "gpumemd_agent_records_skipped_total", "Records of agents that were left out, by reason." {
        SkippedUnknown = "unknown_kind",
        SkippedForbidden = "not_for_agents",
        SkippedDevices = "too_many_devices",
        SkippedOver = "run_over",
    }
    "gpumemd_ledger_refused_records_total", "Records of agents that the ledger had no room for, by limit." {
        RefusedRows = "rows_per_process",
        RefusedOfUser = "memory_mib_per_uid",
        RefusedOfAll = "memory_mib",
    }
    "gpumemd_agent_recovered_records_total", "Records read from the memory of agents that ended without sending them." { Recovered }
    "gpumemd_accept_failures_total", "Connections that could not be accepted, such as for want of descriptors." { AcceptFailures }
    "gpumemd_records_late_total", "Records of processes whose run was over." { Late }
    "gpumemd_runs_finished_total", "Runs that ended." { RunsFinished }
    "gpumemd_runs_rolled_total", "Parts of runs that ended because their time was over; the processes went on." { RunsRolled }
    "gpumemd_store_writes_total", "Runs written to the store." { StoreWrites }
    "gpumemd_store_errors_total", "Writes that the store refused; they are tried again." { StoreErrors }
    "gpumemd_store_dropped_total", "Runs that were never stored: too many, or too large ones, waited while the store was out of order." { StoreDropped }
    "gpumemd_store_late_total", "Runs that were written later than runs.checkpoint_every_s after their news: more processes live than the store takes." { StoreLate }
    "gpumemd_store_not_shown_total", "Answers that lack stored runs, because they would have been too large." { StoreNotShown }
    "gpumemd_store_deleted_total", "Runs deleted from the store, by reason." { DeletedAge = "age", DeletedSize = "size" }
    "gpumemd_store_set_aside_total", "Stores that were damaged and renamed, and new ones begun." { StoreSetAside }
    "gpumemd_recording_records_total", "Records written to the recording." { Recorded }
    "gpumemd_recording_lost_total", "Records that the recording lacks: the disk was too slow or refused." { RecordingLost }
    "gpumemd_http_requests_total", "Requests for metrics." { HttpRequests }
    "gpumemd_http_refused_total", "Connections for metrics that were closed, by reason." {
        HttpFull = "connections",
        HttpBad = "request",
    }
    "gpumemd_control_requests_total", "Requests on the control socket." { ControlRequests }
    "gpumemd_control_refused_total", "Connections to the control socket that were closed, by limit." {
        ControlFull = "connections",
        ControlOfUid = "connections_per_uid",
    }
    "gpumemd_control_waited_total", "Answers that were made later because their user had taken more than control.share_per_uid of a processor." { ControlWaited }
    "gpumemd_series_folded_total", "Series that a scrape left out because there were more than metrics.max_series." { SeriesFolded }
    "gpumemd_reloads_total", "Times that the configuration was read again." { Reloads }
    "gpumemd_reload_errors_total", "Times that it was refused and the old one kept." { ReloadErrors }
}

/// All counters since the start. Sources write them, views read them.
#[derive(Debug)]
pub struct Stats {
    counts: Vec<AtomicU64>,
    /// CLOCK_MONOTONIC at the daemon's start, in ns.
    pub started_ns: u64,
}

impl Default for Stats {
    fn default() -> Self {
        let counts = Count::ALL.iter().map(|_| AtomicU64::new(0)).collect();
        Stats { counts, started_ns: crate::clock::now_ns() }
    }
}

impl Stats {
    /// Adds `more` to a counter.
    pub(crate) fn add(&self, count: Count, more: u64) {
        self.counts[count as usize].fetch_add(more, Relaxed);
    }

    /// Returns the value of a counter.
    pub fn get(&self, count: Count) -> u64 {
        self.counts[count as usize].load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_count_has_a_place_of_its_own() {
        for (place, (count, ..)) in Count::ALL.iter().enumerate() {
            assert_eq!(*count as usize, place);
        }
    }
}
