"""The digest of a tensor: equal for equal bits, another one for every change that a faulty rank can make."""

import itertools

import pytest
import torch
from torch import Tensor

from lightning_moeclip.state.digest import joint_digest, tensor_digest

CPU = torch.device("cpu")
# below and above what is mixed word by word; with words left over in both tables, and bytes left over in float32
SIZES = [1, 2, 5, 1023, 4096, 4097, 8193, 30001, 70000]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def digest(tensor: Tensor) -> int:
    return int(tensor_digest(tensor))


def random(size: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.view_as_complex(torch.randn(size, 2, generator=generator)).to(dtype)
    if dtype is torch.bool or not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype is torch.bool else 100, (size,), generator=generator).to(dtype)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def places(size: int, number: int) -> list[int]:
    """Every place of a small tensor, both ends and some in between of a large one."""
    if size <= number:
        return list(range(size))
    inner = torch.randint(size, (number,), generator=torch.Generator().manual_seed(size)).tolist()
    return [p for p in (0, 1, 1022, 1023, 4095, size - 2, size - 1, *inner) if p < size]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_ulp_and_one_sign_anywhere_change_the_digest_and_undoing_them_restores_it(
    size: int, dtype: torch.dtype
) -> None:
    tensor = random(size, dtype)
    whole, bits = digest(tensor), tensor.view(BITS[dtype.itemsize])
    for place in places(size, 40):
        for change in (1, -(2 ** (8 * dtype.itemsize - 1))):  # lowest bit, sign
            bits[place] ^= change
            assert digest(tensor) != whole, (place, change)
            bits[place] ^= change
    assert digest(tensor) == whole


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_all_signs_changed_change_the_digest(size: int, dtype: torch.dtype) -> None:
    for tensor in (random(size, dtype), torch.zeros(size, dtype=dtype), torch.ones(size, dtype=dtype)):
        assert digest(-tensor) != digest(tensor)


@pytest.mark.parametrize("size", [64, 5 * 4096, 4096 * 41])
def test_two_three_and_a_row_of_changed_signs_in_float64_do_not_cancel(size: int) -> None:
    # in one column, in one row, in neither
    tensor = random(size, torch.float64)
    whole = digest(tensor)
    steps = [s for s in (1, 2, 63, 1023, 4096, 2 * 4096, 1023 * 8) if 2 * s < size]
    changes = [[0, s] for s in steps] + [[0, s, 2 * s] for s in steps] + [list(range(s)) for s in steps]
    for change in changes:
        tensor[change] *= -1
        assert digest(tensor) != whole, change[:3]
        tensor[change] *= -1
    assert digest(tensor) == whole


def test_opposite_changes_of_two_elements_and_swapped_elements_and_blocks_are_seen() -> None:
    for size in (50, 30000):
        tensor = random(size, torch.float32)
        whole, bits = digest(tensor), tensor.view(torch.int32)
        for a, b in [(0, 1), (0, 2), (3, 40), (0, size - 1), (size // 2, size // 2 + 8), *[(0, 8192)] * (size > 8192)]:
            for pair in ((a, b), (b, a)):
                bits[pair[0]] += 1
                bits[pair[1]] -= 1
                assert digest(tensor) != whole, pair
                bits[pair[0]] -= 1
                bits[pair[1]] += 1
            swapped = tensor.clone()
            swapped[[a, b]] = tensor[[b, a]]
            assert digest(swapped) != whole, (a, b)
    experts = random(4 * 1024 * 16, torch.float32).view(4, 1024, 16)
    for order in itertools.permutations(range(4)):
        assert (digest(experts[list(order)]) == digest(experts)) is (order == (0, 1, 2, 3))


def joint(*tensors: Tensor) -> int:
    found = joint_digest(tensors, device=CPU)
    assert (found.dtype, found.shape) == (torch.int64, ())
    return int(found)


def test_swapped_tensors_small_and_large_are_seen_and_every_one_ulp_in_one_of_many() -> None:
    # read together up to 4096 elements, each for itself above; of two dtypes
    sizes = [3, 5, 4096, 5000, 20000, 7, 5000]
    tensors = [random(n, torch.float32, seed=seed) for seed, n in enumerate(sizes)]
    tensors += [random(n, torch.bfloat16, seed=seed) for seed, n in enumerate((3, 1, 9000))]
    whole = joint(*tensors)
    assert joint(*(t.clone() for t in tensors)) == whole
    for i, j in itertools.combinations(range(len(tensors)), 2):
        swapped = list(tensors)
        swapped[i], swapped[j] = tensors[j], tensors[i]
        # two dtypes, and large beside small, are told apart by their layouts, which are compared as well
        is_alike = (tensors[i].dtype, len(tensors[i])) == (tensors[j].dtype, len(tensors[j]))
        assert joint(*swapped) != whole or not is_alike, (i, j)
    for tensor in tensors:
        bits = tensor.view(BITS[tensor.dtype.itemsize])
        for place in (0, len(bits) - 1):
            bits[place] ^= 1
            assert joint(*tensors) != whole
            bits[place] ^= 1
    negated = [-t for t in tensors]
    assert joint(*negated) != whole
    assert joint() == 0


INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.complex64, torch.complex128, torch.float8_e4m3fn], ids=str)
def test_every_dtype_has_a_digest_by_logical_order_whatever_the_strides_and_the_start(dtype: torch.dtype) -> None:
    for size in (12, 3 * 5000):
        tensor = random(size, dtype if dtype is not torch.float8_e4m3fn else torch.float32).to(dtype)
        whole = digest(tensor)
        assert whole == digest(tensor.clone())
        table = tensor.view(3, -1)
        assert whole == digest(table) == digest(table.t().contiguous().t())
        for start in range(1, 8):
            shifted = torch.zeros(size + start, dtype=dtype)
            shifted[start:] = tensor
            assert digest(shifted[start:]) == whole
        spaced = torch.zeros(size, 2, dtype=dtype)
        spaced[:, 0] = tensor
        assert digest(spaced[:, 0]) == whole
        changed = tensor.clone().view(torch.uint8)
        for place in (0, len(changed) // 2, len(changed) - 1):
            changed[place] ^= 1
            assert digest(changed.view(dtype)) != whole
            changed[place] ^= 1


def test_lazily_conjugated_and_negated_values_are_those_that_are_seen() -> None:
    tensor = random(6, torch.complex64)
    assert digest(tensor.conj()) == digest(tensor.conj().resolve_conj()) != digest(tensor)
    assert digest(tensor.conj().imag) == digest(-tensor.imag) != digest(tensor.imag)


def test_scalars_empty_tensors_zeros_of_several_sizes_and_two_zeros_are_told_apart() -> None:
    scalar = torch.tensor(1.5)
    assert tensor_digest(scalar).shape == ()
    assert digest(scalar) == digest(scalar.clone()) != digest(torch.nextafter(scalar, torch.tensor(2.0)))
    assert digest(torch.empty(0)) == digest(torch.empty(3, 0, dtype=torch.bool))
    assert len({digest(torch.zeros(n)) for n in range(20)}) == 20
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))


def test_nan_has_the_digest_of_its_payload() -> None:
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert quiet.isnan().all()
    assert digest(quiet[:1]) == digest(quiet[:1].clone()) != digest(quiet[1:])


def test_a_parameter_that_requires_a_gradient_is_read_and_left_alone() -> None:
    parameter = torch.nn.Parameter(random(10, torch.float32))
    found = tensor_digest(parameter)
    assert not found.requires_grad
    assert int(found) == digest(parameter.detach())


def test_digest_is_the_same_number_in_every_process() -> None:
    assert digest(torch.arange(10)) == -2086638041524348153
    assert digest(torch.arange(20000, dtype=torch.int32)) == 6942841733858976528
