"""SIGKILL at random moments, in a checkpoint's writing too, then resume: the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")
@pytest.mark.parametrize("model", ["simple-vit-nano/4", "pixel-resnet-nano"])
def test_a_killed_run_resumes_to_the_same_bytes(model):
    # two kills at a random moment and two inside the writing of a file
    command = [sys.executable, "-m", "benchmarks.kill_resume", "--kills", "4", "--model", model]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 the same" in done.stdout
