import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.preprocess import Box, Geometry, Preprocess, resize
from regard.errors import InputError

RAMP = torch.arange(4 * 6, dtype=torch.uint8).reshape(1, 4, 6)


def antialiased_row(values, count):
    """One row resized by the triangle filter, in plain float64 loops."""
    scale = len(values) / count
    reach = max(scale, 1.0)
    out = []
    for i in range(count):
        centre = (i + 0.5) * scale
        weights = [max(0.0, 1 - abs((j + 0.5 - centre) / reach)) for j in range(len(values))]
        out.append(sum(w * float(v) for w, v in zip(weights, values, strict=True)) / sum(weights))
    return out


@pytest.mark.parametrize(
    ("height", "width", "h", "w"), [(9, 14, 4, 5), (3, 5, 7, 6), (8, 8, 3, 12)]
)
def test_resize_is_the_triangle_filter_along_rows_and_columns(height, width, h, w):
    picture = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (3, height, width), np.uint8)
    )
    rows = np.array([[antialiased_row(row, w) for row in plane] for plane in picture.tolist()])
    both = np.array([[antialiased_row(col, h) for col in plane.T] for plane in rows])
    expected = both.transpose(0, 2, 1)
    assert np.abs(resize(picture, (h, w)).numpy() - expected).max() < 1e-3


def test_a_picture_of_the_right_size_is_only_normalised():
    preprocess = Preprocess((4, 6), channels=1, mean=(0.25,), std=(0.5,))
    expected = (RAMP.double() / 255 - 0.25) / 0.5
    for fit in ("stretch", "crop", "letterbox"):
        got = Preprocess((4, 6), fit, 1, (0.25,), (0.5,))(RAMP)
        assert got.dtype == torch.float32
        assert torch.allclose(got.double(), expected, atol=1e-6)
    assert torch.equal(preprocess.denormalise(preprocess(RAMP)), RAMP)


def test_crop_takes_the_largest_centred_part():
    shown = Preprocess((4, 4), "crop", 1).shown(RAMP)
    assert torch.equal(shown, RAMP[:, :, 1:5])
    assert Preprocess((2, 4), "crop").geometry(100, 60).source == Box(35, 0, 30, 60)
    assert Preprocess((2, 4), "crop").geometry(10, 300).source == Box(0, 140, 10, 20)


def test_letterbox_pads_with_the_mean():
    preprocess = Preprocess((8, 6), "letterbox", 1, (0.4,), (0.2,))
    got = preprocess(RAMP)
    assert torch.equal(got[:, :2], torch.zeros(1, 2, 6))
    assert torch.equal(got[:, 6:], torch.zeros(1, 2, 6))
    assert torch.equal(preprocess.shown(RAMP)[:, 2:6], RAMP)
    assert preprocess.shown(RAMP)[0, 0].tolist() == [102] * 6


def test_extreme_shapes_keep_at_least_a_pixel():
    thin = torch.full((3, 1, 4000), 7, dtype=torch.uint8)
    for fit in ("stretch", "crop", "letterbox"):
        preprocess = Preprocess((16, 16), fit)
        assert preprocess.shown(thin).shape == (3, 16, 16)
        assert (preprocess.shown(thin) == 7).any()


SIDES = st.integers(1, 60)


@settings(max_examples=60)
@given(SIDES, SIDES, SIDES, SIDES, st.sampled_from(["stretch", "crop", "letterbox"]))
def test_places_lead_back_to_the_picture(height, width, h, w, fit):
    geometry = Preprocess((h, w), fit).geometry(height, width)
    source, target = geometry
    corners = torch.tensor(
        [
            [target.top, target.left],
            [target.top + target.height, target.left + target.width],
        ],
        dtype=torch.float64,
    )
    expected = torch.tensor(
        [
            [source.top, source.left],
            [source.top + source.height, source.left + source.width],
        ],
        dtype=torch.float64,
    )
    assert torch.allclose(geometry.to_picture(corners), expected, atol=1e-9)
    assert torch.allclose(geometry.to_input(expected), corners, atol=1e-9)
    assert source.top >= 0
    assert source.top + source.height <= height
    assert source.left >= 0
    assert source.left + source.width <= width


def test_a_bright_spot_is_found_again_where_it_was():
    picture = torch.zeros(1, 90, 200, dtype=torch.uint8)
    picture[0, 60:64, 110:114] = 255  # centred at (62, 112)
    for fit in ("stretch", "crop", "letterbox"):
        preprocess = Preprocess((45, 45), fit, 1)
        values = preprocess.fitted(picture)[0].double()
        if fit == "letterbox":
            values[values == 127.5] = 0
        ys, xs = torch.meshgrid(*(torch.arange(45) + 0.5,) * 2, indexing="ij")
        centre = torch.stack([(values * ys).sum(), (values * xs).sum()]) / values.sum()
        found = preprocess.geometry(90, 200).to_picture(centre)
        assert (found - torch.tensor([62.0, 112.0])).abs().max() < 0.3, fit


def test_geometry_of_a_known_letterbox():
    geometry = Preprocess((8, 8), "letterbox").geometry(10, 20)
    assert geometry == Geometry(Box(0, 0, 10, 20), Box(2, 0, 4, 8))
    assert geometry.to_picture(torch.tensor([4.0, 2.0])).tolist() == [5.0, 5.0]


def test_survives_json():
    preprocess = Preprocess((5, 7), "letterbox", 3, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": (0, 4)}, r"size is \(0, 4\); give \(height, width\)"),
        ({"size": (4, 4), "fit": "strech"}, "fit is 'strech'; nearest: stretch"),
        ({"size": (4, 4), "channels": 2}, "channels is 2"),
        ({"size": (4, 4), "mean": (0.5,)}, "give 3 finite values"),
        ({"size": (4, 4), "std": (0.5, 0.0, 0.5)}, "every value must be above 0"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Preprocess(**arguments)


def test_bad_pictures_and_records_are_refused():
    with pytest.raises(InputError, match=r"float32 came; uint8"):
        Preprocess((4, 4))(torch.zeros(3, 4, 4))
    with pytest.raises(InputError, match="a picture of 1 channels came"):
        Preprocess((4, 4))(RAMP)
    with pytest.raises(InputError, match="does not know 'colour'"):
        Preprocess.from_dict({"size": [4, 4], "colour": 1})
    with pytest.raises(InputError, match="lacks 'size'"):
        Preprocess.from_dict({"fit": "crop"})
