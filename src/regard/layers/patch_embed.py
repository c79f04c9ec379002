"""Images cut into patches."""

import functools

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


# Two-dimensional sine-cosine positions.


def check_position_dim(dim: int) -> None:
    """Refuse a width that the position formula cannot fill."""
    if dim % 4 != 0 or dim < 4:
        raise InputError(
            f"dim={dim} cannot hold 2-D sine-cosine positions: each of sin x, cos x, sin y, cos y "
            "takes a quarter of it, so dim must be a multiple of 4, at least 8"
        )
    if dim == 4:
        raise InputError(
            "dim=4 leaves one frequency, and the frequencies' exponents i / (dim/4 - 1) divide by "
            "zero; use dim of at least 8"
        )


def sincos_2d(
    h: int,
    w: int,
    dim: int,
    *,
    temperature: float = 10_000.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions (h·w, dim) of an h × w grid, row-major, float32.

    Row i·w + j is [sin jω, cos jω, sin iω, cos iω] with ω_t = temperature^(-t/(dim/4 - 1)),
    t = 0 … dim/4 - 1, and integer coordinates i, j: they are never rescaled, so the position of
    a patch does not depend on the size of the picture it is in.
    Source: Beyer, Zhai, Kolesnikov 2022, arXiv 2205.01580; vit-pytorch's `posemb_sincos_2d`.
    """
    check_position_dim(dim)
    quarter = dim // 4
    exponent = torch.arange(quarter, device=device) / (quarter - 1)
    omega = 1.0 / temperature**exponent
    y = torch.arange(h, device=device)[:, None] * omega
    x = torch.arange(w, device=device)[:, None] * omega
    x = torch.cat((x.sin(), x.cos()), dim=1)[None, :, :].expand(h, w, dim // 2)
    y = torch.cat((y.sin(), y.cos()), dim=1)[:, None, :].expand(h, w, dim // 2)
    return torch.cat((x, y), dim=2).reshape(h * w, dim)


def sincos_2d_once(h: int, w: int, dim: int, device: torch.device) -> Tensor:
    """`sincos_2d`, computed once for each of the last few grids; not to be written to."""
    if torch.compiler.is_compiling():
        return sincos_2d(h, w, dim, device=device)
    return _kept(h, w, dim, device)


@functools.lru_cache(maxsize=8)
def _kept(h: int, w: int, dim: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return sincos_2d(h, w, dim, device=device)
