//! Paths as they occur in practice. ID, OTHER and UID stand for actual ids.

use super::*;

const ID: &str = "3f2a9c1b7d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8";
const OTHER: &str = "a0b1c2d3e4f5a0b1c2d3e4f5a0b1c2d3e4f5a0b1c2d3e4f5a0b1c2d3e4f5a0b1";
const UID: &str = "0f5c1a2b-1111-4222-8333-4444aaaabbbb";

fn text(pattern: &str) -> String {
    let folded = UID.replace('-', "_");
    pattern.replace("OTHER", OTHER).replace("U_I_D", &folded).replace("UID", UID).replace("ID", ID)
}

/// Returns `container pod job step`, with `-` for absent values.
fn said(place: &CgroupOwner) -> String {
    let container = place.container.as_deref().map(|id| if id == ID { "ID" } else { "OTHER" });
    let pod = place.pod_uid.as_deref().map(|uid| if uid == UID { "UID" } else { uid });
    let words = [container, pod, place.slurm_job.as_deref(), place.slurm_step.as_deref()];
    words.map(|word| word.unwrap_or("-")).join(" ")
}

#[test]
fn runtimes_and_batch_systems_name_groups_as_they_do() {
    let files = [
        // systemd alone: a login, a user's manager, a service, the root.
        ("0::/user.slice/user-1000.slice/session-2.scope", "- - - -"),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-org.gnome.Terminal.slice/vte-spawn-0f5c1a2b-1111-4222-8333-4444aaaabbbb.scope",
            "- - - -",
        ),
        ("0::/system.slice/gpumemd.service", "- - - -"),
        ("0::/", "- - - -"),
        ("", "- - - -"),
        // Docker: systemd and cgroupfs, v2 and v1; seen from a container with its own namespace.
        ("0::/system.slice/docker-ID.scope", "ID - - -"),
        ("0::/docker/ID", "ID - - -"),
        ("0::/../docker-ID.scope", "ID - - -"),
        ("0::/../ID/init.scope", "ID - - -"),
        ("12:memory:/docker/ID\n4:devices:/docker/ID\n1:name=systemd:/docker/ID\n0::/", "ID - - -"),
        (
            "12:memory:/system.slice/docker.service/OTHER-scope\n1:name=systemd:/docker/ID\n0::/system.slice/docker.service",
            "ID - - -",
        ),
        ("0::/ecs/5d1c0f0e6a2b4c3d8e9f00112233aabb/ID", "ID - - -"),
        // Docker in Docker: the inner container counts.
        ("0::/system.slice/docker-OTHER.scope/docker/ID", "ID - - -"),
        // Podman: as root, rootless, in a pod, by Quadlet, without systemd. The monitor (conmon) is not in the container.
        ("0::/machine.slice/libpod-ID.scope/container", "ID - - -"),
        ("0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope/container", "ID - - -"),
        ("0::/machine.slice/machine-libpod_pod_OTHER.slice/libpod-ID.scope", "ID - - -"),
        ("0::/system.slice/train.service/libpod-payload-ID", "ID - - -"),
        ("0::/libpod_parent/libpod-ID", "ID - - -"),
        ("0::/machine.slice/libpod-conmon-ID.scope", "- - - -"),
        ("0::/system.slice/crio-conmon-ID.scope", "- - - -"),
        // nerdctl, and containerd without Docker or Kubernetes.
        ("0::/system.slice/nerdctl-ID.scope", "ID - - -"),
        ("0::/default/ID", "ID - - -"),
        // Kubernetes, driver systemd: the three classes, containerd and CRI-O.
        ("0::/kubepods.slice/kubepods-podU_I_D.slice/cri-containerd-ID.scope", "ID UID - -"),
        (
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podU_I_D.slice/cri-containerd-ID.scope",
            "ID UID - -",
        ),
        (
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podU_I_D.slice/crio-ID.scope/container",
            "ID UID - -",
        ),
        (
            "11:devices:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podU_I_D.slice/docker-ID.scope\n0::/",
            "ID UID - -",
        ),
        // Driver cgroupfs.
        ("0::/kubepods/podUID/ID", "ID UID - -"),
        ("0::/kubepods/burstable/podUID/ID", "ID UID - -"),
        ("5:memory:/kubepods/besteffort/podUID/ID\n0::/", "ID UID - -"),
        ("0::/kubepods/besteffort/podUID/crio-ID", "ID UID - -"),
        // containerd under systemd although the kubelet is configured for cgroupfs.
        (
            "9:cpu:/system.slice/containerd.service/kubepods-burstable-podU_I_D.slice:cri-containerd:ID\n0::/",
            "ID UID - -",
        ),
        // A static pod: its uid is a hash.
        (
            "0::/kubepods/burstable/pod5d1c0f0e6a2b4c3d8e9f00112233aabb/ID",
            "ID 5d1c0f0e6a2b4c3d8e9f00112233aabb - -",
        ),
        // As seen from another pod.
        (
            "0::/../../../kubepods-burstable.slice/kubepods-burstable-podU_I_D.slice/cri-containerd-ID.scope",
            "ID UID - -",
        ),
        ("0::/../../podUID/ID", "ID UID - -"),
        ("0::/../cri-containerd-ID.scope", "ID - - -"),
        // kind: a node that is a container.
        (
            "0::/system.slice/docker-OTHER.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-podU_I_D.slice/cri-containerd-ID.scope",
            "ID UID - -",
        ),
        ("0::/docker/OTHER/kubelet/kubepods/besteffort/podUID/ID", "ID UID - -"),
        // The path has no container below the pod: the node's container must not count as the pod's.
        ("0::/docker/OTHER/kubelet/kubepods/besteffort/podUID", "- UID - -"),
        // Slurm: v1 in some hierarchies only; v2; several slurmd on a machine; batch, extern and heterogeneous steps.
        (
            "8:freezer:/slurm_n1/uid_1500/job_1/step_0\n5:devices:/slurm_n1/uid_1500/job_1/step_0/task_0\n4:memory:/system.slice/slurmd.service\n0::/system.slice/slurmd.service",
            "- - 1 0",
        ),
        ("8:freezer:/slurm/uid_1500/job_8812/step_batch\n0::/", "- - 8812 batch"),
        ("0::/system.slice/slurmstepd.scope/job_8812/step_3/user/task_7", "- - 8812 3"),
        ("0::/system.slice/n1_slurmstepd.scope/job_8812/step_extern/user/task_special", "- - 8812 extern"),
        ("0::/system.slice/slurmstepd.scope/job_8812/step_0+1/user/task_0", "- - 8812 0+1"),
        ("0::/system.slice/slurmstepd.scope/job_8812/slurm", "- - 8812 -"),
        ("0::/../job_8813/step_0/user/task_0", "- - - -"),
        // A container in a job, and a job in a pod.
        ("0::/system.slice/slurmstepd.scope/job_8812/step_0/user/task_0/libpod-ID.scope", "ID - 8812 0"),
        ("0::/kubepods/podUID/ID/system.slice/slurmstepd.scope/job_5/step_1/user/task_0", "ID UID 5 1"),
        ("0::/docker/ID (deleted)", "ID - - -"),
    ];
    for (file, expected) in files {
        assert_eq!(said(&CgroupOwner::of_file(&text(file))), expected, "{file}");
    }
}

#[test]
fn a_user_cannot_be_somebody_elses_job_or_pod() {
    let own = "0::/user.slice/user-1500.slice/user@1500.service";
    for (below, expected) in [
        ("/slurm/uid_0/job_1/step_0", "- - - -"),
        ("/slurmstepd.scope/job_1/step_0/user", "- - - -"),
        ("/kubepods/podUID/ID", "ID - - -"),
        ("/app.slice/docker-ID.scope", "ID - - -"),
    ] {
        assert_eq!(said(&CgroupOwner::of_file(&text(&format!("{own}{below}")))), expected, "{below}");
    }
}

#[test]
fn what_only_looks_like_a_name_is_none() {
    for path in [
        "/job_1/step_0",
        "/slurm/job_",
        "/slurm/job_1x/step_0",
        "/slurm/job_-1",
        "/slurm/uid_1/job_18446744073709551616999",
        "/docker/3f2a9c1b7d4e",
        "/docker-ID.slice",
        "/docker/IDa",
        "/docker/XID",
        "/podUIDx/a",
        "/pod0f5c1a2b-1111-4222-8333-4444aaaabbb/a",
        "/pod0f5c1a2b111142228333-4444aaaabbbb-1-2/a",
        "/podcasts/a",
        "/kubepods-pod\"},x=\"1.slice",
    ] {
        assert_eq!(CgroupOwner::of_path(&text(path)), CgroupOwner::default(), "{path}");
    }
    // A job with an invalid step is still recognised.
    assert_eq!(said(&CgroupOwner::of_path("/slurm/job_1/step_\u{1b}[2J/x")), "- - 1 -");
    for text in ["no colon", "0:", "0::", ":::\n::\n\n", "0::\u{0}//////", "x:y:/docker\n\u{fffd}"] {
        assert_eq!(CgroupOwner::of_file(text), CgroupOwner::default(), "{text:?}");
    }
}
