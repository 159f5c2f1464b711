"""Trains tiny models of third-party libraries (libraries.txt), made from configurations, and tells at five moments of each step what every
live block is for and which name it must have: after the forward pass, the backward pass, clipping and the optimizer, and after a checkpoint
of model and optimizer was loaded.

    libraries.py CASE...    one of CASES each

Each check has `roles` and `rest` as in roles.py, `addresses` as in said.py, and `modules`: all paths of `named_modules()`.
The last step of each case is run with the ground truth of said.py beside it.
"""

import gc
import io
import sys
import time

import torch
from roles import WORKSPACES, Training, clear_workspaces
from said import GroundTruth, addresses, agent, mark, path_of, say, storage, until
from torch.nn import functional as F

#: Workspaces are known from the third on.
STEPS, LOADED_AT = 5, 3
LEARNING_RATE = 1e-3


class Case(Training):
    def __init__(self, name, model, batch, loss):
        parameters = [p for p in model.parameters() if p.requires_grad]
        super().__init__(name, model, [torch.optim.AdamW(parameters, lr=LEARNING_RATE)], saves=False)
        self.make_batch, self.loss_of = batch, loss
        self.inputs, self.checks = (), True

    def check(self, what, inputs=(), activations=(), **more):
        if not self.checks:
            return
        root = type(self.model).__name__
        modules = [path_of(root, name) for name, _ in self.model.named_modules(remove_duplicate=False)]
        rows = addresses(self.model, self.optimizers[0])
        super().check(what, self.inputs, activations, addresses=rows, modules=modules, **more)

    def loss(self, _):
        return self.loss_of(self.model, *self.inputs)

    def one(self, number):
        (optimizer,) = self.optimizers
        if agent() is not None:
            modules = agent().modules
            until("comparing modules is paid for", lambda: time.perf_counter() >= modules.due)
        self.inputs = self.make_batch()
        mark("phase forward")
        loss = self.forward(f"{number}/forward", self.inputs[0])
        mark("phase backward")
        loss.backward()
        mark("phase none")
        self.results = {storage(loss)}
        self.check(f"{number}/backward")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.check(f"{number}/clipped")
        optimizer.step()
        self.check(f"{number}/optimizer")
        optimizer.zero_grad()
        del loss
        self.results, self.inputs = set(), ()
        self.check(f"{number}/between")

    def load(self, number):
        (optimizer,) = self.optimizers
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, map_location="cpu")
        self.model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        del saved
        gc.collect()
        self.check(f"{number}/loaded")

    def run(self):
        for number in range(STEPS):
            self.one(number)
            if number == LOADED_AT:
                self.load(number)
        mark(f"model {self.name} truth")
        # It holds on to every node of the graph: roles are others.
        self.checks = False
        with GroundTruth(self.model):
            self.one(STEPS)
        mark("model none")


def words():
    return (torch.randint(0, 512, (4, 32), device="cuda"),)


def images():
    return torch.randn(4, 3, 32, 32, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")


def language_loss(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def image_loss(model, pictures, kinds):
    return F.cross_entropy(model(pictures), kinds)


def small_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=512, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).cuda().train()


def gpt2():
    Case("gpt2", small_gpt2(), words, language_loss).run()


def gpt2_checkpointed():
    model = small_gpt2()
    model.gradient_checkpointing_enable()
    Case("gpt2_checkpointed", model, words, language_loss).run()


def gpt2_lora():
    """The adapter is added when the model has been used for a while."""
    from peft import LoraConfig, get_peft_model

    model = small_gpt2()
    for _ in range(2):
        language_loss(model, *words()).backward()
    model.zero_grad()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
    Case("gpt2_lora", model, words, language_loss).run()


def timm_resnet():
    import timm

    model = timm.create_model("resnet10t", num_classes=16, in_chans=3).cuda()
    Case("timm_resnet", model, images, image_loss).run()


def timm_vit():
    import timm

    model = timm.models.VisionTransformer(img_size=32, patch_size=8, num_classes=16, embed_dim=64, depth=2, num_heads=4).cuda()
    Case("timm_vit", model, images, image_loss).run()


def torchvision_resnet():
    import torchvision

    Case("torchvision_resnet", torchvision.models.resnet18(num_classes=16).cuda(), images, image_loss).run()


def torchvision_mobilenet():
    import torchvision

    Case("torchvision_mobilenet", torchvision.models.mobilenet_v3_small(num_classes=16).cuda(), images, image_loss).run()


def diffusers_unet(checkpointed=False):
    from diffusers import UNet2DConditionModel

    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    sizes = {"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 8}
    model = UNet2DConditionModel(in_channels=4, out_channels=4, norm_num_groups=8, **blocks, **sizes).cuda().train()
    if checkpointed:
        model.enable_gradient_checkpointing()

    def batch():
        return tuple(torch.randn(shape, device="cuda") for shape in ((2, 4, 16, 16), (2, 8, 32), (2, 4, 16, 16)))

    def loss(model, noisy, text, noise):
        return F.mse_loss(model(noisy, 7, encoder_hidden_states=text).sample, noise)

    Case("diffusers_unet_checkpointed" if checkpointed else "diffusers_unet", model, batch, loss).run()


def diffusers_unet_checkpointed():
    diffusers_unet(True)


CASES = ["gpt2", "gpt2_checkpointed", "gpt2_lora", "timm_resnet", "timm_vit", "torchvision_resnet", "torchvision_mobilenet"]
CASES += ["diffusers_unet", "diffusers_unet_checkpointed"]

torch.manual_seed(7)
for case in sys.argv[1:] or CASES:
    globals()[case]()
    gc.collect()
    torch.cuda.empty_cache()
clear_workspaces()
say(workspaces=[hex(address) for address in WORKSPACES])
say(done=True)
