"""Refusals that conversions share."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.files import unwritable
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
        kept = {key: tensors[key] for key in rest}
        check_writable(kept)
        converted.update(kept)
    return rest


def check_names(tensors: Mapping[Any, Any]) -> None:
    """Refuse what is no dictionary of tensors by name."""
    odd = [repr(key) for key, value in tensors.items() if not is_named_tensor(key, value)]
    if odd:
        raise InputError(
            f"the state dict holds no tensor by name under {listing(odd)}; leave them out, or give "
            "rest='drop' (--rest drop)"
        )


def is_named_tensor(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, Tensor)


def check_writable(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that cannot be written: sparse, quantised, without values, ill named."""
    bad = unwritable(tensors)
    if bad:
        raise InputError(
            f"weights that safetensors cannot hold: {listing(bad)}; make them dense "
            "(tensor.to_dense(), tensor.dequantize()), or leave them out"
        )


def check_values(tensors: Mapping[str, Tensor], facts: Facts) -> None:
    """Refuse weights that are no dense real numbers, or not finite unless allowed."""
    check_writable(tensors)
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
    """Names in words, sorted, the first `most` of them."""
    return first(sorted(keys), most)


def first(names: Iterable[str], most: int = 12) -> str:
    """Names in words, in their order, the first `most` of them."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(brief(name, 120) for name in names[:most]) or "nothing") + more


def brief(text: object, most: int = 200) -> str:
    """Text on one line that can be printed, without its middle where it is long."""
    line = " ".join(str(text).split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= most else f"{line[: most // 2]}…{line[-most // 2 :]}"
