"""Baton trains language models with reinforcement learning on whatever hardware its users have."""

import sys

if sys.platform == "win32":
    raise ImportError(
        "Baton runs on Linux and macOS; on Windows, install it in WSL 2. It needs file locks of POSIX (fcntl), fork, "
        "process groups and socket pairs, which Windows does not have."
    )

__version__ = "0.1.0"
