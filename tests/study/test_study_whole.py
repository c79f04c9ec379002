"""Whole studies in their own processes: what they leave, and what a kill costs."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from regard.study.plan import StudyFolder, StudyOptions
from regard.study.study import study
from regard.study.workers import Said, WorkerFailed, run_all

SMALL = {"steps": 20, "forms": "none,unit", "rates": "1e-3,1e-2", "seeds": 1, "images": 64}


def test_a_study_is_whole_killed_and_extended(tmp_path):
    out = tmp_path / "study"
    code = (
        "from pathlib import Path\nfrom regard.study.plan import StudyOptions\n"
        "from regard.study.study import study\n"
        f"study(StudyOptions(out=Path({str(out)!r}), workers=1, **{SMALL!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 500
    while not (out / "runs").is_dir() or len(list((out / "runs").glob("*.json"))) < 2:
        assert process.poll() is None, "the study ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {p.name: p.stat().st_mtime_ns for p in (out / "runs").glob("adamw*.json")}
    assert len(before) >= 2

    said = []
    found = study(StudyOptions(out=out, resume=True, workers=1), said.append)
    assert "runs are finished already" in said[0]
    after = {p.name: p.stat().st_mtime_ns for p in (out / "runs").iterdir()}
    assert len(after) == 4
    assert all(after[name] == at for name, at in before.items()), "finished runs are kept"
    assert {p.name for p in out.iterdir()} == {
        ".lock", "runs", "study.csv", "study.html", "study.json",
    }  # fmt: skip
    assert found.page == out / "study.html"
    assert found.conclusion.startswith("One seed cannot say")

    record = json.loads((out / "study.json").read_text())
    assert record["plan"] == [
        "adamw-none-0.001-0", "adamw-unit-0.001-0", "adamw-none-0.01-0", "adamw-unit-0.01-0",
    ]  # fmt: skip
    assert len(record["runs"]) == 4
    with (out / "study.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["form"] for row in rows] == ["none", "unit", "none", "unit"]
    assert [float(row["final_loss"]) for row in rows] == [r["final_loss"] for r in record["runs"]]

    more = study(StudyOptions(out=out, resume=True, rates="1e-2", forms="unit,rms"), said.append)
    assert {p.name for p in (out / "runs").iterdir()} - after.keys() == {"adamw-rms-0.01-0.json"}
    assert list(more.summary.forms["adamw"]) == ["unit", "rms"]
    assert any(line.startswith("of the runs before, 3 are not in what is asked") for line in said)


def test_a_signal_to_study_and_workers_alike_stops_it_cleanly(tmp_path):
    """As a shell's Ctrl-C or `timeout` sends it: workers may die of it before the study sees it."""
    words = ["--forms", "none", "--rates", "1e-3", "--seeds", "1", "--steps", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", "study", "--out", str(tmp_path / "study"), *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not (tmp_path / "study" / "pictures.npz").is_file():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)  # the worker is started right after
    os.killpg(process.pid, signal.SIGTERM)
    error = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert re.fullmatch(r"regard: stopped; `.* --resume` goes on without repeating .*\n", error)


def test_a_failure_in_a_worker_is_ours_and_loud(tmp_path):
    folder = StudyFolder(tmp_path)
    from regard.study.plan import Run

    # no study.json: the worker cannot begin
    with pytest.raises(WorkerFailed, match="it ended by itself"):
        run_all(folder, [Run("adamw", "none", 0.1, 0)], 20, 1, "cpu", lambda done, finished: None)


def test_a_study_says_how_long_it_takes_but_not_too_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("regard.study.workers.time.monotonic", lambda: now[0])
    said = []
    progress = Said(said.append, total=100, runs=4)
    for done, at in ((1, 5), (25, 40), (26, 45), (50, 80)):
        now[0] = at
        progress(done, done // 25)
    assert said == [
        "1 of 4 runs done, about 2 min 0 s left",
        "2 of 4 runs done, about 1 min 20 s left",
    ]


def test_workers_have_one_thread():
    from regard.study.workers import environment

    assert environment()["OMP_NUM_THREADS"] == "1"
    assert environment()["PYTHONPATH"].split(os.pathsep)[0].endswith("src")
