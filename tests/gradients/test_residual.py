"""The residual of a reduction in 16 bits is what float32 finds, and is asked for."""

from typing import Any

import torch

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import Callback
from lightning_moeclip.gradients.report import ReductionResidual
from lightning_moeclip.gradients.residual import _draw
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share


class Ask(Callback):
    """Asks in every second step."""

    def __init__(self) -> None:
        self.residuals: list[ReductionResidual | None] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % 2 == 0:
            trainer.strategy.ask_for_residual()

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.residuals.append(trainer.strategy.report.residual)


class Keeping(MoEClipStrategy):
    """Also keeps what every bucket held before and after its sum."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for bucket in self._corridor.reducer.buckets:
            bucket.launch, bucket.wait = self.spied(bucket, bucket.launch, bucket.wait)

    def spied(self, bucket: Any, launch: Any, wait: Any) -> Any:
        def launch_and_keep() -> None:
            bucket.close()
            bucket.before = bucket.flat.clone()
            launch()

        def wait_and_keep() -> None:
            wait()
            exact = bucket.before.float()
            torch.distributed.all_reduce(exact, group=bucket.group)
            self.kept.append((bucket.flat.double(), exact.double()))

        return launch_and_keep, wait_and_keep


@on_ranks(2)
def ask(rank: Rank, dtype: str | None) -> Any:
    strategy = Keeping(gradient_dtype=dtype)
    callback = Ask()
    module = TwoTowers().float()
    data = [(x.float(), y.float()) for x, y in share(batches(2), [5, 3], rank.index)]
    quiet_trainer(2, strategy=strategy, callbacks=[callback], max_steps=2).fit(module, loader(data))
    buckets = strategy._corridor.reducer.buckets
    error = norm = 0.0
    for index, (found, exact) in enumerate(strategy.kept[: len(buckets)]):
        # the draw of the first step, made anew
        generator = torch.Generator().manual_seed(1 + index)
        places = torch.randint(len(found), (min(len(found), 4096),), generator=generator)
        error += (found[places] - exact[places]).abs().sum().item()
        norm += exact[places].abs().sum().item()
    return callback.residuals, error, norm, sum(bucket.flat.numel() for bucket in buckets)


def test_residual_is_the_distance_to_the_float32_sum_in_the_steps_that_asked() -> None:
    told = ask.launch(dtype="bfloat16")
    for residuals, error, norm, size in told:
        found, unasked = residuals
        assert unasked is None
        assert found == told[0][0][0]
        assert found.epsilon == torch.finfo(torch.bfloat16).eps
        assert found.num_elements == size  # a draw with replacement of as many elements as there are
        assert error > 0
        assert abs(found.error - error) <= 1e-12 * error
        assert abs(found.norm - norm) <= 1e-12 * norm


def test_sums_in_full_precision_have_no_residual() -> None:
    assert all(residuals == [None, None] for residuals, *_ in ask.launch(dtype=None))


def test_sample_is_of_gradients_and_not_of_the_gaps_between_them() -> None:
    places = [(0, 3), (64, 65), (65, 65), (128, 130)]
    drawn = {int(x) for seed in range(40) for x in _draw(places, torch.Generator().manual_seed(seed))}
    assert drawn == {0, 1, 2, 64, 128, 129}
