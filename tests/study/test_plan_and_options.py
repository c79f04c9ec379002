"""The grid, what is refused, and how a resumed study takes up the old one."""

import itertools
import re

import pytest

from regard.errors import InputError
from regard.study.plan import Grid, Plan, Run, StudyFolder, StudyOptions, check_same, new_grid
from regard.study.study import continued, study, worker_count
from regard.study.study_page import command_of
from tests.study.conftest import settings


def test_the_default_grid():
    grid = new_grid(StudyOptions())
    assert grid == Grid(("adamw",), ("none", "cap", "unit", "rms", "layer"),
                        (0.001, 0.003, 0.01, 0.03, 0.1), 3)  # fmt: skip
    runs = grid.runs()
    assert len({run.name for run in runs}) == len(runs) == 75
    assert runs[0].name == "adamw-none-0.001-0"
    assert {run.seed for run in runs[:25]} == {0}, "whole grids first"


def test_what_is_asked_for_is_what_is_run():
    options = StudyOptions(rates="0.1, 1e-3", forms="unit,none", seeds=2, optimizer="muon,adamw")
    grid = new_grid(options)
    assert grid == Grid(("muon", "adamw"), ("none", "unit"), (0.001, 0.1), 2)
    assert Grid.from_dict(grid.to_dict()) == grid


def test_quick_gives_way_to_what_is_said():
    grid = new_grid(StudyOptions(quick=True, seeds=4))
    assert (len(grid.rates), grid.seeds) == (3, 4)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("rates", "fast", "the rate 'fast' is no number"),
        ("rates", "0,1", "the rate 0 is not above 0"),
        ("rates", "1,,2", "rates is '1,,2'; give values with commas between"),
        ("rates", "nan", "the rate nan is not above 0"),
        ("forms", "cosine", "no form 'cosine'"),
        ("optimizer", "adam", "no optimizer 'adam'; nearest: adamw"),
        ("seeds", 0, "seeds is 0; give a number from 1"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(option, value, message):
    with pytest.raises(InputError, match=re.escape(message)):
        new_grid(StudyOptions(**{option: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 3}, "steps is 3; give a number from 20"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"warmup": 1.0}, "warmup is 1.0; give a number from 0 to 0.9"),
        ({"images": 1}, "images is 1; give at least 2"),
        ({"data": "no/such/data"}, "'no/such/data' does not exist"),
        ({"model": "resnet"}, "there is no model 'resnet'"),
        ({"model": ""}, "there is no model ''"),
        ({"data": ""}, "no DATA came"),
        ({"device": ""}, "there is no device ''"),
        ({"like": "x", "model": ""}, "--like takes the run's own model"),
        ({"like": "nowhere"}, "nowhere does not exist"),
        ({"like": "x", "data": "digits"}, "--like takes the run's own data; leave out data"),
        ({"resume": True}, "--resume needs --out"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message, tmp_path):
    values = {"out": None if "resume" in changes else tmp_path / "new", **changes}
    with pytest.raises(InputError, match=re.escape(message)):
        study(StudyOptions(**values), say=lambda line: None)


def test_a_folder_that_is_in_use_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="exists already; add --resume"):
        StudyFolder.fresh(tmp_path, "x")
    with pytest.raises(InputError, match="is no study"):
        StudyFolder.open(tmp_path)
    folder = StudyFolder(tmp_path / "study")
    with folder.lock(), pytest.raises(InputError, match="another study is writing"), folder.lock():
        pass


@pytest.mark.parametrize("out", ["/proc/x", "file/x"])
def test_a_folder_that_cannot_be_made_is_refused(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    folder = StudyFolder(out)
    with pytest.raises(InputError, match=rf"^{out} cannot be written \(.*give another"):  # noqa: SIM117
        with folder.lock():
            pass


def test_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = StudyFolder.fresh(None, "digits")
    first.path.mkdir(parents=True)
    assert str(first) == "studies/digits"
    assert str(StudyFolder.fresh(None, "digits")) == "studies/digits-2"


def test_the_plan_is_written_and_read(tmp_path):
    folder = StudyFolder(tmp_path)
    plan = Plan(settings(), Grid(("adamw",), ("none",), (0.1,), 1))
    folder.write_plan(plan)
    assert folder.plan() == plan
    folder.plan_file.write_text('{"format": 1}')
    with pytest.raises(InputError, match="is damaged"):
        folder.plan()


def test_a_resumed_study_is_as_it_was_but_for_what_is_said():
    before = settings(steps=50, batch_size=20)
    options = continued(StudyOptions(resume=True, batch_size=30), before)
    assert (options.steps, options.batch_size, options.images) == (50, 30, 100)
    assert (options.data, options.model) == ("made <b>up", "simple-vit-nano/4")
    old = Grid(("adamw",), ("none", "unit"), (0.1,), 2)
    assert new_grid(StudyOptions(resume=True), old) == old
    assert new_grid(StudyOptions(resume=True, seeds=3), old) == Grid(
        ("adamw",), ("none", "unit"), (0.1,), 3
    )


def test_what_would_change_finished_runs_is_refused():
    with pytest.raises(InputError, match=r"steps is 60, but the study was begun with 40; leave"):
        check_same(settings(), settings(steps=60))
    check_same(settings(), settings())


def test_the_command_on_the_page_makes_the_study_again():
    grid = Grid(("adamw", "muon"), ("none", "unit"), (0.001, 0.1), 2)
    words = command_of(Plan(settings(data="digits"), grid)).split()
    assert words[:3] == ["regard", "study", "digits"]
    values = dict(itertools.pairwise(words))
    options = StudyOptions(
        rates=values["--rates"], forms=values["--forms"], seeds=int(values["--seeds"]),
        optimizer=values["--optimizer"],
    )  # fmt: skip
    assert new_grid(options) == grid
    assert values["--image-size"] == "8"


def test_rates_that_differ_have_names_that_differ():
    grid = new_grid(StudyOptions(rates="0.12345671,0.12345672,1e-5,1,1.00000001e-5,0.3"))
    names = [run.name for run in grid.runs() if (run.form, run.seed) == ("none", 0)]
    assert names == [
        f"adamw-none-{rate}-0"
        for rate in ("1e-05", "1.00000001e-05", "0.12345671", "0.12345672", "0.3", "1")
    ]
    words = command_of(Plan(settings(data="digits"), grid)).split()
    assert new_grid(StudyOptions(rates=words[words.index("--rates") + 1])).rates == grid.rates


def test_workers_are_the_cores_unless_said():
    assert worker_count(3, "cpu") == 3
    assert 1 <= worker_count(None, "cuda") <= 4
    assert Run("adamw", "unit", 0.03, 1).name == "adamw-unit-0.03-1"
