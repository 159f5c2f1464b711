"""Trains tiny models of third-party libraries (libraries.txt) and prints the role and name of every live block.

Models are made from configurations. Each step has five checks: after the forward pass, the backward pass, clipping, the
optimizer, and loading a checkpoint of model and optimizer.

    libraries.py CASE...    one of CASES each

`generate` and `exhausted` run alone: the first trains nothing, the second runs out of memory.

Each check has `roles` and `rest` as in roles.py, `addresses` as in said.py, and `modules`: all paths of
`named_modules()`.
The last step of each case also runs with the ground truth of said.py.
"""

import gc
import io
import sys
import time
from collections import Counter

import torch
from roles import WORKSPACES, Training, clear_workspaces
from said import GroundTruth, addresses, agent, check, mark, path_of, say, storage, until
from torch.nn import functional as F

#: Workspaces are known from the third step on.
STEPS, LOADED_AT = 5, 3
LEARNING_RATE = 1e-3


class Case(Training):
    def __init__(self, name, model, batch, loss, optimizer=torch.optim.AdamW):
        parameters = [p for p in model.parameters() if p.requires_grad]
        super().__init__(name, model, [optimizer(parameters, lr=LEARNING_RATE)], saves=False)
        #: Leaves of the graph that are not parameters.
        self.leaves = []
        #: Names of other models with the same modules.
        self.twins = []
        #: Averages of the parameters: their tensors, and a function that updates them after each step.
        self.averages, self.update = [], lambda: None
        self.make_batch, self.loss_of = batch, loss
        self.inputs, self.checks = (), True

    def check(self, what, inputs=(), activations=(), **more):
        if not self.checks:
            return
        roots = [type(self.model).__name__, *self.twins]
        modules = [path_of(root, name) for root in roots for name, _ in self.model.named_modules(remove_duplicate=False)]
        rows = addresses(self.model, *self.optimizers[:1])
        # A storage of several gradients has a common name.
        counts = Counter(hex(storage(p.grad)) for p in self.model.parameters() if p.grad is not None)
        rows = [row for row in rows if counts[row[0]] < 2]
        for leaf in self.leaves:
            self.more[storage(leaf)] = "activation"
            if leaf.grad is not None:
                self.more[storage(leaf.grad)] = "gradient"
        self.more.update({storage(tensor): "parameter_copy" for tensor in self.averages})
        super().check(what, self.inputs, activations, addresses=rows, modules=modules, **more)

    def loss(self, _):
        return self.loss_of(self.call, *self.inputs)

    def backward(self, loss):
        loss.backward()

    def one(self, number):
        (optimizer,) = self.optimizers
        if agent() is not None:
            modules = agent().modules
            until("comparing modules is paid for", lambda: time.perf_counter() >= modules.due)
        self.inputs = self.make_batch()
        mark("phase forward")
        loss = self.forward(f"{number}/forward", self.inputs[0])
        mark("phase backward")
        self.backward(loss)
        mark("phase none")
        self.results = {storage(loss)}
        self.check(f"{number}/backward")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.check(f"{number}/clipped")
        optimizer.step()
        self.update()
        self.check(f"{number}/optimizer")
        optimizer.zero_grad()
        del loss
        self.results, self.inputs, self.more = set(), (), {}
        self.leaves.clear()
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
        # GroundTruth keeps every node of the graph alive, which changes roles.
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


def gpt2_adapters():
    """Adapters are added, exchanged and merged between steps."""
    from peft import LoraConfig, get_peft_model

    how = LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(small_gpt2(), how)
    Case("gpt2_adapters one", model, words, language_loss).run()
    model.add_adapter("second", how)
    model.set_adapter("second")
    Case("gpt2_adapters second", model, words, language_loss).run()
    model.delete_adapter("default")
    Case("gpt2_adapters deleted", model, words, language_loss).run()
    model = model.merge_and_unload().requires_grad_(True)
    gc.collect()
    Case("gpt2_adapters merged", model, words, language_loss).run()


def gpt2_lora_checkpointed():
    from peft import LoraConfig, get_peft_model

    model = small_gpt2()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
    case = Case("gpt2_lora_checkpointed", model, words, language_loss)
    # The embedding's output is a leaf of the graph with a gradient.
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, result: case.leaves.append(result))
    case.run()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, bos_token_id=0, eos_token_id=0, **sizes)).cuda().train()
    Case("llama", model, words, language_loss).run()


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).cuda().train()
    Case("t5", model, words, language_loss).run()


def accelerate_bf16():
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    case = Case("accelerate_bf16", small_gpt2(), words, language_loss)
    case.call, optimizer = accelerator.prepare(case.model, case.optimizers[0])
    case.optimizers = [optimizer]
    case.backward = accelerator.backward
    case.run()


def timm_lamb():
    import timm
    from timm.optim import Lamb

    model = timm.create_model("test_convnext", num_classes=16).cuda()
    Case("timm_lamb", model, images, image_loss, Lamb).run()


def torchvision_swin():
    import torchvision

    model = torchvision.models.SwinTransformer([2, 2], 32, [2, 2], [2, 4], [4, 4], num_classes=16, stochastic_depth_prob=0.0).cuda()
    Case("torchvision_swin", model, images, image_loss).run()


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


def timm_ema():
    import timm
    from timm.utils import ModelEmaV3

    model = timm.models.VisionTransformer(img_size=32, patch_size=8, num_classes=16, embed_dim=64, depth=2, num_heads=4).cuda()
    case, average = Case("timm_ema", model, images, image_loss), ModelEmaV3(model, decay=0.99)
    case.averages, case.update = list(average.parameters()), lambda: average.update(model)
    case.run()


def diffusers_ema():
    from diffusers.training_utils import EMAModel

    # The agent registers the class after a next allocation.
    codes = sys.modules["_gpumem_torch"]._codes._kept
    until("EMAModel is registered", lambda: torch.empty(1, device="cuda").is_cuda and id(EMAModel.__init__.__code__) in codes)
    model = small_gpt2()
    average = EMAModel(model.parameters(), decay=0.99)
    case = Case("diffusers_ema", model, words, language_loss)
    case.averages, case.update = average.shadow_params, lambda: average.step(model.parameters())
    case.run()


def data_parallel():
    """On two devices, of which the first is compared."""
    case = Case("data_parallel", small_gpt2(), words, lambda model, tokens: language_loss(model, tokens).mean())
    case.call, case.device = torch.nn.DataParallel(case.model, device_ids=[0, 1]), 0
    case.twins = ["GPT2LMHeadModel replica", "GPT2LMHeadModel replica#2"]
    case.run()


class Generation(Case):
    """A model that is never trained, with its cache."""

    def __init__(self, name, model):
        super().__init__(name, model, None, None, lambda parameters, lr: None)
        self.optimizers = []
        self.tokens = torch.zeros(2, 16, dtype=torch.long, device="cuda")
        before = agent().looks
        until("the agent has seen the whole model", lambda: agent().looks > before)

    def check(self, what, cache):
        found = [tensor for layer in cache.layers for tensor in vars(layer).values() if torch.is_tensor(tensor) and tensor.is_cuda]
        assert len(found) >= 2 * len(cache.layers)
        self.more = {storage(tensor): "kv_cache" for tensor in found}
        parts = ["kv_cache", "parameter", "parameter_copy", "buffer", "gradient", "optimizer_state"]
        super().check(what, parts=parts)

    @torch.no_grad()
    def run(self, cache):
        self.model(self.tokens, past_key_values=cache, use_cache=True)
        for number in range(1, 6):
            self.model(self.tokens[:, :1], past_key_values=cache, use_cache=True)
            self.check(f"{number}/token", cache)
        del cache
        gc.collect()

    def generate(self, cache):
        """Checks after each token; the model cannot read its result, so this determines when it ends."""
        count = 0

        def has_more(*_, **__):
            nonlocal count
            if count:
                self.check(f"{count}/token", cache)
            count += 1
            return count < 7

        self.model._has_unfinished_sequences = has_more
        self.model.generate(self.tokens, past_key_values=cache, attention_mask=torch.ones_like(self.tokens), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert count == 7
        del self.model._has_unfinished_sequences  # it keeps the cache
        gc.collect()


def generate():
    from transformers import DynamicCache, StaticCache

    model = small_gpt2().eval()
    Generation("generate", model).generate(DynamicCache(config=model.config))
    gc.collect()  # the caller of a method holds its arguments until it returns
    Generation("generate_dynamic", model).run(DynamicCache(config=model.config))
    gc.collect()
    Generation("generate_static", model).run(StaticCache(config=model.config, max_cache_len=32))
    del model
    gc.collect()


def load_checkpoint(file):
    return torch.load(file, map_location="cuda")  # checkpoint


def average_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}  # average


def line(text, function):
    with open(__file__) as file:
        number = next(number for number, row in enumerate(file, 1) if row.endswith(f"# {text}\n"))
    return f"libraries.py:{number} {function}"


def running_out(model, phase, call, path=None):
    """Prints the module that runs out of memory: the innermost in the traceback, or the one with a hook."""
    paths = {id(module): path_of(type(model).__name__, name) for name, module in model.named_modules()}
    for _ in range(100):  # enough events to separate it from the last one
        torch.empty(1, device="cuda")
    try:
        call()
    except torch.cuda.OutOfMemoryError as error:
        at = error.__traceback__
        while at is not None:
            path = paths.get(id(at.tb_frame.f_locals.get("self")), path)
            at = at.tb_next
    else:
        raise AssertionError("the device is larger than any")
    say(oom=phase, module=path)


def exhausted():
    """A model beside plain tensors runs out of memory in each pass."""
    case = Case("exhausted", small_gpt2(), words, language_loss)
    model, file = case.model, io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    held = {line("checkpoint", "load_checkpoint"): load_checkpoint(file)}
    inner = "<dictcomp>" if sys.version_info < (3, 12) else ""
    held[line("average", f"average_of.<locals>.{inner}" if inner else "average_of")] = average_of(model)
    case.checks = False
    for number in range(3):
        case.one(number)
    check("exhausted/plain", lines=[[hex(storage(tensor)), name] for name, tensors in held.items() for tensor in tensors.values()])
    many = torch.zeros(1 << 20, 32, dtype=torch.long, device="cuda")
    running_out(model, "forward", lambda: language_loss(model, many))
    gc.collect()

    def fail(*_):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    dropout = model.transformer.h[1].mlp.dropout
    hook = dropout.register_forward_hook(lambda _, __, result: result.register_hook(fail) and None)
    running_out(model, "backward", lambda: language_loss(model, *words()).backward(), "GPT2LMHeadModel/transformer/h.1/mlp/dropout")
    hook.remove()
    model.eval()
    with torch.no_grad():
        running_out(model, "evaluation", lambda: model(many, use_cache=False))


CASES = ["gpt2", "gpt2_checkpointed", "gpt2_lora", "gpt2_adapters", "gpt2_lora_checkpointed", "llama", "t5", "accelerate_bf16"]
CASES += ["timm_resnet", "timm_vit", "timm_lamb", "torchvision_resnet", "torchvision_mobilenet", "torchvision_swin"]
CASES += ["diffusers_unet", "diffusers_unet_checkpointed", "timm_ema", "diffusers_ema", "data_parallel"]

torch.manual_seed(7)
for case in sys.argv[1:] or CASES:
    globals()[case]()
    gc.collect()
    torch.cuda.empty_cache()
clear_workspaces()
say(workspaces=[hex(address) for address in WORKSPACES])
say(done=True)
