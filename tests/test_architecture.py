"""This is where the rooms' walls are checked: who imports whom, what pure code may touch, what is never used at all.

The rules are DESIGN's section "The rooms" and its invariants 7 and 9; each is tried on a planted violation as well.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = ("tests", "benchmarks", "examples")
ROOMS = ("peer", "bootstrap", "verification", "swarm", "kernels")
PROGRAMS = frozenset({"peer", "bootstrap"})

MAY_IMPORT = {
    "kernels": {"kernels"},
    "swarm": {"swarm", "kernels"},
    "verification": {"verification", "swarm", "kernels"},
    "peer": {"peer", "verification", "swarm", "kernels"},
    "bootstrap": {"bootstrap", "verification", "swarm", "kernels"},
}
NETWORK_ONLY = {"hivemind", "grpc", "grpclib", "socket", "socketserver", "ssl", "multiaddr", "uvloop", "http", "urllib"}
IMPURE = {
    *("time", "os", "io", "socket", "threading", "multiprocessing", "concurrent", "asyncio", "subprocess", "signal"),
    *("pathlib", "shutil", "tempfile", "secrets", "uuid", "logging", "torch", "sqlite3"),
}
CODE_FROM_BYTES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
NAMELESS = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def violations(path: str, source: str) -> list[str]:
    """Every rule that the module at `path` (relative to the root, with slashes) breaks, as `line: what`."""
    tree = ast.parse(source)
    found = [*_naming(path, tree, source), *_imports(path, tree)]
    for node in ast.walk(tree):
        found += [f"{getattr(node, 'lineno', 0)}: {what}" for what in _uses(path, node)]
    return found


def _is_lazy(path: str) -> bool:
    return path == "swarm/cli.py" or path.startswith("swarm/commands/")


def _is_pure(path: str) -> bool:
    replays = path.startswith("verification/replay/") or path == "verification/replay.py"
    return path.startswith("swarm/core/") or (path.startswith("verification/") and not replays)


def _naming(path: str, tree: ast.Module, source: str) -> Iterator[str]:
    for part in Path(path).with_suffix("").parts:
        if part in NAMELESS:
            yield f"1: a module is named {part}: find the noun"
    if source.strip() and not ast.get_docstring(tree) and not path.endswith("_pb2_grpc.py"):
        yield "1: the module has no docstring that says what is where"


def _imports(path: str, tree: ast.Module) -> Iterator[str]:
    room = path.split("/", 1)[0]
    at_top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{node.lineno}: a relative import"
            continue
        if isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]
        else:
            continue
        for module in modules:
            for what in _import(path, room, module, at_top=id(node) in at_top):
                yield f"{node.lineno}: {what}"


def _import(path: str, room: str, module: str, *, at_top: bool) -> Iterator[str]:
    package = module.split(".", 1)[0]
    if package in CODE_FROM_BYTES:
        yield f"imports {package}: bytes must never become code"
    if package == "libp2p" and path != "swarm/network/dial_check.py":
        yield "imports libp2p, which shares no process with hivemind"
    if room in TOP:
        if package in TOP and package != room and not (room == "tests" and package in ("benchmarks", "examples")):
            yield f"{room} imports {package}"
        return
    if package in TOP:
        yield f"imports {package}, which nothing imports"
    elif package in ROOMS and package not in MAY_IMPORT[room]:
        if not (_is_lazy(path) and package in PROGRAMS | {"verification"}):
            yield f"{room} imports {package}"
        elif at_top:
            yield f"imports {package} at the top: the command loads programs lazily"
    if package in NETWORK_ONLY and not path.startswith(("swarm/network/", "swarm/proto/")):
        yield f"imports {package} outside swarm/network"
    if path.startswith("swarm/network/dial_check") and package == "hivemind":
        yield "imports hivemind beside libp2p"
    if path.startswith("swarm/core/"):
        ours = module == "swarm" or module == "swarm.core" or module.startswith("swarm.core.")
        if package == "swarm" and not ours and not re.fullmatch(r"swarm\.(PROTOCOL|__version__)", module):
            yield f"core imports {module}"
        elif package != "swarm" and package not in sys.stdlib_module_names:
            yield f"core imports {package}: it is the standard library's only"
    if _is_pure(path) and package in IMPURE:
        yield f"pure code imports {package}"
    if _is_pure(path) and module.startswith("random.") and module != "random.Random":
        yield f"pure code imports {module}: chance comes as an argument"


def _uses(path: str, node: ast.AST) -> Iterator[str]:
    room = path.split("/", 1)[0]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        name = f"{node.value.id}.{node.attr}"
        if name == "torch.load":
            yield "torch.load unpickles"
        if _is_pure(path) and name.startswith("random.") and name != "random.Random":
            yield f"pure code uses {name}: chance comes as an argument"
    if _is_pure(path) and isinstance(node, ast.Attribute) and node.attr in {"now", "utcnow", "today"}:
        value = node.value
        owner = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
        if owner in {"datetime", "date"}:
            yield f"pure code reads the clock by {owner}.{node.attr}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and room == "kernels" and node.name == "get_kernel":
        yield "kernels defines get_kernel, by which other libraries take it for Hugging Face's package"
    if not isinstance(node, ast.Call):
        return
    if any(
        k.arg == "allow_pickle" and not (isinstance(k.value, ast.Constant) and not k.value.value) for k in node.keywords
    ):
        yield "allow_pickle unpickles"
    by_name = isinstance(node.func, ast.Attribute) and node.func.attr == "import_module"
    if by_name and path != "swarm/cli.py" and room != "tests":  # tests may import everything
        yield "imports by name, where no arrow shows"
    if _is_pure(path) and ast.unparse(node.func) in {"random.Random", "Random"} and not node.args and not node.keywords:
        yield "pure code seeds random.Random from the system"
    if isinstance(node.func, ast.Name):
        if node.func.id in {"eval", "exec", "__import__"}:
            yield f"calls {node.func.id}"
        if _is_pure(path) and node.func.id in {"open", "input"}:
            yield f"pure code calls {node.func.id}"
        command = _is_lazy(path) or Path(path).name == "command.py" or room in TOP
        if node.func.id == "print" and not command:
            yield "prints outside the commands"


def modules() -> list[str]:
    paths = (path for room in (*TOP, *ROOMS) for path in (ROOT / room).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def test_every_module_keeps_to_its_room() -> None:
    broken = {
        path: found for path in modules() if (found := violations(path, (ROOT / path).read_text(encoding="utf-8")))
    }
    assert not broken, "\n" + "\n".join(f"{path}:{what}" for path, found in broken.items() for what in found)


def test_modules_of_every_room_are_found() -> None:
    assert {path.split("/", 1)[0] for path in modules()} >= {"tests", *ROOMS}


@pytest.mark.parametrize(
    ("path", "planted", "said"),
    [
        ("swarm/core/a.py", "import torch", "core imports torch"),
        ("swarm/core/a.py", "import numpy as np", "core imports numpy"),
        ("swarm/core/a.py", "from swarm.network.transport import Message", "core imports swarm.network"),
        ("swarm/core/a.py", "from swarm import network", "core imports swarm.network"),
        ("swarm/core/a.py", "def f():\n    import kernels", "swarm imports kernels|core imports kernels"),
        ("swarm/core/a.py", "import time", "pure code imports time"),
        ("swarm/core/a.py", "from os import path", "pure code imports os"),
        ("swarm/core/a.py", "import random\nx = random.random()", "random.random: chance"),
        ("swarm/core/a.py", "from random import shuffle", "random.shuffle: chance"),
        ("swarm/core/a.py", "import random\nrng = random.Random()", "from the system"),
        ("swarm/core/a.py", "import datetime\nx = datetime.datetime.now()", "clock by datetime.now"),
        ("swarm/core/a.py", "x = open('file')", "calls open"),
        ("verification/a.py", "import asyncio", "pure code imports asyncio"),
        ("verification/a.py", "import torch", "pure code imports torch"),
        ("verification/a.py", "import peer.daemon", "verification imports peer"),
        ("swarm/optim/a.py", "import verification", "swarm imports verification"),
        ("swarm/model/a.py", "import peer", "swarm imports peer"),
        ("swarm/model/a.py", "from tests import tiny_models", "imports tests"),
        ("peer/a.py", "from benchmarks import table", "imports benchmarks"),
        ("peer/a.py", "from bootstrap.ledger import Ledger", "peer imports bootstrap"),
        ("bootstrap/demo/a.py", "def f():\n    from peer import daemon", "bootstrap imports peer"),
        ("peer/a.py", "import hivemind", "hivemind outside swarm/network"),
        ("bootstrap/a.py", "from socket import socket", "socket outside swarm/network"),
        ("swarm/network/a.py", "import libp2p", "imports libp2p"),
        ("tests/test_a.py", "from libp2p import new_host", "imports libp2p"),
        ("swarm/network/dial_check.py", "import libp2p\nimport hivemind", "beside libp2p"),
        ("kernels/a.py", "from swarm.core import ids", "kernels imports swarm"),
        ("kernels/a.py", "def get_kernel(name):\n    return name", "get_kernel"),
        ("swarm/cli.py", "from peer import command", "lazily"),
        ("swarm/commands/a.py", "import bootstrap.command", "lazily"),
        ("peer/a.py", "import importlib\nm = importlib.import_module('bootstrap')", "no arrow"),
        ("tests/test_a.py", "import pickle", "never become code"),
        ("swarm/checkpoint/a.py", "import torch\nw = torch.load('x')", "torch.load"),
        ("swarm/data/a.py", "import numpy\nx = numpy.load('x', allow_pickle=True)", "allow_pickle"),
        ("benchmarks/a.py", "eval('1')", "calls eval"),
        ("peer/a.py", "def f():\n    exec('x = 1')", "calls exec"),
        ("peer/a.py", "print('hello')", "prints"),
        ("peer/a.py", "from . import daemon", "relative"),
        ("peer/utils.py", "x = 1", "named utils"),
        ("swarm/common/a.py", "x = 1", "named common"),
    ],
)
def test_planted_violation_is_caught(path: str, planted: str, said: str) -> None:
    found = violations(path, f'"""Planted."""\n\n{planted}\n')
    assert any(re.search(said, what) for what in found), found


def test_module_without_docstring_is_caught() -> None:
    assert violations("peer/a.py", "x = 1\n") == ["1: the module has no docstring that says what is where"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("swarm/core/a.py", "import random\ndef f(rng: random.Random): return rng.random()"),
        ("swarm/core/a.py", "import random\nrng = random.Random(7)"),
        ("verification/replay/a.py", "import time\nimport torch"),
        ("swarm/cli.py", "def f():\n    from peer import command\n    print(command)"),
        ("peer/command.py", "print('hello')"),
        ("swarm/network/a.py", "import socket\nfrom hivemind.p2p import P2P"),
        ("swarm/network/dial_check.py", "import libp2p"),
        ("swarm/model/a.py", "def f(model): return model.eval()"),
        ("tests/test_a.py", "from tests.tiny_models import make\nfrom bootstrap import ledger"),
    ],
)
def test_what_is_allowed_is_not_caught(path: str, allowed: str) -> None:
    assert violations(path, f'"""Allowed."""\n\n{allowed}\n') == []
