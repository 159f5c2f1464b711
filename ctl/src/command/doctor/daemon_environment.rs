//! Checks of the daemon's environment: systemd units, namespaces, the port for metrics.

use super::findings::{DoctorReport, finding};
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the host's initial PID namespace, which is fixed in the kernel.
const HOSTS: &str = "pid:[4026531836]";
/// Default address for metrics.
const PORT: ([u8; 4], u16) = ([127, 0, 0, 1], 9837);
/// Timeout for systemctl, which answers within milliseconds unless its bus hangs.
const SYSTEMCTL: Duration = Duration::from_secs(3);
/// Difference in ns from which clocks count as different. A request takes less time, and other time namespaces differ by seconds.
const CLOCKS_APART: u64 = 2_000_000_000;

pub(super) fn look(told: &DoctorReport, findings: &mut Vec<Finding>) {
    if Path::new("/run/systemd/system").exists()
        && let Some(text) = systemctl()
    {
        findings.extend(units(&text, told.daemon.is_some()));
    }
    match &told.daemon {
        Some(_) => {
            let own = |of: &str| {
                std::fs::read_link(format!("/proc/self/ns/{of}")).ok().map(|link| link.display().to_string())
            };
            findings.extend(pids(told.fact("pid namespace"), own("pid").as_deref()));
            findings.extend(clocks(told.fact("clock"), own_clock()));
        }
        None => findings.extend(port(SocketAddr::from(PORT))),
    }
}

/// Returns systemd's properties of our units, as `key=value` lines, with a blank line between units.
fn systemctl() -> Option<String> {
    const UNITS: [&str; 4] =
        ["gpumemd.service", "gpumemd-agent.socket", "gpumemd-control.socket", "gpumemd-http.socket"];
    let mut command = Command::new("systemctl");
    command.arg("show").args(UNITS).arg("--property=Id,LoadState,ActiveState,SubState,Result,NRestarts");
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

fn units(text: &str, answers: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for unit in text.split("\n\n") {
        let values: BTreeMap<&str, &str> = unit.lines().filter_map(|line| line.split_once('=')).collect();
        let value = |key: &str| values.get(key).copied().unwrap_or_default();
        let (id, state) = (value("Id"), value("ActiveState"));
        let mut say = |state, text: String, fix: Option<String>| {
            findings.push(finding(Check::DaemonUnit, state, id, text, fix.as_deref()));
        };
        let is_service = id.ends_with(".service");
        match (value("LoadState"), state) {
            ("", _) => {}
            // Not installed, as on a machine where every user has a private daemon.
            ("not-found", _) if is_service && !answers => {
                say(State::Ok, "is not installed here".into(), None)
            }
            ("not-found", _) => {}
            ("masked", _) => say(State::Warn, "is masked".into(), Some(format!("systemctl unmask {id}"))),
            (_, "active" | "reloading" | "activating") => {
                let restarts = value("NRestarts").parse::<u64>().unwrap_or(0);
                if restarts > 0 {
                    let text = format!("is {state}, and was restarted {restarts} times after a failure");
                    say(State::Warn, text, Some(format!("journalctl -u {id} -n 100")));
                } else if is_service {
                    say(State::Ok, format!("is {state} ({})", value("SubState")), None);
                }
            }
            (_, "failed") => {
                let text = format!("has failed ({})", value("Result"));
                let fix = format!("journalctl -u {id} -n 50 says why; then systemctl restart {id}");
                say(State::Bad, text, Some(fix));
            }
            // A service may be inactive until its socket activates it, but an inactive socket activates nothing.
            (_, other) if !is_service || !answers => {
                say(State::Warn, format!("is {other}"), Some(format!("systemctl enable --now {id}")));
            }
            _ => {}
        }
    }
    findings
}

/// Compares PID namespaces. `of` is the daemon's, `own` is ours.
fn pids(of: Option<&str>, own: Option<&str>) -> Option<Finding> {
    let (of, own) = (of?, own?);
    let say = |state, text: &str, fix| finding(Check::NamespacePid, state, "pids", text, fix);
    let host = "run gpumemd in the host's PID namespace (hostPID: true, --pid=host)";
    Some(match (of == HOSTS, of == own) {
        (true, true) => say(State::Ok, "gpumemd sees the whole machine", None),
        (true, false) => say(
            State::Warn,
            "gpumemd counts pids of the host, and this shell's are a container's: the numbers mean other processes",
            Some("ask on the node, or with the pids that gpumemctl ps shows"),
        ),
        (false, true) => say(
            State::Ok,
            "gpumemd sees the processes of this PID namespace, not those of the rest of the machine",
            Some(host),
        ),
        (false, false) => say(
            State::Warn,
            "gpumemd lives in another PID namespace than this shell: processes outside of it are not known to it",
            Some(host),
        ),
    })
}

fn own_clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

fn clocks(of: Option<&str>, own: u64) -> Option<Finding> {
    let apart = of?.parse::<u64>().ok()?.abs_diff(own);
    (apart > CLOCKS_APART).then(|| {
        let text = format!(
            "the clock here is {} s away from gpumemd's: another time namespace, whose agents are refused",
            apart / 1_000_000_000
        );
        let fix = "start programs in gpumemd's time namespace (no unshare --time)";
        finding(Check::NamespaceTime, State::Warn, "clock", text, Some(fix))
    })
}

/// Returns which program uses the port for metrics, if no daemon can be asked.
fn port(address: SocketAddr) -> Option<Finding> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(300)).ok()?;
    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
    let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
    let mut answer = Vec::new();
    let question = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let asked = stream.write_all(question).and_then(|()| stream.take(4096).read_to_end(&mut answer));
    let is_ours = asked.is_ok() && String::from_utf8_lossy(&answer).contains("there is /metrics");
    let say = |state, text: String, fix| finding(Check::DaemonPort, state, "metrics", text, Some(fix));
    Some(if is_ours {
        let text =
            format!("a gpumemd serves {address}, and its control socket is not to be reached from here");
        say(State::Warn, text, "ask as its user, or where it lives (another user's, another container's)")
    } else {
        let text =
            format!("another program has {address}: gpumemd does not start with its usual configuration");
        say(
            State::Warn,
            text,
            "metrics.listen = \"127.0.0.1:9838\", or \"off\"; who has it: ss -ltnp sport = :9837",
        )
    })
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
        let told = of_units(failed, false);
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].0 == State::Bad && told[0].2.contains("exit-code"), "{told:?}");
        assert!(told[1].0 == State::Warn && told[1].1 == "gpumemd-http.socket", "{told:?}");
        let restarted =
            "Id=gpumemd.service\nLoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=3";
        assert!(of_units(restarted, true)[0].2.contains("3 times"));
        let none = "Id=gpumemd.service\nLoadState=not-found\nActiveState=inactive";
        assert_eq!((of_units(none, true).len(), of_units(none, false)[0].0), (0, State::Ok));
        assert!(of_units("garbage", false).is_empty());
    }

    #[test]
    fn whose_pids_they_are() {
        let state = |of, own| pids(Some(of), Some(own)).map(|of| of.state);
        assert_eq!(state(HOSTS, HOSTS), Some(State::Ok));
        assert_eq!(state(HOSTS, "pid:[7]"), Some(State::Warn));
        assert_eq!(state("pid:[7]", "pid:[7]"), Some(State::Ok));
        assert_eq!(state("pid:[7]", "pid:[8]"), Some(State::Warn));
        assert!(pids(None, Some(HOSTS)).is_none());
        assert!(clocks(Some("5000000000"), 5_100_000_000).is_none());
        assert!(clocks(Some("5000000000"), 9_000_000_000).is_some_and(|of| of.text.contains("4 s away")));
    }

    #[test]
    fn a_port_that_is_taken_is_told() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let stranger = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a caller");
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nhello");
        });
        let told = port(address).expect("taken");
        assert!(told.text.contains("another program") && told.state == State::Warn, "{told:?}");
        stranger.join().expect("it ends");
        assert!(port(address).is_none(), "free again");
    }
}
