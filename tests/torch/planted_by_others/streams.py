# Each request handler has its own stream.
import concurrent.futures
import threading
import time
import torch
from torch import nn

with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 256)).half().eval()
local = threading.local()


def handle(n):
    if not hasattr(local, "stream"):
        local.stream = torch.cuda.Stream()
    with torch.cuda.stream(local.stream), torch.inference_mode():
        y = model(torch.empty(256, 4096, dtype=torch.half, device="cuda"))
        y.cpu()
    time.sleep(0.02)


with concurrent.futures.ThreadPoolExecutor(24) as pool:
    list(pool.map(handle, range(4000)))
