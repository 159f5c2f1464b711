"""Trains briefly, then keeps its memory until it is signalled to end, while another process requests its report."""

import signal
import sys
import time

import torch
from models import gpt
from said import numbers, say

enough = []
signal.signal(signal.SIGTERM, lambda *_: enough.append(True))
model, loss = gpt(layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
end = time.monotonic() + 30
# The agent starts its Python part. Without it the test's last assertion fails with the reason.
while time.monotonic() < end and getattr(sys.modules.get("_gpumem_torch"), "_core", None) is None:
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(3):
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
say(holding=True, device=numbers(0))
while not enough:
    time.sleep(0.05)
