"""Spread experts and the global contrastive loss, where a rank has no loss and where layers run again in backward."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, gradient_errors, loader, quiet_trainer, share, train_one_process

ROWS = [5, 3]
DATA = batches(4)


class Guarded(TwoTowers):
    """Rank 1 gives its loss up in two of four steps, after it took part in the layers and in the loss."""

    skipped = (1, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(self.image(batch[0]), self.text(batch[1]))
        return None if self.global_rank == 1 and batch_idx in self.skipped else loss

    def on_train_batch_end(self, *args: object) -> None:
        pass


def loss_of_rank_0(module: TwoTowers, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Both directions over the rows of rank 0, of logits over all rows."""
    image = nn.functional.normalize(module.image(batch[0]), dim=-1)
    text = nn.functional.normalize(module.text(batch[1]), dim=-1)
    logits = module.loss.logit_scale.exp() * image @ text.T
    own = slice(0, ROWS[0])
    both = logits.logsumexp(1)[own].sum() + logits.logsumexp(0)[own].sum() - 2 * logits.diagonal()[own].sum()
    return both / (2 * len(logits))


class Checkpointed(TwoTowers):
    """Each tower's MoE runs again in backward."""

    use_reentrant = False

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        features = [
            checkpoint(tower, x.clone().requires_grad_(), use_reentrant=self.use_reentrant)
            for tower, x in zip((self.image, self.text), batch, strict=True)
        ]
        return self.loss(*features)


class Reentrant(Checkpointed):
    use_reentrant = True


class Plain(TwoTowers):
    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(self.image(batch[0]), self.text(batch[1]))


def check(rank: Rank, module: TwoTowers, wanted: list, *, size: int) -> None:
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=size))
    trainer.fit(module, loader(share(DATA, ROWS, rank.index)))
    assert len(module.gradients) == len(wanted)
    for step, (found, true) in enumerate(zip(module.gradients, wanted, strict=True)):
        errors = gradient_errors(found, true, rank.index if size > 1 else 0)
        assert max(errors.values()) < 1e-10, (type(module).__name__, size, step, errors)


@on_ranks(2)
def test_loss_given_up_on_one_rank_still_sends_its_rows_to_the_others(rank: Rank) -> None:
    seen = iter(range(len(DATA)))

    def step(module: TwoTowers, batch: tuple[Tensor, Tensor]) -> Tensor:
        if next(seen) in Guarded.skipped:
            return loss_of_rank_0(module, batch)
        return module.loss(module.image(batch[0]), module.text(batch[1]))

    wanted = train_one_process(alone(Guarded()), DATA, step=step).gradients
    for size in (1, 2):
        check(rank, Guarded(), wanted, size=size)


@on_ranks(2)
def test_activation_checkpointing_of_spread_experts_equals_one_process(rank: Rank) -> None:
    wanted = train_one_process(alone(Plain()), DATA).gradients
    for kind in (Checkpointed, Reentrant):
        for size in (1, 2):
            check(rank, kind(), wanted, size=size)


def alone(module: TwoTowers) -> TwoTowers:
    """``module`` with a loss over the rows of this process alone, although a process group exists."""

    def one_process_loss(image: Tensor, text: Tensor) -> Tensor:
        image, text = (nn.functional.normalize(x, dim=-1) for x in (image, text))
        logits = scale.exp() * image @ text.T
        labels = torch.arange(len(logits))
        return (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2

    scale = module.loss.logit_scale
    module.loss.forward = one_process_loss
    return module


class NotFinite(TwoTowers):
    """NaN in a row of rank 1 in step 1, and the usual guard."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        image = batch[0].clone()
        if self.global_rank == 1 and batch_idx == 1:
            image[0] = float("nan")
        loss = self.image(image).square().mean()
        return loss if loss.isfinite() else None

    def on_train_batch_end(self, *args: object) -> None:
        pass


@on_ranks(2)
def test_case_26_guarded_nan_that_experts_have_sent_on_leaves_no_gradient_on_any_rank(rank: Rank) -> None:
    for size in (1, 2):
        module = NotFinite()
        trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=size))
        trainer.fit(module, loader(share(DATA, ROWS, rank.index)))
        assert all(p.isfinite().all() for p in module.parameters())
        gradients = [[g for n, g in step.items() if n.startswith("image")] for step in module.gradients]
        # with whole experts rank 0 goes on alone; spread ones have mixed the rows of both ranks
        assert all((g is None) == (size == 2) for g in gradients[1])
        assert all(g is not None and g.isfinite().all() for k in (0, 2, 3) for g in gradients[k])
