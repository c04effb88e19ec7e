"""DeepSpeed's ``moe.layer.MoE`` under the strategy on CPU: as in one process, and saved as one process would."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import contrastive_loss, paired_features
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.interop.live_models import DeepSpeedTowers
from tests.models import batches, gradient_errors, gradients_of, loader, quiet_trainer, share

# DeepSpeed computes the gate in float32 whatever the module is in: six products and sums of a logit, the softmax over
# four and the division by the sum of two are some twenty roundings. With a gate in float64 nothing is left of them
BOUNDS = {"float": 20 * 2.0**-24, "double": 1e-10}
NUM_STEPS = 2
LIST = re.compile(r"(?<=deepspeed_experts\.)\d+")


class Trained(LightningModule):
    """What a user writes around DeepSpeed's layers."""

    def __init__(self, ep_size: int, rank: int = 0, *, gate: str = "float") -> None:
        super().__init__()
        self.gate = gate
        self.model = DeepSpeedTowers(ep_size, rank)
        self.double()
        self.gradients: list[dict[str, Tensor | None]] = []

    def configure_model(self) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        for layer in self.modules():
            if isinstance(layer, deepspeed.moe.layer.MoE) and layer.deepspeed_moe.ep_group is None:
                layer.set_deepspeed_parallelism()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with mock.patch.object(torch.Tensor, "float", getattr(torch.Tensor, self.gate)):
            image, text = paired_features(self.model(*batch))
        return contrastive_loss(image, text, self.model.logit_scale)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@on_ranks(2, timeout_s=240.0)
def two(rank: Rank, folder: str) -> dict[str, Any]:
    return {(ep, gate): trained(rank, ep, gate, folder) for ep in (2, 1) for gate in BOUNDS}


@on_ranks(4, timeout_s=240.0)
def four(rank: Rank, folder: str) -> dict[str, Any]:
    return {(2, gate): trained(rank, 2, gate, folder) for gate in BOUNDS}


def trained(rank: Rank, ep: int, gate: str, folder: str) -> Any:
    module = Trained(ep, rank.index, gate=gate)
    strategy = MoEClipStrategy(expert_parallel_size=ep)
    trainer = quiet_trainer(rank.world_size, strategy=strategy)
    rows = [8 // rank.world_size] * rank.world_size
    trainer.fit(module, loader(share(batches(NUM_STEPS), rows, rank.index)))
    trainer.save_checkpoint(f"{folder}/{rank.world_size}_{ep}_{gate}.ckpt")
    comparison = strategy.compare({"parameters", "optimizer"})
    return module.gradients, comparison.differences, comparison.unwatched


@on_ranks(1, timeout_s=240.0)
def one(rank: Rank) -> Any:
    """A process group of one, without which DeepSpeed's layer does not run."""
    return {gate: alone(gate) for gate in BOUNDS}


def alone(gate: str) -> Any:
    module = Trained(1, gate=gate)
    module.configure_model()
    optimizer = module.configure_optimizers()
    for step, batch in enumerate(batches(NUM_STEPS)):
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        module.gradients.append(gradients_of(module))
        optimizer.step()
    return module.gradients, module.state_dict(), optimizer.state_dict()


@pytest.fixture(scope="module")
def reference() -> Any:
    return one.launch()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.mark.parametrize(("launch", "world_size"), [(two.launch, 2), (four.launch, 4)])
def test_training_equals_one_process(launch: Any, world_size: int, reference: Any, folder: Path) -> None:
    for rank, found in enumerate(launch(folder=str(folder))):
        for (ep, gate), (own, differences, unwatched) in found.items():
            gradients = reference[gate][0]
            assert differences == ()
            assert bool(unwatched) == (world_size == ep)
            first = rank % ep * (4 // ep)
            for step in range(NUM_STEPS):
                renamed = {LIST.sub(lambda m, f=first: str(int(m[0]) + f), n): g for n, g in own[step].items()}
                wanted = {name: g for name, g in gradients[step].items() if name in renamed}
                errors = gradient_errors(renamed, wanted, 0)
                assert len(errors) == len(own[step])
                worst = max(errors, key=lambda name: errors[name])
                print(f"W={world_size} ep={ep} rank {rank} gate in {gate}, step {step}: {errors[worst]:.1e} {worst}")
                assert errors[worst] < BOUNDS[gate], worst
    checkpoints = list(folder.glob(f"{world_size}_*.ckpt"))
    assert len(checkpoints) == 8 // world_size
    for path in checkpoints:
        gate = path.stem.split("_")[-1]
        close = {"rtol": BOUNDS[gate], "atol": BOUNDS[gate]}
        _, state, moments = reference[gate]
        checkpoint = torch.load(path, weights_only=False)
        assert list(checkpoint["state_dict"]) == list(state)
        torch.testing.assert_close(checkpoint["state_dict"], state, **close)
        saved = checkpoint["optimizer_states"][0]
        assert saved["param_groups"] == moments["param_groups"]
        torch.testing.assert_close(saved["state"], moments["state"], **close)
        Trained(1).load_state_dict(checkpoint["state_dict"], strict=True)
