"""Memory that a recording uses again and again."""

import math

import torch
from torch import Tensor


class Scratch:
    """Buffers by name, each as large as the largest use so far.

    Fresh memory costs a recording as much as its arithmetic: the system hands it out, zeroed, a
    page at a time.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, bool], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of `shape`, with like's dtype and device; the next `take` of
        the same name overwrites it.
        """
        key = name, torch.is_inference_mode_enabled()  # such tensors cannot be used outside
        count = math.prod(shape)
        held = self._held.get(key)
        fits = held is not None and (held.dtype, held.device) == (like.dtype, like.device)
        if held is None or not fits or held.numel() < count:
            held = self._held[key] = like.new_empty(count)
        return held[:count].view(shape)
