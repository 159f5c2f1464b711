//! Finds the process that dropped the variable: the child of the nearest ancestor that still has it.

use super::proc_snapshot::ProcSnapshot;
use super::{AGENT, INJECTION};

/// The variables that must be passed together.
const ALL: &str = "CUDA_INJECTION64_PATH,NVTX_INJECTION64_PATH,GPUMEM_SOCKET,GPUMEM_JOB";

/// Returns advice for programs that start others with a new environment.
fn fix_for(holder: &str) -> String {
    match holder {
        "sudo" => format!("sudo --preserve-env={ALL} COMMAND, or sudo gpumemctl run -- COMMAND"),
        "su" | "runuser" | "login" => "su --preserve-environment, or gpumemctl run after it".to_owned(),
        "sshd" | "ssh" => "gpumemctl run on the other machine: ssh HOST gpumemctl run -- COMMAND".to_owned(),
        "systemd" => "systemd-run --setenv=CUDA_INJECTION64_PATH, or Environment= in the unit".to_owned(),
        "orted" | "prted" | "mpirun" | "mpiexec" | "hydra_pmi_proxy" => {
            "mpirun -x CUDA_INJECTION64_PATH -x GPUMEM_SOCKET, or mpirun gpumemctl run -- COMMAND".to_owned()
        }
        "srun" | "slurmstepd" => "srun --export=ALL, or srun gpumemctl run -- COMMAND".to_owned(),
        "dockerd" | "containerd-shim" | "conmon" | "podman" | "docker" => {
            "docker run -e CUDA_INJECTION64_PATH with the library and the socket's folder mounted".to_owned()
        }
        "raylet" | "ray" => {
            "runtime_env={\"env_vars\": {...}} of ray.init, or gpumemctl run -- ray start".to_owned()
        }
        _ => "put gpumemctl run right before it: gpumemctl run -- COMMAND".to_owned(),
    }
}

/// Returns why a process was started without the variable, and the remedy.
pub(super) fn lost(process: &ProcSnapshot, ancestors: &[ProcSnapshot]) -> (String, String) {
    let has = |seen: &ProcSnapshot| {
        seen.variable(INJECTION)
            .is_some_and(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with(AGENT)))
    };
    let named = |seen: &ProcSnapshot| format!("{} (pid {})", seen.comm, seen.pid);
    let holder = ancestors.iter().position(has);
    let Some((at, holder)) = holder.and_then(|at| Some((at, ancestors.get(at)?))) else {
        // `gpumemctl run` sets the variable for its children, but does not have it itself.
        let runs = ancestors.iter().position(|seen| seen.comm == "gpumemctl");
        let text = match (runs, ancestors.iter().find(|seen| seen.environ.is_none())) {
            (Some(at), _) => {
                let first = at.checked_sub(1).and_then(|at| ancestors.get(at)).unwrap_or(process);
                format!("was started by gpumemctl run, and {} lost {INJECTION}", named(first))
            }
            (None, Some(hidden)) => format!(
                "was started without {INJECTION}; neither has it any of its parents up to {}, whose environment this user \
                 may not read",
                named(hidden)
            ),
            (None, None) => format!("was started without {INJECTION}, and none of its parents has it"),
        };
        return (text, "start it with: gpumemctl run -- COMMAND".to_owned());
    };
    let loser = at.checked_sub(1).and_then(|at| ancestors.get(at)).unwrap_or(process);
    let text = format!(
        "was started without {INJECTION}: {} has it, {} that it started has not",
        named(holder),
        named(loser)
    );
    (text, fix_for(&holder.comm))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(pid: u32, comm: &str, environ: Option<&str>) -> ProcSnapshot {
        let environ = environ.map(|text| text.replace(' ', "\0").into_bytes());
        ProcSnapshot { pid, comm: comm.into(), environ, ..ProcSnapshot::default() }
    }

    #[test]
    fn the_one_that_lost_it_is_named() {
        const OURS: Option<&str> = Some("CUDA_INJECTION64_PATH=/usr/lib/gpumem/libgpumem.so A=b");
        let process = seen(9, "python", Some("A=b"));
        let parents = [seen(8, "bash", Some("A=b")), seen(7, "sudo", OURS), seen(6, "bash", OURS)];
        let (text, fix) = lost(&process, &parents);
        assert!(text.contains("sudo (pid 7) has it, bash (pid 8) that it started has not"), "{text}");
        assert!(fix.contains("--preserve-env"), "{fix}");
        let (text, _) = lost(&process, &parents[1..]);
        assert!(text.contains("python (pid 9) that it started"), "{text}");

        let (text, fix) = lost(&process, &[seen(8, "bash", Some("A=b"))]);
        assert!(text.contains("none of its parents") && fix.contains("gpumemctl run --"), "{text}");
        let other = seen(8, "bash", Some("CUDA_INJECTION64_PATH=/opt/nsys.so"));
        assert!(lost(&process, &[other]).0.contains("none of its parents"));
        let (text, _) = lost(&process, &[seen(8, "bash", Some("")), seen(1, "init", None)]);
        assert!(text.contains("up to init (pid 1)"), "{text}");
        let (text, _) = lost(&process, &[seen(8, "env", Some("")), seen(7, "gpumemctl", Some(""))]);
        assert!(text.contains("gpumemctl run, and env (pid 8) lost"), "{text}");
    }
}
