"""The rules of a configuration: a code each, with a page under ``docs/checks`` that says why and what to write instead.

This is the one list of them. A check lives beside what it looks at, and says its message through its rule.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

__all__ = ["RULES", "Rule", "warn_on_first_rank"]


@dataclass(frozen=True)
class Rule:
    """Something that must hold, or that is better so.

    Attributes:
        code: stable name, "MOE" and three digits, of which the first one is the theme.
        title: what is wrong where the rule is broken.
        severity: "error" ends the run, "warning" is said once, on the first rank.
    """

    code: str
    title: str
    severity: Literal["error", "warning"]

    @property
    def page(self) -> str:
        """Where the rule is explained, in the repository."""
        return f"docs/checks/{self.code.lower()}.md"

    def told(self, message: str) -> str:
        """``message`` with the code and the page behind it, for an error."""
        assert self.severity == "error", f"{self.code} is a {self.severity}"
        return f"{message} [{self.code}: {self.page}]"

    def warn(self, message: str) -> None:
        """Warn once for all ranks, of what each of them finds."""
        assert self.severity == "warning", f"{self.code} is an {self.severity}"
        warn_on_first_rank(f"{message} [{self.code}: {self.page}]", stacklevel=4)


def warn_on_first_rank(message: str, *, stacklevel: int = 3) -> None:
    """Warn once for all ranks, of what each of them finds.

    Args:
        message: what to say.
        stacklevel: as in ``warnings.warn``, counted from there.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=stacklevel)


# 1: the strategy's arguments, the model and its optimizers
DDP_ARGUMENT = Rule("MOE101", "An argument of torch's DistributedDataParallel", "error")
UNKNOWN_DTYPE = Rule("MOE102", "A gradient_dtype that is no dtype", "error")
NO_RANKS_FOR_EXPERTS = Rule("MOE103", "An expert_parallel_size below 1", "error")
RANKS_DIFFER = Rule("MOE104", "Ranks that build different things", "error")
TWO_OPTIMIZERS = Rule("MOE105", "A parameter in two optimizers", "error")
SPARSE = Rule("MOE106", "Sparse parameters or gradients", "error")
UNEVEN_EXPERTS = Rule("MOE107", "Experts that cannot be dealt out evenly", "error")
STALE_GRADIENT = Rule("MOE108", "An expert's gradient from before fit", "error")
FOREIGN_SLICES = Rule("MOE109", "Experts that another run left as slices", "error")
BATCH_NORM = Rule("MOE110", "BatchNorm over the rows of one rank", "warning")
SCALE_DECAY = Rule("MOE111", "Weight decay on the scale of the logits", "warning")
OPTIMIZER_ONLY = Rule("MOE112", "A parameter in an optimizer and not in the module", "warning")

# 2: parameters that somebody else shards or places
SHARDED_EXPERTS = Rule("MOE201", "Experts sharded over ranks that hold different experts", "error")
SHARDED = Rule("MOE202", "Parameters that FSDP or a DTensor shards", "error")
NO_SHARD = Rule("MOE203", "Spread experts under FSDP's NO_SHARD", "error")
SHARDED_SCALAR = Rule("MOE204", "A 0-d parameter under fully_shard or FSDP", "error")
EXPERT_DEVICE = Rule("MOE205", "Experts on another device than their tokens", "error")

# 3: precision
NARROW_SCALE = Rule("MOE301", "A scale of the logits in 16 bits", "error")
HALF_ROUTER = Rule("MOE302", "A router in float16", "error")
NARROW_ROUTER = Rule("MOE303", "A router in bfloat16", "warning")
HALF_UNDER_SCALING = Rule("MOE304", "Float16 parameters under loss scaling", "error")
VANISHED_EPSILON = Rule("MOE305", "An epsilon of Adam that is 0 in float16", "error")
TWO_PRECISIONS = Rule("MOE306", "Two settings of the precision", "warning")
HALF_ON_THE_WIRE = Rule("MOE307", "Float16 between ranks under local loss scaling", "error")
NO_MASTERS = Rule("MOE308", "Master weights of nothing", "warning")
NARROW_POLICY = Rule("MOE309", "A scale of the logits or a router under a 16-bit policy of FSDP", "error")

# 4: what a step is made of
LONE_PAUSE = Rule("MOE401", "Gradients that only some ranks reduce", "error")
REENTRANT = Rule("MOE402", "Reentrant checkpointing of spread experts", "warning")
RECOMPUTED_BATCH_NORM = Rule("MOE403", "BatchNorm in micro-batches that are computed again", "error")
ACCUMULATED_CONTRAST = Rule("MOE404", "A contrastive loss under accumulate_grad_batches", "warning")

# 5: data
UNEQUAL_BATCHES = Rule("MOE501", "Different numbers of batches", "error")
PLAIN_SAMPLER = Rule("MOE502", "A sampler that does not share rows out", "warning")
SAME_ROWS = Rule("MOE503", "The same rows on all ranks", "warning")

RULES: dict[str, Rule] = {rule.code: rule for rule in list(vars().values()) if isinstance(rule, Rule)}
