"""Small stand-ins with the structure and formulas of libraries that no package index carries."""

import math

import torch
from torch import nn

# What a small UNet2DModel of diffusers is built of, one attention on each way; its widths are the
# test's own.
UNET = {
    "sample_size": 8,
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


class AttnBlock(nn.Module):
    """latent-diffusion's: norm, q, k, v, proj_out as 1×1 convolutions, one head."""

    def __init__(self, in_channels):
        super().__init__()
        self.in_channels = in_channels
        self.norm = nn.GroupNorm(32, in_channels, eps=1e-6, affine=True)
        for name in ("q", "k", "v", "proj_out"):
            setattr(self, name, nn.Conv2d(in_channels, in_channels, kernel_size=1))

    def forward(self, x):
        b, c, h, w = x.shape
        z = self.norm(x)
        q, k, v = (layer(z).reshape(b, c, h * w) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(torch.bmm(q.transpose(1, 2), k) * c**-0.5, dim=2)
        return x + self.proj_out(torch.bmm(v, weights.transpose(1, 2)).reshape(b, c, h, w))


class GroupNorm32(nn.GroupNorm):
    """guided-diffusion's: computed in float32."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class QKVAttention(nn.Module):
    """guided-diffusion's new order: all q, all k, all v."""

    def __init__(self, n_heads):
        super().__init__()
        self.n_heads = n_heads

    def split(self, qkv):
        b, width, n = qkv.shape
        d = width // (3 * self.n_heads)
        return [part.reshape(b * self.n_heads, d, n) for part in qkv.chunk(3, dim=1)]

    def forward(self, qkv):
        q, k, v = self.split(qkv)
        scale = 1 / math.sqrt(math.sqrt(q.shape[1]))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        return torch.einsum("bts,bcs->bct", weight, v).reshape(qkv.shape[0], -1, qkv.shape[2])


class QKVAttentionLegacy(QKVAttention):
    """guided-diffusion's old order: q, k, v of the first head, then of the second, …"""

    def split(self, qkv):
        b, width, n = qkv.shape
        d = width // (3 * self.n_heads)
        return qkv.reshape(b * self.n_heads, 3 * d, n).split(d, dim=1)


class AttentionBlock(nn.Module):
    """guided-diffusion's: norm, qkv, proj_out as 1-D convolutions."""

    def __init__(self, channels, num_heads, use_new_attention_order, norm=nn.GroupNorm):
        super().__init__()
        self.channels = channels
        self.num_heads = num_heads
        self.use_checkpoint = False
        self.norm = norm(32, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        order = QKVAttention if use_new_attention_order else QKVAttentionLegacy
        self.attention = order(num_heads)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        flat = x.reshape(x.shape[0], x.shape[1], -1)
        h = self.attention(self.qkv(self.norm(flat)))
        return (flat + self.proj_out(h)).reshape(x.shape)


class EDMBlock(nn.Module):
    """The attention of NVlabs' UNetBlock, with skip_scale 1; rows of qkv by head, width, q k v."""

    def __init__(self, channels, num_heads, eps):
        super().__init__()
        self.num_heads = num_heads
        self.conv0 = nn.Conv2d(channels, channels, 1)
        groups = min(32, channels // 4)
        self.norm2 = nn.GroupNorm(groups, channels, eps=eps)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c = x.shape[:2]
        qkv = self.qkv(self.norm2(x)).reshape(b * self.num_heads, c // self.num_heads, 3, -1)
        q, k, v = qkv.unbind(2)
        weights = torch.einsum("ncq,nck->nqk", q, k / math.sqrt(k.shape[1])).softmax(dim=2)
        a = torch.einsum("nqk,nck->ncq", weights, v)
        return self.proj(a.reshape(x.shape)) + x


def randomised(module, seed=0, std=0.3):
    """The module in float64 with every parameter moved by noise."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator).double())
    return module
