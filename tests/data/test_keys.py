import random

import numpy as np
import pytest
import torch

from regard.data import counter_rng as keys

MASK = (1 << 64) - 1


def splitmix_finaliser(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def key_in_plain_integers(*parts: int) -> int:
    golden, state = 0x9E3779B97F4A7C15, 0
    for part in parts:
        word = splitmix_finaliser(((part & MASK) + golden) & MASK)
        state = splitmix_finaliser(((state ^ word) + golden) & MASK)
    return state


@pytest.mark.parametrize("parts", [(0,), (1, 2, 3), (7, 2**63 + 5, 0), (3, 2, 1)])
def test_key_is_the_hash_written_in_plain_integers(parts):
    assert int(keys.key(*parts)) == key_in_plain_integers(*parts)


def test_finaliser_is_splitmix64():
    # The first outputs of SplitMix64 from seed 0, as published with the generator.
    golden = 0x9E3779B97F4A7C15
    states = np.array([(golden * k) & MASK for k in (1, 2, 3)], np.uint64)
    outputs = keys._finalise(states).tolist()
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_arrays_and_scalars_agree_and_order_matters():
    together = keys.key(5, np.arange(4)[:, None], np.arange(3))
    assert together.shape == (4, 3)
    assert all(together[i, j] == keys.key(5, i, j) for i in range(4) for j in range(3))
    assert keys.key(1, 2) != keys.key(2, 1)


def test_uniform_draws_are_uniform_and_neighbours_independent():
    draws = keys.uniform(0, np.arange(300)[:, None], np.arange(200))
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    expected = draws.size / 20
    # chi-squared with 19 degrees of freedom: 99.99% lie below 50.8
    assert ((counts - expected) ** 2 / expected).sum() < 50.8
    assert draws.min() >= 0
    assert draws.max() < 1
    for shifted in (draws[1:].ravel() * draws[:-1].ravel(), draws[:, 1:] * draws[:, :-1]):
        assert abs(shifted.mean() - 0.25) < 5 * np.sqrt(7 / 144 / draws.size)


def test_permutation_holds_each_position_once_and_changes_with_seed_and_epoch():
    orders = [tuple(keys.permutation(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 4


def test_contained_seeds_the_global_generators_and_puts_them_back():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    undisturbed = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    inside = []
    for _ in range(2):
        with keys.contained(2**64 - 1):
            inside.append((torch.rand(2).tolist(), random.random(), np.random.rand()))
    assert inside[0] == inside[1]
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == undisturbed
