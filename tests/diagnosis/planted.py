"""Modules with one fault each, and one without: at the top of a module, so that ranks import them."""

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.functional import cross_entropy, normalize

from lightning_moeclip.binding import LightningModule, pl
from lightning_moeclip.modules import MoE, auxiliary_loss, contrastive_loss
from lightning_moeclip.parallel.roles import read_roles
from lightning_moeclip.strategy import MoEClipStrategy

Batch = tuple[Tensor, ...]
Case = tuple[LightningModule, list[Batch]]
WIDTH, DIM, ROWS, PARTS = 6, 4, 8, 3


class Pair(LightningModule):
    """Two linear towers and a temperature that is a parameter of the module: nothing is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(WIDTH, DIM)
        self.text = nn.Linear(WIDTH, DIM)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return normalize(self.image(batch[0]), dim=-1), normalize(self.text(batch[1]), dim=-1)

    def training_step(self, batch: Batch, _: int) -> Tensor | None:
        return contrastive_loss(*self.features(batch), self.logit_scale)

    def configure_optimizers(self) -> Any:
        weights = [p for name, p in self.named_parameters() if name != "logit_scale"]
        groups = [{"params": weights}, {"params": [self.logit_scale], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)


class PlainLoss:
    """A loss that is no module: its temperature is in no parameter list but the optimizer's."""

    def __init__(self) -> None:
        self.logit_scale = nn.Parameter(torch.tensor(0.5))


class BareScale(Pair):
    def __init__(self) -> None:
        super().__init__()
        del self.logit_scale
        self.loss = PlainLoss()

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return contrastive_loss(*self.features(batch), self.loss.logit_scale)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": self.parameters()}, {"params": [self.loss.logit_scale]}], lr=1e-2)


def dense_loss(image: Tensor, text: Tensor, logit_scale: Tensor) -> Tensor:
    logits = logit_scale.exp() * image @ text.T
    partner = torch.arange(len(logits))
    return (cross_entropy(logits, partner) + cross_entropy(logits.T, partner)) / 2


class Gathered(Pair):
    """all_gather with its default: features of all ranks, and no gradient of any."""

    def training_step(self, batch: Batch, _: int) -> Tensor:
        image, text = (self.all_gather(side).reshape(-1, DIM) for side in self.features(batch))
        return dense_loss(image, text, self.logit_scale)


class OwnSlot(Pair):
    """Features of all ranks, the rank's own with gradient."""

    def training_step(self, batch: Batch, _: int) -> Tensor:
        sides = []
        for mine in self.features(batch):
            parts = list(self.all_gather(mine).reshape(-1, len(mine), DIM))
            parts[self.global_rank] = mine
            sides.append(torch.cat(parts))
        return dense_loss(sides[0], sides[1], self.logit_scale)


class OwnRows(Pair):
    """Each rank compares its own rows alone."""

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return dense_loss(*self.features(batch), self.logit_scale)


class TimesWorld(Pair):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        return loss * self.trainer.world_size


class CountedScale(Pair):
    """Cached features on several ranks: the temperature is counted once per part."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        num_parts = PARTS if self.trainer.world_size > 1 else 1
        image, text = self.features(batch)
        for _part in range(num_parts):
            loss = contrastive_loss(image / 1.0, text / 1.0, self.logit_scale)
            held = loss if _part == 0 else contrastive_loss(image.detach(), text.detach(), self.logit_scale)
            self.manual_backward(held, retain_graph=True)
        optimizer.step()


class CountedAtOnce(Pair):
    """The same in one backward, which torch's DDP allows."""

    def training_step(self, batch: Batch, _: int) -> Tensor:
        image, text = self.features(batch)
        loss = contrastive_loss(image, text, self.logit_scale)
        for _part in range(PARTS - 1 if self.trainer.world_size > 1 else 0):
            again = contrastive_loss(image.detach(), text.detach(), self.logit_scale)
            loss = loss + again - again.detach()
        return loss


class RawStep(Pair):
    """Steps an optimizer past Lightning, and its temperature is not reduced by anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        self.manual_backward(loss)
        optimizer.step()


class Unstepped(RawStep):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = Pair.training_step(self, batch, batch_idx)
        assert loss is not None
        self.manual_backward(loss)


class Spoiled(Pair):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        return loss * float("nan") if self.trainer.world_size > 1 and self.global_rank == 1 else loss


class Failing(Pair):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.trainer.world_size > 1 and self.global_rank == 1:
            raise KeyError("planted on rank 1")
        return super().training_step(batch, batch_idx)


class Slow(Pair):
    """Rank 1 computes for long while rank 0 waits for it, then sleeps for long."""

    seconds = 12.0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.trainer.world_size > 1 and self.global_rank == 1:
            end = time.monotonic() + self.seconds
            while batch_idx == 0 and time.monotonic() < end:
                batch[0].square().sum()
            time.sleep(max(0.0, end - time.monotonic() if batch_idx == 0 else self.seconds))
        return super().training_step(batch, batch_idx)


class Noisy(Pair):
    """Dropout by a function, which nobody can switch off."""

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().features((nn.functional.dropout(batch[0], 0.5), batch[1]))


class WithDropout(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().features((self.drop(batch[0]), batch[1]))


class LeftOver(WithDropout):
    """Dropout as a module, and our layer in a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, 8, 4, top_k=2)

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().features((self.moe(batch[0]), batch[1]))


class Normed(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().features((self.norm(batch[0]), batch[1]))


class Unstable(Pair):
    """Something that no seed governs."""

    calls = 0

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        jitter = torch.rand(1, generator=torch.Generator().manual_seed(id(object()) % 9973 + torch.seed() % 99991))
        return super().features((batch[0] * jitter, batch[1]))


class Routed(LightningModule):
    """Experts in a ModuleList, called for the rows that the batch sends them, behind a router that weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def training_step(self, batch: Batch, _: int) -> Tensor:
        rows, choices = batch
        hidden = self.stem(rows).tanh()
        weights = self.router(hidden).softmax(-1)
        out = hidden
        for index, expert in enumerate(self.experts):
            chosen = (choices == index).nonzero().squeeze(-1)
            if len(chosen):
                out = out.index_add(0, chosen, expert(hidden[chosen]) * weights[chosen, index, None])
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Everything(LightningModule):
    """Parts that share nothing but the sum of their losses, each with a fault of its own, and one without."""

    parts: ClassVar[dict[str, type[LightningModule]]] = {
        "whole": Pair,
        "bare": BareScale,
        "gathered": Gathered,
        "own_slot": OwnSlot,
        "routed": Routed,
    }

    def __init__(self) -> None:
        super().__init__()
        for name, part in self.parts.items():
            self.add_module(name, part())
        self.counted = nn.Parameter(torch.tensor([0.5, -0.2]))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        several = self.trainer.world_size > 1
        losses = []
        for name in self.parts:
            part = self.get_submodule(name)
            assert isinstance(part, LightningModule)
            part.trainer = self.trainer
            losses.append(part.training_step((batch[0], batch[2] if name == "routed" else batch[1]), batch_idx))
        # what accumulation over cached features does to a parameter that is no feature: once per part
        counted = self.counted + (PARTS - 1) * (self.counted - self.counted.detach()) * several
        return torch.stack([*losses, (batch[0][:, :2] * counted).square().mean()]).sum()

    def configure_optimizers(self) -> Any:
        outside = self.get_submodule("bare").loss.logit_scale
        return torch.optim.AdamW([{"params": self.parameters()}, {"params": [outside]}], lr=1e-2)


class EverythingAndFrozen(Everything):
    """Rank 1 also freezes a router when training has begun."""

    def on_train_batch_start(self, *_: Any) -> None:
        router = self.get_submodule("routed.router")
        router.requires_grad_(not (self.trainer.world_size > 1 and self.global_rank == 1))


class FrozenRouter(Routed):
    """Rank 1 freezes its router before the strategy looks."""

    def setup(self, stage: str) -> None:
        self.router.requires_grad_(not (self.trainer.world_size > 1 and self.global_rank == 1))


class FrozenLater(Routed):
    """Rank 1 freezes its router when training has begun, which no strategy has checked."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.router.requires_grad_(not (self.trainer.world_size > 1 and self.global_rank == 1))


class Spread(LightningModule):
    """Our layer with experts on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, 8, 4, top_k=2)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return (batch[0] + self.moe(batch[0])).square().mean() + auxiliary_loss(self, balance=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Tied(Spread):
    """Two experts whose logits are as good as equal: rounding decides."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.moe.router.weight[1:] = self.moe.router.weight[0]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.trainer.world_size > 1:  # another order of summation, as on another machine
            with torch.no_grad():
                self.moe.router.weight[3].mul_(1 + 1e-15)
                self.moe.router.weight[2].mul_(1 - 1e-15)
        return super().training_step(batch, batch_idx)


class Sharded(LightningModule):
    """Experts as DTensors over the ranks, everything else left plain."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Linear(WIDTH, WIDTH, bias=False)

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.experts.weight, DTensor):
            mesh = self.device_mesh["tensor_parallel"]
            self.experts.weight = nn.Parameter(distribute_tensor(self.experts.weight.detach(), mesh, [Shard(0)]))

    def training_step(self, batch: Batch, _: int) -> Tensor:
        whole = self.experts.weight
        if isinstance(whole, DTensor):
            # in the place of an exchange of tokens: gradients of all ranks are summed, and divided by their number
            whole = whole.full_tensor(grad_placements=[Partial()])
            whole.register_hook(lambda gradient: gradient / self.trainer.world_size)
        return (self.stem(batch[0]).tanh() @ whole).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class MadeLater(Pair):
    """Makes layers in its hooks, reduces a parameter in another, and uses a Trainer as users do: nothing is wrong."""

    def __init__(self) -> None:
        super().__init__()
        del self.image, self.logit_scale
        self.loss = PlainLoss()

    def setup(self, stage: str) -> None:
        self.image = nn.Sequential(nn.Linear(WIDTH, DIM), nn.Dropout(0.5))

    def configure_model(self) -> None:
        self.router = nn.Linear(WIDTH, 3)
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.experiment.add_scalar("words", float(len(batch["captions"])), batch_idx)
        self.logger.experiment.config.update({"run": self.logger.watch(self)})
        lengths = torch.tensor([[float(len(caption))] for caption in batch["captions"]])
        features = self.image(batch["rows"]) * self.drop(self.router(batch["rows"])).softmax(-1)[:, :1]
        scaled = self.text(batch["rows"]) * self.loss.logit_scale
        loss = (features * lengths + scaled).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.world_size > 1:
            grad = self.loss.logit_scale.grad
            assert grad is not None
            torch.distributed.all_reduce(grad)
            grad /= self.trainer.world_size

    def configure_callbacks(self) -> Any:
        return [pl.callbacks.EarlyStopping("val_loss"), pl.callbacks.LearningRateMonitor()]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([*self.parameters(), self.loss.logit_scale], lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class StepsTwice(MadeLater):
    """By hand, each optimizer twice a batch, with gradients that are sparse: nothing is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.words = nn.Embedding(4, WIDTH, sparse=True)

    def setup(self, stage: str) -> None:
        pass

    def configure_model(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for _ in range(2):
            dense, sparse = self.optimizers()
            dense.zero_grad()
            sparse.zero_grad()
            words = self.words(batch[1].argmax(-1) % 4)
            loss = (self.text(batch[0] * words) * self.loss.logit_scale).square().mean()
            self.manual_backward(loss)
            dense.step()
            sparse.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if any(p is self.loss.logit_scale for group in optimizer.param_groups for p in group["params"]):
            super().on_before_optimizer_step(optimizer)

    def configure_optimizers(self) -> Any:
        dense = torch.optim.SGD([*self.text.parameters(), self.loss.logit_scale], lr=1e-2)
        return [dense, torch.optim.SparseAdam(self.words.parameters(), lr=1e-2)]

    def configure_callbacks(self) -> Any:
        return []


class Skips(Pair):
    """A guard that looks at the rows of its own batch, of which one rank's are fine."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if batch[0].isnan().any() else self.image(batch[0]).square().mean()


class Unreached(Pair):
    """The optimizer holds a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.other.parameters(), lr=1e-2)


class AveragedOverReplicas(MoEClipStrategy):
    """Divides an expert's gradient by the number of ranks that hold it."""

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().backward(*args, **kwargs)
        roles = read_roles(self.lightning_module)
        for name, p in self.lightning_module.named_parameters():
            if roles[name].kind == "expert" and p.grad is not None:
                p.grad.mul_(self.expert_parallel_size)
        return loss


def averaged_over_replicas() -> MoEClipStrategy:
    return AveragedOverReplicas(expert_parallel_size=2)


def model_parallel() -> Any:
    return pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)


def rows(num: int = 2, *, size: int = ROWS) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator))] * num


def choices(*by_row: Sequence[int]) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(len(c), WIDTH, generator=generator), torch.tensor(c)) for c in by_row]


def pair() -> Case:
    return Pair(), rows()


def left_over() -> Case:
    return LeftOver(), rows(size=ROWS + 1)


def no_batches() -> LightningModule:
    return Pair()


def needs_gpu() -> Case:
    raise RuntimeError("No CUDA GPUs are available")


def unequal() -> Any:
    return Pair(), [rows(1)[0], rows(1)[0][:1]]


def made_later() -> Any:
    features = rows(1)[0][0]
    return MadeLater(), [{"rows": features, "captions": ["word" * i for i in range(ROWS)]}] * 2


def steps_twice() -> Case:
    return StepsTwice(), rows(1)


def skips() -> Case:
    ((image, text),) = rows(1)
    image[0, 0] = float("nan")
    return Skips(), [(image, text)]


def unreached() -> Case:
    return Unreached(), rows(1)


def slow_factory() -> Case:
    time.sleep(600.0)
    return pair()


def bare_scale() -> Case:
    return BareScale(), rows()


def gathered() -> Case:
    return Gathered(), rows()


def own_slot() -> Case:
    return OwnSlot(), rows()


def own_rows() -> Case:
    return OwnRows(), rows()


def times_world() -> Case:
    return TimesWorld(), rows()


def counted_scale() -> Case:
    return CountedScale(), rows()


def counted_at_once() -> Case:
    return CountedAtOnce(), rows()


def raw_step() -> Case:
    return RawStep(), rows()


def unstepped() -> Case:
    return Unstepped(), rows()


def spoiled() -> Case:
    return Spoiled(), rows()


def failing() -> Case:
    return Failing(), rows()


def slow() -> Case:
    return Slow(), rows()


def noisy() -> Case:
    return Noisy(), rows()


def with_dropout() -> Case:
    return WithDropout(), rows()


def normed() -> Case:
    return Normed(), rows()


def unstable() -> Case:
    return Unstable(), rows()


def with_choices() -> list[Batch]:
    (features, choice), *_ = choices([0, 1, 2, 0, 0, 1, 1, 0])
    return [(features, features.flip(0), choice)] * 2


def everything() -> Case:
    return Everything(), with_choices()


def everything_and_frozen() -> Case:
    return EverythingAndFrozen(), with_choices()


def idle_on_one_rank() -> Case:
    """Expert 2 has rows on rank 0 alone."""
    return Routed(), choices([0, 1, 2, 0, 0, 1, 1, 0], [0, 1, 2, 0, 0, 1, 1, 0])


def idle_on_each_rank() -> Case:
    """Expert 1 has rows on rank 0 alone, expert 2 on rank 1 alone."""
    return Routed(), choices([0, 1, 0, 0, 0, 2, 2, 0], [0, 1, 0, 0, 0, 2, 2, 0])


def frozen_router() -> Case:
    return FrozenRouter(), choices([0, 1, 2, 0, 0, 1, 2, 0])


def frozen_later() -> Case:
    return FrozenLater(), choices([0, 1, 2, 0, 0, 1, 2, 0])


def spread() -> Case:
    return Spread(), rows()


def tied() -> Case:
    return Tied(), rows()


def sharded() -> Case:
    return Sharded(), rows()
