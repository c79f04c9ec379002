"""A state dict in one layout to the same weights in another."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.errors import InputError
from regard.weights import blocks
from regard.weights.beside import Beside
from regard.weights.checks import (
    add_rest,
    check_names,
    check_values,
    is_named_tensor,
    listing,
    refuse_other_vits,
)
from regard.weights.facts import Conversion, Facts, make_facts
from regard.weights.layouts import LAYOUTS, BlockFacts, facts_of, forms, layout_named
from regard.weights.vit_layout import ANCHORS, convert_vits, find_vits


def convert(
    state_dict: Mapping[str, Tensor], source: str, target: str = "regard", **facts: Any
) -> dict[str, Tensor]:
    """The weights of `state_dict`, whose layout is `source`, under the keys of layout `target`.

    Layouts of pixel attention are those of `regard.weights.LAYOUTS`: regard, diffusers,
    diffusers-old, ldm, guided, guided-legacy, monai and edm; of SimpleViT: regard and
    vit-pytorch-qk. "regard" is `PixelAttention` or `SimpleViT`, whichever the weights are.
    Blocks are found at any depth and keep their prefix. Facts are those of `Facts`; a fact that
    the layout leaves open and that is needed is asked for, never guessed. `source="auto"` takes
    the one layout that fits. Tensors may share memory with `state_dict`, which is not modified.

    Raises:
        InputError: naming missing, unused and misshapen keys, NaN weights, or the fact needed.
    """
    return convert_weights(state_dict, source, target, make_facts(facts)).tensors


def convert_weights(
    state_dict: Mapping[str, Tensor],
    source: str,
    target: str,
    facts: Facts,
    beside: Beside | None = None,
) -> Conversion:
    """`convert`, with what travels beside the tensors before and after."""
    for role, layout in (("source", source), ("target", target)):
        if not isinstance(layout, str):
            raise InputError(f"{role}={layout!r}: give a layout's name, such as 'diffusers'")
    if facts.rest != "drop":
        check_names(state_dict)
    state_dict = {key: value for key, value in state_dict.items() if is_named_tensor(key, value)}
    if source == "auto":
        source = detect(state_dict, facts)
    if source == target:
        raise InputError(f"source and target are both {source}: there is nothing to convert")
    if is_vit(state_dict, source, target):
        return convert_vits(state_dict, source, target, facts)
    return convert_blocks(state_dict, source, target, facts, beside or Beside())


def is_vit(tensors: Mapping[str, Tensor], source: str, target: str) -> bool:
    """Whether SimpleViTs are to be converted; where there are blocks too, the target says which."""
    if source not in ANCHORS or source not in LAYOUTS:
        return source in ANCHORS
    only = not blocks.find_blocks(tensors, LAYOUTS[source])
    return bool(find_vits(tensors, source)) and (target in ANCHORS or only)


def detect(tensors: Mapping[str, Tensor], facts: Facts) -> str:
    """The one layout that fits, or a refusal naming those that do."""
    fitting = [name for name in ANCHORS if find_vits(tensors, name)]
    partial: dict[str, list[str]] = {}
    for name, layout in LAYOUTS.items():
        found = blocks.find_blocks(tensors, layout)
        lacking = {prefix: blocks.missing_keys(layout, held) for prefix, held in found.items()}
        if any(not missing for missing in lacking.values()):
            fitting += [name] if name not in fitting else []
        else:
            partial |= {name: [p + k for p, keys in lacking.items() for k in keys]} if found else {}
    if {"guided", "guided-legacy"} <= set(fitting) and facts.num_heads == 1:
        fitting.remove("guided-legacy")  # with one head the two orders are the same
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InputError(
            f"the weights fit the layouts {' and '.join(fitting)}: say which as the source"
            + (" (the order of heads is not in the file)" if "guided" in fitting else "")
        )
    refuse_other_vits(tensors)
    near = "; ".join(f"{name} would need {listing(keys)}" for name, keys in partial.items())
    raise InputError(
        f"the weights fit no layout of {', '.join([*LAYOUTS, 'vit-pytorch-qk'])}"
        + (f"; {near}" if near else f"; they hold {listing(tensors)}")
    )


def convert_blocks(
    tensors: Mapping[str, Tensor], source: str, target: str, facts: Facts, beside: Beside
) -> Conversion:
    """Every pixel attention block of a state dict, from layout to layout."""
    old, new = layout_named(source), layout_named(target)
    found = blocks.find_blocks(tensors, old)
    if not found:
        refuse_other_vits(tensors)
        example = ", ".join(blocks.shapes(old, forms(old)[0], 0))
        raise InputError(
            f"no block of the layout {source} is in the weights: it has {example}, at any depth; "
            f"the weights hold {listing(tensors)}"
        )
    used = {prefix + key for prefix, held in found.items() for key in held}
    check_values({key: tensors[key] for key in used}, facts)
    check_blocks(tensors, source, found)
    converted: dict[str, Tensor] = {}
    known: dict[str, BlockFacts] = {}
    for prefix, held in found.items():
        block = {key: tensors[prefix + key] for key in held}
        norm = block[f"{old.norm}{old.join}weight"]
        known[prefix] = block_facts(source, norm.shape[0], beside.complete(facts, prefix))
        params = blocks.read_block(old, block, known[prefix].num_heads)
        packed = new.packed is not None and (facts.packed or new.separate is None)
        written = blocks.write_block(new, params, known[prefix], packed=packed)
        converted |= {prefix + key: tensor for key, tensor in written.items()}
    rest = add_rest(converted, tensors, used, source, facts)
    return Conversion(source, target, converted, blocks=known, rest=rest)


def block_facts(name: str, channels: int, facts: Facts) -> BlockFacts:
    """The facts of one block of the layout `name`."""
    return facts_of(
        LAYOUTS[name],
        name,
        channels,
        num_heads=facts.num_heads,
        dim_head=facts.dim_head,
        num_groups=facts.num_groups,
        eps=facts.eps,
    )


def check_blocks(tensors: Mapping[str, Tensor], source: str, found: Mapping[str, set[str]]) -> None:
    """Refuse blocks with keys that are missing, strange or misshapen, naming them all."""
    layout = LAYOUTS[source]
    missing: list[str] = []
    strange: list[str] = []
    misshapen: list[str] = []
    for prefix, held in found.items():
        packed = blocks.is_packed(layout, held)
        missing += [prefix + key for key in blocks.missing_keys(layout, held)]
        strange += blocks.strange_keys(layout, packed, prefix, tensors)
        norm = tensors.get(f"{prefix}{layout.norm}{layout.join}weight")
        if norm is None:
            continue
        for key, shape in blocks.shapes(layout, packed, max(1, norm.numel())).items():
            if key in held and tuple(tensors[prefix + key].shape) != shape:
                came = tuple(tensors[prefix + key].shape)
                misshapen.append(f"{prefix}{key} {came} for {shape}")
    said = [f"missing: {listing(missing)}"] if missing else []
    said += [f"not of the layout: {listing(strange)}"] if strange else []
    said += [f"misshapen: {listing(misshapen)}"] if misshapen else []
    if said:
        raise InputError(f"the weights do not fit the layout {source}; {'; '.join(said)}")
