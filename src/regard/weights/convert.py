"""A state dict in one layout to the same weights in another."""

from collections.abc import Mapping

from torch import Tensor

from regard.errors import InputError
from regard.weights.vit_layout import find_vits, vit_key_map


def convert(
    state_dict: Mapping[str, Tensor], source: str, target: str = "regard"
) -> dict[str, Tensor]:
    """The weights of `state_dict`, a layout `source`, under the keys of the layout `target`.

    vit-pytorch-qk: `vit_pytorch.simple_vit_with_qk_norm.SimpleViT`; regard: our SimpleViT without
    a classifier. The tensors are shared with `state_dict`, which is not modified.
    """
    if {source, target} != {"regard", "vit-pytorch-qk"}:
        raise InputError(f"no conversion from {source!r} to {target!r}")
    converted: dict[str, Tensor] = {}
    used: set[str] = set()
    missing: list[str] = []
    for prefix, depth in find_vits(state_dict, source).items():
        for old, new in vit_key_map(depth, to_ours=target == "regard").items():
            if prefix + old in state_dict:
                converted[prefix + new] = state_dict[prefix + old]
                used.add(prefix + old)
            else:
                missing.append(prefix + old)
    if not used:
        raise InputError(f"the state dict holds no model of the layout {source}")
    unused = sorted(set(state_dict) - used)
    if missing or unused:
        raise InputError(
            f"the state dict does not fit {source}: missing {', '.join(missing) or 'none'}; "
            f"unused {', '.join(unused) or 'none'}"
        )
    return converted
