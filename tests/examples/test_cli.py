"""The emoji example through LightningCLI, on two ranks, from the configuration that it prints."""

import sys
from pathlib import Path

import pytest
import torch

from lightning_moeclip.testing import Rank, on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as python does for a script in that folder

import cli  # noqa: E402


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cli.py"])  # LightningCLI warns where there are two sources of arguments


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", *arguments, "--print_config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@on_ranks(2)
def two_steps(rank: Rank, config: str) -> tuple[int, int, torch.Tensor]:
    made = cli.main(["fit", "--config", config])
    return made.trainer.global_step, made.model.hparams["total_steps"], made.model.loss.logit_scale.detach()


def test_what_the_example_prints_is_the_same_config_and_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    short = ["--trainer.max_steps=2", "--data.batch_size=16", f"--trainer.logger.save_dir={tmp_path / 'runs'}"]
    first.write_text(printed(capsys, "--config", str(EXAMPLES / "cli.yaml"), *short))
    second.write_text(printed(capsys, "--config", str(first)))
    assert second.read_text() == first.read_text()
    ranks = two_steps.launch(config=str(second))
    assert [(steps, total) for steps, total, _ in ranks] == [(2, 2), (2, 2)]
    assert torch.equal(ranks[0][2], ranks[1][2])
    # the config of the run lies beside its curves, as LightningCLI keeps it
    assert list((tmp_path / "runs").rglob("config.yaml"))
