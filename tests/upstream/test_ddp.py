"""What Lightning promises of DDP on a CPU, in one process: environment, groups, launchers, module."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip.binding import (
    LightningModule,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    fabric,
    pl,
)
from lightning_moeclip.parallel.checks import _DDP_ARGUMENTS
from lightning_moeclip.strategy import MoEClipStrategy
from tests.upstream.models import (
    Damper,
    Idle,
    MakeTrainer,
    differences,
    ours,
    rows,
    under_both,
    weights,
)

ModelCheckpoint = pl.callbacks.ModelCheckpoint


@pytest.mark.parametrize(
    ("asked", "device", "given"),
    [("foo", "cpu", "foo"), ("foo", "cuda:0", "foo"), (None, "cuda:0", "nccl"), (None, "cpu", "gloo")],
)
def test_the_backend_is_the_users_or_that_of_the_device(asked: str | None, device: str, given: str) -> None:
    strategy = MoEClipStrategy(process_group_backend=asked)
    with mock.patch.object(MoEClipStrategy, "root_device", torch.device(device)):
        assert strategy._get_process_group_backend() == given
    assert ours(strategy=strategy).strategy is strategy


@pytest.mark.parametrize(
    ("name", "start_method"), [("moeclip", "popen"), ("moeclip_spawn", "spawn"), ("moeclip_fork", "fork")]
)
def test_names_of_the_registry_choose_how_ranks_start(name: str, start_method: str) -> None:
    trainer = ours(2, strategy=name)
    assert trainer.strategy._start_method == start_method
    kind = SubprocessScriptLauncher if start_method == "popen" else MultiProcessingLauncher
    assert isinstance(trainer.strategy.launcher, kind)
    assert trainer.strategy._ddp_kwargs == {}


@pytest.mark.parametrize("name", sorted(_DDP_ARGUMENTS))
def test_arguments_of_torch_ddp_are_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"MoEClipStrategy({name}=True): gradients do not pass through")):
        ours(strategy=MoEClipStrategy(**{name: True}))


def test_the_timeout_is_that_of_the_process_group() -> None:
    class Asks(Damper):
        def setup(self, stage: str) -> None:
            group = dist.distributed_c10d._get_default_group()
            self.timeout = group._get_backend(torch.device("cpu")).options._timeout

    module = Asks()
    ours(strategy=MoEClipStrategy(timeout=timedelta(seconds=77))).fit(module)
    assert module.timeout == timedelta(seconds=77)


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_the_module_is_never_wrapped(verb: str) -> None:
    class Looks(Damper):
        def look(self) -> None:
            self.seen = (self.trainer.model is self, self.trainer.strategy.model is self)

        on_train_start = on_validation_start = on_test_start = on_predict_start = look

    module = Looks()
    trainer = ours()
    getattr(trainer, verb)(module)
    assert module.seen == (True, True)
    assert trainer.lightning_module is module


class Normed(Damper):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def keep(self) -> None:
        self.kind = type(self.norm)

    on_fit_start = on_validation_start = on_test_start = on_predict_start = keep


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_sync_batchnorm_changes_the_module_in_fit_alone(verb: str) -> None:
    module = Normed()
    getattr(ours(sync_batchnorm=True, num_sanity_val_steps=0, limit_val_batches=1), verb)(module)
    assert module.kind is (nn.SyncBatchNorm if verb == "fit" else nn.BatchNorm1d)


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_ranks_can_talk_in_setup_and_later(verb: str) -> None:
    class Talks(Damper):
        def setup(self, stage: str) -> None:
            assert dist.is_initialized()
            assert self.trainer.strategy.mesh is not None
            raise SystemExit

    with pytest.raises(SystemExit):
        getattr(ours(), verb)(Talks())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("64-true", torch.float64), ("16-true", torch.float16), ("bf16-true", torch.bfloat16)],
)
def test_modules_are_made_in_the_dtype_of_the_precision(precision: str, dtype: torch.dtype) -> None:
    class Late(Damper):
        def configure_model(self) -> None:
            self.late = nn.Linear(2, 2)

    trainer, module = ours(precision=precision, limit_val_batches=0), Late()
    with trainer.strategy.tensor_init_context():
        assert nn.Linear(2, 2).weight.dtype == dtype
    trainer.validate(module, verbose=False)
    assert module.late.weight.dtype == dtype


def test_a_layer_without_gradient_is_no_error_and_stays_as_it_is() -> None:
    def script(make: MakeTrainer) -> Any:
        module = Idle()
        before = weights(module.idle)
        make().fit(module)
        assert list(differences(weights(module.idle), before)) == []
        return weights(module)

    under_both(script)


def test_a_launcher_of_the_user_is_kept() -> None:
    class OwnLauncher(MultiProcessingLauncher):
        pass

    class Own(MoEClipStrategy):
        def _configure_launcher(self) -> None:
            self._launcher = OwnLauncher(self, start_method="spawn")

    assert type(ours(2, strategy=Own()).strategy.launcher) is OwnLauncher


class Elsewhere(fabric.plugins.environments.LightningEnvironment):
    """Processes that somebody else has started."""

    @property
    def creates_processes_externally(self) -> bool:
        return True


def test_no_process_is_started_where_somebody_else_starts_them() -> None:
    strategy = MoEClipStrategy(cluster_environment=Elsewhere(), parallel_devices=[torch.device("cpu")] * 2)
    assert strategy.launcher is None
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, SubprocessScriptLauncher)
    strategy.launcher._call_children_scripts = starts = mock.Mock()
    with mock.patch.object(strategy, "go_down") as told:
        assert strategy.launcher.launch(lambda x: x + 1, 1) == 2
    starts.assert_not_called()
    told.assert_not_called()
    assert ours(strategy=strategy, devices=2).strategy is strategy


def test_a_rank_that_would_start_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(fabric.plugins.environments.LightningEnvironment):
        @property
        def creates_processes_externally(self) -> bool:
            return False

    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RuntimeError, match="attempted to launch new distributed processes with `local_rank > 0`"):
        ours(2, plugins=[Wrong()]).fit(Damper())


def test_evaluation_leaves_weights_and_modes_as_they_are(tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        module, keeps = Damper(), ModelCheckpoint(tmp_path / make.__name__)
        trainer = make(callbacks=[keeps], enable_checkpointing=True, max_epochs=2)
        trainer.fit(module)
        before = weights(module)
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)
        trainer.predict(module)
        assert list(differences(weights(module), before)) == []
        return before, Path(keeps.best_model_path).name, module.training

    under_both(script)


class Late(LightningModule):
    """Makes its layer in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.layer: nn.Module | None = None

    def configure_model(self) -> None:
        self.num_calls += 1
        if self.layer is None:
            torch.manual_seed(3)
            self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.layer is not None
        return self.layer(batch).square().mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        assert self.layer is not None
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_configure_model_runs_once_in_each_stage_before_the_optimizers() -> None:
    def script(make: MakeTrainer) -> Any:
        module = Late()
        trainer = make()
        trainer.fit(module, rows())
        assert module.num_calls == 1
        trainer.test(module, rows(), verbose=False)
        return module.num_calls, weights(module)

    assert under_both(script)[0] == 2


def test_optimizers_are_made_of_weights_on_the_device_after_setup() -> None:
    class Asks(Damper):
        def configure_optimizers(self) -> Any:
            assert all(p.device == self.trainer.strategy.root_device for p in self.parameters())
            return super().configure_optimizers()

        def on_train_start(self) -> None:
            held = {id(p) for group in self.trainer.optimizers[0].param_groups for p in group["params"]}
            assert held == {id(p) for p in self.parameters()}

    ours().fit(Asks())


def test_state_that_an_optimizer_makes_at_once_is_kept() -> None:
    class Accumulates(Damper):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters(), lr=self.lr, initial_accumulator_value=0.3)

        def on_train_start(self) -> None:
            (state, *_) = self.optimizers().state.values()
            assert state["sum"].device == self.device
            assert (state["sum"] == 0.3).all()

    def script(make: MakeTrainer) -> Any:
        module = Accumulates()
        make().fit(module)
        return weights(module)

    under_both(script)
