"""The import walls of CONTRIBUTING.md, held by reading every import in src/antiphon; none is executed."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import antiphon
from antiphon.cli.main import COMMANDS

SOURCE = Path(antiphon.__file__).parent
LINES_MAX = 500

ENGINE = frozenset({"topology", "strategies", "transport", "learner", "training", "simulation", "theory"})
# The package's own top: it re-exports the engine, so to import it is to import the engine.
TOP = ""

# Rooms that may import these rooms (and themselves) only.
ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "config": frozenset({"errors"}),
    "records": frozenset({"errors"}),
    "strategies": frozenset({"errors", "topology"}),
    "report": frozenset({"errors", "records"}),
}
# Rooms that may import any but these.
FORBIDDEN: dict[str, frozenset[str]] = {
    **{room: frozenset({"speech", "recipes", "report"}) for room in ENGINE},
    "topology": frozenset({"transport", "speech", "recipes", "report", "config", TOP}),
    "transport": frozenset({"topology", "speech", "recipes", "report", "config", TOP}),
    "speech": ENGINE | {"recipes", "report", "config", TOP},
    TOP: frozenset({"speech", "recipes", "report"}),
}
# Libraries that a room must do without.
LIBRARIES: dict[str, frozenset[str]] = {
    **{room: frozenset({"torch"}) for room in ("errors", "config", "records")},
    "strategies": frozenset({"time", "threading", "asyncio", "multiprocessing", "subprocess"}),
}
# What opens sockets, shared memory or process groups: for transport/ alone.
CHANNELS = frozenset(
    {"socket", "socketserver", "http.server", "mmap", "multiprocessing.shared_memory", "torch.distributed"}
)


@dataclass(frozen=True)
class Reference:
    """One module that a file names: ``target`` in full, as ``antiphon.topology.graphs``."""

    line: int
    target: str


def room_of(module: str) -> str:
    """Return the first name below the package: ``antiphon.speech.model`` is in ``speech``, ``antiphon`` in TOP."""
    return module.partition(".")[2].partition(".")[0]


def is_or_within(target: str, module: str) -> bool:
    return target == module or target.startswith(module + ".")


def package_of(path: Path, root: Path) -> list[str]:
    """Return the package that relative imports of the file ``path`` start from."""
    return ["antiphon", *path.relative_to(root).parent.parts]


def references(path: Path, root: Path) -> Iterator[Reference]:
    """Yield every module named in a file: imports wherever they stand, `torch.distributed.x`, import_module("x")."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Reference(node.lineno, name.name)
        elif isinstance(node, ast.ImportFrom):
            package = package_of(path, root)
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for name in node.names:
                yield Reference(node.lineno, resolve(base, name.name, root))
        elif isinstance(node, ast.Attribute):
            if (dotted := ast.unparse(node)) in CHANNELS:
                yield Reference(node.lineno, dotted)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Reference(node.lineno, argument.value)


def resolve(base: str, name: str, root: Path) -> str:
    """Return what `from base import name` loads: the room of that name, else the module that holds it."""
    if base != "antiphon":
        return f"{base}.{name}"
    is_room = (root / name).is_dir() or (root / f"{name}.py").is_file()
    return f"{base}.{name}" if is_room else base


def complaint(room: str, target: str) -> str | None:
    """Return why a file in ``room`` may not name ``target``, or None where it may."""
    if is_or_within(target, "antiphon"):
        other = room_of(target)
        if other == room:
            return None
        if other == "cli" and room != "__main__":
            return "nothing imports cli"
        if room in ALLOWED and other not in ALLOWED[room]:
            return f"{room} may import {sorted(ALLOWED[room]) or 'nothing'} only"
        if other in FORBIDDEN.get(room, frozenset()):
            return f"{room or 'antiphon'} never imports {other or 'the top of the package: name the module'}"
        return None
    for library in LIBRARIES.get(room, frozenset()):
        if is_or_within(target, library):
            return f"{room} does without {library}"
    for channel in CHANNELS:
        if room != "transport" and is_or_within(target, channel):
            return f"only transport imports {channel}"
    return None


def breaches(root: Path) -> list[str]:
    """Return a line for every import below ``root`` that goes through a wall."""
    found = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        room = TOP if parts == ("__init__",) else parts[0]
        for reference in references(path, root):
            if why := complaint(room, reference.target):
                found.add(f"{path.relative_to(root)}:{reference.line}: {reference.target}: {why}")
    return sorted(found)


def test_the_package_holds_its_walls() -> None:
    assert len(list(SOURCE.rglob("*.py"))) > 10, f"no package to read at {SOURCE}"
    assert breaches(SOURCE) == []


def test_no_file_is_long() -> None:
    lengths = {path.relative_to(SOURCE): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {path: lines for path, lines in lengths.items() if lines > LINES_MAX} == {}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name: str) -> None:
    module = importlib.import_module(f"antiphon.cli.{name}")
    assert module.HELP.strip() and callable(module.configure) and callable(module.run)
    assert module.EXAMPLE.startswith(f"antiphon {name}")


def test_every_command_file_is_registered() -> None:
    files = {path.stem for path in (SOURCE / "cli").glob("[!_]*.py")} - {"main"}
    assert files == set(COMMANDS)


# (file, what it says, the start of the complaint)
BREACHES = [
    ("errors.py", "from antiphon import records", "errors may import nothing only"),
    ("errors.py", "import torch.nn as nn", "errors does without torch"),
    ("config.py", "from antiphon.topology.graphs import ring", "config may import ['errors'] only"),
    ("config.py", "def f():\n    from torch import Tensor", "config does without torch"),
    ("records.py", "from . import config", "records may import ['errors'] only"),
    ("records.py", "import torch", "records does without torch"),
    ("topology/graphs.py", "import antiphon.transport.base", "topology never imports transport"),
    ("topology/graphs.py", "from ..config import Run", "topology never imports config"),
    ("transport/memory.py", "from ..topology import graphs", "transport never imports topology"),
    ("transport/memory.py", "from .. import speech", "transport never imports speech"),
    ("speech/model.py", "from antiphon import topology", "speech never imports topology"),
    ("speech/corpora/an4.py", "from ...training import trainer", "speech never imports training"),
    ("speech/model.py", "from antiphon import Learner", "speech never imports the top"),
    (
        "speech/model.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from antiphon.learner.learner import Learner",
        "speech never imports learner",
    ),
    ("strategies/ring.py", "from antiphon.transport import base", "strategies may import"),
    ("strategies/ring.py", "from antiphon import records", "strategies may import"),
    ("strategies/ring.py", "from antiphon import Learner", "strategies may import"),
    ("strategies/ring.py", "from time import monotonic", "strategies does without time"),
    ("learner/learner.py", "import socket", "only transport imports socket"),
    ("learner/weights.py", "from multiprocessing import shared_memory", "only transport imports multiproc"),
    ("learner/weights.py", "import multiprocessing as m, mmap", "only transport imports mmap"),
    ("training/launch.py", "import torch.distributed as dist", "only transport imports torch.distributed"),
    ("training/launch.py", "import torch\ntorch.distributed.barrier()", "only transport imports torch.dist"),
    ("recipes/train.py", "from socket import socketpair", "only transport imports socket"),
    ("theory.py", "import antiphon.speech.scoring", "theory never imports speech"),
    ("training/trainer.py", "def f():\n    from antiphon.speech import model", "training never imports speech"),
    ("simulation/engine.py", "from antiphon import recipes", "simulation never imports recipes"),
    ("learner/learner.py", "import importlib\nimportlib.import_module('antiphon.speech')", "learner never"),
    ("__init__.py", "from antiphon.speech.model import build_model", "antiphon never imports speech"),
    ("report/page.py", "from antiphon.training import trainer", "report may import"),
    ("report/page.py", "from ..cli.main import main", "nothing imports cli"),
    ("recipes/train.py", "from antiphon.cli import main", "nothing imports cli"),
    ("training/launch.py", "from .. import cli", "nothing imports cli"),
]

FREE = [
    ("config.py", "from antiphon.errors import ArgumentError"),
    ("strategies/ring.py", "import torch\nfrom antiphon.topology import mixing\nfrom .base import Strategy"),
    ("transport/shared.py", "import mmap\nimport socket\nfrom multiprocessing import shared_memory"),
    ("transport/network.py", "import torch.distributed as dist\nfrom ..errors import DeadlineError"),
    ("learner/learner.py", "from antiphon import records, strategies, transport"),
    ("speech/model.py", "import torch\nfrom antiphon import records\nfrom .corpora import an4"),
    ("report/page.py", "from antiphon import errors, records\nimport matplotlib"),
    ("recipes/train.py", "from antiphon import Learner, config, report\nfrom antiphon.speech import model"),
    ("cli/train.py", "from antiphon.recipes import train\nfrom antiphon.cli.main import Command"),
    ("__main__.py", "from antiphon.cli.main import main"),
    ("__init__.py", "from antiphon.learner.learner import Learner"),
]

ROOMS = ["topology", "strategies", "transport", "learner", "training", "simulation", "speech", "recipes"]


def fake_tree(root: Path, file: str, text: str) -> Path:
    for room in [*ROOMS, "speech/corpora", "report", "cli"]:
        (root / room).mkdir(parents=True)
        (root / room / "__init__.py").touch()
    for name in ["__init__", "errors", "config", "records", "theory"]:
        (root / f"{name}.py").touch()
    (root / file).write_text(text + "\n")
    return root


@pytest.mark.parametrize(("file", "text", "why"), BREACHES)
def test_a_breach_is_seen(tmp_path: Path, file: str, text: str, why: str) -> None:
    found = breaches(fake_tree(tmp_path, file, text))
    assert len(found) == 1, found
    place, _, rest = found[0].partition(":")
    assert place == file
    assert rest.partition(": ")[2].partition(": ")[2].startswith(why)


@pytest.mark.parametrize(("file", "text"), FREE)
def test_what_is_free_passes(tmp_path: Path, file: str, text: str) -> None:
    assert breaches(fake_tree(tmp_path, file, text)) == []
