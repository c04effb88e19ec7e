"""The random numbers of this process: their states, to be put back, and streams that go on from there another way."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["begin_another_stream", "random_states", "set_random_states"]


def random_states() -> dict[str, Any]:
    """States of all generators, by library."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put back what ``random_states`` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def begin_another_stream(number: int) -> None:
    """Seed the generators of the host anew, from their states and a number.

    Equal states stay equal; numbers that differ give seeds that differ.

    Args:
        number: not below 0.
    """
    random.seed(random.getrandbits(64) + number)
    np.random.seed((int(np.random.randint(2**32, dtype=np.int64)) + number) % 2**32)
    # not torch.manual_seed, which seeds GPUs too: what they draw, such as dropout, orders no data
    generator = torch.default_generator
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    generator.manual_seed((int(drawn) + number) % 2**63)
