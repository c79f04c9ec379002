"""Attention that a model writes out itself: a softmax, then a product with the values."""

import dataclasses
import string
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret.attention_call import Call

SOFTMAXES = frozenset({torch.softmax, torch.nn.functional.softmax, Tensor.softmax})
PRODUCTS = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum}
)
# What may stand between the softmax and the product without making other weights of it.
SAME = frozenset(
    {
        torch.nn.functional.dropout,
        torch.dropout,
        Tensor.to,
        Tensor.type,
        Tensor.type_as,
        Tensor.float,
        Tensor.half,
        Tensor.bfloat16,
        Tensor.contiguous,
    }
)
# Operators that write over their first operand, beside all whose name ends with one underscore.
WRITES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__idiv__"}
)
SWAPS = frozenset(
    {torch.transpose, Tensor.transpose, torch.permute, Tensor.permute, Tensor.swapaxes}
)


@dataclass(frozen=True)
class Softmax:
    """Weights and the logits they came from, and the tensor that now stands for the weights.

    Of weights and logits one is None once the model is seen to write over it; `versions` of the
    two tell what was not seen.
    """

    weights: Tensor | None
    logits: Tensor | None
    now: Tensor
    versions: tuple[int | None, int | None]
    swapped: bool = False

    @staticmethod
    def of(
        result: Tensor, input: Tensor, dim: int | None = None, *_: Any, **options: Any
    ) -> "Softmax | None":
        """A softmax over the last of three or four dimensions; None for any other."""
        if result.ndim not in (3, 4) or dim not in (-1, result.ndim - 1):
            return None
        over = options.get("out") is not None and share_memory(result, input)
        logits = None if over else input
        return Softmax(result, logits, result, (version(result), version(input)))

    def whole(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights and logits, None for what was written over since."""
        weights, logits = (
            x if x is None or version(x) == then else None
            for x, then in zip((self.weights, self.logits), self.versions, strict=True)
        )
        return weights, logits


@dataclass(frozen=True)
class Product:
    """weights (…, n, m) · values (…, m, e) = out (…, n, e), as views of what the model holds."""

    softmax: Softmax
    values: Tensor
    out: Tensor
    equation: str

    def call(self, name: str) -> Call:
        """As a `Call`; refused where neither weights nor logits are left of the softmax."""
        weights, logits = self.softmax.whole()
        if weights is None and logits is None:
            raise InputError(
                f"{name} writes over both its logits and its weights before it multiplies them "
                "with values, so that none are left to record; have it keep one of them, or "
                "choose other layers by layers="
            )

        def four(x: Tensor) -> Tensor:
            return x if x.ndim == 4 else x.unsqueeze(1)

        def to_heads(gradient: Tensor) -> Tensor:
            return four(torch.einsum(self.equation, gradient))

        return Call(
            v=four(self.values),
            out=self.out,
            to_heads=to_heads,
            logits=None if logits is None else four(logits),
            weights=None if weights is None else four(weights),
            merged=self.softmax.now.ndim == 3,
        )


def alias(softmax: Softmax, func: Any, args: tuple[Any, ...], out: Any) -> Softmax:
    """The softmax after `func`, followed through dropout, casts and a swap of n and m."""
    if not args or args[0] is not softmax.now or not isinstance(out, Tensor):
        return softmax
    if func in SAME:
        return dataclasses.replace(softmax, now=out)
    strides = softmax.now.stride()
    if func in SWAPS and out.stride() == (*strides[:-2], strides[-1], strides[-2]):
        return dataclasses.replace(softmax, now=out, swapped=not softmax.swapped)
    return softmax


def after_writes(
    softmax: Softmax, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Softmax:
    """The softmax after `func`, without what that wrote over: for tensors made in inference mode,
    which count no versions.
    """
    if None not in softmax.versions:
        return softmax
    name = getattr(func, "__name__", "")
    in_place = name in WRITES or (name.endswith("_") and not name.endswith("__"))
    to = args[0] if args and (in_place or kwargs.get("inplace")) else kwargs.get("out")
    if not isinstance(to, Tensor):
        return softmax
    weights, logits = (
        None if x is None or share_memory(x, to) else x for x in (softmax.weights, softmax.logits)
    )
    return dataclasses.replace(softmax, weights=weights, logits=logits)


def version(x: Tensor) -> int | None:
    """How often `x` has been written over; None where that is not counted."""
    return None if x.is_inference() else x._version


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are parts of one storage."""
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata  # fakes have no pointers


def is_product(func: Any) -> bool:
    """Whether `func` multiplies matrices."""
    return func in PRODUCTS


def product(softmax: Softmax, func: Any, args: tuple[Any, ...], out: Tensor) -> Product | None:
    """The product of the softmax's weights with values that `func` was, or None."""
    if func is torch.einsum:
        return _einsum(softmax, args, out)
    if len(args) < 2:
        return None
    left, right = args[0], args[1]
    rank = softmax.now.ndim
    axes = string.ascii_lowercase[:rank]
    if left is softmax.now and not softmax.swapped and right.ndim == rank:
        return Product(softmax, right, out, f"{axes}->{axes}")
    if right is softmax.now and softmax.swapped and left.ndim == rank:
        swapped = axes[:-2] + axes[-1] + axes[-2]  # values (…, e, m) · weightsᵀ (…, m, n)
        return Product(softmax, left.mT, out, f"{axes}->{swapped}")
    return None


def _einsum(softmax: Softmax, args: tuple[Any, ...], out: Tensor) -> Product | None:
    """An einsum that sums weights and values over the keys, in any order of their axes."""
    if len(args) != 3 or not isinstance(args[0], str) or "->" not in args[0]:
        return None
    inputs, result = args[0].replace(" ", "").split("->")
    names = inputs.split(",")
    position = next((i for i in (0, 1) if args[1 + i] is softmax.now), None)
    if position is None or len(names) != 2 or "." in inputs:
        return None
    weights, values = names[position], names[1 - position]
    if softmax.swapped:
        weights = weights[:-2] + weights[-1] + weights[-2]
    lead, n, m = weights[:-2], weights[-2], weights[-1]
    width = set(values) - set(weights)
    e = "".join(width)
    if len(e) != 1 or set(values) != {*lead, m, e} or set(result) != {*lead, n, e}:
        return None
    values_view = torch.einsum(f"{values}->{lead}{m}{e}", args[2 - position])
    return Product(softmax, values_view, out, f"{result}->{lead}{n}{e}")
