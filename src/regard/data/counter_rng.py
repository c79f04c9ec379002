"""Counter-based randomness: a draw is a hash of what it is for, never the state of a generator.

`key(seed, purpose, epoch, index)` is a uint64 that depends on nothing else, so any process can
make any draw, in any order, and gets the same bits. The hash chains the 64-bit finaliser of
SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# What a draw is for. Draws for different purposes are independent.
SPLIT, ORDER, FLIP, SHIFT, CROP, POLICY, ERASE, MIX, BLOCKS = range(1, 10)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _finalise(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*parts: Any) -> Any:
    """A uint64 from integers or integer arrays, which broadcast; the order of parts matters."""
    state: Any = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # wrapping modulo 2^64 is the arithmetic meant here
        for part in parts:
            word = np.asarray(part).astype(np.uint64)
            state = _finalise((state ^ _finalise(word + _GOLDEN)) + _GOLDEN)
    return state


def uniform(*parts: Any) -> Any:
    """float64 in [0, 1), 53 bits, from integers or integer arrays."""
    return (key(*parts) >> np.uint64(11)) * 2.0**-53


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: positions sorted by their keys, int64."""
    return np.argsort(key(seed, ORDER, epoch, np.arange(count)), kind="stable")


def windowed(blocks: np.ndarray, window: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch that reads few blocks at a time: int64 positions.

    `blocks` (n,) is the block that each position lies in. The blocks are put in a random order;
    a position in one that begins at place p there gets the key p + window · u, u uniform in
    [0, 1), and the positions are sorted by their keys. So what is read at place t lies in blocks
    that begin in (t - window, t]; a window of n or more mixes nearly as a permutation does.
    """
    present, inverse, counts = np.unique(blocks, return_inverse=True, return_counts=True)
    shuffled = np.argsort(key(seed, BLOCKS, epoch, present), kind="stable")
    begins = np.empty(len(present), np.int64)
    begins[shuffled] = np.cumsum(counts[shuffled]) - counts[shuffled]
    places = begins[inverse] + window * uniform(seed, ORDER, epoch, np.arange(len(blocks)))
    return np.argsort(places, kind="stable")


@contextlib.contextmanager
def contained(seed: int) -> Iterator[None]:
    """Let code that draws from the global generators draw from `seed`, then put them back."""
    torch_generator = torch.default_generator
    torch_state = torch_generator.get_state()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
