"""Streams of random numbers that go on another way than those that were restored."""

import random

import numpy as np
import torch

from lightning_moeclip.state.random_numbers import begin_another_stream, random_states, set_random_states


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1, dtype=torch.float64).item()]


def test_streams_differ_by_state_and_by_number_and_by_nothing_else() -> None:
    before, found = random_states(), []
    try:
        for seed, number in ((1, 1), (1, 1), (1, 2), (2, 1)):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            kept = draws()
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            with torch.device("meta"):  # a default that draws nothing
                begin_another_stream(number)
            found.append(draws())
            assert all(a != b for a, b in zip(kept, found[-1], strict=True))
    finally:
        set_random_states(before)
    first, same, *others = found
    assert first == same
    for other in others:
        assert all(a != b for a, b in zip(first, other, strict=True))
