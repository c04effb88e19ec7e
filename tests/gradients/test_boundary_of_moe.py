"""Our MoE as a region: the auxiliary loss reads logits that its forward does not return."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.gradients.boundary import Region, attach
from lightning_moeclip.gradients.graph_check import find_leaks
from lightning_moeclip.modules import MoE, auxiliary_loss
from lightning_moeclip.parallel.regions import resolve_regions

WIDTH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, WIDTH, 3), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(self.stem(x)).pow(2).mean() + auxiliary_loss(self, balance=0.5, z=0.5)


@pytest.mark.parametrize("paths", [None, ["tower"], ["tower", "tower.1"]])
def test_auxiliary_loss_of_a_moe_in_regions_is_bit_equal(paths: list[str] | None) -> None:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = Net()
    net = copy.deepcopy(plain)
    plain(x).backward()
    specs = resolve_regions(net, paths)
    regions = {spec.name: Region(spec.name, scale=2.0 ** (4 + 3 * index)) for index, spec in enumerate(specs)}
    owners: dict[int, tuple[Region, ...]] = {}
    for spec in specs:
        attach(spec.modules, regions[spec.name])
        for parameter in spec.parameters:
            owners.setdefault(parameter, tuple(regions[name] for name in (*spec.ancestors, spec.name)))
    loss = net(x)
    assert find_leaks(loss, owners, {id(p): name for name, p in net.named_parameters()}) == []
    loss.backward()
    for (name, found), wanted in zip(net.named_parameters(), plain.parameters(), strict=True):
        scale = torch.ones(())
        for region in owners.get(id(found), ()):
            scale = scale * region.scale
        assert torch.equal(found.grad / scale, wanted.grad), name
