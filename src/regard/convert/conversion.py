"""A state dict in one layout to the same weights in another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from regard._io import atomic_folder
from regard.convert import layouts as blocks
from regard.convert.checkpoint_files import read_state
from regard.convert.layouts import LAYOUTS, BlockFacts, facts_of, forms, layout_named
from regard.convert.request import (
    Beside,
    Conversion,
    Facts,
    add_rest,
    check_names,
    check_values,
    is_named_tensor,
    make_facts,
    read_beside,
    refuse_other_vits,
)
from regard.convert.verify import verify
from regard.convert.vit_layout import ANCHORS, convert_vits, find_vits
from regard.errors import InputError, counted, listing
from regard.models.hub import write_model


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


# `regard convert`: a weights file in one layout to a folder in another, checked by running it.


@dataclass(frozen=True)
class ConvertOptions:
    """Convert weights between the layouts of different libraries.

    Layouts of pixel attention: regard (ours), diffusers, diffusers-old, ldm, guided,
    guided-legacy, monai, edm. Of SimpleViT: regard (ours), vit-pytorch-qk. Both sides are run on
    one input; a difference above 1e-5 is refused.
    """

    src: Path
    "weights file (.safetensors, its index, .pt, .pth, .ckpt, .bin, .npz) or folder with one"
    out: Path
    "folder to write, which may not exist yet: model.safetensors and config.json"
    source: str = "auto"
    "layout of SRC; found by itself when exactly one fits"
    target: str = "regard"
    "layout to write"
    entry: str | None = None
    "dictionary in a checkpoint that holds several, such as state_dict"
    facts: Facts = field(default_factory=Facts)


def convert_file(options: ConvertOptions, say: Callable[[str], Any] = print) -> Conversion:
    """Read, convert, run both sides on one input, and write the folder whole or not at all."""
    if options.out.exists() or options.out.is_symlink():
        raise InputError(f"{options.out} exists already; give a new folder, or remove this one")
    state = read_state(options.src, options.entry)
    beside = read_beside(options.src)
    conversion = convert_weights(state, options.source, options.target, options.facts, beside)
    found = len(conversion.blocks) + len(conversion.vits)
    say(f"{conversion.source} to {conversion.target}: {found} found in {len(state)} tensors")
    for block in sorted(set(conversion.blocks.values())):
        say(
            f"  of {block.channels} channels: {counted(block.num_heads, 'head')}, "
            f"{counted(block.num_groups, 'group')}, "
            f"eps {block.eps:g}"
        )
    checks = verify(conversion, state)
    for check in checks:
        say(f"  {check}")
    if conversion.rest:
        verb = {"keep": "kept as they are", "drop": "left out"}[options.facts.rest]
        say(f"  {verb}, being of no block: {len(conversion.rest)} of the tensors")
    config = {"source": conversion.source, "layout": conversion.target, **models(conversion)}
    with atomic_folder(options.out) as folder:
        write_model(folder, conversion.tensors, config)
    say(f"wrote {options.out}")
    return conversion


def models(conversion: Conversion) -> dict[str, Any]:
    """What config.json says of each block and model, by its prefix."""
    blocks = {
        prefix: {"class": "PixelAttention", **facts._asdict()}
        for prefix, facts in conversion.blocks.items()
    }
    vits = {
        prefix: {"class": "SimpleViT", **(config or {})}
        for prefix, config in conversion.vits.items()
    }
    return {"models": blocks | vits}
