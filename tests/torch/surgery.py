"""Trains a model whose structure changes during training, as libraries for fine-tuning, pruning and growing do.

After each step it prints the names from `named_modules()` of parameters, gradients and optimizer state, and of
activations that modules keep from step to step.

    surgery.py SEED COUNT    the usual changes, then COUNT random ones
    surgery.py SEED busy     1,000 modules and short steps: changes that PyTorch's methods make, without any wait

Each change is followed by one step. Waits for a signal to end. Prints a check with `addresses` for each: address, role, path of its module, its own name.
"""

import math
import random
import signal
import sys
import time

import torch
from said import agent, check, path_of, say, storage, until
from torch import nn

WIDTH = 16


class Layer(nn.Linear):
    """Keeps its last output."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.kept = None

    def forward(self, x):
        y = super().forward(x)
        self.kept = y.detach()
        return y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Layer(), Layer()

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


class Adapted(nn.Module):
    """An adapter as in LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.lora = base, Layer()

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.heads = nn.ModuleDict({"a": Block()})
        self.head = Layer()

    def forward(self, x):
        for name, part in self.named_children():
            # As in transformers: a part of a list is a list for a moment.
            for each in [*part[:2], *list(part)[2:][-1:]] if name == "blocks" else part.values() if name == "heads" else [part]:
                x = each(x)
        return x


def truth(net, optimizer):
    rows, seen = [], {}
    for name, module in net.named_modules():
        path = path_of("Net", name)
        for own, tensor in module.named_parameters(recurse=False):
            if id(tensor) in seen:
                continue
            seen[id(tensor)] = tensor
            found = [("parameter", tensor), ("gradient", tensor.grad)]
            found += [("optimizer_state", state) for state in optimizer.state.get(tensor, {}).values()]
            rows += [[hex(storage(t)), what, path, own] for what, t in found if torch.is_tensor(t) and t.is_cuda]
        if getattr(module, "kept", None) is not None:
            rows.append([hex(storage(module.kept)), "activation", path, "-"])
    return rows


def step(name, net, optimizer, is_busy):
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    fresh = [p for p in net.parameters() if id(p) not in known]
    if fresh:
        optimizer.add_param_group({"params": fresh})
    modules = agent().modules
    if not is_busy:
        until("comparing modules is paid for", lambda: time.perf_counter() >= modules.due)
    net(torch.ones(4, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    check(name, addresses=truth(net, optimizer))
    optimizer.zero_grad()
    if is_busy:
        # As if the next change came before the next comparison, however slow this machine is.
        modules.due = agent().sweeper.due = math.inf


def places(net):
    """Returns (parent, name) of every module except the outermost."""
    return [(parent, name) for parent in net.modules() for name, child in parent.named_children()]


def holds(outer, inner):
    return any(part is inner for part in outer.modules())


class Surgeon:
    def __init__(self, net, seed):
        self.net, self.random, self.number = net, random.Random(seed), 0

    def place(self, *kinds):
        """Selects a block or layer at random; returns its (parent, name)."""
        if not any(isinstance(module, Block) for module in self.net.modules()):
            self.insert()
        found = [(p, n) for p, n in places(self.net) if n not in ("blocks", "heads") and isinstance(p, kinds or nn.Module)]
        return self.random.choice(found)

    def new_name(self):
        self.number += 1
        return f"part_{self.number}"

    def holder(self):
        """Selects a module at random that can hold a further one."""
        return self.random.choice([m for m in self.net.modules() if isinstance(m, (Block, Adapted))])

    def is_rich(self):
        return len(places(self.net)) > 10

    def wrap(self):
        parent, name = self.place()
        setattr(parent, name, Adapted(parent._modules[name]))

    def in_sequence(self):
        parent, name = self.place()
        setattr(parent, name, nn.Sequential(Layer(), parent._modules[name]))

    def unwrap(self):
        found = [(p, n) for p, n in places(self.net) if isinstance(p._modules[n], Adapted)]
        if found:
            parent, name = self.random.choice(found)
            setattr(parent, name, next(parent._modules[name].children()))

    def delete(self):
        parent, name = self.place()
        if self.is_rich() and len(parent._modules) > 1:
            if isinstance(parent, nn.ModuleList):
                del parent[int(name)]
            else:
                del parent._modules[name]

    def delete_first(self):
        if len(self.net.blocks) > 1:
            del self.net.blocks[0]

    def insert(self):
        self.net.blocks.insert(self.random.randrange(len(self.net.blocks) + 1), Block())

    def pop_and_insert(self):
        if len(self.net.blocks) > 1:
            block = self.net.blocks.pop(-1)
            self.net.blocks.insert(0, block)

    def pop_and_insert_in_sequence(self):
        for sequence in [module for module in self.net.modules() if type(module) is nn.Sequential]:
            sequence.insert(0, sequence.pop(len(sequence) - 1))

    def rekey(self):
        """The modules live on, without a place for a moment."""
        heads = list(self.net.heads.values())
        self.net.heads.clear()
        self.net.heads.update({self.new_name(): head for head in heads})

    def swap(self):
        (p, m), (q, n) = self.place(), self.place()
        one, other = p._modules[m], q._modules[n]
        if not (holds(one, q) or holds(other, p)):
            p._modules[m], q._modules[n] = other, one

    def reverse(self):
        for place, block in enumerate(list(self.net.blocks)[::-1]):
            self.net.blocks[place] = block

    def rename(self):
        parent, name = self.place(Block, Adapted)
        child = parent._modules[name]
        delattr(parent, name)
        setattr(parent, self.new_name(), child)

    def move(self):
        (parent, name), to = self.place(), self.holder()
        if isinstance(parent, (Block, Adapted)) and len(parent._modules) > 1 and not holds(parent._modules[name], to):
            to._modules[self.new_name()] = parent._modules.pop(name)

    def share(self):
        (parent, name), to = self.place(), self.holder()
        if not holds(parent._modules[name], to):
            setattr(to, self.new_name(), parent._modules[name])

    def tie(self):
        """Tied parameters are named after the first."""
        layers = [module for module in self.net.modules() if isinstance(module, Layer)]
        one, other = self.random.sample(layers, 2)
        other.weight = one.weight

    def replace(self):
        parent, name = self.place()
        setattr(parent, name, Layer())


CHANGES = [name for name, thing in vars(Surgeon).items() if callable(thing) and name not in ("__init__", "place", "new_name", "holder", "is_rich")]


#: Nothing reports these: they write into `_modules`, and no module is made or freed.
SILENT = ("swap", "move")
LISTED = ["delete_first", "insert", "pop_and_insert", "pop_and_insert_in_sequence", "rekey"]


def main(seed, count):
    is_busy = count == "busy"
    torch.manual_seed(7)
    torch.empty(1, device="cuda")
    until("the agent's Python", lambda: agent() is not None and agent().calibrated is not None)
    net = Net(330 if is_busy else 3).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    step("as made", net, optimizer, is_busy)
    surgeon = Surgeon(net, seed)
    changes = [change for change in CHANGES if not (is_busy and change in SILENT)]
    changes += LISTED if is_busy else [surgeon.random.choice(CHANGES) for _ in range(int(count))]
    for number, change in enumerate(changes):
        getattr(surgeon, change)()
        net.cuda()
        step(f"{number} {change}", net, optimizer, is_busy)
    enough = []
    signal.signal(signal.SIGTERM, lambda *_: enough.append(True))
    say(holds=f"{number} {change}", modules=len(list(net.modules())))
    while not enough:
        time.sleep(0.05)
    say(done=True)


main(int(sys.argv[1]), sys.argv[2])
