"""Runs tests/test_attention_kernels.py in a process with Triton's interpreter, which must be on before kernels load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    path = Path(__file__).with_name("test_attention_kernels.py")
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "-q", "-x", "-p", "no:cacheprovider", str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        cwd=path.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
