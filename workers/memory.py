"""How much memory a device has left."""

import os
import subprocess

import psutil

from pptasks.config import bare_environment

NVIDIA = ("CUDA", "NV")  # names of devices
SMI_S = 10.0


def free_memory(device: str) -> int:
    """Bytes that are free where the weights will be: on an NVIDIA GPU its own, else this machine's."""
    on_gpu = _free_of_nvidia() if device in NVIDIA else None
    return psutil.virtual_memory().available if on_gpu is None else on_gpu


def _free_of_nvidia() -> int | None:
    """Of the first GPU that this process sees. nvidia-smi takes an index or a UUID, as CUDA_VISIBLE_DEVICES does."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, env=bare_environment(), capture_output=True, text=True, timeout=SMI_S, check=True)
        return int(done.stdout) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
