"""Files of a study that parse and are damaged: refused by name."""

import json
import math
import re

import pytest

from regard.errors import InputError
from regard.study.plan import Grid, Plan, StudyFolder, StudyOptions
from regard.study.study import study
from tests.study.conftest import result, settings

GRID = Grid(("adamw",), ("none", "unit"), (0.01, 0.1), 1)


@pytest.fixture
def folder(tmp_path):
    made = StudyFolder(tmp_path)
    made.runs.mkdir()
    made.write_plan(Plan(settings(), GRID))
    for run in GRID.runs():
        made.write_run(run, result(run, None if run.rate == 0.1 else 0.5, 0.9))
    return made


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def each(name, **changes):
    """A change of every entry of a series."""
    return lambda r: [entry.update(changes) for entry in r[name]]


RUNS = {
    "no points": lambda r: r.update(points=[]),
    "no losses": lambda r: r.update(losses=[]),
    "losses null": lambda r: r.update(losses=None),
    "checks null": lambda r: r.update(checks=None),
    "checks a number": lambda r: r.update(checks=3),
    "points of numbers": lambda r: r.update(points=[1, 2]),
    "an accuracy of words": lambda r: r.update(accuracy="x"),
    "an accuracy of NaN": lambda r: r.update(accuracy=math.nan),
    "an accuracy of 2": lambda r: r.update(accuracy=2),
    "a loss of NaN": lambda r: r.update(final_loss=math.nan),
    "a loss that is too large": lambda r: r.update(initial_loss=10**400),
    "a lost initial loss": lambda r: r.update(initial_loss=None),
    "a flag for a number": lambda r: r.update(held_out_loss=True),
    "a step of words": lambda r: r.update(diverged_at="x"),
    "no seconds": lambda r: r.pop("seconds"),
    "no checks": lambda r: r.pop("checks"),
    "no rate": lambda r: r.pop("rate"),
    "no logit at all": each("points", largest_logit=[None, None]),
    "no gradient at all": each("points", gradient_norm=None),
    "no layers": each("points", largest_logit=[], entropy=[]),
    "a layer less": lambda r: r["points"][1].update(entropy=[1.0]),
    "another model": each("points", largest_logit=[1.0], entropy=[1.0]),
    "a measurement without step": lambda r: r["points"][0].pop("step"),
    "a check of NaN": each("checks", accuracy=math.nan),
    "a loss of words": each("losses", loss="x"),
}


@pytest.mark.parametrize("damage", RUNS)
def test_a_damaged_run_is_refused_by_name(damage, folder):
    assert len(folder.results(GRID)) == 4
    path = folder.run_file(GRID.runs()[1])
    edit(path, RUNS[damage])
    with pytest.raises(InputError, match=re.escape(f"{path} is damaged, or was changed by hand")):
        folder.results(GRID)


def test_a_run_file_that_is_no_object_is_refused_by_name(folder):
    path = folder.run_file(GRID.runs()[0])
    path.write_text("[]")
    with pytest.raises(InputError, match=re.escape(f"{path} is damaged")):
        folder.results(GRID)


PLANS = {
    "grid.seeds": lambda p: p["grid"].update(seeds="x"),
    "grid.seeds is 0": lambda p: p["grid"].update(seeds=0),
    "grid.rates is []": lambda p: p["grid"].update(rates=[]),
    "grid.rates is [-1]": lambda p: p["grid"].update(rates=[-1]),
    "grid.rates is [0.1, 0.1]": lambda p: p["grid"].update(rates=[0.1, 0.1]),
    "grid.rates is [NaN]": lambda p: p["grid"].update(rates=[math.nan]),
    "grid.forms is ['x']": lambda p: p["grid"].update(forms=["x"]),
    "grid.optimizers is 'adamw'": lambda p: p["grid"].update(optimizers="adamw"),
    "'forms'": lambda p: p["grid"].pop("forms"),
    "'name'": lambda p: p["settings"].update(model={}),
    "settings.model.image_size is [8]": lambda p: p["settings"]["model"].update(image_size=[8]),
    "settings.model is None": lambda p: p["settings"].update(model=None),
    "settings.steps is '40'": lambda p: p["settings"].update(steps="40"),
    "settings.data is 3": lambda p: p["settings"].update(data=3),
    "settings.like is []": lambda p: p["settings"].update(like=[]),
    "'cap'": lambda p: p["settings"].pop("cap"),
    "unexpected keyword argument 'odd'": lambda p: p["settings"].update(odd=1),
}


@pytest.mark.parametrize("words", PLANS)
def test_a_damaged_plan_is_refused_by_name(words, folder):
    edit(folder.plan_file, PLANS[words])
    words = words.replace("NaN", "nan")
    expected = re.escape(f"{folder.plan_file} is damaged, or was changed by hand (")
    with pytest.raises(InputError, match=f"{expected}.*{re.escape(words)}"):
        study(StudyOptions(out=folder.path, resume=True), say=lambda line: None)


def test_a_setting_out_of_range_is_refused_with_the_file(folder):
    edit(folder.plan_file, lambda plan: plan["settings"].update(steps=3))
    with pytest.raises(InputError, match=re.escape(f"{folder.plan_file}: steps is 3; give")):
        study(StudyOptions(out=folder.path, resume=True), say=lambda line: None)
