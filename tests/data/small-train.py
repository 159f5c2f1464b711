#!/usr/bin/env python3
"""Writes small-train.log: a made-up training run of a small translation model, in the format of the TBD
suite's MXNet memory annotations (see import/src/tbd_log.rs). It is gpumemd's own: no measurement.

    python3 tests/data/small-train.py > tests/data/small-train.log
"""

CARD_MIB = 12189
OTHERS_MIB = 210          # what other processes hold on the card
PID = 20417
MIB = 1 << 20
PAD = 32                  # the pool adds it to every request

CONTEXT_MIB = 206         # held before the first allocation
tracked = 0
library_mib = 0           # what libraries took outside the annotations, so far


def process_mib():
    return CONTEXT_MIB + library_mib + -(-tracked // MIB)


def allocate(tag, bytes_):
    global tracked
    tracked += bytes_ + PAD
    print(f"[mem] Allocate {bytes_ + PAD} bytes GPU memory ({tag}).")
    free = CARD_MIB - OTHERS_MIB - process_mib()
    print(f"[mem] {free} MB GPU global memory free, total {CARD_MIB} MB.")


def batch(number, speed):
    print(
        f"[INFO:root] Global Step[{number}] Epoch[0] Batch [{number}]\tSpeed: {speed:.2f} samples/sec\t"
        f"perplexity={9000 / (number + 5):.6f}\tMemory Usage: \tpython3-pid_{PID}={process_mib()}\t"
        f"Power: {84 + number % 7}.00 W\tEnergy: {number * 24}.00 J"
    )


batch_size, length, hidden, vocabulary, layers = 64, 20, 256, 8000, 2
weights = {
    "source_embed_weight": vocabulary * hidden,
    "target_embed_weight": vocabulary * hidden,
    "att_query_weight": hidden * hidden,
    "att_key_weight": hidden * hidden,
    "logits_weight": vocabulary * hidden,
}
for side in ("encoder", "decoder"):
    for layer in range(layers):
        weights[f"{side}_rnn_l{layer}_i2h_weight"] = 4 * hidden * hidden
        weights[f"{side}_rnn_l{layer}_h2h_weight"] = 4 * hidden * hidden
        weights[f"{side}_rnn_l{layer}_i2h_bias"] = 4 * hidden

print("[INFO:model] Command: /opt/model/train.py --batch-size 64 --hidden 256 --layers 2:2")
print("[trace] In SimpleBind.")
for name in ("source", "target", "target_label"):
    allocate(name, 4 * batch_size * length)
for name, elements in weights.items():
    allocate(f"in_arg:{name}", 4 * elements)
    allocate(f"arg_grad:{name}", 4 * elements)
print("[mem] finished binding.")
for side in ("source", "target"):
    allocate(f"forward_features:{side}_embed_embed", 4 * batch_size * length * hidden)
for side in ("encoder", "decoder"):
    for layer in range(layers):
        for step in range(length):
            allocate(f"forward_features:{side}_rnn_l{layer}_t{step}_out", 4 * batch_size * hidden)
            allocate(f"forward_features:{side}_rnn_l{layer}_t{step}_i2h", 16 * batch_size * hidden)
library_mib = 140         # cuDNN and cuBLAS handles with the first kernels
for step in range(length):
    allocate(f"forward_features:att_scores_t{step}", 4 * batch_size * length * hidden)
allocate("workspace:dot-inl", 1 << 20)
allocate("untagged", 4 * batch_size)
print("[INFO:training] Training started.")
allocate("forward_features:logits", 4 * batch_size * length * vocabulary)
allocate("forward_features:softmax_backward", 4 * batch_size * length * vocabulary)
batch(50, 371.2)
for name, elements in weights.items():
    allocate(f"_optimizer_weight_update_{name}", 4 * elements)
    allocate(f"_optimizer_weight_update_{name}", 4 * elements)
library_mib = 216         # kernels loaded on first use
batch(100, 502.8)
allocate("_equal_scalar", 4 * batch_size * length)
allocate("_rminus_scalar", 4 * batch_size * length)
allocate("forward_features:clip_global_norm", 4 * batch_size)
for number in range(150, 401, 50):
    if number == 250:
        allocate("forward_features:logits", 4 * batch_size * length * vocabulary)
    batch(number, 500 + number % 13)
print("[INFO:training] Training stopped")
