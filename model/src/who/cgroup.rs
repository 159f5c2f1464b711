//! Paths of control groups: which container, pod and batch job a process belongs to.
//!
//! Runtimes name groups in ways of their own, and the path that is seen begins where the reader's namespace does
//! (`/../../kubepods...`), so components are matched, never a prefix:
//!
//! ```text
//! /docker/ID   /kubepods/burstable/podUID/ID   /libpod_parent/libpod-ID        driver cgroupfs
//! docker-ID.scope  cri-containerd-ID.scope  crio-ID.scope  libpod-ID.scope     driver systemd
//! kubepods-burstable-podUID_WITH_UNDERSCORES.slice[:cri-containerd:ID]         pods
//! slurm[_NODE]/uid_U/job_J/step_S   [NODE_]slurmstepd.scope/job_J/step_S/user  Slurm, v1 and v2
//! ```
//!
//! The innermost wins: a pod of a cluster in a container is in the pod's container. What lies below `user@N.service` was made
//! by that user, who can name groups at will: only a container's id is read there, since rootless runtimes have no other place.
//! Names are taken if they are made of nothing but what such names are made of.

/// Letters of a container's id that people are shown.
const SHORT: usize = 12;

/// What a process's groups say. Absent: nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// The container's whole id, 64 hexadecimal digits.
    pub container: Option<String>,
    /// With hyphens, however the path spells it.
    pub pod_uid: Option<String>,
    /// Slurm's job.
    pub slurm_job: Option<String>,
    /// And step: a number, `batch`, `extern` or `interactive`.
    pub slurm_step: Option<String>,
}

impl Place {
    /// Of the text of /proc/PID/cgroup. Every line is looked at, the unified hierarchy's first: Slurm has its own in some
    /// hierarchies only.
    pub fn of_file(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (number, _controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            Some((number == "0", path))
        });
        let (unified, others): (Vec<_>, Vec<_>) = lines.partition(|(is_unified, _)| *is_unified);
        let paths = unified.into_iter().chain(others).map(|(_, path)| Place::of_path(path));
        paths.fold(Place::default(), |all, more| {
            // A step belongs to the job that it was named with.
            let slurm = if all.slurm_job.is_some() {
                (all.slurm_job, all.slurm_step)
            } else {
                (more.slurm_job, more.slurm_step)
            };
            Place {
                container: all.container.or(more.container),
                pod_uid: all.pod_uid.or(more.pod_uid),
                slurm_job: slurm.0,
                slurm_step: slurm.1,
            }
        })
    }

    /// Of one path.
    pub fn of_path(path: &str) -> Self {
        let mut place = Place::default();
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
                // What held the pod is no container of the pod.
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

    /// The container's id as people are shown it.
    pub fn short_container(&self) -> Option<&str> {
        self.container.as_deref().and_then(|id| id.get(..SHORT))
    }
}

/// `ID`, `docker-ID.scope`, `libpod-ID`, `...slice:cri-containerd:ID`; not what watches over a container (`libpod-conmon-ID`).
fn container(part: &str) -> Option<&str> {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let (runtime, id) = part.rsplit_once(['-', ':']).unwrap_or(("", part));
    (id.len() == 64 && is_hex(id) && !runtime.ends_with("conmon")).then_some(id)
}

/// `podUID`, `kubepods-besteffort-podUID.slice`, and the same before a colon. A static pod's uid is a hash without hyphens.
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

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn is_number(text: &str) -> bool {
    (1..=20).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_step(text: &str) -> bool {
    // `0+1`: a part of a heterogeneous step.
    let is_plain = |byte: u8| byte.is_ascii_digit() || byte.is_ascii_lowercase() || byte == b'+';
    (1..=24).contains(&text.len()) && text.bytes().all(is_plain)
}

#[cfg(test)]
mod tests;
