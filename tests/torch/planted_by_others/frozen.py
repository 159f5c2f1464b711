# Fine-tune only the classification head of a big encoder.
import time
import torch
from torch import nn
from transformers import BertConfig, BertModel

config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
with torch.device("cuda"):
    backbone = BertModel(config)
    head = nn.Linear(1024, 20)

backbone.eval()
optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()
for step in range(40):
    ids = torch.randint(0, 30000, (16, 256), device="cuda")
    labels = torch.randint(0, 20, (16,), device="cuda")
    features = backbone(ids).last_hidden_state[:, 0]
    loss = loss_fn(head(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
    if step % 10 == 0:
        print(step, loss.item())
