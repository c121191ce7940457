"""hivemind, the peer that `stragglers.py --peers hivemind` compares with: where it is installed, and how one joins it.

It lives in an environment of its own, for it brings many libraries. Nothing here imports it but `join`.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from antiphon.errors import ArgumentError
from antiphon.transport.block import wait_for

if TYPE_CHECKING:
    from straggling import Job

VERSION = "1.1.12"
ROOT = Path(__file__).parents[1]
PYTHON = Path(__file__).parent / ".venv-hivemind/bin/python"
MATCHMAKING_S = 1.0
MEET_LIMIT_S = 60.0
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PR_SET_PDEATHSIG = 1


def find_python(python: Path) -> str:
    """Return the interpreter of the environment that hivemind is installed in.

    Raises:
        ArgumentError: it is missing, or holds no or another hivemind; says how to make one.
    """
    ask = "import importlib.metadata, antiphon.errors; print(importlib.metadata.version('hivemind'))"
    found = ""
    if python.exists():
        found = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60).stdout.strip()
    if found == VERSION:
        return str(python)
    folder = python.parents[1] if python != PYTHON else PYTHON.parents[1].relative_to(ROOT)
    pip = shlex.quote(str(folder / "bin/pip"))
    what = f"has hivemind {found}" if found else "holds no hivemind" if python.exists() else "is missing"
    raise ArgumentError(
        f"--hivemind-python {python} {what}, and {VERSION} is compared with. From the root of the project:\n"
        f"  python3 -m venv {shlex.quote(str(folder))}\n"
        f"  {pip} install -c constraints.txt hivemind=={VERSION} -e ."
    )


def join(job: Job, learner: int, model: nn.Module) -> Any:
    """Return hivemind's optimizer over the model, once this learner has met the others.

    Raises:
        DeadlineError: learner 0 did not come.
    """
    import common
    import hivemind

    _take_helpers_along()
    meeting = Path(job.traces) / "hivemind-peers"
    if learner == 0:
        dht = hivemind.DHT(host_maddrs=[LOOPBACK], start=True)
        draft = meeting.with_suffix(".new")
        draft.write_text("\n".join(str(address) for address in dht.get_visible_maddrs()))
        draft.rename(meeting)
    else:
        wait_for(meeting.exists, MEET_LIMIT_S, "learner 0's address", lambda: None)
        dht = hivemind.DHT(host_maddrs=[LOOPBACK], initial_peers=meeting.read_text().split(), start=True)
    return hivemind.Optimizer(
        dht=dht,
        run_id="stragglers",
        params=model.parameters(),
        optimizer=common.sgd,
        batch_size_per_step=job.local_batch,
        target_batch_size=job.target_batch_size,
        use_local_updates=True,
        matchmaking_time=MATCHMAKING_S,
    )


def _take_helpers_along() -> None:
    """See to it that the processes that hivemind starts end with this one, which leads a process group of its own."""
    libc = ctypes.CDLL(None)
    os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(os.getpgid(0), signal.SIGKILL))
