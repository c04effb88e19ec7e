"""Random programs of backwards, zero_grad and steps, on several ranks and in one process."""

import random
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_moeclip.gradients.corridor import CorridorSettings, GradientCorridor
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import TOLERANCE, worst_error

DIM = 3
DENSE = ("a", "b", "c", "d")
NUM_EXPERTS = 4


class Parts(nn.Module):
    """Dense parts that each rank may use or not, and experts of which it holds a slice."""

    def __init__(self, num_experts: int, first: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(shape: tuple[int, ...]) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.dense = nn.ParameterDict({name: draw((DIM, DIM)) for name in DENSE})
        self.scale = draw(())
        whole = [draw((NUM_EXPERTS, DIM)), draw((NUM_EXPERTS,))]
        self.experts = nn.ParameterList([w.detach()[first : first + num_experts].clone() for w in whole])

    def dense_loss(self, x: Tensor, used: frozenset[str]) -> Tensor:
        """Loss of the rows of one rank."""
        total = self.scale * x.mean()
        for name in sorted(used & set(DENSE)):
            total = total + (x @ self.dense[name]).tanh().pow(2).sum()
        return total

    def expert_loss(self, x: Tensor, used: frozenset[str]) -> Tensor:
        """What the rows of one rank lose in the experts that are held here."""
        total = x.new_zeros(())
        if "weight" in used:
            total = total + (x @ self.experts[0].T).tanh().pow(2).sum()
        if "bias" in used:
            total = total + self.experts[1].pow(2).sum() * x.mean()
        return total


def draw_program(seed: int, world_size: int) -> list[tuple]:
    """Steps (kind, seed of the data, parts used by each rank)."""
    rng = random.Random(seed)
    program: list[tuple] = []
    kinds = ["paused", "driven", "raw", "zero", "zero_in_place", "step", "clone", "halve", "halve_in_place"]
    for _ in range(14):
        kind = rng.choices(kinds, weights=[4, 4, 4, 2, 1, 2, 1, 1, 1])[0]
        experts = frozenset(name for name in ("weight", "bias") if rng.random() < 0.6)
        used = [experts | {n for n in DENSE if rng.random() < 0.5} for _ in range(world_size)]
        program.append((kind, rng.random(), used))
    program.append(("driven", rng.random(), [frozenset(DENSE)] * world_size))
    return program


def rows(seed: float, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(int(seed * 2**31))
    return torch.randn(4, 2, DIM, generator=generator, dtype=torch.float64)[rank]


def change_gradients(kind: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Steps that are the same on many ranks and in one process; whether this was one."""
    if kind in ("zero", "zero_in_place"):
        optimizer.zero_grad(set_to_none=kind == "zero")
        return True
    for parameter in module.parameters():
        if parameter.grad is not None and kind == "clone":
            parameter.grad = parameter.grad.clone()
        elif parameter.grad is not None and kind == "halve":
            parameter.grad = parameter.grad * 0.5
        elif parameter.grad is not None and kind == "halve_in_place":
            parameter.grad.mul_(0.5)
    return kind in ("clone", "halve", "halve_in_place")


class OnRanks:
    def __init__(self, mesh: Mesh, module: Parts) -> None:
        self.mesh = mesh
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        self.corridor = GradientCorridor(
            module,
            lambda: [self.optimizer],
            mesh,
            CorridorSettings(bucket_size_mb=1e-4),
            spread=frozenset({"experts.0", "experts.1"}) if mesh.expert_parallel_size > 1 else frozenset(),
        )

    @contextmanager
    def paused(self):
        self.corridor.reducer.is_paused = True
        yield
        self.corridor.reducer.is_paused = False

    def loss(self, seed: float, used: list[frozenset[str]]) -> Tensor:
        mesh = self.mesh
        loss = self.module.dense_loss(rows(seed, mesh.rank), used[mesh.rank])
        first = mesh.rank - mesh.rank % mesh.expert_parallel_size
        for other in range(first, first + mesh.expert_parallel_size):  # its tokens come here
            loss = loss + self.module.expert_loss(rows(seed, other), used[mesh.rank])
        return loss

    def run(self, kind: str, seed: float, used: list[frozenset[str]]) -> None:
        if change_gradients(kind, self.module, self.optimizer):
            return
        if kind == "paused":
            with self.paused():
                self.loss(seed, used).backward()
        elif kind == "raw":
            self.loss(seed, used).backward()
        elif kind == "driven":
            self.corridor.begin()
            self.loss(seed, used).backward()
            self.corridor.finish()
        else:
            self.optimizer.step()


class OneProcess:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.module = Parts(NUM_EXPERTS, 0)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)

    def run(self, kind: str, seed: float, used: list[frozenset[str]]) -> None:
        if change_gradients(kind, self.module, self.optimizer):
            return
        if kind == "step":
            self.optimizer.step()
            return
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(self.world_size):
            x = rows(seed, rank)
            loss = loss + self.module.dense_loss(x, used[rank]) + self.module.expert_loss(x, used[rank])
        (loss / self.world_size).backward()


def own_part(values: dict[str, Tensor | None], mesh: Mesh) -> dict[str, Tensor | None]:
    """Of what one process has, what this rank holds."""
    place, size = mesh.rank % mesh.expert_parallel_size, mesh.expert_parallel_size
    return {n: v.chunk(size)[place] if v is not None and n.startswith("experts") else v for n, v in values.items()}


def check_program(mesh: Mesh, seed: int) -> None:
    num_local = NUM_EXPERTS // mesh.expert_parallel_size
    place = mesh.rank % mesh.expert_parallel_size
    many = OnRanks(mesh, Parts(num_local, num_local * place))
    one = OneProcess(mesh.world_size)
    is_pending = False
    history = []
    for kind, data, used in draw_program(seed, mesh.world_size):
        if kind == "step" and is_pending:
            continue  # gradients of this rank alone
        many.run(kind, data, used)
        one.run(kind, data, used)
        history.append(kind)
        is_pending = kind == "paused" or (is_pending and kind not in ("driven", "raw", "zero"))
        if is_pending:
            continue
        got = {n: p.grad for n, p in many.module.named_parameters()}
        true = own_part({n: p.grad for n, p in one.module.named_parameters()}, mesh)
        assert worst_error(got, true) < TOLERANCE, f"program {seed}: gradients after {history}"
        got = {n: p.data for n, p in many.module.named_parameters()}
        true = own_part({n: p.data for n, p in one.module.named_parameters()}, mesh)
        assert worst_error(got, true) < TOLERANCE, f"program {seed}: parameters after {history}"
    many.corridor.detach()


@on_ranks(2)
def test_random_programs_on_two_ranks_equal_one_process(rank: Rank) -> None:
    meshes = [Mesh.build(1), Mesh.build(2)]
    for seed in range(40):
        check_program(meshes[seed % 2], seed)


@on_ranks(4)
def test_random_programs_on_four_ranks_equal_one_process(rank: Rank) -> None:
    mesh = Mesh.build(2)
    for seed in range(100, 115):
        check_program(mesh, seed)
