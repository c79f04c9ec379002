"""Images cut into patches."""

import torch
from torch import Tensor

from regard.errors import InputError


def nearest_multiples(side: int, patch: int) -> str:
    """The multiples of `patch` on either side of `side`, as words."""
    below, above = side // patch * patch, -(-side // patch) * patch
    return f"{below} or {above}" if below > 0 else str(above)


def check_divisible(h: int, w: int, patch: tuple[int, int]) -> None:
    """Refuse an image size that the patch size does not divide, naming the nearest that fit."""
    if h < 1 or w < 1 or h % patch[0] or w % patch[1]:
        raise InputError(
            f"an image of height {h} and width {w} cannot be cut into patches of height "
            f"{patch[0]} and width {patch[1]}; the nearest legal height is "
            f"{nearest_multiples(h, patch[0])}, the nearest legal width is "
            f"{nearest_multiples(w, patch[1])}"
        )


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Patches as rows: b c (h p) (w q) -> b (h w) (p q c), row-major over the grid."""
    b, c, height, width = images.shape
    p, q = patch
    h, w = height // p, width // q
    cut = images.reshape(b, c, h, p, w, q)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(b, h * w, p * q * c)


def keep_some(tokens: Tensor, dropped: float) -> Tensor:
    """A random choice of each image's tokens (b, n, c), without the share `dropped` of them.

    At least one stays; their order is random. Source: Liu et al. 2022, arXiv 2208.07220.
    """
    b, n, _ = tokens.shape
    kept = max(1, n - int(n * dropped))
    order = torch.rand(b, n, device=tokens.device).argsort(dim=1)[:, :kept]
    return torch.take_along_dim(tokens, order[:, :, None], dim=1)
