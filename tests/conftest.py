"""What every test may lean on; one thread for NumPy and torch, set before they load, so that results repeat."""

from __future__ import annotations

import os

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

# A shell that runs the tests in the background lets them, and all they start, ignore Ctrl-C; the tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where the makers of test data lie, for the tests of other folders too.
sys.path.append(str(Path(__file__).parent / "unit"))


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Give signals back their handlers: `antiphon.cli.main.main` sets its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def an4() -> Path:
    """The AN4 corpus, where the environment variable ANTIPHON_AN4 names its folder; else the test is skipped."""
    folder = os.environ.get("ANTIPHON_AN4", "")
    if not folder:
        pytest.skip("needs AN4: set ANTIPHON_AN4 to its folder")
    path = Path(folder)
    assert (path / "manifest.jsonl").is_file(), f"ANTIPHON_AN4={folder} holds no manifest.jsonl"
    return path


@pytest.fixture(scope="session")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared and aligned folder of synthetic speech, made once; tests that change it take a copy."""
    from synthetic import write_trainable

    from antiphon.recipes.align import align

    folder = tmp_path_factory.mktemp("synthetic") / "data"
    write_trainable(folder)
    align(folder, progress=lambda line: None)
    return folder


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB; only root can mount one."""
    if os.getuid() != 0:
        pytest.skip("needs root, to mount a tiny file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tiny file system: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
