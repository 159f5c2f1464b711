//! `gpumemctl mcp` as a client of the Model Context Protocol uses it: one JSON document in each line, over pipes.
use gpumem_tests::hostile::{self, WORDS};
use gpumem_tests::live::{Daemon, Job, Machine, until};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
const TOOLS: [&str; 7] = ["processes", "runs", "report", "why", "oom", "whatif", "diff"];

/// A client with its server; the server is killed on drop.
struct Client {
    server: Child,
    answers: BufReader<ChildStdout>,
    last_id: u64,
}

/// Answer to a call: its texts, and whether it is an error.
struct Answer {
    texts: Vec<String>,
    is_error: bool,
}

impl Answer {
    fn document(&self) -> Value {
        assert!(!self.is_error, "{:?}", self.texts);
        serde_json::from_str(&self.texts[0]).unwrap_or_else(|error| panic!("{error}: {:?}", self.texts))
    }

    fn error(&self) -> &str {
        assert!(self.is_error && self.texts.len() == 1, "{:?}", self.texts);
        &self.texts[0]
    }
}

impl Client {
    /// Starts a server and initializes the protocol.
    fn start(command: &mut Command) -> Self {
        let mut server =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gpumemctl runs");
        let answers = BufReader::new(server.stdout.take().expect("piped"));
        let mut client = Client { server, answers, last_id: 0 };
        let parameters = json!({
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": { "name": "test", "version": "1" }
        });
        let result = client.ask("initialize", parameters);
        assert_eq!(result["serverInfo"]["name"], "gpumem-mcp", "{result}");
        assert!(result["instructions"].as_str().is_some_and(|text| text.contains("never as instructions")));
        client.send(b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}\n");
        client
    }

    /// Starts a server for a folder with its own store and without a daemon.
    fn of_folder(machine: &Machine) -> Self {
        let mut command = machine.command(gpumem_tests::live::programs::programs().ours.join("gpumemctl"));
        command.arg("mcp").current_dir(&machine.dir).env("GPUMEM_CONTROL", "/nonexistent/control.sock");
        Client::start(command.env("GPUMEM_STORE", machine.dir.join("runs.sqlite")))
    }

    fn send(&mut self, bytes: &[u8]) {
        let stdin = self.server.stdin.as_mut().expect("piped");
        stdin.write_all(bytes).and_then(|()| stdin.flush()).expect("it reads");
    }

    fn receive(&mut self) -> Value {
        let mut line = Vec::new();
        self.answers.read_until(b'\n', &mut line).expect("an answer");
        let is_plain = line.iter().all(|byte| *byte >= b' ' || *byte == b'\n');
        let answer: Value = serde_json::from_slice(&line).expect("JSON");
        assert!(is_plain && answer["jsonrpc"] == "2.0", "{answer}");
        answer
    }

    /// Returns the result of a request.
    fn ask(&mut self, method: &str, parameters: Value) -> Value {
        self.last_id += 1;
        let request = json!({ "jsonrpc": "2.0", "id": self.last_id, "method": method, "params": parameters });
        self.send(format!("{request}\n").as_bytes());
        let mut answer = self.receive();
        assert_eq!(answer["id"], self.last_id, "{answer}");
        answer["result"].take()
    }

    fn call(&mut self, name: &str, arguments: Value) -> Answer {
        let result = self.ask("tools/call", json!({ "name": name, "arguments": arguments }));
        let texts = result["content"].as_array().expect("content").iter().map(|content| {
            assert_eq!(content["type"], "text", "{result}");
            content["text"].as_str().expect("text").to_owned()
        });
        Answer { texts: texts.collect(), is_error: result["isError"] == true }
    }

    /// Ends standard input. The server must end without printing anything else.
    fn end(mut self) {
        drop(self.server.stdin.take());
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut self.answers, &mut rest).expect("text");
        assert!(self.server.wait().expect("it ends").success() && rest.is_empty(), "{rest}");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Writes a snapshot of PyTorch with the requests that `torch.cuda.memory._record_memory_history` keeps.
fn write_snapshot(file: &Path) {
    let script = "
import pickle, sys
base = 0x7f0000000000
def event(action, addr, size, at): return {'action': action, 'addr': addr, 'size': size, 'stream': 0, 'time_us': at, 'frames': []}
trace = [event('segment_alloc', base, 20 << 20, 1), event('alloc', base, 4 << 20, 2), event('free_requested', base, 4 << 20, 3),
    event('free_completed', base, 4 << 20, 3), event('alloc', base, 8 << 20, 4)]
blocks = [{'address': base, 'size': 8 << 20, 'requested_size': 8 << 20, 'state': 'active_allocated', 'frames': []},
    {'address': base + (8 << 20), 'size': 12 << 20, 'requested_size': 0, 'state': 'inactive', 'frames': []}]
segment = {'device': 0, 'address': base, 'total_size': 20 << 20, 'stream': 0, 'segment_type': 'large', 'allocated_size': 8 << 20,
    'active_size': 8 << 20, 'requested_size': 8 << 20, 'is_expandable': False, 'segment_pool_id': (0, 0), 'frames': [], 'blocks': blocks}
settings = {'PYTORCH_CUDA_ALLOC_CONF': '', 'max_split_size': -1, 'garbage_collection_threshold': 0.0, 'expandable_segments': False}
pickle.dump({'segments': [segment], 'device_traces': [trace], 'allocator_settings': settings}, open(sys.argv[1], 'wb'))";
    assert!(Command::new("python3").args(["-c", script]).arg(file).status().expect("python3").success());
}

#[test]
fn every_tool_answers_as_its_command_does() {
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let store = machine.dir.join("runs.sqlite");
    let mut command = daemon.ctl(&machine, &["mcp"]);
    let mut client = Client::start(command.env("GPUMEM_STORE", &store).current_dir(&machine.dir));
    let tools = client.ask("tools/list", json!({}));
    let tools = tools["tools"].as_array().expect("tools");
    let names: Vec<&str> = tools.iter().filter_map(|tool| tool["name"].as_str()).collect();
    assert_eq!(names, TOOLS);
    for tool in tools {
        let schema = &tool["inputSchema"];
        assert_eq!((&schema["type"], &schema["additionalProperties"]), (&"object".into(), &false.into()));
        let arguments = schema["properties"].as_object().expect("arguments");
        assert!(arguments.values().all(|each| each["type"].is_string() && each["description"].is_string()));
        let required = schema["required"].as_array().expect("a list");
        assert!(required.iter().all(|name| arguments.contains_key(name.as_str().expect("a name"))), "{tool}");
        assert!(tool["annotations"]["readOnlyHint"] == true, "{tool}");
        assert!(tool["description"].as_str().is_some_and(|text| text.contains("never as instructions")));
    }

    let mut trainer =
        Job::start(&mut machine.trainer(&daemon.runtime, &["--steps", "1000000", "--step-ms", "20"]));
    trainer.wait_for("ready");
    let pid = trainer.pid();
    until(20, "the process", || {
        let answer = client.call("processes", json!({})).document();
        let rows = answer["processes"].as_array().expect("rows");
        rows.iter().any(|row| row["pid"] == pid && row["tracked_bytes"].as_i64() > Some(0)).then_some(())
    });
    assert_eq!(client.call("report", json!({ "run": pid })).document()["process"]["pid"], pid);
    assert!(client.call("why", json!({ "run": pid.to_string() })).document()["advice"].is_array());
    trainer.enough();
    daemon.wait_for_the_end_of(&machine, &[&trainer]);

    let snapshot = machine.dir.join("snapshot.pickle");
    write_snapshot(&snapshot);
    let recording = daemon.recording.to_str().expect("UTF-8");
    for (name, arguments, line) in [
        ("runs", json!({ "limit": 5 }), &["runs", "--limit", "5"][..]),
        ("report", json!({ "run": "r1" }), &["report", "r1"]),
        (
            "report",
            json!({ "run": "r1", "iterations": true, "every": 1000 }),
            &["report", "r1", "--iterations", "--every", "1000"],
        ),
        ("why", json!({ "run": "r1" }), &["why", "r1"]),
        (
            "report",
            json!({ "run": recording, "pid": pid }),
            &["report", recording, "--pid", &pid.to_string()],
        ),
        (
            "whatif",
            json!({ "run": "./snapshot.pickle", "set": ["expandable_segments=True"] }),
            &["whatif", "./snapshot.pickle", "--set", "expandable_segments=True"],
        ),
        ("diff", json!({ "a": "r1", "b": recording }), &["diff", "r1", recording]),
    ] {
        let answer = client.call(name, arguments);
        let mut command = daemon.ctl(&machine, line);
        command.arg("--json").env("GPUMEM_STORE", &store).current_dir(&machine.dir);
        let printed = command.output().expect("gpumemctl runs");
        let printed = String::from_utf8(printed.stdout).expect("UTF-8");
        match answer.texts.get(1).filter(|note| note.contains("is shortened")) {
            Some(note) => assert!(printed.len() > 40_000 && answer.texts[0].len() <= 40_000, "{note}"),
            None => assert_eq!((&answer.texts[0], answer.is_error), (&printed, false), "{line:?}"),
        }
        answer.document();
    }
    assert!(client.call("oom", json!({ "run": "r1" })).texts[0].len() > 10);
    client.end();
}

#[test]
fn wrong_calls_are_errors_with_a_next_step() {
    let machine = Machine::new(&["devices=1"]);
    let mut client = Client::of_folder(&machine);
    for (name, arguments, expected) in [
        ("report", json!({ "run": "r999" }), "gpumemctl"),
        ("report", json!({ "run": "./absent.gpumem" }), "absent.gpumem"),
        ("processes", json!({}), "no daemon answers"),
        ("why", json!({ "file": "r1" }), "it has: run, pid, device"),
        ("diff", json!({ "a": "r1" }), "diff needs the argument b"),
        ("whatif", json!({ "run": "r1", "set": ["nonsense"] }), "--set"),
        ("whatif", json!({ "run": "r1", "device_memory_bytes": 0 }), "--device-memory"),
        ("report", json!({ "run": ["r1"] }), "the argument run is text"),
        ("report", json!({ "run": "x\u{0}y" }), "the argument run is text"),
        ("reports", json!({}), "the tools: processes, runs, report"),
    ] {
        let answer = client.call(name, arguments);
        assert!(answer.error().contains(expected), "{name}: {}", answer.error());
    }
    // An option as a name is a name.
    let answer = client.call("report", json!({ "run": "--output=written" }));
    assert!(answer.is_error && !machine.dir.join("written").exists(), "{:?}", answer.texts);

    // Lines that are not a message are ignored, or refused without an id.
    client.send(&[&vec![b'x'; 1 << 20][..], b"\n\xff\xfe\n\n{\"jsonrpc\":\n"].concat());
    assert!(client.call("processes", json!({})).error().contains("no daemon answers"));
    client.send(b"[]\n");
    assert_eq!(client.receive()["error"]["code"], -32600);
    client.call("report", json!({ "run": "y".repeat(1 << 20) })).error();
    for answer in
        [client.call(&"y".repeat(1 << 20), json!({})), client.call("runs", json!({ "y".repeat(1 << 20): 1 }))]
    {
        assert!(answer.error().len() < 1000, "{} bytes", answer.error().len());
    }
    assert!(client.call("processes", json!({})).error().contains("no daemon answers"));
    client.end();
}

#[test]
fn names_stay_inside_the_texts_of_an_answer() {
    let machine = Machine::new(&["devices=1"]);
    let file = machine.dir.join("hostile.gpumem-run");
    std::fs::write(&file, hostile::exported(&hostile::run(), "one")).expect("written");
    let mut client = Client::of_folder(&machine);
    let path = "./hostile.gpumem-run";
    for (name, arguments) in [
        ("report", json!({ "run": path })),
        ("why", json!({ "run": path })),
        ("diff", json!({ "a": path, "b": path })),
    ] {
        let answer = client.call(name, arguments);
        answer.document();
        answer.texts.iter().for_each(|text| {
            hostile::lines(name, text.as_bytes());
        });
    }
    for word in WORDS {
        for answer in [client.call("runs", json!({ *word: 1 })), client.call(word, json!({}))] {
            hostile::lines(word, answer.error().as_bytes());
        }
    }
    // gpumemctl escapes the names in its own errors.
    for word in ["line\nfeed", "\u{1b}[2J", "\u{202e}left"] {
        hostile::lines(word, client.call("report", json!({ "run": word })).error().as_bytes());
    }
    client.end();
}

#[test]
fn server_ends_with_its_input() {
    let program = gpumem_tests::live::programs::programs().ours.join("gpumem-mcp");
    for input in [
        &b""[..],
        b"garbage",
        &vec![b'x'; 1 << 20],
        b"\xff\n[]\n",
        b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/list\"}\n",
    ] {
        let mut server =
            Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
        server.stdin.take().expect("piped").write_all(input).expect("it reads");
        let output = server.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let lines = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(lines.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{lines}");
    }
    let refused = Command::new(&program).arg("--port").output().expect("it runs");
    assert_eq!((refused.status.code(), refused.stdout.is_empty()), (Some(2), true));
}
