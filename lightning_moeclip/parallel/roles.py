"""What each parameter is: the tower it belongs to and its kind, read off its path.

Roles are kept by path and not as attributes: ``copy.deepcopy`` and averaged models drop attributes of a Parameter.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from lightning_moeclip.parallel.mesh import ExpertAxis

__all__ = [
    "ParamRole",
    "SpreadableExperts",
    "is_scalar_name",
    "read_roles",
    "resolve_towers",
    "spreadable_layers",
    "undecayed_parameters",
]

Kind = Literal["dense", "expert", "router", "projection", "logit_scale"]
Towers = Mapping[str, str | Sequence[str]]

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
}  # fmt: skip
# open_clip's CLIP keeps the parts of its text tower beside `visual`
_OPEN_CLIP_TEXT = {"transformer", "token_embedding", "positional_embedding", "ln_final", "text_projection"}

_EXPERT = re.compile(r"(^|\.)experts?(\.|$)")
_PROJECTION = re.compile(
    r"(^|\.)((image|text|visual|vision)_(proj|projection)|projection(_head)?|proj_head|(visual|vision_model)\.proj)(\.|$)"
)
_SCALARS = {"logit_scale", "logit_bias", "temperature", "logit_temperature", "log_temperature"}


@runtime_checkable
class SpreadableExperts(Protocol):
    """A layer whose experts can be spread over ranks; parameters are fused, expert first."""

    num_experts: int
    expert_axis: ExpertAxis | None

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters whose dim 0 is the expert, by name inside the layer."""

    def shard_experts(self, axis: ExpertAxis) -> None:
        """Keep this rank's slice of every expert parameter, in place."""

    def restore_experts(self, whole: dict[str, Tensor]) -> None:
        """Put whole expert parameters back and forget the axis."""


@runtime_checkable
class KeepsScalars(Protocol):
    """A loss that keeps weight decay away from its own scalars."""

    def undecayed(self) -> list[nn.Parameter]:
        """The scalars that weight decay does not touch."""


@dataclass(frozen=True)
class ParamRole:
    """Tower (None when it belongs to none or to several) and kind of one parameter."""

    tower: str | None
    kind: Kind


def spreadable_layers(module: nn.Module) -> Iterator[tuple[str, SpreadableExperts]]:
    """Layers of ``module`` whose experts can be spread, with their paths."""
    for path, layer in module.named_modules():
        if isinstance(layer, SpreadableExperts):
            yield path, layer


def is_scalar_name(path: str) -> bool:
    """Whether a parameter of this path is called what the scale or the bias of logits is called."""
    return path.rpartition(".")[2] in _SCALARS


def undecayed_parameters(module: nn.Module) -> frozenset[int]:
    """Ids of the parameters that their own module keeps weight decay away from."""
    keepers = [layer for layer in module.modules() if isinstance(layer, KeepsScalars)]
    return frozenset(id(parameter) for keeper in keepers for parameter in keeper.undecayed())


def read_roles(module: nn.Module, towers: Towers | None = None) -> dict[str, ParamRole]:
    """Role of every parameter of ``module``.

    Args:
        module: the user's module.
        towers: module or parameter paths by tower; None recognises known layouts.

    Returns:
        Roles by parameter path, one entry for tied parameters.

    Raises:
        ValueError: a path in ``towers`` does not exist, or two towers overlap.
    """
    resolved = resolve_towers(module, towers) if towers is not None else None
    experts = {id(p) for _, layer in spreadable_layers(module) for p in layer.expert_parameters().values()}
    roles = {}
    for path, parameter in module.named_parameters():
        tower = _recognise_tower(module, path) if resolved is None else _declared_tower(path, resolved)
        kind = "expert" if id(parameter) in experts else _recognise_kind(module, path, parameter)
        roles[path] = ParamRole(tower, kind)
    return roles


def resolve_towers(module: nn.Module, towers: Towers) -> dict[str, tuple[str, ...]]:
    """Check declared tower paths and return them as tuples.

    Raises:
        ValueError: a path is neither a module nor a parameter, or a path of one tower contains one of another.
    """
    known = {path for path, _ in module.named_modules()} | {path for path, _ in module.named_parameters()}
    resolved = {tower: (paths,) if isinstance(paths, str) else tuple(paths) for tower, paths in towers.items()}
    for tower, paths in resolved.items():
        for path in paths:
            if path not in known:
                children = ", ".join(name for name, _ in module.named_children())
                raise ValueError(
                    f"towers={{{tower!r}: {path!r}}}: the module has no {path!r}. "
                    f"Write a module path such as one of: {children}."
                )
    for tower, paths in resolved.items():
        for other, other_paths in resolved.items():
            for path in paths:
                clash = [o for o in other_paths if tower != other and _contains(path, o)]
                if clash:
                    raise ValueError(
                        f"towers overlap: {tower!r} has {path!r} and {other!r} has {clash[0]!r}, which lies inside. "
                        f"A parameter belongs to one tower: name the parts of {path!r} that are {tower!r} only."
                    )
    return resolved


def _contains(path: str, other: str) -> bool:
    return other == path or other.startswith(f"{path}.") or path == ""


def _declared_tower(path: str, towers: Mapping[str, Sequence[str]]) -> str | None:
    return next((t for t, paths in towers.items() if any(_contains(p, path) for p in paths)), None)


def _recognise_tower(module: nn.Module, path: str) -> str | None:
    segments = path.split(".")
    parent = module
    for segment in segments:
        for tower, names in _TOWER_SEGMENTS.items():
            if segment in names:
                return tower
        if segment in _OPEN_CLIP_TEXT and hasattr(parent, "visual"):
            return "text"
        parent = getattr(parent, segment, parent)
    return None


def _recognise_kind(module: nn.Module, path: str, parameter: nn.Parameter) -> Kind:
    segments = path.split(".")
    if is_scalar_name(path) and parameter.numel() == 1:
        return "logit_scale"
    if _EXPERT.search(path):
        return "expert"
    parent: object = module
    for segment in segments:
        if segment == "router" or (segment == "gate" and hasattr(parent, "experts")):
            return "router"
        parent = getattr(parent, segment, parent)
    return "projection" if _PROJECTION.search(path) else "dense"
