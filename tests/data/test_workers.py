"""Worker processes: in order, and gone with the process they work for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regard.data.batches import deliver
from regard.errors import InputError

SCRIPT = """
import itertools, os, time
from regard.data.batches import deliver


def whose(task):
    return os.getpid(), os.getppid()


if __name__ == "__main__":
    found = deliver(whose, ((i,) for i in itertools.count()), 2)
    seen = {pid for _ in range(8) for pid in next(found)}
    print(*sorted(seen), flush=True)
    time.sleep(600)
"""


def square(x):
    return x * x


def test_things_come_in_the_order_of_the_tasks():
    with pytest.raises(InputError, match="workers is -1; give 0 or more"):
        deliver(square, iter([]), -1)
    for workers in (0, 2):
        got = deliver(square, ((x,) for x in range(9)), workers)
        assert list(got) == [0, 1, 4, 9, 16, 25, 36, 49, 64]


def running(pid):
    """Whether a process is there and not just waiting to be buried."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are seen in /proc")
def test_a_kill_leaves_no_worker_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    helpers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(helpers) == 3  # two workers and the server that forked them
    assert all(running(pid) for pid in helpers)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while any(running(pid) for pid in helpers) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in helpers if running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    process.stdout.close()
