"""What Lightning's own strategies do to each kind of parameter: a table of rules, of which the first that fits holds.

Measured on two gloo ranks in float64 with torch 2.13 and lightning 2.6, or read in the sources that a rule names.
DeepSpeed's were read, and its norms measured with 0.19.8.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_moeclip.parallel import rules
from lightning_moeclip.parallel.roles import ParamRole

__all__ = ["StockParameter", "StockRule", "known_strategies", "rule_for"]

Family = Literal[
    "moeclip", "ddp", "ddp_find_unused", "fsdp", "model_parallel", "deepspeed_1", "deepspeed_2", "deepspeed_3"
]

_STARTS = ("", "_spawn", "_fork", "_notebook")
_FAMILIES: dict[str, Family] = {
    **{f"moeclip{start}": "moeclip" for start in ("", "_spawn", "_fork")},
    **{f"ddp{start}": "ddp" for start in _STARTS},
    **{f"ddp{start}_find_unused_parameters_false": "ddp" for start in _STARTS},
    **{f"ddp{start}_find_unused_parameters_true": "ddp_find_unused" for start in _STARTS},
    "fsdp": "fsdp",
    "fsdp_cpu_offload": "fsdp",
    "model_parallel": "model_parallel",
    "deepspeed": "deepspeed_2",
    "deepspeed_stage_1": "deepspeed_1",
    "deepspeed_stage_2": "deepspeed_2",
    "deepspeed_stage_2_offload": "deepspeed_2",
    "deepspeed_stage_3": "deepspeed_3",
    "deepspeed_stage_3_offload": "deepspeed_3",
    "deepspeed_stage_3_offload_nvme": "deepspeed_3",
}
_DDP = ("ddp", "ddp_find_unused")
_SHARDED = ("fsdp", "model_parallel")
_DEEPSPEED = ("deepspeed_1", "deepspeed_2", "deepspeed_3")
_IF_CALLED = "NONE: where a rank has no token"
_SOUND_IF = "If every rank calls every expert in every step it is sound: python -m lightning_moeclip verify tells"


@dataclass(frozen=True)
class StockParameter:
    """What rules look at.

    Attributes:
        role: tower and kind.
        num_dims: of its shape.
        is_in_module: False for one that only an optimizer holds.
        is_called_alone: one expert of a list, whose module gets no call on a rank that has no token for it.
        differs_by_rank: tagged ``allreduce = False``, as DeepSpeed does with experts that other ranks do not have.
        is_ignored_by_ddp: named in the module's ``_ddp_params_and_buffers_to_ignore``.
        is_left_plain: no DTensor, in a module that has some.
    """

    role: ParamRole
    num_dims: int
    is_in_module: bool
    is_called_alone: bool = False
    differs_by_rank: bool = False
    is_ignored_by_ddp: bool = False
    is_left_plain: bool = False


@dataclass(frozen=True)
class StockRule:
    """What some strategies do to some parameters, on two ranks or more.

    Attributes:
        families: the strategies.
        fits: whether it is about a parameter.
        operation: what the ranks do with its gradient.
        axis: over which, and what the sum is divided by: "dp" W, "edp" W too, None for no sum.
        is_reduced: False where nobody does, or not in every step.
        is_conditional: see ``Fate``.
        is_sound: False where the result is wrong, or the run refused.
        num_passes: see ``Fate``.
        why: reason, and what to do.
        source: where this was seen.
    """

    families: tuple[str, ...]
    fits: Callable[[StockParameter], bool]
    operation: str
    axis: Literal["dp", "edp"] | None
    is_reduced: bool = True
    is_sound: bool = True
    is_conditional: bool = False
    num_passes: int = 2
    why: str = ""
    source: str = ""


_RULES = (
    StockRule(
        (*_DDP, *_SHARDED, *_DEEPSPEED),
        lambda p: not p.is_in_module,
        "NONE: nobody",
        None,
        is_reduced=False,
        num_passes=0,
        why="only an optimizer holds it, and the strategy reduces what the module registers: each rank steps it with "
        "its own gradient, and the ranks drift apart (a temperature was 0.537 and 0.512 after 20 steps, for a true "
        "0.534). Make it an nn.Parameter of the module",
        source="measured; torch.nn.parallel.DistributedDataParallel takes module.named_parameters()",
    ),
    StockRule(
        _SHARDED,
        lambda p: p.num_dims == 0,
        "REFUSED: 0-d",
        None,
        is_sound=False,
        num_passes=0,
        why=rules.SHARDED_SCALAR.told(
            "FSDP does not take 0-d parameters and the run fails when it starts. Give it the shape [1]"
        ),
        source="torch.distributed.fsdp._init_utils, torch.distributed.fsdp._fully_shard._fsdp_init",
    ),
    StockRule(
        _DDP,
        lambda p: p.is_ignored_by_ddp,
        "NONE: nobody",
        None,
        is_reduced=False,
        num_passes=0,
        why="_ddp_params_and_buffers_to_ignore names it, so DDP neither broadcasts nor reduces it. Take it off the "
        "list, or reduce it yourself before the optimizer steps",
        source="torch.nn.parallel.DistributedDataParallel.__init__",
    ),
    StockRule(
        _DDP,
        lambda p: p.differs_by_rank,
        "sum over dp, of different experts",
        "dp",
        is_sound=False,
        why="allreduce=False says that each rank has another expert here. DDP knows no such tag: rank 0's expert "
        "overwrites the others when the run starts, and then their gradients are averaged. Nothing fails",
        source="measured with DDPStrategy",
    ),
    StockRule(
        ("ddp",),
        lambda p: p.is_called_alone,
        _IF_CALLED,
        "dp",
        is_reduced=False,
        is_conditional=True,
        why="it is a module of its own, and unreduced in a step in which a rank has no token for it and does not call "
        "it: DDP then leaves gradients as they are without a word (relative error up to 1.4), and the next step waits "
        f"for ever. Write strategy='ddp_find_unused_parameters_true'. {_SOUND_IF}",
        source="measured with DDPStrategy",
    ),
    StockRule(_DDP, lambda p: True, "sum over dp", "dp", source="measured with DDPStrategy: 6e-16"),
    StockRule(
        _SHARDED,
        lambda p: p.differs_by_rank,
        "reduce-scatter over dp, of different experts",
        "dp",
        is_sound=False,
        num_passes=1,
        why="allreduce=False says that each rank has another expert here, and FSDP takes them for copies of one: their "
        "parts are put together and their gradients averaged (5.5 and None for 5.0 and 0.5). Nothing fails",
        source="measured with fully_shard",
    ),
    StockRule(
        ("model_parallel",),
        lambda p: p.is_left_plain,
        "NONE: nobody",
        None,
        is_reduced=False,
        num_passes=0,
        why="other parameters of the module are DTensors and this one is not: ModelParallelStrategy reduces nothing "
        "itself (2.0 for 4.0). Put it under fully_shard on the data-parallel mesh",
        source="measured with ModelParallelStrategy",
    ),
    StockRule(_SHARDED, lambda p: True, "reduce-scatter over dp", "dp", num_passes=1, source="torch.distributed.fsdp"),
    StockRule(
        ("deepspeed_3",),
        lambda p: p.differs_by_rank,
        "REFUSED: experts of ZeRO 3",
        None,
        is_sound=False,
        num_passes=0,
        why="DeepSpeed's own experts do not work with ZeRO stage 3 and the run fails when it starts. Write "
        "strategy='deepspeed_stage_2'",
        source="deepspeed.runtime.engine: 'MoE not supported with Stage 3'",
    ),
    StockRule(
        _DEEPSPEED,
        lambda p: p.differs_by_rank,
        "sum over edp",
        "edp",
        is_sound=False,
        why="divided by the number of all ranks from DeepSpeed 0.16 on; before, by the ranks that hold it, which is "
        "expert_parallel_size times too big (#5618, mended by PR 6546). With gradient_clip_val the norm is still not "
        "that of one process: ranks that hold different experts are averaged (#8475; 0.19.8 gave 7.236 for 10.954 in "
        "float32, and 6.356 for 7.594 in bfloat16)",
        source="deepspeedai/DeepSpeed#5618, #6546, #8475; norms measured with 0.19.8",
    ),
    StockRule(
        ("deepspeed_3",),
        lambda p: p.is_called_alone,
        _IF_CALLED,
        "dp",
        is_reduced=False,
        is_conditional=True,
        num_passes=1,
        why="it is a module of its own, and unreduced in a step in which a rank has no token for it and does not call "
        "it: the other ranks wait for that one for ever in their gathers and sums. Call "
        f"deepspeed.utils.set_z3_leaf_modules on the layer of experts. {_SOUND_IF}",
        source="deepspeedai/DeepSpeed#4966, #5008",
    ),
    StockRule(
        ("deepspeed_1", "deepspeed_2"),
        lambda p: p.is_called_alone,
        _IF_CALLED,
        "dp",
        is_reduced=False,
        is_conditional=True,
        num_passes=1,
        why="it is a module of its own, and unreduced in a step in which a rank has no token for it and does not call "
        "it: ZeRO fills its buckets as gradients come, so that ranks sum buckets of different content, or of different "
        f"size. {_SOUND_IF}",
        source="read: deepspeed.runtime.zero.stage_1_and_2, reduce_independent_p_g_buckets_and_remove_grads",
    ),
    StockRule(
        _DEEPSPEED,
        lambda p: True,
        "reduce-scatter over dp",
        "dp",
        num_passes=1,
        source="deepspeed.runtime.zero",
    ),
)


def known_strategies() -> dict[str, Family]:
    """Names that can be explained, and which of them do the same."""
    return dict(_FAMILIES)


def rule_for(family: str, parameter: StockParameter) -> StockRule:
    """The rule that holds for a parameter under a strategy other than ours."""
    return next(rule for rule in _RULES if family in rule.families and rule.fits(parameter))
