//! How memory is named: levels, layers, roles, phases, categories.

use super::here::none;
use super::{Word, word};
use crate::layers;

pub(super) const WORDS: &[Word] = &[
    word(
        &["names", "layers of naming", "tag", "tags", "origin", "tag path"],
        "A tag is a path (a/b/c) in force when memory was allocated: explicit scopes, NVTX ranges, modules of PyTorch, else the library that asked. A later retag keeps the origin.",
        |here| layers::level(&here.coverage().layers).map(str::to_owned),
        "gpumem.scope(\"name\") in Python, gpumem_push in C, NVTX ranges: README",
    ),
    word(
        &["module path"],
        "Blocks are named after the module in whose forward or backward pass they were made, read from the thread's own Python frames.",
        |here| here.layer("module_path"),
        "GPUMEM_FRAMES=0 switches it off; gpumemctl doctor PID says why it does not work",
    ),
    word(
        &["NVTX ranges", "nvtx"],
        "Ranges of NVTX are scopes, with no change of code.",
        |here| here.layer("nvtx"),
        "GPUMEM_NVTX=0 switches it off",
    ),
    word(
        &["scopes", "scope"],
        "Begin and end of a named region that the program says itself: gpumem.scope, gpumem_push.",
        |here| here.layer("scopes"),
        "",
    ),
    word(
        &["Python stacks", "stacks"],
        "Names from the stack under which a block was allocated, as a snapshot of PyTorch's has it.",
        |here| here.layer("stacks"),
        "",
    ),
    word(
        &["calling library", "library", "by library"],
        "What nothing else names has the library that made the call, found on the stack.",
        none,
        "",
    ),
    word(
        &["PyTorch's blocks", "blocks layer"],
        "Each block of PyTorch's pool is reported; their sum equals memory_allocated to the byte.",
        |here| here.layer("blocks"),
        "GPUMEM_TORCH=0 switches it off",
    ),
    word(
        &["out of memory", "out-of-memory word"],
        "PyTorch says when it gives up, so that an OOM is told from a refusal that it survives.",
        |here| here.layer("out_of_memory"),
        "",
    ),
    word(
        &["autograd", "names in backward"],
        "Blocks of the backward pass get the name of the module whose forward pass made the node.",
        |here| here.layer("autograd"),
        "GPUMEM_AUTOGRAD=0 switches it off",
    ),
    word(
        &["roles", "role"],
        "What a block is for: parameter, gradient, optimizer state, activation, input, temporary, workspace, buffer, kv cache, parameter copy. From the program's word and from when blocks live.",
        |here| here.layer("roles"),
        "gpumem.torch.watch(model, optimizer) makes them certain",
    ),
    word(
        &["active", "degraded", "absent", "off", "failed", "reason", "state of a layer"],
        "How a way of naming is: it works; less well than it could; nothing to do for it; switched off; does not work. The reason stands beside it.",
        none,
        "gpumemctl doctor PID",
    ),
    word(
        &["parameter", "parameters", "params"],
        "Weights of the model.",
        |here| here.role("parameter"),
        "lower precision, sharding (FSDP, ZeRO-3), fewer parameters",
    ),
    word(
        &["gradient", "gradients", "grads"],
        "Gradients of parameters, from backward until they are set to none.",
        |here| here.role("gradient"),
        "optimizer.zero_grad(set_to_none=True) gives them back between steps",
    ),
    word(
        &["optimizer state"],
        "What the optimizer keeps per parameter: Adam has twice the parameters, in full precision.",
        |here| here.role("optimizer state"),
        "8-bit optimizers, sharding (ZeRO-1), SGD",
    ),
    word(
        &["activation", "activations"],
        "What forward makes and backward needs. Grows with the batch and the length of sequences; the usual peak.",
        |here| here.role("activation"),
        "smaller batches, checkpointing (torch.utils.checkpoint), lower precision",
    ),
    word(&["input", "inputs"], "Data on its way into the model.", |here| here.role("input"), ""),
    word(
        &["temporary", "temporaries", "temps", "intermediate gradients", "grad temps"],
        "Blocks that live within an operation or a pass: results in between, and gradients of activations in backward.",
        |here| here.role("temporary"),
        "",
    ),
    word(
        &["workspace", "workspace (cuBLAS etc.)"],
        "Scratch memory of libraries such as cuBLAS and cuDNN.",
        |here| here.role("workspace"),
        "CUBLAS_WORKSPACE_CONFIG, torch.backends.cudnn.benchmark=False",
    ),
    word(
        &["buffer", "buffers"],
        "State of modules that is not trained: running means, caches of positions.",
        |here| here.role("buffer"),
        "",
    ),
    word(
        &["kv cache", "kv caches", "kv_cache"],
        "Keys and values of earlier tokens that a model keeps to produce the next ones. Grows with the batch and the length of sequences.",
        |here| here.role("kv cache"),
        "shorter sequences, fewer at once, a quantized or offloaded cache",
    ),
    word(
        &["parameter copy", "parameter copies", "copies"],
        "Parameters of a module that is not trained itself but is a copy of one that is: an average of the weights (EMA), a target network.",
        |here| here.role("parameter copy"),
        "keep the copy in host memory or in lower precision",
    ),
    word(
        &["phase", "setup"],
        "When in a step memory was made; setup is before the first one.",
        |here| here.phase("setup"),
        "",
    ),
    word(&["forward"], "Made in the forward pass.", |here| here.phase("forward"), ""),
    word(&["backward"], "Made in the backward pass.", |here| here.phase("backward"), ""),
    word(
        &["optimizer"],
        "Made while the optimizer stepped; as a column of --iterations, the optimizer's state.",
        |here| here.phase("optimizer"),
        "",
    ),
    word(
        &["evaluation"],
        "Made while the model was evaluated.",
        |here| here.phase("evaluation"),
        "torch.no_grad() or inference_mode() keeps activations from being kept",
    ),
    word(
        &["category", "categories", "layer", "layers", "structure", "structures", "by", "rules", "preset"],
        "Ordered rules give each byte one category, first match wins. Two groupings of the same bytes: by layer (where in the model) and by structure (what for).",
        |here| Some(format!("rules {}", here.report.groupings.name)),
        "report --by layer | structure | tag; your own: --rules FILE (README)",
    ),
    word(
        &["cell", "cells", "amounts"],
        "The finest unit that is kept: class, tag, role, phase, library and pool together. Every view is a sum of cells.",
        |here| here.count(here.run.cells.len() as u64, "cell"),
        "",
    ),
];
