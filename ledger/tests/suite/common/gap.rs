//! Scripts about the gap with realistic call durations, and short forms of the ledger's results.

use super::*;
use gpumem_ledger::UntrackableParts;
use gpumem_model::run::UntrackableChange;
use gpumem_wire::*;

pub const MS: u64 = 1_000_000;
/// 132 multiprocessors of 2048 threads: 264 MiB for 1 KiB of stack.
pub const H100: u32 = 132 << 16 | 2048;

/// A process that sends records at times in ms.
pub struct Gap(pub Script);

impl Gap {
    pub fn new() -> Self {
        let mut s = Script::new();
        s.push(Stamp { device: 0, context: H100, ..Stamp::default() }, device(9));
        s.stamp.module = 3;
        s.push(
            Stamp { module: 3, ..Stamp::default() },
            Body::Module { base: 0, bytes: 0, path: "/usr/lib/libcudart.so" },
        );
        Gap(s)
    }
    pub fn say(&mut self, ms: u64, tag: &str, context: u32, body: Body<'_>) {
        self.0.at(ms * MS - 10).stamp.context = context;
        if !tag.is_empty() {
            self.0.tag(tag);
        }
        self.0.say(body);
    }
    pub fn event(
        &mut self,
        ms: u64,
        tag: &str,
        context: u32,
        event: DriverEventKind,
        bytes: u64,
        value: u64,
    ) {
        self.say(ms, tag, context, Body::DriverEvent { bytes, value, event });
    }
    pub fn creating(&mut self, ms: u64) {
        self.event(ms, "", 0, DriverEventKind::ContextCreating, 0, 0);
    }
    pub fn context(&mut self, ms: u64, tag: &str, context: u32) {
        self.say(ms, tag, context, Body::ContextCreate { handle: context.into() });
        self.event(ms, tag, context, DriverEventKind::ContextCreated, 0, context.into());
    }
    pub fn end(&mut self, ms: u64, context: u32, scope: DestroyScope) {
        self.say(ms, "", context, Body::ContextDestroy { scope });
    }
    /// Loads module `id` of `mib` MiB.
    pub fn load(&mut self, ms: u64, tag: &str, id: u64, mib: u64) {
        self.event(ms, tag, 1, DriverEventKind::ModuleLoaded, mib * MIB, id);
    }
    pub fn unload(&mut self, ms: u64, id: u64) {
        self.event(ms, "", 1, DriverEventKind::ModuleUnloaded, 0, id);
    }
    pub fn stack(&mut self, ms: u64, tag: &str, limit: u64) {
        self.event(ms, tag, 1, DriverEventKind::StackLimit, 0, limit);
    }
    pub fn alloc(&mut self, ms: u64, address: u64, bytes: u64) {
        self.0.at(ms * MS - 10).alloc(address, bytes);
    }
    /// A reading of 0.1 ms in which NVML charges `mib` MiB to the process.
    pub fn used(&mut self, ms: u64, mib: u64) {
        self.0.sample(ms * MS, ms * MS + MS / 10, mib * MIB);
        self.0.at((ms + 1) * MS).watermark(0);
    }
}

/// Formats bytes in MiB if they are a whole number of MiB.
pub fn amount(bytes: i64) -> String {
    if bytes % (MIB as i64) == 0 { format!("{}", bytes / MIB as i64) } else { format!("{bytes} bytes") }
}

pub fn parts_line(parts: &UntrackableParts) -> String {
    let all = [
        ("context", parts.context_bytes),
        ("modules", parts.modules_bytes),
        ("local", parts.local_memory_bytes),
        ("heaps", parts.heaps_bytes),
        ("rounding", parts.rounding_bytes),
        ("unexplained", parts.unexplained_bytes),
    ];
    let named = all.iter().filter(|(_, bytes)| *bytes != 0);
    let named: Vec<String> = named.map(|(name, bytes)| format!("{name} {}", amount(*bytes))).collect();
    format!("{} = {}", amount(parts.sum()), if named.is_empty() { "0".into() } else { named.join(" + ") })
}

/// Formats a step as `at MS: BYTES = parts, cause kind @tag (more)`.
pub fn step_line(step: &UntrackableChange) -> String {
    let mut line = format!("at {}: {}, {}", step.time_ns / MS, parts_line(&step.parts), step.cause);
    line += match step.kind.as_str() {
        "measured" => " measured",
        "model" => " model",
        "upper_bound" => " bound",
        _ => "",
    };
    if let Some(tag) = &step.tag {
        line += &format!(" @{tag}");
    }
    if step.expected_bytes.is_some_and(|bytes| bytes != step.bytes) {
        line += &format!(", expected {}", amount(step.expected_bytes.unwrap_or(0)));
    }
    let unseen = step.note.as_deref().and_then(|note| note.strip_prefix("modules with ")?.split_once(' '));
    if let Some((bytes, _)) = unseen {
        line += &format!(", unseen modules {}", amount(bytes.parse().expect("bytes")));
    }
    line
}

/// Runs a script and compares the parts of the last sample and all steps. If the sample was certain, checks that they sum to it.
#[track_caller]
pub fn check_gap(script: impl FnOnce(&mut Gap), expected: &[&str]) -> Vec<UntrackableChange> {
    let mut gap = Gap::new();
    script(&mut gap);
    let account = gap.0.account();
    let sample = account.latest.as_ref().expect("a sample");
    let mut found: Vec<String> =
        sample.parts.iter().map(|parts| "parts ".to_owned() + &parts_line(parts)).collect();
    found.extend(account.steps.iter().map(step_line));
    assert_eq!(found, expected);
    account.steps.to_vec()
}
