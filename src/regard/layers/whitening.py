"""A first layer that whitens the patches of images."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.layers.checks import check_finite

WHITENING_EPS = 5e-4
MOST_COMPONENTS = 24
CHUNK = 256  # images at a time


class WhiteningStem(nn.Module):
    """GELU(± principal components of each patch + bias), each of about unit variance.

    Patches p of sides 2·stride, a stride apart, c·4·stride² numbers each, have the second moment
    E[p pᵀ] = U diag(λ) Uᵀ. The kernel holds ± u_i / √(λ_i + 5e-4) for the largest (at most 24) λ_i.
    It is a buffer, never trained; until `fit` has seen images it is ± a random orthonormal basis.

    Source: hlb-CIFAR10 and airbench94 (Jordan 2024, arXiv 2404.00498).
    """

    kernel: Tensor

    def __init__(
        self,
        channels: int,
        stride: tuple[int, int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.stride = stride
        h, w = 2 * stride[0], 2 * stride[1]
        self.components = min(MOST_COMPONENTS, channels * h * w)
        kernel = torch.empty(2 * self.components, channels, h, w, device=device, dtype=dtype)
        self.register_buffer("kernel", kernel)
        self.bias = nn.Parameter(torch.empty(2 * self.components, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the basis anew; the bias becomes zero."""
        half = self.kernel[: self.components]
        # Half precision has no QR decomposition.
        wide = torch.promote_types(half.dtype, torch.float32)
        half.copy_(nn.init.orthogonal_(torch.empty_like(half, dtype=wide)))
        self.kernel[self.components :] = -half
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """Whiten the patches of these images (b, c, h, w). In float64 on the CPU: the same bits
        for every process that gives the same images."""
        check_finite(images)
        h, w = self.kernel.shape[-2:]
        missing = (0, max(0, w - images.shape[3]), 0, max(0, h - images.shape[2]))
        images = F.pad(images, missing, mode="replicate")
        moment = torch.zeros(self.kernel[0].numel(), self.kernel[0].numel(), dtype=torch.float64)
        for chunk in images.cpu().double().split(CHUNK):
            patches = F.unfold(chunk, (h, w), stride=self.stride).transpose(1, 2).flatten(0, 1)
            moment += patches.T @ patches / len(patches) * len(chunk) / len(images)
        values, vectors = torch.linalg.eigh(moment)
        largest = vectors.T.flip(0)[: self.components]
        scale = (values.flip(0)[: self.components].clamp(min=0) + WHITENING_EPS).rsqrt()
        sign = largest.gather(1, largest.abs().argmax(1, keepdim=True)).sign()
        half = (largest * sign * scale[:, None]).view(self.components, *self.kernel.shape[1:])
        self.kernel.copy_(torch.cat([half, -half]))

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(self.kernel.dtype)
        return F.gelu(F.conv2d(images, self.kernel, self.bias, stride=self.stride))
