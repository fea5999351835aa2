"""A process's peak is its own."""

import subprocess
import sys

from dglx_dist.data.storage.files import peak, resident

TOLD = "from dglx_dist.data.storage.files import peak; print(peak())"


def test_a_small_process_does_not_inherit_the_peak_of_the_one_that_starts_it() -> None:
    held = bytearray(b"x" * (300 << 20))
    told = subprocess.run(
        [sys.executable, "-c", TOLD], capture_output=True, text=True, check=True, timeout=60
    )
    assert len(held) < resident() <= peak()
    assert 1 << 20 < int(told.stdout) < len(held)
