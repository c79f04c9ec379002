import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from regard.data.augment import (
    Augment,
    _crop_box,
    _mirrored,
    erase_boxes,
    flip_and_shift,
    load_picture,
    mix,
)
from regard.data.preprocess import Preprocess
from regard.errors import InputError

N = 600
EPOCHS, INDICES = np.zeros(N, np.int64), np.arange(N)
ROW = torch.arange(5.0).expand(N, 1, 4, 5)


def test_random_flip_mirrors_half_of_the_pictures():
    out = flip_and_shift(ROW, Augment(flip="random"), 0, EPOCHS, INDICES)
    mirrored = (out == ROW.flip(3)).all((1, 2, 3))
    assert ((out == ROW).all((1, 2, 3)) ^ mirrored).all()
    assert 0.42 < mirrored.float().mean() < 0.58
    again = flip_and_shift(ROW[:7], Augment(flip="random"), 0, EPOCHS[:7], INDICES[:7])
    assert torch.equal(again, out[:7])


def test_alternate_flip_shows_both_sides_in_every_two_epochs():
    shown = [
        flip_and_shift(ROW, Augment(flip="alternate"), 0, EPOCHS + epoch, INDICES)
        for epoch in range(3)
    ]
    assert torch.equal(shown[1], shown[0].flip(3))
    assert torch.equal(shown[2], shown[0])
    assert 0.42 < (shown[0] == ROW).all(3).all(2).float().mean() < 0.58


def test_shift_moves_by_up_to_its_reach_each_way_and_mirrors_the_border():
    picture = torch.arange(30.0).reshape(1, 1, 5, 6).expand(N, 1, 5, 6)
    padded = torch.nn.functional.pad(picture[:1], (2, 2, 2, 2), mode="reflect")[0]
    windows = {
        (y, x): padded[:, y : y + 5, x : x + 6].flatten().tolist()
        for y in range(5)
        for x in range(5)
    }
    out = flip_and_shift(picture, Augment(shift=2), 3, EPOCHS, INDICES).flatten(1).tolist()
    counts = {place: sum(row == window for row in out) for place, window in windows.items()}
    assert sum(counts.values()) == N
    assert min(counts.values()) > 5


def test_mirroring_goes_on_past_one_reflection():
    assert _mirrored(np.arange(-4, 7), 3).tolist() == [0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2]
    assert _mirrored(np.arange(-2, 3), 1).tolist() == [0] * 5


def test_erased_boxes_are_zero_and_of_the_stated_area():
    ones = torch.ones(N, 2, 40, 40)
    out = erase_boxes(ones, 0.25, 1, EPOCHS, INDICES)
    gone = out == 0
    assert torch.equal(gone[:, 0], gone[:, 1])
    areas = gone[:, 0].float().mean((1, 2))
    hit = areas > 0
    assert 0.18 < hit.float().mean() < 0.32
    assert areas[hit].min() > 0.012
    assert areas.max() < 0.35
    for picture in gone[hit, 0]:  # a box: the product of its rows and columns
        assert torch.equal(picture, picture.any(1)[:, None] & picture.any(0)[None])
    assert erase_boxes(ones, 0.0, 1, EPOCHS, INDICES) is ones


def test_random_crops_have_the_stated_share_and_lie_inside():
    picture = torch.zeros(3, 60, 90, dtype=torch.uint8)
    boxes = [_crop_box(picture, (0.1, 0.5), Preprocess((8, 8)), 0, 0, i) for i in range(N)]
    shares = np.array([box.height * box.width for box in boxes]) / (60 * 90)
    assert 0.09 < shares.min() < 0.15
    assert 0.4 < shares.max() < 0.51
    ratios = np.array([box.width / box.height for box in boxes])
    assert 0.7 < ratios.min() < 0.85
    assert 1.2 < ratios.max() < 1.42
    assert all(0 <= b.top <= 60 - b.height and 0 <= b.left <= 90 - b.width for b in boxes)
    assert len({(box.top, box.left) for box in boxes}) > N / 2


def test_the_whole_picture_as_random_crop_of_its_own_shape():
    picture = torch.randint(0, 256, (3, 9, 9), dtype=torch.uint8)
    boxes = [_crop_box(picture, (1.0, 1.0), Preprocess((9, 9)), 0, 0, i) for i in range(50)]
    assert all(max(box.height, box.width) == 9 for box in boxes)


def test_randaugment_is_keyed_and_leaves_the_global_generator_alone():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    picture = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    augment, preprocess = Augment(randaugment=(2, 9)), Preprocess((16, 16))
    state = torch.get_rng_state()
    shown = [load_picture(picture, preprocess, augment, 0, e, i) for e in (0, 1) for i in range(10)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len({tuple(image.flatten().tolist()) for image in shown}) > 10
    torch.rand(3)
    assert torch.equal(load_picture(picture, preprocess, augment, 0, 1, 9), shown[-1])
    from regard.data.counter_rng import POLICY, contained, key

    with contained(int(key(0, POLICY, 1, 9))):
        assert torch.equal(v2.RandAugment(2, 9)(picture).float(), shown[-1])


def test_randaugment_takes_grey_pictures():
    pytest.importorskip("torchvision")
    picture = torch.randint(0, 256, (1, 16, 16), dtype=torch.uint8)
    augment, preprocess = Augment(randaugment=(3, 15)), Preprocess((16, 16), channels=1)
    for i in range(40):
        assert load_picture(picture, preprocess, augment, 0, 0, i).shape == (1, 16, 16)


def mixed(augment, weights=None, microbatch=0):
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    targets = torch.eye(6)
    weights = torch.ones(6) if weights is None else weights
    return images, *mix(images, targets, weights, augment, 0, 5, microbatch)


def test_mixup_blends_images_and_targets_alike():
    images, out, targets = mixed(Augment(mixup=1.0))
    # Targets of one-hot rows are the blending weights themselves.
    assert torch.allclose(out, torch.einsum("bk,kchw->bchw", targets, images), atol=1e-6)
    assert torch.allclose(targets.sum(1), torch.ones(6))
    assert 0 < targets.diagonal().min() < 1


def test_cutmix_targets_are_the_shares_of_the_area():
    for microbatch in range(20):
        images, out, targets = mixed(Augment(cutmix=1.0), microbatch=microbatch)
        for b in range(6):
            own = (out[b] == images[b]).all(0).float().mean()
            assert torch.isclose(targets[b, b], own, atol=1e-6)
            other = targets[b].clone()
            other[b] = 0
            if own < 1:
                k = int(other.argmax())
                assert ((out[b] == images[b]) | (out[b] == images[k])).all()


def test_mixing_depends_on_step_and_microbatch_and_takes_both_kinds():
    both = Augment(mixup=1.0, cutmix=1.0)
    outs = [mixed(both, microbatch=m)[1] for m in range(12)]
    assert len({tuple(out.flatten().tolist()) for out in outs}) == 12
    assert torch.equal(mixed(both, microbatch=3)[1], outs[3])
    images = mixed(both)[0]
    cut = [bool(torch.isin(out, images).all()) for out in outs]
    assert 0 < sum(cut) < 12


def test_a_partner_that_could_not_be_read_is_not_mixed_in():
    weights = torch.tensor([1.0, 0, 1, 0, 1, 0])
    for augment in (Augment(mixup=1.0), Augment(cutmix=1.0)):
        images, out, targets = mixed(augment, weights, microbatch=1)
        assert targets[weights == 1][:, weights == 0].eq(0).all()
        whole = targets.diagonal() == 1
        assert torch.equal(out[whole], images[whole])


def test_survives_json():
    augment = Augment((0.2, 1.0), (2, 9), "alternate", 4, 0.25, 0.2, 1.0)
    assert Augment.from_dict(json.loads(json.dumps(augment.to_dict()))) == augment


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crop_scale": (0.0, 1.0)}, r"give \(low, high\)"),
        ({"randaugment": (0, 9)}, r"give \(operations, magnitude\)"),
        ({"flip": "vertical"}, "flip is 'vertical'"),
        ({"shift": -1}, "shift is -1"),
        ({"erase": 1.5}, "erase is 1.5"),
        ({"mixup": -0.1}, "mixup is -0.1 and cutmix 0.0"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(Augment(), **change)


def test_unknown_augmentations_are_refused():
    with pytest.raises(InputError, match="no augmentation 'mixupp'; nearest: mixup"):
        Augment.from_dict({"mixupp": 1})
