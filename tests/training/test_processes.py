"""Two gloo processes beside one: DDP, FSDP2, resuming on another number."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from regard._io import read_weights
from regard.training.config import TrainConfig
from regard.training.evaluate import evaluate
from regard.training.run_folder import RunFolder
from regard.training.trainer import train
from tests.training.conftest import tiny_config

STEPS = 50


def config(out: Path, **changes) -> TrainConfig:
    # 4 microbatches, so that one process takes 4 and each of two takes 2; Mixup partners with them
    settings = {"steps": STEPS, "microbatch": 16, "mixup": 0.2, "lr": 1e-3, "eval_every": 1.0}
    return tiny_config(out, **{**settings, **changes})


def as_json(request: TrainConfig) -> str:
    values = dataclasses.asdict(request)
    return json.dumps(
        {k: str(v) if isinstance(v, Path) else v for k, v in values.items() if v is not None}
    )


def torchrun(*requests: TrainConfig) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(Path(__file__).with_name("several.py")), *map(as_json, requests)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_command_on_two_processes_ends_with_one_report(tmp_path):
    out = tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "regard", "train", "digits", "--steps=2", "--batch-size=64",
               "--device=cpu", "--precision=fp32", f"--out={out}"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("accuracy  ") == 1
    assert (out / "report.html").is_file()
    assert (out / "evaluation.json").is_file()


def apart(one: Path, other: Path) -> float:
    """The largest difference between two runs' last weights."""
    a, b = (read_weights(run / "model.safetensors") for run in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def resnet(out: Path, **changes) -> TrainConfig:
    options = {"widths": (8, 16), "depth": 1}
    return config(out, model="pixel-resnet-nano", model_options=options, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both families on one process and on two with DDP; a ViT on two with FSDP2, once averaged."""
    place = tmp_path_factory.mktemp("processes")
    train(config(place / "one"), say=lambda line: None)
    train(resnet(place / "one-resnet"), say=lambda line: None)
    torchrun(
        config(place / "ddp"),
        resnet(place / "ddp-resnet"),
        config(place / "fsdp", strategy="fsdp"),
        config(place / "average", strategy="fsdp", ema=0.9, steps=6),
    )
    return place


@pytest.mark.parametrize(
    ("one", "two"), [("one", "ddp"), ("one", "fsdp"), ("one-resnet", "ddp-resnet")]
)
def test_two_processes_end_where_one_does(runs, one, two):
    assert apart(runs / one, runs / two) < 1e-4
    losses = [
        [line["loss"] for line in RunFolder(runs / run).metrics() if "loss" in line]
        for run in (one, two)
    ]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_attention_health_is_the_main_processs_alone(runs):
    one, ddp, fsdp = (
        [line for line in RunFolder(runs / run).metrics() if "attention" in line]
        for run in ("one", "ddp", "fsdp")
    )
    assert [line["step"] for line in one] == [line["step"] for line in ddp] == [25, 50]
    for mine, other in zip(one, ddp, strict=True):
        for name, numbers in mine["attention"].items():
            assert other["attention"][name] == pytest.approx(numbers, rel=1e-2)
    assert fsdp == []
    notes = RunFolder(runs / "fsdp").config().notes
    assert "attention health is left out: fsdp spreads the model over processes" in notes


def test_evaluation_counts_each_image_once_on_any_number_of_processes(runs):
    # 179 images in batches of 16 leave 11 batches and a part: uneven between two processes
    stored = json.loads((runs / "ddp" / "evaluation.json").read_text())
    again = evaluate(runs / "ddp")
    assert stored["images"] == again.summary()["images"] == 179
    assert stored["accuracy"] == again.accuracy
    assert stored["log_loss"] == pytest.approx(again.summary()["log_loss"], abs=1e-6)
    sharded = json.loads((runs / "fsdp" / "evaluation.json").read_text())
    assert np.sum(sharded["confusion"]) == 179
    assert sharded["log_loss"] == pytest.approx(again.summary()["log_loss"], abs=1e-4)


def test_a_sharded_run_resumes_on_one_process(runs):
    assert len(list(RunFolder(runs / "fsdp").checkpoint(STEPS).glob("*.safetensors"))) == 2
    more = TrainConfig("digits", out=runs / "fsdp", resume=True, steps=STEPS + 6, strategy="auto")
    train(more, say=lambda line: None)
    train(
        TrainConfig("digits", out=runs / "one", resume=True, steps=STEPS + 6), say=lambda line: None
    )
    assert apart(runs / "one", runs / "fsdp") < 2e-4
    segment = RunFolder(runs / "fsdp").config().segments[-1]
    assert (segment.from_step, segment.processes) == (STEPS, 1)
    assert segment.changed == {
        "steps": STEPS + 6,
        "epochs": None,
        "minutes": None,
        "strategy": "auto",
    }


def test_the_average_of_a_sharded_run_is_that_of_one_process(runs, tmp_path):
    train(config(tmp_path / "one", ema=0.9, steps=6), say=lambda line: None)
    assert apart(tmp_path / "one", runs / "average") < 1e-4
