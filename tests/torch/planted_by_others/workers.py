# Data loading with augmentation "on the GPU" in the workers.
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Augmented(Dataset):
    def __init__(self, n=640):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        image = torch.empty(3, 64, 64).to("cuda")
        image = torch.flip(image, (2,)) * 1.1
        return image.cpu(), index % 10


if __name__ == "__main__":
    loader = DataLoader(Augmented(), batch_size=16, num_workers=3, multiprocessing_context="spawn", persistent_workers=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    opt = torch.optim.Adam(model.parameters())
    for epoch in range(5):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.02)
