"""The kernel probe: a device that multiplies rightly passes in whatever order it adds, and any other is named."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from pptasks.errors import ProbeFailed
from pptasks.probe import check, digest, expected, floats, integers
from workers import probe as on_this_machine

Matmul = Callable[[np.ndarray, np.ndarray], np.ndarray]


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


def one_after_the_other(a: np.ndarray, b: np.ndarray, order: np.ndarray) -> np.ndarray:
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for i in order:
        total += np.outer(a[:, i], b[i]).astype(np.float32)
    return total


def test_the_matrices_are_these_on_every_machine():
    a, b = integers()
    assert a[0, :8].tolist() == [123, 38, -33, -108, -45, -52, 1, -32]
    assert expected() == "eb08314a6846c433" == digest(a @ b)
    assert len(np.unique(a)) > 250


def test_no_order_of_summation_leaves_the_exact_integers():
    a, b = integers()
    assert (np.abs(a) @ np.abs(b)).max() < 2**24


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_summation_passes(seed: int):
    def run(matrices: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        a, b = (m.astype(np.float32) for m in matrices)
        return one_after_the_other(a, b, np.random.default_rng(seed).permutation(a.shape[1]))

    assert check(run(integers()), run(floats())) is None
    assert digest(run(integers())) == expected()


@pytest.mark.parametrize("wrong", ["one", "one ulp", "nan", "infinity", "another's row"])
def test_one_wrong_integer_is_told(wrong: str):
    got = product(*integers())
    i, j = 17, 66
    value = {"one": got[i, j] + 1, "one ulp": np.nextafter(got[i, j], np.float32(np.inf)), "nan": np.nan}
    got[i, j] = value.get(wrong, np.inf)
    if wrong == "another's row":
        got = product(*integers())[np.r_[0:17, 18, 17, 19:61]]
    complaint = check(got, product(*floats()))
    assert complaint is not None
    assert "integer product [17, " in complaint
    assert digest(got) != expected() or wrong == "one ulp"  # which is no other integer


def truncated(x: np.ndarray) -> np.ndarray:
    """To TF32's 10 bits after the point."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("cast", [lambda x: x.astype(ml_dtypes.bfloat16), lambda x: x.astype(np.float16), truncated])
def test_less_than_float32_is_told(cast: Callable[[np.ndarray], np.ndarray]):
    """None of them gets an integer wrong."""
    a, b = (cast(m.astype(np.float32)) for m in integers())
    fa, fb = (cast(m) for m in floats())
    assert check(product(a, b), product(*floats())) is None
    assert "the float product [0, 0]" in str(check(product(a, b), product(fa, fb)))


def test_a_product_of_another_shape_is_told():
    assert "shape (67, 61)" in str(check(product(*integers()).T, product(*floats())))


@pytest.mark.parametrize("kernels", ["auto", "tinygrad"])
def test_this_machine_passes(kernels: str):
    assert on_this_machine.probe(kernels) == expected()


@pytest.mark.parametrize("matmul", [on_this_machine.tinygrad_matmul, on_this_machine.c_matmul])
@pytest.mark.parametrize("off", [1.0, 2.0**-10])
def test_a_device_with_a_broken_product_is_named(matmul: Matmul, off: float):
    def broken(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = matmul(a, b).copy()
        out[60, 66] += off
        return out

    with pytest.raises(ProbeFailed, match=r"^device CUDA:3 computes wrongly: the integer product \[60, 66\] is "):
        on_this_machine.check("device CUDA:3", broken)
