"""What commands and runs write: JSON objects, events (JSON lines) and the folders that hold them.

One schema for all of it, numbered by ``SCHEMA``; units and field names are listed in docs/formats.md.
A folder counts as whole only when its closing file is there, and that file is written last and at once
(written beside, then renamed), so that half a folder is never taken for a whole one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from antiphon.errors import DataError, FolderError

SCHEMA = 1
LOCK_NAME = ".antiphon.lock"
EVENTS_NAME = "events.jsonl"
SUMMARY_NAME = "summary.json"
CONFIG_NAME = "config.json"

Json = dict[str, Any]


def to_json(value: Json, *, indent: int | None = None) -> str:
    """Return ``value`` as JSON text; NumPy values become plain ones, and a float that is not finite becomes null.

    >>> to_json({"loss": float("nan"), "steps": [3, 4]})
    '{"loss": null, "steps": [3, 4]}'
    """
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy, tensors
        return _plain(value.tolist())
    return value


def write_json(path: Path, value: Json) -> None:
    """Write ``value`` to ``path`` so that a reader sees the old file or the whole new one."""
    write_text(path, to_json(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` by way of a file beside it and a rename."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Json:
    """Read one JSON object.

    Raises:
        DataError: the file is missing or is not one JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected one JSON object, found a {type(value).__name__}")
    return value


def write_jsonl(path: Path, rows: list[Json]) -> None:
    """Write ``rows`` as JSON lines, whole or not at all."""
    write_text(path, "".join(to_json(row) + "\n" for row in rows))


def read_jsonl(path: Path) -> Iterator[tuple[int, Json]]:
    """Yield ``(line number from 1, object)`` for every line that is not blank.

    Raises:
        DataError: the file is missing, or a line is not a JSON object; file and line are named.
    """
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    with file:
        try:
            yield from _objects(path, file)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error.reason})") from None


def _objects(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Json]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(value, dict):
            raise DataError(f"{path}:{number}: expected an object {{...}} on each line")
        yield number, value


class EventWriter:
    """Appends events to ``events.jsonl``, each on its line at once.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with EventWriter(folder) as events:
    ...     events.write("evaluation", epoch=1.0, heldout_loss=2.5)
    >>> [event["heldout_loss"] for event in read_events(folder)]
    [2.5]
    """

    def __init__(self, folder: Path) -> None:
        path = folder / EVENTS_NAME
        if path.exists():
            # A run that crashed may have left half a line: the next event must not be glued to it.
            os.truncate(path, _whole_lines_bytes(path.read_bytes()))
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._start = time.monotonic()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; ``time_s`` counts from the opening of the writer."""
        row = {"schema": SCHEMA, "event": event, "time_s": round(time.monotonic() - self._start, 4), **fields}
        self._file.write(to_json(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def _whole_lines_bytes(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def read_events(folder: Path) -> list[Json]:
    """Return the events of a run in order; a last line cut short by a crash, or still being written, is left out.

    Raises:
        DataError: the file is missing, or a whole line is not a JSON object.
    """
    path = folder / EVENTS_NAME
    try:
        data = path.read_bytes()
        text = data[: _whole_lines_bytes(data)].decode("utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason})") from None
    return [row for _, row in _objects(path, text.split("\n"))]


class FolderLock:
    """Holds ``folder`` for this process; released by the system when the process ends, however it ends.

    Raises:
        FolderError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / LOCK_NAME).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise FolderError(
                f"{folder} is in use by process {holder}: wait for it to end, or name another folder"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def close(self) -> None:
        """Give the folder back."""
        self._file.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def holds(folder: Path, path: Path) -> bool:
    """Say whether ``path`` is ``folder`` or lies in it, links followed.

    >>> holds(Path("exp"), Path("exp/run/../data")), holds(Path("exp"), Path("experiment"))
    (True, False)
    """
    outer, inner = os.path.realpath(folder), os.path.realpath(path)
    return os.path.commonpath([outer, inner]) == outer


def output_folder(path: Path, *, resume: bool = False, overwrite: bool = False, keep: Sequence[Path] = ()) -> Path:
    """Make ``path`` ready to write into: new or empty, unless ``resume`` or ``overwrite`` says otherwise.

    Args:
        path: the folder.
        resume: leave what it holds.
        overwrite: delete what it holds, if a command of ours made it.
        keep: what the command reads: it must not lie in ``path``.

    Raises:
        FolderError: it holds something, it holds what is to be kept, it is a file, it cannot be made, or another
            process writes into it.
    """
    for read in keep:
        if holds(path, read):
            raise FolderError(f"{path} holds {read}, which this command reads: name another folder to write")
    if path.exists() and not path.is_dir():
        raise FolderError(f"{path} is a file: name a folder")
    held = [entry for entry in path.iterdir() if entry.name != LOCK_NAME] if path.exists() else []
    if held and not (resume or overwrite):
        raise FolderError(
            f"{path} is not empty: name a new folder, or pass --overwrite to replace what it holds"
            " or --resume to go on with it"
        )
    if held and overwrite:
        if not (path / LOCK_NAME).exists():
            raise FolderError(f"{path} was not made by Antiphon (no {LOCK_NAME}): --overwrite does not delete it")
        with FolderLock(path):
            for entry in held:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not held:
            # Marks the folder as ours, so that --overwrite may replace what a stopped command leaves in it.
            (path / LOCK_NAME).touch()
    except OSError as error:
        raise FolderError(f"{path} cannot be made: {error.strerror}") from None
    return path


@functools.cache
def _source_state() -> tuple[str | None, bool | None]:
    """Commit and dirtiness of the checkout that this file lies in; (None, None) where it is installed."""
    here = Path(__file__).resolve().parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(here)]
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, timeout=10
        )
        if tracked.returncode == 0:
            commit = subprocess.run(
                [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
            ).stdout.strip()
            changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10).stdout
            return commit or None, bool(changed.strip())
    return None, None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment(threads_per_learner: int | None = None) -> Json:
    """Describe the machine and the code: the ``environment`` object that every record carries."""
    versions: dict[str, str] = {"python": platform.python_version()}
    for package in ("antiphon", "torch", "numpy", "kaldi-hmm-gmm", "kaldifst", "kaldi-decoder"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit, dirty = _source_state()
    return {
        "commit": commit,
        "dirty": dirty,
        "versions": versions,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_learner": threads_per_learner,
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def record(command: str, *, threads_per_learner: int | None = None, **fields: Any) -> Json:
    """Return a JSON object with ``schema``, ``command`` and ``environment`` first, then ``fields``."""
    return {
        "schema": SCHEMA,
        "command": command,
        "environment": environment(threads_per_learner),
        **fields,
    }
