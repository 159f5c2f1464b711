//! Causes other than GPU memory that ended a process: the kernel killed it for host memory, or the driver reported a fault.
//!
//! The daemon stores them as facts of the process (`daemon/src/source/kernel`), so recordings contain them too:
//!
//! ```text
//! host_oom            host: the kernel's log names the process, the machine was out of memory
//!                     cgroup: the same, but a control group had reached its limit
//!                     count: the log cannot be read; the group's counter of killed processes rose while the process ran
//! host_oom_ns         when the daemon learnt about the kill
//! host_oom_line       line of the kernel's log
//! host_oom_cgroup     control group whose limit was reached
//! host_oom_limit      that limit, in bytes
//! xid xid_ns xid_line fault whose log line names the process
//! ```

use crate::owner::cgroup::CgroupOwner;
use crate::run::{Run, State};
use serde::Serialize;
use std::collections::BTreeMap;

/// Maximum time (ns) from a fault to the end of the process that the fault ended. Programs notice a fault at their next
/// synchronisation.
const FAULT_NS: u64 = 60_000_000_000;
/// SIGKILL, as a waitpid status.
const KILLED: u64 = 9;

/// What ended the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "cause")]
pub enum Cause {
    /// The machine had no host memory left.
    HostMemory,
    /// A control group had reached its limit of host memory.
    CgroupMemory {
        /// Path of the control group, if known.
        cgroup: Option<String>,
        /// Owner of the control group, such as `Slurm job 8812`.
        owner: Option<String>,
        /// Limit of the control group (bytes).
        limit_bytes: Option<u64>,
    },
    /// The driver reported a fault.
    Xid {
        /// NVIDIA's Xid number.
        xid: u64,
        /// Description of the number, if known.
        words: Option<&'static str>,
    },
}

/// Why a process ended, other than for GPU memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ending {
    /// What ended the process.
    #[serde(flatten)]
    pub cause: Cause,
    /// Time at which the daemon learnt about the cause (ns).
    pub time_ns: u64,
    /// Whether the source names the process itself, not only its control group or device.
    pub is_named: bool,
    /// Line of the kernel's log about the cause.
    pub line: Option<String>,
}

impl Ending {
    /// Returns the cause of the end of a process; `None` if the run is not closed or no such cause is known.
    pub fn of(run: &Run) -> Option<Ending> {
        let State::Closed { time_ns, status } = run.state else { return None };
        let named = Ending::of_facts(&run.process.facts, time_ns, status);
        let faults = run.devices.iter().flat_map(|device| &device.details.faults);
        let near = faults.filter(|(fault_ns, _)| status != Some(0) && is_near(*fault_ns, time_ns));
        // Xids 43 and 45 are consequences of other faults, so any other fault is preferred.
        let fault = near.min_by_key(|(fault_ns, xid)| (matches!(xid, 43 | 45), *fault_ns));
        named.or_else(|| {
            let &(time_ns, xid) = fault?;
            let cause = Cause::Xid { xid, words: xid_words(xid) };
            Some(Ending { cause, time_ns, is_named: false, line: None })
        })
    }

    /// Returns the cause from the daemon's facts; `None` after exit status 0.
    pub fn of_facts(facts: &BTreeMap<String, String>, ended_ns: u64, status: Option<u64>) -> Option<Ending> {
        if status == Some(0) {
            return None;
        }
        let text = |key: &str| facts.get(key).filter(|text| !text.is_empty()).cloned();
        let number = |key: &str| facts.get(key).and_then(|text| text.parse::<u64>().ok());
        let killed = facts.get("host_oom").and_then(|how| {
            let cgroup = text("host_oom_cgroup");
            let owner = cgroup.as_deref().and_then(owner);
            let cause = match how.as_str() {
                "host" => Cause::HostMemory,
                _ => Cause::CgroupMemory { cgroup, owner, limit_bytes: number("host_oom_limit") },
            };
            let is_named = how != "count";
            // Some process of the group was killed. The exit status, if known, shows whether it was this one.
            let is_own = is_named || status.is_none_or(|status| status & 0x7f == KILLED);
            let time_ns = number("host_oom_ns").unwrap_or(ended_ns);
            is_own.then(|| Ending { cause, time_ns, is_named, line: text("host_oom_line") })
        });
        killed.or_else(|| {
            let (xid, time_ns) = (number("xid")?, number("xid_ns")?);
            let cause = Cause::Xid { xid, words: xid_words(xid) };
            let ending = Ending { cause, time_ns, is_named: true, line: text("xid_line") };
            is_near(time_ns, ended_ns).then_some(ending)
        })
    }
}

fn is_near(fault_ns: u64, ended_ns: u64) -> bool {
    // A fault may be reported up to a second after the end.
    fault_ns <= ended_ns.saturating_add(1_000_000_000) && ended_ns.saturating_sub(fault_ns) <= FAULT_NS
}

/// Returns the owner of a control group, from the names that batch systems, container runtimes and systemd give.
fn owner(cgroup: &str) -> Option<String> {
    let place = CgroupOwner::of_path(cgroup);
    if let Some(job) = &place.slurm_job {
        return Some(match &place.slurm_step {
            Some(step) => format!("step {step} of Slurm job {job}"),
            None => format!("Slurm job {job}"),
        });
    }
    if let Some(uid) = &place.pod_uid {
        return Some(format!("a container of pod {uid}"));
    }
    if let Some(id) = place.short_container() {
        return Some(format!("container {id}"));
    }
    let unit = |part: &&str| part.ends_with(".service") || part.ends_with(".scope");
    cgroup.rsplit('/').find(unit).map(|unit| format!("unit {unit}"))
}

/// Returns a description of a common Xid number.
pub fn xid_words(xid: u64) -> Option<&'static str> {
    Some(match xid {
        13 => "a program's kernel failed",
        31 => "MMU fault: a program's kernel touched memory that is not mapped",
        43 | 45 => "a program was ended",
        48 => "uncorrectable memory error",
        61 | 62 => "the GPU's own controller failed",
        63 | 64 => "memory rows were retired",
        74 => "NVLink",
        79 => "the GPU has fallen off the bus",
        92 => "many corrected memory errors",
        94 => "uncorrectable memory (ECC) error, contained to one program on this GPU",
        95 => "uncorrectable memory (ECC) error that affects all programs on this GPU",
        119 | 120 => "the GPU's system processor does not answer",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(facts: &[(&str, &str)], status: Option<u64>) -> Option<Ending> {
        let facts = facts.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        Ending::of_facts(&facts, 100_000_000_000, status)
    }

    #[test]
    fn the_owner_of_a_limit_is_named() {
        let names = [
            ("/slurm/uid_1000/job_8812/step_0/task_0", Some("step 0 of Slurm job 8812")),
            ("/slurm_n1/uid_0/job_7", Some("Slurm job 7")),
            (
                "/system.slice/slurmstepd.scope/job_8812/step_batch/user/task_0",
                Some("step batch of Slurm job 8812"),
            ),
            ("/job_1/x", None),
            (
                "/kubepods-burstable.slice/kubepods-burstable-pod0f5c1a2b_1111_2222_3333_444444444444.slice/x",
                Some("a container of pod 0f5c1a2b-1111-2222-3333-444444444444"),
            ),
            ("/user.slice/user-1000.slice/user@1000.service/app.scope", Some("unit app.scope")),
            ("/", None),
        ];
        for (path, name) in names {
            assert_eq!(owner(path).as_deref(), name, "{path}");
        }
        let docker = format!("/system.slice/docker-{}.scope", "ab".repeat(32));
        assert_eq!(owner(&docker).as_deref(), Some("container abababababab"));
    }

    #[test]
    fn a_good_end_has_no_cause() {
        let host = [("host_oom", "host"), ("host_oom_ns", "99000000000")];
        assert!(of(&host, None).is_some_and(|ending| ending.cause == Cause::HostMemory && ending.is_named));
        assert_eq!(of(&host, Some(0)), None);
        assert_eq!(of(&[], None), None);
    }

    #[test]
    fn a_count_concerns_who_was_killed() {
        let count = [("host_oom", "count"), ("host_oom_cgroup", "/slurm/job_1"), ("host_oom_limit", "4096")];
        assert!(of(&count, Some(9)).is_some_and(|ending| !ending.is_named));
        assert!(of(&count, None).is_some());
        assert_eq!(of(&count, Some(256)), None, "it ended with exit 1: another one was killed");
    }

    #[test]
    fn a_fault_of_long_ago_did_not_end_it() {
        let xid = |ns: &str| of(&[("xid", "31"), ("xid_ns", ns)], Some(256));
        assert!(matches!(
            xid("99000000000"),
            Some(Ending { cause: Cause::Xid { xid: 31, words: Some(_) }, .. })
        ));
        assert_eq!(xid("30000000000"), None);
        assert_eq!(of(&[("xid", "x"), ("xid_ns", "1")], None), None);
    }
}
