# Keeps the states of open chats, half of which end; then compares all of a night's documents with each other.
import random
import torch
from torch import nn

random.seed(2)
model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096)).cuda().half().eval()


@torch.inference_mode()
def compare(documents):
    vectors = torch.zeros(documents, 4096, dtype=torch.half, device="cuda")
    return (vectors @ vectors.T).amax(1).cpu()


@torch.inference_mode()
def open_chat():
    return model(torch.zeros(random.randint(4000, 8000), 4096, dtype=torch.half, device="cuda"))


compare(53000)
for night in range(3):
    chats = [open_chat() for _ in range(100)]
    random.shuffle(chats)
    del chats[40:]
    compare(53000)
