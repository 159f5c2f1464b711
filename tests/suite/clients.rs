//! The agent with other clients of CUPTI: blocking by name, retries, pauses, and lost subscriptions. Each program contains a
//! second client (tests/fake-gpu/client.c). The simulated CUPTI counts violations that would crash a real one.
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Daemon, Machine, until};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const MIB: i64 = 1 << 20;

/// A machine with a daemon.
struct Node {
    machine: Machine,
    daemon: Daemon,
}

impl Node {
    fn new(keys: &[&str]) -> Self {
        let machine = Machine::new(&[&["devices=1"], keys].concat());
        let daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.2\nlist_budget = 1.0\n");
        Node { machine, daemon }
    }

    fn program(&self, environment: &[(&str, &str)]) -> Program {
        let mut command = self.machine.command(programs().fake.join("bin/client"));
        command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
        command.env("GPUMEM_SOCKET", self.daemon.runtime.join("agent.sock"));
        command.envs(environment.iter().copied());
        Program::start(command)
    }

    fn ask(&self, arguments: &[&str]) -> String {
        let output = self.daemon.ctl(&self.machine, arguments).output().expect("gpumemctl runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Doctor's text on a process, in one line.
    fn doctor(&self, program: &Program) -> String {
        let text = self.ask(&["doctor", &program.pid().to_string()]);
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn until_doctor_says(&self, program: &Program, words: &str) -> String {
        let what = format!("{words:?} from doctor");
        until(40, &what, || Some(self.doctor(program)).filter(|text| text.contains(words)))
    }

    fn report(&self, program: &Program) -> Value {
        let text = self.ask(&["report", &program.pid().to_string(), "--json"]);
        serde_json::from_str(&text).unwrap_or(Value::Null)
    }

    /// Waits until the report's coverage has this state.
    fn until_coverage(&self, program: &Program, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        until(40, what, || Some(self.report(program)).filter(|report| is_so(&report["coverage"])))
    }

    fn until_covered(&self, program: &Program, windows: u64) -> Value {
        self.until_coverage(program, "covered", |coverage| {
            coverage["covered"] == true
                && coverage["blocked_by"].is_null()
                && coverage["blind_count"] == windows
                && coverage["allocations"].as_u64() > Some(0)
        })
    }

    fn until_tracked(&self, program: &Program, mib: i64) {
        let what = format!("{mib} MiB tracked");
        until(20, &what, || (tracked(&self.report(program)) == mib * MIB).then_some(()));
    }

    fn shown(&self, key: &str) -> u64 {
        let text = self.machine.tool("show", &[]);
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{key}="))?.parse().ok());
        line.unwrap_or_else(|| panic!("no {key} in {text}"))
    }

    /// Waits until the agent has verified its callbacks. From then on it notices a loss.
    fn until_the_agent_has_looked(&self) {
        let before = self.shown("device_counts");
        until(20, "two looks of the agent", || (self.shown("device_counts") > before + 1).then_some(()));
    }
}

/// A program that takes commands.
struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Program { child, input, output }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn say(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").expect("it listens");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it answers");
        line.trim_end().to_owned()
    }

    fn does(&mut self, command: &str, answer: &str) {
        assert_eq!(self.say(command), answer, "{command}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tracked(report: &Value) -> i64 {
    report["devices"][0]["last"]["tracked_bytes"].as_i64().unwrap_or(-1)
}

#[test]
fn pause_for_another_client_and_resume() {
    let node = Node::new(&["cuda.version=13000"]);
    let mut program = node.program(&[("CLIENT_CUPTI", "libcupti.so.13")]);
    program.does("init 0", "init 0");
    program.say("alloc a 100");
    node.until_covered(&program, 0);
    program.does("subscribe nsys", "subscribe 39 gpumemd");

    program.does("pause", "pause");
    program.does("subscribe nsys", "subscribe 0");
    program.say("alloc b 10");
    program.does("seen", "seen 2");
    program.does("free a", "free 0");
    let text = node.until_doctor_says(&program, "paused by the program");
    assert!(text.contains("gpumem_resume() ends it"), "{text}");

    // The other client still exists: its name is reported, and the agent retries.
    program.does("resume", "resume");
    let text = node.until_doctor_says(&program, "nsys has held the CUPTI subscription (code 39) for");
    assert!(text.contains("with gpumem.paused():") && text.contains("KINETO_USE_DAEMON=1"), "{text}");
    program.does("step s 1", "step");
    program.does("unsubscribe", "unsubscribe 0");
    let report = node.until_covered(&program, 2);
    // It was blind and its reports arrive: its connection to the daemon is fine.
    let text = node.until_doctor_says(&program, "the agent was blind for");
    assert!(text.contains("covered, ") && !text.contains("no report arrives"), "{text}");
    assert!(!text.contains("gpumemd has run for"), "{text}");
    let coverage = &report["coverage"];
    assert_eq!((&coverage["blind_doubt"], &coverage["partial_state"]), (&true.into(), &true.into()));
    assert_eq!((&coverage["late"], &coverage["steps"]), (&false.into(), &1.into()), "tags and steps go on");
    assert_eq!(coverage["blind"][0]["why"], "paused by the program");
    assert_eq!(coverage["blind"][1]["why"], "nsys held CUPTI");
    assert_eq!(coverage["blind"][0]["to_ns"], coverage["blind"][1]["from_ns"]);

    // The address of `a` is allocated again, so its free was missed. `b` is missing.
    program.say("alloc c 5");
    node.until_tracked(&program, 5);
    let text = node.ask(&["report", "--verbose", &program.pid().to_string()]);
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        flat.contains("in 2 intervals, the longest ") && flat.contains("PARTIAL: sums and peak"),
        "{text}"
    );
    let text = node.until_doctor_says(&program, "the agent was blind for ");
    assert!(text.contains(" in 2 intervals: allocations and frees"), "{text}");
    // Pauses nest.
    program.say("pause");
    program.say("pause");
    program.say("resume");
    program.does("subscribe prof", "subscribe 0");
    program.does("unsubscribe", "unsubscribe 0");
    program.say("resume");
    program.does("subscribe prof", "subscribe 39 gpumemd");
    assert_eq!(node.shown("violations"), 0);
}

#[test]
fn pause_before_cuda_is_initialised() {
    let node = Node::new(&[]);
    let mut program = node.program(&[]);
    program.does("pause", "pause");
    program.does("init", "init 0");
    program.does("subscribe", "subscribe 0");
    program.does("unsubscribe", "unsubscribe 0");
    program.does("resume", "resume");
    program.say("alloc a 7");
    let report = node.until_covered(&program, 1);
    let coverage = &report["coverage"];
    assert_eq!((&coverage["late"], &coverage["blind_doubt"]), (&true.into(), &false.into()), "{coverage}");
    node.until_tracked(&program, 7);
}

#[test]
fn cupti_finalised_by_another_client_is_reported() {
    let node = Node::new(&[]);
    let mut program = node.program(&[("GPUMEM_SIM_CUPTI", "finalize:100")]);
    program.does("init", "init 0");
    program.say("alloc a 100");
    node.until_covered(&program, 0);
    node.until_the_agent_has_looked();
    program.does("finalize", "finalize 0");
    program.say("alloc b 10");
    let text = node.until_doctor_says(&program, "CUPTI was finalized by another client");
    assert!(text.contains("TEARDOWN_CUPTI=1"), "{text}");
    let report = node.until_covered(&program, 1);
    assert_eq!(report["coverage"]["blind"][0]["why"], "CUPTI was finalized by another client");
    program.say("alloc c 1");
    node.until_tracked(&program, 101);
    // Once more, and a pause before the agent could notice: the dead handle is left alone.
    node.until_the_agent_has_looked();
    program.does("finalize", "finalize 0");
    program.does("pause", "pause");
    program.does("subscribe", "subscribe 0");
    program.does("unsubscribe", "unsubscribe 0");
    program.does("resume", "resume");
    node.until_covered(&program, 2);
    assert_eq!(node.shown("violations"), 0, "a call into a CUPTI that is being finalized, or a dead handle");
}

#[test]
fn fatal_cupti_error_is_reported() {
    let node = Node::new(&[]);
    let mut program = node.program(&[]);
    program.does("init", "init 0");
    program.say("alloc a 100");
    node.until_covered(&program, 0);
    node.machine.set(&["cupti.fatal=1"]);
    let report = node.until_covered(&program, 1);
    let window = &report["coverage"]["blind"][0];
    assert_eq!(window["why"], "CUPTI stopped after a fatal error of its own");
    program.say("alloc b 10");
    node.until_tracked(&program, 110);
    assert_eq!(node.shown("violations"), 0);
}

#[test]
fn each_cupti_refusal_is_reported_and_retried() {
    let node = Node::new(&["cuda.version=13000"]);
    let cupti = programs().fake.join("lib/libcupti.so.13");
    let cupti = cupti.to_string_lossy();
    // Each attempt makes two calls, the new one and the old one, unless the first result names a holder.
    let table = [
        (39, 3, "profiler-7 has held the CUPTI subscription (code 39) for", "end the other profiler"),
        (2, 6, "this libcupti does not know this GPU: install a newer one", "install a newer"),
        (15, 6, "libcupti and the driver are incompatible, or there is no GPU", "not newer than the driver"),
        (23, 6, "another profiler has disabled CUPTI", "end the other profiler"),
        (35, 6, "no permission to use CUPTI", "NVreg_RestrictProfilingToAdminUsers=0"),
        (41, 6, "tracing is not allowed under confidential computing", "remain"),
        (43, 6, "CUPTI is not supported on this MIG instance", "until then, only used bytes"),
        (45, 6, "CUPTI is not supported on this WSL", "until then, only used bytes"),
        (47, 6, "hardware event tracing and MPS exclude each other", "under MPS"),
        (999, 6, "CUPTI failed (also if there is no driver)", "not newer than the driver"),
    ];
    let programs: Vec<_> = table
        .iter()
        .map(|(code, times, ..)| {
            let refuse = format!("subscribe:{code}x{times},old:profiler-7");
            let mut program = node.program(&[("GPUMEM_SIM_CUPTI", &refuse), ("GPUMEM_CUPTI_PATH", &cupti)]);
            program.does("init", "init 0");
            program
        })
        .collect();
    for ((code, _, reported, remedy), program) in table.iter().zip(&programs) {
        let text = node.until_doctor_says(program, reported);
        assert!(text.contains(remedy), "{code}: {text}");
        assert!(text.contains(&format!("(code {code})")), "{code}: {text}");
        assert!(!text.contains("it has no agent"), "{code}: {text}");
    }
    for ((code, ..), mut program) in table.into_iter().zip(programs) {
        node.until_coverage(&program, &format!("{code} over"), |coverage| {
            coverage["blind_count"] == 1 && coverage["blocked_by"].is_null()
        });
        program.say("alloc a 3");
        let report = node.until_covered(&program, 1);
        assert_eq!(report["coverage"]["late"], true, "{code}");
        node.until_tracked(&program, 3);
        let why = report["coverage"]["blind"][0]["why"].as_str().unwrap_or_default().to_owned();
        assert!(if code == 39 { why == "profiler-7 held CUPTI" } else { why.contains("libcupti.so.13") });
    }
}

#[test]
fn incompatible_libcupti_is_replaced_by_the_next() {
    let node = Node::new(&["cuda.version=12080"]);
    // The one that is loaded already is too new for the driver.
    let mut program = node.program(&[("CLIENT_CUPTI", "libcupti.so.13")]);
    program.does("init", "init 0");
    program.say("alloc a 3");
    assert_eq!(node.until_covered(&program, 0)["coverage"]["late"], false);
    // It is the only one that the agent may use.
    let cupti = programs().fake.join("lib/libcupti.so.13");
    let mut alone = node.program(&[("GPUMEM_CUPTI_PATH", &cupti.to_string_lossy())]);
    alone.does("init", "init 0");
    let text = node.until_doctor_says(&alone, "(code 999)");
    assert!(text.contains("libcupti.so.13") && text.contains("not newer than the driver"), "{text}");
    // No library.
    let mut without = node.program(&[("GPUMEM_CUPTI_PATH", "/nonexistent/libcupti.so.12")]);
    without.does("init", "init 0");
    let text = node.until_doctor_says(&without, "no libcupti was found");
    assert!(text.contains("install nvidia-cuda-cupti"), "{text}");
    // A library that accepts the subscription and delivers no callbacks.
    let mut deaf = node.program(&[("GPUMEM_SIM_CUPTI", "enable:35")]);
    deaf.does("init", "init 0");
    node.until_doctor_says(&deaf, "no permission to use CUPTI; it delivers no allocations");
    deaf.does("subscribe prof", "subscribe 0");
}

#[test]
fn several_clients_where_cupti_can() {
    let node = Node::new(&["cuda.version=13000"]);
    let with = |words: &'static str| [("CLIENT_CUPTI", "libcupti.so.13"), ("GPUMEM_SIM_CUPTI", words)];
    let mut program = node.program(&with("version:130301,multi:1"));
    program.does("init", "init 0");
    program.does("join prof", "subscribe 0");
    program.say("alloc a 3");
    program.does("seen", "seen 2");
    node.until_covered(&program, 0);
    node.until_tracked(&program, 3);
    // Where the driver is too old for it, and where the library is one with a fault in that mode: one client.
    for words in ["version:130301", "version:130202,multi:1", "version:130001"] {
        let mut program = node.program(&with(words));
        program.does("init", "init 0");
        program.does("subscribe prof", "subscribe 39 gpumemd");
        program.say("alloc a 3");
        node.until_covered(&program, 0);
    }
}

#[test]
fn other_injection_library_runs_first() {
    let node = Node::new(&["cuda.version=13000"]);
    let counter = programs().fake.join("bin/counter.so");
    let counter = counter.to_string_lossy();
    let calls = node.machine.dir.join("calls");
    let path = calls.to_string_lossy().into_owned();
    // The tool is called once, and its result does not affect the agent's.
    for (returns, so_far) in [("1", "*"), ("0", "**")] {
        let mut program = node.program(&[
            ("GPUMEM_NEXT_INJECTION64_PATH", &counter),
            ("COUNTER_OUT", &path),
            ("COUNTER_RETURN", returns),
        ]);
        program.does("init", "init 0");
        program.does("init", "init 0");
        assert_eq!(std::fs::read_to_string(&calls).expect("calls"), so_far);
        program.say("alloc a 3");
        node.until_covered(&program, 0);
    }
    // An absent tool, and a library that is not a tool.
    for path in ["/nonexistent.so", "libcuda.so.1"] {
        let mut program = node.program(&[("GPUMEM_NEXT_INJECTION64_PATH", path)]);
        program.does("init", "init 0");
        program.say("alloc a 3");
        node.until_covered(&program, 0);
    }
    // A tool that takes the subscription.
    let mut program = node.program(&[
        ("GPUMEM_NEXT_INJECTION64_PATH", &counter),
        ("COUNTER_SUBSCRIBE", "chained-tool"),
        ("CLIENT_CUPTI", "libcupti.so.13"),
    ]);
    program.does("init", "init 0");
    program.does("available", "available 1");
    node.until_doctor_says(&program, "chained-tool has held the CUPTI subscription (code 39) for");
}
