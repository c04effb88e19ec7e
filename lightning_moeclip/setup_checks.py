"""The part of the strategy that calls the checks: before the experts spread, with the optimizers, at the first batch.

What the checks say is in ``parallel``; here is when. Errors of one rank are raised on all of them.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_moeclip.gradients.corridor import CorridorSettings, optimizer_only_parameters
from lightning_moeclip.gradients.master_parameter import parameter_names
from lightning_moeclip.parallel import checks, interop, loader_checks, precision_checks, sharding_checks, step_checks
from lightning_moeclip.parallel.agreement import together
from lightning_moeclip.parallel.fates import role_outside
from lightning_moeclip.parallel.ledger import Page
from lightning_moeclip.parallel.roles import ParamRole, read_roles, undecayed_parameters
from lightning_moeclip.state.digest import joint_digest
from lightning_moeclip.watching import WatchedStrategy

__all__ = ["CheckedStrategy"]


@dataclass(frozen=True)
class _EpochCard:
    """What a rank says of itself when an epoch starts.

    Attributes:
        is_outdated: its trainable parameters are no longer those of the plan.
        accumulate_grad_batches: micro-batches of a step.
        feed: what it is fed; None after the first epoch.
        error: what is wrong on it.
    """

    is_outdated: bool
    accumulate_grad_batches: int
    feed: loader_checks.FeedCard | None
    error: str | None


class CheckedStrategy(WatchedStrategy):
    """Calls every check of a run, each at the first moment at which it can tell."""

    _settings: CorridorSettings
    _is_fed = _has_told_of_accumulation = _has_told_of_reentrance = False

    def check_outside_fit(self) -> None:
        """Refuse experts that another run left as slices; a collective."""
        with together():
            self._check_no_foreign_slices()

    def check_before_spreading(self) -> None:
        """Look at the module before anything is broadcast or spread; a collective."""
        module = self.lightning_module
        self._is_fed = self._has_told_of_accumulation = self._has_told_of_reentrance = False
        with together():
            self._check_sharding(module)
            checks.check_strided_gradients(module)
            precision_checks.check_wire_dtype(self._settings.gradient_dtype, is_local=self.precision_plugin.is_local)
            read_roles(module, self._settings.towers)
            if self._experts is not None:
                checks.check_spreadable(module, self.expert_parallel_size)
            self._check_no_foreign_slices()
            step_checks.check_recomputed_batch_norm(module)
        if self.world_size > 1:
            checks.warn_of_batch_norm(module)
        wrapped = step_checks.reentrant_wrappers(module) if self._experts is not None else []
        if wrapped:
            self._tell_of_reentrance(", ".join(wrapped))

    def check_parameters(self) -> None:
        """Look at what is to be trained, before it gets masters; a collective."""
        module = self.lightning_module
        with together():
            precision_checks.check_16_bit_parameters(
                dict(module.named_parameters()),
                read_roles(module, self._settings.towers),
                has_masters=self.precision_plugin.has_master_weights,
                is_scaled=self.precision_plugin.scaler is not None,
            )

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Look at what the optimizers hold; the same on all ranks."""
        module = self.lightning_module
        outside = optimizer_only_parameters(module, optimizers)
        names = parameter_names(module, optimizers, outside=outside)
        checks.check_one_optimizer_each(optimizers, names)
        interop.check_expert_order(module, optimizers, names)
        precision_checks.check_epsilon_in_float16(optimizers, names)
        checks.warn_of_scale_decay(optimizers, names, self._trained_roles(optimizers), undecayed_parameters(module))

    def check_checkpointing(self, page: Page) -> None:
        """Look at what a training step has run without a graph.

        Args:
            page: what the layers of the step entered.
        """
        if page.checkpoints and self._experts is not None and not self._has_told_of_reentrance:
            self._tell_of_reentrance("A layer ran")

    @override
    def epoch_card(self, batch: Any) -> _EpochCard:
        corridor = self._corridor
        return _EpochCard(
            is_outdated=corridor is not None and corridor.is_outdated(),
            accumulate_grad_batches=self._trainer.accumulate_grad_batches,
            feed=None if self._is_fed or self.world_size == 1 else self._feed(batch),
            error=self._misplaced_expert(),
        )

    @override
    def read_epoch_cards(self, cards: list[_EpochCard]) -> None:
        for rank, card in enumerate(cards):
            if card.error is not None:
                raise ValueError(f"rank {rank}: {card.error}")
        by_rank = [card.accumulate_grad_batches for card in cards]
        step_checks.check_equal_accumulation(by_rank)
        if not self._has_told_of_accumulation:
            roles = self._trained_roles(self._plain_optimizers())
            self._has_told_of_accumulation = step_checks.warn_of_accumulated_contrast(roles, by_rank[0])
        feeds = [card.feed for card in cards if card.feed is not None]
        if feeds:
            self._is_fed = True
            loader_checks.warn_of_rows(feeds)
        if self._corridor is not None and any(card.is_outdated for card in cards):
            self._corridor.rebuild()

    def _trained_roles(self, optimizers: Sequence[Optimizer]) -> dict[str, ParamRole]:
        """Role of what is trained, by name, also of what only an optimizer holds."""
        module = self.lightning_module
        roles = read_roles(module, self._settings.towers)
        trained = {name: roles[name] for name, parameter in module.named_parameters() if parameter.requires_grad}
        outside = optimizer_only_parameters(module, optimizers)
        return trained | {name: role_outside(parameter) for name, parameter in outside.items()}

    def _check_sharding(self, module: nn.Module) -> None:
        if self.world_size > 1:
            sharding_checks.check_sharded_parameters(
                sharding_checks.sharded_parameters(module),
                replicas=self.mesh.replicas("edp"),
                expert_parallel_size=self.expert_parallel_size,
            )

    def _check_no_foreign_slices(self) -> None:
        for root in [self.lightning_module, *self._copies_in_callbacks()]:
            checks.check_no_foreign_slices(root, self.mesh.experts)
        interop.check_expert_lists(self.lightning_module, self.mesh)
        for copy in self._copies_in_callbacks():
            interop.refuse_copied_lists(copy)

    def _copies_in_callbacks(self) -> list[nn.Module]:
        """Modules that callbacks hold, such as the averages of ``WeightAveraging``, made before the experts spread."""
        values = [value for callback in self._trainer.callbacks for value in vars(callback).values()]
        return [v for v in values if isinstance(v, nn.Module) and v is not self.lightning_module]

    def _tell_of_reentrance(self, where: str) -> None:
        self._has_told_of_reentrance = True
        step_checks.warn_of_reentrant_checkpointing(where)

    def _misplaced_expert(self) -> str | None:
        # not before the first batch: until then the user's hooks may move what they like
        module = self.lightning_module
        # a frozen one, such as a teacher's, may lie where it likes
        devices = {name: parameter.device for name, parameter in module.named_parameters() if parameter.requires_grad}
        try:
            sharding_checks.check_expert_devices(
                devices, read_roles(module, self._settings.towers), run_device=self.root_device
            )
        except ValueError as error:
            return str(error)
        return None

    def _feed(self, batch: Any) -> loader_checks.FeedCard:
        try:
            return self._look_at_feed(batch)
        except Exception:  # of a loader of the user's: what can only end in a warning must not end his run
            return loader_checks.FeedCard(plain=None, is_shared_out=False, rows=None)

    def _look_at_feed(self, batch: Any) -> loader_checks.FeedCard:
        loaders = self._trainer.fit_loop._combined_loader.flattened
        rank, world_size = self.global_rank, self.world_size
        named = [(loader, loader_checks.plain_sampler(loader)) for loader in loaders]
        is_injected = self._trainer._accelerator_connector.use_distributed_sampler
        plain = [] if is_injected else [(loader.dataset, name) for loader, name in named if name is not None]
        return loader_checks.FeedCard(
            plain=plain[0][1] if plain else None,
            is_shared_out=any(loader_checks.shares_rows_out(x, rank=rank, world_size=world_size) for x in loaders),
            rows=_bits_of(batch, self.root_device),
            data=tuple(_told_of_data(dataset, self.root_device) for dataset, _ in plain),
        )


def _told_of_data(dataset: Any, device: torch.device) -> tuple[Any, ...]:
    """What is equal for equal datasets: the length, and what can be read without running code of the user's."""
    try:
        first = tree_leaves(loader_checks.first_item(dataset))
        return len(dataset), loader_checks.chosen_rows(dataset), _read_bits(first, device)
    except Exception:  # of a user's dataset; where nothing is known, nothing differs
        return ()


def _bits_of(batch: Any, device: torch.device) -> tuple[Any, ...] | None:
    """What is equal for equal batches; read on the host, once in a run. None without rows, or with unknown ones.

    Args:
        batch: a tree of tensors, arrays, strings and numbers. Of anything else there is no statement.
        device: of the run.
    """
    try:
        leaves = tree_leaves(batch)
        has_rows = any(isinstance(x, Tensor | np.ndarray) and x.ndim and math.prod(x.shape) for x in leaves)
        return _read_bits(leaves, device) if has_rows else None
    except Exception:  # a look at what a user feeds must not end his run
        return None


def _read_bits(leaves: list[Any], device: torch.device) -> tuple[Any, ...] | None:
    if not all(map(_is_readable, leaves)):
        return None
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    shapes = tuple((str(x.dtype), *x.shape) for x in tensors)
    others = hashlib.sha256()
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            others.update(f"{place} {type(leaf).__name__} {_spelled(leaf)}\n".encode())
    return shapes, joint_digest(tensors, device=device).item(), others.hexdigest()


def _is_readable(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        # a quantized tensor ends the process, and one that has its own dispatch may communicate
        is_plain = type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
        return is_plain and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized or leaf.is_meta)
    if isinstance(leaf, np.ndarray):
        return not leaf.dtype.hasobject
    return leaf is None or isinstance(leaf, str | bytes | bool | int | float | complex | np.generic)


def _spelled(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype.str} {leaf.shape} {hashlib.sha256(np.ascontiguousarray(leaf).tobytes()).hexdigest()}"
    return repr(leaf)
