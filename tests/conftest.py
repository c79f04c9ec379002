"""No test fails by the draw: each starts from the same random numbers whatever ran before it, and
property tests draw the same examples in every run (`--hypothesis-profile=search` draws new ones).
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("fixed", derandomize=True, **SLOW)
settings.register_profile("search", derandomize=False, **SLOW)
settings.load_profile("fixed")


def seed_all():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    seed_all()  # for the fixtures of modules and sessions


@pytest.fixture(autouse=True)
def same_random_numbers():
    seed_all()
