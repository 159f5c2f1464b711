//! Checks the daemon's systemd units, its namespaces, and the port for metrics.

use super::findings::{DoctorReport, finding};
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the initial PID namespace, the host's; the number is fixed in the kernel.
const HOST_NAMESPACE: &str = "pid:[4026531836]";
/// Default address of the daemon's metrics.
const PORT: ([u8; 4], u16) = ([127, 0, 0, 1], 9837);
/// Timeout for systemctl, which answers within milliseconds unless its bus hangs.
const SYSTEMCTL: Duration = Duration::from_secs(3);
/// Difference in ns above which two clocks count as different time namespaces. It exceeds the duration of a request.
const CLOCKS_APART: u64 = 2_000_000_000;

pub(super) fn check(report: &DoctorReport, findings: &mut Vec<Finding>) {
    if Path::new("/run/systemd/system").exists()
        && let Some(text) = systemctl()
    {
        findings.extend(units(&text, report.daemon.is_some()));
    }
    if report.daemon.is_none() {
        return findings.extend(port(SocketAddr::from(PORT)));
    }
    let own = std::fs::read_link("/proc/self/ns/pid").ok().map(|link| link.display().to_string());
    findings.extend(pid_namespace(report.fact("pid namespace"), own.as_deref()));
    findings.extend(clocks(report.fact("clock"), own_clock()));
}

/// Returns systemd's properties of the daemon's units, as `key=value` lines, with a blank line between units.
fn systemctl() -> Option<String> {
    let mut command = Command::new("systemctl");
    command.args(["show", "--property=Id,LoadState,ActiveState,SubState,Result,NRestarts"]);
    command
        .args("gpumemd.service gpumemd-agent.socket gpumemd-control.socket gpumemd-http.socket".split(' '));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let since = Instant::now();
    while child.try_wait().ok()?.is_none() {
        if since.elapsed() > SYSTEMCTL {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut text = String::new();
    child.stdout?.take(1 << 16).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Returns the findings on units. `answers` is whether a daemon answers.
fn units(properties: &str, answers: bool) -> Vec<Finding> {
    properties.split("\n\n").filter_map(|unit| check_unit(unit, answers)).collect()
}

fn check_unit(properties: &str, answers: bool) -> Option<Finding> {
    let values: BTreeMap<&str, &str> = properties.lines().filter_map(|line| line.split_once('=')).collect();
    let value = |key: &str| values.get(key).copied().unwrap_or_default();
    let id = value("Id");
    let is_service = id.ends_with(".service");
    let (state, text, fix) = match (value("LoadState"), value("ActiveState")) {
        ("", _) => return None,
        // On a machine where every user has a private daemon, no unit is installed.
        ("not-found", _) if is_service && !answers => {
            (State::Ok, "is not installed here".into(), String::new())
        }
        ("not-found", _) => return None,
        ("masked", _) => (State::Warn, "is masked".into(), format!("systemctl unmask {id}")),
        (_, active @ ("active" | "reloading" | "activating")) => {
            match value("NRestarts").parse().unwrap_or(0_u64) {
                0 if is_service => (State::Ok, format!("is {active} ({})", value("SubState")), String::new()),
                0 => return None,
                restarts => {
                    let text = format!("is {active}, and was restarted {restarts} times after a failure");
                    (State::Warn, text, format!("journalctl -u {id} -n 100"))
                }
            }
        }
        (_, "failed") => {
            let fix = format!("journalctl -u {id} -n 50 shows the reason; then systemctl restart {id}");
            (State::Bad, format!("has failed ({})", value("Result")), fix)
        }
        // A service may be inactive until its socket activates it, but an inactive socket activates nothing.
        (_, other) if !is_service || !answers => {
            (State::Warn, format!("is {other}"), format!("systemctl enable --now {id}"))
        }
        _ => return None,
    };
    Some(finding(Check::DaemonUnit, state, id, text, &fix))
}

/// Compares the daemon's PID namespace with our own.
fn pid_namespace(daemons: Option<&str>, own: Option<&str>) -> Option<Finding> {
    let (daemons, own) = (daemons?, own?);
    const HOST_PIDS: &str = "run gpumemd in the host's PID namespace (hostPID: true, --pid=host)";
    let (state, text, fix) = match (daemons == HOST_NAMESPACE, daemons == own) {
        (true, true) => (State::Ok, "gpumemd sees the whole machine", ""),
        (true, false) => (
            State::Warn,
            "gpumemd uses the host's pids, and this shell those of a container: equal numbers are other processes",
            "run gpumemctl on the node, or use the pids that gpumemctl ps shows",
        ),
        (false, true) => (
            State::Ok,
            "gpumemd sees the processes of this PID namespace, not those of the rest of the machine",
            HOST_PIDS,
        ),
        (false, false) => (
            State::Warn,
            "gpumemd runs in another PID namespace than this shell: it does not see processes outside of its own",
            HOST_PIDS,
        ),
    };
    Some(finding(Check::NamespacePid, state, "pids", text, fix))
}

/// Returns CLOCK_MONOTONIC in ns.
fn own_clock() -> u64 {
    let now = Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::Monotonic));
    now.ok().and_then(|now| u64::try_from(now.as_nanos()).ok()).unwrap_or(0)
}

/// Compares CLOCK_MONOTONIC of the daemon with our own, in ns. They differ only between time namespaces.
fn clocks(daemons: Option<&str>, own: u64) -> Option<Finding> {
    let apart = daemons?.parse::<u64>().ok()?.abs_diff(own);
    let seconds = apart / 1_000_000_000;
    let text = format!(
        "this shell's clock and gpumemd's differ by {seconds} s: the shell is in another time namespace, and \
             gpumemd refuses its agents"
    );
    let fix = "start programs in gpumemd's time namespace (no unshare --time)";
    (apart > CLOCKS_APART).then(|| finding(Check::NamespaceTime, State::Warn, "clock", text, fix))
}

/// Checks which program uses the port for metrics, if no daemon answers.
fn port(address: SocketAddr) -> Option<Finding> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(300)).ok()?;
    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
    let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
    let mut reply = Vec::new();
    let request = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let read = stream.write_all(request).and_then(|()| stream.take(4096).read_to_end(&mut reply));
    let is_ours = read.is_ok() && String::from_utf8_lossy(&reply).contains("there is /metrics");
    let (text, fix) = match is_ours {
        true => (
            format!("a gpumemd serves {address}, but its control socket cannot be reached from here"),
            "run gpumemctl as the user, or in the container, of that gpumemd",
        ),
        false => (
            format!("another program uses {address}: gpumemd does not start with its default configuration"),
            "metrics.listen = \"127.0.0.1:9838\", or \"off\"; the other program: ss -ltnp sport = :9837",
        ),
    };
    Some(finding(Check::DaemonPort, State::Warn, "metrics", text, fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_units(text: &str, answers: bool) -> Vec<(State, String, String)> {
        let findings = units(text, answers);
        findings.into_iter().map(|of| (of.state, of.subject, of.text)).collect()
    }

    #[test]
    fn units_are_told_as_systemd_has_them() {
        let failed = "Id=gpumemd.service\nLoadState=loaded\nActiveState=failed\nSubState=failed\nResult=exit-code\nNRestarts=0\n\n\
                      Id=gpumemd-agent.socket\nLoadState=loaded\nActiveState=active\nSubState=listening\nResult=success\n\n\
                      Id=gpumemd-http.socket\nLoadState=loaded\nActiveState=inactive\nSubState=dead\nResult=success";
        let report = of_units(failed, false);
        assert_eq!(report.len(), 2, "{report:?}");
        assert!(report[0].0 == State::Bad && report[0].2.contains("exit-code"), "{report:?}");
        assert!(report[1].0 == State::Warn && report[1].1 == "gpumemd-http.socket", "{report:?}");
        let restarted =
            "Id=gpumemd.service\nLoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=3";
        assert!(of_units(restarted, true)[0].2.contains("3 times"));
        let none = "Id=gpumemd.service\nLoadState=not-found\nActiveState=inactive";
        assert_eq!((of_units(none, true).len(), of_units(none, false)[0].0), (0, State::Ok));
        assert!(of_units("garbage", false).is_empty());
    }

    #[test]
    fn whose_pids_they_are() {
        let state = |of, own| pid_namespace(Some(of), Some(own)).map(|of| of.state);
        assert_eq!(state(HOST_NAMESPACE, HOST_NAMESPACE), Some(State::Ok));
        assert_eq!(state(HOST_NAMESPACE, "pid:[7]"), Some(State::Warn));
        assert_eq!(state("pid:[7]", "pid:[7]"), Some(State::Ok));
        assert_eq!(state("pid:[7]", "pid:[8]"), Some(State::Warn));
        assert!(pid_namespace(None, Some(HOST_NAMESPACE)).is_none());
        assert!(clocks(Some("5000000000"), 5_100_000_000).is_none());
        assert!(
            clocks(Some("5000000000"), 9_000_000_000).is_some_and(|of| of.text.contains("differ by 4 s"))
        );
    }

    #[test]
    fn a_port_that_is_taken_is_told() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let stranger = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a caller");
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nhello");
        });
        let report = port(address).expect("taken");
        assert!(report.text.contains("another program") && report.state == State::Warn, "{report:?}");
        stranger.join().expect("it ends");
        assert!(port(address).is_none(), "free again");
    }
}
