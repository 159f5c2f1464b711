//! What a sick GPU does to the numbers of the others, and to whoever scrapes them.
#![allow(missing_docs)]

use gpumem_tests::live::prometheus::{free_address, get};
use gpumem_tests::live::{Daemon, Job, Machine, until};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The samples of a family: labels as they are written, and value.
fn family(text: &str, name: &str) -> Vec<(String, f64)> {
    let line = |line: &str| {
        let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} ")?;
        Some((labels.to_owned(), value.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

fn of_gpu(text: &str, name: &str, gpu: &str) -> Option<(String, f64)> {
    family(text, name).into_iter().find(|(labels, _)| labels.contains(&format!("gpu=\"{gpu}\"")))
}

struct Node {
    machine: Machine,
    _daemon: Daemon,
    address: SocketAddr,
    jobs: Vec<Job>,
}

impl Node {
    /// Two devices, a covered process on each.
    fn new() -> Self {
        let machine = Machine::new(&["devices=2"]);
        let address = free_address();
        let config = format!(
            "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\ncall_timeout_s = 0.5\n[metrics]\nlisten = \"{address}\"\n"
        );
        let daemon = Daemon::start(&machine, "daemon", &config);
        let train = |device| {
            let arguments = ["--devices", device, "--steps", "5", "--hold", "600"];
            let mut job = Job::start(&mut machine.trainer(&daemon.runtime, &arguments));
            job.wait_for("holding");
            job
        };
        let jobs = vec![train("0"), train("1")];
        let node = Node { machine, _daemon: daemon, address, jobs };
        node.until("both processes", |text| family(text, "gpumem_process_untrackable_bytes").len() == 2);
        node
    }

    /// Scrapes until it is so; no scrape may take long.
    fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        until(30, what, || {
            let since = Instant::now();
            let text = get(self.address, "/metrics").expect("an exposition");
            let took = since.elapsed();
            assert!(took < Duration::from_millis(500), "a scrape took {took:?} while waiting for {what}");
            is_so(&text).then_some(text)
        })
    }

    /// The other device and its process are as fresh as ever.
    fn other_is_fresh(&self) {
        self.until("the other device fresh", |text| {
            let fresh = |name| of_gpu(text, name, "1").is_some_and(|(_, age)| age < 2.0);
            let pid = format!("pid=\"{}\"", self.jobs[1].pid());
            fresh("gpumem_device_sample_age_seconds")
                && fresh("gpumem_process_sample_age_seconds")
                && family(text, "gpumem_process_used_bytes").iter().any(|(labels, _)| labels.contains(&pid))
        });
    }

    /// Nothing at all is wrong.
    fn until_well(&self) {
        self.until("everything well again", |text| {
            family(text, "gpumem_process_untrackable_bytes").len() == 2
                && family(text, "gpumem_device_unavailable").is_empty()
                && family(text, "gpumem_process_used_unavailable").is_empty()
        });
    }
}

#[test]
fn sick_device_has_a_reason_and_the_other_goes_on() {
    let node = Node::new();
    // Fault, family that tells it, words of the reason.
    for (fault, told_by, words) in [
        ("lost", "gpumem_device_unavailable", "lost"),
        ("no_permission", "gpumem_process_used_unavailable", "permission"),
        ("bytes_unavailable", "gpumem_process_used_unavailable", "not available"),
        ("unknown", "gpumem_device_unavailable", ""),
        ("hang", "gpumem_device_unavailable", "return"),
    ] {
        // Permissions and missing bytes concern the lists; device memory can still be read.
        let lists_only = told_by.contains("process") || fault == "unknown";
        let key = if lists_only { "gpu0.fault_list" } else { "gpu0.fault" };
        node.machine.set(&[&format!("{key}={fault}")]);
        let pid = format!("pid=\"{}\"", node.jobs[0].pid());
        let text = node.until(&format!("{fault} told, and what is unknown absent"), |text| {
            let used = family(text, "gpumem_process_used_bytes");
            of_gpu(text, told_by, "0").is_some() && !used.iter().any(|(labels, _)| labels.contains(&pid))
        });
        let (labels, _) = of_gpu(&text, told_by, "0").expect("it was there");
        println!("{fault}: {labels}");
        let reason = labels.split("reason=\"").nth(1).unwrap_or("").replace('_', " ");
        assert!(reason.contains(words), "{fault}: {labels}");
        if lists_only {
            let memory = of_gpu(&text, "gpumem_device_used_bytes", "0");
            assert!(memory.is_some(), "{fault}: device memory is read as ever");
        }
        node.other_is_fresh();
        node.machine.set(&[&format!("{key}=none")]);
        if fault != "hang" {
            node.until_well(); // a hung device is left alone for a minute
        }
    }
}

#[test]
fn driver_that_comes_later_is_found() {
    let machine = Machine::new(&["devices=1", "nvml.driver=absent"]);
    let address = free_address();
    let _daemon = Daemon::start(&machine, "daemon", &format!("[metrics]\nlisten = \"{address}\"\n"));
    let up = || {
        let text = get(address, "/metrics").expect("an exposition");
        family(&text, "gpumemd_source_up")
            .into_iter()
            .find(|(labels, _)| labels.contains("nvml"))
            .map(|(_, up)| up)
    };
    until(10, "a source that is down", || up().filter(|up| *up == 0.0));
    machine.set(&["nvml.driver=ok"]);
    until(60, "a source that is up", || up().filter(|up| *up == 1.0));
}
