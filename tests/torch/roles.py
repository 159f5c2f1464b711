"""Trains with each feature that the command line names, and prints the role of every live block at checks.

Roles are right by construction: from the program's own objects, and from which blocks existed when. None comes from the
agent's phases.

    check NAME: `roles` has bytes by role, `rest` blocks without a known role; `parts`: only of whole parameters
    at the end: `workspaces` has the blocks freed when PyTorch released its cuBLAS workspaces
"""

import gc
import sys

import torch
import torch.distributed as dist
from models import GPT, ResNet
from said import blocks, check, say, storage
from torch import nn
from torch.nn import functional as F

#: A block counts as outliving all steps only after three.
STEPS = 6


class Training:
    """`parts`: passes for each optimizer step. `call`: called in place of the model."""

    def __init__(self, name, model, optimizers, call=None, parts=1, retain=False, set_to_none=True, saves=True):
        self.name, self.model, self.optimizers, self.call = name, model, optimizers, call or model
        self.parts, self.retain, self.set_to_none, self.saves = parts, retain, set_to_none, saves
        #: Gradients are those that autograd accumulates; they are clipped.
        self.accumulates, self.clips, self.scaler = True, False, None
        #: Roles known in addition to the model and its optimizers, by address.
        self.more = {}
        #: Of programs with several devices, the one to compare.
        self.device = None
        #: Blocks allocated by the last forward pass, and those kept after the backward pass.
        self.made, self.results = set(), set()
        self.number = 0

    def roles(self):
        """Returns roles by address, from the program's objects."""
        found = {}
        put = lambda tensor, role: found.setdefault(storage(tensor), role)
        for parameter in self.model.parameters():
            put(parameter, "parameter")
            if parameter.grad is not None:
                put(parameter.grad, "gradient")
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if torch.is_tensor(value):
                        put(value, "optimizer_state")
        for buffer in self.model.buffers():
            put(buffer, "buffer")
        for parameter in sharded(self.model):
            put(parameter._sharded_param_data, "parameter")
            whole = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            for gradient in (whole, parameter.unsharded_accumulated_grad):
                if gradient is not None:
                    put(gradient, "gradient")
            for output in parameter.all_gather_outputs:
                put(output, "parameter")
        return {**self.more, **found}

    def check(self, what, inputs=(), activations=(), **more):
        roles, live = self.roles(), blocks(self.device)
        roles.update({storage(tensor): "input" for tensor in inputs})
        sums, rest = {}, []
        for address, size in live.items():
            role = roles.get(address) or ("activation" if address in activations or address in self.results else None)
            if role is None:
                rest.append([hex(address), size])
            else:
                sums[role] = sums.get(role, 0) + size
        check(f"{self.name}/{what}", roles=sums, rest=rest, **more)

    def batch(self):
        return torch.randint(0, 512, (4, 32), device="cuda")

    def loss(self, words):
        logits = self.call(words)
        return F.cross_entropy(logits.view(-1, 512), words.view(-1))

    def forward(self, what, words):
        """Runs a forward pass. Blocks that it allocated and did not free are kept for the backward pass, or are its
        result."""
        before, saved = blocks(self.device), set()

        def pack(tensor):
            saved.add(storage(tensor))
            return tensor  # held as autograd would hold it itself

        if self.saves:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = self.loss(words)
        else:
            loss = self.loss(words)
        live = blocks(self.device)
        self.made = {address for address, size in live.items() if before.get(address) != size}
        known = self.roles().keys() | {storage(words), 0}
        assert saved & live.keys() - known <= self.made, "saved blocks are new"
        self.check(what, [words], self.made)
        return loss

    def step(self, number):
        for part in range(self.parts):
            if self.parts > 1 and hasattr(self.model, "set_requires_gradient_sync"):
                self.model.set_requires_gradient_sync(part == self.parts - 1)
            words = self.batch()
            loss = self.forward(f"{number}/forward {part}", words)
            if self.retain:
                loss.backward(retain_graph=True)
                self.check(f"{number}/retained", [words], self.made)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            self.results = {storage(loss)}
            if self.accumulates:
                self.check(f"{number}/backward {part}", [words])
        if self.scaler:
            self.scaler.unscale_(self.optimizers[0])
            self.check(f"{number}/unscaled", [words])
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.check(f"{number}/clipped", [words])
        for optimizer in self.optimizers:
            optimizer.step()  # not the scaler's step, which reads numbers from the device
        if self.scaler:
            self.scaler.update()
        self.check(f"{number}/optimizer", [words])
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.set_to_none)
        del words, loss
        self.results = set()
        self.check(f"{number}/between")

    def run(self):
        for self.number in range(STEPS):
            self.step(self.number)

    def look_inside(self, module):
        """Checks in the middle of both passes, where a module's parameters are whole."""

        def look(*_):
            self.check(f"{self.number}/inside", parts=["parameter"])

        def follow(_, arguments, result):
            look()
            result.register_hook(look)

        module.register_forward_hook(follow)


def adam(*parts):
    return [torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)]


def small(**how):
    return GPT(layers=2, **how).cuda()


def plain():
    model = small()
    Training("plain", model, adam(model)).run()


class Images(Training):
    def batch(self):
        return torch.randn(8, 3, 64, 64, device="cuda")

    def loss(self, images):
        return self.call(images).square().mean()


def buffers():
    model = ResNet().cuda()
    Images("buffers", model, adam(model)).run()


SCRATCH = 64 << 20


class Scratch(nn.Module):
    """Allocates temporary memory."""

    def forward(self):
        torch.empty(SCRATCH, dtype=torch.uint8, device="cuda")


def temporaries():
    """Measures the peak of temporary memory in a pass, before anything else is allocated."""
    model, scratch = small(), Scratch()
    call = lambda words: (scratch(), model(words))[1]
    training = Training("temporaries", model, adam(model), call=call)
    loss = training.loss
    training.loss = lambda words: hooked(loss(words), lambda _: scratch())
    training.run()
    say(temporaries=SCRATCH)


def hooked(loss, hook):
    loss.register_hook(hook)
    return loss


def kept():
    model = small()
    Training("kept", model, adam(model), set_to_none=False).run()


def accumulated():
    model = small()
    Training("accumulated", model, adam(model), parts=3).run()


def clipped():
    model = small()
    training = Training("clipped", model, adam(model))
    training.clips = True
    training.run()


def scaled():
    """Gradients are unscaled by a GradScaler, whose own tensors have no role."""
    model = small()
    training, scaler = Training("scaled", model, adam(model)), torch.amp.GradScaler("cuda")
    training.scaler = scaler
    training.run()


def hooked_gradients():
    """Checks roles inside hooks of gradients."""
    model = small()
    training = Training("hooked_gradients", model, adam(model))

    def look(parameter):
        parameter.grad.norm()
        training.check(f"{training.number}/hook", parts=["gradient"])

    hooks = [p.register_post_accumulate_grad_hook(look) for p in list(model.parameters())[::3]]
    training.run()
    for hook in hooks:  # they keep the model
        hook.remove()


def retained():
    model = small()
    Training("retained", model, adam(model), retain=True).run()


def several():
    model = small()
    others = [model.wte, model.wpe, model.ln_f, model.lm_head]
    Training("several", model, adam(model.h) + [torch.optim.SGD([p for m in others for p in m.parameters()], lr=0.1, momentum=0.9)]).run()


def reentrant():
    model = small(checkpointing="reentrant")
    Training("reentrant", model, adam(model)).run()


def non_reentrant():
    model = small(checkpointing="non_reentrant")
    Training("non_reentrant", model, adam(model)).run()


def compiled():
    model = small()
    model.compile(backend="aot_eager")
    Training("compiled", model, adam(model), saves=False).run()


def ddp(name="ddp", **how):
    # Copies to the simulated device cannot be read back, so shapes and bucket order cannot be exchanged.
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_: None
    how = {"bucket_cap_mb": 0.1, "find_unused_parameters": True, **how}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = small()
    before = blocks()
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], **how)
    training = Training(name, model, adam(model), call=parallel)
    # Buckets, and a small map of parameters that are used.
    training.more = dict.fromkeys(blocks().keys() - before.keys(), "gradient")

    def reduced(_, bucket):
        assert storage(bucket.buffer()) in training.more, "a bucket was made when DDP was"
        bucket.buffer().norm()  # memory of its own, as hooks that compress need it
        training.check(f"{training.number}/hook", parts=["gradient"])
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, reduced)
    training.run()
    dist.destroy_process_group()


def ddp_views():
    ddp("ddp_views", gradient_as_bucket_view=True)


def sharded(model):
    """Parameters of FSDP2."""
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        for one in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            yield from one.fsdp_params if one else ()


def fsdp2():
    import torch.distributed.fsdp as found

    if not hasattr(found, "fully_shard"):  # before 2.6
        import torch.distributed._composable.fsdp as found
    return found


def fsdp(name="fsdp", parts=1, **how):
    """Runs one of two ranks, without their communication."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    fully_shard = fsdp2().fully_shard
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cuda", (2,))
    model = small()
    for block in model.h:
        fully_shard(block, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    training = Training(name, model, adam(model), parts=parts)
    training.look_inside(model.h[0].mlp)
    training.run()
    dist.destroy_process_group()


def fsdp_kept():
    fsdp("fsdp_kept", reshard_after_forward=False)


def fsdp_mixed():
    policy = fsdp2().MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp("fsdp_mixed", mp_policy=policy)


def fsdp_accumulated():
    """Gradients that are not reduced yet are unsharded."""
    fsdp("fsdp_accumulated", parts=2)


def graphed():
    """The forward and the backward pass are captured once and replayed at each step."""
    model = small()
    training = Training("graphed", model, adam(model))
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            training.loss(training.batch()).backward()
            training.optimizers[0].step()
            training.optimizers[0].zero_grad()
    torch.cuda.synchronize()
    words, graph = training.batch(), torch.cuda.CUDAGraph()
    before = blocks()
    with torch.cuda.graph(graph):
        # The memory from which the random generator reads its seed at each replay, if it exists already.
        training.more = dict.fromkeys(blocks().keys() - before.keys(), "input")
        loss = training.forward("1/forward", words)
        loss.backward()
    # The loss and the seed. A workspace is larger.
    training.results = {address for address, size in blocks().items() if address in training.made and size < 1 << 20}
    assert storage(loss) in training.results
    for number in range(1, STEPS):
        graph.replay()
        training.optimizers[0].step()
        training.check(f"{number}/optimizer", [words])
    clear_workspaces()  # from PyTorch 2.13 on they go with the graph


WORKSPACES = set()


def clear_workspaces():
    before = blocks()
    torch._C._cuda_clearCublasWorkspaces()
    WORKSPACES.update(before.keys() - blocks().keys())


FEATURES = ["temporaries", "plain", "kept", "accumulated", "clipped", "scaled", "hooked_gradients", "retained", "several", "buffers", "reentrant", "non_reentrant", "compiled", "ddp", "ddp_views"]
FEATURES += ["fsdp", "fsdp_kept", "graphed"]


def main():
    for word in sys.argv[1:] or FEATURES:
        globals()[word]()
        gc.collect()
        torch.cuda.empty_cache()
    clear_workspaces()
    say(workspaces=[hex(address) for address in WORKSPACES])
    say(done=True)


if __name__ == "__main__":
    main()
