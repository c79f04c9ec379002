"""`regard look` on a run folder."""

import re
from pathlib import Path

import numpy as np
import pytest

from regard._png import png
from regard.data.decode import UnreadableImage
from regard.errors import InputError
from regard.pages.look import LookOptions, distinct, look
from regard.training.config import TrainConfig
from regard.training.trainer import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("looked") / "run"
    train(TrainConfig(data="digits", steps=2, batch_size=32, out=out), say=lambda line: None)
    return out


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    paths = []
    for name in ("a b.png", "<i>.png", "sub/a b.png"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(draw.integers(0, 256, (20, 30), dtype=np.uint8)))
        paths.append(path)
    return paths


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_one_picture_gets_a_page_and_two_pngs(run, pictures):
    result = look(LookOptions(run=run, images=(pictures[0],), at="29,1", class_="3"))
    assert result.page == run / "look" / "look.html"
    assert names(run / "look") == ["a b-heads.png", "a b.png", "look.html"]
    assert result.pictures == (run / "look" / "a b.png", run / "look" / "a b-heads.png")
    text = result.page.read_text()
    assert '"view": "relevance"' in text
    assert re.search(r'"relevance": \[\{"name": "3"', text)
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_several_pictures_get_an_index_and_a_measurement(run, pictures, tmp_path):
    out = tmp_path / "seen"
    result = look(LookOptions(run=run, images=tuple(pictures), out=out, faithfulness=True))
    ends = ("-heads.png", ".html", ".png")
    written = [f"{stem}{end}" for stem in ("a b", "<i>", "a b-2") for end in ends]
    assert names(out) == sorted([*written, "look.html"])
    index = result.page.read_text()
    for address in ("a%20b.html", "%3Ci%3E.html", "a%20b-2.html"):
        assert f'href="{address}"' in index
    assert "<i>" not in index.replace("<i>.png", "")
    assert list(result.faithfulness) == ["relevance", "random", "centre"]
    for areas in result.faithfulness.values():
        assert 0 < areas["deletion"] < 1
        assert 0 < areas["insertion"] < 1


def test_files_of_others_are_not_written_over(run, pictures, tmp_path):
    out = tmp_path / "theirs"
    out.mkdir()
    (out / "look.html").write_text("precious")
    options = LookOptions(run=run, images=(pictures[0],), out=out)
    with pytest.raises(InputError, match="holds files that `regard look` did not write"):
        look(options)
    assert (out / "look.html").read_text() == "precious"
    (out / "look.html").unlink()
    first = look(options).page.read_text()
    assert look(options).page.read_text() == first  # our own are


def test_pictures_are_not_written_over(run, pictures):
    before = pictures[0].read_bytes()
    with pytest.raises(InputError, match=r"a b\.png and a b-heads\.png would be written"):
        look(LookOptions(run=run, images=(pictures[0],), out=pictures[0].parent / "."))
    assert pictures[0].read_bytes() == before
    assert "look.html" not in names(pictures[0].parent)


def test_what_is_not_there_is_refused(run, pictures, tmp_path):
    def refused(match, error=InputError, images=(pictures[0],), **options):
        with pytest.raises(error, match=match):
            look(LookOptions(run=run, images=images, out=tmp_path / "x", **options))

    refused("head 9 is not there: .* has heads 1 to", head=9)
    refused("there is no layer '99'; give 1 to", layer="99")
    refused("there is no class 'cow'; the model knows '0'", class_="cow")
    refused("x=400, y=2 is outside what the model saw", at="400,2")
    refused("at is '4'; give X,Y in pixels", at="4")
    refused("there is no device 'tpu9'; give auto", device="tpu9")
    refused("no pictures came", images=())
    refused("none.png cannot be read", images=(tmp_path / "none.png",))
    assert not (tmp_path / "x").exists()
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    refused("broken.png cannot be read", error=UnreadableImage, images=(broken,))


def test_file_stems_are_made_distinct():
    assert distinct(["a", "b", "a", "a-2", "look"]) == ["a", "b", "a-2", "a-2-2", "look-2"]
