"""Runs tests/test_gumbel.py in a process with Triton's interpreter: it must be on before the kernels are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.timeout(1000)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    path = Path(__file__).with_name("test_gumbel.py")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            str(path),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        cwd=path.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
