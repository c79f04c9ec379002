"""What the settings of a training run may be."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from regard.data.augment import Augment
from regard.data.preprocess import Preprocess
from regard.errors import InputError, nearest

# field: (smallest, largest, smallest allowed); None of the request is not looked at
RANGES: dict[str, tuple[float, float, bool]] = {
    "epochs": (0, 1e9, False),
    "steps": (1, 1e12, True),
    "minutes": (0, 1e7, False),
    "batch_size": (1, 1e9, True),
    "microbatch": (1, 1e9, True),
    "lr": (0, 1e9, False),
    "seed": (0, 2**63 - 1, True),
    "workers": (0, 512, True),
    "weight_decay": (0, 1e9, True),
    "warmup": (0, 1, True),
    "clip": (0, float("inf"), True),
    "ema": (0, 0.999999, True),
    "label_smoothing": (0, 0.999, True),
    "eval_every": (0, 1e9, False),
    "save_every": (0, 1e9, False),
    "memory": (0, 1e9, True),
    "keep": (1, 1e9, True),
}


def check_values(config: Any) -> None:
    """Refuse a number of a request or recipe outside its range, or another choice, by name."""
    for name, (low, high, closed) in RANGES.items():
        value = getattr(config, name)
        if value is None:
            continue
        if not (low <= value <= high) or (value == low and not closed) or value == float("inf"):
            needed = f"at least {low:g}" if closed else f"above {low:g}"
            upper = "" if high == float("inf") else f" and at most {high:g}"
            raise InputError(f"{name} is {value}; give a number {needed}{upper}")
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value is not None and value not in choices:
            raise InputError(f"{name} is {value!r}; give one of {', '.join(choices)}")


CHOICES = {
    "optimizer": ("adamw", "muon", "muon-sgd"),
    "schedule": ("cosine", "linear"),
    "class_weights": ("none", "auto"),
    "test_flips": ("off", "on"),
    "fit": ("stretch", "crop", "letterbox"),
    "device": ("auto", "cpu", "cuda", "mps"),
    "strategy": ("auto", "ddp", "fsdp"),
    "precision": ("auto", "fp32", "bf16"),
}


# What a training run is asked for, and what was decided.
#
# `TrainConfig` is the request: what is None is left to the preset. `Recipe` is the same with every
# choice made; it stands in config.json, together with what evaluation needs, as a `RunConfig`.


ModelOption = int | float | str | bool | list[int] | list[float] | None


@dataclass(frozen=True)
class TrainConfig:
    """Train a classifier. What is not given is chosen by a preset, which is said aloud."""

    data: str = ""
    """Training images: class folders, a zip of them, a manifest, hf:NAME, stream:NAME, digits;
    with --resume the run's own if not given."""
    model: str | None = None
    """simple-vit-SIZE/PATCH (nano, ti, s, b, l), pixel-resnet-SIZE (nano, s, m) or timm:NAME."""
    out: Path | None = None
    """The run folder to write; the default is runs/NAME with the next free number."""
    resume: bool = False
    """Go on with the run in --out from its last checkpoint, to the same bits."""
    preset: str | None = None
    """A recipe for all that is not given: digits, small-images, small or imagenet."""
    epochs: float | None = None
    """Passes over the training images."""
    steps: int | None = None
    """Optimizer steps, instead of epochs."""
    minutes: float | None = None
    """Plan as many steps as fit into this time, instead of epochs."""
    batch_size: int | None = None
    """Images in one optimizer step, over all processes."""
    microbatch: int | None = None
    """Images in one forward pass; divides the batch size, which is the default."""
    lr: float | None = None
    """Peak learning rate."""
    seed: int | None = None
    """Seed of the split, the weights, the order and the augmentation."""
    workers: int | None = None
    """Processes that read images; 0 reads them in the training process."""
    optimizer: Literal["adamw", "muon", "muon-sgd"] | None = None
    """AdamW; Muon on the blocks' matrices with AdamW on the rest; or airbench94's, for PixelResNet:
    Muon on kernels held to their norm, SGD with momentum on biases and classifier."""
    weight_decay: float | None = None
    """Decoupled weight decay of matrices and kernels; gains and biases have none.
    Under muon-sgd that of biases and classifier; its kernels keep their norm."""
    warmup: float | None = None
    """Share of the steps in which the learning rate rises."""
    schedule: Literal["cosine", "linear"] | None = None
    """How it falls to 0 after that."""
    clip: float | None = None
    """Largest norm of the gradient; 0 does not clip."""
    ema: float | None = None
    """Decay of a running average of the weights, which is then evaluated and kept; 0 is off."""
    label_smoothing: float | None = None
    """Share of each target that is spread evenly over all classes."""
    class_weights: Literal["none", "auto"] | None = None
    """auto weighs each class by the inverse of its frequency."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels that images are brought to."""
    start_size: tuple[int, int] | None = None
    """Height and width that training begins with, growing to the image size: faster early on."""
    fit: Literal["stretch", "crop", "letterbox"] | None = None
    """How an image of another shape is brought to that size."""
    flip: Literal["none", "random", "alternate"] | None = None
    """Mirror training images left to right: at random, or in every other epoch."""
    shift: int | None = None
    """Move training images by up to so many pixels each way."""
    crop_scale: tuple[float, float] | None = None
    """Train on crops of this least and greatest share of the area."""
    randaugment: tuple[int, int] | None = None
    """RandAugment: operations an image, and their magnitude, 0 to 30."""
    erase: float | None = None
    """Probability of blanking a box of a training image."""
    mixup: float | None = None
    """Alpha of Mixup; 0 is off."""
    cutmix: float | None = None
    """Alpha of CutMix; 0 is off."""
    channels: Literal[1, 3] | None = None
    """1 for grayscale, 3 for colour; what the data has if not given."""
    quarantine: Path | None = None
    """A list that regard inspect wrote, of images to leave out."""
    memory: float | None = None
    """Gigabytes of decoded images to keep in memory; what does not fit is read each time."""
    model_options: dict[str, ModelOption] = field(default_factory=dict)
    """Options of the model, such as qk_norm rms stem conv drop_path 0.1; docs/models.md has all."""
    test_flips: Literal["off", "on"] | None = None
    """Evaluate and predict by the mean over each image and its mirror image."""
    compile: bool = False
    """Compile the model for training by torch.compile."""
    init: Path | None = None
    """A run whose weights to start from; other classes get a new classifier."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Where to compute."""
    strategy: Literal["auto", "ddp", "fsdp"] | None = None
    """How the processes that torchrun starts share the work; fsdp also shards the model."""
    precision: Literal["auto", "fp32", "bf16"] | None = None
    """Number format of the forward pass; auto times both once and keeps the faster."""
    eval_every: float | None = None
    """Epochs between evaluations on the held-out images; each also writes a checkpoint."""
    save_every: float | None = None
    """Minutes between checkpoints besides those."""
    keep: int | None = None
    """How many of the last checkpoints to keep; the best is kept besides."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too."""

    def __post_init__(self) -> None:
        lengths = [name for name in ("epochs", "steps", "minutes") if getattr(self, name)]
        if len(lengths) > 1:
            raise InputError(f"{' and '.join(lengths)} are given together; give one of them")
        check_values(self)


@dataclass(frozen=True)
class Recipe:
    """`TrainConfig` with every choice made; field by field the same meaning."""

    data: str
    model: str
    preset: str
    steps: int
    batch_size: int
    microbatch: int
    lr: float
    optimizer: str
    weight_decay: float
    warmup: float
    clip: float
    ema: float
    label_smoothing: float
    class_weights: str
    image_size: tuple[int, int]
    fit: str
    augment: Augment
    model_options: dict[str, ModelOption]
    test_flips: str
    seed: int
    workers: int
    device: str
    strategy: str
    precision: str
    eval_every: float
    save_every: float
    keep: int
    memory: float
    start_size: tuple[int, int] | None = None
    channels: int | None = None
    quarantine: str | None = None
    epochs: float | None = None
    minutes: float | None = None
    init: str | None = None
    compile: bool = False
    tensorboard: bool = False
    schedule: str = "cosine"

    def __post_init__(self) -> None:
        check_values(self)
        if self.start_size and (
            min(self.start_size) < 1
            or self.start_size[0] > self.image_size[0]
            or self.start_size[1] > self.image_size[1]
        ):
            raise InputError(
                f"start_size is {self.start_size}, and training ends at {self.image_size}; give "
                "a size up to that"
            )
        if self.batch_size % self.microbatch:
            raise InputError(
                f"a microbatch of {self.microbatch} does not divide the batch size "
                f"{self.batch_size}; give a divisor"
            )
        if self.strategy == "fsdp" and self.optimizer != "adamw":
            raise InputError(
                "muon orthogonalises whole matrices, which fsdp spreads over processes; give "
                "--optimizer adamw, or --strategy ddp"
            )


@dataclass(frozen=True)
class Segment:
    """A stretch of a run from one start or resume to the next."""

    from_step: int
    changed: dict[str, Any]
    processes: int
    threads: int
    device: str


@dataclass(frozen=True)
class RunConfig:
    """config.json: the recipe, and what it takes to use the model."""

    recipe: Recipe
    model: dict[str, Any]
    """{"name": …, "num_classes": …, **options}, the arguments of `regard.create`."""
    classes: tuple[str, ...]
    preprocess: Preprocess
    segments: tuple[Segment, ...]
    notes: tuple[str, ...] = ()
    """What was decided for the user, in words."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` takes it back."""
        values = dataclasses.asdict(self)
        values["preprocess"] = self.preprocess.to_dict()
        values["recipe"]["augment"] = self.recipe.augment.to_dict()
        return {"format": 1, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config.json") -> "RunConfig":
        """Rebuild from `to_dict`'s result; unknown and missing keys are refused by name."""
        values = dict(values)
        if "layout" in values and "models" in values:
            raise InputError(
                f"{where} describes weights by themselves, not a run; open their folder by "
                "regard.weights.from_pretrained"
            )
        if values.pop("format", None) != 1:
            raise InputError(f"{where} has a format this version does not read; update regard")
        keys_of(cls, values, where)
        recipe = dict(keys_of(Recipe, values["recipe"], f"{where}, recipe"))
        recipe["image_size"] = tuple(recipe["image_size"])
        if recipe["start_size"] is not None:
            recipe["start_size"] = tuple(recipe["start_size"])
        recipe["augment"] = Augment.from_dict(recipe["augment"])
        segments = (keys_of(Segment, s, f"{where}, segments") for s in values["segments"])
        return cls(
            recipe=Recipe(**recipe),
            model=dict(values["model"]),
            classes=tuple(values["classes"]),
            preprocess=Preprocess.from_dict(values["preprocess"]),
            segments=tuple(Segment(**segment) for segment in segments),
            notes=tuple(values["notes"]),
        )


def keys_of(cls: Any, values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """`values`, whose keys are exactly the fields of the dataclass `cls`, or a refusal."""
    known = [f.name for f in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            raise InputError(f"{where}: there is no setting {name!r}; {nearest(name, known)}")
    for name in known:
        if name not in values:
            raise InputError(f"{where}: the setting {name!r} is missing; restore the file")
    return values
