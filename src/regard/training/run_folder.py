"""The run folder: the only place that knows the names inside it."""

import contextlib
import csv
import errno
import json
import os
import re
import shlex
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard._io import (
    locked,
    meaning,
    read_json,
    read_weights,
    write_json,
    write_text,
    write_weights,
)
from regard.data.dataset import Data
from regard.data.open import open_data
from regard.data.splits import check_shape
from regard.errors import InputError, RegardError
from regard.models.registry import create
from regard.training.config import RunConfig


class RunStopped(RegardError):
    """Training had to stop; the message says why, what is safe and how to go on."""


class RunFolder:
    """What a training run writes and everything else reads.

    Args:
        path: an existing run folder, or the one that a new run is to write.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.environment_file = self.path / "environment.json"
        self.split_file = self.path / "split.json"
        self.quarantine_file = self.path / "quarantine.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.weights_file = self.path / "model.safetensors"
        self.evaluation_file = self.path / "evaluation.json"
        self.predictions_file = self.path / "predictions.csv"
        self.per_class_file = self.path / "per_class.csv"
        self.confusion_file = self.path / "confusion.csv"
        self.report_file = self.path / "report.html"
        self.checkpoints = self.path / "checkpoint"
        self.exports = self.path / "export"
        self.tensorboard = self.path / "tensorboard"
        self.lock_file = self.path / ".lock"
        self.writer: threading.Thread | None = None
        """Writes a checkpoint while training goes on; what is safe is known once it has ended."""

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def open(cls, path: "str | Path | RunFolder") -> "RunFolder":
        """An existing run, or a refusal."""
        folder = path if isinstance(path, RunFolder) else cls(path)
        if not folder.config_file.is_file():
            what = "is no run folder (it has no config.json)" if folder.path.is_dir() else (
                "does not exist"
            )  # fmt: skip
            raise InputError(f"{folder} {what}; give the folder that `regard train` wrote")
        return folder

    @classmethod
    def fresh(cls, out: str | Path | None, name: str) -> "RunFolder":
        """A folder for a new run: `out`, which may not exist, or runs/NAME, runs/NAME-2, …"""
        if out is not None:
            out = Path(out)
            refuse_other_than_utf8(str(out))
            if out.is_symlink() and not out.exists():
                raise InputError(f"{out} is a link to nothing; remove it, or give another --out")
            if out.exists() and not (out.is_dir() and cls(out).not_begun()):
                raise InputError(
                    f"{out} exists already; add --resume to go on with the run in it, or give "
                    "another --out"
                )
            return cls(out)
        number, path = 1, Path("runs") / name
        while path.exists():
            number += 1
            path = Path("runs") / f"{name}-{number}"
        return cls(path)

    def not_begun(self) -> bool:
        """Whether there is nothing but what a run killed before its config.json leaves."""
        early = (self.split_file.name, self.environment_file.name, self.quarantine_file.name)
        return all(p.name in early or p.name.startswith(".") for p in self.path.iterdir())

    def config(self) -> RunConfig:
        """What stands in config.json."""
        values = read_json(self.config_file)
        with meaning(self.config_file):
            return RunConfig.from_dict(values, str(self.config_file))

    def write_config(self, config: RunConfig) -> None:
        write_json(self.config_file, config.to_dict())

    def data(self) -> Data:
        """The run's own data with the run's own splits; a changed dataset is refused."""
        recipe = self.config().recipe
        record = read_json(self.split_file)
        there = self.quarantine_file.exists()
        with meaning(self.split_file):
            check_shape(record)
        data = open_data(
            recipe.data,
            channels=recipe.channels,
            record=record,
            quarantine=self.quarantine_file if there else None,
        )
        source = data.splits["train"].source
        if source.has_files and not source.streamed and not there:
            raise InputError(
                f"{self.quarantine_file} is missing, which names the pictures that this run leaves "
                "out; restore it, or start a new run"
            )
        return data

    def load_model(self, device: Any = "cpu") -> Any:
        """The trained model, in eval mode, with the weights that evaluation uses."""
        config = self.config()
        model = create(**config.model)
        try:
            model.load_state_dict(read_weights(self.weights_file))
        except RuntimeError as error:
            raise InputError(
                f"{self.weights_file} holds weights of another model than {self.config_file.name} "
                f"describes ({str(error).splitlines()[-1].strip()}); restore one of the two"
            ) from None
        return model.to(device).eval()

    def write_weights(self, state: Mapping[str, Any], config: RunConfig, step: int) -> None:
        """model.safetensors; its metadata make it usable without the folder."""
        metadata = {
            "format": "regard",
            "model": json.dumps(config.model),
            "classes": json.dumps(config.classes),
            "preprocess": json.dumps(config.preprocess.to_dict()),
            "step": str(step),
        }
        write_weights(self.weights_file, state, metadata)

    def evaluation(self) -> dict[str, Any]:
        """The numbers of the last measurement on the held-out images (`Evaluation.summary`)."""
        return read_json(self.evaluation_file)

    def predictions(self) -> list[dict[str, str]]:
        """The lines of predictions.csv, each by column."""
        with self.predictions_file.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def environment(self) -> dict[str, Any]:
        """What the run ran on."""
        return read_json(self.environment_file)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. A line that a kill cut short is left out."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_bytes().split(b"\n")
        with meaning(self.metrics_file):
            values = [json.loads(line) for line in lines[:-1]]
            if any("step" not in value for value in values):
                raise ValueError("a line without its step")
            return values

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of steps after `step`, which a resumed run writes again."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        write_text(self.metrics_file, "".join(json.dumps(line) + "\n" for line in kept))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other training out of this folder; the system frees it with the process."""
        with contextlib.ExitStack() as stack:
            with self.writing():
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(
                    locked(
                        self.lock_file,
                        lambda holder: (
                            f"{self} is being written by {holder}; wait for it or stop it, or give "
                            "another --out"
                        ),
                    )
                )
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what a disk does to us into a stop that says what is safe."""
        try:
            yield
        except OSError as error:
            raise RunStopped(f"{self._disk_trouble(error)}. {self.way_back()}") from error

    def _disk_trouble(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk of {self} is full; make room"
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return f"{self} cannot be written ({error.strerror}); make it writable"
        if not self.path.exists():
            return f"{self} has vanished, its disk perhaps with it; bring it back"
        return f"{self} cannot be written ({error.strerror or error})"

    def saved_steps(self) -> list[int]:
        """The steps of the whole checkpoints, ascending."""
        with contextlib.suppress(OSError):
            names = (p.name for p in self.checkpoints.iterdir() if p.is_dir())
            return sorted(int(n[5:]) for n in names if re.fullmatch(r"step-\d{9}", n))
        return []

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of this step."""
        return self.checkpoints / f"step-{step:09d}"

    def remove_checkpoint(self, step: int) -> None:
        """Remove it in one step, as far as a reader can tell, then free its space."""
        doomed = self.checkpoints / f".gone-{step:09d}"
        os.replace(self.checkpoint(step), doomed)
        shutil.rmtree(doomed)

    def sweep(self) -> None:
        """Remove what a killed process left half-written."""
        for folder in (self.path, self.checkpoints):
            for part in [*folder.glob(".*.part"), *folder.glob(".gone-*")]:
                shutil.rmtree(part) if part.is_dir() else part.unlink()

    def way_back(self) -> str:
        """How to go on from what is saved, in words, once a checkpoint being written is whole."""
        if self.writer is not None:
            self.writer.join()
        if not self.path.exists():
            return f"Its checkpoints went with it: {self.resume_command()} goes on from the last"
        steps = self.saved_steps()
        if not steps:
            return "No checkpoint was written yet"
        return f"The checkpoint of step {steps[-1]} is whole: {self.resume_command()} goes on"

    def resume_command(self, *options: str) -> str:
        """The command that goes on with this run."""
        try:
            data = self.config().recipe.data
        except RegardError:
            data = "DATA"
        words = ["regard", "train", data, "--out", str(self.path), "--resume", *options]
        return f"`{shlex.join(words)}`"


def refuse_other_than_utf8(out: str) -> None:
    """Refuse a name that files of weights, whose names are UTF-8, cannot lie under."""
    try:
        out.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{out!r} is no name in UTF-8; give another --out") from None
