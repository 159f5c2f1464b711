"""NCCL by torch.distributed with one rank, in stages.
    torch_nccl.py FILE_FOR_THE_RENDEZVOUS"""

import sys

import torch
from torch_common import say, wait

torch.cuda.init()
tensor = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
say(stage="before")
wait()
if not torch.distributed.is_nccl_available():
    say(refused="this PyTorch has no NCCL")
    sys.exit(0)
torch.distributed.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
torch.distributed.all_reduce(tensor)
torch.cuda.synchronize()
say(stage="one all-reduce")
wait()
gathered = [torch.empty_like(tensor)]
torch.distributed.all_gather(gathered, tensor)
torch.cuda.synchronize()
say(stage="one all-gather", end=True, nccl=str(torch.cuda.nccl.version()))
wait()
torch.distributed.destroy_process_group()
