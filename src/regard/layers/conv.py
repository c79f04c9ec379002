"""Convolutions whose kernels are matrices, so that an optimizer of matrices can train them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
