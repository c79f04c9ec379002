"""Accelerated models under what wraps a model in training: DDP, compilation, checkpointing."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.acceleration.swap import accelerate, restore
from tests.reference import peers

C, HEADS = 32, 4
ROOT = Path(__file__).parents[2]


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, C, 3, padding=1),
        peers.AttentionBlock(C, HEADS, False),
        nn.SiLU(),
        peers.AttnBlock(C),
        nn.Conv2d(C, 2, 1),
    )


def unet():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.UNet2DModel(**peers.UNET, block_out_channels=(32, 32), attention_head_dim=8)


def vit():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"qk_norm": True, "class_token": False, "global_pool": "avg"}
    return timm.models.VisionTransformer(16, 4, embed_dim=C, depth=2, num_heads=HEADS, **options)


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LARGER = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MODELS = {
    "blocks": (small_model, (IMAGES,)),
    "UNet2DModel": (unet, (IMAGES, torch.tensor(3))),
    "timm": (vit, (LARGER,)),
}


@pytest.fixture(params=MODELS)
def case(request):
    make, arguments = MODELS[request.param]
    return make().train(), arguments


def gradients(model, arguments, call=None):
    """The output, and the gradient of each parameter by name."""
    model.zero_grad(set_to_none=True)
    out = (model if call is None else call)(*arguments)
    out = getattr(out, "sample", out)
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(left, right):
    torch.testing.assert_close(left[0], right[0], rtol=1e-4, atol=1e-5)
    assert left[1].keys() == right[1].keys()
    for name, gradient in left[1].items():
        torch.testing.assert_close(gradient, right[1][name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_whole_compiled_model_has_the_originals_gradients(case):
    model, arguments = case
    expected = gradients(model, arguments)
    assert accelerate(model)[1].swapped
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(gradients(model, arguments, compiled), expected)


def test_checkpointing_recomputes_the_same_gradients():
    model = unet().train()
    expected = gradients(model, MODELS["UNet2DModel"][1])
    accelerate(model)
    model.enable_gradient_checkpointing()
    assert_same(gradients(model, MODELS["UNet2DModel"][1]), expected)
    blocks = small_model()
    expected = gradients(blocks, (IMAGES,))
    accelerate(blocks)
    recomputed = lambda x: torch.utils.checkpoint.checkpoint(blocks, x, use_reentrant=False)  # noqa: E731
    assert_same(gradients(blocks, (IMAGES,), recomputed), expected)


def test_a_copy_trains_on_its_own_weights(case):
    model, arguments = case
    accelerate(model)
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients(copied, arguments)
    optimizer.step()
    assert any(not torch.equal(p, kept[name]) for name, p in copied.named_parameters())
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    # what the copy computes now is what its own weights say
    with torch.no_grad():
        ours = copied.eval()(*arguments)
        theirs = restore(copied)(*arguments)
    ours, theirs = getattr(ours, "sample", ours), getattr(theirs, "sample", theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_two_processes_average_to_the_originals_gradients():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = str(Path(__file__).with_name("two_processes.py"))
    done = subprocess.run(
        [*launch, script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert f"rank {rank}: 2 swapped, gradients agree" in done.stdout
