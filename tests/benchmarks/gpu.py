"""Every kernel on a GPU: against float64, then its time beside eager and compiled torch and the floor of the machine.

Run ``python -m tests.benchmarks.gpu`` on one GPU: under 4 minutes; it writes results/gpu.csv. Without one,
``TRITON_INTERPRET=1 python -m tests.benchmarks.gpu --tiny`` runs all of it on tiny sizes and writes nothing.

"compiled" is each forward and backward as torch.compile splits them: a graph that holds a call of autograd ends at it.

An error is |ours - exact| / |exact| over all elements of an output, exact being the same in float64; its bound is twice
that of plain torch in the same dtype. The floor is the larger of bytes / bandwidth and operations / peak.
"""

import argparse
import csv
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import triton
from lightning_moeclip.kernels import contrastive
from lightning_moeclip.kernels.grad_pack import grad_pack
from lightning_moeclip.kernels.grad_unpack import grad_unpack, unscale_
from lightning_moeclip.kernels.permute import permute, sort_by_expert, unpermute
from lightning_moeclip.kernels.router import route
from torch import Tensor, nn
from torch.nn import functional

from lightning_moeclip.gradients.buckets import Bucket
from lightning_moeclip.gradients.slabs import places_of
from lightning_moeclip.gradients.stash import GradStash, StashMode, passage_for
from lightning_moeclip.parallel.plan import BucketPlan, PlannedParameter
from lightning_moeclip.parallel.roles import ParamRole
from tests.benchmarks.origin import RESULTS, device_name, short_commit

CSV = RESULTS / "gpu.csv"
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, BACKEND = ("cpu", "eager") if INTERPRETED else ("cuda", "inductor")
# the interpreter cuts bfloat16 off where a GPU rounds: one unit in the last place
CUT = {BF16: 2.0**-7 if INTERPRETED else 0.0, FP32: 0.0}

Outputs, Size = Sequence[Tensor], tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """One operation on its inputs: ours, plain torch, that compiled, float64; bytes and FLOPs that it needs."""

    ours: Callable[[], Outputs]
    plain: Callable[[], Outputs]
    compiled: Callable[[], Outputs]
    exact: Callable[[], Outputs]
    num_bytes: int
    flops: int


@dataclass(frozen=True)
class Case:
    """An operation with its sizes: for the interpreter, to check, to time."""

    name: str
    make: Callable[[Size, torch.dtype], Work]
    dtype: torch.dtype
    tiny: Size
    checked: Size
    timed: Size


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def gradients_of(size: Size, dtype: torch.dtype) -> list[Tensor]:
    """Those of a CLIP of two transformers, as large as ViT-B/32 with (768, 512, 12, 49408): 151 million numbers."""
    width, text_width, layers, vocabulary = size
    shapes: list[Size] = [(width, 3, 32, 32), (vocabulary, text_width), (width, 512), (text_width, 512)]
    for w in (width, text_width):
        shapes += [(3 * w, w), (3 * w,), (w, w), (w,), (4 * w, w), (4 * w,), (w, 4 * w), *[(w,)] * 5] * layers
    return [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def moved(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and the columns of ``grad_statistics`` in plain torch."""
    y = (x * factor).to(x.dtype)
    z = y.to(factor.dtype)
    sums = [z.sum(), z.square().sum(), z.abs().sum(), (~z.isfinite()).sum(), (z == 0).sum(), z.abs().max()]
    return y, torch.stack([torch.full_like(z[0], z.numel()), *(x.to(z.dtype) for x in sums)])


def make_moved(size: Size, dtype: torch.dtype, op: Callable[..., Tensor | None]) -> Work:
    gradients, factor = gradients_of(size, dtype), torch.tensor(0.37, device=DEVICE)
    places = [torch.empty_like(x) for x in gradients]
    num_bytes = 2 * sum(x.numel() for x in gradients) * dtype.itemsize

    def ours() -> Outputs:
        table = op(gradients, places, factor if op is grad_unpack else [factor] * len(places), with_statistics=True)
        assert table is not None
        return [*places, *table.unbind(1)]

    def composed(each: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype = dtype) -> Outputs:
        f = factor.to(torch.promote_types(dtype, FP32))
        ys, rows = zip(*(each(x.view(-1).to(dtype), f) for x in gradients), strict=True)
        return [*(y.view_as(x) for y, x in zip(ys, places, strict=True)), *torch.stack(rows, 1)]

    calls = [partial(composed, f) for f in (moved, torch.compile(moved, backend=BACKEND, dynamic=True))]
    return Work(ours, *calls, partial(composed, moved, FP64), num_bytes, 0)


def make_unscale(size: Size, dtype: torch.dtype) -> Work:
    gradients, one = gradients_of(size, dtype), torch.ones((), device=DEVICE)  # in place, and repeated: by 1
    numel = sum(x.numel() for x in gradients)

    def each(x: Tensor) -> Tensor:
        x.mul_(one)
        return torch.stack([(~x.isfinite()).sum(), (x == 0).sum()])

    def composed(each: Callable[..., Tensor]) -> Outputs:
        bad, zeros = torch.stack([each(x.view(-1)) for x in gradients]).sum(0)
        return [torch.stack([(bad > 0).double(), zeros.double(), torch.full_like(one, numel).double()])]

    plain, compiled = (partial(composed, f) for f in (each, torch.compile(each, backend=BACKEND, dynamic=True)))
    ours = partial(unscale_, gradients, one, counts_zeros=True)
    return Work(lambda: [ours()], plain, compiled, plain, 2 * numel * dtype.itemsize, 0)


def make_pairs(
    size: Size, dtype: torch.dtype, scale: Tensor, ours: Callable[..., Outputs], loss: Callable[..., Tensor]
) -> Work:
    m, n, d = size  # own rows, columns, width
    image, text = (functional.normalize(random(k, d, dtype=FP32, seed=k), dim=1).to(dtype) for k in (m, n + 1))
    text = text[:n].contiguous()

    def dense(x: Tensor, y: Tensor) -> Outputs:
        wide = torch.promote_types(x.dtype, FP32)
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        one = torch.ones_like(scale, dtype=wide).requires_grad_()  # its derivative is that by the log of the scale
        value = loss(one * scale.to(wide) * (x @ y.T).to(wide))
        return [value.detach(), *torch.autograd.grad(value, (x, y, one))]

    # G is written once and read twice
    num_bytes = (3 * m * n + 4 * (m + n) * d) * dtype.itemsize
    calls = [partial(f, image, text) for f in (ours, dense, torch.compile(dense, backend=BACKEND, dynamic=False))]
    return Work(*calls, lambda: dense(image.double(), text.double()), num_bytes, 8 * m * n * d)


def make_clip(size: Size, dtype: torch.dtype) -> Work:
    m, n, _ = size
    scale, share = torch.tensor(20.0, device=DEVICE), torch.full((n,), 0.5 / n, dtype=FP64, device=DEVICE)

    def value(by_row: Tensor, by_column: Tensor, pair: Tensor) -> Tensor:
        b = share.to(pair.dtype)
        return (b[0] * (by_row - pair)).sum() + (b * by_column).sum() - (b[:m] * pair).sum()

    def ours(image: Tensor, text: Tensor) -> Outputs:
        by_row, by_column, pair = contrastive.clip_statistics(image, text, scale)
        found = contrastive.clip_gradients(image, text, scale, by_row, by_column, share[0], share, needs_log_scale=True)
        return [value(by_row, by_column, pair), *(x for x in found if x is not None)]

    def loss(z: Tensor) -> Tensor:
        return value(z.logsumexp(1), z.logsumexp(0), z.diagonal())

    return make_pairs(size, dtype, scale, ours, loss)


def make_sigmoid(size: Size, dtype: torch.dtype) -> Work:
    scale, bias, share = (torch.tensor(x, device=DEVICE) for x in (10.0, -10.0, 1.0 / size[1]))

    def ours(image: Tensor, text: Tensor) -> Outputs:
        total = contrastive.sigmoid_statistics(image, text, scale, bias)
        found = contrastive.sigmoid_gradients(image, text, scale, bias, share, needs_bias=False, needs_log_scale=True)
        return [total * share, *(x for x in found if x is not None)]

    def loss(z: Tensor) -> Tensor:
        z, sign = z + bias, 2 * torch.eye(*z.shape, dtype=z.dtype, device=DEVICE) - 1
        return -share.to(z.dtype) * functional.logsigmoid(sign * z).sum()

    return make_pairs(size, dtype, scale, ours, loss)


def make_route(size: Size, dtype: torch.dtype) -> Work:
    tokens, experts, top_k = size
    logits, cotangent = random(tokens, experts, dtype=dtype, seed=0), random(tokens, top_k, dtype=FP32, seed=1)

    def ours() -> Outputs:
        z = logits.detach().requires_grad_()
        weights, _, counts, ends = route(z, top_k, normalize_topk=True)
        return [weights.detach(), *torch.autograd.grad(weights, z, cotangent), counts, ends]

    def composed(z: Tensor) -> Outputs:
        z = z.detach().requires_grad_()
        p, chosen = z.softmax(-1).topk(top_k, dim=-1)
        weights = p / p.sum(-1, keepdim=True)
        counts = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
        counts = counts.scatter_add(0, chosen.view(-1), torch.ones_like(chosen).view(-1))
        return [weights.detach(), *torch.autograd.grad(weights, z, cotangent.to(z.dtype)), counts, counts.cumsum(0)]

    num_bytes = tokens * (3 * experts * dtype.itemsize + top_k * (4 + 4 + 8))
    calls = [partial(f, logits) for f in (composed, torch.compile(composed, backend=BACKEND, dynamic=False))]
    return Work(ours, *calls, lambda: composed(logits.double()), num_bytes, 0)


def make_permute(size: Size, dtype: torch.dtype) -> Work:
    tokens, dim, top_k = size
    x, cotangent = random(tokens, dim, dtype=dtype, seed=0), random(tokens, dim, dtype=dtype, seed=1)
    weights, chosen, _, ends = route(random(tokens, 8, dtype=FP32, seed=2), top_k, normalize_topk=True)

    def ours() -> Outputs:
        a, w = x.detach().requires_grad_(), weights.detach().requires_grad_()
        slot, row = sort_by_expert(chosen, ends)
        y = unpermute(permute(a, slot, row), w, slot, row)
        return [y.detach(), *torch.autograd.grad(y, (a, w), cotangent)]

    def composed(a: Tensor, w: Tensor) -> Outputs:
        a, w = a.detach().requires_grad_(), w.detach().requires_grad_()
        order = chosen.view(-1).argsort(stable=True)
        rows = a.index_select(0, order // top_k) * w.view(-1)[order, None].to(a.dtype)
        y = torch.zeros_like(a).index_add(0, order // top_k, rows)
        return [y.detach(), *torch.autograd.grad(y, (a, w), cotangent.to(a.dtype))]

    # forward: (1 + K) and (K + 1) lines of x per token; backward: 1 + 2 K and K + 1
    num_bytes = tokens * dim * dtype.itemsize * (4 + 5 * top_k)
    calls = [partial(f, x, weights) for f in (composed, torch.compile(composed, backend=BACKEND, dynamic=False))]
    return Work(ours, *calls, lambda: composed(x.double(), weights.double()), num_bytes, 0)


def buckets_of(mode: StashMode, shapes: Sequence[Size]) -> list[Bucket]:
    """Three buckets of the same shapes, which one rank sums with itself."""
    device, role = torch.device(DEVICE), ParamRole(None, "dense")
    buckets = []
    for _ in range(3):
        parameters = {str(i): nn.Parameter(torch.zeros(shape, device=device)) for i, shape in enumerate(shapes)}
        planned = (PlannedParameter(n, role, tuple(p.shape), FP32, "dp", True) for n, p in parameters.items())
        plan = BucketPlan("dp", FP32, device, tuple(planned))
        flat = torch.zeros(places_of(plan)[-1][1], device=device)
        way, group = passage_for(mode, device), dist.group.WORLD
        buckets.append(Bucket(plan, parameters, flat, divisor=3, num_replicas=3, group=group, passage=way))
    return buckets


def reduced(mode: StashMode, shapes: Sequence[Size]) -> list[Tensor]:
    """What six steps leave in the buckets; in some of them a gradient is missing, or comes twice."""
    buckets, stash, found = buckets_of(mode, shapes), GradStash(wait_window=2), []
    for step in range(6):
        for index, bucket in enumerate(buckets):
            for place, slot in enumerate(bucket.slots):
                slot.parameter.grad = None
                for time_of in range({(3, 1): 0, (4, 2): 2}.get((step, place), 1)):
                    seed = 1000 * time_of + 100 * step + 10 * index + place
                    slot.parameter.grad = random(*shapes[place], dtype=FP32, seed=seed)
                    bucket.take(slot)
            stash.launch(bucket)
        stash.flush()
        for bucket in buckets:
            bucket.rehearse()
            found += [slot.view.clone() for slot in bucket.slots]
            bucket.reset()
    for bucket in buckets:
        bucket.release()  # a graph that was captured must not outlive the communicator
    return found


def check_stash(*, tiny: bool) -> bool:
    """Whether "stream" and "graph" give the bits of "sync" on this GPU; one rank sums with itself."""
    shapes = [(3, 5), (40,), (7, 3)] if tiny else [(2048, 3000), (40,), (777, 333), (3_000_001,)]
    dist.init_process_group("gloo" if INTERPRETED else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    expected = reduced("sync", shapes)
    holds = all(
        torch.equal(x, y) for mode in ("stream", "graph") for x, y in zip(reduced(mode, shapes), expected, strict=True)
    )
    gc.collect()  # buckets refer to themselves
    dist.destroy_process_group()
    print(f"stash: stream and graph give {'the' if holds else 'OTHER'} bits of sync, {len(expected)} tensors")
    return holds


TINY_CLIP, SMALL_CLIP, VIT_B32 = (4, 4, 0, 40), (32, 16, 1, 40), (768, 512, 12, 49408)
make_pack, make_unpack = (partial(make_moved, op=op) for op in (grad_pack, grad_unpack))
CASES = [
    *(Case("grad_pack", make_pack, dtype, TINY_CLIP, SMALL_CLIP, VIT_B32) for dtype in (FP32, BF16)),
    Case("grad_unpack", make_unpack, FP32, TINY_CLIP, SMALL_CLIP, VIT_B32),
    Case("unscale_", make_unscale, FP32, TINY_CLIP, SMALL_CLIP, VIT_B32),
    Case("clip", make_clip, BF16, (40, 40, 32), (300, 300, 96), (4096, 4096, 512)),
    Case("clip", make_clip, BF16, (40, 72, 32), (130, 3000, 512), (4096, 32768, 512)),
    Case("clip", make_clip, BF16, (1, 1, 16), (5000, 5000, 768), (32768, 32768, 512)),
    Case("clip", make_clip, FP32, (40, 40, 32), (1000, 1000, 512), (8192, 8192, 512)),
    Case("sigmoid", make_sigmoid, BF16, (40, 40, 32), (1000, 1000, 512), (4096, 4096, 512)),
    Case("route", make_route, FP32, (64, 8, 2), (4099, 8, 2), (65536, 8, 2)),
    Case("permute", make_permute, BF16, (33, 32, 2), (4099, 768, 2), (65536, 768, 2)),
]


def check(case: Case, size: Size) -> tuple[float, float]:
    """The error nearest to its bound, or above it, and that bound; whole numbers have to be equal."""
    work = case.make(size, case.dtype)
    worst = (0.0, torch.finfo(case.dtype).eps)
    for ours, plain, exact in zip(work.ours(), work.plain(), work.exact(), strict=True):
        length = exact.double().norm().clamp(min=1e-300)
        error, of_plain = (((x.double() - exact.double()).norm() / length).item() for x in (ours, plain))
        bound = 0.0 if not exact.is_floating_point() else 2 * of_plain + torch.finfo(FP32).eps + CUT[case.dtype]
        if not error <= bound:
            return error, bound
        if bound and error / bound >= worst[0] / worst[1]:
            worst = (error, bound)
    return worst


def milliseconds(call: Callable[[], object]) -> float:
    """Median on the GPU; interpreted, one call by the clock. NaN where memory does not suffice."""
    if INTERPRETED:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    try:
        return float(triton.testing.do_bench(call, warmup=20, rep=100, return_mode="median"))
    except torch.OutOfMemoryError:
        return float("nan")


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, object]:
    """Check, then time: a line of the results."""
    torch._dynamo.reset()  # after too many sizes of the cases before, what is compiled would be run eagerly
    error, bound = check(case, case.tiny if arguments.tiny else case.checked)
    size = case.tiny if arguments.tiny else case.timed
    work = case.make(size, case.dtype)
    peak = (arguments.tflops if case.dtype is BF16 else arguments.tflops_fp32) * 1e12
    floor = max(work.num_bytes / (arguments.tbytes * 1e12), work.flops / peak) * 1e3
    row: dict[str, object] = {"name": case.name, "dtype": str(case.dtype)[6:], "size": "x".join(map(str, size))}
    row |= {"error": f"{error:.2g}", "bound": f"{bound:.2g}"}
    ours, plain, compiled = (round(milliseconds(call), 4) for call in (work.ours, work.plain, work.compiled))
    row |= {"ours_ms": ours, "eager_ms": plain, "compiled_ms": compiled}
    row |= {
        "bytes": work.num_bytes,
        "flops": work.flops,
        "floor_ms": round(floor, 4),
        "floor_share": round(floor / ours, 3),
    }
    row |= {"device": device_name(), "torch": torch.__version__, "triton": triton.__version__, "commit": short_commit()}
    print("interpreted: " * INTERPRETED + " ".join(f"{k}={v}" for k, v in list(row.items())[:-4]), flush=True)
    return row | {"holds": error <= bound}


def main() -> int:
    """Everything; returns 1 if an error is above its bound or bits differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; for the interpreter")
    # peaks of an H200: terabytes per second, operations in bfloat16 and in float32 without tf32
    for name, peak in (("--tbytes", 4.3), ("--tflops", 780.0), ("--tflops-fp32", 67.0)):
        parser.add_argument(name, type=float, default=peak)
    arguments = parser.parse_args()
    rows = [measure(case, arguments) for case in CASES]
    holds = [row.pop("holds") for row in rows]
    if not INTERPRETED and not arguments.tiny:
        with CSV.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0 if check_stash(tiny=arguments.tiny) and all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
