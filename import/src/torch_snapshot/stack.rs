//! Converts the frames of a stack to a tag that users recognise, and to a phase and a role.
//!
//! A PyTorch stack has some 60 frames of C++ and Python, innermost first. The tag is the path of its useful frames, outermost
//! first: Python code outside PyTorch and the standard library, each as `file.py:line(function)`. Without such frames, as in
//! autograd's threads, the tag is `backward/NODE`. Else it is PyTorch's own innermost Python frame, else its operator.

use super::arena::{Arena, Kind, Ref};
use gpumem_wire::{MAX_TAG_BYTES, Phase, Role};
use std::collections::HashMap;

/// Maximum number of frames in a tag. If a stack has more, its innermost ones are used.
const MAX_PARTS: usize = 12;
/// Maximum length of one frame in a tag, in bytes.
const MAX_PART_BYTES: usize = 80;
/// Maximum number of fields that are read from a frame; a valid frame has fewer.
const MAX_FIELDS: usize = 32;
/// Functions that allocate workspaces (temporary buffers) for cuBLAS.
const WORKSPACES: [&str; 3] =
    ["at::cuda::getNewWorkspace", "at::cuda::getCurrentCUDABlasHandle", "at::cuda::getCUDABlasLtWorkspace"];
/// Maximum length in bytes of a whole stack as text (for out-of-memory records).
const MAX_TEXT_BYTES: usize = 2048;

#[derive(Debug, Clone, Default)]
struct Frame {
    /// The frame's text as a component of a tag.
    part: String,
    worth: Worth,
    /// Phase of training that the frame indicates. The backward phase may also run code whose frames indicate another phase.
    phase: Phase,
    /// Role of memory that the frame indicates.
    role: Role,
}

/// How useful a frame is in a tag, in ascending order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    /// Code of the interpreter or the allocator: never in a tag.
    #[default]
    Nothing,
    /// An operator of PyTorch (C++).
    Operator,
    /// Python code of PyTorch.
    Torch,
    /// A node of the autograd graph.
    Node,
    /// A function in the program's Python code: code outside PyTorch and the standard library.
    Program,
    /// Module-level Python code of the program. Used only if no function of the program is nearer to the allocation.
    Module,
}

/// What a stack indicates about the memory that was allocated there.
#[derive(Debug, Clone, Default)]
pub(super) struct StackTag {
    /// Tag path; empty if no frame is useful.
    pub path: String,
    pub phase: Phase,
    pub role: Role,
}

/// Cache of classified frames and stacks, so that each is classified only once.
#[derive(Debug, Default)]
pub(super) struct Stacks {
    frames: HashMap<Ref, Frame>,
    tags: HashMap<u32, StackTag>,
}

impl Stacks {
    /// Returns path, phase and role for a list of frames; `None` if the list is empty.
    pub fn classify(&mut self, arena: &Arena, frames: Ref) -> Option<&StackTag> {
        if arena.kind(frames) != Some(Kind::List) {
            return None;
        }
        let extent = arena.extent(frames)?;
        if !self.tags.contains_key(&extent) {
            let tag = self.classify_frames(arena, frames);
            self.tags.insert(extent, tag);
        }
        self.tags.get(&extent)
    }

    fn classify_frames(&mut self, arena: &Arena, frames: Ref) -> StackTag {
        let mut parts: Vec<String> = Vec::new();
        let mut worth = Worth::Nothing;
        let (mut phase, mut role) = (Phase::Unknown, Role::Unknown);
        let mut in_backward = false;
        for &frame in arena.runs(frames).flatten() {
            let frame = self.frames.entry(frame).or_insert_with(|| classify_frame(arena, frame));
            if frame.phase == Phase::Backward {
                in_backward = true;
                role = if role == Role::Unknown { frame.role } else { role };
            } else if frame.role == Role::Workspace {
                role = Role::Workspace;
            } else if phase == Phase::Unknown {
                // The innermost frame that indicates a phase decides. The loop goes from the innermost frame outwards.
                phase = frame.phase;
                role = if role == Role::Unknown { frame.role } else { role };
            }
            if frame.worth == Worth::Nothing || frame.worth < worth {
                continue;
            }
            let adds = match (frame.worth, worth) {
                // A path consists of frames of the program. Of other kinds of frames, only the innermost one is used.
                (Worth::Program, Worth::Program) => parts.len() < MAX_PARTS,
                (Worth::Module, Worth::Program) => false,
                (new, old) => new != old,
            };
            if adds {
                if frame.worth != worth {
                    parts.clear();
                }
                worth = frame.worth.min(Worth::Program);
                parts.push(frame.part.clone());
            }
        }
        // Forward code that runs again during the backward pass belongs to the backward phase.
        if in_backward {
            phase = Phase::Backward;
        }
        let mut path = String::new();
        for part in parts {
            let longer = if path.is_empty() { part } else { format!("{part}/{path}") };
            if longer.len() > MAX_TAG_BYTES {
                break;
            }
            path = longer;
        }
        StackTag { path, phase, role }
    }

    /// Returns the Python frames of a stack as text, innermost first: `function<TAB>file<TAB>line`.
    pub fn text(arena: &Arena, frames: Ref) -> String {
        let mut text = String::new();
        if arena.kind(frames) != Some(Kind::List) {
            return text;
        }
        for &frame in arena.runs(frames).flatten() {
            let Some(fields) = Fields::read(arena, frame).filter(|fields| fields.is_python()) else {
                continue;
            };
            let clean = |text: &str| text.replace(|letter: char| letter.is_control(), " ");
            let line = format!("{}\t{}\t{}", clean(&fields.name), clean(&fields.file), fields.line);
            if text.len() + line.len() > MAX_TEXT_BYTES {
                break;
            }
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(&line);
        }
        text
    }
}

struct Fields<'a> {
    name: std::borrow::Cow<'a, str>,
    file: std::borrow::Cow<'a, str>,
    line: i64,
}

impl<'a> Fields<'a> {
    fn read(arena: &'a Arena, frame: Ref) -> Option<Self> {
        let [name, file, line] = arena.fields(frame, "name filename line", MAX_FIELDS)?;
        let text = |value| arena.text(value).unwrap_or_default();
        Some(Fields { name: text(name), file: text(file), line: arena.int(line).unwrap_or(0) })
    }

    fn is_python(&self) -> bool {
        self.file.ends_with(".py") || (self.file.starts_with('<') && self.file.ends_with('>'))
    }
}

/// Returns a text as one component of a tag path. Replaces slashes and control characters, which a terminal would interpret.
pub(super) fn part(text: &str) -> String {
    let clean = text.chars().map(|letter| if letter == '/' || letter.is_control() { '.' } else { letter });
    let mut part = String::new();
    for letter in clean {
        if part.len() + letter.len_utf8() > MAX_PART_BYTES {
            break;
        }
        part.push(letter);
    }
    part
}

fn classify_frame(arena: &Arena, frame: Ref) -> Frame {
    let Some(fields) = Fields::read(arena, frame) else { return Frame::default() };
    if fields.is_python() { python(&fields) } else { native(&fields.name) }
}

fn python(fields: &Fields<'_>) -> Frame {
    let (file, name) = (&*fields.file, &*fields.name);
    let located = |short: &str| part(&format!("{short}:{}({name})", fields.line));
    if let Some(inside) = in_torch(file) {
        let in_module = inside == "nn/modules/module.py";
        let (phase, role) = match name {
            "_engine_run_backward" => (Phase::Backward, Role::Unknown),
            "backward" if inside.starts_with("autograd/") => (Phase::Backward, Role::Unknown),
            _ if inside.starts_with("optim/") && !inside.contains("lr_scheduler") => match name {
                "_init_group" | "_init_state" | "init_state" => (Phase::Optimizer, Role::OptimizerState),
                "zero_grad" => (Phase::Unknown, Role::Unknown),
                _ => (Phase::Optimizer, Role::Unknown),
            },
            "_call_impl" | "_wrapped_call_impl" if in_module => (Phase::Forward, Role::Unknown),
            // PyTorch creates a module's parameters, or moves them to the device.
            "_apply" | "convert" if in_module => (Phase::Unknown, Role::Parameter),
            "__init__" if inside.starts_with("nn/modules/") => (Phase::Unknown, Role::Parameter),
            _ => (Phase::Unknown, Role::Unknown),
        };
        let is_glue =
            matches!(name, "_call_impl" | "_wrapped_call_impl" | "decorate_context" | "_fn" | "inner");
        let worth = if is_glue { Worth::Nothing } else { Worth::Torch };
        return Frame { part: located(&format!("torch.{}", inside.replace('/', "."))), worth, phase, role };
    }
    let is_standard = file.starts_with("<frozen")
        || file.contains("/lib/python3") && !file.contains("-packages/")
        || file.contains("/lib64/python3") && !file.contains("-packages/");
    let worth = match name {
        _ if is_standard => Worth::Nothing,
        "<module>" => Worth::Module,
        _ => Worth::Program,
    };
    let mut short = file.rsplit('/');
    let last = short.next().unwrap_or(file);
    let short = match (last, short.next()) {
        // Every package has a file `__init__.py`, so the name of the package is added.
        ("__init__.py", Some(package)) => format!("{package}.{last}"),
        _ => last.to_owned(),
    };
    Frame { part: located(&short), worth, ..Frame::default() }
}

/// Returns the path of a file within PyTorch's package; `None` for other files.
fn in_torch(file: &str) -> Option<&str> {
    let (_, inside) = file.rsplit_once("-packages/torch/").or_else(|| {
        // In a source checkout of PyTorch, `torch/` has no such parent. Other projects have a directory `torch/` too, so the path
        // below it must also begin like one of PyTorch's.
        let (before, inside) = file.rsplit_once("/torch/")?;
        let parts = ["nn/", "optim/", "autograd/", "utils/", "_", "cuda/", "distributed/", "functional.py"];
        parts.iter().any(|part| inside.starts_with(part)).then_some((before, inside))
    })?;
    Some(inside)
}

/// Classifies a C++ function by its demangled name.
fn native(name: &str) -> Frame {
    let in_backward = Frame { phase: Phase::Backward, ..Frame::default() };
    if name.contains("torch::autograd::AccumulateGrad::") {
        let part = "backward/AccumulateGrad".into();
        Frame { part, worth: Worth::Node, role: Role::Gradient, ..in_backward }
    } else if let Some(node) = between(name, "torch::autograd::generated::", "::apply") {
        Frame { part: format!("backward/{}", part(node)), worth: Worth::Node, ..in_backward }
    } else if WORKSPACES.iter().any(|function| name.contains(function)) {
        Frame { role: Role::Workspace, ..Frame::default() }
    } else if name.contains("torch::autograd::Engine::") {
        in_backward
    } else if let Some(operator) = between(name, "at::_ops::", "::call") {
        Frame { part: format!("op/{}", part(operator)), worth: Worth::Operator, ..Frame::default() }
    } else {
        Frame::default()
    }
}

fn between<'t>(text: &'t str, before: &str, after: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(before)?;
    let (found, _) = rest.split_once(after)?;
    (found.len() <= MAX_PART_BYTES && !found.is_empty()).then_some(found)
}
