"""The layouts in which pixel attention's weights live: their keys, shapes and head orders."""

from dataclasses import dataclass
from typing import NamedTuple

from regard.errors import InputError, nearest
from regard.layers.checks import divisor
from regard.layers.pixel_attention import check_eps


@dataclass(frozen=True)
class PixelLayout:
    """How one library names and shapes the parameters of a pixel attention block.

    A key is prefix + name + join + "weight" or "bias", at any depth. `separate` names the
    projections of q, k and v; `packed` the one that holds all three, whose output rows run, from
    the slowest to the fastest, over `order`: q, k, v; heads g; width d. Projection weights have
    `ones` trailing axes of length 1 (they are convolutions). A projection in `bias_optional` may
    lack its bias, which then is zero.

    `num_heads`, `num_groups` and `eps` are what the library fixes; None must be told. Groups are
    never narrower than `group_width` channels. `beside` names children of the same parent that
    mean another computation.
    """

    norm: str
    out: str
    separate: tuple[str, str, str] | None = None
    packed: str | None = None
    order: str = "qkv g d"
    join: str = "."
    ones: int = 0
    bias_optional: tuple[str, ...] = ("k",)
    num_heads: int | None = None
    num_groups: int | None = 32
    group_width: int = 1
    eps: float | None = None
    beside: tuple[str, ...] = ()


DIFFUSERS_OTHER = (
    *("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_q_proj", "add_k_proj", "add_v_proj"),
    *("to_add_out", "processor"),
)

LAYOUTS: dict[str, PixelLayout] = {
    # the ten keys of `regard.pixel_attention`
    "regard": PixelLayout("norm", "out", ("q", "k", "v"), join="_", num_groups=None, eps=1e-5),
    # diffusers' Attention in UNet2DModel, AutoencoderKL, VQModel; U-Nets 1e-5, VAEs 1e-6
    "diffusers": PixelLayout(
        "group_norm",
        "to_out.0",
        ("to_q", "to_k", "to_v"),
        bias_optional=("q", "k", "v"),
        beside=DIFFUSERS_OTHER,
    ),
    # the same before diffusers 0.15
    "diffusers-old": PixelLayout("group_norm", "proj_attn", ("query", "key", "value")),
    # AttnBlock of latent-diffusion, Stable Diffusion's and FLUX's autoencoders: 1×1 convolutions
    "ldm": PixelLayout("norm", "proj_out", ("q", "k", "v"), ones=2, num_heads=1, eps=1e-6),
    # AttentionBlock of openai/guided-diffusion with use_new_attention_order=True, and without
    "guided": PixelLayout(
        "norm", "proj_out", packed="qkv", ones=1, eps=1e-5, beside=("encoder_kv",)
    ),
    "guided-legacy": PixelLayout(
        "norm",
        "proj_out",
        packed="qkv",
        order="g qkv d",
        ones=1,
        eps=1e-5,
        beside=("encoder_kv",),
    ),
    # MONAI's SpatialAttentionBlock, use_combined_linear=False and True
    "monai": PixelLayout(
        "norm",
        "attn.out_proj",
        ("attn.to_q", "attn.to_k", "attn.to_v"),
        packed="attn.qkv",
        eps=1e-6,
    ),
    # UNetBlock of NVlabs/edm, its attention alone; SongUNet 1e-6, DhariwalUNet 1e-5
    "edm": PixelLayout("norm2", "proj", packed="qkv", order="g d qkv", ones=2, group_width=4),
}


class BlockFacts(NamedTuple):
    """What a block's computation needs beyond its tensors."""

    channels: int
    num_heads: int
    num_groups: int
    eps: float


def layout_named(name: str) -> PixelLayout:
    """The layout of that name, or a refusal."""
    if name not in LAYOUTS:
        raise InputError(f"there is no layout {name!r}; {nearest(name, LAYOUTS)}")
    return LAYOUTS[name]


def names(layout: PixelLayout, packed: bool) -> dict[str, str]:
    """The layout's name of each projection and of the norm."""
    if packed:
        return {"norm": layout.norm, "qkv": layout.packed or "", "out": layout.out}
    q, k, v = layout.separate or ("", "", "")
    return {"norm": layout.norm, "q": q, "k": k, "v": v, "out": layout.out}


def key_map(layout: PixelLayout, packed: bool) -> dict[tuple[str, str], str]:
    """(projection or "norm", "weight" or "bias") to the key within a block."""
    return {
        (role, kind): f"{name}{layout.join}{kind}"
        for role, name in names(layout, packed).items()
        for kind in ("weight", "bias")
    }


def forms(layout: PixelLayout) -> list[bool]:
    """Whether a block may be packed: [False], [True], or both."""
    return [form for form in (False, True) if (layout.packed if form else layout.separate)]


def both_ways(fact: str) -> str:
    """A fact as Python and as the command line name it."""
    words = f"{fact} (--{fact.replace('_', '-')})"
    return f"{words} or dim_head (--dim-head)" if fact == "num_heads" else words


def facts_of(
    layout: PixelLayout,
    name: str,
    channels: int,
    *,
    num_heads: int | None,
    dim_head: int | None,
    num_groups: int | None,
    eps: float | None,
) -> BlockFacts:
    """The facts of a block with that many channels: those given, else those the library fixes."""
    if num_heads is not None and dim_head is not None:
        raise InputError(f"num_heads={num_heads} and dim_head={dim_head}: give one of the two")
    if dim_head is not None:
        num_heads = channels // divisor(dim_head, "dim_head", channels, "channels")
    num_heads = layout.num_heads if num_heads is None else num_heads
    eps = layout.eps if eps is None else eps
    if num_groups is None and layout.num_groups is not None:
        num_groups = min(layout.num_groups, channels // layout.group_width)
    told = {"num_heads": num_heads, "num_groups": num_groups, "eps": eps}
    lacking = [fact for fact, value in told.items() if value is None]
    if lacking or num_heads is None or num_groups is None or eps is None:
        raise InputError(
            f"weights of the layout {name} do not say their {' and '.join(lacking)}: give "
            f"{', '.join(map(both_ways, lacking))}, as the model that they come from was built"
        )
    return BlockFacts(
        channels,
        divisor(num_heads, "num_heads", channels, "channels"),
        divisor(num_groups, "num_groups", channels, "channels"),
        check_eps(eps),
    )
