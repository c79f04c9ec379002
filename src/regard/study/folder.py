"""The folder of a study: the only place that knows the names inside it."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.errors import InputError
from regard.files import meaning, read_json, write_json
from regard.locks import locked
from regard.study.plan import Grid, Run, Settings
from regard.study.shapes import check_plan, check_result


@dataclass(frozen=True)
class Plan:
    """What a study does: the grid of runs, and what they share."""

    settings: Settings
    grid: Grid


class StudyFolder:
    """Plan, images, finished runs and results of one study."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.plan_file = self.path / "study.json"
        self.csv_file = self.path / "study.csv"
        self.page_file = self.path / "study.html"
        self.pictures_file = self.path / "pictures.npz"
        self.runs = self.path / "runs"
        self.lock_file = self.path / ".lock"

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def fresh(cls, out: Path | None, name: str) -> "StudyFolder":
        """A folder for a new study: `out`, empty or new, or studies/NAME, studies/NAME-2, …"""
        if out is not None:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise InputError(
                    f"{out} exists already; add --resume to go on with the study in it, or give "
                    "another --out"
                )
            return cls(out)
        number, path = 1, Path("studies") / name
        while path.exists():
            number += 1
            path = Path("studies") / f"{name}-{number}"
        return cls(path)

    @classmethod
    def open(cls, path: Path | None) -> "StudyFolder":
        """An existing study, or a refusal."""
        if path is None:
            raise InputError("--resume needs --out, the folder of the study to go on with")
        folder = cls(path)
        if not folder.plan_file.is_file():
            raise InputError(
                f"{path} is no study (it has no {folder.plan_file.name}); give the folder that "
                "`regard study` wrote"
            )
        return folder

    def plan(self) -> Plan:
        """The plan in study.json."""
        values = read_json(self.plan_file)
        with meaning(self.plan_file):
            if values["format"] != 1:
                raise InputError(f"{self.plan_file} is of another version of regard; update it")
            check_plan(values)
            return Plan(Settings(**values["settings"]), Grid.from_dict(values["grid"]))

    def write_plan(self, plan: Plan, **results: Any) -> None:
        """study.json: the plan with the names of its runs and, when there are any, results."""
        values = {
            "format": 1,
            "settings": vars(plan.settings),
            "grid": plan.grid.to_dict(),
            "plan": [run.name for run in plan.grid.runs()],
        }
        write_json(self.plan_file, {**values, **results})

    def run_file(self, run: Run) -> Path:
        """Where the figures of one run stand once it is finished."""
        return self.runs / f"{run.name}.json"

    def write_run(self, run: Run, result: dict[str, Any]) -> None:
        write_json(self.run_file(run), result)

    def finished(self, run: Run) -> bool:
        """Whether the run is done; its file appears whole or not at all."""
        return self.run_file(run).is_file()

    def results(self, grid: Grid) -> list[dict[str, Any]]:
        """The figures of the finished runs of a grid."""
        found: list[dict[str, Any]] = []
        for run in grid.runs():
            if self.finished(run):
                result = read_json(self.run_file(run))
                with meaning(self.run_file(run)):
                    if {name: result[name] for name in vars(run)} != vars(run):
                        raise ValueError("it is of another run")
                    check_result(result)
                    if found and layers(result) != layers(found[0]):
                        raise ValueError("it is of another model")
                found.append(result)
        return found

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other study out of this folder; the system frees it with the process."""
        with contextlib.ExitStack() as stack:
            try:
                self.runs.mkdir(parents=True, exist_ok=True)
                stack.enter_context(
                    locked(
                        self.lock_file,
                        lambda holder: (
                            f"another study is writing {self}; wait for it, or give another --out"
                        ),
                    )
                )
            except OSError as error:
                raise InputError(
                    f"{self} cannot be written ({error.strerror or error}); give another --out"
                ) from None
            yield


def layers(result: dict[str, Any]) -> int:
    """How many attentions were measured in a run."""
    return len(result["points"][0]["entropy"])


def line(**message: Any) -> str:
    """One message between a study and its workers."""
    return json.dumps(message) + "\n"
