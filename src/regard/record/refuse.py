"""Refusals: models that cannot be read, and layers, kinds and queries that are not there."""

import fnmatch
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from regard.errors import InputError, nearest
from regard.record.reductions import KINDS
from regard.record.tokens import Tokens

# Classes, by name, whose weights are over shifted windows and no map of the image.
WINDOWED = ("ShiftedWindowAttention", "ShiftedWindowAttentionV2", "WindowAttention")


def check_readable(model: nn.Module) -> None:
    """Refuse a model whose attention cannot be seen from outside or is over windows."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} came; give the model itself, a torch.nn.Module")
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"{name} ({kind})" if name else kind
        # By name: torch._dynamo takes a second to import where nothing is compiled.
        compiled = kind == "OptimizedModule"
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise InputError(
                f"{where} is compiled, and what happens inside cannot be recorded; record the "
                "model you compiled, which has the same weights"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{where} is a TorchScript module, which cannot be recorded; give the model it "
                "was made from"
            )
        if kind in WINDOWED:
            raise InputError(
                f"{where} attends within shifted windows, so that its weights form no map of the "
                "image; it cannot be recorded. Record a model with global attention"
            )


def check_queries(queries: Any, kinds: Sequence[str]) -> list[int | tuple[int, int]] | None:
    """The chosen queries, or a refusal of what is no token index and no (row, column), and of
    queries where nothing that has rows of them is kept."""
    if queries is None:
        return None
    if not {"weights", "mean"} & set(kinds):
        raise InputError(
            "queries choose rows of 'weights' or 'mean', and keep has neither: "
            f"{', '.join(kinds)}; add one of them, or leave queries out"
        )
    needed = "give a list of token indices or of (row, column)"
    if isinstance(queries, (str, bytes)) or not isinstance(queries, Sequence) or not queries:
        raise InputError(f"queries={queries!r}: {needed}, with at least one of them")
    found: list[int | tuple[int, int]] = []
    for query in queries:
        numbers = query if isinstance(query, tuple) else (query,)
        try:
            whole = tuple(operator.index(number) for number in numbers)
        except TypeError:
            whole = ()
        if any(isinstance(number, bool) for number in numbers) or len(whole) != (
            2 if isinstance(query, tuple) else 1
        ):
            raise InputError(f"queries has {query!r}; {needed}")
        found.append((whole[0], whole[1]) if isinstance(query, tuple) else whole[0])
    return found


def check_grid(grid: tuple[int, int] | None, layouts: Iterable[Tokens]) -> None:
    """Refuse a grid given outright that no attention's tokens form."""
    layouts = list(layouts)
    if grid is None or not layouts or any(layout.grid is not None for layout in layouts):
        return
    counts = ", ".join(str(n) for n in dict.fromkeys(layout.count for layout in layouts))
    raise InputError(
        f"grid={grid} has {grid[0] * grid[1]} places, and attention is over {counts} tokens; give "
        "a grid of as many places, or of fewer where the others, which are then extra tokens, are "
        "no more than the places"
    )


def check_keep(keep: str | Sequence[str]) -> tuple[str, ...]:
    """The kinds to keep, or a refusal of an unknown one."""
    if not isinstance(keep, (str, list, tuple, set, frozenset)):
        raise InputError(f"keep={keep!r}: give some of {', '.join(KINDS)}")
    kinds = (keep,) if isinstance(keep, str) else tuple(keep)
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(
                f"keep={kind!r} is unknown ({nearest(str(kind), KINDS)}); give some of "
                f"{', '.join(KINDS)}"
            )
    if not kinds:
        raise InputError(f"keep is empty; give some of {', '.join(KINDS)}")
    return kinds


class Layers:
    """Which layers are wanted: names (a parent's name or a pattern with * too), or positions.

    A position counts the attentions in the order they run, from the end if negative.
    """

    def __init__(self, wanted: Iterable[str | int] | str | int | None, model: nn.Module) -> None:
        if isinstance(wanted, (str, int)):
            wanted = [wanted]
        if isinstance(wanted, Mapping) or not (wanted is None or isinstance(wanted, Iterable)):
            raise InputError(f"layers={wanted!r}: give names, positions, or None for all")
        self.every = wanted is None
        items = list(wanted or [])
        self.patterns = [item for item in items if isinstance(item, str)]
        self.positions = [item for item in items if not isinstance(item, str)]
        if not self.every and not items:
            raise InputError("layers is empty; give names, positions, or None for all")
        for position in self.positions:
            if isinstance(position, bool) or not isinstance(position, int):
                raise InputError(f"layers has {position!r}; give names or integers")
        listed = model.named_modules() if self.patterns else ()
        names = [name or type(model).__name__ for name, _ in listed]
        for pattern in self.patterns:
            if not any(matches(name, pattern) for name in names):
                raise InputError(
                    f"{type(model).__name__} has no layer {pattern!r} ({nearest(pattern, names)})"
                )

    def now(self, name: str, position: int) -> bool:
        """Whether the attention that runs at `position` may be wanted, as far as can be known."""
        from_end = any(wanted < 0 for wanted in self.positions)
        named = any(matches(name, pattern) for pattern in self.patterns)
        return self.every or named or from_end or position in self.positions

    def select(self, names: Sequence[str], modules: Sequence[str]) -> set[str]:
        """The wanted ones of the attentions that ran, all of them known; absent ones refused.

        `names` are the attentions in order, `modules` the module of each.
        """
        if self.every:
            return set(names)
        chosen: set[str] = set()
        for pattern in self.patterns:
            found = [n for n, m in zip(names, modules, strict=True) if matches(m, pattern)]
            if not found:
                raise InputError(
                    f"layer {pattern!r} computed no attention that can be read; those seen: "
                    f"{', '.join(names)}"
                )
            chosen.update(found)
        for position in self.positions:
            if not -len(names) <= position < len(names):
                raise InputError(
                    f"layers has {position}, but {len(names)} attentions ran: give "
                    f"{-len(names)} to {len(names) - 1}"
                )
            chosen.add(names[position])
        return chosen


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name is `pattern`, below it, or matched by it."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
