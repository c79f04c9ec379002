"""What the config.json beside a weights file says of the blocks in that file."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.files import read_json
from regard.weights.facts import Facts


@dataclass(frozen=True)
class Beside:
    """Facts that need not be told: of each block by its prefix, and the groups of every norm."""

    blocks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_groups: int | None = None

    def complete(self, facts: Facts, prefix: str) -> Facts:
        """`facts`, and for those not given what is known of the block at `prefix`."""
        known = {"num_groups": self.num_groups, **self.blocks.get(prefix, {})}
        names = ["num_groups", "eps"] + ["num_heads"] * (facts.dim_head is None)
        found: dict[str, Any] = {n: known.get(n) for n in names if getattr(facts, n) is None}
        return dataclasses.replace(facts, **found)


def read_beside(weights: Path) -> Beside:
    """Of a folder or file: ours says all of each block; diffusers' `norm_num_groups` is taken.

    Its `attention_head_dim` is not: in some of its models that is the number of heads.
    """
    file = (weights if weights.is_dir() else weights.parent) / "config.json"
    config = read_json(file) if file.is_file() else None
    if not isinstance(config, dict):
        return Beside()
    models = config.get("models")
    if config.get("library") == "regard" and isinstance(models, dict):
        return Beside({name: facts for name, facts in models.items() if isinstance(facts, dict)})
    groups = config.get("norm_num_groups") if "_diffusers_version" in config else None
    return Beside(num_groups=groups if isinstance(groups, int) else None)
