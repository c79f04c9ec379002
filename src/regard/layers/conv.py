"""Convolutions whose kernels are matrices, so that an optimizer of matrices can train them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.layers.checks import check_finite


class MatrixConv(nn.Module):
    """3×3 convolution of (b, c, h, w), padded by one, without bias; the sizes stay.

    y[o, i, j] = Σ_{p, q, c} W[o, (p·3 + q)·c_in + c] · x[c, i + p - 1, j + q - 1].

    The weight is (c_out, 9·c_in): a row is one filter. So Muon, which takes matrices, makes the
    filters of a layer orthogonal to each other; the reshape to a kernel is free and channels-last.

    Initialisation: uniform in ± (9·c_in)^-½.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        shape = (out_channels, 9 * in_channels)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, as the class says."""
        bound = (9 * self.in_channels) ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    @torch.no_grad()
    def start_as_identity(self) -> None:
        """Let y[o] = x[o] for the first min(c_in, c_out) filters; the others stay."""
        same = min(self.in_channels, self.out_channels)
        self.weight[:same] = 0
        middle = 4 * self.in_channels
        self.weight[:same, middle : middle + same].fill_diagonal_(1)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.weight.view(self.out_channels, 3, 3, self.in_channels)
        return F.conv2d(x, kernel.permute(0, 3, 1, 2), padding=1)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


class ConvStage(nn.Module):
    """x ← GELU(BN(pool(conv x)));  (depth - 1) × x ← x + GELU(BN(conv x)).

    `pool` takes the largest of each such window, side by side; (1, 1) keeps the map. BN is a batch
    norm, whose batch in training is what one call sees.

    Without `residual` nothing is added to a block's output; instead each convolution starts as the
    identity in its first min(c_in, c_out) filters, and the norms' gains stay 1, untrained
    (airbench94, Jordan 2024, arXiv 2404.00498).
    """

    def __init__(
        self,
        channels: int,
        width: int,
        depth: int,
        pool: tuple[int, int],
        *,
        residual: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inputs = [channels] + [width] * (depth - 1)
        self.convs = nn.ModuleList(MatrixConv(c, width, device=device, dtype=dtype) for c in inputs)
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(width, device=device, dtype=dtype) for _ in inputs
        )
        self.pool = pool
        self.residual = residual
        if not residual:
            for norm in self.norms:
                assert isinstance(norm, nn.BatchNorm2d)
                norm.weight.requires_grad_(False)
        ConvStage.reset_parameters(self)  # a subclass resets what it has not made yet

    def reset_parameters(self) -> None:
        """Draw the convolutions anew; the norms start at gain 1 and bias 0."""
        for module in (*self.convs, *self.norms):
            assert isinstance(module, (MatrixConv, nn.BatchNorm2d))
            module.reset_parameters()
            if isinstance(module, MatrixConv) and not self.residual:
                module.start_as_identity()

    def forward(self, x: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = conv(x)
            if i == 0 and self.pool != (1, 1):
                y = F.max_pool2d(y, self.pool)
            y = F.gelu(norm(y))
            x = x + y if self.residual and i > 0 else y
        return x


# A first layer that whitens the patches of images.


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


# Patch tokens by a few small convolutions in place of one large one.


DEPTH = 2  # convolutions of a stage
POOLED = 2  # the last factors of two of a patch that are pooled; whitening takes the earlier ones


class ConvStem(nn.Module):
    """Tokens (b, n, dim) from images (b, c, h, w), one for each patch, row-major.

    x = WhiteningStem(images, their last rows and columns repeated);  ConvStage for each of the last
    two factors of two in the patch's sides, which it pools, or one that pools nothing where there
    is none, the widths dim / 4 and dim;  a convolution whose kernel and stride are what is left
    of the patch (1×1 for a power of two), with bias;  LayerNorm. The stride of the whitening is the
    patch's earlier factors of two: 1 for a patch of 4, 4 for one of 16. A token sees more than its
    own patch.

    Source: a stem of convolutions is Xiao et al. 2021, arXiv 2106.14881; whitened and pooled ones
    are from airbench94 (Jordan 2024, arXiv 2404.00498).
    """

    def __init__(
        self,
        channels: int,
        patch: tuple[int, int],
        dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        stride, pools, rest = halvings(patch)
        self.whitening = WhiteningStem(channels, stride, device=device, dtype=dtype)
        inputs = 2 * self.whitening.components
        self.stages = nn.ModuleList()
        for i, pool in enumerate(pools):
            width = max(8, dim >> 2 * (len(pools) - 1 - i))
            self.stages.append(ConvStage(inputs, width, DEPTH, pool, device=device, dtype=dtype))
            inputs = width
        self.project = nn.Conv2d(inputs, dim, rest, rest, device=device, dtype=dtype)
        self.norm_out = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: the projection LeCun-normal with zero bias."""
        for module in (self.whitening, *self.stages):
            module.reset_parameters()
        nn.init.normal_(self.project.weight, std=self.project.weight[0].numel() ** -0.5)
        assert self.project.bias is not None
        nn.init.zeros_(self.project.bias)

    def forward(self, images: Tensor) -> Tensor:
        down, right = self.whitening.stride
        x = nn.functional.pad(images, (0, right, 0, down), mode="replicate")
        x = self.whitening(x.contiguous(memory_format=torch.channels_last))
        for stage in self.stages:
            x = stage(x)
        x = self.project(x)
        return self.norm_out(x.flatten(2).transpose(1, 2))  # b c h w -> b (h w) c


Sides = tuple[int, int]


def halvings(patch: Sides) -> tuple[Sides, list[Sides], Sides]:
    """A patch's sides as a product: the whitening's stride, the stages' pools, and the rest."""
    p, q = patch
    factors = []
    while p % 2 == 0 or q % 2 == 0:
        factors.append((2 - p % 2, 2 - q % 2))
        p, q = p // factors[-1][0], q // factors[-1][1]
    h = w = 1
    for down, right in factors[:-POOLED]:
        h, w = h * down, w * right
    return (h, w), factors[-POOLED:] or [(1, 1)], (p, q)
