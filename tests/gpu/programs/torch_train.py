"""One training loop whose blocks of steps run, in turns, with the agent paused, with the agent, and with torch's own
memory history; at the end the seconds of every block. Arms that stand next to each other see the same drift."""

import argparse
import time

import torch
from torch import nn
from torch_common import Agent, say, wait

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=10, help="of a block")
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--hold", action="store_true", help="wait for a line before the end")
parser.add_argument("--arms", default="off,on,history,history_all,off2")
options = parser.parse_args()

torch.manual_seed(1)
layer = nn.TransformerEncoderLayer(options.width, 8, 4 * options.width, batch_first=True, dropout=0.0)
model = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.randn(options.batch, 128, options.width, device="cuda")
agent = Agent()


def step():
    # A new length each time, so that the allocator must change blocks.
    step.number += 1
    length = 96 + 8 * (step.number % 5)
    optimizer.zero_grad(set_to_none=True)
    agent.push("forward")
    loss = model(data[:, :length]).square().mean()
    agent.pop()
    agent.push("backward")
    loss.backward()
    agent.pop()
    optimizer.step()


step.number = 0


def history(stacks):
    if stacks:
        torch.cuda.memory._record_memory_history(max_entries=200000, stacks=stacks)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


HISTORY = {"history": "python", "history_all": "all"}


def block(arm):
    if arm == "on":
        agent.resume()
    elif arm in HISTORY:
        history(HISTORY[arm])
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(options.steps):
        step()
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    if arm == "on" and not options.hold:
        agent.pause()
    elif arm in HISTORY:
        history(None)
    return took / options.steps


arms = options.arms.split(",")
pausable = False if options.hold else agent.pause()  # held: the agent sees everything
for _ in range(20):
    step()
found, refused = {arm: [] for arm in arms}, {}
for number in range(options.rounds):
    turn = number % len(arms)
    for arm in arms[turn:] + arms[:turn]:
        if arm in refused:
            continue
        try:
            found[arm].append(block(arm))
        except Exception as error:  # torch's history does not exist for every backend
            refused[arm] = repr(error)
say(pausable=pausable, agent=agent.library is not None, blocks=found, refused=refused,
    reserved=torch.cuda.memory_reserved(), backend=torch.cuda.get_allocator_backend())
if options.hold:
    wait()
