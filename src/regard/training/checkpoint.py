"""What a run is at a step: weights, their average, the optimizers' state, the best so far."""

import contextlib
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from regard._io import atomic_folder, meaning, read_json, sync, write_json, write_weights
from regard.errors import InputError
from regard.training.run_folder import RunFolder


@dataclass
class Progress:
    """The numbers of a checkpoint, beside its tensors."""

    step: int = 0
    best_step: int = 0
    best_accuracy: float = -1.0
    best_loss: float = float("inf")
    seconds: float = 0.0
    """Time spent training, over all segments."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: a run without an evaluation has no best loss."""
        values = asdict(self)
        return {k: None if v == float("inf") else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Progress":
        """Rebuild from `to_dict`'s result; what it lacks, or has of another kind, is refused."""
        known: dict[str, Any] = {k: float("inf") if v is None else v for k, v in values.items()}
        for name, kind in cls.__annotations__.items():
            if type(known[name]) not in ((int,) if kind is int else (int, float)):
                raise TypeError(f"{name} is {known[name]!r}")
        return cls(**known)


@dataclass
class TrainState:
    """A model in training. `model` is bare: what wraps it for several processes is the loop's."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    ema_decay: float = 0.0
    progress: Progress = field(default_factory=Progress)
    ema: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ema_decay and not self.ema:
            self.ema = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def update_ema(self) -> None:
        """average ← d · average + (1 - d) · weights, with d = min(decay, (1 + s) / (10 + s)).

        The ramp in the step s keeps the first weights, which are noise, out of the average.
        """
        if not self.ema:
            return
        step = self.progress.step
        decay = min(self.ema_decay, (1 + step) / (10 + step))
        now = [p.detach() for p in self.model.parameters()]
        torch._foreach_lerp_(list(self.ema.values()), now, 1 - decay)

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Within, the model holds the weights that evaluation uses, and is in eval mode."""
        parameters = dict(self.model.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in self.ema}
        was_training = self.model.training
        self._set(parameters, self.ema)
        self.model.eval()
        try:
            yield
        finally:
            self._set(parameters, kept)
            self.model.train(was_training)

    @staticmethod
    @torch.no_grad()
    def _set(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by a flat name; they are views, not copies."""
        found = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        found |= {f"ema.{n}": t for n, t in self.ema.items()}
        for name, optimizer, parameter in self._optimized():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}/{key}"] = value
        return found

    def prepare(self, shapes: Mapping[str, torch.Size]) -> None:
        """Make the optimizers' empty state, of which a checkpoint tells the names and shapes."""
        keys: dict[str, list[str]] = {}
        for full in shapes:
            if full.startswith("optimizer."):
                name, key = full.removeprefix("optimizer.").rsplit("/", 1)
                keys.setdefault(name, []).append(key)
        for name, optimizer, parameter in self._optimized():
            for key in keys.get(name, ()):
                shape = shapes[f"optimizer.{name}/{key}"]
                like = shape == parameter.shape
                optimizer.state[parameter][key] = (
                    torch.zeros_like(parameter, requires_grad=False)
                    if like
                    else torch.zeros(shape, device=parameter.device)
                )

    def _optimized(self) -> Iterator[tuple[str, Optimizer, Tensor]]:
        owners = {
            id(parameter): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in self.model.named_parameters():
            if id(parameter) in owners:
                yield name, owners[id(parameter)], parameter


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or what its shards on all processes make together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any tensor is spread over processes."""
    return any(hasattr(tensor, "full_tensor") for tensor in tensors.values())


# Checkpoints: a folder a step, whole or not there at all, made of safetensors files.
#
# One process writes the state as one file. Where the model is sharded, every process writes its
# shards with torch.distributed.checkpoint in its safetensors layout (no pickle), and any number of
# processes reads either kind back.


PROGRESS_FILE = "progress.json"
STATE_FILE = "state.safetensors"


class Checkpoints:
    """Writes and reads the checkpoints of a run, keeping the last `keep` and the best.

    A state on one process is copied and written by a thread while training goes on; an error of
    that thread is raised by the next `save` or by `wait`.
    """

    def __init__(self, folder: RunFolder, keep: int, rank: int = 0) -> None:
        self.folder = folder
        self.keep = keep
        self.rank = rank
        self._error: OSError | None = None

    def save(self, state: TrainState) -> None:
        """Write the state's checkpoint; several processes call it together."""
        self.wait()
        tensors = state.tensors()
        progress = Progress(**vars(state.progress))
        if is_sharded(tensors):
            self._save_sharded(tensors, progress)
        elif self.rank == 0:
            copies = {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()
            }
            self.folder.writer = threading.Thread(target=self._save_whole, args=(copies, progress))
            self.folder.writer.start()

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk."""
        if self.folder.writer is not None:
            self.folder.writer.join()
            self.folder.writer = None
        if self._error is not None:
            error, self._error = self._error, None
            with self.folder.writing():
                raise error

    def _save_whole(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        try:
            self.folder.checkpoints.mkdir(exist_ok=True)
            target = self.folder.checkpoint(progress.step)
            if not target.exists():  # written before the resume, or twice in one step: same bits
                with atomic_folder(target) as part:
                    write_weights(part / STATE_FILE, tensors)
                    write_json(part / PROGRESS_FILE, progress.to_dict())
            self._prune(progress)
        except OSError as error:
            self._error = error

    def _save_sharded(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        target = self.folder.checkpoint(progress.step)
        part = target.with_name(f".{target.name}.part")
        with self.folder.writing():
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
            dist.barrier()
            writer = dcp.HuggingFaceStorageWriter(str(part), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer)
            if self.rank == 0:
                write_json(part / PROGRESS_FILE, progress.to_dict())
                for file in part.iterdir():
                    sync(file)
                if not target.exists():
                    os.replace(part, target)
                sync(target.parent)
                self._prune(progress)
            dist.barrier()

    def _prune(self, progress: Progress) -> None:
        for step in self.folder.saved_steps()[: -self.keep]:
            if step != progress.best_step:
                self.folder.remove_checkpoint(step)


def load_checkpoint(path: Path, state: TrainState) -> None:
    """Bring the state to that of a checkpoint folder, in place; all processes call it together."""
    try:
        shapes = stored_shapes(path)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise not_whole(path, error) from None
    state.prepare(shapes)
    tensors = state.tensors()
    if set(shapes) != set(tensors):
        odd = sorted(set(shapes) ^ set(tensors))
        raise InputError(
            f"{path} does not fit this run: {odd[0]} and {len(odd) - 1} more stand on one side "
            "only; was config.json changed by hand?"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(
            tensors,
            storage_reader=dcp.HuggingFaceStorageReader(str(path)),
            no_dist=not dist.is_initialized(),
        )
    progress = read_json(path / PROGRESS_FILE)
    with meaning(path / PROGRESS_FILE):
        state.progress = Progress.from_dict(progress)


def not_whole(path: Path, error: Exception) -> InputError:
    """What to say of a checkpoint that is damaged."""
    return InputError(
        f"{path} is no whole checkpoint ({error}); remove it to go on from the one before, or "
        "restore it"
    )


def stored_shapes(path: Path) -> dict[str, torch.Size]:
    """Names and whole shapes of the tensors in a checkpoint folder."""
    reader = dcp.HuggingFaceStorageReader(str(path))
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in stored.items()}
