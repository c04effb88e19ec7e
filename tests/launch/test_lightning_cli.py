"""LightningCLI builds strategy, precision, callbacks and layers from class paths, and the strategy from its name."""

import os
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moeclip.binding import ROOT, LightningModule
from lightning_moeclip.callbacks import CosineRollback, ExpertLoadMonitor, ResidualResync, VarianceHeatmap
from lightning_moeclip.modules import MoE
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks

LightningCLI = import_module(f"{ROOT}.cli").LightningCLI
# without .class_path a string is a name to Lightning, also one with dots
PATH = "--trainer.strategy.class_path=lightning_moeclip"
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
      gradient_dtype: torch.bfloat16
      timeout: 0:01:00
      towers:
        image: layer
        text: [moe]
  plugins:
    - class_path: lightning_moeclip.MoEClipPrecision
      init_args:
        precision: 64-true
        regions: [layer]
  callbacks:
    - class_path: lightning_moeclip.callbacks.VarianceHeatmap
      init_args:
        figure_every_n_steps: 100
        prefix: mine
    - class_path: lightning_moeclip.callbacks.ExpertLoadMonitor
      init_args:
        every_n_steps: 2
    - class_path: lightning_moeclip.callbacks.ResidualResync
      init_args:
        threshold: 0.002
    - class_path: lightning_moeclip.callbacks.CosineRollback
      init_args:
        on_no_snapshot: raise
        max_snapshot_bytes: 1000000
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


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cli.py"])  # LightningCLI warns where there are two sources of arguments


def cli(*arguments: str) -> Any:
    return LightningCLI(Net, args=list(arguments), save_config_callback=None)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli(*arguments, "--print_config")
    assert ended.value.code == 0
    return capsys.readouterr().out


@on_ranks(1)
def run_twice(rank: Rank, config: str) -> None:
    os.chdir(Path(config).parent)  # pictures go to the working directory
    made = cli("fit", "--config", config)
    strategy, module = made.trainer.strategy, made.model
    assert type(strategy) is MoEClipStrategy
    assert type(strategy.precision_plugin) is MoEClipPrecision
    assert strategy.precision_plugin._settings.regions == ("layer",)
    assert type(module.moe) is MoE
    assert made.trainer.global_step == 2
    assert strategy._settings.bucket_size_mb == 5.0
    assert strategy._settings.gradient_dtype == torch.bfloat16
    assert strategy._settings.towers == {"image": "layer", "text": ["moe"]}
    assert strategy._timeout == timedelta(minutes=1)
    assert strategy.has_own_timeout
    assert module.moe.w_in.dtype == torch.float64
    callbacks = {type(callback): callback for callback in made.trainer.callbacks}
    assert callbacks[VarianceHeatmap].prefix == "mine"
    assert callbacks[ExpertLoadMonitor].every_n_steps == 2
    assert callbacks[ResidualResync].settings.threshold == 0.002
    assert callbacks[CosineRollback].limits.max_snapshot_bytes == 1_000_000

    named = cli("fit", "--config", config, "--trainer.strategy=moeclip", "--trainer.callbacks=[]")
    assert type(named.trainer.strategy) is MoEClipStrategy
    assert named.trainer.global_step == 2
    by_path = cli("fit", "--config", config, f"{PATH}.MoEClipStrategy", "--trainer.strategy.timeout=0:30:00")
    # a default that LightningCLI writes out is no choice of the user's
    assert not named.trainer.strategy.has_own_timeout
    assert not by_path.trainer.strategy.has_own_timeout


def test_cli_builds_all_of_ours_and_what_it_prints_is_a_config_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(CONFIG)
    second.write_text(printed(capsys, "fit", "--config", str(first)))
    again = printed(capsys, "fit", "--config", str(second))
    assert again == second.read_text()
    assert "gradient_dtype: torch.bfloat16" in again
    run_twice.launch(config=str(second))


def test_cli_refuses_a_wrong_value_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("fit", "--model.moe=torch.nn.Identity", f"{PATH}.MoEClipStrategy", "--trainer.strategy.stash=eagerly")
    told = capsys.readouterr().err
    assert 'Parser key "stash"' in told
    assert all(f"'{mode}'" in told for mode in ("stream", "graph", "sync")), told
