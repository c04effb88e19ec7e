"""MoE: router -> dispatch -> experts -> combine, on one process or with the experts spread over ranks.

Shapes: T tokens, D width, H hidden width, E experts in all, K experts per token, R rows (copies of tokens).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moeclip.modules.dispatch import (
    RowPlan,
    combine,
    copy_tokens,
    plan_rows,
    plan_within_capacity,
    receive,
    send_back,
    sum_outputs,
)
from lightning_moeclip.modules.experts import ACTIVATIONS, PADDING_MAX, Segments, expert_mlp
from lightning_moeclip.modules.load import TrainingLoad
from lightning_moeclip.modules.record import RoutingCall, RoutingRecord, in_backward
from lightning_moeclip.modules.router import OutputMean, Router, RouterGradient, Routing
from lightning_moeclip.parallel import ledger
from lightning_moeclip.parallel.mesh import ExpertAxis

__all__ = ["MoE"]


class _Shared:
    """The axis of a layer: a copy of the layer shares it, a pickle forgets it (process groups allow neither)."""

    def __init__(self, axis: ExpertAxis | None = None) -> None:
        self.axis = axis

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return _Shared(self.axis)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Shared, ()


class MoE(nn.Module):
    """Mixture of experts: each token goes through its ``top_k`` most probable two-layer perceptrons.

    y = sum over the chosen experts e of w_e act(x w_in[e]) w_out[e]. Router logits and softmax are float32 at least.
    Every token is served unless ``capacity_factor`` is given. Build it whole on every rank; under ``MoEClipStrategy``
    each rank then keeps its slice of the experts, and the forward is a collective over the ranks that share them.

    Args:
        dim: D, width of a token.
        hidden_dim: H, width between the two layers of an expert.
        num_experts: E.
        top_k: K, experts per token.
        activation: "gelu", "gelu_tanh", "quick_gelu", "relu" or "silu".
        normalize_topk: divide the weights by their sum; None: for ``top_k`` of 2 and more. With one expert the router
            would get no gradient.
        router_gradient: "exact". "compensated": the gradient of logits of experts that were not chosen times E / K;
            it is biased and no longer sums to zero. "dense": straight through to the softmax over all experts, where an
            expert that was not chosen stands with the running mean of its outputs (Panda et al. 2025); biased too, and
            each training forward is then a collective over all ranks, as that of SyncBatchNorm.
        capacity_factor: an expert takes at most ceil(capacity_factor * T * K / E) of the T tokens of a call, those with
            the highest weight, the earlier token on ties; for the others it counts as zero, and the weights of their
            other experts stay. Capacity is counted on each rank by itself: the one setting whose result depends on how
            tokens are spread.

    Attributes:
        w_in: [E, D, H], or this rank's slice.
        w_out: [E, H, D], or this rank's slice.
        tokens_per_expert: choices of the last forward by global expert id, [E], int64: of this rank's tokens, before a
            capacity drops any. A recomputation in backward leaves it alone.
        tokens_per_expert_by_tower: the same of the last forward of each tower.
        routing_record: what ``auxiliary_loss`` reads.

    Raises:
        ValueError: a setting that cannot work, with what to write instead.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        top_k: int = 2,
        activation: str = "gelu",
        normalize_topk: bool | None = None,
        router_gradient: RouterGradient = "exact",
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is not known to MoE. Use one of {sorted(ACTIVATIONS)}.")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(
                f"capacity_factor={capacity_factor} must be above 0. "
                "Use 1.25 for a quarter of slack, or None to drop nothing."
            )
        normalize_topk = top_k >= 2 if normalize_topk is None else normalize_topk
        self.dim, self.hidden_dim, self.num_experts, self.top_k = dim, hidden_dim, num_experts, top_k
        self.activation, self.capacity_factor = activation, capacity_factor
        self.router = Router(dim, num_experts, top_k=top_k, normalize_topk=normalize_topk, gradient=router_gradient)
        self.w_in = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w_out = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.output_mean = OutputMean(num_experts, dim) if router_gradient == "dense" else None
        # no buffer: ranks count their own tokens, and buffers are broadcast
        self.tokens_per_expert = torch.zeros(num_experts, dtype=torch.int64)
        self.tokens_per_expert_by_tower: dict[str | None, Tensor] = {}
        self._load = TrainingLoad()
        self.routing_record = RoutingRecord()
        self._shared = _Shared()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the experts as ``nn.Linear`` does, each from its own width."""
        for weight in (self.w_in, self.w_out):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)

    @override
    def extra_repr(self) -> str:
        return f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}, top_k={self.top_k}"

    @property
    def expert_axis(self) -> ExpertAxis | None:
        """The ranks that share the experts out; None while this rank holds all of them."""
        return self._shared.axis

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters whose dimension 0 is the expert, by their name in this module."""
        return {"w_in": self.w_in, "w_out": self.w_out}

    def shard_experts(self, axis: ExpertAxis) -> None:
        """Keep this rank's contiguous slice of the experts, in the same Parameter objects; no communication.

        With the axis that the layer already has this does nothing.

        Raises:
            ValueError: the experts cannot be dealt out evenly.
            RuntimeError: the experts are spread over another axis.
        """
        if self.expert_axis is axis:
            return
        if self.expert_axis is not None:
            raise RuntimeError(
                f"The experts of this MoE are already spread over {self.expert_axis.size} ranks. "
                "Call restore_experts with the whole weights before spreading them over another axis."
            )
        if self.num_experts % axis.size:
            fits = math.gcd(self.num_experts, axis.size)
            raise ValueError(
                f"num_experts={self.num_experts} cannot be spread over expert_parallel_size={axis.size}. "
                f"Use a multiple of {axis.size}, or MoEClipStrategy(expert_parallel_size={fits})."
            )
        share = self.num_experts // axis.size
        for parameter in self.expert_parameters().values():
            parameter.data = parameter.data[axis.rank * share : (axis.rank + 1) * share].clone()
        self._shared.axis = axis

    def restore_experts(self, whole: dict[str, Tensor]) -> None:
        """Put whole expert weights back, in the same Parameter objects, and forget the axis and the slice's gradients.

        Args:
            whole: tensor of all experts for each name in ``expert_parameters``.

        Raises:
            ValueError: a name is missing, unknown, or its tensor does not hold all experts.
        """
        parameters = self.expert_parameters()
        shapes = {name: (self.num_experts, *parameter.shape[1:]) for name, parameter in parameters.items()}
        given = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        if given != shapes:
            raise ValueError(
                f"restore_experts got {given}, but this MoE needs exactly {shapes}. Gather all experts first."
            )
        for name, parameter in parameters.items():
            parameter.grad = None
            parameter.data = whole[name].to(parameter.device, parameter.dtype)
        self._shared.axis = None

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # a checkpoint holds whole experts, and a rank takes its own
        axis = self.expert_axis
        for name in self.expert_parameters() if axis is not None else ():
            whole = state_dict.get(prefix + name)
            if axis is not None and isinstance(whole, Tensor) and whole.shape[:1] == (self.num_experts,):
                state_dict[prefix + name] = whole.chunk(axis.size)[axis.rank]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @property
    def training_load(self) -> Mapping[str | None, Tensor]:
        """Choices per expert of all training forwards so far, by tower, [E], int64: of this rank's own tokens.

        Before a capacity drops any. Neither evaluation nor a recomputation in backward counts. It is never set back:
        a monitor takes the difference of two readings, and a tensor that was read never changes.
        """
        return self._load.choices

    @property
    def training_drops(self) -> Mapping[str | None, Tensor]:
        """Those choices of ``training_load`` that ``capacity_factor`` dropped, in the same way; zeros without."""
        return self._load.drops

    @override
    def forward(self, x: Tensor, tower: str | None = None) -> Tensor:
        """Send each token through its experts.

        Args:
            x: [..., D], also with no tokens at all.
            tower: whose tokens they are, for counts and the auxiliary loss; it changes no output.

        Returns:
            The shape of ``x``, in the dtype of the experts (under autocast, in that of autocast).

        Raises:
            ValueError: the width or dtype of ``x`` is not that of the layer.
            RuntimeError: the experts are spread over ranks, and this call is outside a step of the strategy.
        """
        self._check(x)
        x_TD = x.reshape(-1, self.dim)
        routing = self.router(x_TD)
        y_TD = self._serve(x_TD, routing, tower)
        if self.output_mean is not None:
            y_TD = self.output_mean.straight_through(y_TD, routing)
        return y_TD.view(*x.shape[:-1], self.dim)

    def _check(self, x: Tensor) -> None:
        axis = self.expert_axis
        if axis is not None and not axis.is_open:
            raise RuntimeError(
                f"This forward of a MoE is a collective over the {axis.size} ranks that share its experts, and it was "
                "called outside a step of the strategy, where ranks may differ (a graph logger, a call on one rank). "
                "Call it inside training_step, validation_step, test_step or predict_step, or after fit, where the "
                "experts are whole again."
            )
        held = self.num_experts if axis is None else self.num_experts // axis.size
        if self.w_in.shape[0] != held:
            raise RuntimeError(
                f"This MoE holds {self.w_in.shape[0]} of its num_experts={self.num_experts} experts and no axis to "
                "reach the others, as a pickle of one rank does. Call restore_experts with the whole weights, or "
                "load a checkpoint into a new MoE."
            )
        if x.shape[-1] != self.dim:
            raise ValueError(
                f"MoE(dim={self.dim}) got x of shape {tuple(x.shape)}: the last dimension must be {self.dim}. "
                f"Project the tokens first, for example with nn.Linear({x.shape[-1]}, {self.dim})."
            )
        if x.dtype != self.w_in.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"MoE got x in {x.dtype} with experts in {self.w_in.dtype}: both must be equal outside autocast. "
                f"Use x.to({self.w_in.dtype}), or a Trainer precision that casts."
            )

    @torch.compiler.disable  # type: ignore[misc, untyped-decorator]
    def _serve(self, x_TD: Tensor, routing: Routing, tower: str | None) -> Tensor:
        """Everything whose shapes depend on the routing; not traced by torch.compile."""
        device = x_TD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_TD.dtype
        plan = self._plan(routing)
        rows_RD = copy_tokens(x_TD.to(dtype), plan)
        out_RD = self._run_experts(rows_RD, plan, dtype)
        y_TD = combine(out_RD, routing.weights, plan)
        self._count(routing, plan, tower, y_TD)
        if self.output_mean is not None and self.training and torch.is_grad_enabled() and not in_backward():
            self.output_mean.advance()
            self.output_mean.update(*sum_outputs(out_RD, plan))
        if self.expert_axis is not None and not in_backward():
            ledger.enter(y_TD)
        return y_TD

    def _plan(self, routing: Routing) -> RowPlan:
        if self.capacity_factor is None:
            is_local_cpu = self.expert_axis is None and routing.chosen.device.type == "cpu"
            return plan_rows(routing, padding_max=PADDING_MAX if is_local_cpu else 0.0)
        capacity = math.ceil(self.capacity_factor * routing.chosen.numel() / self.num_experts)
        return plan_within_capacity(routing, capacity)

    def _run_experts(self, rows_RD: Tensor, plan: RowPlan, dtype: torch.dtype) -> Tensor:
        w_in, w_out = self.w_in.to(dtype), self.w_out.to(dtype)
        if (axis := self.expert_axis) is None:
            return expert_mlp(rows_RD, w_in, w_out, Segments.of(plan.counts, ends=plan.ends), self.activation)
        needs_grad = rows_RD.requires_grad or any(p.requires_grad for p in self.parameters())
        received = receive(rows_RD, plan.counts, axis, requires_grad=needs_grad)
        segments = Segments.of(torch.tensor(received.counts, device=rows_RD.device), received.counts)
        return send_back(expert_mlp(received.rows, w_in, w_out, segments, self.activation), received, axis)

    def _count(self, routing: Routing, plan: RowPlan, tower: str | None, y_TD: Tensor) -> None:
        counts_E = plan.chosen
        self.routing_record.add(RoutingCall(tower, routing.logits, counts_E), y_TD, is_training=self.training)
        if in_backward():
            return
        self.tokens_per_expert = counts_E
        self.tokens_per_expert_by_tower[tower] = counts_E
        if self.training:
            self._load.add(tower, counts_E, None if self.capacity_factor is None else plan.counts)
