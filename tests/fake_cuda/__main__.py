"""Run the cases on the emulated device: `python -m tests.fake_cuda GUARD.so RESULTS.json [hip]`."""

import ctypes
import sys
from pathlib import Path

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch looks for CUDA
    from tests.fake_cuda.cases import main

    main(Path(sys.argv[2]), is_hip="hip" in sys.argv[3:])
