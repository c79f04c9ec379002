"""`regard convert`: a weights file in one layout to a folder in another, checked by running it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.errors import InputError, counted
from regard.files import atomic_folder
from regard.weights.beside import read_beside
from regard.weights.convert import convert_weights
from regard.weights.facts import Conversion, Facts
from regard.weights.hub import write_model
from regard.weights.state import read_state
from regard.weights.verify import verify


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
