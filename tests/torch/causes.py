"""Programs as people write them: each has one planted reason for the memory that it holds, or none.

    causes.py NAME [applied]    runs one of them, without or with the change that is advised; `causes.py --list` prints the names

The device has 16 GiB. A program that runs out of memory ends with PyTorch's error, as the user's would.
"""

import collections
import concurrent.futures
import copy
import functools
import gc
import io
import random
import signal
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from waiting import wait_for_frames

MIB = 1 << 20
WIDTH = 1024
#: Whether the program has the change that is advised.
APPLIED = "applied" in sys.argv[2:]
#: Seconds of a step, as on a GPU: the simulated one takes no time to compute. With the change, only the peak matters.
PACE = 0 if APPLIED else 0.04


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    is_checkpointed = False

    def __init__(self, width=WIDTH, depth=4, classes=1000):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def kept(tensor):
    """What a program keeps of a tensor: with the change, little of it on the host."""
    return tensor.detach().flatten()[:1].cpu() if APPLIED else tensor


def batch(rows=2048, width=WIDTH):
    time.sleep(PACE)
    return torch.randn(rows, width, device="cuda")


def trained(model, steps, rows=2048, width=WIDTH, after=lambda output, loss: None, optimizer=None):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(steps):
        output = model(batch(rows, width))
        loss = output.float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(output, loss)
    return optimizer


# Leaks in training.


def outputs_kept():
    """Predictions are collected for a metric, with their graphs."""
    predictions = []
    trained(Net().cuda(), 300, rows=16_384, after=lambda output, loss: predictions.append(kept(output)))


def losses_kept():
    """The sum of the losses is a tensor with all graphs behind it."""
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    total = 0
    for _ in range(200):
        loss = model(batch(1024)).float().pow(2).mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        total = total + (loss.item() if APPLIED else loss)


def hooks_keep():
    """A hook for debugging keeps what the layer returns."""
    model = Net().cuda()
    seen = collections.defaultdict(list)
    model.blocks[2].up.register_forward_hook(lambda module, args, result: seen["up"].append(kept(result.detach())))
    trained(model, 400, rows=4096)


def gradients_kept():
    """Gradients are cloned for statistics in each step."""
    model = Net().cuda()
    history = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(200):
        model(batch(256)).float().pow(2).mean().backward()
        history.append([kept(p.grad.clone()) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()


def gradients_kept_by_a_closure():
    """Gradients are cloned in a hook that a trainer calls after the backward pass, inside of the optimizer's step."""
    model = Net().cuda()
    history = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def on_after_backward():
        history.append([kept(p.grad.clone()) for p in model.parameters()])

    def closure(rows):
        optimizer.zero_grad()
        loss = model(batch(rows)).float().pow(2).mean()
        loss.backward()
        on_after_backward()
        return loss

    for _ in range(200):
        optimizer.step(functools.partial(closure, 256))


def optimizers_kept():
    """A new optimizer for each restart of the schedule; the old ones stay in a list."""
    model = Net(depth=8).cuda()
    optimizers = []
    for _ in range(40):
        optimizers = [] if APPLIED else optimizers
        optimizers.append(torch.optim.Adam(model.parameters(), lr=1e-4))
        trained(model, 5, rows=256, optimizer=optimizers[-1])


def tracebacks_kept():
    """Errors of bad batches are collected; their tracebacks hold the frames with all activations."""
    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def one(step):
        output = model(batch(1024))
        if step % 3 == 2:
            raise ValueError("a bad batch")
        output.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    errors = []
    for step in range(300):
        try:
            one(step)
        except ValueError as error:
            errors.append(str(error) if APPLIED else error)


def optimizers_for_each_step_kept():
    """Each step builds an optimizer, and its scheduler, which is kept for a log, holds it."""
    model = Net(width=512).cuda()
    schedulers = []

    def update(loss, rate):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        schedulers[:] = [torch.optim.lr_scheduler.ConstantLR(optimizer)] + ([] if APPLIED else schedulers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(60):
        update(model(batch(128, 512)).pow(2).mean(), 1e-3 / (step + 1))


def schedulers_keep_optimizers():
    """Warm restarts: each cycle builds an optimizer, and its scheduler, which is kept, holds it. Memory does not run out."""
    model = Net(width=512).cuda()
    schedulers = []
    for _ in range(15):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        schedulers = [] if APPLIED else schedulers
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6))
        for _ in range(6):
            model(batch(128, 512)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedulers[-1].step()


def weights_kept():
    """A loop with an update of its own, without an optimizer, logs a weight in each iteration."""
    model = Net().cuda()
    log = []
    for _ in range(100):
        model(batch(128)).pow(2).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
        log.append(kept(model.blocks[0].up.weight.detach().clone()))


def averages_kept():
    """A copy of the model is made for each epoch, and stays in a history."""
    model = Net(width=512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    history = []
    for _ in range(30):
        trained(model, 3, rows=64, width=512, optimizer=optimizer)
        history = [] if APPLIED else history
        history.append(copy.deepcopy(model).cpu() if APPLIED else copy.deepcopy(model))


def hooks_of_gradients_keep():
    """A hook before the backward pass of the model keeps the gradient of its output, which its last layer makes."""
    model = Net().cuda()
    seen = []
    model.register_full_backward_pre_hook(lambda module, gradients: seen.append(kept(gradients[0].clone())))
    trained(model, 300, rows=16_384)


def models_kept():
    """A model for each trial. `create_graph=True` makes a cycle of each parameter and its gradient, which nothing collects."""
    gc.disable()
    for _ in range(150):
        model = Net().cuda()
        model(batch(256)).pow(2).mean().backward(create_graph=not APPLIED)


# Leaks in inference.


def logits_kept_in_evaluation():
    """The logits of a long evaluation after a short training are kept on the device."""
    model = Net(depth=2, classes=16_000).cuda()
    trained(model, 12, rows=256)
    model.eval()
    logits = []
    with torch.no_grad():
        for _ in range(300):
            logits.append(kept(model(batch(2048))))


def features_kept():
    """The features of a data set are collected. They fit."""
    model = Net(width=512).cuda().eval()
    features = []
    with torch.inference_mode():
        for _ in range(100):
            features.append(kept(model(batch(4096, 512))))


def sessions_kept():
    """A server keeps the state of each session, and no session expires."""
    lengths = random.Random(1)
    model = Net(width=512).cuda().eval()
    sessions = {}
    with torch.no_grad():
        for _ in range(150):
            model(batch(lengths.choice([64, 256, 1024]), 512))
            session = lengths.randrange(60)
            if APPLIED:
                sessions.clear()
            state = torch.zeros(2 * MIB, device="cuda")
            sessions[session] = torch.cat([sessions[session], state]) if session in sessions else state


def graphs_kept():
    """A CUDA graph for each length; each has its private pool."""
    model = Net(width=512, depth=2).cuda().eval()
    graphs = []
    with torch.no_grad():
        for number in range(400):
            inputs = batch(4096 + 8 * number, 512)
            model(inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=graphs[0][0].pool() if APPLIED and graphs else None):
                output = model(inputs)
            graphs.append((graph, inputs, output))


def a_stream_for_each_request():
    """Each request runs on a new stream, and the memory that a stream cached serves no other. PyTorch has 32 streams."""
    model = Net(width=512, depth=2).cuda().eval()
    streams = []
    with torch.no_grad():
        for _ in range(40):
            streams.append(streams[0] if APPLIED and streams else torch.cuda.Stream())
            with torch.cuda.stream(streams[-1]):
                model(batch(8192, 512))


def pinned_kept():
    """Pinned staging buffers are kept."""
    model = Net(width=512).cuda().eval()
    buffers = []
    with torch.no_grad():
        for _ in range(100):
            if not APPLIED or not buffers:
                buffers.append(torch.empty(4 * MIB, pin_memory=True))
            model(batch(64, 512))


def embeddings_kept():
    """The embeddings of a data set are collected on the device."""
    model = Net().cuda().eval()
    collected = []
    with torch.no_grad():
        for _ in range(4000):
            collected.append(kept(model.blocks[0](batch(8192))))


def cache_without_limit():
    """A cache by request that never evicts."""
    model = Net().cuda().eval()
    cache = {}

    def answer(request):
        if request not in cache:
            if APPLIED:
                cache.clear()
            cache[request] = torch.zeros(4 * MIB, device="cuda")
        return cache[request]

    with torch.no_grad():
        for request in range(4000):
            model(batch(64))
            answer(request)


# Memory outside of PyTorch's allocator.


def communicators_kept():
    """Each expert gets a process group, and each group a communicator with its buffers."""
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = Net(width=512).cuda()
    for _ in range(150):
        group = torch.distributed.new_group([0], use_local_synchronization=True)
        torch.distributed.all_reduce(torch.zeros(4, device="cuda"), group=group)
        trained(model, 1, rows=256, width=512)
        if APPLIED:
            torch.distributed.destroy_process_group(group)


def modules_loaded_at_once():
    """A server in a container whose image sets CUDA_MODULE_LOADING=EAGER; the harness sets it."""
    healthy_inference()


def workspaces_kept():
    """A server: each thread has a cuBLAS handle, and each request a stream. PyTorch before 2.13 keeps a workspace for each pair."""
    model = Net(width=512, depth=2).cuda().eval()

    def answer(request):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            return model(batch(64, 512)).sum().item()

    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        list(threads.map(answer, range(8000)))


# Out of memory for other reasons.


def distributed(model):
    """The model as the only rank of a job, with buckets for its gradients."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=APPLIED)


def buckets_too_large():
    """Each gradient is held twice: as a tensor, and in a bucket."""
    with torch.device("cuda"):
        model = distributed(Net(width=4096, depth=10))
    trained(model, 5, rows=64, width=4096, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))


def evaluation_with_gradients():
    """Evaluation in one pass without no_grad."""
    model = Net(depth=8).cuda()
    trained(model, 20, rows=512)
    model.eval()
    losses = []
    with torch.set_grad_enabled(not APPLIED):
        for _ in range(100):
            losses.append(model(batch(2048)).float().pow(2).mean())


def batch_too_large():
    """The activations of one step do not fit."""
    model = Net(depth=24).cuda()
    model.is_checkpointed = APPLIED
    trained(model, 10, rows=40_000)


def long_batch_too_large():
    """A batch that is longer than all before does not fit."""
    model = Net(depth=8, classes=32_000).cuda()
    optimizer = trained(model, 12, rows=2048)
    trained(model, 1, rows=2048 if APPLIED else 30_000, optimizer=optimizer)


def model_too_large():
    """The parameters do not fit."""
    if APPLIED:
        torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        Net(width=8192, depth=40)


def state_too_large():
    """The state that Adam makes in its first step does not fit."""
    with torch.device("cuda"):
        model = Net(width=4096, depth=10)
    trained(model, 5, rows=64, width=4096, optimizer=SmallState(model.parameters()) if APPLIED else None)


class SmallState(torch.optim.Optimizer):
    """The memory of bitsandbytes.optim.Adam8bit: two values of 8 bits for each parameter, and a scale for each block of 256. Its
    kernels need no temporary memory. It computes nothing, as the kernels of the simulated GPU."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            for name in ("state1", "state2") if parameter.grad is not None else ():
                if name not in self.state[parameter]:
                    self.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.uint8)
                    self.state[parameter][name + "_scale"] = torch.zeros(-(-parameter.numel() // 256), device="cuda")


def temporaries_too_large():
    """Adam's state fits, and the temporaries of its first step do not."""
    with torch.device("cuda"):
        model = Net(width=4096, depth=7)
    trained(model, 5, rows=64, width=4096, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False if APPLIED else None))


def losses_added_up():
    """The losses of many passes are added up for one backward pass, so the graphs of all passes are kept."""
    model = Net().cuda()
    total = 0
    for _ in range(200):
        loss = model(batch(4096)).float().pow(2).mean()
        if APPLIED:
            loss.backward()
        else:
            total = total + loss
    if not APPLIED:
        total.backward()


def teacher_with_gradients():
    """Distillation: the teacher's activations are kept, because it runs with gradients. A batch that is longer does not fit."""

    class Teacher(Net):
        pass

    teacher, model = Teacher(depth=12).cuda().eval(), Net(depth=1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    teacher.requires_grad_(not APPLIED)
    for rows in [2048] * 10 + [34_000] * 10:
        inputs = batch(rows)
        F.mse_loss(model(inputs), teacher(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()


def data_on_the_device():
    """The data set is moved to the device as a whole; a step does not fit beside it."""
    data = torch.zeros(2_750_000, WIDTH).to("cpu" if APPLIED else "cuda")
    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for rows in data.split(60_000):
        model(rows.cuda()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def logits_too_large():
    """A vocabulary of 128,000 over a long sequence: logits, their float copy and the gradient are the peak."""
    model = Net(depth=2, classes=128_000).cuda()
    if not APPLIED:
        return trained(model, 10, rows=12_000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(10):
        hidden = batch(12_000)
        for block in model.blocks:
            hidden = block(hidden)
        inputs = hidden.detach().requires_grad_()
        for rows in inputs.chunk(8):
            (model.head(rows).float().pow(2).mean() / 8).backward()
        hidden.backward(inputs.grad)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def second_optimizer():
    """The state of a second optimizer does not fit while the first exists."""
    with torch.device("cuda"):
        model = Net(width=4096, depth=5)
    first = trained(model, 5, rows=64, width=4096)
    if APPLIED:
        first = None
    second = trained(model, 5, rows=64, width=4096)
    del first, second


def one_huge_request():
    """One tensor for all pairs of 100,000 elements."""
    model = Net().cuda()
    trained(model, 5)
    torch.zeros(100_000, 100_000, device="cuda")


def fraction_too_small():
    """The limit of the process is too small for the step."""
    torch.cuda.set_per_process_memory_fraction(0.1)
    trained(Net(depth=8).cuda(), 10, rows=8192)


def fragmentation():
    """A cache of small entries gives up every second one: the free pieces are too small for a large request."""
    with torch.no_grad():
        entries = [torch.empty(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(1400)]
        del entries[::2]
        torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")


def other_tenant():
    """Another process holds most of the device; the harness starts it."""
    trained(Net(depth=8).cuda(), 200, rows=8192)


def holder():
    """The other process of `other_tenant`."""
    kept = torch.empty(13 << 30, dtype=torch.uint8, device="cuda")
    print("holding", flush=True)
    signal.pause()
    del kept


# Memory does not run out, and a change that costs nothing saves much.


def embeddings_with_graphs():
    """Inference without no_grad: each pass keeps its activations until its output is dropped."""
    model = Net(depth=8).cuda().eval()
    with torch.set_grad_enabled(not APPLIED):
        for _ in range(8):
            model(batch(8192)).detach().cpu()


def gradients_cleared_late():
    """The gradients of the last step are cleared after the forward pass."""
    model = Net(width=2048, depth=8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(6):
        if APPLIED:
            optimizer.zero_grad()
        loss = model(batch(4096, 2048)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def teacher_fits():
    """The teacher runs with gradients, which no optimizer uses."""

    class Teacher(Net):
        pass

    teacher, model = Teacher(depth=12).cuda().eval(), Net(depth=1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    teacher.requires_grad_(not APPLIED)
    for _ in range(8):
        inputs = batch(4096)
        F.mse_loss(model(inputs), teacher(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpoint_stays():
    """The checkpoint is loaded to the device, and stays there while the model is trained."""
    model = Net(width=2048).cuda()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location="cpu" if APPLIED else "cuda")
    model.load_state_dict(state)
    trained(model, 8, rows=256, width=2048, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    return state


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Net(depth=8)
        self.top = nn.Linear(1000, 10)

    def forward(self, x):
        return self.top(F.relu(self.backbone(x)))


def backbone_with_gradients():
    """Only the last layer is trained, and all others compute gradients, too."""
    model = Classifier().cuda()
    model.backbone.requires_grad_(not APPLIED)
    trained(model, 10, rows=4096, optimizer=torch.optim.Adam(model.top.parameters(), lr=1e-4))


def rollouts_with_gradients():
    """Reinforcement learning: a rollout keeps its graphs while the policy is trained with it."""
    model = Net(depth=6, classes=16).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scores = inputs = None
    for _ in range(8):
        states, outputs = [], []
        with torch.set_grad_enabled(not APPLIED):
            for _ in range(16):
                states.append(batch(256))
                outputs.append(model(states[-1]).log_softmax(-1)[:, 0])
            scores, inputs = torch.cat(outputs), torch.cat(states)
        del states, outputs
        for part, old in zip(inputs.split(512), scores.split(512)):
            (model(part).log_softmax(-1)[:, 0] - old.detach()).exp().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class Adapted(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, width):
        super().__init__()
        self.base_layer = nn.Linear(width, width)
        self.lora_A, self.lora_B = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def base_is_trained():
    """The layers have adapters, and their own parameters are trained, too."""
    with torch.device("cuda"):
        model = nn.Sequential(*(Adapted(4096) for _ in range(12)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or not APPLIED)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained(model, 6, rows=64, width=4096, optimizer=torch.optim.Adam(parameters, lr=1e-4, fused=True))


def double_by_numpy():
    """The data are float64, as those of NumPy are, and so is the model."""
    kind = torch.float32 if APPLIED else torch.float64
    model = Net().cuda().to(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(8):
        model(batch(4096).to(kind)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def losses_of_micro_batches():
    """The losses of eight micro-batches are added up for one backward pass."""
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(6):
        total = 0
        for _ in range(8):
            loss = model(batch(2048)).pow(2).mean()
            if APPLIED:
                loss.backward()
            else:
                total = total + loss
        if not APPLIED:
            total.backward()
        optimizer.step()
        optimizer.zero_grad()


def answers_in_float32():
    """Inference with float32 parameters, which have most of the memory."""
    torch.set_default_dtype(torch.bfloat16 if APPLIED else torch.float32)
    with torch.device("cuda"):
        model = Net(width=4096, depth=5).eval()
    with torch.inference_mode():
        for _ in range(20):
            model(batch(16, 4096))


# Nothing is wrong.


def healthy_training():
    trained(Net().cuda(), 60)


def healthy_distributed():
    trained(distributed(Net().cuda()), 40, rows=512)


def healthy_evaluation():
    model = Net().cuda()
    for _ in range(6):
        trained(model, 10, rows=1024)
        model.eval()
        with torch.no_grad():
            for _ in range(5):
                model(batch(2048))
        model.train()


def healthy_inference():
    model = Net().cuda().eval()
    with torch.inference_mode():
        for rows in range(100, 900, 4):
            model(batch(rows))


def healthy_modules():
    """Large libraries of kernels, of which the driver loads what is used."""
    healthy_inference()


def healthy_accumulation():
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(80):
        model(batch(512)).float().pow(2).mean().backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def healthy_lengths():
    """Batches of different lengths; the pool grows to the largest."""
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lengths = [512, 2048, 1024, 1536, 768, 1792] * 12
    for rows in lengths:
        model(batch(rows)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def healthy_adversaries():
    """Two optimizers take turns."""
    generator, critic = Net(width=512).cuda(), Net(width=1000, classes=1).cuda()
    optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]
    for _ in range(40):
        made = generator(batch(512, 512))
        critic(made.detach()).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        (-critic(made)).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def healthy_restarts():
    """A new optimizer for each cycle; the old one is dropped."""
    model = Net(width=512).cuda()
    for _ in range(12):
        trained(model, 6, rows=128, width=512)


def healthy_server():
    """Requests of any length, and a cache that evicts."""
    lengths = random.Random(5)
    model = Net(width=512).cuda().eval()
    cache = collections.OrderedDict()
    with torch.inference_mode():
        for request in range(250):
            cache[request] = model(batch(lengths.choice([64, 256, 1024, 2048]), 512))
            if len(cache) > 32:
                cache.popitem(False)


def healthy_generation():
    """Keys and values grow with each token, and are dropped with each answer."""
    model = Net(width=512).cuda().eval()
    with torch.no_grad():
        for _ in range(8):
            kept = []
            for _ in range(20):
                model(batch(64, 512))
                kept.append(torch.zeros(4 * MIB, device="cuda"))


def healthy_growing_answers():
    """A cache that is joined with the keys of each token, and dropped with each answer. Each prompt is longer than the last."""
    model = Net(width=512).cuda().eval()
    with torch.inference_mode():
        for answer in range(8):
            kept = torch.zeros(2 * MIB * (answer + 2), device="cuda")
            for _ in range(20):
                model(batch(64, 512))
                kept = torch.cat([kept, torch.zeros(MIB, device="cuda")])


CASES = {name: case for name, case in list(globals().items()) if callable(case) and getattr(case, "__module__", "") == "__main__"}
for helper in ("Block", "Net", "SmallState", "Classifier", "Adapted", "kept", "batch", "trained", "distributed"):
    CASES.pop(helper, None)

if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print("\n".join(CASES))
    else:
        torch.empty(1, device="cuda")
        wait_for_frames()
        CASES[sys.argv[1]]()
