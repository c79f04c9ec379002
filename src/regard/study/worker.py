"""A process that trains the runs it is told: `python -m regard.study.worker FOLDER DEVICE`.

It reads one run a line from its standard input, writes each finished run into the study's folder,
and tells of its progress on its standard output, both as JSON. The end of its input, which the
death of the study's process brings about too, is its own end. It is a program rather than a
`multiprocessing` process so that the number of threads is set before torch is loaded, and so that
a study can be started from a notebook or an unguarded script.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TextIO

import torch

from regard.errors import RegardError
from regard.study.folder import StudyFolder, line
from regard.study.pictures import Pictures
from regard.study.plan import Run
from regard.study.trial import trial


def serve(folder: StudyFolder, device: torch.device, tasks: TextIO, answers: TextIO) -> None:
    """Train every run that comes in `tasks`, until they end."""
    settings = folder.plan().settings
    pictures = Pictures.load(folder.pictures_file).to(device)

    def tell(**message: object) -> None:
        answers.write(line(**message))
        answers.flush()

    for task in tasks:
        run = Run(**json.loads(task))
        try:
            result = trial(run, settings, pictures, lambda step: tell(step=step))
            folder.write_run(run, result)
        except BrokenPipeError:
            raise
        except RegardError as error:
            tell(refused=str(error))
            return
        except Exception:
            tell(failed=traceback.format_exc())
            return
        tell(done=run.name)


def main() -> None:
    path, device = sys.argv[1:]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the study, which ends its workers
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else prints must not mix with the messages
    try:
        serve(StudyFolder(Path(path)), torch.device(device), sys.stdin, answers)
    except BrokenPipeError:  # the study is gone, and whoever resumes it repeats this run
        os._exit(1)


if __name__ == "__main__":
    main()
