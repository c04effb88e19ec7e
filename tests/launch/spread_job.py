"""A training script with experts spread over two ranks: ``python spread_job.py OUT START [KIND...]``.

For each kind of module, prints how far the weights of the process that goes on after ``fit`` are from one process,
and whether a checkpoint that it saves holds them, or the error that refused the run.
"""

import sys
from typing import Any

import tests.launch.same_root  # noqa: F401  # isort: skip

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_moeclip.modules import MoE
from lightning_moeclip.strategy import MoEClipStrategy
from tests.models import TwoTowers, batches, loader, quiet_trainer, share, train_one_process

STEPS = 3


class Whole(TwoTowers):
    def train_dataloader(self) -> DataLoader:
        return loader(share(batches(STEPS), [5, 3], self.global_rank))


class LateExperts(Whole):
    def configure_model(self) -> None:
        self.late = MoE(4, 8, 4, top_k=1).double()


class Outside(Whole):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.__dict__["scale"] = nn.Parameter(torch.zeros(()))
        return torch.optim.AdamW([*self.parameters(), self.scale], lr=self.lr)


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    assert found.keys() == wanted.keys()
    return max((found[name] - value).abs().max().item() for name, value in wanted.items())


def run(out: str, start: str, kind: str) -> None:
    module = globals()[kind]()
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2, start_method=start))
    try:
        trainer.fit(module)
    except Exception as error:
        print(f"refused {error}", flush=True)
        return
    wanted = train_one_process(TwoTowers(), batches(STEPS)).module.state_dict()
    print(f"error {distance(module.state_dict(), wanted):.3e}", flush=True)
    trainer.save_checkpoint(f"{out}/after.ckpt")
    loaded = TwoTowers.load_from_checkpoint(f"{out}/after.ckpt")
    print(f"saved {distance(loaded.state_dict(), wanted):.3e}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, start, *kinds = sys.argv[1:]
    for kind in kinds or ["Whole"]:
        run(out, start, kind)
