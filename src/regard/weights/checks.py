"""Refusals that conversions share."""

import math
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from regard.errors import InputError
from regard.weights.facts import Facts

# Vision transformers of other architectures, by a key that each has.
OTHER_VITS = {
    "timm": r"(.*\.)?blocks\.\d+\.attn\.qkv\.weight",
    "big_vision": r"(.*/)?MultiHeadDotProductAttention_0/query/kernel",
    "torchvision": r"(.*\.)?encoder_layer_\d+\.self_attention\.in_proj_weight",
    "transformers": r"(.*\.)?encoder\.layer\.\d+\.attention\.attention\.query\.weight",
}


def add_rest(
    converted: dict[str, Tensor],
    tensors: Mapping[str, Tensor],
    used: set[str],
    source: str,
    facts: Facts,
) -> tuple[str, ...]:
    """Deal with the keys of no block as `facts.rest` says; returns their names."""
    rest = tuple(sorted(set(tensors) - used))
    if rest and facts.rest == "refuse":
        raise InputError(
            f"unused keys, of no block of the layout {source}: {listing(rest)}; give rest='keep' "
            "(--rest keep) to carry them along unchanged, or 'drop' to leave them out"
        )
    clashing = sorted(set(rest) & converted.keys()) if facts.rest == "keep" else []
    if clashing:
        raise InputError(f"unused keys have names of the target: {listing(clashing)}")
    if facts.rest == "keep":
        converted.update({key: tensors[key] for key in rest})
    return rest


def check_values(tensors: Mapping[str, Tensor], facts: Facts) -> None:
    """Refuse weights that are no real numbers, or not finite unless allowed."""
    odd = [f"{key} {tensor.dtype}" for key, tensor in tensors.items() if not is_real(tensor)]
    if odd:
        raise InputError(f"weights are not real floating-point numbers: {listing(odd)}")
    if facts.allow_nan:
        return
    bad = [key for key, tensor in tensors.items() if not math.isfinite(total(tensor))]
    if bad:
        raise InputError(
            f"weights are NaN or infinite: {listing(bad)}; take another checkpoint, or give "
            "allow_nan=True (--allow-nan)"
        )


def is_real(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def total(tensor: Tensor) -> float:
    """NaN or infinite exactly if an element is, since 0·∞ is NaN."""
    return float((tensor * 0).sum())


def refuse_other_vits(tensors: Iterable[str]) -> None:
    """Say so where the weights are of a vision transformer that is not convertible."""
    keys = list(tensors)
    for library, pattern in OTHER_VITS.items():
        if any(re.fullmatch(pattern, key) for key in keys):
            raise InputError(
                f"these are weights of {library}'s ViT, another architecture than SimpleViT "
                "(biases, learned positions, another head): it is not converted. Load it in its "
                "own library; regard.accelerate speeds it up and regard.record shows its attention"
            )


def listing(keys: Iterable[str], most: int = 12) -> str:
    """Names in words, the first `most` of them."""
    keys = sorted(keys)
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return (", ".join(keys[:most]) or "nothing") + more
