"""Processes that look for regions: they give what the proposer gives, and end with whoever started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLED = """
import multiprocessing, os, signal
from PIL import Image
from hnclip.prepare.proposers import proposer
from hnclip.prepare.workers import proposing

if __name__ == "__main__":
    image = Image.linear_gradient("L").convert("RGB").resize((700, 500))
    image.paste("red", (40, 60, 300, 400))
    found = proposer("felzenszwalb+grid")
    with proposing(found, workers=2) as propose:
        same = propose(image) == found(image)
        print(same, *(process.pid for process in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes cannot be looked at")
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)  # a file: spawned processes read it again
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "killed.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        same, *workers = killed.stdout.readline().split()
    assert killed.returncode == -9
    assert same == "True"
    assert workers
    deadline = time.monotonic() + 60
    while any(is_running(int(pid)) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
