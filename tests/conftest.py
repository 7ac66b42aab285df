"""Owns what holds for every test: one thread, the same random numbers at each start, no noise from Megatron-Core."""

from __future__ import annotations

import logging
import os
import random

import pytest

# Read when torch is imported and by the processes that tests start, hence before the imports below.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy
import torch

SEED = 1234


def pytest_configure() -> None:
    """One thread, whatever the environment says: sums are then made in one order, and ranks do not fight."""
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same generators, alone or among others."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
