"""What code a program can come to run: the definitions that are reached from its modules by name.

A module that is imported runs what stands in it outside definitions, and what registers itself: definitions under a
decorator that is not of `PLAIN_DECORATORS`, classes with keywords. A function, a class as a whole, or a constant is
reached where its name stands in code that is reached. Comments, docstrings and what is imported for types alone are
nobody's code. What is found by a string (a verb of `swarm`, a test's fixture) must be named by who asks.
"""

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

AT_IMPORT = "(at import)"
"""The name of what runs when a module is imported."""
WHOLE = "(whole)"

PLAIN_DECORATORS = {
    *("dataclass", "cache", "lru_cache", "cached_property", "contextmanager", "asynccontextmanager", "njit", "jit"),
    *("command", "option", "argument", "pass_context", "overload", "final", "runtime_checkable", "total_ordering"),
    *("unique", "no_grad", "inference_mode", "vectorize", "guvectorize", "override"),
}
"""By their last name; all others may register what they decorate."""

Definition = tuple[str, str]
"""A module and a name in it."""


@dataclass
class Source:
    """A module's text, taken apart."""

    texts: dict[str, str] = field(default_factory=dict)
    """By name, the definition's text without comments and docstrings, and from where the names in it were imported;
    under AT_IMPORT what runs at once."""
    uses: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    """By name, what stands in the definition: names, and names with the attribute that is asked of them."""
    fetches: dict[str, set[Definition]] = field(default_factory=dict)
    """By name, what is imported in it. WHOLE stands for a module itself."""
    imports: dict[str, Definition] = field(default_factory=dict)
    """By name, what the module has imported from where."""

    @classmethod
    def of(cls, text: str) -> "Source":
        made, lines = cls(), _bare_lines(text)
        for statement in ast.parse(text).body:
            if _is_for_types(statement) or _is_words(statement):
                continue
            made._imports_of(statement)
            names = [AT_IMPORT] if isinstance(statement, ast.Import | ast.ImportFrom) else _names(statement)
            for name in names:
                made._add(name, statement, lines)
        for name, bare in made.texts.items():
            meant = sorted({f"{one}: {made.imports[one]}" for one, *_ in made.uses[name] if one in made.imports})
            made.texts[name] = "\n".join([bare, *meant])
        return made

    def _imports_of(self, statement: ast.stmt) -> None:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for node in ast.walk(statement):
                self.imports |= _bound(node)

    def _add(self, name: str, statement: ast.stmt, lines: Mapping[int, str]) -> None:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
            own = [lines[at] for at in range(first, (statement.end_lineno or first) + 1) if at in lines]
            self.texts[name] = "\n".join([*([self.texts[name]] if name in self.texts else []), *own])
        fetched, used = self.fetches.setdefault(name, set()), self.uses.setdefault(name, set())
        asked = set[ast.expr]()
        said = {node for one in ast.walk(statement) for node in _annotations(one)}
        for node in (node for node in ast.walk(statement) if node not in said):
            fetched |= set(_bound(node).values())
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.add((node.value.id, node.attr))
                asked.add(node.value)
        named = {node for node in ast.walk(statement) if isinstance(node, ast.Name)}
        used |= {(node.id,) for node in named - asked - said}


class Sources:
    """The modules of a repository as they are in its files now."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._paths: dict[str, Path | None] = {}
        self._sources: dict[Path, Source] = {}

    def path(self, module: str) -> Path | None:
        """The module's file; None for what is no module here."""
        if module not in self._paths:
            at = self.root.joinpath(*module.split("."))
            files = (at.with_name(f"{at.name}.py"), at / "__init__.py")
            self._paths[module] = next((path for path in files if path.is_file()), None)
        return self._paths[module]

    def of(self, module: str) -> Source | None:
        path = self.path(module)
        return None if path is None else self.at(path)

    def at(self, path: Path) -> Source:
        if path not in self._sources:
            self._sources[path] = Source.of(path.read_text(encoding="utf-8"))
        return self._sources[path]


class Reach:
    """All that is reached from some modules."""

    def __init__(self, modules: Iterable[str], sources: Sources) -> None:
        self._sources = sources
        self._found: set[Definition] = set()
        self._waiting: list[Definition] = []
        for module in modules:
            self._import(module)
            self._whole(module)
        while self._waiting:
            self._follow(*self._waiting.pop())

    def definitions(self) -> dict[Path, set[str]]:
        """By file, the names that are reached in it."""
        found: dict[Path, set[str]] = {}
        for module, name in self._found:
            path = self._sources.path(module)
            assert path is not None
            found.setdefault(path, set()).add(name)
        return found

    def _reach(self, module: str, name: str) -> None:
        if (module, name) not in self._found:
            self._found.add((module, name))
            self._waiting.append((module, name))

    def _import(self, module: str) -> None:
        """The module's packages are imported with it."""
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            if self._sources.path(name) is not None:
                self._reach(name, AT_IMPORT)

    def _whole(self, module: str) -> None:
        source = self._sources.of(module)
        for name in (*source.texts, *source.imports) if source is not None else ():
            self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        """`name` is asked of the module."""
        source = self._sources.of(module)
        if source is None:
            return
        if name in source.texts:
            self._reach(module, name)
        if name in source.imports:
            self._fetched(*source.imports[name])
        elif name not in source.texts and "__getattr__" in source.texts:
            self._reach(module, "__getattr__")

    def _fetched(self, module: str, name: str, asked: str | None = None) -> None:
        """What an import brought; of a module, what is `asked` of it, or all."""
        of = module if name == WHOLE else f"{module}.{name}"
        if self._sources.path(of) is None:
            self._name(module, name)
        elif asked is None:
            self._whole(of)
        else:
            self._name(of, asked)
            if self._sources.path(f"{of}.{asked}") is not None:
                self._whole(f"{of}.{asked}")

    def _follow(self, module: str, name: str) -> None:
        source = self._sources.of(module)
        assert source is not None
        for fetched, what in source.fetches.get(name, ()):
            self._import(fetched if what == WHOLE else f"{fetched}.{what}")
            if name != AT_IMPORT:  # within a function
                self._fetched(fetched, what)
        for used, *asked in source.uses.get(name, ()):
            if used in source.texts:
                self._reach(module, used)
            if used in source.imports:
                self._fetched(*source.imports[used], *asked)


def digest(definitions: Mapping[Path, Iterable[str]], sources: Sources) -> str:
    """Of the code of these definitions."""
    hasher = hashlib.sha256()
    for path in sorted(definitions):
        texts = sources.at(path).texts
        for name in sorted(definitions[path]):
            hasher.update(f"{path.relative_to(sources.root).as_posix()}\0{name}\0{texts.get(name, '')}\0".encode())
    return hasher.hexdigest()[:16]


def _bare_lines(text: str) -> dict[int, str]:
    """By number, the lines without comments and docstrings, those that then say something."""
    lines = dict(enumerate(text.splitlines(), start=1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = lines[token.start[0]][: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        if _is_words(node):
            for at in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines.pop(at, None)
    return {at: line.rstrip() for at, line in lines.items() if line.strip()}


def _is_words(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _names(statement: ast.stmt) -> list[str]:
    """Under which the statement is reached."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            plain = all(_last_name(one) in PLAIN_DECORATORS for one in statement.decorator_list)
            keywords = isinstance(statement, ast.ClassDef) and statement.keywords
            return [statement.name] if plain and not keywords else [statement.name, AT_IMPORT]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=[ast.Tuple(elts=elements)]) if all(isinstance(one, ast.Name) for one in elements):
            return [one.id for one in elements if isinstance(one, ast.Name)]
    # Also what is bound within a condition, or changed.
    bound = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    defined = [node.name for node in ast.walk(statement) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return list(dict.fromkeys([AT_IMPORT, *bound, *defined]))


def _last_name(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _bound(node: ast.AST) -> dict[str, Definition]:
    """By the names that an import binds, what they stand for."""
    if isinstance(node, ast.Import):
        return {one.asname or one.name.partition(".")[0]: (one.name, WHOLE) for one in node.names}
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return {one.asname or one.name: (node.module, one.name) for one in node.names}
    return {}


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Of a function: nothing is done with them. Those of a class's fields are read by some."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        each = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for one in (node.returns, *(each_one.annotation for each_one in each if each_one is not None)):
            yield from ast.walk(one) if one is not None else ()
