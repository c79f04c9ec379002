"""Every layout of pixel attention: the same numbers from the same weights, or a refusal by name."""

import itertools
import re

import pytest
import torch

from regard.convert.conversion import convert
from regard.convert.layouts import LAYOUTS
from regard.errors import InputError
from regard.layers.pixel_attention import PixelAttention
from tests.reference import peers

C, HEADS = 64, 4
PREFIX = "down.1.attn."


def diffusers_block(eps=1e-6, heads=HEADS, bias=True):
    module = pytest.importorskip("diffusers.models.attention_processor")
    return module.Attention(
        C,
        heads=heads,
        dim_head=C // heads,
        bias=bias,
        norm_num_groups=32,
        eps=eps,
        residual_connection=True,
    )


def monai_block(combined):
    module = pytest.importorskip("monai.networks.blocks.spatialattention")
    return module.SpatialAttentionBlock(2, C, C // HEADS, use_combined_linear=combined)


# source layout, the library's own module, facts to tell, facts of the block that must come out
SOURCES = {
    "diffusers": (diffusers_block, {"num_heads": HEADS, "eps": 1e-6}, (HEADS, 32, 1e-6)),
    "diffusers without bias": (
        lambda: diffusers_block(bias=False),
        {"dim_head": C // HEADS, "eps": 1e-6},
        (HEADS, 32, 1e-6),
    ),
    "ldm": (lambda: peers.AttnBlock(C), {}, (1, 32, 1e-6)),
    "guided": (
        lambda: peers.AttentionBlock(C, HEADS, True),
        {"num_heads": HEADS},
        (HEADS, 32, 1e-5),
    ),
    "guided-legacy": (
        lambda: peers.AttentionBlock(C, HEADS, False),
        {"num_heads": HEADS},
        (HEADS, 32, 1e-5),
    ),
    "monai": (lambda: monai_block(False), {"num_heads": HEADS}, (HEADS, 32, 1e-6)),
    "monai combined": (lambda: monai_block(True), {"num_heads": HEADS}, (HEADS, 32, 1e-6)),
    "edm": (
        lambda: peers.EDMBlock(C, HEADS, 1e-6),
        {"num_heads": HEADS, "eps": 1e-6, "rest": "drop"},
        (HEADS, 16, 1e-6),
    ),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_converted_block_gives_the_libraries_numbers(case):
    make, told, (heads, groups, eps) = SOURCES[case]
    theirs = peers.randomised(make())
    state = {PREFIX + key: tensor for key, tensor in theirs.state_dict().items()}
    before = {key: tensor.clone() for key, tensor in state.items()}
    converted = convert(state, case.split()[0], **told)
    params = {key.removeprefix(PREFIX): tensor for key, tensor in converted.items()}
    ours = PixelAttention.from_params(params, groups, heads, eps=eps)
    # A small map about an offset, where eps and the groups of the norm count.
    x = (
        0.01 * torch.randn(2, C, 3, 4, dtype=torch.float64)
        + torch.linspace(-1, 1, C)[:, None, None]
    )
    expected = theirs(x)
    assert (expected - x).abs().max() > 0.5
    atol = 1e-5 if "guided" in case else 1e-9  # guided-diffusion's softmax is in float32
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=atol)
    assert all(torch.equal(state[key], before[key]) for key in before)


def params():
    torch.manual_seed(0)
    module = peers.randomised(PixelAttention(C, HEADS))
    return {PREFIX + key: tensor.detach() for key, tensor in module.state_dict().items()}


TOLD = {"num_heads": HEADS, "num_groups": 32, "eps": 1e-5}


OTHERS = [name for name in LAYOUTS if name != "regard"]


@pytest.mark.parametrize(("via", "packed"), [*((n, False) for n in OTHERS), ("monai", True)])
def test_there_and_back_is_the_same(via, packed):
    start = params()
    there = convert(start, "regard", via, packed=packed, **TOLD)
    assert not set(there) & set(start)
    back = convert(there, via, **TOLD)
    assert back.keys() == start.keys()
    assert all(torch.equal(back[key], start[key]) for key in start)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in ("guided", "guided-legacy")])
def test_the_layout_is_found_where_one_fits(name):
    start = params()
    state = convert(start, "regard", name, **TOLD) if name != "regard" else start
    target = "regard" if name != "regard" else "ldm"
    assert (
        convert(state, "auto", target, **TOLD).keys() == convert(state, name, target, **TOLD).keys()
    )


def test_the_order_of_several_heads_is_never_guessed():
    state = convert(params(), "regard", "guided", **TOLD)
    with pytest.raises(InputError, match="fit the layouts guided and guided-legacy: say which"):
        convert(state, "auto", num_heads=HEADS)
    with pytest.raises(InputError, match="fit the layouts guided and guided-legacy: say which"):
        convert(state, "auto")
    one_head = {**TOLD, "num_heads": 1}
    for order in ("guided", "guided-legacy"):
        single = convert(params(), "regard", order, **one_head)
        back = convert(single, "auto", num_heads=1)
        assert all(torch.equal(back[key], tensor) for key, tensor in params().items())


def test_two_layouts_in_one_state_dict_are_not_chosen_between():
    state = convert(params(), "regard", "ldm", **TOLD)
    state |= {
        "other." + key: t for key, t in convert(params(), "regard", "diffusers", **TOLD).items()
    }
    with pytest.raises(InputError, match="fit the layouts diffusers and ldm: say which"):
        convert(state, "auto", **TOLD)


@pytest.mark.parametrize("source", ["regard", "diffusers", "guided", "monai", "edm"])
def test_facts_that_the_file_does_not_say_are_asked_for(source):
    state = params() if source == "regard" else convert(params(), "regard", source, **TOLD)
    target = "ldm" if source == "regard" else "regard"
    with pytest.raises(InputError, match=f"layout {source} do not say their num_heads"):
        convert(state, source, target)


def test_eps_is_asked_for_where_it_differs_between_models():
    state = convert(params(), "regard", "diffusers", **TOLD)
    with pytest.raises(InputError, match="do not say their eps: give eps"):
        convert(state, "diffusers", num_heads=1)


def test_a_head_count_must_divide():
    state = convert(params(), "regard", "diffusers", **TOLD)
    with pytest.raises(InputError, match="num_heads=5 does not divide the 64 channels"):
        convert(state, "diffusers", num_heads=5, eps=1e-5)
    with pytest.raises(InputError, match="num_heads=4 and dim_head=16: give one of the two"):
        convert(state, "diffusers", num_heads=4, dim_head=16, eps=1e-5)


def test_an_absent_key_bias_is_zero():
    state = convert(params(), "regard", "ldm", **TOLD)
    del state[PREFIX + "k.bias"]
    assert torch.equal(convert(state, "ldm")[PREFIX + "k_bias"], torch.zeros(C).double())
    del state[PREFIX + "v.bias"]
    with pytest.raises(InputError, match=r"missing: down\.1\.attn\.v\.bias$"):
        convert(state, "ldm")


def broken(change):
    state = convert(params(), "regard", "diffusers", **TOLD)
    change(state)
    return state


def rename(state, old, new):
    state[PREFIX + new] = state.pop(PREFIX + old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # half of the block has the old names
        (
            lambda s: (
                rename(s, "to_v.weight", "value.weight"),
                rename(s, "to_v.bias", "value.bias"),
            ),
            r"missing: down\.1\.attn\.to_v\.weight",
        ),
        (lambda s: s.pop(PREFIX + "group_norm.bias"), r"missing: down\.1\.attn\.group_norm\.bias"),
        (
            lambda s: s.update({PREFIX + "to_q.lora_A.weight": torch.ones(2, C)}),
            r"not of the layout: down\.1\.attn\.to_q\.lora_A\.weight",
        ),
        (
            lambda s: s.update({PREFIX + "norm_q.weight": torch.ones(C)}),
            r"not of the layout: down\.1\.attn\.norm_q\.weight",
        ),
        (
            lambda s: s.update({PREFIX + "to_k.weight": torch.ones(C, C + 1)}),
            r"misshapen: down\.1\.attn\.to_k\.weight \(64, 65\) for \(64, 64\)",
        ),
        (
            lambda s: s.update({PREFIX + "to_k.weight": torch.ones(C, C, 1, 1)}),
            r"misshapen: down\.1\.attn\.to_k\.weight \(64, 64, 1, 1\) for \(64, 64\)",
        ),
        (
            lambda s: s.update({PREFIX + "to_k.bias": torch.ones(C, dtype=torch.int8)}),
            r"not real floating-point numbers: down\.1\.attn\.to_k\.bias torch\.int8",
        ),
        (lambda s: s.update({"conv.weight": torch.ones(1)}), r"unused keys.*: conv\.weight; give"),
        (
            lambda s: s[PREFIX + "to_k.bias"].__setitem__(3, torch.nan),
            r"NaN or infinite: down\.1\.attn\.to_k\.bias; take",
        ),
        (
            lambda s: s[PREFIX + "to_k.weight"].__setitem__((0, 1), torch.inf),
            r"NaN or infinite: down\.1\.attn\.to_k\.weight; take",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(InputError, match=message):
        convert(broken(change), "diffusers", num_heads=HEADS, eps=1e-5)


def test_nan_weights_are_taken_where_allowed():
    state = broken(lambda s: s[PREFIX + "to_k.bias"].fill_(torch.nan))
    converted = convert(state, "diffusers", num_heads=HEADS, eps=1e-5, allow_nan=True)
    assert converted[PREFIX + "k_bias"].isnan().all()


def test_the_rest_is_kept_or_dropped_as_told():
    state = broken(lambda s: s.update({"conv.weight": torch.ones(1)}))
    told = {"num_heads": HEADS, "eps": 1e-5}
    kept = convert(state, "diffusers", **told, rest="keep")
    dropped = convert(state, "diffusers", **told, rest="drop")
    assert kept.keys() - dropped.keys() == {"conv.weight"}
    with pytest.raises(InputError, match="rest='all': give one of refuse, keep, drop"):
        convert(state, "diffusers", **told, rest="all")


def test_a_kept_key_may_not_take_the_place_of_a_converted_one():
    state = broken(lambda s: s.update({PREFIX + "q_weight": torch.ones(1)}))
    with pytest.raises(
        InputError, match=r"unused keys have names of the target: down\.1\.attn\.q_w"
    ):
        convert(state, "diffusers", num_heads=HEADS, eps=1e-5, rest="keep")


def test_cross_attention_without_a_group_norm_belongs_to_the_rest():
    state = broken(lambda s: s.update({"cross.to_q.weight": torch.ones(C, C)}))
    converted = convert(state, "diffusers", num_heads=HEADS, eps=1e-5, rest="drop")
    assert converted.keys() == params().keys()


def test_keys_match_by_whole_names():
    state = {"auto_to_q.weight": torch.ones(C, C), "group_norm.weight": torch.ones(C)}
    with pytest.raises(InputError, match="no block of the layout diffusers is in the weights"):
        convert(state, "diffusers", num_heads=1, eps=1e-5)


@pytest.mark.parametrize(
    ("key", "library"),
    [
        ("blocks.0.attn.qkv.weight", "timm"),
        ("params/img/encoderblock_3/MultiHeadDotProductAttention_0/query/kernel", "big_vision"),
        ("encoder.layers.encoder_layer_0.self_attention.in_proj_weight", "torchvision"),
        ("vit.encoder.layer.0.attention.attention.query.weight", "transformers"),
    ],
)
@pytest.mark.parametrize("source", ["auto", "diffusers", "vit-pytorch-qk"])
def test_other_vits_are_refused_with_what_to_do(key, library, source):
    with pytest.raises(InputError, match=rf"{library}'s ViT, another architecture.*accelerate"):
        convert({key: torch.ones(2, 2)}, source)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(InputError, match="no layout 'difusers'; nearest: diffusers"):
        convert(params(), "difusers")
    with pytest.raises(InputError, match="convert takes no 'heads'; nearest: num_heads"):
        convert(params(), "regard", "ldm", heads=2)
    with pytest.raises(InputError, match="source and target are both regard"):
        convert(params(), "regard", "regard")
    with pytest.raises(InputError, match="fit no layout of regard, diffusers"):
        convert({"weight": torch.ones(1)}, "auto")


def test_every_pair_of_layouts_converts():
    start = params()
    through = {n: convert(start, "regard", n, **TOLD) for n in OTHERS}
    for old, new in itertools.permutations(through, 2):
        converted = convert(through[old], old, new, **TOLD)
        assert converted.keys() == through[new].keys()
        assert all(torch.equal(converted[k], through[new][k]) for k in converted), (old, new)


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("odd", [5, None, ["diffusers"]])
def test_a_layout_that_is_no_name_is_refused(role, odd):
    names = {"source": "diffusers", "target": "regard", role: odd}
    with pytest.raises(InputError, match=re.escape(f"{role}={odd!r}: give a layout's name")):
        convert({"group_norm.weight": torch.ones(C)}, **names)
