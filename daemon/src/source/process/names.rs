//! Names of pods, from the files that the kubelet keeps beside its logs.
//!
//! For every container that it starts the kubelet makes a link `POD_NAMESPACE_CONTAINER-ID.log` in /var/log/containers. The id
//! is the one in the path of the control group, so a process has its names for certain, on GPUs that pods share too, with no
//! request to anybody: the kubelet's pod-resources API knows devices and no processes. Only names are read, no log.

use std::ffi::OsStr;
use std::path::Path;

/// More entries than a node can have containers.
const ENTRIES: usize = 16_384;

/// A container of a pod, as Kubernetes calls it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// The pod.
    pub pod: String,
    /// Its namespace.
    pub namespace: String,
    /// The container in the pod.
    pub container: String,
}

/// The names of containers with these ids, in their order.
pub(crate) fn find(directory: &Path, ids: &[&str]) -> Vec<Option<Names>> {
    let mut found = vec![None; ids.len()];
    let Ok(entries) = std::fs::read_dir(directory) else { return found };
    for entry in entries.take(ENTRIES).flatten() {
        let Some((names, id)) = of_file(&entry.file_name()) else { continue };
        for (place, _) in found.iter_mut().zip(ids).filter(|(_, wanted)| **wanted == id) {
            *place = Some(names.clone());
        }
    }
    found
}

/// What the name of a file says, and the id.
fn of_file(name: &OsStr) -> Option<(Names, String)> {
    let (rest, id) = name.to_str()?.strip_suffix(".log")?.rsplit_once('-')?;
    // Names in Kubernetes have no underscore.
    let mut parts = rest.split('_');
    let (pod, namespace, container) = (parts.next()?, parts.next()?, parts.next()?);
    let are_names = parts.next().is_none() && [pod, namespace, container].into_iter().all(is_name);
    let of = |name: &str| name.to_owned();
    let names = || Names { pod: of(pod), namespace: of(namespace), container: of(container) };
    are_names.then(|| (names(), of(id)))
}

fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    (1..=253).contains(&name.len()) && name.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_names_pod_namespace_and_container() {
        let id = "ab".repeat(32);
        let of = |name: &str| {
            of_file(OsStr::new(name)).map(|(names, id)| (names.pod, names.namespace, names.container, id))
        };
        let owned = |name: &str| name.to_owned();
        assert_eq!(
            of(&format!("train-bert-0_ml-team_worker-1-{id}.log")),
            Some((owned("train-bert-0"), owned("ml-team"), owned("worker-1"), id))
        );
        for odd in [
            "a_b_c.log",
            "a_b_c_d-1.log",
            "a_b-1.log",
            "A_b_c-1.log",
            "a__c-1.log",
            "a_b_c-1",
            "../a_b_c-1.log",
            "",
        ] {
            assert_eq!(of(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_folder_is_looked_through_once() {
        let dir = std::env::temp_dir().join(format!("gpumemd-names-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let (one, two) = ("1".repeat(64), "2".repeat(64));
        // As the kubelet does: links to what is not to be seen here.
        std::os::unix::fs::symlink("/nowhere", dir.join(format!("a_b_c-{one}.log"))).expect("a link");
        let found = find(&dir, &[&two, &one]);
        assert_eq!(found[0], None);
        assert_eq!(found[1].as_ref().map(|names| &*names.pod), Some("a"));
        std::fs::remove_dir_all(&dir).expect("removed");
        assert_eq!(find(&dir, &[&one]), [None]);
    }
}
