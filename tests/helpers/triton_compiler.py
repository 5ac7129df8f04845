"""Triton's compiler, which needs no GPU, in a process without Triton's interpreter."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compile_alone(code: str) -> str:
    """Run Python code that compiles kernels, and return its output."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ".", "HOME": "/tmp"}  # without TRITON_INTERPRET
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
