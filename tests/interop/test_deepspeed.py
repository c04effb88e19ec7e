"""DeepSpeed's ``moe.layer.MoE`` under the strategy on CPU: as in one process, and saved as one process would."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import contrastive_loss, paired_features
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.interop.live_models import DeepSpeedTowers
from tests.models import batches, gradient_errors, gradients_of, loader, quiet_trainer, share

# DeepSpeed computes the gate in float32 whatever the module is in: a weight of an expert is right to a few times
# 2**-24, and gradients that are sums of such terms, on 8 rows and 6 features, to some hundred times that
BOUND = 400 * 2.0**-24
NUM_STEPS = 2
LIST = re.compile(r"(?<=deepspeed_experts\.)\d+")


class Trained(LightningModule):
    """What a user writes around DeepSpeed's layers."""

    def __init__(self, ep_size: int, rank: int = 0) -> None:
        super().__init__()
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
        image, text = paired_features(self.model(*batch))
        return contrastive_loss(image, text, self.model.logit_scale)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@on_ranks(2, timeout_s=240.0)
def two(rank: Rank, folder: str) -> dict[str, Any]:
    return {str(ep): trained(rank, ep, folder) for ep in (2, 1)}


@on_ranks(4, timeout_s=240.0)
def four(rank: Rank, folder: str) -> dict[str, Any]:
    return {"2": trained(rank, 2, folder)}


def trained(rank: Rank, ep: int, folder: str) -> Any:
    module = Trained(ep, rank.index)
    strategy = MoEClipStrategy(expert_parallel_size=ep)
    trainer = quiet_trainer(rank.world_size, strategy=strategy)
    rows = [8 // rank.world_size] * rank.world_size
    trainer.fit(module, loader(share(batches(NUM_STEPS), rows, rank.index)))
    trainer.save_checkpoint(f"{folder}/{rank.world_size}_{ep}.ckpt")
    comparison = strategy.compare({"parameters", "optimizer"})
    return module.gradients, comparison.differences, comparison.unwatched


@on_ranks(1, timeout_s=240.0)
def one(rank: Rank) -> Any:
    """A process group of one, without which DeepSpeed's layer does not run."""
    module = Trained(1)
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
    gradients, state, moments = reference
    for rank, found in enumerate(launch(folder=str(folder))):
        for ep, (own, differences, unwatched) in found.items():
            assert differences == ()
            assert bool(unwatched) == (world_size == int(ep))
            first = rank % int(ep) * (4 // int(ep))
            for step in range(NUM_STEPS):
                renamed = {LIST.sub(lambda m, f=first: str(int(m[0]) + f), n): g for n, g in own[step].items()}
                wanted = {name: g for name, g in gradients[step].items() if name in renamed}
                errors = gradient_errors(renamed, wanted, 0)
                assert len(errors) == len(own[step])
                worst = max(errors, key=lambda name: errors[name])
                print(f"W={world_size} ep={ep} rank {rank} step {step}: {errors[worst]:.1e} {worst}")
                assert errors[worst] < BOUND, worst
    for path in folder.glob(f"{world_size}_*.ckpt"):
        checkpoint = torch.load(path, weights_only=False)
        assert list(checkpoint["state_dict"]) == list(state)
        torch.testing.assert_close(checkpoint["state_dict"], state, rtol=BOUND, atol=BOUND)
        saved = checkpoint["optimizer_states"][0]
        assert saved["param_groups"] == moments["param_groups"]
        torch.testing.assert_close(saved["state"], moments["state"], rtol=BOUND, atol=BOUND)
        Trained(1).load_state_dict(checkpoint["state_dict"], strict=True)
