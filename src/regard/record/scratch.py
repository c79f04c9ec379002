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
        self._held: dict[tuple[str, torch.dtype, torch.device, bool], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of `shape`, with like's dtype and device; the next `take` of
        the same name overwrites it.
        """
        # Tensors made in inference mode cannot be used outside.
        key = name, like.dtype, like.device, torch.is_inference_mode_enabled()
        held = self._held.get(key)
        if held is None or (count := math.prod(shape)) > held.numel():
            held = self._held[key] = like.new_empty(shape)
        return held if held.shape == shape else held.view(-1)[:count].view(shape)
