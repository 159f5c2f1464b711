//! Derives container, pod and batch job of a process from the paths of its control groups.
//!
//! Runtimes name groups differently, and a path begins at the root of the reader's cgroup namespace (`/../../kubepods...`).
//! Therefore single components are matched, never a prefix:
//!
//! ```text
//! /docker/ID   /kubepods/burstable/podUID/ID   /libpod_parent/libpod-ID        driver cgroupfs
//! docker-ID.scope  cri-containerd-ID.scope  crio-ID.scope  libpod-ID.scope     driver systemd
//! kubepods-burstable-podUID_WITH_UNDERSCORES.slice[:cri-containerd:ID]         pods
//! slurm[_NODE]/uid_U/job_J/step_S   [NODE_]slurmstepd.scope/job_J/step_S/user  Slurm, v1 and v2
//! ```
//!
//! The innermost match wins: a process in a pod of a cluster that runs in a container belongs to the pod's container. Groups
//! below `user@N.service` belong to that user, and the user can choose any names. There only container ids are read, because
//! rootless runtimes create their groups nowhere else. Names are accepted only if all their characters are valid for their kind.

/// Number of characters of a container id that people are shown.
const SHORT: usize = 12;

/// Container, pod and batch job of a process; each is absent if no control group of the process names it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CgroupOwner {
    /// Full container id, 64 hexadecimal digits.
    pub container: Option<String>,
    /// Pod uid with hyphens, even where the path has underscores.
    pub pod_uid: Option<String>,
    pub slurm_job: Option<String>,
    /// Slurm step: a number, `batch`, `extern` or `interactive`.
    pub slurm_step: Option<String>,
}

impl CgroupOwner {
    /// Reads the text of /proc/PID/cgroup. All lines count, because Slurm creates groups in some hierarchies only. The unified
    /// hierarchy's line comes first.
    pub fn of_file(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (number, _controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            Some((number == "0", path))
        });
        let (unified, others): (Vec<_>, Vec<_>) = lines.partition(|(is_unified, _)| *is_unified);
        let paths = unified.into_iter().chain(others).map(|(_, path)| CgroupOwner::of_path(path));
        paths.fold(CgroupOwner::default(), |all, more| {
            // Job and step must come from the same line of /proc/PID/cgroup.
            let slurm = if all.slurm_job.is_some() {
                (all.slurm_job, all.slurm_step)
            } else {
                (more.slurm_job, more.slurm_step)
            };
            CgroupOwner {
                container: all.container.or(more.container),
                pod_uid: all.pod_uid.or(more.pod_uid),
                slurm_job: slurm.0,
                slurm_step: slurm.1,
            }
        })
    }

    pub fn of_path(path: &str) -> Self {
        let mut place = CgroupOwner::default();
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        let (mut is_users, mut is_slurm, mut in_job) = (false, false, false);
        for part in path.split('/') {
            is_users = is_users
                || part
                    .strip_prefix("user@")
                    .is_some_and(|rest| is_number(rest.trim_end_matches(".service")));
            if let Some(id) = container(part) {
                place.container = Some(id.to_owned());
            }
            if is_users {
                continue;
            }
            if let Some(uid) = pod(part) {
                // A container that contains the pod is not a container of the pod.
                (place.pod_uid, place.container) = (Some(uid), container(part).map(str::to_owned));
            }
            is_slurm = is_slurm
                || part == "slurm"
                || part.starts_with("slurm_")
                || part.ends_with("slurmstepd.scope");
            if let Some(job) = part.strip_prefix("job_").filter(|job| is_slurm && is_number(job)) {
                (place.slurm_job, place.slurm_step, in_job) = (Some(job.to_owned()), None, true);
            } else if let Some(step) = part.strip_prefix("step_").filter(|step| in_job && is_step(step)) {
                (place.slurm_step, in_job) = (Some(step.to_owned()), false);
            }
        }
        place
    }

    /// Returns the shortened container id for people.
    pub fn short_container(&self) -> Option<&str> {
        self.container.as_deref().and_then(|id| id.get(..SHORT))
    }
}

/// Matches `ID`, `docker-ID.scope`, `libpod-ID`, `...slice:cri-containerd:ID`, but not a container's monitor
/// (`libpod-conmon-ID`).
fn container(part: &str) -> Option<&str> {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let (runtime, id) = part.rsplit_once(['-', ':']).unwrap_or(("", part));
    (id.len() == 64 && is_hex(id) && !runtime.ends_with("conmon")).then_some(id)
}

/// Matches `podUID` and `kubepods-besteffort-podUID.slice`, also before a colon. A static pod's uid is a hash without hyphens.
fn pod(part: &str) -> Option<String> {
    let part = part.split(':').next()?;
    let part = part.strip_suffix(".slice").unwrap_or(part);
    let uid =
        part.strip_prefix("pod").or_else(|| part.rsplit_once("-pod").map(|(_, uid)| uid))?.replace('_', "-");
    let groups: Vec<&str> = uid.split('-').collect();
    let is_uuid = groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.iter().all(|group| is_hex(group));
    (is_uuid || (uid.len() == 32 && is_hex(&uid))).then_some(uid)
}

pub(super) fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn is_number(text: &str) -> bool {
    (1..=20).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_step(text: &str) -> bool {
    // `0+1` is a component of a heterogeneous step.
    let is_plain = |byte: u8| byte.is_ascii_digit() || byte.is_ascii_lowercase() || byte == b'+';
    (1..=24).contains(&text.len()) && text.bytes().all(is_plain)
}

#[cfg(test)]
mod tests;
