"""Kill a training at random moments and resume it: are the weights the same, to the byte?

    python -m benchmarks.kill_resume --kills 20 --workers 0

Trains once without interruption. Then, for each kill, trains anew, sends SIGKILL at a random
moment (every second time at a random call inside the writing of a checkpoint, config or weights),
resumes, and compares the bytes of model.safetensors and of the last checkpoint. The workers that
read are left to find out by themselves. Prints a line a kill and ends with code 1 if any differs.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 40
SMALL = {
    "simple-vit-nano/4": {"dim": 16, "heads": 2, "dim_head": 8, "depth": 2, "mlp_dim": 32},
    "pixel-resnet-nano": {"widths": (8, 16, 16), "depth": 1},
}


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The run that is killed: small, with an evaluation and a checkpoint every few steps."""
    return {
        "data": "digits",
        "model": arguments.model,
        "model_options": SMALL.get(arguments.model, {}),
        "optimizer": arguments.optimizer,
        "precision": "fp32",
        "steps": STEPS,
        "batch_size": 32,
        "eval_every": 0.1,
        "ema": 0.9,
        "workers": arguments.workers,
    }


def digest(run: Path) -> str:
    """One hash of the weights that evaluation uses and of the last checkpoint."""
    last = sorted((run / "checkpoint").glob("step-*"))[-1]
    total = hashlib.sha256()
    for file in (run / "model.safetensors", last / "state.safetensors"):
        total.update(file.read_bytes())
    return f"{last.name} {total.hexdigest()}"


def in_child(work: Any) -> int:
    """Fork, run `work` in the child, and return the child's process number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def die_at_write(number: int) -> None:
    """SIGKILL this process at its `number`-th flush to the disk, before it happens."""
    from regard import _io as files

    real, left = files.sync, [number]

    def sync(path: Path) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(path)

    files.sync = sync


def train_in_child(config: Any, write: int = 0) -> int:
    """Train in a child that dies at its `write`-th flush, if that is not 0."""

    def work() -> None:
        from regard.training.trainer import train

        if write:
            die_at_write(write)
        train(config, say=lambda line: None)

    return in_child(work)


def finished(child: int) -> bool:
    """Wait for a child; whether it ended by itself, without error."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--model", default="simple-vit-nano/4")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # The parent only forks: it imports everything once and computes nothing.
    import lightning_fabric  # noqa: F401
    import sklearn.datasets
    import sklearn.metrics  # noqa: F401

    from regard.training.config import TrainConfig

    draw = random.Random(arguments.seed)
    same = 0
    with tempfile.TemporaryDirectory() as place:
        whole, run = Path(place) / "whole", Path(place) / "killed"
        start = time.monotonic()
        assert finished(train_in_child(TrainConfig(**settings(arguments), out=whole)))
        length, wanted = time.monotonic() - start, digest(whole)
        print(f"uninterrupted: {length:.1f} s, {wanted[:40]}", flush=True)
        for kill in range(arguments.kills):
            shutil.rmtree(run, ignore_errors=True)
            write = draw.randint(4, 60) if kill % 2 else 0
            moment = draw.uniform(0.05, 1.0) * length
            start = time.monotonic()
            child = train_in_child(TrainConfig(**settings(arguments), out=run), write)
            while not write and time.monotonic() - start < moment:
                time.sleep(0.002)
            if not write:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            began = (run / "config.json").exists()
            steps = [p.name for p in sorted((run / "checkpoint").glob("step-*"))]
            again = {"data": "digits", "resume": True} if began else settings(arguments)
            good = finished(train_in_child(TrainConfig(**again, out=run)))
            equal = good and digest(run) == wanted
            same += equal
            where = f"write {write}" if write else f"{moment:.2f} s"
            last = steps[-1] if steps else ("config only" if began else "nothing")
            print(f"kill at {where}, had {last}: {'same' if equal else 'DIFFERENT'}", flush=True)
    words = f"{same} of {arguments.kills} the same, {arguments.model}, {arguments.workers} workers"
    print(words, flush=True)
    return 0 if same == arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
