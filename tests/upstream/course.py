"""A module that writes down which batch of which stage it saw, and its run under both strategies."""

from typing import Any

from torch import Tensor

from tests.upstream.models import (
    Damper,
    MakeTrainer,
    rows,
    under_both,
    weights,
)


class Course(Damper):
    """Writes down which batch of which stage it saw at which step."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.course: list[Any] = []

    def note(self, stage: str, batch: Tensor, *where: int) -> Tensor:
        self.course.append((stage, self.current_epoch, self.global_step, *where, batch.sum().item()))
        return self.loss(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.note("train", batch, batch_idx)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.note("val", batch, batch_idx), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.note("test", batch, batch_idx), sync_dist=True)

    def train_dataloader(self) -> Any:
        return rows(5)


def course_of(kind: type = Course, *, callbacks_: Any = list, **settings: Any) -> tuple[list[Any], Any]:
    """Course, and what else a run left behind; the same under both strategies."""

    def script(make: MakeTrainer) -> Any:
        module, trainer = kind(), make(callbacks=callbacks_(), **settings)
        trainer.fit(module)
        left = (trainer.global_step, trainer.current_epoch, trainer.should_stop, weights(module))
        return module.course, left, dict(trainer.callback_metrics)

    course, left, _ = under_both(script)
    return course, left
