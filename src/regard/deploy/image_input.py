"""Preprocessing as part of an exported file: uint8 pictures of any size in, probabilities out."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.images import Preprocess
from regard.images.preprocess import round_ratio


class ImageInput(nn.Module):
    """softmax(model(R_h x R_wᵀ)) of pictures x (b, H, W, c), normalised.

    R_h (h, H) and R_w (w, W) hold the weights of antialiased bilinear interpolation, so a crop is
    a range of zero columns, a letterbox's padding a range of zero rows (0 is the mean after
    normalising), and no step depends on a shape: every size exports, 1 × 1 too. The numbers are
    those of `Preprocess`.
    """

    def __init__(self, model: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.model = model
        self.preprocess = preprocess
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", 255 * torch.tensor(preprocess.mean).view(-1, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(preprocess.std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (b, H, W, c) to probabilities (b, k), float32."""
        x = images.permute(0, 3, 1, 2).to(torch.float32)  # b h w c -> b c h w
        height, width = x.shape[-2:]
        rows, columns = self.resizing(height, width, x.device)
        x = rows @ ((x - self.mean) / self.std) @ columns.T
        return self.model(x).to(torch.float32).softmax(dim=-1)

    def resizing(self, height: Any, width: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """R_h and R_w for pictures of this size, which may be symbolic."""
        h, w = self.preprocess.size
        if self.preprocess.fit == "crop":
            box_h = torch.sym_min(height, torch.sym_max(1, round_ratio(width * h, w)))
            box_w = torch.sym_min(width, torch.sym_max(1, round_ratio(height * w, h)))
            top, left = (height - box_h) // 2, (width - box_w) // 2
            return (
                interpolation(height, (top, box_h), h, (0, h), device),
                interpolation(width, (left, box_w), w, (0, w), device),
            )
        in_h, in_w = h, w
        if self.preprocess.fit == "letterbox":
            in_h = torch.sym_min(h, torch.sym_max(1, round_ratio(height * w, width)))
            in_w = torch.sym_min(w, torch.sym_max(1, round_ratio(width * h, height)))
        top, left = (h - in_h) // 2, (w - in_w) // 2
        return (
            interpolation(height, (0, height), h, (top, in_h), device),
            interpolation(width, (0, width), w, (left, in_w), device),
        )


def interpolation(
    length: Any, source: tuple[Any, Any], out: int, target: tuple[Any, Any], device: torch.device
) -> Tensor:
    """Weights (out, length) that resize the source range into the target range, float32.

    A range is (first, count). With s = source count / target count, output i of the target looks
    at the centre z = first + (i + ½) s with weights max(0, 1 - |j + ½ - z| / max(s, 1)) on the
    pixels j of the source, divided by their sum; other outputs have no weights.
    """
    first, count = source
    begin, filled = target
    scale = count / filled
    place = torch.arange(out, dtype=torch.float64, device=device) + 0.5 - begin
    pixel = torch.arange(length, dtype=torch.float64, device=device) + 0.5
    distance = (pixel[None, :] - (first + place * scale)[:, None]).abs()
    weights = (1 - distance / torch.sym_max(scale, 1.0)).clamp(min=0)
    weights = weights * ((pixel > first) & (pixel < first + count))[None, :]
    weights = weights * ((place > 0) & (place < filled))[:, None]
    # where no output is, the sum is 0 and the weights stay 0
    return (weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12)).to(torch.float32)
