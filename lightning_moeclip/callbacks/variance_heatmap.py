"""Shows how large the gradients of each layer are over time: a heatmap, curves of the towers, a table of the worst.

In a step that is watched, the loss scale is read on the host before the optimizer steps, under strategies other than
ours.
"""

import contextlib
import logging
import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.callbacks.expert_counts import ExpertCounts
from lightning_moeclip.callbacks.expert_load_monitor import ExpertLoadMonitor
from lightning_moeclip.callbacks.local_statistics import LocalStatistics
from lightning_moeclip.callbacks.pictures import write_picture, write_table
from lightning_moeclip.callbacks.world import World, warn
from lightning_moeclip.gradients.report import GradSums, LayerKey
from lightning_moeclip.monitor.bounds import check_steps
from lightning_moeclip.monitor.heatmap import Heatmap, check_matplotlib, warm_up
from lightning_moeclip.monitor.variance_history import NO_TOWER, Sample, VarianceHistory, label_of
from lightning_moeclip.scalars import log_scalars

__all__ = ["VarianceHeatmap"]

_log = logging.getLogger(__name__)


class VarianceHeatmap(Callback):
    """Variance of the gradients by tower and layer: of those that the optimizer sees, over all ranks.

    * ``grad_var/<tower>``: log10 of the variance over all elements of a tower, every ``every_n_steps``, to every logger
      and to ``trainer.callback_metrics``; ``grad_var/shared`` of what belongs to no tower. NaN where an element is not
      finite, minus infinity where all are zero, nothing where there is no gradient.
    * ``grad_var/heatmap``: a picture of the last 60 of these samples, to every logger that takes pictures, otherwise to
      ``grad_variance/step_000500.png`` under the logger's folder or the Trainer's.
    * ``grad_var/worst_layers``: with each picture, the five layers that lie farthest from their own median over the
      samples, in decades (``VarianceHistory.worst``), to loggers that take text.

    Under ``MoEClipStrategy`` the numbers equal those of one process. Under any other strategy they are of this rank's
    gradients before the reduction, the tags begin with ``grad_var_local/``, and the picture is rank 0's. Loss scales
    are divided out, micro-batches are summed, evaluation does not count. Expert layers with ``training_load`` add a
    panel: tokens by expert of rank 0 since the picture before, or, beside an ``ExpertLoadMonitor``, what that published
    last of all ranks.

    Samples, scalars and pictures have the step at which Lightning's own ``self.log`` writes: batches that stepped,
    however many optimizers each of them stepped. The intervals below count every optimizer's steps, as
    ``trainer.global_step`` does.

    The picture is drawn on rank 0 when training ends or fails, too. A picture or table that cannot be drawn or written
    is told of once, and training goes on; after a failure of the run it is logged, and the error of the run stays. The
    scale is that of the run's first picture, also after resuming from a checkpoint or a second ``fit`` of one Trainer.

    Args:
        every_n_steps: optimizer steps between samples; None: the Trainer's ``log_every_n_steps``.
        figure_every_n_steps: optimizer steps between pictures; each is drawn with the first sample from then on.
        prefix: put before each tag and before the folder of the files.

    Attributes:
        history: the samples and the scale.
        picture: draws them; ``picture.render()`` at any time.

    Raises:
        ValueError: a number of steps is no integer from 1, or another one has the same prefix.
        ImportError: matplotlib is missing.
    """

    def __init__(self, *, every_n_steps: int | None = None, figure_every_n_steps: int = 500, prefix: str = "") -> None:
        owner = "VarianceHeatmap"
        advice = "Use figure_every_n_steps=500."
        check_steps("figure_every_n_steps", figure_every_n_steps, advice=advice, owner=owner)
        if every_n_steps is not None:
            advice = "Use every_n_steps=50, or None for the Trainer's log_every_n_steps."
            check_steps("every_n_steps", every_n_steps, advice=advice, owner=owner)
        if not isinstance(prefix, str):
            raise ValueError(
                f"VarianceHeatmap(prefix={prefix!r}) must be a string. Use prefix='fine/', or leave it out."
            )
        self.every_n_steps = every_n_steps
        self.figure_every_n_steps = figure_every_n_steps
        self.prefix = prefix
        self.history = VarianceHistory()
        self._area = "grad_var"
        self.picture = Heatmap(self.history)
        self._local = LocalStatistics()
        self._counts = ExpertCounts()
        self._watched_step: int | None = None
        self._last_watched: int | None = None
        self._sampled_step = self._figures_from = 0
        self._drawn_step: int | None = None
        self._has_warned = False
        self._parts: dict[int, list[tuple[Sequence[LayerKey], GradSums]]] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check what must hold before training, and load what draws."""
        if stage != "fit":
            return
        check_matplotlib()
        if trainer.is_global_zero:
            with contextlib.suppress(Exception):  # told with the first picture
                warm_up()
        others = [c for c in trainer.callbacks if isinstance(c, VarianceHeatmap) and c.prefix == self.prefix]
        if len(others) > 1:
            raise ValueError(
                f"Trainer(callbacks=[...]) holds {len(others)} of VarianceHeatmap(prefix={self.prefix!r}), which would "
                "write the same tags. Give one, or give each a prefix of its own, such as prefix='fine/'."
            )
        is_reduced = isinstance(trainer.strategy, World)
        self._area = "grad_var" if is_reduced else "grad_var_local"
        self.picture.note = "" if is_reduced else "local to rank 0"
        self._watched_step = self._last_watched = None
        if trainer.global_step == 0:
            # another run than before; a checkpoint is loaded later
            self.history.clear()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sampled_step = self._figures_from = trainer.global_step
        self._drawn_step = None
        self._has_warned = False
        self._counts.restart(pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ask for the statistics of a step that is to be sampled."""
        step = trainer.global_step
        every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps
        if not self._is_due(step, every):
            return
        is_new_step = step != self._last_watched
        self._watched_step = self._last_watched = step
        if isinstance(trainer.strategy, World):
            trainer.strategy.ask_for_statistics()
        else:
            self._local.listen(pl_module, is_new_step=is_new_step)

    def _is_due(self, step: int, every: int) -> bool:
        """Whether a step is the first, or the first at or behind a multiple of ``every``; 0 stands for never.

        A multiple is passed rather than met: with several optimizers a batch takes several steps.
        """
        if every == 0:
            return False
        last = self._last_watched
        return last is None or step == last or step // every > last // every

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the statistics of this optimizer in a step that is sampled."""
        if self._watched_step is None:
            return
        strategy = trainer.strategy
        if not isinstance(strategy, World):
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else float(scaler.get_scale())
            self._parts[id(optimizer)] = self._local.take(optimizer, loss_scale=scale)
        elif strategy.report.statistics is not None and strategy.report.statistics.reduced is not None:
            # an optimizer that steps twice in one batch counts with its last step
            self._parts[id(optimizer)] = [(strategy.report.statistics.keys, strategy.report.statistics.reduced)]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._publish(trainer)
        every = self.figure_every_n_steps
        if self._sampled_step // every > self._figures_from // every:
            self._figures_from = self._sampled_step
            self._try_to_draw(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._try_to_draw(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # the step that failed is the one to look at
        for act in (self._publish, self._draw):
            try:
                act(trainer)
            except Exception:
                # not a warning, which may be an error: the user has one already
                _log.exception("VarianceHeatmap could not show the last samples of a run that failed.")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._local.stop()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # not state_dict: two callbacks with one prefix would fail in the Trainer's constructor, with its message
        checkpoint.setdefault("variance_heatmap", {})[self.prefix] = self.history.state_dict()

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("variance_heatmap", {}).get(self.prefix)
        if state is not None:
            self.history.load_state_dict(state)

    def _publish(self, trainer: Trainer) -> None:
        """Add the sample of the step that was watched, and log its scalars."""
        self._local.stop()
        step, self._watched_step = self._watched_step, None
        parts = [part for found in self._parts.values() for part in found]
        self._parts = {}
        if step is None or not parts:
            return
        self._sampled_step = step
        # Lightning counts the batch behind its last hook, so this is the step of what the module logs in it
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        scalars = self._scalars(self.history.add(step, parts))
        log_scalars(trainer, scalars, step=step)

    def _scalars(self, sample: Sample) -> dict[str, float]:
        scalars = {}
        for tower, cell in sample.towers.items():
            if not math.isnan(cell):
                name = f"{self.prefix}{self._area}/{NO_TOWER if tower is None else tower}"
                scalars[name] = _log10(cell)
        return scalars

    def _try_to_draw(self, trainer: Trainer) -> None:
        """Draw, and tell of what goes wrong: who only looks on does not end a run."""
        try:
            self._draw(trainer)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warn(
                    trainer,
                    f"VarianceHeatmap could not show the samples up to step {self._drawn_step}: "
                    f"{type(error).__name__}: {error}. Training goes on, and of later pictures that fail nothing is "
                    "told. Write Trainer(default_root_dir=...) with a folder that can be written to, or leave out the "
                    "logger that fails.",
                )

    def _draw(self, trainer: Trainer) -> None:
        """Draw and write what there is, unless it was drawn before; on rank 0."""
        if not self.history.samples or self._drawn_step == (step := self.history.samples[-1].step):
            return
        self._drawn_step = step
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        monitor = next((c for c in trainer.callbacks if isinstance(c, ExpertLoadMonitor)), None)
        loads, source = self._counts.take(None if monitor is None else monitor.last)
        self.picture.set_loads(loads, source=source)
        tag = f"{self.prefix}{self._area}"
        folder = f"{self.prefix}grad_variance"
        write_picture(trainer, f"{tag}/heatmap", self.picture.render(), step=step, folder=folder)
        write_table(trainer, f"{tag}/worst_layers", self._worst(), step=step)

    def _worst(self) -> list[list[str]]:
        rows = [["tower", "layer", "variance", "its median", "decades apart"]]
        for outlier in self.history.worst():
            tower = NO_TOWER if outlier.key.tower is None else outlier.key.tower
            label = label_of(outlier.key, is_square=outlier.key in self.history.single)
            cell = "NaN/Inf" if outlier.cell == math.inf else f"{outlier.cell:.3g}"
            rows.append([tower, label, cell, f"{outlier.median:.3g}", f"{outlier.decades:.2f}"])
        return rows


def _log10(cell: float) -> float:
    if cell == 0.0:
        return -math.inf
    return math.nan if cell == math.inf else math.log10(cell)
