//! Programs of tests/torch/planted_by_others, whose author had not read the rules: how often the first lines of the report name the
//! planted cause, and how often the first advice changes it.

use super::causes::{Program, reports_of};
use gpumem_tests::live::torch;
use serde_json::Value;
use std::collections::BTreeMap;

/// Version of PyTorch.
const VERSION: &str = "2.15.0";
/// Number of lines of the report that must name the cause.
const LINES: usize = 10;
/// Minimum share of programs with the right cause and the right first advice.
const LEAST_RIGHT: f64 = 0.95;

/// A program, the size of its device, a part of the report's first lines (empty if they do not name the cause), the kind of the first
/// advice, and a part of its text or of the name in it.
const PLANTED: [(&str, &str, &str, &str, &str); 29] = [
    ("accumulate", "18G", "Sequential.0", "retained_tensors", "call backward()"),
    ("adam_temp", "24G", "optimizer state", "optimizer_temporaries", "fused=True"),
    ("bptt", "80G", "LM/rnn", "retained_tensors", ".detach()"),
    ("cdist", "80G", "one request", "large_request", "in pieces"),
    ("deep_vit", "40G", "activations of ViT", "checkpointing", "ViT/blocks.*"),
    ("distill", "15G", "activations of Classifier", "evaluation_gradients", "optimizer updates"),
    ("double", "8G", "float64", "parameter_precision", "float32"),
    ("errors", "80G", "Scorer", "retained_tensors", "exception"),
    ("eval_grad", "12G", "", "evaluation_gradients", "no_grad"),
    (
        "failures",
        "80G",
        "tensors of several lines of Server.classify",
        "retained_tensors",
        "keep its text only",
    ),
    ("feature_hooks", "80G", "ConvNet/stages.3", "retained_tensors", ".detach().cpu()"),
    ("frozen", "9G", "activations of BertModel", "evaluation_gradients", "optimizer updates"),
    ("gradient_penalty", "4G", "create_graph=True", "retained_tensors", "create_graph=True"),
    ("graphs", "10G", "CUDA graphs", "graph_pools", "one pool"),
    ("jobs", "80G", "", "idle_context", "child processes"),
    ("logits", "40G", "LlamaForCausalLM", "large_output", "chunks"),
    ("naive_attention", "16G", "Reader/attn", "fused_operation", "scaled_dot_product_attention"),
    ("pinned", "80G", "pinned host memory", "pinned_memory", "fixed set"),
    ("position_bias", "80G", "a cache with an entry for each size", "retained_tensors", "such as lru_cache"),
    ("preds", "80G", "Tagger/classifier", "retained_tensors", "keeping the outputs"),
    ("prefetch", "7G", "prefetch.py:18", "retained_tensors", "on the host"),
    ("restarts", "80G", "optimizer state", "retained_tensors", "old optimizers"),
    ("similarity", "12G", "of the pool are unused", "allocator_setting", "expandable_segments"),
    ("stateful", "6G", "retain_graph=True", "retained_tensors", "without retain_graph=True"),
    ("streams", "80G", "streams", "streams", "Reuse"),
    ("string_cache", "80G", "Encoder/norm", "retained_tensors", ".detach().cpu()"),
    ("swa", "80G", "swa.py:13 snapshot", "retained_tensors", ".detach().cpu()"),
    ("tenant", "80G", "", "other_process", "another tenant"),
    ("workers", "80G", "", "idle_context", "child processes"),
];

const HEALTHY: [&str; 4] = ["h_conv", "h_gan", "h_lora", "h_varlen"];

/// Returns the file of a program.
fn file(name: &str) -> String {
    format!("planted_by_others/{name}.py")
}

/// Runs programs, given by name and size of the device, and returns their reports by name.
fn reports(programs: &[(&str, &str)]) -> Option<BTreeMap<String, Value>> {
    let (wheel, libraries) = (torch::wheel(VERSION)?, torch::libraries(VERSION)?);
    let libraries = libraries.to_str().expect("a path");
    let files: Vec<String> = programs.iter().map(|(name, _)| file(name)).collect();
    let program = |(&(name, memory), file)| {
        let held = if name == "tenant" { "48G" } else { "" };
        Program { name, command: (file, ""), memory, held, libraries, keys: &[], variables: &[] }
    };
    let programs: Vec<Program<'_>> =
        programs.iter().zip(files.iter().map(String::as_str)).map(program).collect();
    let reports = reports_of(&wheel, &programs);
    Some(reports.into_iter().map(|(name, report)| (name.to_owned(), report)).collect())
}

/// Returns whether the first lines of a report contain `part`.
fn names(report: &Value, part: &str) -> bool {
    report["text"].as_str().unwrap_or_default().lines().take(LINES).any(|line| line.contains(part))
}

#[test]
fn most_causes_that_others_planted_are_named_and_have_the_right_first_advice() {
    let Some(reports) = reports(&PLANTED.map(|(name, memory, ..)| (name, memory))) else { return };
    let mut wrong = Vec::new();
    for (name, _, part, kind, words) in PLANTED {
        let first = &reports[name]["why"]["advice"][0];
        let has_words = |text: &Value| text.as_str().is_some_and(|text| text.contains(words));
        let is_right =
            first["kind"] == kind && (has_words(&first["change"]) || has_words(&first["untrusted_names"][0]));
        if !is_right || !names(&reports[name], part) {
            wrong.push(format!("{name}: {part} and {kind} are expected, not {first}"));
        }
    }
    let right = PLANTED.len() - wrong.len();
    println!("{right} of {} are right; not so: {wrong:#?}", PLANTED.len());
    assert!(right as f64 >= PLANTED.len() as f64 * LEAST_RIGHT, "{wrong:#?}");
}

#[test]
fn healthy_programs_of_others_have_no_finding() {
    let Some(reports) = reports(&HEALTHY.map(|name| (name, "80G"))) else { return };
    for (program, report) in reports {
        assert_eq!(report["outcome"], "ended", "{program}");
        assert_eq!(report["findings"], serde_json::json!([]), "{program}");
        assert_eq!(report["why"]["advice"], serde_json::json!([]), "{program}");
    }
}
