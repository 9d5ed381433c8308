"""What a process has used. In a file of its own, since TRL's environments cannot import rloo.py."""

import resource
import sys
from pathlib import Path


def peak_memory() -> float:
    """Peak memory of this process in GiB. ru_maxrss would also count the process that started it, before its exec."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 2**20
    except OSError:  # not Linux
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
