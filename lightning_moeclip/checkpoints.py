"""What a run saves and loads: one file without layout, that one process or any other number of ranks can load."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moeclip.batch_counts import CountingStrategy
from lightning_moeclip.gradients.corridor import optimizer_only_parameters
from lightning_moeclip.gradients.masters import MasterWeights
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.state.broadcast import broadcast_buffers
from lightning_moeclip.state.canonical import SpreadExperts
from lightning_moeclip.state.optimizer_parameters import (
    CHECKPOINT_KEY,
    check_number_of_optimizers,
    checkpoint_entry,
    load_parameters,
)

__all__ = ["CheckpointingStrategy"]


class CheckpointingStrategy(CountingStrategy):
    """Saves whole experts and moments, float32 where there are masters, and takes from a file what this rank holds."""

    expert_parallel_size: int
    _mesh: Mesh | None = None
    _experts: SpreadExperts | None = None
    _masters: MasterWeights | None = None
    _loaded: Mapping[str, Any] | None = None  # weights of a checkpoint, before they are rounded to 16 bits

    @property
    def mesh(self) -> Mesh:
        """Axes and groups of this rank; made when the process group is."""
        if self._mesh is None:
            raise RuntimeError("strategy.mesh exists once the ranks have met: read it in setup() or later.")
        return self._mesh

    def _plain_optimizers(self) -> list[Optimizer]:
        return [o for o in self.optimizers if isinstance(o, Optimizer)]

    def _by_parameter(self, state: Mapping[str, Any]) -> dict[int, Tensor]:
        parameters = dict(self.lightning_module.named_parameters(remove_duplicate=False))
        return {id(parameters[n]): v for n, v in state.items() if n in parameters and isinstance(v, Tensor)}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State dict with whole experts; every rank must call this."""
        # after spawn the main process has whole experts and nobody to meet
        is_alone = self.has_failed or self._mesh is None
        if not is_alone:
            broadcast_buffers(self.lightning_module, self.mesh)
        state: dict[str, Any] = self.lightning_module.state_dict()
        if self._masters is not None:
            state = self._masters.wide_state(state, self.lightning_module)
        if is_alone or self._experts is None:
            return state
        return self._experts.whole_model_state(state, self.lightning_module)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights; masters take what the module's 16 bits cannot hold, now or when they are made."""
        if self._experts is not None:
            own = self._experts.own_model_state(checkpoint["state_dict"], self.lightning_module)
            checkpoint = {**checkpoint, "state_dict": own}
        super().load_model_state_dict(checkpoint, strict)
        if self._masters is not None and self._masters.is_attached:
            self._masters.settle()
            self._masters.take(self._by_parameter(checkpoint["state_dict"]))
        elif self.precision_plugin.has_master_weights:
            self._loaded = checkpoint["state_dict"]

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State dict of an optimizer with whole moments; every rank must call this."""
        state = super().optimizer_state(optimizer)
        if self._experts is None or self.has_failed:
            return state
        return self._experts.whole_optimizer_state(optimizer, state)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._experts is not None and not self.has_failed:
            # callbacks may have put a state of their own here, such as averaged weights
            checkpoint["state_dict"] = self._experts.whole_model_state(checkpoint["state_dict"], self.lightning_module)
        outside = optimizer_only_parameters(self.lightning_module, self._plain_optimizers())
        masters = self._masters
        values = {name: p if masters is None else masters.wide_value(p) for name, p in outside.items()}
        checkpoint[CHECKPOINT_KEY] = checkpoint_entry(values, expert_parallel_size=self.expert_parallel_size)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        check_number_of_optimizers(states, self._plain_optimizers())
        outside = optimizer_only_parameters(self.lightning_module, self._plain_optimizers())
        masters = self._masters
        held = {name: p if masters is None else masters.held(p) for name, p in outside.items()}
        load_parameters(checkpoint.get(CHECKPOINT_KEY), held)
        if masters is not None:
            masters.settle()
        if self._experts is not None:
            pairs = zip(self._plain_optimizers(), states, strict=True)
            states = [self._experts.own_optimizer_state(optimizer, state) for optimizer, state in pairs]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
