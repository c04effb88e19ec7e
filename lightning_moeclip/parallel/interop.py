"""Layouts of other libraries: where open_clip, transformers, timm and DeepSpeed keep towers, routers and experts.

None of them is imported. A layout is known by names of modules and, for experts that DeepSpeed has shared out over
ranks, by what its layer and its parameters carry. ``towers=`` is for everything else.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_moeclip.parallel.mesh import Mesh

__all__ = [
    "ExpertList",
    "Kind",
    "check_expert_lists",
    "check_expert_order",
    "expert_lists",
    "is_scalar_name",
    "listed_names",
    "recognise_kind",
    "recognise_tower",
    "refuse_copied_lists",
    "tagged_parameters",
]

Kind = Literal["dense", "expert", "router", "projection", "logit_scale"]

# path segments under which open_clip, transformers, timm-style and hand-written CLIP models keep a tower
_TOWER_SEGMENTS = {
    "image": {
        "visual", "vision", "image", "vision_model", "vision_tower", "image_tower", "vision_encoder", "image_encoder",
        "visual_projection", "vision_projection", "image_projection", "image_proj", "visual_proj", "vision_proj",
        "image_head",
    },
    "text": {
        "text", "text_model", "text_tower", "text_encoder", "text_projection", "text_proj", "text_head",
    },
    # CoCa's: it reads both modalities and learns from the captioning loss alone, so that in the text tower its
    # gradients would blur what the two halves of the contrastive loss are compared by
    "decoder": {"text_decoder"},
}  # fmt: skip
# open_clip's CLIP keeps the parts of its text tower beside `visual`
_OPEN_CLIP_TEXT = {"transformer", "token_embedding", "positional_embedding", "ln_final", "text_projection"}

_EXPERT = re.compile(r"(^|\.)experts?(\.|$)")
# the last map into the space that the towers share. Pooling by attention that ends there (RN50's attnpool, SigLIP's
# vision_model.head) is a part of its tower, dense
_PROJECTIONS = [
    re.compile(pattern)
    for pattern in (
        r"(^|\.)((image|text|visual|vision)_(proj|projection)|projection(_head)?|proj_head)(\.|$)",
        r"(^|\.)(visual|vision_model|text)\.proj(\.|$)",
        r"(^|\.)visual\.head\.(proj|mlp)\.",  # open_clip around a timm trunk
        r"(^|\.)visual\.trunk\.head\.(fc\.)?(weight|bias)$",  # the same, with timm's classifier for a projection
        r"(^|\.)text_model\.head\.(weight|bias)$",  # transformers' SigLIP
    )
]
_SCALARS = {"logit_scale", "logit_bias", "temperature", "logit_temperature", "log_temperature"}
# beside `experts`: transformers, DeepSpeed (gate.wg), FastMoE and Tutel (gates.0.wg)
_GATES = {"gate", "gates"}

_GROUP_NAME = re.compile(r"ep_size_(\d+)")


def recognise_tower(module: nn.Module, path: str) -> str | None:
    """Tower of a parameter by its path, the outermost segment that names one; None for what belongs to no tower.

    Args:
        module: the user's module.
        path: of the parameter in it.
    """
    parent: object = module
    for segment in path.split("."):
        for tower, names in _TOWER_SEGMENTS.items():
            if segment in names:
                return tower
        if segment in _OPEN_CLIP_TEXT and hasattr(parent, "visual"):
            return "text"
        parent = getattr(parent, segment, parent)
    return None


def is_scalar_name(path: str) -> bool:
    """Whether a parameter of this path is called what the scale or the bias of logits is called."""
    return path.rpartition(".")[2] in _SCALARS


def recognise_kind(module: nn.Module, path: str, shape: torch.Size) -> Kind:
    """Kind of a parameter by its path.

    A shared expert (Qwen, DeepSeek), its gate, and the mixing weights of DeepSpeed's residual layer see every token and
    choose nothing: they are dense. So is ``gate_proj`` of a SwiGLU.

    Args:
        module: the user's module.
        path: of the parameter in it.
        shape: of the whole parameter.
    """
    segments = path.split(".")
    if is_scalar_name(path) and shape.numel() == 1 and len(shape) <= 1:  # heads have scales of their own
        return "logit_scale"
    if _EXPERT.search(path):
        return "expert"
    parent: object = module
    for segment in segments:
        if segment == "router" or (segment in _GATES and hasattr(parent, "experts")):
            return "router"
        parent = getattr(parent, segment, parent)
    if "text_decoder" in segments:  # ends in a vocabulary
        return "dense"
    return "projection" if any(pattern.search(path) for pattern in _PROJECTIONS) else "dense"


@dataclass(frozen=True)
class ExpertList:
    """Experts of one layer that another library has shared out: each rank of a group has built others.

    Attributes:
        path: of the ``nn.ModuleList`` with this rank's experts. Member i is expert ``rank * num_local + i`` of the
            layer, for the rank in the group.
        num_local: experts on each rank.
        size: ranks in the group, at least 2.
        layer: that exchanges tokens with the group; None where only the parameters tell of it.
    """

    path: str
    num_local: int
    size: int
    layer: nn.Module | None = None

    def holds(self, name: str) -> bool:
        """Whether a parameter, buffer or entry of a state dict belongs to it."""
        return name.startswith(f"{self.path}.")


def tagged_parameters(module: nn.Module) -> frozenset[int]:
    """Ids of the parameters that DeepSpeed knows as those of experts, whether each rank holds others or not."""
    return frozenset(id(p) for p in module.parameters() if _is_tagged(p))


def expert_lists(module: nn.Module) -> list[ExpertList]:
    """Experts of which each rank has others, by the layout of DeepSpeed's ``moe.layer.MoE`` or by its tags.

    The layout comes first, since a copy of a module loses the tags. Layers with ``ep_size=1`` are not among them: every
    rank has all their experts.

    Raises:
        ValueError: a tagged parameter belongs to no list of experts, or to ranks that nobody knows.
    """
    found = {experts.path: experts for experts in _lists_by_layout(module)}
    for name, parameter in module.named_parameters():
        size = _group_size(name, parameter)
        if size > 1 and not any(experts.holds(name) for experts in found.values()):
            experts = _list_around(module, name, size)
            found[experts.path] = experts
    return list(found.values())


def listed_names(module: nn.Module) -> frozenset[str]:
    """Names of parameters and buffers of experts of which each rank has others."""
    lists = expert_lists(module)
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return frozenset(name for name, _ in tensors if any(experts.holds(name) for experts in lists))


def _lists_by_layout(module: nn.Module) -> Iterator[ExpertList]:
    for path, layer in module.named_modules():
        size, holder = getattr(layer, "ep_size", None), getattr(layer, "experts", None)
        if not isinstance(size, int) or size < 2 or not isinstance(holder, nn.Module):
            continue
        for below, part in holder.named_modules():
            if isinstance(part, nn.ModuleList):
                inner = ".".join(filter(None, (path, "experts", below)))
                yield ExpertList(inner, len(part), size, layer)
                break


def _list_around(module: nn.Module, name: str, size: int) -> ExpertList:
    """The outermost list around a tagged parameter that holds nothing but tagged ones."""
    segments = name.split(".")
    for end in range(1, len(segments)):
        path = ".".join(segments[:end])
        part = module.get_submodule(path) if end < len(segments) - 1 else None
        if isinstance(part, nn.ModuleList) and all(_is_tagged(p) for p in part.parameters()):
            return ExpertList(path, len(part), size)
    raise ValueError(
        f"{name} is tagged allreduce=False for {size} ranks and lies in no nn.ModuleList of experts: a checkpoint "
        "could not say whose it is. Keep the experts of a rank in an nn.ModuleList, or use lightning_moeclip's MoE."
    )


def _is_tagged(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "allreduce", True) is False


def _group_size(name: str, parameter: nn.Parameter) -> int:
    if not _is_tagged(parameter):
        return 1
    group_name = getattr(parameter, "group_name", None)
    known = _GROUP_NAME.fullmatch(str(group_name))
    if known is None:
        raise ValueError(
            f"{name} is tagged allreduce=False with group_name={group_name!r}, which does not say how many ranks hold "
            "other experts. Write group_name='ep_size_2' for pairs of ranks, as DeepSpeed does, or drop the tag."
        )
    return int(known[1])


def check_expert_lists(module: nn.Module, mesh: Mesh) -> None:
    """Refuse experts that another library has shared out over other ranks than the strategy's.

    Raises:
        ValueError: the numbers of ranks differ, or a tag cannot be read.
        RuntimeError: a layer exchanges tokens with no group, or with other ranks than those of this mesh.
    """
    lists = expert_lists(module)
    sizes = {experts.size: experts.path for experts in lists}
    if len(sizes) > 1:
        told = ", ".join(f"{path} over {size}" for size, path in sizes.items())
        raise ValueError(f"Experts are shared out over different numbers of ranks: {told}. Write one ep_size for all.")
    for experts in lists:
        if experts.size != mesh.expert_parallel_size:
            raise ValueError(
                f"{experts.path}: ep_size={experts.size} means that each of {experts.size} ranks has experts of its "
                f"own, and expert_parallel_size={mesh.expert_parallel_size} would average them with one another. "
                f"Write MoEClipStrategy(expert_parallel_size={experts.size})."
            )
        if experts.layer is not None and hasattr(experts.layer, "ep_group") and mesh.experts is not None:
            _check_group(experts.path, experts.layer.ep_group, mesh.experts.group)


def refuse_copied_lists(copy: nn.Module) -> None:
    """Refuse a copy, such as an average of the weights, of experts of which each rank has others.

    Its forward would need groups of its own, and a checkpoint would hold the experts of one rank.

    Args:
        copy: a module that a callback holds.

    Raises:
        ValueError: there are such experts in it.
    """
    for experts in expert_lists(copy):
        raise ValueError(
            f"A callback holds a copy of {experts.path}, of which each of {experts.size} ranks has experts of its own, "
            "and its copies cannot be saved and loaded. Leave out WeightAveraging, or write the layer with "
            "lightning_moeclip.modules.MoE, whose averages are kept."
        )


def _check_group(path: str, group: object, wanted: dist.ProcessGroup) -> None:
    ranks = dist.get_process_group_ranks(wanted)
    if group is None:
        raise RuntimeError(
            f"{path}: the layer has no process group yet, and would exchange tokens with all ranks. Call "
            "deepspeed.init_distributed() and layer.set_deepspeed_parallelism() in configure_model()."
        )
    theirs = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else group
    if theirs != ranks:
        raise RuntimeError(
            f"{path}: the layer exchanges tokens with ranks {theirs}, and MoEClipStrategy shares experts out over "
            f"{ranks}. Call layer.set_deepspeed_parallelism() without use_data_before_expert_parallel_."
        )


def check_expert_order(module: nn.Module, optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> None:
    """Refuse an order of parameters from which the place of another rank's expert cannot be told.

    An optimizer's state has places and no names. Those of whole experts are known where a parameter group follows the
    order of the module, as the group of one process would with all experts in the list.

    Args:
        module: the user's module.
        optimizers: of the run.
        names: name by id of the Parameter.

    Raises:
        ValueError: a group with such experts does not follow the order of the module.
    """
    lists = expert_lists(module)
    place = {name: index for index, (name, _) in enumerate(module.named_parameters())}
    for index, optimizer in enumerate(optimizers if lists else ()):
        for number, group in enumerate(optimizer.param_groups):
            held = [names.get(id(p), "") for p in group["params"]]
            places = [place[name] for name in held if name in place]
            if places != sorted(places) and any(experts.holds(name) for name in held for experts in lists):
                raise ValueError(
                    f"Group {number} of optimizer {index} has experts that are shared out over ranks, and its "
                    "parameters are in another order than the module's: a checkpoint could not say which moments are "
                    "whose. Fill it by one pass over module.named_parameters()."
                )
