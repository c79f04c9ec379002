"""regard: exact self-attention over images.

How an image flows: `images` turns files into batches, `layers` and `models` turn a batch into
logits, `runs` turns batches into a run folder, `views` makes a run folder something seen and
`deploy` something shipped; `weights` takes other people's checkpoints and modules in and out,
`study` makes many runs one answer. docs/architecture.md is the map.

The axis letters, used everywhere: b batch, c channels, h w rows and columns (of pixels or
patches), n tokens (m where keys and queries differ), g heads, d width of a head (e of its value).
"""

from typing import TYPE_CHECKING, Any

from regard._version import __version__
from regard.acceleration.swap import accelerate, restore
from regard.errors import InputError, MissingExtraError, RegardError
from regard.interpret.health import attention_health
from regard.interpret.record import record
from regard.interpret.relevance import class_relevance
from regard.layers.attend import attend, attention_kernel, explain
from regard.layers.pixel_attention import PixelAttention, pixel_attention
from regard.models.pixel_resnet import PixelResNet
from regard.models.registry import create
from regard.models.simple_vit import SimpleViT

if TYPE_CHECKING:
    from regard.predict.predictor import load

__all__ = [
    "InputError",
    "MissingExtraError",
    "PixelAttention",
    "PixelResNet",
    "RegardError",
    "SimpleViT",
    "__version__",
    "accelerate",
    "attend",
    "attention_health",
    "attention_kernel",
    "class_relevance",
    "create",
    "explain",
    "load",
    "pixel_attention",
    "record",
    "restore",
]


def __getattr__(name: str) -> Any:
    # `load` reads run folders and pictures; who only wants a layer need not wait for that.
    if name == "load":
        from regard.predict.predictor import load

        return load
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
