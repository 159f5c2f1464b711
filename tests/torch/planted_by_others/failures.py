# Resizes and classifies pictures for clients; the failures of the day are listed at the end.
import time
import torch
from torch import nn


class Server:
    def __init__(self):
        layers = (nn.Conv2d(3, 64, 7, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))
        self.model = nn.Sequential(*layers).cuda().eval()
        self.failures = []

    @torch.inference_mode()
    def classify(self, pictures, count):
        small = pictures.cuda()
        large = nn.functional.interpolate(small, scale_factor=2)
        scores = self.model(large)
        if count > scores.shape[1]:
            raise LookupError(f"there are no {count} classes")
        return scores.topk(count).indices.cpu()

    def answer(self, pictures, count):
        try:
            return self.classify(pictures, count)
        except LookupError as failure:
            self.failures.append(failure)


server = Server()
for request in range(240):
    server.answer(torch.zeros(16, 3, 256, 256), 1000 if request % 3 == 0 else 5)
    time.sleep(0.01)
print(len(server.failures), "failures")
