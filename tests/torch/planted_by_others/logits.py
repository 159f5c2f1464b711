# Pretraining of a small Llama with a large vocabulary.
import time
import torch
torch.backends.cuda.enable_cudnn_sdp(False)
from transformers import LlamaConfig, LlamaForCausalLM

cfg = LlamaConfig(vocab_size=152064, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4,
                  num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096)
with torch.device("cuda"):
    model = LlamaForCausalLM(cfg).to(torch.bfloat16)
model.train()
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step in range(40):
    ids = torch.randint(0, 150000, (6, 4096), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    time.sleep(0.05)
