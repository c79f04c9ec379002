"""Checkpoints: a folder a step, whole or not there at all, made of safetensors files.

One process writes the state as one file. Where the model is sharded, every process writes its
shards with torch.distributed.checkpoint in its safetensors layout (no pickle), and any number of
processes reads either kind back.
"""

import os
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor

from regard.errors import InputError
from regard.files import atomic_folder, meaning, read_json, sync, write_json, write_weights
from regard.runs.folder import RunFolder
from regard.runs.state import Progress, TrainState, is_sharded

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
