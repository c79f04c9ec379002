"""A convolution whose kernel is a matrix, so that an optimizer of matrices can train it."""

import torch
from torch import Tensor, nn


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

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.weight.view(self.out_channels, 3, 3, self.in_channels)
        return nn.functional.conv2d(x, kernel.permute(0, 3, 1, 2), padding=1)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"
