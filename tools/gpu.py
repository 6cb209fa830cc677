"""What NVIDIA's driver says of this machine: `python3 tools/gpu.py` refuses one without a GPU, before any download.

Runs on any Python 3: nothing is installed yet.
"""

import ctypes
import sys

MISSING = (
    "no CUDA device here: run this on the machine with the GPUs (`nvidia-smi` must list them; "
    "without a GPU: make demo, make serve-tiny)"
)


def count() -> int:
    """Number of CUDA devices that this process may use, 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    devices = ctypes.c_int(0)
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(devices)) else devices.value


if __name__ == "__main__":
    sys.exit(0 if count() else "error: " + MISSING)
