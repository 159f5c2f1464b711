//! Functions of libraries that keep or make much memory, and the setting of the library that avoids it.
//!
//! A function is recognised in the name of a tensor outside modules, which is a line such as `utils.py:7 Mixin._sample`, or in the
//! stack of the failed request.

use super::super::item::{Item, Kind, Memory, mib};
use super::parts::Parts;
use crate::names;
use gpumem_model::cell::without_sum;
use gpumem_model::run::{Device, Oom, Run};
use gpumem_model::units::signed;
use std::collections::BTreeMap;

/// Functions of a library, with one cure for the memory that they make.
#[derive(Debug)]
pub struct LibraryFrame {
    /// End of the file's path; `*` stands for any text.
    pub file: &'static str,
    pub functions: &'static [&'static str],
    /// Functions of which they must have called one at the failed request, directly or not; any if empty.
    pub called: &'static [&'static str],
    /// Functions that must not be in the stack: with them, the change is in force.
    without: &'static [&'static str],
    /// Whether the functions keep what they make, so that it adds up over many passes.
    keeps: bool,
    pub(in crate::advice) kind: Kind,
    pub(in crate::advice) change: &'static str,
}

/// The functions, with the releases whose sources have them.
pub const LIBRARY_FRAMES: [LibraryFrame; 6] = [
    // transformers 4.48 to 5.24.
    LibraryFrame {
        file: "transformers/generation/utils.py",
        functions: &["GenerationMixin._sample", "GenerationMixin._beam_search"],
        called: &[],
        without: &[],
        keeps: true,
        kind: Kind::LibrarySetting,
        change: "Pass output_scores=False and output_logits=False to generate(), which keeps them for each token; what is needed of them, compute in a LogitsProcessor",
    },
    // transformers 4.48 to 5.24.
    LibraryFrame {
        file: "transformers/trainer_pt_utils.py",
        functions: &["torch_pad_and_concatenate", "nested_concat", "EvalLoopContainer.add"],
        called: &[],
        without: &[],
        keeps: true,
        kind: Kind::LibrarySetting,
        change: "Reduce what the Trainer collects in evaluation with preprocess_logits_for_metrics (such as argmax), or move it to the host with eval_accumulation_steps",
    },
    // transformers 4.48 to 5.24.
    LibraryFrame {
        file: "transformers/models/*.py",
        functions: &["eager_attention_forward"],
        called: &[],
        without: &[],
        keeps: false,
        kind: Kind::LibrarySetting,
        change: "Load the model with attn_implementation=\"sdpa\" (or \"flash_attention_2\") if its class supports it: \"eager\" makes the scores of all pairs of tokens",
    },
    // torch 2.4 to 2.15. Without weights it calls scaled_dot_product_attention, and neither of the two.
    LibraryFrame {
        file: "torch/nn/functional.py",
        functions: &["multi_head_attention_forward"],
        called: &["softmax", "dropout"],
        without: &[],
        keeps: false,
        kind: Kind::LibrarySetting,
        change: "Pass need_weights=False to nn.MultiheadAttention: with weights it makes the scores of all pairs of tokens",
    },
    // torch 2.4 to 2.15. With chunk_size, vmap concatenates the gradients of all chunks.
    LibraryFrame {
        file: "torch/_functorch/vmap.py",
        functions: &["vmap_impl"],
        called: &["grad_impl", "grad_and_value_impl"],
        without: &[],
        keeps: false,
        kind: Kind::BatchSize,
        change: "If vmap(grad()) makes the model's gradients for each sample, call it for smaller micro-batches, and add up what is needed of each, such as clipped gradients",
    },
    // diffusers 0.30 to 0.42, where _encode is newer. Tiles cost time.
    LibraryFrame {
        file: "diffusers/models/autoencoders/autoencoder_kl.py",
        functions: &["AutoencoderKL._decode", "AutoencoderKL._encode"],
        called: &[],
        without: &["tiled_decode", "_tiled_encode", "tiled_encode"],
        keeps: false,
        kind: Kind::LargeOutput,
        change: "Call enable_slicing() on the AutoencoderKL (one image at a time), or enable_tiling() for large images",
    },
];

/// Part of the path of a file of the library that defines a model.
const LIBRARY: &str = "/transformers/models/";
/// Minimum bytes of such a module, as a factor of its largest projection's. A fused operation keeps the projections, its output and one
/// number for each token and head.
const MANY_TIMES: i64 = 8;
/// Minimum number of projections: of queries, keys and values.
const LEAST_PROJECTIONS: usize = 3;

impl LibraryFrame {
    /// Returns whether a function in a file, given by its path or name, is one of these.
    fn has(&self, file: &str, function: &str) -> bool {
        let (start, end) = self.file.split_once('*').unwrap_or(("", self.file));
        let is_file = match file.contains('/') {
            true => file.contains(start) && file.ends_with(end),
            false => start.is_empty() && end.rsplit('/').next() == Some(file),
        };
        // Before CPython 3.11 a function's name lacks that of its class, so the path of the file must be known.
        let is_short = |name: &&str| file.contains('/') && name.rsplit('.').next() == Some(function);
        is_file && (self.functions.contains(&function) || self.functions.iter().any(is_short))
    }
}

/// Returns the functions that keep what they make at a line of a library.
pub(in crate::advice) fn keeper_of(tag: &str) -> Option<&'static LibraryFrame> {
    let (file, rest) = tag.split_once(':').filter(|_| names::is_line(tag))?;
    let (_, function) = rest.split_once(' ')?;
    LIBRARY_FRAMES.iter().filter(|frame| frame.keeps).find(|frame| frame.has(file, function))
}

/// Functions in which a module of PyTorch runs its forward pass.
const PASS: [&str; 3] = ["forward", "_call_impl", "_wrapped_call_impl"];

/// Returns the name of a function without that of its class.
fn last_name(function: &str) -> &str {
    function.rsplit('.').next().unwrap_or(function)
}

/// Returns the functions that made a failed request: those of the innermost frame that is in the table.
fn maker_of(oom: &Oom) -> Option<&'static LibraryFrame> {
    let frames: Vec<(&str, &str)> = oom.stack.as_deref()?.lines().filter_map(function_of).collect();
    let is_of = |at: usize, row: &LibraryFrame| {
        let inner = || frames.iter().take(at).map(|(function, _)| last_name(function));
        let is_called = row.called.is_empty() || inner().any(|function| row.called.contains(&function));
        // What a module makes in its forward pass is not what its caller keeps.
        let is_of_pass = row.keeps && inner().any(|function| PASS.contains(&function));
        let is_in_force = frames.iter().any(|(function, _)| row.without.contains(&last_name(function)));
        let is_in_row = frames.get(at).is_some_and(|(function, file)| row.has(file, function));
        is_in_row && is_called && !is_of_pass && !is_in_force
    };
    (0..frames.len()).find_map(|at| LIBRARY_FRAMES.iter().find(|row| is_of(at, row)))
}

/// Returns the function and the file of a line of a stack.
fn function_of(line: &str) -> Option<(&str, &str)> {
    let (function, rest) = line.split_once('\t')?;
    Some((function, rest.split_once('\t')?.0))
}

/// Returns whether a failed request was made by functions that keep what they make. More memory, or less waste of it, only
/// delays the failure.
pub(in crate::advice) fn is_kept(oom: Option<&Oom>) -> bool {
    oom.and_then(maker_of).is_some_and(|frame| frame.keeps)
}

/// Returns the change for memory that a library's functions or modules hold.
pub(in crate::advice) fn item(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Option<Item> {
    of_functions(device, parts, oom).or_else(|| attention(device, parts, oom))
}

/// Returns the change for memory that functions of the table hold: at the program's largest line of data, or at the failed request.
fn of_functions(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Option<Item> {
    let asked = oom.map_or(0, |oom| signed(oom.asked_bytes));
    let maker = oom.and_then(maker_of);
    let kept = parts.data.filter(|(line, _)| keeper_of(line).is_some());
    let (frame, place, bytes) = match (kept, maker.filter(|maker| !maker.keeps)) {
        // What was collected so far is copied together with the new part.
        (Some((line, bytes)), _) => {
            (keeper_of(line)?, line, bytes.saturating_add(if is_kept(oom) { asked } else { 0 }))
        }
        (None, Some(maker)) => {
            let tag = oom?.tag.as_deref()?;
            let bytes = match maker.kind {
                // The batch.
                Kind::BatchSize => parts.activations.saturating_add(parts.short_lived),
                _ => parts.of_like_modules(tag),
            };
            (maker, tag, bytes.saturating_add(asked))
        }
        (None, None) => return None,
    };
    parts.is_large(bytes).then(|| {
        let change = format!("{}{{0}}", frame.change);
        let item = Item::new(frame.kind, Memory::Activations, device, change).named(format!(" ({place})"));
        let of = match (frame.keeps, frame.kind) {
            (true, _) => "that these functions collect",
            (false, Kind::BatchSize) => "of activations, temporaries and the request",
            (false, _) => "of these modules and of the request",
        };
        // Slices save nothing of one image.
        let least = if frame.kind == Kind::LargeOutput { 0 } else { bytes / 2 };
        item.estimated([least, bytes], format!("{} {of}", mib(bytes)))
    })
}

/// Returns the change for the attention modules, alike except for their numbers, with the most bytes.
fn attention(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Option<Item> {
    let is_of_library = oom?.stack.as_deref().is_some_and(|stack| stack.contains(LIBRARY));
    let is_attention = |path: &str| {
        let name = path.to_lowercase();
        name.contains("attn") || name.contains("attention")
    };
    // Module -> number of the modules in it, and the largest one's bytes.
    let mut inner: BTreeMap<&str, (usize, i64)> = BTreeMap::new();
    for (tag, bytes) in &parts.by_tag {
        let Some((module, _)) = without_sum(tag).rsplit_once('/') else { continue };
        let (count, largest) = inner.entry(module).or_default();
        (*count, *largest) = (*count + 1, (*largest).max(*bytes));
    }
    let keeps_scores = |(tag, bytes): &(&&str, &i64)| {
        let projections = inner.get(**tag).filter(|(count, _)| *count >= LEAST_PROJECTIONS);
        projections.is_some_and(|(_, largest)| **bytes >= largest.saturating_mul(MANY_TIMES))
    };
    let scores = parts.by_tag.iter().filter(|(tag, _)| is_attention(tag)).filter(keeps_scores);
    let (tag, _) = scores.max_by_key(|(_, bytes)| **bytes)?;
    let bytes = parts.of_like_modules(tag);
    (is_of_library && parts.is_large(bytes)).then(|| {
        let change = "Load the model with attn_implementation=\"sdpa\" if its class supports it, and without output_attentions=True: {0} keep the scores of all pairs of tokens";
        let modules = names::group(tag, usize::MAX, true);
        let item = Item::new(Kind::LibrarySetting, Memory::Activations, device, change).named(modules);
        let formula = format!(
            "{} of these modules, each of which keeps at least {MANY_TIMES} x as much as its largest projection",
            mib(bytes)
        );
        item.estimated([bytes / 2, bytes], formula)
    })
}

/// Returns whether the process has an `accelerate.Accelerator`, as its agent reports (`Body::Models` of the wire format).
pub(in crate::advice) fn has_accelerator(run: &Run) -> bool {
    run.process.claims.get("models").is_some_and(|text| text.lines().any(|line| line == "accelerate"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_by_file_and_name() {
        let keeper = |tag: &str| keeper_of(tag).map(|frame| frame.file);
        let generation = "transformers/generation/utils.py";
        assert_eq!(keeper("utils.py:3248 GenerationMixin._sample"), Some(generation));
        assert_eq!(keeper("utils.py:3248 Mixin._sample"), None);
        assert_eq!(keeper("utilities.py:3248 GenerationMixin._sample"), None);
        assert_eq!(keeper("modeling_llama.py:197 eager_attention_forward"), None, "it keeps nothing");
        let maker = |stack: &str| {
            let oom = Oom { stack: Some(stack.into()), ..Oom::default() };
            maker_of(&oom).map(|frame| frame.functions[0])
        };
        const EAGER: &str = "eager_attention_forward\t/v/transformers/models/llama/modeling_llama.py\t197\n";
        const WEIGHTS: &str = "multi_head_attention_forward\t/v/torch/nn/functional.py\t7112\n";
        assert_eq!(
            maker(&format!("softmax\t/v/torch/nn/functional.py\t2\n{EAGER}")),
            Some("eager_attention_forward")
        );
        assert_eq!(
            maker("_decode\t/v/diffusers/models/autoencoders/autoencoder_kl.py\t7\n"),
            Some("AutoencoderKL._decode")
        );
        assert_eq!(keeper("utils.py:3248 _sample"), None, "of any library");
        assert_eq!(maker("eager_attention_forward\t/v/my_models/llama.py\t197\n"), None);
        assert_eq!(
            maker(&format!("softmax\t/v/torch/nn/functional.py\t2\n{WEIGHTS}")),
            Some("multi_head_attention_forward")
        );
        let samples = "grad_impl\t/v/torch/_functorch/eager_transforms.py\t9\nf\t/v/a.py\t1\nvmap_impl\t/v/torch/_functorch/vmap.py\t3\n";
        assert_eq!(maker(samples), Some("vmap_impl"));
        let scores = "cat\t/v/torch/a.py\t2\n";
        let generation = "GenerationMixin._sample\t/v/transformers/generation/utils.py\t3\n";
        assert_eq!(maker(&format!("{scores}{generation}")), Some("GenerationMixin._sample"));
        let pass = "LlamaMLP.forward\t/v/transformers/models/llama/modeling_llama.py\t9\n";
        assert_eq!(maker(&format!("{scores}{pass}{generation}")), None, "a forward pass in generate()");
        let tiles = "AutoencoderKL.tiled_decode\t/v/diffusers/models/autoencoders/autoencoder_kl.py\t9\n";
        let decode = "AutoencoderKL._decode\t/v/diffusers/models/autoencoders/autoencoder_kl.py\t7\n";
        assert_eq!(maker(&format!("{tiles}{decode}")), None, "it has tiles");
        assert_eq!(maker("vmap_impl\t/v/torch/_functorch/vmap.py\t3\n"), None, "no gradients");
        assert_eq!(maker(WEIGHTS), None, "the projections are made in both cases");
    }
}
