//! One process, as far as /proc lets this user look: what it has loaded, what it was started with.

use super::here::finding;
use gpumem_wire::control::{Finding, Level};
use std::path::Path;

/// What can be said of a process from outside.
pub(super) fn look(pid: u32) -> Vec<Finding> {
    let subject = format!("pid {pid}");
    let maps = std::fs::read(format!("/proc/{pid}/maps")).ok().filter(|maps| !maps.is_empty());
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok();
    let (Some(maps), Some(environment)) = (maps, environment) else {
        return vec![finding(
            Level::Degraded,
            &subject,
            "what it has loaded cannot be read by this user".into(),
            Some("ask as its owner or as root"),
        )];
    };
    judge(&subject, &String::from_utf8_lossy(&maps), &environment)
}

fn judge(subject: &str, maps: &str, environment: &[u8]) -> Vec<Finding> {
    let loaded = |name: &str| {
        let files = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let file = files.filter(|file| Path::new(file).file_name().is_some_and(|file| starts(file, name)));
        file.map(str::to_owned).next()
    };
    let variable = |name: &str| {
        let prefix = format!("{name}=");
        let entries = environment.split(|byte| *byte == 0);
        let value = entries.filter_map(|entry| entry.strip_prefix(prefix.as_bytes())).next();
        value.map(|value| String::from_utf8_lossy(value).into_owned()).filter(|value| !value.is_empty())
    };
    let good = |text: String| finding(Level::Good, subject, text, None);
    let mut findings = Vec::new();
    let injected = variable("CUDA_INJECTION64_PATH");
    let set_for_us = injected.as_deref().is_some_and(|path| path.contains("gpumem"));
    match (loaded("libgpumem"), loaded("libcuda.so")) {
        (Some(agent), _) => findings.push(good(format!("has loaded {agent}"))),
        (None, None) => findings.push(good(
            "has not opened libcuda: it does not use CUDA (yet), and there is nothing to see".into(),
        )),
        (None, Some(_)) if variable("GPUMEM_DISABLE").is_some() => findings.push(finding(
            Level::Degraded,
            subject,
            "uses CUDA, and GPUMEM_DISABLE is set".into(),
            Some("start it again without GPUMEM_DISABLE"),
        )),
        (None, Some(_)) if set_for_us => findings.push(finding(
            Level::Bad,
            subject,
            format!(
                "uses CUDA and was started with CUDA_INJECTION64_PATH={}, but has not loaded it",
                injected.unwrap_or_default()
            ),
            Some("does that file exist in its container? is it readable, and for its architecture?"),
        )),
        (None, Some(_)) => {
            let why = match &injected {
                Some(other) => format!("CUDA_INJECTION64_PATH names another tool: {other}"),
                None => "it was started without CUDA_INJECTION64_PATH".to_owned(),
            };
            findings.push(finding(
                Level::Degraded,
                subject,
                format!("uses CUDA without libgpumem.so: {why}; only NVML's sum is known"),
                Some("start it with: gpumemctl run -- COMMAND"),
            ));
        }
    }
    if loaded("libgpumem").is_some() {
        match loaded("libcupti") {
            Some(cupti) => findings.push(good(format!("has loaded {cupti}"))),
            None => findings.push(finding(
                Level::Bad,
                subject,
                "has not loaded libcupti: its allocations are not seen".into(),
                Some("put the libcupti of its CUDA version where it finds it (LD_LIBRARY_PATH)"),
            )),
        }
        if let Some(socket) = variable("GPUMEM_SOCKET") {
            findings.push(good(format!("reports to {socket}")));
        }
    }
    findings
}

fn starts(file: &std::ffi::OsStr, name: &str) -> bool {
    file.to_string_lossy().starts_with(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(files: &[&str], environment: &str) -> Vec<(Level, String)> {
        let maps: String = files
            .iter()
            .map(|file| format!("7f00-7f01 r-xp 00000000 08:01 42                         {file}\n"))
            .collect();
        let environment = environment.replace(' ', "\0");
        let findings = judge("pid 7", &maps, environment.as_bytes());
        findings.into_iter().map(|finding| (finding.level, finding.text)).collect()
    }

    #[test]
    fn why_a_process_is_not_covered_is_said() {
        let cuda = "/usr/lib/libcuda.so.550.54";
        let agent = "/opt/lib/gpumemd/libgpumem.so";
        let cases: [(&[&str], &str, Level, &str); 7] = [
            (&["/bin/cat"], "A=b", Level::Good, "has not opened libcuda"),
            (&[cuda], "A=b", Level::Degraded, "without CUDA_INJECTION64_PATH"),
            (
                &[cuda],
                "CUDA_INJECTION64_PATH=/opt/nsys/inj.so",
                Level::Degraded,
                "another tool: /opt/nsys/inj.so",
            ),
            (&[cuda], "CUDA_INJECTION64_PATH=/gone/libgpumem.so", Level::Bad, "has not loaded it"),
            (&[cuda], "GPUMEM_DISABLE=1", Level::Degraded, "GPUMEM_DISABLE is set"),
            (&[cuda, agent], "A=b", Level::Good, "has loaded /opt/lib/gpumemd/libgpumem.so"),
            (&["/x/libgpumem.so"], "XCUDA_INJECTION64_PATH=/a", Level::Good, "has loaded /x/libgpumem.so"),
        ];
        for (files, environment, level, words) in cases {
            let told = told(files, environment);
            assert_eq!((told[0].0, told[0].1.contains(words)), (level, true), "{told:?}");
        }
        let whole = told(&[cuda, agent, "/x/libcupti.so.12"], "GPUMEM_SOCKET=/run/x/agent.sock");
        assert!(whole.iter().all(|(level, _)| *level == Level::Good) && whole.len() == 3, "{whole:?}");
        assert_eq!(told(&[cuda, agent], "A=b")[1].0, Level::Bad);
    }
}
