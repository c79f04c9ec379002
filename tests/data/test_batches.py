import itertools

import numpy as np
import pytest
import torch

from regard.data.augment import Augment
from regard.data.batches import TrainBatches, eval_batches
from regard.data.counter_rng import permutation
from regard.data.memory_cache import remember
from regard.data.open import open_data
from regard.data.preprocess import Preprocess
from regard.errors import InputError

ALL = Augment((0.4, 1.0), (), "random", 1, 0.5, 0.3, 1.0)
PRE = Preprocess((8, 6))


@pytest.fixture
def data(make_folder):
    return open_data(make_folder(train__a=9, train__b=8, train__c=6, val__a=3, val__b=2, val__c=2))


def equal(one, two):
    return one.unreadable == two.unreadable and all(
        torch.equal(getattr(one, name), getattr(two, name))
        for name in ("images", "targets", "labels", "weights", "indices")
    )


def test_steps_walk_through_the_concatenated_permutations(data):
    split = data.splits["train"]
    batches = TrainBatches(split, PRE, batch_size=5, seed=7)
    walked = torch.cat([batch.indices for batch in itertools.islice(batches.start(), 14)])
    expected = np.concatenate([permutation(23, 7, epoch) for epoch in range(4)])[:70]
    assert walked.tolist() == expected.tolist()
    assert batches.steps_per_epoch == 23 / 5


def test_a_batch_holds_what_the_contract_says(data):
    split = data.splits["train"]
    batch = TrainBatches(split, PRE, batch_size=4).at(2)
    assert batch.images.shape == (4, 3, 8, 6)
    assert batch.images.dtype == batch.targets.dtype == batch.weights.dtype == torch.float32
    assert batch.labels.dtype == batch.indices.dtype == torch.int64
    for image, target, label, index in zip(
        batch.images, batch.targets, batch.labels, batch.indices, strict=True
    ):
        assert torch.equal(image, PRE(split.read(int(index))))
        assert label == split.labels[index]
        assert target.tolist() == [float(k == label) for k in range(3)]
    assert batch.weights.tolist() == [1.0] * 4


def test_any_first_step_gives_the_same_batches(data):
    batches = TrainBatches(data.splits["train"], PRE, ALL, batch_size=6, microbatch=3, seed=1)
    run = list(itertools.islice(batches.start(), 9))
    resumed = list(itertools.islice(batches.start(4), 5))
    assert all(equal(a, b) for a, b in zip(run[4:], resumed, strict=True))
    assert equal(batches.at(8), run[8])
    assert not torch.equal(run[0].images, run[4].images)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_together_give_the_batch_of_one(data, world):
    def make(rank=0, world=1):
        return TrainBatches(
            data.splits["train"], PRE, ALL, batch_size=12, microbatch=3, rank=rank, world=world
        )

    for step in (0, 3):
        parts = [make(rank, world).at(step) for rank in range(world)]
        whole = make().at(step)
        for name in ("images", "targets", "labels", "weights", "indices"):
            together = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(together, getattr(whole, name))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_change_nothing(data):
    (data.splits["train"].source.root / "train/a/00.png").write_bytes(b"torn")
    held = remember(data, 5000)
    state = torch.get_rng_state()
    for workers in (1, 3):
        for source in (data, held):
            arguments = {"batch_size": 6, "microbatch": 2, "seed": 3}
            here = TrainBatches(data.splits["train"], PRE, ALL, **arguments)
            there = TrainBatches(source.splits["train"], PRE, ALL, **arguments, workers=workers)
            for step, batch in enumerate(itertools.islice(there.start(2), 6), start=2):
                assert equal(batch, here.at(step))
    split = data.splits["val"]
    evaluated = eval_batches(split, PRE, batch_size=3, workers=2)
    expected = eval_batches(split, PRE, batch_size=3)
    assert all(equal(a, b) for a, b in zip(evaluated, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_meets_each_picture_once(data, world):
    split = data.splits["val"]
    met = []
    for rank in range(world):
        for batch in eval_batches(split, PRE, batch_size=2, rank=rank, world=world):
            met += batch.indices.tolist()
            for image, index in zip(batch.images, batch.indices, strict=True):
                assert torch.equal(image, PRE(split.read(int(index))))
    assert sorted(met) == list(range(len(split)))


def test_an_unreadable_picture_weighs_nothing_and_is_named(data):
    root = data.splits["train"].source.root
    (root / "train/b/03.png").write_bytes(b"no picture")
    (root / "val/a/01.png").unlink()
    batches = TrainBatches(data.splits["train"], PRE, ALL, batch_size=23)
    batch = batches.at(0)
    bad = batch.weights == 0
    assert int(bad.sum()) == 1
    ((index, name, reason),) = batch.unreadable
    assert batch.indices[bad].tolist() == [index]
    assert name == "train/b/03.png"
    assert reason.startswith("no known picture format")
    assert [part.unreadable for part in batch.split(1) if part.unreadable] == [batch.unreadable]
    plain = TrainBatches(data.splits["train"], PRE, batch_size=23).at(0)
    assert plain.images[plain.weights == 0].abs().max() == 0
    (val,) = eval_batches(data.splits["val"], PRE, batch_size=9)
    assert val.weights.tolist() == [1, 0, 1, 1, 1, 1, 1]
    assert val.unreadable[0][1:] == ("val/a/01.png", "No such file or directory")


def test_splitting_gives_the_microbatches(data):
    batches = TrainBatches(data.splits["train"], PRE, ALL, batch_size=8, microbatch=4)
    for m, part in enumerate(batches.at(1).split(4)):
        assert equal(part, batches.part(1, m))


def test_memory_changes_no_bit_and_says_what_it_holds(data):
    each = 12 * 10 * 3
    for budget, count in ((0, 0), (7 * each, 7), (10**6, 30)):
        held = remember(data, budget)
        assert held.notes[-1].startswith(f"{count} of 30 pictures are kept decoded in memory, ")
        for augment in (Augment(flip="random", shift=2), ALL):
            for pre in (PRE, Preprocess((10, 12))):
                one = TrainBatches(data.splits["train"], pre, augment, batch_size=9)
                two = TrainBatches(held.splits["train"], pre, augment, batch_size=9)
                assert equal(one.at(3), two.at(3))
    with pytest.raises(InputError, match="memory budget is -1"):
        remember(data, -1)


def test_memory_does_not_read_again(data):
    held = remember(data)
    for path in data.splits["train"].source.root.rglob("*.png"):
        path.unlink()
    assert TrainBatches(held.splits["train"], PRE, batch_size=23).at(0).weights.all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 10, "microbatch": 4}, "choose batch_size a multiple of 4"),
        ({"batch_size": 8, "microbatch": 4, "world": 4}, "choose batch_size a multiple of 16"),
        ({"batch_size": 0}, "batch of 0 is not"),
        ({"batch_size": 4, "rank": 2, "world": 2}, "rank is 2 of world 2"),
        ({"batch_size": 4, "workers": -1}, "workers is -1"),
    ],
)
def test_bad_arguments_are_refused(data, arguments, message):
    with pytest.raises(InputError, match=message):
        TrainBatches(data.splits["train"], PRE, **arguments)


def test_negative_steps_and_empty_splits_are_refused(data):
    batches = TrainBatches(data.splits["train"], PRE, batch_size=4)
    for call in (batches.at, batches.start):
        with pytest.raises(InputError, match="step is -1"):
            next(iter(call(-1)))
    with pytest.raises(InputError, match="the training split is empty"):
        TrainBatches(data.splits["train"].take([]), PRE, batch_size=4)
    with pytest.raises(InputError, match="batch_size is 0"):
        eval_batches(data.splits["val"], PRE, batch_size=0)
