"""LightningCLI builds our strategy, precision and layers from class paths."""

from pathlib import Path

import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import MoE
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_moeclip.MoEClipStrategy
    init_args:
      expert_parallel_size: 1
      bucket_size_mb: 5.0
      gradient_dtype: bfloat16
      towers:
        image: layer
        text: [moe]
  plugins:
    - class_path: lightning_moeclip.MoEClipPrecision
      init_args:
        precision: 64-true
model:
  moe:
    class_path: lightning_moeclip.modules.MoE
    init_args:
      dim: 4
      hidden_dim: 8
      num_experts: 2
      top_k: 1
"""


class Net(LightningModule):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.moe = moe

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.moe(self.layer(batch)).pow(2).mean()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(4, 4, dtype=torch.float64), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(1)
def test_cli_builds_strategy_precision_and_moe_from_class_paths(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    made = LightningCLI(Net, args=["fit", "--config", str(tmp_path / "run.yaml")], save_config_callback=None)
    strategy, module = made.trainer.strategy, made.model
    assert type(strategy) is MoEClipStrategy
    assert type(strategy.precision_plugin) is MoEClipPrecision
    assert type(module.moe) is MoE
    assert made.trainer.global_step == 2
    assert strategy._settings.bucket_size_mb == 5.0
    assert strategy._settings.gradient_dtype == torch.bfloat16
    assert strategy._settings.towers == {"image": "layer", "text": ["moe"]}
    assert module.moe.w_in.dtype == torch.float64
