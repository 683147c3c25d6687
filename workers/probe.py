"""The kernel probe on this machine: pptasks/probe.py's products on the device that a stage is about to use."""

from collections.abc import Callable

import numpy as np
from tinygrad import Device, Tensor

from pptasks import probe as known
from pptasks.errors import ProbeFailed
from pptasks.modelinfo import OUTPUT, OUTPUT_NORM, ModelConfig
from workers.kernels import CpuKernels, obstacle
from workers.weights import FLOATS, Weight, aligned_zeros

Matmul = Callable[[np.ndarray, np.ndarray], np.ndarray]  # float32 (m, k), (k, n) -> float32 (m, n)
ROOT = 2.0**20  # of the epsilon that makes the C read-out's norm a division by a power of two, see `c_matmul`


def probe(kernels: str) -> str:
    """Try tinygrad's default device and, unless `kernels` is "tinygrad" or they cannot run, the C kernels too.

    Returns the digest of the integer product, `pptasks.probe.expected()`. Raises ProbeFailed, naming the device, the
    element and both values, if a product is not what it must be.
    """
    result = check(f"device {Device.DEFAULT} ({device_name()})", tinygrad_matmul)
    if kernels == "auto" and obstacle(_READ_OUT) is None:
        result = check("the C code", c_matmul)
    return result


def check(what: str, matmul: Matmul) -> str:
    """The digest of the integer product by `matmul`. Raises ProbeFailed, naming `what`."""
    a, b = (m.astype(np.float32) for m in known.integers())
    product = matmul(a, b)
    wrong = known.check(product, matmul(*known.floats()))
    if wrong is not None:
        raise ProbeFailed(f"{what} computes wrongly: {wrong}; use another machine, or another device")
    return known.digest(product)


def device_name() -> str:
    """What tinygrad's default device is, as its renderer calls it: an architecture such as sm_90 or x86_64."""
    target = Device[Device.DEFAULT].renderer.target
    return str(getattr(target, "arch", "") or target)


def tinygrad_matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (Tensor(a) @ Tensor(b)).numpy()


def c_matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By the C read-out. With an epsilon so large that nothing is left of the row's own mean square beside it, the norm
    divides by 2^20, which its weight undoes: both are exact."""
    norm, head = aligned_zeros((len(b),), FLOATS["F32"]), aligned_zeros(b.T.shape, FLOATS["F32"])
    norm[:], head[:] = ROOT, b.T
    weights = [(OUTPUT_NORM, Weight(norm, "F32", norm.shape)), (OUTPUT, Weight(head, "F32", head.shape))]
    backend = CpuKernels(
        _READ_OUT, weights, blocks=range(0), rope=None, context=1, n_slots=1, max_rows=len(a), traced=range(0)
    )
    return backend.logits(a)


_READ_OUT = ModelConfig(
    architecture="llama", n_blocks=0, dim=known.INNER, n_heads=1, n_kv_heads=1, head_dim=2, ffn_dim=1,
    vocab_size=known.COLUMNS, context=1, norm="rms", norm_eps=ROOT**2, ffn="swiglu", rope=None, windows=(), tied=False,
)  # fmt: skip
