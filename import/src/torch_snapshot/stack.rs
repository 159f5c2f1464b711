//! Converts the frames of a stack to a tag that users recognise, and to a phase and a role.
//!
//! A PyTorch stack has some 60 frames of C++ and Python, innermost first. The tag is the path of its useful frames, outermost
//! first: Python code outside PyTorch and the standard library, each as `file.py:line(function)`. Without such frames, as in
//! autograd's threads, the tag is `backward/NODE`. Else it is PyTorch's own innermost Python frame, else its operator.

use super::arena::{Arena, Kind, NONE, Ref};
use gpumem_wire::{MAX_TAG_BYTES, Phase, Role};
use std::collections::HashMap;

/// Maximum number of frames in a tag. If a stack has more, its innermost ones are used.
const MAX_PARTS: usize = 12;
/// Maximum length of one frame in a tag, in bytes.
const MAX_PART_BYTES: usize = 80;
/// Functions that allocate workspaces (temporary buffers) for cuBLAS.
const WORKSPACES: [&str; 3] =
    ["at::cuda::getNewWorkspace", "at::cuda::getCurrentCUDABlasHandle", "at::cuda::getCUDABlasLtWorkspace"];
/// Maximum length in bytes of a whole stack as text (for out-of-memory records).
const MAX_TEXT_BYTES: usize = 2048;

#[derive(Debug, Clone, Default)]
struct Frame {
    /// Text of the frame in a tag.
    part: String,
    worth: Worth,
    hint: Hint,
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
    /// A function in Python code outside PyTorch and the standard library.
    Program,
    /// Module-level Python code outside these. Used only if no function of the program is nearer to the allocation.
    Module,
}

/// Phase of training, or role of the memory, that a frame indicates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Hint {
    #[default]
    Nothing,
    /// A module is called, so the forward phase runs.
    Forward,
    /// The autograd engine runs, so the backward phase runs.
    Backward,
    /// Autograd stores a gradient.
    Gradient,
    Optimizer,
    /// An optimizer creates its state.
    OptimizerState,
    /// A module is created or moved to the device.
    Parameter,
    /// A kernel library allocates a workspace.
    Workspace,
}

/// What a stack says about the memory that was allocated there.
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
            match frame.hint {
                Hint::Nothing => {}
                Hint::Backward => in_backward = true,
                Hint::Workspace => role = Role::Workspace,
                Hint::Gradient => {
                    in_backward = true;
                    role = if role == Role::Unknown { Role::Gradient } else { role };
                }
                // The innermost frame that indicates a phase decides; the loop goes from the innermost frame outwards.
                _ if phase != Phase::Unknown => {}
                Hint::Forward => phase = Phase::Forward,
                Hint::Optimizer => phase = Phase::Optimizer,
                Hint::OptimizerState => {
                    phase = Phase::Optimizer;
                    role = if role == Role::Unknown { Role::OptimizerState } else { role };
                }
                Hint::Parameter if role == Role::Unknown => role = Role::Parameter,
                Hint::Parameter => {}
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
            let Some(fields) = Fields::of(arena, frame).filter(|fields| fields.is_python()) else { continue };
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
    fn of(arena: &'a Arena, frame: Ref) -> Option<Self> {
        if arena.kind(frame) != Some(Kind::Dict) {
            return None;
        }
        let (mut name, mut file, mut line) = (NONE, NONE, NONE);
        // A valid frame has fewer than 32 fields.
        for pair in arena.runs(frame).flat_map(|run| run.chunks_exact(2)).take(32) {
            let &[key, value] = pair else { continue };
            match arena.bytes_of(key) {
                Some(b"name") => name = value,
                Some(b"filename") => file = value,
                Some(b"line") => line = value,
                _ => {}
            }
        }
        let text = |value| arena.text(value).unwrap_or_default();
        Some(Fields { name: text(name), file: text(file), line: arena.int(line).unwrap_or(0) })
    }

    fn is_python(&self) -> bool {
        self.file.ends_with(".py") || (self.file.starts_with('<') && self.file.ends_with('>'))
    }
}

/// Returns a text as one component of a tag path. Replaces slashes, and control characters, which a terminal would execute.
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
    let Some(fields) = Fields::of(arena, frame) else { return Frame::default() };
    if fields.is_python() { python(&fields) } else { native(&fields.name) }
}

fn python(fields: &Fields<'_>) -> Frame {
    let (file, name) = (&*fields.file, &*fields.name);
    let located = |short: &str| part(&format!("{short}:{}({name})", fields.line));
    if let Some(inside) = in_torch(file) {
        let hint = match name {
            "_engine_run_backward" => Hint::Backward,
            "backward" if inside.starts_with("autograd/") => Hint::Backward,
            _ if inside.starts_with("optim/") && !inside.contains("lr_scheduler") => match name {
                "_init_group" | "_init_state" | "init_state" => Hint::OptimizerState,
                "zero_grad" => Hint::Nothing,
                _ => Hint::Optimizer,
            },
            "_call_impl" | "_wrapped_call_impl" if inside == "nn/modules/module.py" => Hint::Forward,
            "_apply" | "convert" if inside == "nn/modules/module.py" => Hint::Parameter,
            "__init__" if inside.starts_with("nn/modules/") => Hint::Parameter,
            _ => Hint::Nothing,
        };
        let is_glue =
            matches!(name, "_call_impl" | "_wrapped_call_impl" | "decorate_context" | "_fn" | "inner");
        let worth = if is_glue { Worth::Nothing } else { Worth::Torch };
        return Frame { part: located(&format!("torch.{}", inside.replace('/', "."))), worth, hint };
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
    Frame { part: located(&short), worth, hint: Hint::Nothing }
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
    if name.contains("torch::autograd::AccumulateGrad::") {
        return Frame { part: "backward/AccumulateGrad".into(), worth: Worth::Node, hint: Hint::Gradient };
    }
    if let Some(node) = between(name, "torch::autograd::generated::", "::apply") {
        return Frame { part: format!("backward/{}", part(node)), worth: Worth::Node, hint: Hint::Backward };
    }
    if WORKSPACES.iter().any(|function| name.contains(function)) {
        return Frame { hint: Hint::Workspace, ..Frame::default() };
    }
    if name.contains("torch::autograd::Engine::") {
        return Frame { hint: Hint::Backward, ..Frame::default() };
    }
    match between(name, "at::_ops::", "::call") {
        Some(operator) => {
            Frame { part: format!("op/{}", part(operator)), worth: Worth::Operator, hint: Hint::Nothing }
        }
        None => Frame::default(),
    }
}

fn between<'t>(text: &'t str, before: &str, after: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(before)?;
    let (found, _) = rest.split_once(after)?;
    (found.len() <= MAX_PART_BYTES && !found.is_empty()).then_some(found)
}
