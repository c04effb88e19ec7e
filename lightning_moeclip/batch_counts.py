"""The part of the strategy that counts batches: an epoch has as many on every rank, or all ranks say what differs."""

from functools import partial
from typing import Any

from typing_extensions import override

from lightning_moeclip.launch import GuardedStrategy
from lightning_moeclip.parallel import loader_checks
from lightning_moeclip.parallel.agreement import gather_objects

__all__ = ["CountingStrategy"]


class CountingStrategy(GuardedStrategy):
    """Compares numbers of batches over ranks, and lets the ranks meet once when an epoch of training starts.

    Loaders of a known length are compared before their first batch. One that ends unexpectedly is found out then: by
    what the reductions of training carry along, by a meeting at the end of an evaluation, and by the watch where ranks
    wait in different collectives and can no longer meet.
    """

    _met_epoch: int | None = None
    _num_meetings = 0
    _ending_ranks: tuple[int, ...] = ()
    _num_evaluations = 0
    _evaluated: list[int] | None = None  # batches of each loader in the evaluation at hand
    _compared: list[int] | None = None  # of them, what all ranks have been found to have alike

    def note_ends(self, ranks: tuple[int, ...]) -> None:
        """Have the run end after the current batch when the loaders of some ranks end with it, and others go on.

        Args:
            ranks: whose loader ends with the current batch; the same on all ranks.
        """
        self._ending_ranks = ranks

    def epoch_card(self, batch: Any) -> Any:
        """What this rank has to say when an epoch of training starts; picklable.

        Args:
            batch: the first one of the epoch; None where there is none.
        """
        return None

    def read_epoch_cards(self, cards: list[Any]) -> None:
        """Look at what all ranks had to say.

        Args:
            cards: of ``epoch_card``, by rank.

        Raises:
            Exception: on every rank alike.
        """

    @override
    def setup_environment(self) -> None:
        self._met_epoch = self._evaluated = None
        self._ending_ranks = ()
        super().setup_environment()
        if self._watch is None:
            return
        epoch_loop = self._trainer.fit_loop.epoch_loop
        epoch_loop.on_advance_end = partial(self._end_batch, epoch_loop)
        epoch_loop.run = partial(self._run_epoch, epoch_loop)
        for stage, loop in (
            ("validation", epoch_loop.val_loop),
            ("validation", self._trainer.validate_loop),
            ("test", self._trainer.test_loop),
        ):
            loop._evaluation_step = partial(self._evaluate, loop, stage)
            loop._store_dataloader_outputs = partial(self._end_loader, loop, stage)
            loop.on_run_end = partial(self._end_evaluation, loop, stage)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the ranks meet when an epoch starts."""
        super().on_train_batch_start(batch, batch_idx)
        self.stop_after_a_failure()
        epoch = self._trainer.current_epoch
        if batch_idx == 0 or epoch != self._met_epoch:
            self._met_epoch = epoch
            self._meet(batch, self._trainer.num_training_batches)
        if self._watch is not None and not self._allows_empty_loaders():
            progress = self._trainer.fit_loop.epoch_loop.batch_progress
            run = str(self._num_meetings)
            self._watch.whereabouts.note_batch("training", run, progress.current.ready, is_last=progress.is_last_batch)

    def on_validation_start(self) -> None:
        """Compare the number of batches over the ranks."""
        super().on_validation_start()
        trainer = self._trainer
        self._begin_evaluation(
            "validation", trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        )

    def on_test_start(self) -> None:
        """Compare the number of batches over the ranks."""
        super().on_test_start()
        self._begin_evaluation("test", self._trainer.num_test_batches)

    def _is_counting(self) -> bool:
        return self._watch is not None and not self._allows_empty_loaders()

    def _meet(self, batch: Any, num_batches: int | float) -> None:
        self._num_meetings += 1
        card, failed = None, None
        try:
            card = self.epoch_card(batch)
        except Exception as error:  # the others wait below: they hear of it before it is raised
            failed = error
        failure = None if failed is None else f"{type(failed).__name__}: {failed}"
        told = gather_objects((num_batches, self._trainer.should_stop, card, failure))
        if failed is not None:
            raise failed
        counts, stopping, cards, failures = (list(column) for column in zip(*told, strict=True))
        for rank, text in enumerate(failures):
            if text is not None:
                raise RuntimeError(f"rank {rank}: {text}")
        if self._is_counting():
            loader_checks.check_equal_stops(stopping, counts)
            loader_checks.check_equal_batch_counts("training", [(number,) for number in counts])
        self.read_epoch_cards(cards)

    def _run_epoch(self, loop: Any, data_fetcher: Any) -> None:
        """What the epoch loop does; a rank that comes out without a batch meets the others, who have one."""
        before = self._num_meetings
        type(loop).run(loop, data_fetcher)
        if self._num_meetings == before and not self._allows_empty_loaders():
            self._meet(None, 0)

    def _end_batch(self, loop: Any, data_fetcher: Any) -> None:
        """What the epoch loop does between the end of a batch and validation, or the next batch."""
        ending, self._ending_ranks = self._ending_ranks, ()
        trainer = self._trainer
        is_over = trainer.should_stop or trainer.received_sigterm or 0 <= loop.max_steps <= loop.global_step
        # where all ranks stop here, nobody waits for a rank that has no more batches
        if not is_over and not self._allows_empty_loaders():
            loader_checks.check_equal_ends(ending, world_size=trainer.world_size, num_batches=loop.batch_idx + 1)
        type(loop).on_advance_end(loop, data_fetcher)

    def _begin_evaluation(self, stage: str, counts: list[int | float]) -> None:
        self._num_evaluations += 1
        self._evaluated = self._compared = None
        if self._is_counting():
            loader_checks.check_equal_batch_counts(stage, gather_objects(tuple(counts)))
            self._evaluated = [0] * len(counts)

    def _evaluate(self, loop: Any, stage: str, batch: Any, batch_idx: int, index: int, *rest: Any) -> None:
        """What an evaluation loop does with a batch, of the loader ``index``."""
        if (counts := self._evaluated) is not None:
            self.stop_after_a_failure()
            counts[index] += 1
            self._note_evaluated(stage, [index], is_last=False)
        type(loop)._evaluation_step(loop, batch, batch_idx, index, *rest)

    def _note_evaluated(self, stage: str, indices: Any, *, is_last: bool) -> None:
        assert self._watch is not None, "only a watched run counts"
        assert self._evaluated is not None, "only within an evaluation"
        for index in indices:
            run = f"{self._num_evaluations}.{index}"
            self._watch.whereabouts.note_batch(stage, run, self._evaluated[index], is_last=is_last)

    def _end_loader(self, loop: Any, stage: str) -> None:
        """What an evaluation loop does after the last batch of a loader; the ranks meet before they reduce metrics."""
        if (counts := self._evaluated) is not None:
            last = max((index for index, count in enumerate(counts) if count), default=0)
            self._meet_evaluated(stage, counts, range(last + 1))
        type(loop)._store_dataloader_outputs(loop)

    def _end_evaluation(self, loop: Any, stage: str) -> Any:
        """What an evaluation loop does after its last loader; those that had no batch have ended as well."""
        if (counts := self._evaluated) is not None:
            if self._compared != counts:  # else the last loader has been the last meeting, and on all ranks so
                self._meet_evaluated(stage, counts, range(len(counts)))
            self._evaluated = None
        return type(loop).on_run_end(loop)

    def _meet_evaluated(self, stage: str, counts: list[int], ended: range) -> None:
        self._note_evaluated(stage, ended, is_last=True)
        self._compared = counts[: len(ended)]
        loader_checks.check_equal_batch_counts(stage, gather_objects(tuple(self._compared)))

    def _allows_empty_loaders(self) -> bool:
        # a rank without batches does not come here, and its user has said that this is meant
        sources = (self.lightning_module, self._trainer.datamodule)
        return any(getattr(s, "allow_zero_length_dataloader_with_multiple_devices", False) for s in sources)
