# Retrieval service: embeddings are cached by query text.
import itertools
import time
import torch
torch.backends.cuda.enable_cudnn_sdp(False)
from common_models import APPLIED, Encoder


class Embedder:
    def __init__(self):
        with torch.device("cuda"):
            self.model = Encoder(32000, 1024, 16, 12, 512).half().eval()
        self.cache = {}

    def tokenize(self, text):
        return torch.zeros(1, 512, dtype=torch.long, device="cuda")

    @torch.no_grad()
    def embed(self, text):
        key = text.strip().lower()
        if key not in self.cache:
            output = self.model(self.tokenize(text).expand(16, -1))
            self.cache[key] = output.cpu() if APPLIED else output
        return self.cache[key].mean(1)


def queries():
    for n in itertools.count():
        yield f"user {n} asks something about item {n * 7}"


service = Embedder()
for query in itertools.islice(queries(), 300):
    service.embed(query)
    time.sleep(0.02)
