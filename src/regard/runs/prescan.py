"""The scan of every picture before a first training, and what it leaves out."""

from pathlib import Path

from regard.errors import counted
from regard.files import read_json, write_json
from regard.images import Data, Inspection, inspect_data, read_quarantine
from regard.runs.folder import RunFolder
from regard.runs.processes import Processes
from regard.runs.reporter import Reporter


def without_quarantined(
    data: Data, folder: RunFolder, given: Path | None, processes: Processes, reporter: Reporter
) -> tuple[Data, list[str]]:
    """The data without the pictures on the run's quarantine list, and remarks for people.

    The list is `given`, or made by scanning every picture (pictures unchanged since an earlier
    scan are not read again; streamed ones are not scanned). It is kept in the run folder, so that
    the run stays whole.
    """
    source = data.splits["train"].source
    if not source.has_files:
        return data, []
    if source.streamed and given is None:
        return data, ["streamed data are not scanned before training; regard inspect scans them"]
    notes: list[str] = []
    if processes.main:
        if given is not None:
            read_quarantine(given, data)  # refused here if it is another data's
            quarantine = read_json(given)
        else:
            found = scan_aloud(data, reporter)
            quarantine, notes = found.quarantine(), findings(found)
        with folder.writing():
            write_json(folder.quarantine_file, quarantine)
    notes = processes.of_main(notes)
    return data.without(read_quarantine(folder.quarantine_file, data)), notes


def scan_aloud(data: Data, reporter: Reporter) -> Inspection:
    """`inspect_data` with the run's progress bar."""
    started = False

    def progress(done: int, total: int) -> None:
        nonlocal started
        if not started:
            reporter.start(done, total)
            started = True
        reporter.step(done, {})

    try:
        return inspect_data(data, progress=progress)
    finally:
        reporter.finish()


def findings(found: Inspection) -> list[str]:
    """A line for each kind of trouble found."""
    notes = []
    if found.unreadable:
        first = found.unreadable[0]
        notes.append(
            f"unreadable and left out: {counted(len(found.unreadable), 'picture')}, such as "
            f"{found.name(first)} ({found.fact(first).reason}); quarantine.json names all"
        )
    if found.leaks:
        notes.append(
            f"held-out pictures that are also trained on: {len(found.leaks):,}, which makes the "
            "score look better than it is; regard inspect shows them, and its --leaks leaves them "
            "out"
        )
    if found.conflicts:
        notes.append(
            f"pairs of pictures that show the same under different labels: "
            f"{len(found.conflicts):,}; regard inspect shows them"
        )
    return notes
