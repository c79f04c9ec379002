"""vit-pytorch's SimpleViT with QK norm, plainly, on its own state dict; shares no code with ours.

Every conversion of a SimpleViT is checked against it where vit-pytorch is not installed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm


def vit_reference(state: Mapping[str, Tensor], config: Mapping[str, Any], images: Tensor) -> Tensor:
    """Features (b, dim) of images (b, c, h, w), in their dtype."""
    p, q = config["patch_size"]
    b, c, height, width = images.shape
    h, w = height // p, width // q
    x = images.unfold(2, p, p).unfold(3, q, q)  # b c h w p q
    x = torch.einsum("bchwpq->bhwpqc", x).reshape(b, h * w, p * q * c)

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ state[f"{name}.weight"].T
        return y + state[f"{name}.bias"] if f"{name}.bias" in state else y

    def unit(x: Tensor, gamma: Tensor) -> Tensor:
        length = x.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)
        return x / length * x.shape[-1] ** 0.5 * gamma

    x = norm(
        linear(norm(x, "to_patch_embedding.1"), "to_patch_embedding.2"), "to_patch_embedding.3"
    )
    x = x + positions(h, w, x.shape[-1], x)
    for i in range(config["depth"]):
        attention, mlp = f"transformer.layers.{i}.0", f"transformer.layers.{i}.1.net"
        qkv = linear(norm(x, f"{attention}.norm"), f"{attention}.to_qkv")
        qs, ks, vs = (part.split(config["dim_head"], dim=-1) for part in qkv.chunk(3, dim=-1))
        heads = []
        for g in range(config["heads"]):
            query = unit(qs[g], state[f"{attention}.q_norm.gamma"][g])
            key = unit(ks[g], state[f"{attention}.k_norm.gamma"][g])
            heads.append(torch.softmax(query @ key.transpose(1, 2), dim=-1) @ vs[g])
        x = x + linear(torch.cat(heads, dim=-1), f"{attention}.to_out")
        x = x + linear(gelu(linear(norm(x, f"{mlp}.0"), f"{mlp}.1")), f"{mlp}.3")
    return norm(norm(x, "transformer.norm").mean(dim=1), "linear_head")


def positions(h: int, w: int, dim: int, like: Tensor) -> Tensor:
    """Sine and cosine of column and row, as vit-pytorch's `posemb_sincos_2d`."""
    omega = 10000 ** -(torch.arange(dim // 4) / (dim // 4 - 1))
    rows = torch.arange(h).repeat_interleave(w)[:, None] * omega
    columns = torch.arange(w).repeat(h)[:, None] * omega
    return torch.cat((columns.sin(), columns.cos(), rows.sin(), rows.cos()), dim=1).to(like)
