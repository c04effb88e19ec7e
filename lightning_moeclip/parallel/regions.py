"""Regions of a module: the parts whose gradients may have a loss scale of their own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_moeclip.parallel.roles import ParamRole, SpreadableExperts, Towers, read_roles

__all__ = ["RegionSpec", "region_names", "resolve_regions"]


@dataclass(frozen=True)
class RegionSpec:
    """Which modules a region has.

    Attributes:
        name: its path, without what ``torch.compile`` puts into paths.
        modules: those whose calls are the boundary.
        parameters: ids of all parameters in it, also of the regions inside.
        ancestors: names of the regions that contain it, outermost first.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: frozenset[int]
    ancestors: tuple[str, ...] = ()


def resolve_regions(
    module: nn.Module, paths: Sequence[str] | None, *, towers: Towers | None = None
) -> list[RegionSpec]:
    """Find the modules of every region and check that a boundary around them is enough.

    A path names a module. One without a forward of its own (ModuleList, ModuleDict) stands for the modules in it,
    which share the region.

    Args:
        module: the user's module.
        paths: one for each region. None takes projection heads and layers of experts: modules that hold nothing but
            parameters of kind "projection", our MoE layers, and modules called ``experts``.
        towers: as for ``read_roles``; used with the default paths only.

    Returns:
        One for each path, regions before the regions that contain them.

    Raises:
        ValueError: a path names no module, or one that cannot be a region; two regions cross; or a parameter of a
            region can be reached past its boundary.
    """
    found = _default_regions(module, towers) if paths is None else [(path, _module_at(module, path)) for path in paths]
    specs = [_spec(name, part) for name, part in found]
    for spec in specs:
        _check_no_way_around(module, spec)
    for index, spec in enumerate(specs):
        for other in specs[index + 1 :]:
            _check_nested_or_apart(spec, other)
    nested = [replace(spec, ancestors=_ancestors(spec, specs)) for spec in specs]
    return sorted(nested, key=lambda spec: -len(spec.ancestors))


def region_names(module: nn.Module, paths: Sequence[str] | None, *, towers: Towers | None = None) -> dict[str, str]:
    """The region that each parameter in one belongs to, the innermost, by the parameter's path.

    Args:
        module: the user's module.
        paths: see ``resolve_regions``.
        towers: see ``resolve_regions``.

    Raises:
        ValueError: see ``resolve_regions``.
    """
    owner: dict[int, str] = {}
    for spec in resolve_regions(module, paths, towers=towers):
        for parameter in spec.parameters:
            owner.setdefault(parameter, spec.name)  # regions come before the ones that contain them
    return {name: owner[id(parameter)] for name, parameter in module.named_parameters() if id(parameter) in owner}


def _module_at(module: nn.Module, path: str) -> nn.Module:
    if path == "":
        raise ValueError(
            "regions=['']: the whole module cannot be a region, since its training_step is not called as a module. "
            f"One scale for everything is loss_scaling='unified'; a region is one of: {_children(module)}."
        )
    part, walked = _uncompiled(module), ""
    for segment in path.split("."):
        if segment == "_orig_mod":
            continue
        if segment in part._parameters:
            raise ValueError(
                f"regions=[{path!r}] is a parameter, and a region is a module, whose call is its boundary. "
                + (f"Write {walked!r}, the module whose forward uses it." if walked else "Leave it out.")
            )
        child = part._modules.get(segment)
        if child is None:
            raise ValueError(
                f"regions=[{path!r}]: {repr(walked) if walked else 'the module'} has no module {segment!r}. "
                f"Write a module path such as one of: {_children(part, walked)}."
            )
        part, walked = _uncompiled(child), f"{walked}.{segment}".removeprefix(".")
    return part


def _children(module: nn.Module, path: str = "") -> str:
    names = [_clean(f"{path}.{name}") for name, _ in _uncompiled(module).named_children()]
    return ", ".join(names) if names else f"(none below {path!r})"


def _clean(path: str) -> str:
    return ".".join(segment for segment in path.split(".") if segment and segment != "_orig_mod")


def _uncompiled(module: nn.Module) -> nn.Module:
    """What ``torch.compile`` wrapped: its call is the boundary for those who hold either of the two."""
    while (inner := module._modules.get("_orig_mod")) is not None:
        module = inner
    return module


def _spec(name: str, part: nn.Module) -> RegionSpec:
    parameters = frozenset(id(parameter) for parameter in part.parameters())
    if not parameters:
        raise ValueError(
            f"regions=[{name!r}]: a {type(part).__name__} without parameters has no gradients to scale. "
            "Name a module with parameters, or leave it out."
        )
    modules = {id(boundary): boundary for boundary in _boundaries(name, part)}
    return RegionSpec(_clean(name), tuple(modules.values()), parameters)


def _boundaries(path: str, part: nn.Module) -> Iterator[nn.Module]:
    """The modules with a forward at or below ``part``; those without parameters need no boundary."""
    part = _uncompiled(part)
    if _has_forward(part):
        yield part
        return
    if part._parameters:
        raise ValueError(
            f"regions=[{path!r}]: {path!r} is a {type(part).__name__} without forward that holds the parameter "
            f"{next(iter(part._parameters))!r}, so no call is its boundary. Name the module whose forward uses it."
        )
    for name, child in part.named_children():
        if next(child.parameters(), None) is not None:
            yield from _boundaries(f"{path}.{name}", child)


def _has_forward(part: nn.Module) -> bool:
    return type(part).forward is not nn.Module.forward


def _has_boundary(part: nn.Module) -> bool:
    part = _uncompiled(part)
    return _has_forward(part) or (not part._parameters and all(map(_has_boundary, part.children())))


def _inside(spec: RegionSpec) -> set[int]:
    return {id(layer) for boundary in spec.modules for layer in boundary.modules()}


def _check_no_way_around(module: nn.Module, spec: RegionSpec) -> None:
    """Refuse a parameter that some module reached without passing the region's boundary holds as well."""
    boundaries = {id(boundary) for boundary in spec.modules}
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        path, layer = waiting.pop()
        if id(layer) in boundaries or id(layer) in seen:
            continue
        seen.add(id(layer))
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in spec.parameters:
                inside, outside = _path_inside(spec, module, id(parameter)), _clean(f"{path}.{name}")
                raise ValueError(
                    f"{outside!r} and {inside!r} are one parameter, used outside and inside the region {spec.name!r}: "
                    "it cannot have two scales. Name a module that contains both as the region, or leave the region "
                    "out of regions=[...]."
                )
        waiting.extend((f"{path}.{name}", child) for name, child in reversed(list(layer.named_children())))


def _path_inside(spec: RegionSpec, module: nn.Module, parameter: int) -> str:
    inside = _inside(spec)
    for path, layer in module.named_modules():
        for name, candidate in layer.named_parameters(recurse=False):
            if id(layer) in inside and id(candidate) == parameter:
                return _clean(f"{path}.{name}")
    raise AssertionError("a region's parameter is in one of its modules")


def _contains(spec: RegionSpec, other: RegionSpec) -> bool:
    inside, other_inside = _inside(spec), _inside(other)
    if inside == other_inside:  # a list of one module and that module
        return other.name.startswith(f"{spec.name}.")
    return other_inside < inside


def _check_nested_or_apart(spec: RegionSpec, other: RegionSpec) -> None:
    if _contains(spec, other) or _contains(other, spec):
        return
    if _inside(spec) & _inside(other) or spec.parameters & other.parameters:
        if spec.name == other.name:
            raise ValueError(f"regions=[...] names {spec.name!r} twice. Name it once.")
        raise ValueError(
            f"The regions {spec.name!r} and {other.name!r} cross: they share modules or parameters, and neither "
            "contains the other. Name one of them, or a module that contains both."
        )


def _ancestors(spec: RegionSpec, specs: Sequence[RegionSpec]) -> tuple[str, ...]:
    around = [other for other in specs if other is not spec and _contains(other, spec)]
    return tuple(other.name for other in sorted(around, key=lambda other: sum(_contains(o, other) for o in around)))


def _default_regions(module: nn.Module, towers: Towers | None) -> list[tuple[str, nn.Module]]:
    roles = {_clean(path): role for path, role in read_roles(module, towers).items()}
    seen: set[int] = set()
    return [part for name, child in module.named_children() for part in _default_below(name, child, roles, seen)]


def _default_below(
    path: str, part: nn.Module, roles: dict[str, ParamRole], seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    part, path = _uncompiled(part), _clean(path)
    if id(part) in seen:
        return
    seen.add(id(part))
    held = [roles.get(_clean(f"{path}.{name}")) for name, _ in part.named_parameters()]
    # tied parameters have the role of their first path, and none under the others
    kinds = {None if role is None else role.kind for role in held}
    is_experts = kinds == {"expert"} and path.rpartition(".")[2] in ("expert", "experts")
    is_region = isinstance(part, SpreadableExperts) or is_experts or kinds == {"projection"}
    if path and is_region and _has_boundary(part):
        yield path, part
        return
    for name, child in part.named_children():
        yield from _default_below(f"{path}.{name}", child, roles, seen)
