//! Owner of a process: user, job, container, pod, batch job. Metrics, `ps`, reports and `gpumemctl job` all use this module.
//!
//! A fact (`Process::facts`) comes from the kernel or from files of the machine, a claim (`Process::claims`) from the process
//! itself. A fact takes precedence. If a claim contradicts a fact, the claims that belong to it are dropped too: a claimed Slurm
//! step with its job, a pod's names with its uid.
//!
//! ```text
//! owner.rs     facts and claims -> names
//! cgroup.rs    paths of control groups -> container, pod, batch job
//! ```

pub mod cgroup;

use crate::owner::cgroup::is_hex;
use serde::{Serialize, Serializer};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Keys of a process's owner, as in JSON; see [`OwnerField::label`] for metrics.
pub const NAMES: [&str; 12] = [
    "user",
    "comm",
    "job",
    "rank",
    "world_size",
    "container",
    "pod",
    "namespace",
    "pod_uid",
    "container_name",
    "slurm_job",
    "slurm_step",
];
/// Key in JSON whose value lists the keys that are claims, separated by blanks.
pub const CLAIMED: &str = "claimed";
/// Key of a fact: the job to which a mapping file assigned the device (`[who] job_mapping`).
pub const MAPPED_JOB: &str = "mapped_job";
/// Keys of the claims in which older agents reported a Slurm job and step.
const OLD_SLURM_JOB: &str = "slurm_job_id";
const OLD_SLURM_STEP: &str = "slurm_step_id";

/// Known names of a process's owner, in the order of [`NAMES`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owner<'a>(Vec<OwnerField<'a>>);

/// One known property of an owner, such as the user or the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnerField<'a> {
    /// One of [`NAMES`].
    pub name: &'static str,
    /// Value as reported; must be escaped before printing.
    pub value: Cow<'a, str>,
    /// Whether the process itself reported the value.
    pub is_claim: bool,
}

impl OwnerField<'_> {
    /// Returns the name's metric label; `job_name` for `job`, because Prometheus itself uses the label `job`.
    pub fn label(&self) -> &'static str {
        if self.name == "job" { "job_name" } else { self.name }
    }
}

type Lines = BTreeMap<String, String>;
/// A value, and whether it is a claim.
type OwnerValue<'a> = Option<(Cow<'a, str>, bool)>;

impl<'a> Owner<'a> {
    /// Combines the facts and claims of a process; `uid` is the user's name if there is no other.
    pub fn of(facts: &'a Lines, claims: &'a Lines, uid: Option<u64>) -> Self {
        let fact = |name: &str| value_of(facts, name).map(|value| (Cow::Borrowed(value), false));
        let claim = |name: &str| value_of(claims, name).map(|value| (Cow::Borrowed(value), true));
        let number = |name| claim(name).filter(|(value, _)| value.parse::<u32>().is_ok());
        let claimed_job = claim("slurm_job").or_else(|| claim(OLD_SLURM_JOB));
        let slurm_job = fact("slurm_job").or_else(|| fact(MAPPED_JOB)).or_else(|| claimed_job.clone());
        let slurm_step = fact("slurm_step").or_else(|| {
            let step = claim("slurm_step").or_else(|| claim(OLD_SLURM_STEP));
            step.filter(|_| !differ(&claimed_job, &slurm_job))
        });
        let claimed_uid = claim("pod_uid");
        let pod_uid = fact("pod_uid").or_else(|| claimed_uid.clone());
        let of_pod = |name| fact(name).or_else(|| claim(name).filter(|_| !differ(&claimed_uid, &pod_uid)));
        let (pod, namespace) = (of_pod("pod"), of_pod("namespace"));
        let container_name = of_pod("container_name");
        let job = job(claim("job"), &slurm_job, &pod_uid);
        let user = fact("user").or_else(|| Some((uid?.to_string().into(), false)));
        let (rank, world_size) = (number("rank"), number("world_size"));
        let (comm, container) = (fact("comm"), fact("container"));
        let values: [OwnerValue<'a>; NAMES.len()] = [
            user,
            comm,
            job,
            rank,
            world_size,
            container,
            pod,
            namespace,
            pod_uid,
            container_name,
            slurm_job,
            slurm_step,
        ];
        let named = NAMES.into_iter().zip(values);
        Owner(
            named
                .filter_map(|(name, value)| {
                    value.map(|(value, is_claim)| OwnerField { name, value, is_claim })
                })
                .collect(),
        )
    }

    /// Returns the value of one of [`NAMES`].
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|field| field.name == name).map(|field| &*field.value)
    }

    /// Iterates over all known names and their values.
    pub fn iter(&self) -> impl Iterator<Item = &OwnerField<'a>> {
        self.0.iter()
    }

    /// Returns the names that are claims, separated by blanks; `None` if there are none.
    pub fn claimed(&self) -> Option<String> {
        let names: Vec<&str> = self.iter().filter(|field| field.is_claim).map(|field| field.name).collect();
        (!names.is_empty()).then(|| names.join(" "))
    }

    /// Returns phrases for the head of a report, in reading order: `alice`, `slurm 8812.0`, `pod ml/train-0`, `job x`,
    /// `rank 3/8`.
    pub fn words(&self) -> Vec<String> {
        let is_claim = |name: &str| self.iter().any(|field| field.name == name && field.is_claim);
        let claimed = |name| if is_claim(name) { " (claimed)" } else { "" };
        let mut words: Vec<String> = self.get("user").map(str::to_owned).into_iter().collect();
        let (slurm, pod_uid) = (self.get("slurm_job"), self.get("pod_uid"));
        if let Some(job) = slurm {
            let step = self.get("slurm_step").map(|step| format!(".{step}")).unwrap_or_default();
            words.push(format!("slurm {job}{step}{}", claimed("slurm_job")));
        }
        match (self.get("pod"), pod_uid, self.get("container")) {
            (Some(pod), ..) => {
                let namespace = self.get("namespace").map(|name| format!("{name}/")).unwrap_or_default();
                words.push(format!("pod {namespace}{pod}{}", claimed("pod")));
            }
            (None, Some(uid), _) => words.push(format!("pod {uid}{}", claimed("pod_uid"))),
            (None, None, Some(id)) => words.push(format!("container {id}")),
            _ => {}
        }
        let job =
            self.get("job").filter(|job| !is_generated(job) && slurm != Some(job) && pod_uid != Some(job));
        words.extend(job.map(|job| format!("job {job}")));
        if let Some(rank) = self.get("rank") {
            let size = self.get("world_size").map(|size| format!("/{size}")).unwrap_or_default();
            words.push(format!("rank {rank}{size}"));
        }
        words
    }

    /// Returns the names and their values as in JSON, including [`CLAIMED`].
    pub fn map(&self) -> BTreeMap<String, String> {
        let named = self.iter().map(|field| (field.name.to_owned(), field.value.clone().into_owned()));
        named.chain(self.claimed().map(|claimed| (CLAIMED.to_owned(), claimed))).collect()
    }
}

impl Serialize for Owner<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let named = self.iter().map(|field| (field.name, field.value.clone()));
        serializer.collect_map(named.chain(self.claimed().map(|claimed| (CLAIMED, claimed.into()))))
    }
}

/// Returns a value without blanks around it; `None` if it is empty.
fn value_of<'a>(lines: &'a Lines, name: &str) -> Option<&'a str> {
    lines.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
}

/// Whether both values are known and differ.
fn differ(one: &OwnerValue<'_>, other: &OwnerValue<'_>) -> bool {
    matches!((one, other), (Some((one, _)), Some((other, _))) if one != other)
}

/// Returns the job's name: a claimed one, else the Slurm job or the pod's uid, else the id that `gpumemctl run` generated.
fn job<'a>(claim: OwnerValue<'a>, slurm_job: &OwnerValue<'a>, pod_uid: &OwnerValue<'a>) -> OwnerValue<'a> {
    let other_id = || slurm_job.clone().or_else(|| pod_uid.clone());
    match claim {
        Some((claim, _)) if is_generated(&claim) => other_id().or(Some((claim, true))),
        Some((Cow::Borrowed(claim), _)) => Some((name_of(claim).into(), true)),
        other => other.or_else(other_id),
    }
}

/// Whether an id was generated by `gpumemctl run`: time and pid in hexadecimal digits.
fn is_generated(id: &str) -> bool {
    id.split_once('-').is_some_and(|(time, pid)| {
        (12..=16).contains(&time.len()) && (1..=8).contains(&pid.len()) && is_hex(time) && is_hex(pid)
    })
}

/// Returns a job's name without the id that `gpumemctl run --name` appends.
fn name_of(job: &str) -> &str {
    job.rsplit_once('.')
        .filter(|(name, id)| !name.is_empty() && is_generated(id))
        .map_or(job, |(name, _)| name)
}

/// Whether a process belongs to a job. `job` is the job's id or name, the batch system's job id, or the pod's uid or name.
pub fn is_of_job(facts: &Lines, claims: &Lines, job: &str) -> bool {
    let is_whole = value_of(claims, "job").is_some_and(|claim| is_job(claim, job));
    let owner = Owner::of(facts, claims, None);
    is_whole || ["job", "slurm_job", "pod_uid", "pod"].iter().any(|name| owner.get(name) == Some(job))
}

/// Whether a claimed job id matches `job`: the whole id, or the name that `gpumemctl run --name` prepended.
pub fn is_job(claim: &str, job: &str) -> bool {
    claim == job || claim.rsplit_once('.').is_some_and(|(name, _)| name == job)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Lines {
        let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// Returns the names as `name=value`, claims with a leading `?`.
    fn who(facts: &str, claims: &str) -> String {
        let (facts, claims) = (lines(facts), lines(claims));
        let who = Owner::of(&facts, &claims, None);
        let word = |said: &OwnerField<'_>| {
            format!("{}{}={}", if said.is_claim { "?" } else { "" }, said.name, said.value)
        };
        who.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn facts_win_and_liars_are_not_believed() {
        let cases = [
            ("", "", ""),
            ("slurm_job=7 slurm_step=0", "slurm_job=8 slurm_step=1", "job=7 slurm_job=7 slurm_step=0"),
            // The claimed step belongs to another job than the known one.
            ("slurm_job=7", "slurm_job=8 slurm_step=1", "job=7 slurm_job=7"),
            ("slurm_job=7", "slurm_job=7 slurm_step=1", "job=7 slurm_job=7 ?slurm_step=1"),
            ("mapped_job=9", "slurm_job=8", "job=9 slurm_job=9"),
            ("", "slurm_job_id=8 slurm_step_id=2", "?job=8 ?slurm_job=8 ?slurm_step=2"),
            ("pod_uid=a", "pod=p namespace=n", "job=a ?pod=p ?namespace=n pod_uid=a"),
            ("pod_uid=a", "pod_uid=a pod=p", "job=a ?pod=p pod_uid=a"),
            ("pod_uid=a", "pod_uid=b pod=p namespace=n container_name=c", "job=a pod_uid=a"),
            ("pod_uid=a pod=q", "pod_uid=b pod=p", "job=a pod=q pod_uid=a"),
            // A process cannot claim another user, another program or another container.
            ("", "user=root comm=sshd container=c", ""),
            ("", "rank=3 world_size=eight", "?rank=3"),
            ("", "rank=-1 world_size=99999999999", ""),
        ];
        for (facts, claims, expected) in cases {
            assert_eq!(who(facts, claims), expected, "{facts} | {claims}");
        }
    }

    #[test]
    fn a_job_is_called_as_it_was_named() {
        let cases = [
            ("", "job=bert", "?job=bert"),
            ("slurm_job=7", "job=bert.18a2b3c4d5e6f70-1f3", "?job=bert slurm_job=7"),
            ("slurm_job=7", "job=18a2b3c4d5e6f70-1f3", "job=7 slurm_job=7"),
            ("pod_uid=a", "job=18a2b3c4d5e6f70-1f3", "job=a pod_uid=a"),
            ("", "job=18a2b3c4d5e6f70-1f3", "?job=18a2b3c4d5e6f70-1f3"),
            ("", "job=v1.2", "?job=v1.2"),
            ("", "job=.18a2b3c4d5e6f70-1f3", "?job=.18a2b3c4d5e6f70-1f3"),
        ];
        for (facts, claims, expected) in cases {
            assert_eq!(who(facts, claims), expected, "{facts} | {claims}");
        }
        let claims = lines("job=bert.18a2b3c4d5e6f70-1f3 slurm_job=7");
        for job in ["bert", "bert.18a2b3c4d5e6f70-1f3", "7"] {
            assert!(is_of_job(&Lines::new(), &claims, job), "{job}");
        }
        assert!(!is_of_job(&Lines::new(), &claims, "ber"));
        assert!(!is_of_job(&lines("slurm_job=8"), &claims, "7"), "it is known to be of another one");
    }

    #[test]
    fn heads_of_reports_say_what_matters() {
        let cases = [
            ("user=ana slurm_job=8812 slurm_step=0", "rank=3 world_size=8", "ana, slurm 8812.0, rank 3/8"),
            ("user=ana", "slurm_job=7 job=bert", "ana, slurm 7 (claimed), job bert"),
            ("pod_uid=u container=c pod=train-0 namespace=ml", "rank=1", "pod ml/train-0, rank 1"),
            ("pod_uid=u container=c", "", "pod u"),
            ("container=c", "job=18a2b3c4d5e6f70-1f3", "container c"),
        ];
        for (facts, claims, expected) in cases {
            let (facts, claims) = (lines(facts), lines(claims));
            assert_eq!(Owner::of(&facts, &claims, None).words().join(", "), expected);
        }
    }

    #[test]
    fn the_user_is_a_number_where_it_has_no_name() {
        let (none, named) = (Lines::new(), lines("user=ana"));
        assert_eq!(Owner::of(&none, &none, Some(1500)).get("user"), Some("1500"));
        assert_eq!(Owner::of(&named, &none, Some(1500)).get("user"), Some("ana"));
        let claims = lines("rank=1 job=a");
        let json = serde_json::to_value(Owner::of(&named, &claims, None)).expect("JSON");
        assert_eq!(json, serde_json::json!({"user": "ana", "job": "a", "rank": "1", "claimed": "job rank"}));
        assert_eq!(serde_json::to_value(Owner::of(&named, &claims, None).map()).expect("JSON"), json);
    }
}
