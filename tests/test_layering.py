"""The direction of imports, and the other rules of the tree that a reader would have to check by eye.

Every rule is a function from a module's syntax tree to the violations in it, so that each is also shown a violation.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_moe_ckpt"

# From the bottom up. A part imports only parts of lower levels; parts of one level do not import each other.
LEVELS = [
    {"errors"},
    {"_units", "_logging", "goodput"},
    {"launch", "native", "metrics", "data", "process", "_cli_options"},
    {"storage", "journal"},
    {"parallel"},
    {"coordination", "moe"},
    {"operators"},
    {"policies", "boosting"},
    {"tiers"},
    {"snapshot"},
    {"recovery"},
    {"planning"},
    {"simulation"},
    {"session"},
    {"inspection"},
    {"fit"},
    {"callbacks", "extend", "strategy", "cli"},
    {"__main__"},
]
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
# These may import every part, and no part imports them.
TOOLS = {"testing", "benchmarks"}
LIGHTNING_PARTS = {"fit", "callbacks", "strategy", "cli", *TOOLS}
# The rooms of `fit`, from the bottom up; its own modules are in "".
FIT_LEVELS = ["objects", "loaders", "loops", "loggers", "", "in_place"]
OWNED_BY_LIGHTNING = {
    "trainer", "fit_loop", "epoch_loop", "val_loop", "batch_progress", "epoch_progress", "automatic_optimization",
    "pl_module", "lightning_module", "precision_plugin", "strategy", "scaler", "loop", "loops", "fetcher",
}  # fmt: skip
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MAX_MODULE_LINES = 560
MAX_FUNCTION_LINES = 60


def _name(path: Path) -> str:
    """Dotted name of a module; `callbacks/` is part of the package, as it is for those who import it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    dotted = ".".join(parts if parts[0] != "callbacks" else (PACKAGE, *parts))
    return dotted.removesuffix(".__init__")


def _package_files() -> list[Path]:
    """Every module of the package, each once: the link to `callbacks` is not followed."""
    inside = [path for path in (ROOT / PACKAGE).rglob("*.py") if "callbacks" not in path.relative_to(ROOT).parts]
    return sorted([*inside, *(ROOT / "callbacks").rglob("*.py")])


def _all_files() -> list[Path]:
    return sorted([*_package_files(), *(ROOT / "examples").rglob("*.py"), *(ROOT / "ext").rglob("*.py")])


@cache
def _parsed(path: Path) -> ast.Module:
    """The syntax tree of a module, which every rule reads and none changes: to parse the tree takes a second."""
    return ast.parse(path.read_text(), filename=str(path))


@pytest.fixture(autouse=True, scope="module")
def trees_are_let_go() -> Iterator[None]:
    """They are a million objects: collections look for no garbage while they come, and nothing is left of them for later tests."""
    gc.disable()
    yield
    _parsed.cache_clear()
    gc.enable()


def _part(module: str) -> str:
    """`storage` for `lightning_moe_ckpt.storage._posix`; empty for the package itself."""
    return module.removeprefix(PACKAGE).lstrip(".").split(".")[0]


def _room(module: str) -> str:
    """`loops` for `lightning_moe_ckpt.fit.loops._taps`, empty for modules of `fit` itself."""
    parts = module.removeprefix(f"{PACKAGE}.fit").strip(".").split(".")
    return parts[0] if parts[0] in FIT_LEVELS else ""


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements at any depth, in the order of lines; expressions, nine of ten nodes, are not walked."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(tree, block, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, at any depth, `TYPE_CHECKING` included."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from lightning_moe_ckpt import storage` names a part, `from lightning_moe_ckpt.storage import X` does not.
            names = [f"{base}.{alias.name}" for alias in node.names] if base == PACKAGE else [base]
            yield from ((node.lineno, name) for name in names)


def wrong_direction(module: str, tree: ast.AST) -> Iterator[str]:
    part = _part(module)
    for line, name in _imports(tree):
        if name.startswith(".") or name.split(".")[0] == "callbacks":
            yield f"{module}:{line} imports {name}: imports are absolute, from {PACKAGE}"
        elif name == PACKAGE and part:
            yield f"{module}:{line} imports the package itself, which imports everything"
        elif name.startswith(f"{PACKAGE}."):
            yield from _wrong_target(module, part, line, _part(name))


def _wrong_target(module: str, part: str, line: int, target: str) -> Iterator[str]:
    if part in TOOLS or part == target:
        return
    if target in TOOLS:
        yield f"{module}:{line} imports {target}, which training never needs"
    elif part and LEVEL_OF.get(target, -1) >= LEVEL_OF[part]:
        yield f"{module}:{line} {part} imports {target}: arrows point down only"
    elif part and target not in LEVEL_OF:
        yield f"{module}:{line} {part} imports {target}, which has no level"


def wrong_room(module: str, tree: ast.AST) -> Iterator[str]:
    for line, name in _imports(tree) if _part(module) == "fit" and module != f"{PACKAGE}.fit" else ():
        if _part(name) == "fit" and FIT_LEVELS.index(_room(name)) > FIT_LEVELS.index(_room(module)):
            yield f"{module}:{line} imports {name}: within `fit` arrows point down only: {FIT_LEVELS}"


def lightning_below(module: str, tree: ast.AST) -> Iterator[str]:
    for line, name in _imports(tree):
        root = name.split(".")[0]
        if root == "pytorch_lightning":
            yield f"{module}:{line} imports pytorch_lightning, a second class hierarchy beside lightning.pytorch"
        if root in ("lightning", "lightning_fabric") and _part(module) not in LIGHTNING_PARTS:
            yield f"{module}:{line} imports {name}: only {sorted(LIGHTNING_PARTS)} know Lightning"


def private_of_lightning(module: str, tree: ast.AST) -> Iterator[str]:
    if _part(module) == "fit":
        return
    for node in ast.walk(tree):
        owner, attribute = _access(node)
        if attribute.startswith("_") and not attribute.startswith("__") and _words(owner) & OWNED_BY_LIGHTNING:
            yield f"{module}:{node.lineno} touches {attribute} of Lightning's"  # type: ignore[attr-defined]


def _access(node: ast.AST) -> tuple[ast.AST | None, str]:
    """Owner and attribute of `owner.attribute` and of `getattr(owner, "attribute")` and its kin."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        attribute = node.args[1]
        if node.func.id in ("getattr", "setattr", "hasattr", "delattr") and isinstance(attribute, ast.Constant):
            return node.args[0], str(attribute.value)
    return None, ""


def _words(owner: ast.AST | None) -> set[str]:
    """The names along `a.b.c`, without leading underscores: `self._trainer` is Lightning's as much as `trainer`."""
    words = set()
    while isinstance(owner, ast.Attribute):
        words.add(owner.attr.lstrip("_"))
        owner = owner.value
    if isinstance(owner, ast.Name):
        words.add(owner.id.lstrip("_"))
    return words


def unsafe_reads(module: str, tree: ast.AST) -> Iterator[str]:
    for line, name in _imports(tree):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"{module}:{line} imports {name}: what it reads can run code"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = {word.arg: word.value for word in node.keywords}
            safe = isinstance(given.get("weights_only"), ast.Constant) and given["weights_only"].value is True  # type: ignore[attr-defined]
            if ast.unparse(node.func) == "torch.load" and not safe:
                yield f"{module}:{node.lineno} torch.load without weights_only=True can run code"
            if any(_is_constant(given.get(word), value) for word, value in UNSAFE_ARGUMENTS):
                yield f"{module}:{node.lineno} asks for a read that can run code"


UNSAFE_ARGUMENTS = [("weights_only", False), ("allow_pickle", True)]


def _is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def asks_which_policy(module: str, tree: ast.AST) -> Iterator[str]:
    """Policies say what differs between them as data; callbacks make one, and hand it on."""
    if _part(module) in {"policies", *TOOLS}:
        return
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            asked = [
                operand.value for operand in operands if isinstance(operand, ast.Attribute) and operand.attr == "kind"
            ]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            asked = [node.args[0]]
        if any("policy" in _words(each) for each in asked):
            yield f"{module}:{node.lineno} asks which policy runs: let `policies.Policy` say what follows from it"  # type: ignore[attr-defined]


def too_long(module: str, tree: ast.Module) -> Iterator[str]:
    lines = max((node.end_lineno or 0 for node in tree.body), default=0)
    if lines > MAX_MODULE_LINES:
        yield f"{module} has {lines} lines: which second noun lives there?"
    for node in statements(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            size = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
            if size > MAX_FUNCTION_LINES:
                yield f"{module}:{node.lineno} {node.name} has {size} lines"


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


Rule = Callable[[str, ast.Module], Iterator[str]]


def _check(rule: Rule, files: list[Path]) -> list[str]:
    found: list[str] = []
    for path in files:
        found += rule(_name(path), _parsed(path))
    return found


@pytest.mark.parametrize(
    "rule", [wrong_direction, wrong_room, lightning_below, private_of_lightning, unsafe_reads, asks_which_policy]
)
def test_package_keeps(rule: Rule) -> None:
    """No module of the package violates the rule."""
    assert _check(rule, _package_files()) == []


def test_nothing_is_too_long() -> None:
    """A module past 560 lines or a function past 60 holds a second idea."""
    assert _check(too_long, _all_files()) == []


def test_every_part_has_a_level() -> None:
    """A new part of the package is given its place in LEVELS before anything can be said about its imports."""
    parts = {_part(_name(path)) for path in _package_files()}
    assert parts - set(LEVEL_OF) <= {"", *TOOLS}


VIOLATIONS = [
    (wrong_direction, "storage._posix", "from lightning_moe_ckpt.session import Session"),
    (wrong_direction, "storage._posix", "def f():\n    import lightning_moe_ckpt.recovery"),
    (wrong_direction, "moe._layer", "from lightning_moe_ckpt import operators"),
    (wrong_direction, "callbacks._sparse", "from lightning_moe_ckpt.strategy import MoEStrategy"),
    (wrong_direction, "callbacks._sparse", "from lightning_moe_ckpt.testing import Fault"),
    (wrong_direction, "", "from lightning_moe_ckpt.benchmarks import main"),
    (wrong_direction, "cli", "from lightning_moe_ckpt.testing import Fault"),
    (wrong_direction, "callbacks._sparse", "from ._dense import DenseCheckpoint"),
    (wrong_direction, "strategy._moe", "from callbacks import SparseCheckpoint"),
    (wrong_direction, "strategy._moe", "import lightning_moe_ckpt"),
    (wrong_direction, "strategy._moe", "from lightning_moe_ckpt.unheard_of import X"),
    (wrong_room, "fit.loops._taps", "from lightning_moe_ckpt.fit._run import FitSession"),
    (wrong_room, "fit.loaders._loaders", "from lightning_moe_ckpt.fit.loops._taps import BatchTap"),
    (lightning_below, "session._run", "from lightning.pytorch import Trainer"),
    (lightning_below, "strategy._moe", "import pytorch_lightning as pl"),
    (private_of_lightning, "callbacks._sparse", "x = trainer.fit_loop._data_fetcher"),
    (private_of_lightning, "callbacks._sparse", "x = self._trainer._results"),
    (private_of_lightning, "session._run", "x = getattr(self.trainer, '_logger_connector')"),
    (unsafe_reads, "storage._format", "import pickle"),
    (unsafe_reads, "storage._format", "torch.load(path)"),
    (unsafe_reads, "storage._format", "torch.load(path, weights_only=False)"),
    (unsafe_reads, "strategy._moe", "self.checkpoint_io.load_checkpoint(path, weights_only=False)"),
    (asks_which_policy, "session._session", "x = isinstance(self._policy, DensePolicy)"),
    (asks_which_policy, "session._session", "x = self._policy.kind in {'dense'}"),
    (asks_which_policy, "callbacks._run", "x = 'sparse' == policy.kind"),
    (too_long, "storage._format", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (too_long, "storage._format", "x = 1\n" * (MAX_MODULE_LINES + 1)),
]


@pytest.mark.parametrize(("rule", "module", "source"), VIOLATIONS)
def test_rule_sees_a_violation(rule: Rule, module: str, source: str) -> None:
    """Each rule fails on what it forbids."""
    assert list(rule(f"{PACKAGE}.{module}", ast.parse(source)))


ALLOWED = [
    (wrong_direction, "moe._layer", "from lightning_moe_ckpt.parallel import current_groups"),
    (wrong_direction, "storage._posix", "from lightning_moe_ckpt.storage._format import Layout"),
    (wrong_direction, "testing._faults", "from lightning_moe_ckpt.callbacks import SparseCheckpoint"),
    (lightning_below, "callbacks._sparse", "from lightning.pytorch import Trainer"),
    (private_of_lightning, "strategy._moe", "x = self._groups"),
    (private_of_lightning, "fit.loops._taps", "x = trainer.fit_loop._data_fetcher"),
    (wrong_room, "fit._run", "from lightning_moe_ckpt.fit.loops._taps import BatchTap"),
    (unsafe_reads, "strategy._moe", "torch.load(path, weights_only=True)"),
    (too_long, "storage._format", "def f():\n    '''" + "words\n" * 70 + "'''\n    return 1\n"),
]


@pytest.mark.parametrize(("rule", "module", "source"), ALLOWED)
def test_rule_leaves_alone_what_is_allowed(rule: Rule, module: str, source: str) -> None:
    """A rule that cried at everything would be switched off."""
    assert list(rule(f"{PACKAGE}.{module}", ast.parse(source))) == []


# -- circles


def _imported_modules(module: str, tree: ast.AST, known: set[str]) -> set[str]:
    """Modules of the package that a module needs, at any depth; `from package.part import _x` needs `_x`."""
    found = set[str]()
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= submodules or {node.module} & known
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
    return found - {module}


def circles(trees: dict[str, ast.Module]) -> list[str]:
    """Modules that need each other, each circle once, imports within functions included."""
    graph = {name: _imported_modules(name, tree, set(trees)) for name, tree in trees.items()}
    while ends := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in ends:
            del graph[name]
    # What is left is in a circle, or above one: follow any way until it comes back.
    found = set[str]()
    for start in graph:
        path = [start]
        while (after := min(graph[path[-1]] & graph.keys())) not in path:
            path.append(after)
        circle = path[path.index(after) :]
        first = circle.index(min(circle))
        found.add(" -> ".join([*circle[first:], *circle[:first]]))
    return sorted(found)


def test_no_modules_need_each_other() -> None:
    """Neither at import nor later: a circle cannot be read, or moved, in parts. An `__init__` only gathers."""
    files = [path for path in _package_files() if path.name != "__init__.py"]
    assert circles({_name(path): _parsed(path) for path in files}) == []


def test_a_circle_is_found() -> None:
    """Also through a local import, and also from above it."""
    sources = {"p.a": "import p.b", "p.b": "def f():\n    from p import c", "p.c": "from p.b import x", "p.d": ""}
    assert circles({name: ast.parse(source) for name, source in sources.items()}) == ["p.b -> p.c"]
