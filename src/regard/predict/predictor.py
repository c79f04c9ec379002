"""Whatever holds pictures, as uint8 tensors."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from regard._device import pick_device
from regard._io import read_metadata, read_weights
from regard.data.decode import UnreadableImage, decode, from_pillow, to_channels
from regard.data.folder import read_file
from regard.data.preprocess import Preprocess
from regard.errors import InputError
from regard.export.formats import SUFFIXES, ModuleRunner, Runner, digest, open_file
from regard.models.registry import create
from regard.training.evaluate import check_classes, open_model
from regard.training.run_folder import RunFolder

FORMS = (
    "a path, the bytes of a picture file, a PIL image, a uint8 array (h, w), (h, w, c) or "
    "(n, h, w, c), a uint8 tensor (h, w), (c, h, w) or (n, c, h, w), or an iterable of these"
)


def each_picture(images: Any, channels: int) -> Iterator[Tensor]:
    """Pictures one by one, uint8 (c, h, w) with c = `channels`; one alone counts as one.

    Arrays have their channels last, tensors first, 1 or 3 of them. A file is opened by the one
    decoder. Raises `UnreadableImage` for a file that cannot be decoded, `InputError` for what
    holds no pictures.
    """
    if isinstance(images, (str, Path)):
        yield read_picture(Path(images), channels)
    elif isinstance(images, (bytes, bytearray, memoryview)):
        yield decode(bytes(images), channels)
    elif isinstance(images, Tensor):
        for picture in stacked(images, "a tensor"):
            yield to_channels(picture, channels)
    elif isinstance(images, np.ndarray):
        # h w c -> c h w
        batch = torch.from_numpy(np.ascontiguousarray(images)) if images.size else torch.empty(0)
        for picture in stacked(batch, "an array"):
            yield to_channels(picture, channels)
    elif hasattr(images, "getexif"):
        yield from_pillow(images, channels)
    elif isinstance(images, Iterable):
        for image in images:
            yield from each_picture(image, channels)
    else:
        raise InputError(
            f"no pictures are in an object of type {type(images).__name__}; give {FORMS}"
        )


def read_picture(path: Path, channels: int) -> Tensor:
    """A picture file."""
    try:
        raw = read_file(path)
    except OSError as error:
        raise UnreadableImage(str(path), error.strerror or str(error)) from None
    return decode(raw, channels, str(path))


def stacked(values: Tensor, what: str) -> Tensor:
    """A tensor (channels first) or array (channels last) of pictures, as (n, c, h, w)."""
    came = f"{what} of shape {tuple(values.shape)} and {str(values.dtype).removeprefix('torch.')}"
    if values.dtype != torch.uint8:
        raise InputError(
            f"{came} came; pictures are uint8, 0..255: preprocessing is this predictor's part"
        )
    if values.ndim == 2:
        values = values[None] if what == "a tensor" else values[:, :, None]
    if values.ndim == 3:
        values = values[None]
    axis = 1 if what == "a tensor" else 3
    if values.ndim != 4 or values.shape[axis] not in (1, 3) or 0 in values.shape[1:]:
        raise InputError(f"{came} came; give {FORMS}, with 1 or 3 channels")
    return values if what == "a tensor" else values.permute(0, 3, 1, 2)  # n h w c -> n c h w


# A run or an exported file, ready to name pictures.


@dataclass(frozen=True, eq=False)
class Prediction:
    """What one picture shows: the most probable class, and every class's probability (k,)."""

    label: str
    probability: float
    probabilities: np.ndarray
    classes: tuple[str, ...]

    def top(self, count: int) -> list[tuple[str, float]]:
        """The `count` most probable classes with their probabilities, best first."""
        best = best_first(self.probabilities[None], count)[0]
        return [(self.classes[i], float(self.probabilities[i])) for i in best]


class Predictions(Sequence[Prediction]):
    """A sequence with one `Prediction` a picture, in order.

    `probabilities` (n, k) float32 and `labels` (n names) hold them all.
    """

    def __init__(self, probabilities: np.ndarray, classes: tuple[str, ...]) -> None:
        self.probabilities = probabilities
        self.classes = classes
        self.labels = [classes[i] for i in probabilities.argmax(axis=1)]

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shown = ", ".join(repr(self[i]) for i in range(min(3, len(self))))
        return f"Predictions({len(self)}: {shown}{', …' if len(self) > 3 else ''})"

    @overload
    def __getitem__(self, i: int) -> Prediction: ...
    @overload
    def __getitem__(self, i: slice) -> "Predictions": ...
    def __getitem__(self, i: int | slice) -> "Prediction | Predictions":
        row = self.probabilities[i]
        if isinstance(i, slice):
            return Predictions(row, self.classes)
        return Prediction(self.labels[i], float(row.max()), row, self.classes)


def best_first(probabilities: np.ndarray, count: int) -> np.ndarray:
    """The `count` largest of each row of (n, k), best first; of equals the first: (n, count)."""
    return np.argsort(-probabilities, axis=1, kind="stable")[:, :count]


class Predictor:
    """Pictures to class names and probabilities. `regard.load` makes one.

    `classes` are the names in the order of the probabilities, `preprocess` is what every picture
    goes through first, `source` says where the model comes from, and `identity` is a digest of
    its weights or its file.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        classes: Sequence[str],
        preprocess: Preprocess,
        takes: str = "tensor",
        source: str = "a model",
        identity: str = "",
    ) -> None:
        self.runner = runner
        self.classes = tuple(classes)
        self.preprocess = preprocess
        self.takes = takes
        self.source = source
        self.identity = identity

    @property
    def model(self) -> nn.Module:
        """The module itself, in eval mode, for `regard.record`, `accelerate` or more training."""
        if not isinstance(self.runner, ModuleRunner):
            raise InputError(
                f"{self.source} is an exported file and holds no module; load the run folder, or "
                "its model.safetensors"
            )
        return self.runner.module

    def predict(
        self, images: Any, *, batch_size: int = 64, device: str | torch.device | None = None
    ) -> Predictions:
        """Class probabilities of pictures: paths, bytes, PIL images, arrays, tensors; one or many.

        See `pictures.FORMS`. `device` moves the model there first. Only a batch of pictures is
        held at a time, so `images` may be a generator. Raises `UnreadableImage`, which names the
        file, and `InputError`.
        """
        self.to(device)
        rows = [self.probabilities(batch).numpy() for batch in self._batches(images, batch_size)]
        none = np.zeros((0, len(self.classes)), np.float32)
        return Predictions(np.concatenate([none, *rows]), self.classes)

    def embed(
        self, images: Any, *, batch_size: int = 64, device: str | torch.device | None = None
    ) -> np.ndarray:
        """The features before the classifier, (n, dim) float32."""
        self.to(device)
        rows = [self.features(batch)[1].numpy() for batch in self._batches(images, batch_size)]
        return np.concatenate(rows) if rows else np.zeros((0, 0), np.float32)

    def to(self, device: str | torch.device | None) -> "Predictor":
        """Move the model; None leaves it where it is, "auto" takes the accelerator there is."""
        if device is None:
            return self
        where = pick_device(device)
        if isinstance(self.runner, ModuleRunner):
            self.runner = ModuleRunner(self.runner.module, where)
        elif where.type != "cpu" and str(device) != "auto":
            raise InputError(
                f"{self.source} stays on the device it was opened for; open it with "
                f"regard.load(…, device={str(device)!r})"
            )
        return self

    def prepare(self, picture: Tensor) -> Tensor:
        """A uint8 picture (c, H, W) as this model takes it: fitted, not yet normalised."""
        return picture if self.takes == "image" else self.preprocess.fitted(picture)

    def probabilities(self, prepared: Sequence[Tensor] | Tensor) -> Tensor:
        """Probabilities (n, k), float32 on the CPU, of what `prepare` gave, in a row or stacked."""
        if self.takes == "image":  # of any size each, so one by one
            rows = [self.runner(picture.permute(1, 2, 0)[None]) for picture in prepared]
            return torch.cat(rows).cpu()
        return self.runner(self._normalised(prepared)).softmax(dim=-1).cpu()

    def features(self, prepared: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (n, k) and features (n, dim), float32 on the CPU, in one pass."""
        self.check_features()
        assert isinstance(self.runner, ModuleRunner)
        model: Any = self.runner.module
        with torch.inference_mode():
            images = self._normalised(prepared).to(self.runner.device)
            features = model.features(images)
            classifier = getattr(model, "classifier", None)
            if classifier is None or getattr(model, "test_flips", False):
                logits = model(images)
            else:
                logits = classifier(features)
        return logits.float().softmax(dim=-1).cpu(), features.float().cpu()

    def check_features(self) -> None:
        """Refuse an exported file: it gives no features."""
        if not isinstance(self.runner, ModuleRunner):
            raise InputError(
                f"{self.source} gives no features; load the run folder, or its model.safetensors"
            )

    def _normalised(self, prepared: Sequence[Tensor] | Tensor) -> Tensor:
        stacked = prepared if isinstance(prepared, Tensor) else torch.stack(tuple(prepared))
        return self.preprocess.normalise(stacked)

    def _batches(self, images: Any, batch_size: int) -> Iterator[list[Tensor]]:
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; give at least 1")
        batch: list[Tensor] = []
        for picture in each_picture(images, self.preprocess.channels):
            batch.append(self.prepare(picture))
            if len(batch) == batch_size:
                yield batch
                batch = []
        if batch:
            yield batch

    def __repr__(self) -> str:
        return f"Predictor({self.source}, {len(self.classes)} classes, takes {self.takes})"


def load(
    run_or_file: str | Path, *, device: str | torch.device = "cpu", trusted: bool = False
) -> Predictor:
    """Open a run folder, its model.safetensors, or a file that `regard export` wrote.

    Nothing in a run or an ONNX file is executed but the model. Reading a torch.export program
    (.pt2) can run code of its author: it needs `trusted=True`.
    """
    path = Path(run_or_file)
    where = pick_device(device)
    if path.suffix in SUFFIXES.values():
        return load_export(path, where, trusted)
    if path.suffix == ".safetensors":
        return load_weights(path, where)
    folder = RunFolder.open(path)
    config, model = open_model(folder, where)
    return Predictor(
        ModuleRunner(model, where),
        classes=config.classes,
        preprocess=config.preprocess,
        source=str(folder),
        identity=digest(folder.weights_file),
    )


def load_export(path: Path, device: torch.device, trusted: bool) -> Predictor:
    """A predictor on an exported file."""
    if path.suffix == SUFFIXES["torch"] and path.is_file() and not trusted:
        raise InputError(
            f"{path} is a torch.export program, and reading one can run code of its author; "
            "if it is yours, open it in Python by regard.load(…, trusted=True), or export the run "
            "to ONNX"
        )
    facts, runner = open_file(path, str(device))
    return Predictor(
        runner,
        classes=facts.classes,
        preprocess=facts.preprocess,
        takes=facts.takes,
        source=str(path),
        identity=digest(path),
    )


def load_weights(path: Path, device: torch.device) -> Predictor:
    """A predictor on a model.safetensors whose metadata say what it is."""
    metadata = read_metadata(path)
    missing = [key for key in ("model", "classes", "preprocess") if key not in metadata]
    if missing:
        raise InputError(
            f"{path} does not say what it is (no {', '.join(missing)} in its metadata); give a "
            "run folder, or the model.safetensors that regard wrote into one"
        )
    arguments = json.loads(metadata["model"])
    classes = tuple(json.loads(metadata["classes"]))
    check_classes(arguments, classes, str(path))
    model = create(**arguments)
    model.load_state_dict(read_weights(path))
    return Predictor(
        ModuleRunner(model.eval(), device),
        classes=classes,
        preprocess=Preprocess.from_dict(json.loads(metadata["preprocess"])),
        source=str(path),
        identity=digest(path),
    )
