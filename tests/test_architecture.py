"""The rooms' walls: who imports whom, what pure code may touch, what is never used at all.

The rules are those of docs/architecture.md, "Rooms", and that nothing waits without a deadline nor is unpickled; each
is tried on a planted violation as well.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

TOP = ("tests", "benchmarks", "examples")
ROOMS = ("peer", "bootstrap", "verification", "swarm", "kernels")
PROGRAMS = frozenset({"peer", "bootstrap"})
WORLDS = ("peer.adversary", "peer.sim", "peer.fleet")
"""Around a peer, or instead of one: what is honest knows of none; the command that starts one loads it lazily."""

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
CANONICAL = ("swarm/core/canonical.py", "ormsgpack")
TRANSFORMERS_AT = "swarm/local/transformers_library.py"
WORDY = "this is where"
NAMELESS = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All of its tree, the module first."""
    return tuple(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module", autouse=True)
def _trees_are_forgotten() -> Iterator[None]:
    yield
    nodes_of.cache_clear()


def tree_of(source: str) -> ast.Module:
    tree = nodes_of(source)[0]
    assert isinstance(tree, ast.Module)
    return tree


def violations(path: str, source: str) -> list[str]:
    """Every rule that the module at `path` (relative to the root, with slashes) breaks, as `line: what`."""
    found = [*_naming(path, tree_of(source), source), *_imports(path, source)]
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute | ast.Call | ast.FunctionDef | ast.AsyncFunctionDef):
            found += [f"{node.lineno}: {what}" for what in _uses(path, node)]
    return found


def _is_lazy(path: str) -> bool:
    return path == "swarm/cli.py" or path.startswith("swarm/commands/")


def _world(module: str) -> str | None:
    """The world that a module, or what is imported of one, is of."""
    return next((world for world in WORLDS if module == world or module.startswith(f"{world}.")), None)


@cache
def _is_pure(path: str) -> bool:
    replays = path.startswith("verification/replay/") or path == "verification/replay.py"
    return path.startswith("swarm/core/") or (path.startswith("verification/") and not replays)


def _naming(path: str, tree: ast.Module, source: str) -> Iterator[str]:
    for part in Path(path).with_suffix("").parts:
        if part in NAMELESS:
            yield f"1: a module is named {part}: find the noun"
    if source.strip() and not ast.get_docstring(tree) and not path.endswith("_pb2_grpc.py"):
        yield "1: the module has no docstring that says what is where"
    if (ast.get_docstring(tree) or "").lower().startswith(WORDY):
        yield "1: the docstring begins with where it stands; say what lives here plainly"


def _imports(path: str, source: str) -> Iterator[str]:
    room = path.split("/", 1)[0]
    at_top = {id(node) for node in tree_of(source).body}
    for node in nodes_of(source):
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
    if package == "libp2p" and path != "swarm/network/p2pd/dial_check.py":
        yield "imports libp2p, which shares no process with hivemind"
    if room in TOP:
        if package in TOP and package != room and not (room == "tests" and package in ("benchmarks", "examples")):
            yield f"{room} imports {package}"
        return
    if module == "functools.cached_property":
        yield "a lock of all instances (Python 3.11): swarm.core.kept"
    if package in TOP:
        yield f"imports {package}, which nothing imports"
    elif package in ROOMS and package not in MAY_IMPORT[room]:
        if not (_is_lazy(path) and package in PROGRAMS | {"verification"}):
            yield f"{room} imports {package}"
        elif at_top:
            yield f"imports {package} at the top: the command loads programs lazily"
    world, own = _world(module), _world(path.removesuffix(".py").replace("/", "."))
    if world is not None and own is None and (at_top or not _is_lazy(path)):
        yield f"imports the world {world}, which is around it"
    if package in NETWORK_ONLY and not path.startswith(("swarm/network/", "swarm/proto/")):
        yield f"imports {package} outside swarm/network"
    if package == "transformers" and path != TRANSFORMERS_AT:
        yield f"imports {module}: it comes of {TRANSFORMERS_AT}, which loads no compiler with it"
    if path.startswith("swarm/network/p2pd/dial_check") and package == "hivemind":
        yield "imports hivemind beside libp2p"
    if path.startswith("swarm/core/"):
        ours = module == "swarm" or module == "swarm.core" or module.startswith("swarm.core.")
        if package == "swarm" and not ours:
            yield f"core imports {module}"
        elif package not in {"swarm", *sys.stdlib_module_names} and (path, package) != CANONICAL:
            yield f"core imports {package}: but for canonical bytes it is the standard library's only"
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
    if _is_pure(path) and not node.args and not node.keywords and ast.unparse(node.func) in {"random.Random", "Random"}:
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


MOST_IN_A_FOLDER = 15


def imports_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """By module, which of the others it imports, lazily or for its types too."""
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        named: set[str] = set()
        for node in nodes_of(source):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[name] = (named & set(sources)) - {name}
    return found


def reached(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """All that a module imports, and what they import."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        for other in imports[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def circles(imports: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules that import each other in a circle."""
    reach = {name: reached(name, imports) for name in imports}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in reach if name in reach[name]}


def test_modules_import_each_other_in_no_circle() -> None:
    """Packages too, and tests and benchmarks as well."""
    named = {path[:-3].replace("/", ".").removesuffix(".__init__"): path for path in modules()}
    assert not circles(imports_of({name: (ROOT / path).read_text("utf-8") for name, path in named.items()}))


def test_a_circle_is_found() -> None:
    planted = {
        "peer.a": "import peer.b",
        "peer.b": "def f():\n    from peer import c",
        "peer.c": "import peer.a",
    }
    assert circles(imports_of({**planted, "peer.d": "import peer.a"})) == {frozenset(planted)}


LATE = ("peer", "bootstrap", "swarm", "verification")
BUILT_IN = {"append", "set", "add"}
"""Methods of lists, events and sets."""
EMPTY = {"set", "dict", "list", "tuple", "frozenset", "bool", "int", "float", "str", "bytes"}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_field(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(mark).endswith("property") for mark in node.decorator_list)


def functions_of(source: str) -> set[str]:
    """Names of the functions and methods that are defined in it, but for those that are read like a field."""
    functions = (n for n in nodes_of(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if not _is_field(function)}


def fields_of(source: str) -> set[str]:
    """Names of what the objects in it hold, or are asked for like a field."""
    found: set[str] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.ClassDef):
            lines = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            found |= {target.id for target in lines if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef) and _is_field(node):
            found.add(node.name)
    return found


def wired_late(source: str, functions: Set[str], fields: Set[str]) -> Iterator[str]:
    """Where a callable is assigned to another object's attribute, or an attribute waits for one.

    `functions` and `fields` are the names of those of all modules. What an object has under both names may be either:
    it counts as a function where it is the own class's.
    """
    nodes = nodes_of(source)
    methods = {line for node in nodes if isinstance(node, ast.ClassDef) for line in node.body}
    functions_of_classes = {line for line in methods if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)}
    own = {line.name for line in functions_of_classes} - fields_of(source)
    defined = {n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)} - methods
    imported = {name.asname or name.name for n in nodes if isinstance(n, ast.ImportFrom) for name in n.names}
    known = {node.name for node in defined} | (imported & functions)
    arguments = {node for node in nodes if isinstance(node, ast.arg) and node.annotation is not None}
    given = {one.arg for one in arguments if ast.unparse(one.annotation or one).startswith("Callable")}

    def is_callable(value: ast.expr) -> bool:
        if isinstance(value, ast.Attribute):
            return value.attr in BUILT_IN or value.attr in (own if _is_self(value.value) else functions - fields)
        if isinstance(value, ast.Call):
            return ast.unparse(value.func) in ("partial", "functools.partial")
        return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in known | given)

    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) == 3:
            if any(map(is_callable, _parts(node.args[2]))):
                yield f"{node.lineno}: {ast.unparse(node)} wires late: give it to the constructor, or tell an event"
            continue
        if isinstance(node, ast.AnnAssign):
            value, targets = node.value, [node.target]
            waits = isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in EMPTY)
            if waits and isinstance(node.target, ast.Attribute) and "Callable" in ast.unparse(node.annotation):
                yield f"{node.lineno}: {ast.unparse(node.target)} waits for a callable: give it to the constructor"
        elif isinstance(node, ast.Assign | ast.AugAssign):
            value, targets = node.value, node.targets if isinstance(node, ast.Assign) else [node.target]
        else:
            continue
        flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
        attributes = [one for one in flat if isinstance(one, ast.Attribute)]
        copied = value.attr if isinstance(value, ast.Attribute) and not _is_self(value.value) else ""
        others = [one for one in attributes if not _is_self(one.value) and one.attr != copied]
        if others and value is not None and any(map(is_callable, _parts(value))):
            yield f"{node.lineno}: {ast.unparse(others[0])} is wired late: give it to the constructor, or tell an event"


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    """The value, or what a display or a choice is made of."""
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        yield from (part for element in value.elts for part in _parts(element))
    elif isinstance(value, ast.IfExp):
        yield from (*_parts(value.body), *_parts(value.orelse))
    else:
        yield value


def test_nothing_is_wired_late() -> None:
    sources = {path: (ROOT / path).read_text("utf-8") for path in modules() if path.split("/")[0] in LATE}
    functions = set().union(*map(functions_of, sources.values()))
    fields = set().union(*map(fields_of, sources.values()))
    late = [f"{path}:{what}" for path, source in sources.items() for what in wired_late(source, functions, fields)]
    assert not late, "\n" + "\n".join(late)


@pytest.mark.parametrize(
    "planted",
    [
        "rounds.on_lost = lambda peer: None",
        "self.rounds.on_lost = heard",
        "rounds.on_lost = self.heard",
        "rounds.on_lost = event.set",
        "rounds.on_lost = other.rounds.on_lost = watch.heard",
        "neighbours.leaving, rounds.on_lost = True, heard",
        "permit.hearers = [thread.heard]",
        "permit.hearers += [thread.heard]",
        "rounds.on_lost = partial(heard, 3)",
        "rounds.on_lost = heard if rounds else None",
        "setattr(rounds, 'on_lost', heard)",
        "def wire(rounds, on_lost: Callable[[int], None]):\n    rounds.on_lost = on_lost",
        "class A:\n    def __init__(self):\n        self.on_lost: Callable[[int], None] = lambda peer: None",
        "class A:\n    def __init__(self):\n        self.neighbours: Callable[[], set[int]] = set",
    ],
)
def test_what_is_wired_late_is_found(planted: str) -> None:
    source = f"def heard(): ...\nclass B:\n    def heard(self): ...\n{planted}"
    assert len(list(wired_late(source, {"heard"}, set()))) == 1


@pytest.mark.parametrize(
    "allowed",
    [
        "self.on_lost = on_lost",
        "self._heard = self.heard",
        "state.view = state.round.view",
        "slot.heard = other.heard",
        "known.lost = partial_sum(3)",
        "class A:\n    def __init__(self, heard):\n        self._heard: Callable[[int], None] = heard",
        "class A:\n    heard: Callable[[int], None]",
    ],
)
def test_what_is_given_in_time_is_allowed(allowed: str) -> None:
    assert not list(wired_late(f"def heard(): ...\n{allowed}", {"heard"}, {"view"}))


def unread(sources: Iterable[str]) -> list[str]:
    """Arguments that no function of that name reads, as `function(argument)`.

    Only of functions that are always called by their names: what is handed on as a value takes what its caller gives.
    """
    reads: dict[tuple[str, str], bool] = {}
    called, valued = set[str](), set[str]()
    for source in sources:
        nodes = nodes_of(source)
        targets = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                (called if id(node) in targets else valued).add(name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_empty(node):
                read = {one.id for line in node.body for one in ast.walk(line) if isinstance(one, ast.Name)}
                given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                for argument in {one.arg for one in given} - {"self", "cls", "context"}:  # gRPC gives a context
                    key = (node.name, argument)
                    reads[key] = reads.get(key, False) or argument in read
    return sorted(
        f"{function}({argument})"
        for (function, argument), is_read in reads.items()
        if not is_read and function in called and function not in valued
    )


def _is_empty(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Of a protocol, or abstract: there is a docstring, or dots."""
    return all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in function.body)


def test_every_argument_is_read() -> None:
    product = [(ROOT / path).read_text() for path in modules() if path.split("/")[0] in ROOMS]
    assert unread(product) == []


def test_an_argument_that_nothing_reads_is_found() -> None:
    both = (
        "def one(a, b): return a\ndef two(a, b): return a",
        "one(1, 2)\nhand(two)\nclass A:\n def one(self, b): ...",
    )
    assert unread(both) == ["one(b)"]


def ways(text: str) -> list[list[str]]:
    """The modules of each numbered list in the section "One round's state, one microbatch", in order."""
    section = text.partition("\n## One round's state, one microbatch\n")[2].partition("\n## ")[0]
    found: list[list[str]] = []
    for number, path in re.findall(r"^(\d+)\. `([\w/]+)\.py`", section, flags=re.MULTILINE):
        if number == "1":
            found.append([])
        found[-1].append(path.replace("/", "."))
    return found


def ways_back(way: list[str], imports: Mapping[str, set[str]]) -> list[str]:
    """Which modules of a way reach an earlier one, by whatever they import."""
    return [
        f"{later} reaches {earlier}"
        for place, later in enumerate(way)
        for earlier in way[:place]
        if earlier in reached(later, imports)
    ]


def test_a_rounds_state_and_a_microbatch_go_through_six_modules_and_not_back_up() -> None:
    named = {path[:-3].replace("/", "."): (ROOT / path).read_text("utf-8") for path in modules()}
    imports = imports_of({name: source for name, source in named.items() if name.split(".")[0] in MAY_IMPORT})
    found = ways((ROOT / "docs" / "architecture.md").read_text("utf-8"))
    assert len(found) == 2
    for way in found:
        assert set(way) <= set(imports), "a module of the way is not there"
        assert 2 < len(way) <= 6
        assert not ways_back(way, imports)


def test_a_way_back_up_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"helper"}, "helper": {"a"}}
    assert ways_back(["a", "b", "c"], imports) == ["b reaches a", "c reaches a", "c reaches b"]
    assert not ways_back(["a", "b", "c"], {**imports, "helper": set()})


def long_lists(paths: Iterable[str]) -> dict[str, int]:
    """Folders that hold more modules than anyone overlooks, and how many."""
    held = Counter(path.rpartition("/")[0] for path in paths if not path.endswith("__init__.py"))
    return {folder: count for folder, count in held.items() if count > MOST_IN_A_FOLDER}


def test_no_folder_is_a_long_list() -> None:
    assert not long_lists(modules()), "find the rooms in it"


def test_a_long_list_is_found() -> None:
    paths = [f"benchmarks/homes/m{number}.py" for number in range(MOST_IN_A_FOLDER)]
    assert not long_lists([*paths, "benchmarks/homes/__init__.py", "benchmarks/homes/deeper/m.py"])
    assert long_lists([*paths, "benchmarks/homes/one_more.py"]) == {"benchmarks/homes": MOST_IN_A_FOLDER + 1}


def without_a_twin(paths: Iterable[str]) -> set[str]:
    """Folders of tests whose path no folder has that holds modules, but for that of the docs."""
    folders = {folder.as_posix() for path in paths for folder in Path(path).parents}
    tested = {folder.removeprefix("tests/") for folder in folders if folder.startswith("tests/")}
    return tested - {folder for folder in folders if not folder.startswith("tests")} - {"docs"}


def test_each_folder_of_tests_mirrors_one_of_what_it_tests() -> None:
    assert not without_a_twin(modules())


def test_a_folder_of_tests_without_a_twin_is_found() -> None:
    tests = ["tests/test_a.py", "tests/docs/test_a.py", "tests/peer/round/test_a.py", "tests/peer/rounds/test_b.py"]
    assert without_a_twin([*tests, "peer/round/a.py"]) == {"peer/rounds"}


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
        ("peer/audit/a.py", "from peer.adversary.hooks import HONEST", "the world peer.adversary"),
        ("peer/program/daemon.py", "def f():\n    from peer import sim", "the world peer.sim"),
        ("peer/owner/a.py", "import peer.fleet", "the world peer.fleet"),
        ("swarm/commands/a.py", "import peer.fleet.flow", "the world peer.fleet"),
        ("peer/a.py", "import hivemind", "hivemind outside swarm/network"),
        ("bootstrap/a.py", "from socket import socket", "socket outside swarm/network"),
        ("swarm/network/a.py", "import libp2p", "imports libp2p"),
        ("tests/test_a.py", "from libp2p import new_host", "imports libp2p"),
        ("swarm/network/p2pd/dial_check.py", "import libp2p\nimport hivemind", "beside libp2p"),
        ("kernels/a.py", "from swarm.core import ids", "kernels imports swarm"),
        ("kernels/a.py", "def get_kernel(name):\n    return name", "get_kernel"),
        ("swarm/cli.py", "from peer import command", "lazily"),
        ("swarm/commands/a.py", "import bootstrap.command", "lazily"),
        ("peer/a.py", "import importlib\nm = importlib.import_module('bootstrap')", "no arrow"),
        ("tests/test_a.py", "import pickle", "never become code"),
        ("peer/a.py", "from functools import cached_property", "lock of all instances"),
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


def test_module_without_docstring_or_with_a_wordy_one_is_caught() -> None:
    assert violations("peer/a.py", "x = 1\n") == ["1: the module has no docstring that says what is where"]
    (said,) = violations("peer/a.py", '"""This is where a peer lives."""\n')
    assert "plainly" in said


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("swarm/core/a.py", "import random\ndef f(rng: random.Random): return rng.random()"),
        ("swarm/core/a.py", "import random\nrng = random.Random(7)"),
        ("verification/replay/a.py", "import time\nimport torch"),
        ("swarm/cli.py", "def f():\n    from peer import command\n    print(command)"),
        ("peer/program/command.py", "print('hello')"),
        ("peer/sim/a.py", "from peer.adversary.kinds import parse"),
        ("swarm/commands/a.py", "def f():\n    from peer.fleet import flow"),
        ("swarm/network/a.py", "import socket\nfrom hivemind.p2p import P2P"),
        ("swarm/network/p2pd/dial_check.py", "import libp2p"),
        ("swarm/model/a.py", "def f(model): return model.eval()"),
        ("tests/test_a.py", "from tests.swarm.model.tiny_models import make\nfrom bootstrap import ledger"),
    ],
)
def test_what_is_allowed_is_not_caught(path: str, allowed: str) -> None:
    assert violations(path, f'"""Allowed."""\n\n{allowed}\n') == []
