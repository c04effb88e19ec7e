"""One sum of floats says of each rank whether its flag was set."""

import pytest
import torch

from lightning_moeclip.gradients.rank_flags import flag_fields, flagged_ranks, num_flag_fields


@pytest.mark.parametrize("world_size", [1, 2, 52, 53, 1000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_flags_of_any_ranks_are_read_back_from_their_sum(world_size: int, share: float) -> None:
    is_set = torch.rand(world_size, generator=torch.Generator().manual_seed(world_size)) < share
    rows = [flag_fields(bool(flag), rank=r, world_size=world_size) for r, flag in enumerate(is_set)]
    totals = torch.tensor(rows, dtype=torch.float64).sum(0).tolist()
    assert len(totals) == num_flag_fields(world_size)
    assert flagged_ranks(totals) == tuple(is_set.nonzero().flatten().tolist())
