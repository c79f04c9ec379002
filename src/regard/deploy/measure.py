"""Files proven and timed beside their model."""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.deploy.facts import FileFacts
from regard.deploy.proof import Reference, check, prove
from regard.deploy.runners import Runner, open_file
from regard.deploy.source import Source
from regard.deploy.table import figures
from regard.deploy.timing import interleaved

TIMED = (1, 32)


def measure(
    source: Source,
    facts: FileFacts,
    files: Mapping[str, Path],
    *,
    images: int,
    max_drop: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Prove the files on up to `images` real images and time them beside eager torch.

    The last file is what `facts` says; those before it, by the names to show, are fp32. Returns
    the numbers, JSON-ready; raises `NotEqual` for a file that is too far from its model.
    """
    reference = Reference(source.model, facts.preprocess, facts.takes)
    runners: dict[str, Runner] = {name: open_file(path)[1] for name, path in files.items()}
    say(f"comparing with the model on up to {images:,} images of {source.proven_on}")
    found = prove(reference, runners, facts, source.split, images)
    *others, last = files
    for name in others:
        check(found[name], found["eager"], "fp32", 0)
    check(found[last], found["eager"], facts.precision, max_drop)
    say("timing it beside eager torch")
    example = reference.input([source.example()])
    functions: dict[str, Callable[[Tensor], Tensor]] = {"eager": reference, **runners}
    latency = {}
    for batch in TIMED:
        repeated = example.expand(batch, *example.shape[1:]).contiguous()
        latency[batch] = interleaved(functions, repeated)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return {
        **figures(found, latency, sizes, facts.precision),
        "images": found[last].images,
        "proven_on": source.proven_on,
        "machine": machine(),
        "threads": torch.get_num_threads(),
    }


def machine() -> str:
    """The processor, in words."""
    names = []
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
