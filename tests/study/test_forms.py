"""The soft cap and the recorded quantities against loops in float64."""

import math

import pytest
import torch
from torch import nn

from regard.errors import InputError
from regard.interpret.health import attention_health
from regard.layers.transformer import Attention
from regard.study.plan import CAP, FORMS, CappedAttention, build, soft_cap

ARGUMENTS = {"name": "simple-vit-nano/4", "num_classes": 3, "image_size": 8, "channels": 1}


def spread_out(model, factor=30.0):
    """Queries and keys large enough for the cap to bite and entropies to differ."""
    for module in model.modules():
        if isinstance(module, Attention):
            with torch.no_grad():
                inner = module.num_heads * module.dim_head
                module.qkv.weight[: 2 * inner] *= factor
    return model.double()


def loop(module, x, capped):
    """Attention of one module on x (b, n, dim), head by head, query by query, in Python floats."""
    b, n, _ = x.shape
    g, d = module.num_heads, module.dim_head
    packed = module.qkv(module.norm(x))
    q, k, v = (packed[..., i * g * d : (i + 1) * g * d].view(b, n, g, d) for i in range(3))
    out = torch.zeros(b, n, g * d, dtype=x.dtype)
    entropies, logits_seen = [], []
    for image in range(b):
        for head in range(g):
            for i in range(n):
                logits = []
                for j in range(n):
                    s = sum(float(q[image, i, head, c]) * float(k[image, j, head, c])
                            for c in range(d)) / math.sqrt(d)  # fmt: skip
                    logits.append(CAP * math.tanh(s / CAP) if capped else s)
                top = max(logits)
                exps = [math.exp(s - top) for s in logits]
                weights = [e / sum(exps) for e in exps]
                entropies.append(-sum(w * math.log(w) for w in weights if w > 0))
                logits_seen.append(top)
                for c in range(d):
                    out[image, i, head * d + c] = sum(
                        w * float(v[image, j, head, c]) for j, w in enumerate(weights)
                    )
    return module.out(out), sum(entropies) / len(entropies), max(logits_seen)


@pytest.mark.parametrize("form", ["none", "cap"])
def test_attention_and_what_is_recorded_of_it_are_the_loop(form):
    model = spread_out(build(form, ARGUMENTS, seed=0))
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    seen = {}
    first = model.blocks[0].attention
    first.register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out))
    with torch.no_grad(), attention_health(model) as health:
        model(images)
        expected, entropy, largest = loop(first, seen["x"], capped=form == "cap")
    torch.testing.assert_close(seen["out"], expected, rtol=1e-9, atol=1e-9)
    found = health["blocks.0.attention"]
    assert found["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found["largest_logit"] == pytest.approx(largest, rel=1e-6)
    assert (largest > CAP) == (form == "none"), "the logits must be large enough to tell"


def test_soft_cap_is_bounded_and_gentle():
    x = torch.tensor([-1e6, -1.0, 0.0, 1.0, 1e6], dtype=torch.float64)
    capped = soft_cap(x)
    assert capped.abs().max() <= CAP
    assert capped[3].item() == pytest.approx(CAP * math.tanh(1 / CAP))


def test_all_forms_start_from_the_same_weights():
    models = {form: build(form, ARGUMENTS, seed=3) for form in FORMS}
    reference = dict(models["none"].named_parameters())
    for form, model in models.items():
        own = dict(model.named_parameters())
        assert own.keys() >= reference.keys()
        for name, value in reference.items():
            assert torch.equal(own[name], value), (form, name)
        norms = {name for name in own if "q_norm" in name or "k_norm" in name}
        assert bool(norms) == (form in ("unit", "rms", "layer"))
    other = build("none", ARGUMENTS, seed=4)
    assert not torch.equal(other.embed.project.weight, reference["embed.project.weight"])


def test_only_the_cap_is_capped():
    for form in FORMS:
        kinds = {type(m) for m in build(form, ARGUMENTS, 0).modules() if isinstance(m, Attention)}
        assert kinds == {CappedAttention if form == "cap" else Attention}


def test_the_cap_has_gradients_against_finite_differences():
    module = CappedAttention(8, 2, 4, None).double()
    nn.init.normal_(module.qkv.weight, std=2.0)
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))


def test_an_unknown_form_is_refused():
    with pytest.raises(InputError, match="no form 'cosine' of QK norm; forms are none, cap, unit"):
        build("cosine", ARGUMENTS, 0)
