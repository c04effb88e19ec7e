"""Kernels with one fault each, launched as the package launches its own: what the compiled tests have to find."""

import torch
import triton
import triton.language as tl


@triton.jit
def doubled(x, y, num, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < num, other=0.0) * 2, mask=i < num)


@triton.jit
def added_by_all(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y, tl.sum(tl.load(x + i), 0))


@triton.jit
def centred(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.load(x + i)
    tl.store(y + i, row - tl.sum(row, 0) / BLOCK)


@triton.jit
def product(x, y, M: tl.constexpr, D: tl.constexpr):
    row, column = tl.arange(0, M), tl.arange(0, D)
    x_MD = tl.load(x + row[:, None] * D + column[None, :])
    tl.store(y + row[:, None] * M + row[None, :], tl.dot(x_MD, tl.trans(x_MD)))


def good() -> None:
    x = torch.zeros(4096)
    doubled[(4,)](x, x, 4096, BLOCK=1024, num_warps=4, enable_fp_fusion=True)


def unaligned() -> None:
    x = torch.zeros(4097)[1:]
    doubled[(4,)](x, x, 4096, BLOCK=1024, num_warps=4, enable_fp_fusion=True)


def atomic() -> None:
    added_by_all[(4,)](torch.zeros(4096), torch.zeros(1), BLOCK=1024, num_warps=4, enable_fp_fusion=True)


def spilling() -> None:
    # 512 numbers a thread have to live through the sum
    x = torch.zeros(16384)
    centred[(1,)](x, x, BLOCK=16384, num_warps=1, enable_fp_fusion=True)


def large() -> None:
    # 256 KiB for one operand
    x = torch.zeros(64, 2048, dtype=torch.bfloat16)
    product[(1,)](x, x.float(), M=64, D=2048, num_warps=8, enable_fp_fusion=True)


def left_to_version() -> None:
    x = torch.zeros(4096)
    doubled[(2,)](x, x, 4096, BLOCK=2048, num_warps=4)
