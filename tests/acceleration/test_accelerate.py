"""Other people's models with our attention: the same function, undone to the bit."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from regard.acceleration import compare as trial
from regard.acceleration import modules as accelerated
from regard.acceleration.swap import accelerate, restore
from regard.errors import InputError
from regard.foreign import recognise
from regard.layers.attend import explain
from tests.reference import peers

C, HEADS = 64, 4


def unet():
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DModel(**peers.UNET, block_out_channels=(32, C), attention_head_dim=16)


def autoencoder():
    diffusers = pytest.importorskip("diffusers")
    return diffusers.AutoencoderKL(
        block_out_channels=(32, C),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
    )


def timm_vit():
    timm = pytest.importorskip("timm")
    options = {"qk_norm": True, "class_token": False, "global_pool": "avg"}
    return timm.models.VisionTransformer(16, 4, embed_dim=C, depth=2, num_heads=HEADS, **options)


def source_vit():
    module = pytest.importorskip("vit_pytorch.simple_vit_with_qk_norm")
    return module.SimpleViT(
        image_size=16, patch_size=4, num_classes=3, dim=C, depth=2, heads=HEADS, mlp_dim=C
    )


def monai_block():
    module = pytest.importorskip("monai.networks.blocks.spatialattention")
    return module.SpatialAttentionBlock(2, C, C // HEADS)


def blocks(*made):
    return nn.Sequential(*made, nn.Conv2d(C, 2, 1))


IMAGE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
FEATURES = torch.randn(2, C, 6, 7, generator=torch.Generator().manual_seed(0))
STEP = torch.tensor(5)
# model, arguments, number of attentions
MODELS = {
    "UNet2DModel": (unet, (IMAGE, STEP), 4),
    "AutoencoderKL": (autoencoder, (IMAGE,), 2),
    "timm": (timm_vit, (IMAGE,), 2),
    "vit-pytorch": (source_vit, (IMAGE,), 2),
    "monai": (lambda: blocks(monai_block()), (FEATURES,), 1),
    "ldm": (lambda: blocks(peers.AttnBlock(C), peers.AttnBlock(C)), (FEATURES,), 2),
    "guided": (lambda: blocks(peers.AttentionBlock(C, HEADS, True)), (FEATURES,), 1),
    "guided-legacy": (
        lambda: blocks(peers.AttentionBlock(C, HEADS, False, peers.GroupNorm32)),
        (FEATURES,),
        1,
    ),
}


@pytest.fixture(params=MODELS)
def case(request):
    make, arguments, count = MODELS[request.param]
    torch.manual_seed(1)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model, arguments, count


def output(model, arguments):
    out = model(*arguments)
    return getattr(out, "sample", out)


def test_a_model_is_the_same_function_and_shares_its_parameters(case):
    model, arguments, count = case
    before = output(model, arguments)
    kept = dict(model.named_parameters())
    classes = {path: type(module) for path, module in model.named_modules()}
    keys = list(model.state_dict())
    with torch.no_grad():
        same, report = accelerate(model, arguments)
    assert same is model
    assert len(report.swapped) == count, str(report)
    assert report.left == ()
    assert report.tried_on == "the example"
    torch.testing.assert_close(output(model, arguments), before, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(output(model, arguments), before, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == keys
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())
    assert all(isinstance(module, classes[path]) for path, module in model.named_modules())
    assert all(type(m).__name__ == classes[p].__name__ for p, m in model.named_modules())
    for entry in report.swapped:
        assert entry.kernel in ("plain", "sdpa", "blocked")
        assert entry.after <= max(2 * entry.before, 1e-5)
        assert entry.path in str(report)


def test_every_attention_runs_on_attend(case):
    model, arguments, count = case
    accelerate(model)
    assert len(explain(model, *arguments)) == count
    with torch.no_grad():  # folded
        assert len(explain(model, *arguments)) == count


def test_folded_weights_are_never_stale(case):
    model, arguments, _ = case
    accelerate(model)
    with torch.no_grad():
        output(model, arguments)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        for parameter in model.parameters():
            parameter.data.add_(0.01 * torch.randn_like(parameter))
        ours = output(model, arguments)
        torch.testing.assert_close(ours, output(restore(model), arguments), rtol=1e-5, atol=2e-5)


def test_restoring_gives_back_everything_to_the_bit(case):
    model, arguments, _ = case
    before = output(model, arguments)
    state = {path: (type(m), set(m.__dict__)) for path, m in model.named_modules()}
    processors = {p: m.processor for p, m in model.named_modules() if hasattr(m, "processor")}
    accelerate(model)
    assert restore(model) is model
    assert torch.equal(output(model, arguments), before)
    assert {path: (type(m), set(m.__dict__)) for path, m in model.named_modules()} == state
    assert all(model.get_submodule(path).processor is p for path, p in processors.items())


def test_gradients_are_the_originals(case):
    model, arguments, _ = case
    model = trial.widened(model, torch.device("cpu"))
    arguments = tuple(a.double() if a.is_floating_point() else a for a in arguments)
    output(model, arguments).square().sum().backward()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    accelerate(model)
    model.train()
    output(model, arguments).square().sum().backward()
    for name, parameter in model.named_parameters():
        if before[name] is None:
            assert parameter.grad is None
            continue
        scale = before[name].abs().max().clamp_min(1)
        torch.testing.assert_close(parameter.grad / scale, before[name] / scale, rtol=0, atol=1e-6)


def test_copies_and_pickles_stay_accelerated_and_restorable(case):
    model, arguments, count = case
    before = output(model, arguments)
    accelerate(model)
    ours = output(model, arguments)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(output(copied, arguments), ours)
        assert len(accelerate(copied)[1].left) == count  # accelerated already
        assert torch.equal(output(restore(copied), arguments), before)
    assert torch.equal(output(model, arguments), ours)


@pytest.mark.parametrize("name", ["ldm", "guided", "timm"])
@pytest.mark.parametrize("instructions", [True, False], ids=["bf16 instructions", "none"])
def test_autocast_and_half_precision_stay_near(name, instructions, monkeypatch):
    monkeypatch.setattr("regard._device.BF16_PRODUCTS", instructions)
    dtype = torch.bfloat16
    make, arguments, _ = MODELS[name]
    torch.manual_seed(1)
    model = make().eval()
    expected = output(
        copy.deepcopy(model).double(),
        tuple(a.double() if a.is_floating_point() else a for a in arguments),
    )
    with torch.no_grad(), torch.autocast("cpu", dtype):
        before = output(model, arguments)
        accelerate(model, arguments)
        after = output(model, arguments)
    assert after.dtype == before.dtype
    error = lambda y: (y.double() - expected).abs().max()  # noqa: E731
    assert error(after) <= 2 * error(before)
    half = restore(model).to(dtype)
    cast = tuple(a.to(dtype) if a.is_floating_point() else a for a in arguments)
    before = output(half, cast)
    _, report = accelerate(half, cast)
    assert report.swapped
    assert output(half, cast).dtype == before.dtype
    assert error(output(half, cast)) <= 2 * error(before)


def test_torch_compile_runs_a_swapped_block_in_one_graph():
    block = peers.AttnBlock(C).eval()
    accelerate(block)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(FEATURES), block(FEATURES), rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_and_an_optimizer_go_on():
    block = peers.AttentionBlock(C, HEADS, True)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    accelerate(block)
    block.use_checkpoint = True
    before = block.qkv.weight.detach().clone()
    block(FEATURES.requires_grad_()).square().mean().backward()
    FEATURES.requires_grad_(False)
    FEATURES.grad = None
    optimizer.step()
    assert not torch.equal(block.qkv.weight, before)
    x = FEATURES.double()
    accelerated_result = block.double()(x)
    torch.testing.assert_close(accelerated_result, restore(block)(x), rtol=0, atol=1e-6)


# Layers that are not plain keep their own call.


class Lora(nn.Module):
    """An adapter that shows the base layer's weight, as peft's does."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def diffusers_block():
    module = pytest.importorskip("diffusers.models.attention_processor")
    return module.Attention(
        C, heads=HEADS, dim_head=16, bias=True, norm_num_groups=32, residual_connection=True
    ).eval()


def offload(block):
    layer, forward = block.to_k, block.to_k.forward
    layer.forward = lambda x: forward(x) * 2


def weight_norm(block):
    parametrizations.weight_norm(block.to_q)
    with torch.no_grad():
        block.to_q.parametrizations.weight.original0.mul_(2)


CHANGES = {
    "lora": lambda block: setattr(block, "to_q", Lora(block.to_q)),
    "lora on the output": lambda block: block.to_out.__setitem__(0, Lora(block.to_out[0])),
    "parametrised": lambda block: parametrizations.orthogonal(block.to_v),
    "pruned": lambda block: prune.l1_unstructured(block.to_q, "weight", amount=0.5),
    "weight norm": weight_norm,
    "hooked": lambda block: block.to_v.register_forward_hook(lambda m, a, y: y * 3),
    "hooked norm": lambda block: block.group_norm.register_forward_hook(lambda m, a, y: y + 1),
    "forward replaced": offload,
}


@pytest.mark.parametrize("first", [True, False], ids=["changed before", "changed after"])
@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_not_plain_keep_their_own_call(change, first):
    torch.manual_seed(0)
    block = diffusers_block()
    plain = block(FEATURES)
    if first:
        CHANGES[change](block)
        accelerate(block)
    else:
        accelerate(block)
        CHANGES[change](block)
    ours = block(FEATURES)
    theirs = restore(block)(FEATURES)
    assert (theirs - plain).abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_hooks_of_the_module_and_of_what_is_passed_over_still_run():
    heard = []
    block = peers.AttentionBlock(C, HEADS, True)
    block.register_forward_hook(lambda *_: heard.append("block"))
    accelerate(block)
    block(FEATURES)
    assert heard == ["block"]
    block.attention.register_forward_hook(lambda *_: heard.append("attention"))
    block(FEATURES)
    assert heard == ["block", "attention", "block"]
    _, report = accelerate(restore(block))
    assert report.left[0].reason == "its attention has hooks, and would be passed over"


# Calls and modules that are not covered


def test_masks_contexts_and_dropout_go_to_the_modules_own_forward():
    block = diffusers_block()
    tokens = torch.randn(2, 5, C)
    context = torch.randn(2, 3, C)
    mask = torch.tensor([0.0, 0.0, -1e4, 0.0, -1e4]).expand(2, 1, 5)
    before = block(tokens, context), block(tokens, attention_mask=mask), block(tokens)
    accelerate(block)
    assert torch.equal(block(tokens, context), before[0])
    assert torch.equal(block(tokens, attention_mask=mask), before[1])
    torch.testing.assert_close(block(tokens), before[2])


def test_a_mask_given_to_timm_is_honoured_and_its_dropout_drops():
    layers = pytest.importorskip("timm.layers")
    block = layers.Attention(C, HEADS, attn_drop=0.5)
    tokens = torch.randn(2, 5, C)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = block.eval()(tokens, attn_mask=mask), block(tokens, is_causal=True)
    accelerate(block)
    assert torch.equal(block(tokens, attn_mask=mask), expected[0])
    assert torch.equal(block(tokens, is_causal=True), expected[1])
    block.train()
    torch.manual_seed(3)
    ours = block(tokens)
    torch.manual_seed(3)
    assert torch.equal(ours, restore(block)(tokens))


class Twisted(peers.AttnBlock):
    """The structure of a known block, and another formula."""

    def forward(self, x):
        return super().forward(x.flip(3)).flip(3) + 0.01 * x.roll(1, 2)


def test_a_block_of_known_structure_and_another_formula_is_left():
    block = Twisted(C)
    with torch.no_grad():
        block.proj_out.weight.zero_()
    _, report = accelerate(block)
    assert report.swapped == ()
    assert report.left[0].reason.startswith("with random weights it gives other outputs")
    assert type(block) is Twisted


def test_a_swap_that_loses_accuracy_is_undone(monkeypatch):
    real = accelerated.attend_folded
    rounded = lambda x, *rest: real(x, *rest) + 1e-5 * (x.dtype == torch.float32)  # noqa: E731
    monkeypatch.setattr(accelerated, "attend_folded", rounded)
    block = peers.AttnBlock(C)
    _, report = accelerate(block)
    assert report.swapped == ()
    assert report.left[0].reason == "its error is more than twice the original's"
    assert type(block) is peers.AttnBlock


def test_what_is_left_is_listed_with_its_reason():
    module = pytest.importorskip("diffusers.models.attention_processor")
    cross = module.Attention(C, cross_attention_dim=8, heads=2, dim_head=32)
    model = nn.ModuleDict({"cross": cross, "torch": nn.MultiheadAttention(C, 2)})
    _, report = accelerate(model)
    assert [(left.path, left.reason) for left in report.left] == [
        ("cross", "cross-attention"),
        ("torch", "torch.nn.modules.activation.MultiheadAttention is not known"),
    ]
    assert str(report).splitlines()[0].startswith("0 swapped, 2 left")


def test_an_attention_that_the_example_does_not_reach_is_left():
    model = blocks(peers.AttnBlock(C))
    model.spare = peers.AttnBlock(C)
    model.forward = lambda x: model[0](x)
    _, report = accelerate(model, FEATURES)
    assert [entry.path for entry in report.swapped] == ["0"]
    assert "did not give it one input" in report.left[0].reason


def test_an_example_that_the_model_does_not_take_is_refused_and_nothing_changes():
    model = nn.Bilinear(4, 4, 2)
    with pytest.raises(InputError, match=r"does not run on the example \(TypeError: .*a tuple of"):
        accelerate(model, torch.randn(1, 4))
    assert not model._forward_pre_hooks


def test_the_model_runs_on_its_example_in_evaluation_and_keeps_its_modes():
    model = blocks(peers.AttnBlock(C), nn.BatchNorm2d(C), nn.Dropout(0.5)).train()
    model[1].eval()
    mean = model[1].running_mean.clone()
    state = torch.get_rng_state()
    accelerate(model, FEATURES)
    assert [part.training for part in (model, model[0], model[1], model[2])] == [
        True,
        True,
        False,
        True,
    ]
    assert torch.equal(model[1].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_scripted_model_is_refused():
    with pytest.raises(InputError, match="a TorchScript model cannot be changed"):
        accelerate(torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.parametrize("change", [accelerate, restore])
def test_what_is_no_module_is_refused(change):
    with pytest.raises(InputError, match=r"the model is a dict; give a torch\.nn\.Module"):
        change(dict(nn.Linear(2, 2).state_dict()))


def test_large_examples_are_tried_on_a_corner():
    spec = recognise(peers.AttnBlock(C))
    assert trial.corner(torch.zeros(1, 2, 200, 100), spec).shape == (1, 2, 64, 64)
    assert trial.corner(torch.zeros(1, 2, 30, 100), spec).shape == (1, 2, 30, 100)


def test_record_sees_accelerated_attention():
    record = pytest.importorskip("regard.interpret.record").record
    model = timm_vit().eval()
    with record(model, keep="weights") as plain, torch.no_grad():
        model(IMAGE)
    accelerate(model)
    with record(model, keep="weights") as seen, torch.no_grad():
        model(IMAGE)
    assert list(seen) == list(plain)
    for name in plain:
        torch.testing.assert_close(seen[name].weights, plain[name].weights, rtol=1e-5, atol=1e-6)
