//! Cost of a block event of PyTorch in instructions and cache misses. callgrind counts them in simulated caches, so that a small
//! change of the agent's hooks is visible on a busy machine too. It measures the step of `bench torch`, which mostly waits for
//! code that is not in the first cache: PyTorch must fetch again what our code evicts.

use crate::live::torch::{Wheel, machine, versions, wheel};
use crate::live::{Daemon, until};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::ops::{AddAssign, Sub};
use std::path::Path;
use std::process::{Command, Stdio};

/// Steps that are counted; as many run before them.
const STEPS: usize = 8;
/// First-level caches, and the second level as the last simulated one, with the sizes of a server's core.
const CACHES: [&str; 3] = ["--I1=32768,8,64", "--D1=49152,12,64", "--LL=2097152,16,64"];

/// Instructions, and first-level misses of code and of data.
#[derive(Debug, Clone, Copy, Default)]
struct Cost([f64; 3]);

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, more)| *sum += more);
    }
}

impl Sub for Cost {
    type Output = Cost;
    fn sub(self, other: Cost) -> Cost {
        Cost(std::array::from_fn(|at| self.0[at] - other.0[at]))
    }
}

/// Owner of code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Whose {
    /// The agent's, on threads of the program.
    Ours,
    /// PyTorch's code.
    Torch,
    /// The interpreter's, the C library's, and the agent's thread. callgrind is fifty times slower than the processor, so events
    /// driven by the clock are fifty times as frequent.
    Others,
}

/// Parses callgrind's output. A line of costs belongs to the function and object named last, except after a line that begins with
/// `calls`.
fn costs(written: &str) -> HashMap<Whose, Cost> {
    let (mut objects, mut functions) = (HashMap::new(), HashMap::new());
    let (mut object, mut function, mut is_call) = (String::new(), String::new(), false);
    let mut sums = HashMap::new();
    let named = |names: &mut HashMap<String, String>, value: &str| {
        let (number, name) =
            value.split_once(' ').map_or((value, None), |(number, name)| (number, Some(name)));
        if let Some(name) = name {
            names.insert(number.to_owned(), name.to_owned());
        }
        names.get(number).cloned().unwrap_or_default()
    };
    for line in written.lines() {
        if let Some((word, value)) = line.split_once('=') {
            match word {
                "ob" => object = named(&mut objects, value),
                "fn" => function = named(&mut functions, value),
                "cob" => drop(named(&mut objects, value)),
                "cfn" => drop(named(&mut functions, value)),
                "calls" => is_call = true,
                _ => {}
            }
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            if std::mem::take(&mut is_call) {
                continue;
            }
            // Line of the source, then Ir Dr Dw I1mr D1mr D1mw; trailing zeros are omitted.
            let numbers: Vec<f64> = line.split(' ').skip(1).filter_map(|word| word.parse().ok()).collect();
            let of = |at: usize| numbers.get(at).copied().unwrap_or(0.0);
            let whose = match () {
                () if object.contains("libgpumem") && !function.contains("::sender::") => Whose::Ours,
                () if object.contains("torch") || object.contains("libc10") => Whose::Torch,
                () => Whose::Others,
            };
            *sums.entry(whose).or_default() += Cost([of(0), of(3), of(4) + of(5)]);
        }
    }
    sums
}

/// Runs the program under callgrind. Returns the cost of its steps, and the events of a step.
fn counted(command: &Command, dir: &Path) -> (HashMap<Whose, Cost>, f64) {
    std::fs::create_dir_all(dir).expect("a folder");
    let out = dir.join("out");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["-q", "--tool=callgrind", "--instr-atstart=no", "--cache-sim=yes"]).args(CACHES);
    valgrind.arg(format!("--callgrind-out-file={}", out.display()));
    valgrind.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => valgrind.env(name, value),
            None => valgrind.env_remove(name),
        };
    }
    // valgrind warns about caches of this machine that are not simulated.
    valgrind.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = valgrind.spawn().expect("valgrind");
    let mut stdin = child.stdin.take().expect("piped");
    let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
    let mut hear = || loop {
        let mut line = String::new();
        assert!(stdout.read_line(&mut line).expect("read") > 0, "it ended");
        if let Ok(said) = serde_json::from_str::<serde_json::Value>(&line) {
            return said;
        }
    };
    let events = hear()["events"].as_f64().expect("events");
    let control = |what: &[&str]| {
        let mut control = Command::new("callgrind_control");
        let done = control
            .args(what)
            .arg(child.id().to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        assert!(done.is_ok_and(|status| status.success()), "callgrind_control {what:?}");
    };
    let mut steps = || {
        stdin.write_all(format!("step {STEPS}\n").as_bytes()).expect("written");
        hear();
    };
    steps();
    control(&["-i", "on"]);
    steps();
    control(&["-d"]);
    let dump = dir.join("out.1");
    let written = until(60, "callgrind's dump", || {
        let written = std::fs::read_to_string(&dump).unwrap_or_default();
        written.contains("\ntotals:").then_some(written)
    });
    let _ = child.kill();
    let _ = child.wait();
    (costs(&written), events)
}

fn of_wheel(wheel: &Wheel) {
    let machine = machine(&[]);
    let daemon = Daemon::start(&machine, "daemon", "");
    let package =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("agent-lib/python");
    let mut covered = wheel.covered(&machine, &daemon.runtime, "paces.py", &[]);
    let (without, _) = counted(&wheel.bare(&machine, "paces.py", &[]), &machine.dir.join("without"));
    let (with, events) = counted(covered.env("PYTHONPATH", package), &machine.dir.join("with"));
    let of = |costs: &HashMap<Whose, Cost>, whose| costs.get(&whose).copied().unwrap_or_default();
    println!("torch {}: a step with {events} block events; for each event", wheel.version);
    println!("{:<36} {:>13} {:>13} {:>13}", "", "instructions", "code missed", "data missed");
    let all = [Whose::Torch, Whose::Others].into_iter().fold(Cost::default(), |mut sum, whose| {
        sum += of(&without, whose);
        sum
    });
    let more = of(&with, Whose::Torch) - of(&without, Whose::Torch);
    for (name, cost) in [
        ("the step without us", all),
        ("our code in it", of(&with, Whose::Ours)),
        ("PyTorch's own, more", more),
    ] {
        let [instructions, code, data] = cost.0.map(|sum| sum / STEPS as f64 / events);
        println!("{name:<36} {instructions:>13.0} {code:>13.1} {data:>13.1}");
    }
    println!();
}

pub(super) fn run() {
    if !Command::new("valgrind")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
    {
        println!("valgrind is not here\n");
        return;
    }
    for version in versions() {
        match wheel(&version) {
            Some(wheel) => of_wheel(&wheel),
            None => println!("torch {version} cannot be had\n"),
        }
    }
}
