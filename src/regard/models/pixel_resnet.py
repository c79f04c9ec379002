"""PixelResNet: a small convolutional net with pixel attention in its later stages."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.layers.checks import check_images, count, flag, pair
from regard.layers.conv import ConvStage, MatrixConv, WhiteningStem
from regard.layers.pixel_attention import PixelAttention
from regard.models.classifier import answered, check_batch, take_statistics

LARGEST_UNSTRIDED = 64


class Stage(ConvStage):
    """ConvStage, and pixel attention at its end where asked, in heads of 64."""

    def __init__(
        self,
        channels: int,
        width: int,
        depth: int,
        pool: tuple[int, int],
        attention: bool,
        *,
        residual: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            channels, width, depth, pool, residual=residual, device=device, dtype=dtype
        )
        self.attention: PixelAttention | None = None
        if attention:
            heads = width // 64 if width % 64 == 0 else 1
            groups = math.gcd(width, 32)
            self.attention = PixelAttention(width, heads, groups, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the weights anew; attention starts as the identity."""
        super().reset_parameters()
        if self.attention is not None:
            self.attention.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.attention is None else self.attention(x)


class PixelResNet(nn.Module):
    """A whitening stem, stages of convolutions, pixel attention in all but the first of them.

    x = WhiteningStem(images);  Stage for each width;  features = largest of each channel over the
    map;  logits = W features + bias.

    Args:
        image_size: the size to train and export at, an integer or (height, width), in pixels. It
            decides the stem's stride and which stages halve their map (those whose map has two
            rows and columns to halve); larger sizes work at call time.
        num_classes: an integer adds a classifier, and the model returns logits (b, num_classes);
            None returns the features (b, widths[-1]).
        channels: image channels.
        widths: channels of each stage.
        depth: convolutions in each stage.
        attention: pixel attention at the end of each stage but the first, with heads of 64.
        residual: add each stage's later convolutions to what they were given; without, as in
            airbench94, convolutions start as the identity and norms have no gain to train.
        stem_stride: pixels between patches of the stem; if None the smallest power of two that
            leaves at most 64 a side: 1 up to 64 pixels, 2 up to 128, 4 up to 256.
        test_flips: outside training, average the logits over each image and its mirror image, in
            one batch of twice the size.

    Initialisation: convolutions as `MatrixConv`, attention the identity, norms gain 1 and bias 0,
    the classifier normal of deviation 1 / widths[-1] with zero bias. Call `initialise_from(images)`
    before training and `calibrate(images)` before evaluation.

    The norm is a batch norm, whose batch is what one call sees: with microbatches of a fixed size
    training is the same for any number of processes, which the running averages that it keeps on
    the way are not. `calibrate` replaces those by the statistics of given images under the weights
    at hand, averaged weights included. Group norm needs none of this, and learnt slower: 73.5
    against 76.3% on CIFAR-10 after 36,000 images (nano, no attention, one seed).

    Source: airbench94 (Jordan 2024, arXiv 2404.00498), whose net "s" is but for pixel attention and
    the classifier's bias.
    """

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        num_classes: int | None,
        channels: int = 3,
        widths: Sequence[int] = (64, 256, 256),
        depth: int = 2,
        attention: bool = True,
        residual: bool = False,
        stem_stride: int | None = None,
        test_flips: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.image_size = pair(image_size, "image_size")
        self.channels = count(channels, "channels")
        self.num_classes = None if num_classes is None else count(num_classes, "num_classes")
        if not isinstance(widths, (list, tuple)) or not widths:
            raise InputError(f"widths={widths!r}: give the channels of each stage, as (32, 64)")
        if stem_stride is None:
            stem_stride = stride_for(max(self.image_size))
        #: The arguments that rebuild this model, JSON-ready: PixelResNet(**model.config).
        self.config: dict[str, Any] = {
            "image_size": list(self.image_size),
            "num_classes": num_classes,
            "channels": channels,
            "widths": [count(width, "widths") for width in widths],
            "depth": count(depth, "depth"),
            "attention": flag(attention, "attention"),
            "residual": flag(residual, "residual"),
            "stem_stride": count(stem_stride, "stem_stride"),
            "test_flips": flag(test_flips, "test_flips"),
        }
        self.test_flips = test_flips
        #: Training gives it images: `initialise_from` before, `calibrate` before evaluations.
        self.takes_statistics = True
        self.stem = WhiteningStem(channels, (stem_stride,) * 2, device=device, dtype=dtype)
        side = min(self.image_size) // stem_stride - 1
        halvings, inputs = 0, 2 * self.stem.components
        self.stages = nn.ModuleList()
        for i, width in enumerate(widths):
            pool = side >> halvings >= 2
            halvings += pool
            attends = attention and i > 0
            self.stages.append(
                Stage(
                    inputs,
                    width,
                    depth,
                    (1 + pool,) * 2,
                    attends,
                    residual=residual,
                    device=device,
                    dtype=dtype,
                )
            )
            inputs = width
        #: The shortest side that an image may have, in pixels: every stage keeps a pixel.
        self.smallest = stem_stride * (2**halvings + 1)
        check_sides(self.image_size[0], self.image_size[1], self.smallest)
        self.classifier: nn.Linear | None = None
        if num_classes is not None:
            self.classifier = nn.Linear(inputs, num_classes, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, as the class says."""
        for module in (self.stem, *self.stages):
            module.reset_parameters()
        if self.classifier is not None:
            nn.init.normal_(self.classifier.weight, std=1 / self.classifier.in_features)
            nn.init.zeros_(self.classifier.bias)

    def kernels(self) -> list[Tensor]:
        """The weights of the convolutions: a norm follows each, so their length does nothing."""
        return [m.weight for m in self.modules() if isinstance(m, MatrixConv)]

    def biases(self) -> list[Tensor]:
        """The biases of the stem and of the norms of the convolutions."""
        return [m.bias for m in self.modules() if isinstance(m, (WhiteningStem, nn.BatchNorm2d))]

    def initialise_from(self, images: Tensor) -> None:
        """Whiten the stem for training images (b, c, h, w), normalised as the model will see them.

        Deterministic: the same images give the same bits. For a model that starts from scratch;
        one that starts from trained weights has its stem already.
        """
        check_images(images, self.channels)
        check_sides(images.shape[2], images.shape[3], self.smallest)
        self.stem.fit(images)

    def calibrate(self, images: Tensor) -> None:
        """Take the norms' statistics for evaluation from these images (b, c, h, w)."""
        take_statistics(self, images, self.features)

    def features(self, images: Tensor) -> Tensor:
        """What stands before the classifier (b, widths[-1])."""
        check_images(images, self.channels)
        check_sides(images.shape[2], images.shape[3], self.smallest)
        check_batch(self, images)
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        for stage in self.stages:
            x = stage(x)
        # not amax, whose gradient looks for a rounded number among numbers a compiler may not round
        return x.flatten(2).max(dim=2).values

    def forward(self, images: Tensor) -> Tensor:
        """Logits (b, num_classes), or features (b, widths[-1]) where num_classes is None."""
        return answered(self, self._answer, images)

    def _answer(self, images: Tensor) -> Tensor:
        """`forward` of these images alone."""
        features = self.features(images)
        return features if self.classifier is None else self.classifier(features)


def stride_for(side: int) -> int:
    """The smallest power of two that leaves at most 64 of `side` pixels."""
    return 2 ** max(0, math.ceil(math.log2(side / LARGEST_UNSTRIDED)))


def check_sides(h: int, w: int, smallest: int) -> None:
    """Refuse an image that the stages would halve to nothing."""
    if min(h, w) < smallest:
        raise InputError(
            f"an image of height {h} and width {w} is too small for this model, which was built "
            f"for sides of {smallest} pixels or more; resize it, or build the model with this "
            "image_size"
        )
