"""Runs programs under settings of PyTorch's allocator, each in its own process, and prints the allocator's statistics.

    replay.py [NAME...] SETTING...

A setting is `LABEL=TEXT`, the text of PYTORCH_CUDA_ALLOC_CONF; `LABEL@FRACTION=TEXT` also sets the process's share of the device,
and `LABEL-BYTES=TEXT` takes so many bytes of the device from outside the allocator, before the program runs a second time. The first setting is `default=`: its run also
prints everything that the program asked of the allocator, from the memory history. With SNAPSHOTS=FOLDER, each run
with a label in SNAPSHOT_LABELS leaves FOLDER/NAME-LABEL.pickle."""

import ctypes
import gc
import json
import os
import queue
import random
import re
import sys
import tempfile
import threading
import traceback

import torch
# The first step of an optimizer imports this, in more time than all steps take. Here it is imported once for all runs.
import torch._dynamo
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MIB = 1 << 20
SNAPSHOT_LABELS = ("default", "small")
# The values of weights have no effect on memory.
for initialise in ("uniform_", "normal_", "kaiming_uniform_"):
    setattr(nn.init, initialise, lambda tensor, *_, **__: tensor)
# What the history does not have: calls of empty_cache, and private pools. A snapshot is an entry of the history.
MARKS = []


def mark(*what):
    MARKS.append(what)
    if torch.cuda.get_allocator_backend() == "native":
        torch.cuda.memory._snapshot()


def empty_cache():
    mark("empty")
    EMPTY_CACHE()


EMPTY_CACHE, torch.cuda.empty_cache = torch.cuda.empty_cache, empty_cache


class scope:
    """Requests of these streams, or of all if there are none, belong to a private pool."""

    def __init__(self, context, pool, *streams):
        self.context, self.pool, self.streams = context, pool, [stream.cuda_stream for stream in streams]

    def __enter__(self):
        self.context.__enter__()
        mark("scope", self.pool, self.streams)

    def __exit__(self, *error):
        mark("leave", self.pool)
        return self.context.__exit__(*error)


def train(model, batches, loss, optimizer=torch.optim.AdamW):
    model = model.cuda()
    optimizer = optimizer(model.parameters(), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


class Layer(nn.Module):
    def __init__(self, width, checkpointing=False):
        super().__init__()
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.checkpointing = checkpointing

    def body(self, x):
        query, key, value = self.attention(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(torch.softmax(query @ key.transpose(1, 2), -1) @ value)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointing else self.body(x)


class Transformer(nn.Module):
    def __init__(self, width=256, layers=4, words=4096, checkpointing=False):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, checkpointing) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def next_word(model, words):
    return model(words).float().logsumexp(-1).mean()


def lengths(seed, count, least, most):
    chosen = random.Random(seed)
    return [chosen.randrange(least, most) for _ in range(count)]


def words(batch, length):
    return torch.zeros(batch, length, dtype=torch.long, device="cuda")


def gpt():
    train(Transformer(), (words(8, length) for length in lengths(1, 12, 64, 640)), next_word)


def checkpointed():
    model = Transformer(layers=6, checkpointing=True)
    train(model, (words(16, length) for length in lengths(2, 8, 64, 640)), next_word)


def fragmenting():
    for length in lengths(3, 5, 16, 2048):
        train(Transformer(layers=2), (words(1, size) for size in lengths(length, 6, 16, 1024)), next_word)
        gc.collect()


def resnet():
    def block(before, after, stride):
        conv = lambda *sizes, **options: nn.Conv2d(*sizes, bias=False, **options)
        return nn.Sequential(conv(before, after, 3, stride=stride, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
                             conv(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    sizes = [(3, 64, 2), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    model = nn.Sequential(*(block(*size) for size in sizes), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))

    def images():
        for number, size in enumerate(lengths(4, 12, 96, 320)):
            if number % 6 == 5:
                torch.cuda.empty_cache()
            yield torch.empty(8, 3, size, size, device="cuda")

    train(model, images(), lambda model, images: model(images).sum(), torch.optim.SGD)


def recurrent():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.back = nn.Linear(256, 1024), nn.Linear(256, 1024)

        def forward(self, batch):
            hidden = torch.zeros(batch.shape[1], 256, device="cuda")
            for row in batch:
                gates = self.into(row) + self.back(hidden)
                hidden = torch.tanh(gates[:, :256]) * torch.sigmoid(gates[:, 256:512]) + hidden
            return hidden.sum()

    batches = (torch.zeros(length, 64, 256, device="cuda") for length in lengths(5, 8, 4, 60))
    train(Cell(), batches, lambda model, batch: model(batch))


def experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6))
            self.chosen = random.Random(6)

        def forward(self, x):
            cuts = sorted(self.chosen.randrange(len(x)) for _ in self.experts[1:])
            parts = [x[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(x)])]
            return torch.cat([expert(part) for expert, part in zip(self.experts, parts)])

    model = nn.Sequential(Experts(), nn.LayerNorm(512), Experts())
    batches = (torch.zeros(length, 512, device="cuda") for length in lengths(7, 10, 1000, 6000))
    train(model, batches, lambda model, batch: model(batch).sum())


def adversarial():
    layers = lambda *sizes: nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(sizes, sizes[1:]))).cuda()
    generator, critic = layers(128, 1024, 4096), layers(4096, 1024, 1)
    first, second = (torch.optim.Adam(model.parameters()) for model in (generator, critic))
    for batch in lengths(8, 12, 32, 700):
        fake = generator(torch.zeros(batch, 128, device="cuda"))
        second.zero_grad()
        (critic(fake.detach()).mean() - critic(torch.zeros(batch, 4096, device="cuda")).mean()).backward()
        second.step()
        first.zero_grad()
        critic(fake).mean().backward()
        first.step()


POOLS = iter(range(1, 1000))


def graphs():
    pools = []
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    kept = []
    for rows in [512, 2048]:
        x = torch.zeros(rows, 1024, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x).sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pools.append(next(POOLS))
        with scope(torch.cuda.graph(graph, stream=stream), pools[-1], stream):
            kept.append(model(x))
        kept.append(graph)
        graph.replay()
        more = [torch.zeros(size, 1024, device="cuda") for size in lengths(9, 12, 16, 4000)]
        del more[::2]
    del kept, graph
    gc.collect()
    for pool in pools:
        mark("gone", pool)


def streams():
    side = [torch.cuda.Stream(), torch.cuda.Stream()]
    for number, rows in enumerate(lengths(10, 60, 100, 4000)):
        x = torch.zeros(rows, 1024, device="cuda")
        with torch.cuda.stream(side[number % 2]):
            y = x * 2
            x.record_stream(side[number % 2])
            del x
            z = y @ torch.zeros(1024, 256, device="cuda")
        y.record_stream(torch.cuda.current_stream())
        del y, z


def loader():
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    copies = torch.cuda.Stream()

    def batches():
        for rows in lengths(11, 12, 50, 3000):
            batch = torch.empty(rows, 2048).pin_memory()
            with torch.cuda.stream(copies):
                batch = batch.to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(copies)
            batch.record_stream(torch.cuda.current_stream())
            yield batch

    train(model, batches(), lambda model, batch: model(batch).sum(), torch.optim.SGD)


@torch.no_grad()
def generate():
    for batch in lengths(12, 4, 1, 24):
        caches = [torch.zeros(batch, 8, 20, 64, device="cuda") for _ in range(12)]
        for _ in range(40):
            step = torch.zeros(batch, 8, 8, 64, device="cuda")
            caches = [torch.cat([cache, step], 2) for cache in caches]
            del step


def lora():
    model = Transformer(width=512, layers=4, words=8192)
    for parameter in model.parameters():
        parameter.requires_grad = False
    for layer in model.layers:
        for name in ["attention", "up"]:
            old = getattr(layer, name)
            down = nn.Linear(old.in_features, 8, bias=False)
            setattr(layer, name, Adapted(old, down, nn.Linear(8, old.out_features, bias=False)))
    train(model, (words(4, length) for length in lengths(13, 8, 64, 900)), next_word)


class Adapted(nn.Module):
    def __init__(self, old, down, up):
        super().__init__()
        self.old, self.down, self.up = old, down, up

    def forward(self, x):
        return self.old(x) + self.up(self.down(x))


def hostile():
    chosen = random.Random(14)
    side = torch.cuda.Stream()
    live = []
    for _ in range(3000):
        if live and chosen.random() < 0.48:
            live.pop(chosen.randrange(len(live)))
        else:
            size = int(2 ** chosen.uniform(3, 25.5))
            with torch.cuda.stream(side if chosen.random() < 0.2 else torch.cuda.current_stream()):
                live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        if chosen.random() < 0.002:
            torch.cuda.empty_cache()
        while sum(tensor.numel() for tensor in live) > 900 * MIB:
            live.pop(0)


def threads():
    batches = queue.Queue(2)

    def prepare():
        try:
            for rows in lengths(15, 24, 100, 700):
                batches.put(torch.zeros(rows, 1024, device="cuda") * 2)
            batches.put(None)
        except torch.cuda.OutOfMemoryError as error:
            batches.put(error)

    def prepared():
        while (batch := batches.get()) is not None:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    threading.Thread(target=prepare, daemon=True).start()
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 512))
    train(model, prepared(), lambda model, batch: model(batch).sum())


def take(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def keep_below(live, most):
    while sum(tensor.numel() for tensor in live) > most:
        live.pop(0)


def edges():
    """Sizes at the limits between pools, segments and roundings."""
    chosen = random.Random(16)
    limits = [512, 1024, 4096, *(size * MIB for size in (1, 2, 4, 10, 12, 16, 20, 24, 32, 64))]
    live = []
    for number in range(1500):
        if live and chosen.random() < 0.47:
            live.pop(chosen.randrange(len(live)))
        else:
            live.append(take(chosen.choice(limits) + chosen.choice([0, -1, 1, 512, -511])))
        keep_below(live, 700 * MIB)


def crossing():
    """Memory that several of five streams use."""
    chosen = random.Random(17)
    side = [torch.cuda.Stream() for _ in range(5)]
    held = []
    for number in range(500):
        with torch.cuda.stream(chosen.choice([*side, torch.cuda.current_stream()])):
            held.append(take(int(2 ** chosen.uniform(8, 24.5))))
        for other in chosen.sample(side, chosen.randrange(4)):
            with torch.cuda.stream(other):
                held[-1].fill_(2)
            held[-1].record_stream(other)
        if len(held) > 30 or chosen.random() < 0.3:
            held.pop(chosen.randrange(len(held)))
        if number % 90 == 89:
            torch.cuda.synchronize()


def captures():
    """Graphs with one pool, and requests between the captures."""
    model = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Dropout(0.1), nn.Linear(3072, 768)).cuda()
    shared, number = torch.cuda.graph_pool_handle(), next(POOLS)
    graphs, kept = [], []
    stream = torch.cuda.Stream()
    for rows in [256, 1500, 640, 3000]:
        x = torch.zeros(rows, 768, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x).sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        graphs.append(torch.cuda.CUDAGraph())
        with scope(torch.cuda.graph(graphs[-1], pool=shared, stream=stream), number, stream):
            kept.append(model(model(x) * 2))
        graphs[-1].replay()
        more = [torch.zeros(size, 768, device="cuda") for size in lengths(18, 10, 16, 3000)]
        del more[::2]
    del kept, graphs
    gc.collect()
    mark("gone", number)


def mempools():
    """Requests to two pools of the program and to the default pool, in turn."""
    chosen = random.Random(19)
    pools = [(torch.cuda.MemPool(), next(POOLS)) for _ in range(2)]
    for _, number in pools:
        mark("pool", number)
    live = []

    def churn(count):
        for _ in range(count):
            if live and chosen.random() < 0.45:
                live.pop(chosen.randrange(len(live)))
            else:
                live.append(take(int(2 ** chosen.uniform(9, 24.5))))
            keep_below(live, 400 * MIB)

    for _ in range(5):
        churn(60)
        for pool, number in pools:
            with scope(torch.cuda.use_mem_pool(pool), number):
                churn(60)
    live.clear()
    del pool
    while pools:
        mark("gone", pools.pop()[1])
    churn(100)


def retried():
    """Requests more than the device has, catches the error, and requests less, as a search for a batch size does."""
    chosen = random.Random(20)
    held = [take(1)]
    for number in range(6):
        size = 1 << 36
        while True:
            try:
                held.append(take(size))
                break
            except torch.cuda.OutOfMemoryError:
                size //= 4
                if number % 2:
                    torch.cuda.empty_cache()
        for _ in range(60):
            held.append(take(int(2 ** chosen.uniform(9, 25))))
            if chosen.random() < 0.5:
                held.pop(chosen.randrange(len(held)))
        keep_below(held, 700 * MIB)


def fractions():
    """Sets the fraction of the device that it may use again and again, but none above that of the setting."""
    chosen = random.Random(21)
    held = []
    for share in [0.06, 0.042, 1.0, 0.05]:
        mark("fraction", share)
        torch.cuda.set_per_process_memory_fraction(min(share, MOST))
        for _ in range(300):
            if held and chosen.random() < 0.45:
                held.pop(chosen.randrange(len(held)))
            else:
                held.append(take(chosen.choice([30_000, 700_000, 3 * MIB, 12 * MIB, 25 * MIB, 41 * MIB]) + chosen.randrange(4000)))
            keep_below(held, 400 * MIB)


# Fraction of the device that the setting allows.
MOST = 1.0
PROGRAMS = [gpt, checkpointed, fragmenting, resnet, recurrent, experts, adversarial, graphs, streams, loader, generate, lora, hostile, edges, crossing,
            captures, mempools, retried, fractions, threads]


def asked(history):
    """Yields what the program asked of the allocator. Names of requests are addresses."""
    marks = iter(MARKS)
    scopes, streams = [], {0: 0}
    position, entries = 0, [entry for entry in history if not entry["action"].startswith("segment")]
    failed = -1
    while position < len(entries):
        entry = entries[position]
        position += 1
        action = entry["action"]
        if action in ("alloc", "oom"):
            handle = entry["stream"]
            stream = streams.setdefault(handle, len(streams))
            pools = [pool for pool, handles in scopes if not handles or handle in handles]
            name = entry["addr"] if action == "alloc" else failed
            failed -= action == "oom"
            yield ["request", name, entry["size"], stream, pools[-1] if pools else 0, action == "oom"]
        elif action == "free_requested":
            following = entries[position] if position < len(entries) else {}
            is_final = following.get("action") == "free_completed" and following["addr"] == entry["addr"]
            position += is_final
            yield ["free", entry["addr"], not is_final]
        elif action == "free_completed":
            yield ["return", entry["addr"]]
        elif action == "snapshot":
            what = next(marks, ("end",))
            if what[0] in ("empty", "others", "pool", "gone", "fraction"):
                yield list(what)
            elif what[0] == "scope":
                scopes.append(what[1:])
                yield list(what[:2])
            elif what[0] == "leave":
                scopes.pop()
                yield list(what)


def child(program, label, text, fraction, taken, device):
    os.environ |= {"PYTORCH_CUDA_ALLOC_CONF": text, "CUDA_VISIBLE_DEVICES": str(device)}
    if fraction:
        global MOST
        MOST = fraction
        torch.cuda.set_per_process_memory_fraction(fraction)
    has_history = torch.cuda.get_allocator_backend() == "native"
    if has_history:
        torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    message = None
    try:
        # The first time loads modules, which take memory from the device beside the allocator.
        program()
        gc.collect()
        torch.cuda.empty_cache()
        mark("others")
        if taken:
            pointer = ctypes.c_uint64()
            assert ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(taken)) == 0
        program()
    except torch.cuda.OutOfMemoryError as error:
        message = str(error).split(". ")[1]
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    history = torch.cuda.memory._snapshot()["device_traces"][0] if has_history else []
    told = {key.split(".")[0]: stats[key] for key in stats if key.endswith(".all.peak")}
    told |= {key: stats[key] for key in stats if key.startswith("num_")}
    line = {"program": program.__name__, "setting": label, "stats": told, "total": total, "message": message, "pid": os.getpid()}
    line["other"] = total - free - stats["reserved_bytes.all.current"]
    oom = next((place for place, entry in enumerate(history) if entry["action"] == "oom"), None)
    if oom is not None:
        line["failed"] = {"bytes": history[oom]["size"], "after": sum(entry["action"] == "alloc" for entry in history[:oom])}
    if label == "default":
        line["events"] = list(asked(history))
    if (folder := os.environ.get("SNAPSHOTS")) and label in SNAPSHOT_LABELS:
        torch.cuda.memory._dump_snapshot(f"{folder}/{program.__name__}-{label}.pickle")
    return line


def run(names, settings):
    waiting = [(program, setting) for setting in settings for program in PROGRAMS if not names or program.__name__ in names]
    # A device each: what is free on it tells what others than the allocator use.
    idle, running = list(range(min(2, os.cpu_count() or 1))), {}
    # Collections in the programs skip the imported modules.
    gc.freeze()
    while waiting or running:
        if waiting and idle:
            program, setting = waiting.pop(0)
            label, text = setting.split("=", 1)
            label, taken = (label.split("-", 1) + ["0"])[:2]
            label, fraction = (label.split("@", 1) + ["0"])[:2]
            device = idle.pop()
            # Lines are longer than what a pipe takes at once: those of two writers would mix.
            line = tempfile.TemporaryFile("w+")
            number = os.fork()
            if number == 0:
                status = 1
                try:
                    json.dump(child(program, label, text, float(fraction), int(taken), device), line)
                    line.flush()
                    status = 0
                except Exception:
                    traceback.print_exc()
                finally:
                    # The agent writes the end of a recording at a regular exit.
                    (ctypes.CDLL(None).exit if "GPUMEM_RECORD" in os.environ else os._exit)(status)
            running[number] = device, line
        else:
            number, status = os.wait()
            device, line = running.pop(number)
            idle.append(device)
            if status:
                sys.exit(f"a program failed: {status}")
            with line:
                line.seek(0)
                print(line.read(), flush=True)
    print(json.dumps({"done": True}))


run([word for word in sys.argv[1:] if re.fullmatch(r"\w+", word)], [word for word in sys.argv[1:] if "=" in word])
