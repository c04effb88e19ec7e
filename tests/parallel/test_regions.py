"""Which modules a region has, and which regions cannot be."""

import re

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.modules import MoE
from lightning_moeclip.parallel.regions import RegionSpec, resolve_regions


class UserMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) + self.experts[1](x)


class Tower(nn.Module):
    def __init__(self, *, is_own: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(MoE(4, 4, 2) if is_own else UserMoE() for _ in range(2))
        self.proj = nn.Parameter(torch.zeros(4, 4))  # as open_clip's `visual.proj`

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.proj


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = Tower(is_own=True)
        self.text = Tower(is_own=False)
        self.image_proj = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.text_proj = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])})
        self.logit_scale = nn.Parameter(torch.zeros(()))


def ids(*modules: nn.Module) -> frozenset[int]:
    return frozenset(id(p) for module in modules for p in module.parameters())


def names(specs: list[RegionSpec]) -> list[str]:
    return [spec.name for spec in specs]


def test_path_is_a_region_with_all_parameters_below() -> None:
    clip = Clip()
    (spec,) = resolve_regions(clip, ["image_proj"])
    assert (spec.name, spec.modules, spec.parameters) == ("image_proj", (clip.image_proj,), ids(clip.image_proj))
    assert spec.ancestors == ()


def test_modules_in_a_container_share_its_region() -> None:
    clip = Clip()
    (spec,) = resolve_regions(clip, ["heads"])
    assert spec.modules == (clip.heads["a"], clip.heads["b"][0])  # ReLU has nothing to scale
    assert spec.parameters == ids(clip.heads)


def test_regions_come_before_those_around_them() -> None:
    clip = Clip()
    specs = resolve_regions(clip, ["text", "text_proj", "text.blocks.0.experts.1", "text.blocks.0.experts"])
    assert names(specs) == ["text.blocks.0.experts.1", "text.blocks.0.experts", "text", "text_proj"]
    assert specs[0].ancestors == ("text", "text.blocks.0.experts")
    assert specs[1].ancestors == ("text",)
    assert specs[2].ancestors == specs[3].ancestors == ()
    assert specs[0].parameters < specs[1].parameters < specs[2].parameters


def test_list_of_one_module_contains_that_module() -> None:
    net = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(2, 2)])})
    specs = resolve_regions(net, ["heads", "heads.0"])
    assert [(spec.name, spec.ancestors) for spec in specs] == [("heads.0", ("heads",)), ("heads", ())]


def test_default_is_projection_heads_and_layers_of_experts() -> None:
    clip = Clip()
    specs = {spec.name: spec for spec in resolve_regions(clip, None)}
    assert list(specs) == [
        *("visual.blocks.0", "visual.blocks.1", "text.blocks.0.experts", "text.blocks.1.experts"),
        *("image_proj", "text_proj"),
    ]
    assert specs["visual.blocks.0"].modules == (clip.visual.blocks[0],)
    assert specs["text.blocks.1.experts"].modules == tuple(clip.text.blocks[1].experts)
    assert specs["image_proj"].modules == (clip.image_proj,)


def test_default_of_layers_with_nothing_but_experts_is_one_region_each() -> None:
    layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])}) for _ in range(2))
    assert names(resolve_regions(nn.ModuleDict({"layers": layers}), None)) == ["layers.0.experts", "layers.1.experts"]


def test_default_leaves_out_what_no_call_bounds_and_what_has_other_parameters() -> None:
    net = nn.ModuleDict({"image_proj": nn.ParameterList([nn.Parameter(torch.ones(2))]), "stem": nn.Linear(2, 2)})
    assert resolve_regions(net, None) == []
    assert resolve_regions(nn.Sequential(nn.Linear(2, 2)), None) == []


def test_default_of_one_head_for_both_towers_is_one_region() -> None:
    head = nn.Linear(2, 2)
    net = nn.ModuleDict({"image_proj": head, "text_proj": head})
    (spec,) = resolve_regions(net, None)
    assert (spec.name, spec.modules) == ("image_proj", (head,))


def test_default_of_one_layer_of_experts_for_both_towers_is_one_region() -> None:
    moe = MoE(2, 2, 2)
    towers = nn.ModuleDict({"image": nn.Sequential(moe, nn.Linear(2, 2)), "text": nn.Sequential(nn.Linear(2, 2), moe)})
    assert names(resolve_regions(towers, None)) == ["image.0"]


@pytest.mark.parametrize("paths", [None, ["image_proj", "text.blocks.0.experts", "visual.blocks.0"]])
def test_compiled_modules_have_the_regions_of_plain_ones(paths: list[str] | None) -> None:
    clip = Clip()
    plain = resolve_regions(clip, paths)
    clip.text = torch.compile(clip.text, backend="eager")
    clip.image_proj = torch.compile(clip.image_proj, backend="eager")
    clip.text._orig_mod.blocks[0] = torch.compile(clip.text._orig_mod.blocks[0], backend="eager")
    assert resolve_regions(clip, paths) == plain
    assert resolve_regions(torch.compile(clip, backend="eager"), paths) == plain
    assert resolve_regions(clip, ["text._orig_mod.stem"]) == resolve_regions(clip, ["text.stem"])


def test_module_shared_with_the_outside_is_bounded_wherever_it_is_called() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    net["again"] = net["a"]
    (spec,) = resolve_regions(net, ["a"])
    assert spec.modules == (net["a"],)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (
            ["image_prj"],
            "the module has no module 'image_prj'. Write a module path such as one of: visual, text, image_",
        ),
        (
            ["text.blocks.2"],
            "'text.blocks' has no module '2'. Write a module path such as one of: text.blocks.0, text.b",
        ),
        (
            ["text_proj.x.y"],
            "'text_proj' has no module 'x'. Write a module path such as one of: (none below 'text_proj')",
        ),
        (
            ["visual.proj"],
            "is a parameter, and a region is a module, whose call is its boundary. Write 'visual', the mod",
        ),
        (["logit_scale"], "is a parameter, and a region is a module, whose call is its boundary. Leave it out."),
        ([""], "the whole module cannot be a region"),
        (["image_proj.1"], "a ReLU without parameters has no gradients to scale"),
        (["text", "text"], "names 'text' twice. Name it once."),
    ],
)
def test_path_that_cannot_be_a_region_is_refused(paths: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_regions(Clip(), paths)


def test_parameters_of_a_container_are_refused() -> None:
    net = nn.ModuleDict({"heads": nn.ParameterList([nn.Parameter(torch.ones(2))])})
    with pytest.raises(ValueError, match="'heads' is a ParameterList without forward that holds the parameter '0'"):
        resolve_regions(net, ["heads"])


def test_one_module_under_two_paths_is_refused_as_two_regions() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 2)})
    net["b"] = net["a"]
    with pytest.raises(ValueError, match="The regions 'a' and 'b' cross"):
        resolve_regions(net, ["a", "b"])


def test_regions_that_cross_are_refused() -> None:
    first, shared, last = (nn.Linear(2, 2) for _ in range(3))
    net = nn.ModuleDict({"one": nn.ModuleList([first, shared]), "two": nn.ModuleList([shared, last])})
    assert names(resolve_regions(net, ["one"])) == ["one"]  # every call of `shared` passes its boundary
    with pytest.raises(ValueError, match="The regions 'one' and 'two' cross: they share modules or parameters"):
        resolve_regions(net, ["one", "two"])


@pytest.mark.parametrize("paths", [["image_proj"], None])
def test_tied_parameter_is_refused_with_both_paths(paths: list[str] | None) -> None:
    net = nn.ModuleDict({"image_proj": nn.Linear(2, 2), "stem": nn.Linear(2, 2)})
    net["stem"].weight = net["image_proj"].weight
    message = "'stem.weight' and 'image_proj.weight' are one parameter, used outside and inside the region 'image_proj'"
    with pytest.raises(ValueError, match=message):
        resolve_regions(net, paths)


def test_part_of_a_region_that_is_reached_past_its_boundary_is_refused() -> None:
    net = nn.ModuleDict({"tower": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    net["head"] = net["tower"][1]
    message = "'head.weight' and 'tower.1.weight' are one parameter, used outside and inside the region 'tower'"
    with pytest.raises(ValueError, match=message):
        resolve_regions(net, ["tower"])


def test_parameters_tied_inside_a_region_are_fine() -> None:
    net = nn.ModuleDict({"tower": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    net["tower"][1].weight = net["tower"][0].weight
    (spec,) = resolve_regions(net, ["tower"])
    assert len(spec.parameters) == 3
