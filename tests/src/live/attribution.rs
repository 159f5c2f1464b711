//! Compares a recording's attribution with the program's own: marks around its modules' calls and backward nodes
//! (tests/torch/said.py), and the addresses of its tensors.

use gpumem_ledger::Origin;
use gpumem_report::names::is_line;
use gpumem_runs::builder::Sink;
use gpumem_runs::input::Input;
use gpumem_runs::recording;
use gpumem_wire::{Body, Flags, Phase, Record, Role};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Name for memory whose owner the program does not know.
const NOBODYS: &str = "?";

/// A live block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Size as rounded by torch.
    pub bytes: u64,
    /// Scope, module path or both; empty for none.
    pub tag: String,
    /// Role that the agent reported, at the allocation or later.
    pub role: Role,
    /// Phase that the agent reported, at the allocation or later.
    pub phase: Phase,
}

/// Bytes of allocations, and how correct their names are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Share {
    /// Total bytes.
    pub bytes: u64,
    /// Bytes attributed to the module that the program reports.
    pub right: u64,
    /// Bytes attributed to that module, its parent, or a module in it.
    pub near: u64,
    /// Bytes with any name.
    pub named: u64,
    /// Bytes by expected and found name.
    pub wrong: BTreeMap<(String, String), u64>,
    /// Number of allocations.
    pub count: u64,
}

impl Share {
    /// Returns the percentage of right bytes.
    pub fn percent(&self) -> f64 {
        100.0 * self.right as f64 / self.bytes.max(1) as f64
    }

    /// Returns the percentage of right or nearly right bytes.
    pub fn percent_near(&self) -> f64 {
        100.0 * self.near as f64 / self.bytes.max(1) as f64
    }

    /// Returns the percentage of named bytes.
    pub fn percent_named(&self) -> f64 {
        100.0 * self.named as f64 / self.bytes.max(1) as f64
    }

    fn add(&mut self, bytes: u64, expected: &str, found: &str) {
        self.bytes += bytes;
        self.count += 1;
        self.named += if found.is_empty() { 0 } else { bytes };
        let is_in = |inner: &str, outer: &str| {
            !outer.is_empty()
                && inner
                    .strip_prefix(outer)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '.']))
        };
        self.near += if is_in(found, expected) || is_in(expected, found) { bytes } else { 0 };
        if found == expected {
            self.right += bytes;
        } else {
            *self.wrong.entry((expected.to_owned(), found.to_owned())).or_default() += bytes;
        }
    }
}

/// Attribution of one process in a recording.
#[derive(Debug, Default)]
pub struct Attribution {
    /// By `MODEL phase`: allocations whose module the program reports.
    pub known: BTreeMap<String, Share>,
    /// By `MODEL phase`: all allocations.
    pub all: BTreeMap<String, Share>,
    /// Live blocks by address, at each check.
    pub live: BTreeMap<String, HashMap<u64, Block>>,
    /// Last reported state of each source of names.
    pub layers: BTreeMap<String, String>,
}

struct Reader {
    pid: u32,
    names: HashMap<u32, String>,
    /// By thread, the modules that were entered.
    inside: HashMap<u32, Vec<String>>,
    phase: String,
    model: String,
    blocks: HashMap<u64, Block>,
    result: Attribution,
}

impl Reader {
    fn name(&self, tag: u32) -> String {
        self.names.get(&tag).cloned().unwrap_or_default()
    }

    fn mark(&mut self, thread: u32, text: &str) {
        match text.split_once(' ').unwrap_or((text, "")) {
            ("enter", path) => self.inside.entry(thread).or_default().push(path.to_owned()),
            ("leave", _) => {
                self.inside.entry(thread).or_default().pop();
            }
            ("phase", phase) => phase.clone_into(&mut self.phase),
            ("model", model) => model.clone_into(&mut self.model),
            ("check", check) => {
                self.result.live.insert(check.to_owned(), self.blocks.clone());
            }
            _ => {}
        }
    }

    fn allocate(&mut self, thread: u32, bytes: u64, tag: &str) {
        if self.phase.is_empty() || self.phase == "none" {
            return;
        }
        let key = format!("{} {}", self.model, self.phase);
        let expected = self.inside.get(&thread).and_then(|inside| inside.last());
        if expected.is_some_and(|expected| expected == NOBODYS) {
            return;
        }
        if let Some(expected) = expected {
            self.result.known.entry(key.clone()).or_default().add(bytes, expected, tag);
        }
        self.result.all.entry(key).or_default().add(bytes, expected.map_or("", String::as_str), tag);
    }
}

impl Sink for Reader {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        let Origin::Process(key) = origin else { return };
        if key.pid != self.pid || record.stamp.flags.has(Flags::RESTATED) {
            return;
        }
        let stamp = record.stamp;
        match record.body {
            Body::Tag { path } => {
                self.names.insert(stamp.tag, path.to_owned());
            }
            Body::Marker {} => self.mark(stamp.thread, &self.name(stamp.tag)),
            Body::BlockAlloc { address, bytes, use_as: (role, phase), .. } => {
                let tag = self.name(stamp.tag);
                // Outside modules a tag is a source line.
                self.allocate(stamp.thread, bytes, if is_line(&tag) { "" } else { &tag });
                self.blocks.insert(address, Block { bytes, tag, role, phase });
            }
            Body::BlockFree { address, .. } => {
                self.blocks.remove(&address);
            }
            Body::Layer { layer, state, reason } => {
                self.result.layers.insert(format!("{layer:?}"), format!("{state:?} {reason}"));
            }
            Body::Retag { address, use_as: (role, phase), .. } => {
                let tag = self.name(stamp.tag);
                if let Some(block) = self.blocks.get_mut(&address) {
                    block.role = if role == Role::Unknown { block.role } else { role };
                    block.phase = if phase == Phase::Unknown { block.phase } else { phase };
                    if !tag.is_empty() {
                        block.tag = tag;
                    }
                }
            }
            _ => {}
        }
    }
    fn reject(&mut self, count: u64) {
        assert_eq!(count, 0, "rejected records");
    }
}

/// Tensors of the kind `what` that a program reports (tests/torch/said.py).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owned {
    /// Number of tensors.
    pub count: usize,
    /// Tensors in a live block whose name is that of their module or their own.
    pub named: usize,
    /// Tensors in a live block with that role.
    pub known: usize,
    /// Examples of tensors with a wrong attribution.
    pub others: Vec<String>,
}

/// Compares the tensors with a recording.
pub fn owned(live: &HashMap<u64, Block>, said: &serde_json::Value, what: &str, role: Role) -> Owned {
    let mut found = Owned::default();
    for row in said["addresses"].as_array().into_iter().flatten().filter(|row| row[1] == what) {
        let text = |at: usize| row[at].as_str().unwrap_or_default();
        let address = u64::from_str_radix(text(0).trim_start_matches("0x"), 16).unwrap_or(0);
        let (module, own) = (text(2), format!("{}/{}", text(2), text(3)));
        let block = live.get(&address);
        let is_named = block.is_some_and(|block| block.tag == module || block.tag == own);
        let is_known = block.is_some_and(|block| block.role == role);
        found.count += 1;
        found.named += usize::from(is_named);
        found.known += usize::from(is_known);
        if !(is_named && is_known) && found.others.len() < 4 {
            found.others.push(format!("{own}: {block:?}"));
        }
    }
    found
}

/// Reads a daemon's recording of a process.
///
/// # Panics
/// If it cannot be read.
pub fn attribution(path: &Path, pid: u32) -> Attribution {
    let mut reader = Reader {
        pid,
        names: HashMap::new(),
        inside: HashMap::new(),
        phase: String::new(),
        model: String::new(),
        blocks: HashMap::new(),
        result: Attribution::default(),
    };
    let input = Input::open(path).unwrap_or_else(|error| panic!("{error}"));
    recording::read(input, &mut reader).unwrap_or_else(|error| panic!("{error}"));
    reader.result
}
