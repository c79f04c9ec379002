"""Any model of timm by its name, with the face that our own models have."""

from typing import Any

from torch import Tensor, nn

from regard.errors import InputError, MissingExtraError, nearest
from regard.layers.checks import check_images, count, flag, pair
from regard.models.classifier import answered


class TimmModel(nn.Module):
    """timm's model `name`, as `timm.create_model` builds it.

    Args:
        name: as timm spells it, with or without the tag of its weights: "resnet18",
            "vit_tiny_patch16_224", "resnet18.a1_in1k".
        num_classes: an integer gives logits (b, num_classes); None gives the features.
        channels: image channels.
        image_size: an integer or (height, width), given to models that are built for one size
            (timm's `img_size`); the others take any that their strides allow.
        pretrained: start from the weights that timm names, downloaded on first use. Not part of
            `config`, which rebuilds the module and not its weights.
        test_flips: outside training, average the logits over each image and its mirror image, in
            one batch of twice the size.
        **options: further arguments of timm's model, such as drop_path_rate=0.1.

    Raises:
        MissingExtraError: timm is not installed.
        InputError: there is no such model, timm refuses the arguments, or the weights cannot be
            had.
    """

    def __init__(
        self,
        name: str,
        *,
        num_classes: int | None,
        channels: int = 3,
        image_size: int | tuple[int, int] = 224,
        pretrained: bool = False,
        test_flips: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.test_flips = test_flips
        self.image_size = pair(image_size, "image_size")
        self.channels = count(channels, "channels")
        self.num_classes = None if num_classes is None else count(num_classes, "num_classes")
        #: The arguments that rebuild this model, JSON-ready: TimmModel(**model.config).
        self.config: dict[str, Any] = {
            "name": name,
            "num_classes": num_classes,
            "channels": channels,
            "image_size": list(self.image_size),
            "test_flips": flag(test_flips, "test_flips"),
            **options,
        }
        arguments = {
            "num_classes": self.num_classes or 0,
            "in_chans": self.channels,
            "pretrained": flag(pretrained, "pretrained"),
            **options,
        }
        self.model: Any = build(name, self.image_size, arguments)

    def features(self, images: Tensor) -> Tensor:
        """What stands before the classifier (b, dim): timm's pooled `pre_logits`."""
        check_images(images, self.channels)
        return self.model.forward_head(self.model.forward_features(images), pre_logits=True)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (b, num_classes), or features (b, dim) where num_classes is None."""
        check_images(images, self.channels)
        return answered(self, self.model, images)


def build(name: str, image_size: tuple[int, int], arguments: dict[str, Any]) -> nn.Module:
    """timm's model, with `img_size` where it takes one, or a refusal."""
    try:
        import timm
    except ImportError:
        raise MissingExtraError("timm", "timm", f"the model timm:{name}") from None
    if not timm.is_model(name):
        raise InputError(f"timm has no model {name!r}; {nearest(name, timm.list_models())}")
    try:
        try:
            return timm.create_model(name, img_size=image_size, **arguments)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return timm.create_model(name, **arguments)
    except OSError as error:  # a failed download, whatever library made it
        raise InputError(
            f"the pretrained weights of timm:{name} cannot be had here "
            f"({str(error).splitlines()[0]}); start without them, or copy timm's cache to this "
            "machine"
        ) from None
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise InputError(
            f"timm does not build {name} at image size {image_size} with {given}: {error}"
        ) from None
