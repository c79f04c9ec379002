"""SimpleViT with QK norm, at any image size."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard._device import native_products, working_dtype
from regard.errors import InputError
from regard.layers.checks import check_images, count, flag, pair, share
from regard.layers.conv import ConvStem
from regard.layers.patch_embed import (
    check_divisible,
    check_position_dim,
    keep_some,
    patchify,
    sincos_2d_once,
)
from regard.layers.qk_norm import Form, check_form
from regard.layers.transformer import Block, LayerNorm, Linear
from regard.models.classifier import answered, check_batch, take_statistics

Size = int | tuple[int, int]
Stem = Literal["patch", "conv"]


class PatchEmbedding(nn.Module):
    """Tokens (b, n, dim) from images (b, c, h, w): LayerNorm(W LayerNorm(patch) + bias)."""

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
        self.patch = patch
        width = channels * patch[0] * patch[1]
        self.norm_in = LayerNorm(width, device=device, dtype=dtype)
        self.project = Linear(width, dim, device=device, dtype=dtype)
        self.norm_out = LayerNorm(dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the projection anew, LeCun-normal, with zero biases."""
        nn.init.normal_(self.project.weight, std=1 / math.sqrt(self.project.in_features))
        nn.init.zeros_(self.project.bias)

    def forward(self, images: Tensor) -> Tensor:
        patches = patchify(images.to(working_dtype(images)), self.patch)
        return self.norm_out(self.project(self.norm_in(patches)))


class SimpleViT(nn.Module):
    """A plain vision transformer: sine-cosine positions, mean pooling, QK norm.

    tokens = PatchEmbedding(images) + sincos_2d;  depth × Block;  LayerNorm;
    features = LayerNorm(mean over tokens);  logits = W features + bias.

    Args:
        image_size: the size to train and export at, an integer or (height, width), in pixels.
            Any size that the patch divides works at call time.
        patch_size: an integer or (height, width), in pixels.
        num_classes: an integer adds a classifier, and the model returns logits (b, num_classes);
            None returns the features (b, dim), as the source does.
        dim: width of a token; a multiple of 4, at least 8.
        depth: number of blocks.
        heads: number of attention heads.
        mlp_dim: hidden width of each block's MLP.
        channels: image channels.
        dim_head: width of a head; heads · dim_head need not equal dim.
        qk_norm: "unit" (the source's), "rms", "layer" or None; see `layers.qk_norm.QKNorm`.
        stem: "patch" embeds each patch by itself (the source's); "conv" puts `ConvStem` there.
            Call `initialise_from(images)` before its training, `calibrate(images)` before
            evaluation, as for `PixelResNet`.
        drop_path: rate at which the last block drops each of its branches, in training; block i
            of 1 … depth drops at i / depth of it.
        patch_dropout: share of the tokens left out of each image in training, at random.
        activation_checkpointing: keep only each block's input for backward and compute the rest
            again: less memory, a third more arithmetic, the same numbers.
        test_flips: outside training, average the logits over each image and its mirror image, in
            one batch of twice the size.

    Initialisation: linear weights of the blocks are Glorot-uniform (each of q, k, v by itself),
    the patch projection LeCun-normal (a stem as `ConvStem` says), biases zero, the classifier zero
    (so the first loss is log num_classes); norms start at gain 1, and QK gains as `QKNorm` says.

    Source: vit-pytorch's `simple_vit_with_qk_norm` (the same numbers with its weights, see
    `regard.weights.convert`); Beyer, Zhai, Kolesnikov 2022, arXiv 2205.01580. Where we differ:
    `num_classes` is used, positions follow the size of the input, and no n × n matrix is kept.
    """

    def __init__(
        self,
        *,
        image_size: Size,
        patch_size: Size,
        num_classes: int | None,
        dim: int,
        depth: int,
        heads: int,
        mlp_dim: int,
        channels: int = 3,
        dim_head: int = 64,
        qk_norm: Form | None = "unit",
        stem: Stem = "patch",
        drop_path: float = 0.0,
        patch_dropout: float = 0.0,
        activation_checkpointing: bool = False,
        test_flips: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        height, width = pair(image_size, "image_size")
        patch = pair(patch_size, "patch_size")
        check_divisible(height, width, patch)
        counts = {"dim": dim, "depth": depth, "heads": heads, "mlp_dim": mlp_dim}
        counts |= {"channels": channels, "dim_head": dim_head}
        if num_classes is not None:
            counts["num_classes"] = num_classes
        for name, value in counts.items():
            count(value, name)
        check_position_dim(dim)
        check_form(qk_norm)
        if stem not in ("patch", "conv"):
            raise InputError(f"stem={stem!r}: give 'patch' or 'conv'")
        #: The arguments that rebuild this model, JSON-ready: SimpleViT(**model.config).
        self.config: dict[str, Any] = {
            "image_size": [height, width],
            "patch_size": list(patch),
            "num_classes": num_classes,
            "dim": dim,
            "depth": depth,
            "heads": heads,
            "mlp_dim": mlp_dim,
            "channels": channels,
            "dim_head": dim_head,
            "qk_norm": qk_norm,
            "stem": stem,
            "drop_path": share(drop_path, "drop_path"),
            "patch_dropout": share(patch_dropout, "patch_dropout"),
            "activation_checkpointing": flag(activation_checkpointing, "activation_checkpointing"),
            "test_flips": flag(test_flips, "test_flips"),
        }
        self.image_size = (height, width)
        self.patch_size = patch
        self.channels = channels
        self.num_classes = num_classes
        self.patch_dropout = patch_dropout
        self.activation_checkpointing = activation_checkpointing
        self.test_flips = test_flips
        #: Whether training gives it images, by `initialise_from` and `calibrate`.
        self.takes_statistics = stem == "conv"
        embedding: type[PatchEmbedding | ConvStem] = PatchEmbedding if stem == "patch" else ConvStem
        self.embed = embedding(channels, patch, dim, device=device, dtype=dtype)
        rates = [drop_path * (i + 1) / depth for i in range(depth)]
        self.blocks = nn.ModuleList(
            Block(dim, heads, dim_head, mlp_dim, qk_norm, rate, device=device, dtype=dtype)
            for rate in rates
        )
        self.norm = LayerNorm(dim, device=device, dtype=dtype)
        self.features_norm = LayerNorm(dim, device=device, dtype=dtype)
        self.classifier: nn.Linear | None = None
        if num_classes is not None:
            self.classifier = Linear(dim, num_classes, device=device, dtype=dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the linear weights anew, as the class says."""
        for module in self.modules():
            if isinstance(module, Block):
                for weight in module.attention.qkv.weight.chunk(3):
                    nn.init.xavier_uniform_(weight)
                for linear in (module.attention.out, module.mlp.up, module.mlp.down):
                    nn.init.xavier_uniform_(linear.weight)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.embed.reset_parameters()
        if self.classifier is not None:
            nn.init.zeros_(self.classifier.weight)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of patches of `images` (b, c, h, w), or a refusal."""
        check_images(images, self.channels)
        height, width = images.shape[2:]
        check_divisible(height, width, self.patch_size)
        return height // self.patch_size[0], width // self.patch_size[1]

    def initialise_from(self, images: Tensor) -> None:
        """Whiten a "conv" stem for training images (b, c, h, w), normalised as the model will see
        them."""
        self.grid(images)
        if isinstance(self.embed, ConvStem):
            self.embed.whitening.fit(images)

    def calibrate(self, images: Tensor) -> None:
        """Take the statistics of a "conv" stem's norms from these images (b, c, h, w)."""
        self.grid(images)
        if isinstance(self.embed, ConvStem):
            take_statistics(self, images, self.embed)

    def tokens(self, images: Tensor) -> Tensor:
        """Patch tokens (b, n, dim) after the last block and its norm, row-major.

        In training `patch_dropout` leaves some out.
        """
        with native_products(images.device.type):
            return self._tokens(images).to(images.dtype)

    def _tokens(self, images: Tensor) -> Tensor:
        """`tokens` in the dtype to compute in."""
        h, w = self.grid(images)
        if isinstance(self.embed, ConvStem):
            check_batch(self, images)
        x = self.embed(images)
        x = x.to(working_dtype(x))
        x = x + sincos_2d_once(h, w, x.shape[-1], x.device).to(x.dtype)
        if self.training and self.patch_dropout > 0:
            x = keep_some(x, self.patch_dropout)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.norm(x)

    def _features(self, images: Tensor) -> Tensor:
        """`features` in the dtype to compute in."""
        return self.features_norm(self._tokens(images).mean(dim=1))

    def features(self, images: Tensor) -> Tensor:
        """What stands before the classifier (b, dim): LayerNorm of the mean token."""
        with native_products(images.device.type):
            return self._features(images).to(images.dtype)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (b, num_classes), or features (b, dim) where num_classes is None.

        They have the images' dtype, under autocast too.
        """
        with native_products(images.device.type):
            return answered(self, self._answer, images).to(images.dtype)

    def _answer(self, images: Tensor) -> Tensor:
        """`forward` of these images alone, in the dtype to compute in."""
        features = self._features(images)
        return features if self.classifier is None else self.classifier(features)
