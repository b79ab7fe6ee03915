"""The public names, frozen: what users import, each documented and each in the typing file."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin, get_type_hints, is_typeddict

import pytest

PUBLIC: dict[str, str] = {
    "lightning_moe_ckpt": """
        MoEStrategy __version__
    """,
    "lightning_moe_ckpt.callbacks": """
        CapacityBoost CheckpointArguments DenseCheckpoint DifferentialCheckpoint ExpertLoadMonitor FailureDomain
        PartialExpertCheckpoint Popularity Retention SelectiveExpertCheckpoint SparseCheckpoint auto
    """,
    "lightning_moe_ckpt.data": """
        SeededItems
    """,
    "lightning_moe_ckpt.strategy": """
        MoEStrategy
    """,
    "lightning_moe_ckpt.moe": """
        MoELayer Routing balance_loss route spread_experts
    """,
    "lightning_moe_ckpt.metrics": """
        CapturedPerStep ExpertLoad ExpertTokens ExpertsTaken Generations GoodputShare LoadSkew MoementaryLostTokens
        PersistedPerSecond PortionOfLostTokens TIERS TokensAtRisk WindowPosition load_skew
        moementary_lost_tokens portion_of_lost_tokens
    """,
    "lightning_moe_ckpt.errors": """
        CheckpointError CodecError ConfigurationError Corrupt Fenced IdentityMismatch KeyExists KeyMissing
        NoUsableGeneration OtherData RingFull SilentFault StorageError StorageRefused UnknownLayout
        UnsupportedOptimizer WrongCounts
    """,
    "lightning_moe_ckpt.extend": """
        AttributeCapacity AttributeState AttributeTap Backend BiasView CapacityTap Entry ExpertCapacity IndexTap MaskTap
        MoELayerSpec OrderedHookState ParamSlice ParameterIndex ProbabilityTap RowsTap merged_slices ordered_hook
        register_adapter register_optimizer stacked_slices whole_slice
    """,
    "lightning_moe_ckpt.testing": """
        AdapterContract Attempt AttemptFailed AttemptResult BackendContract Fault FaultInjector FaultSummary FaultTally
        Kill RandomFaults Seam assert_same_end capture_end differences fail_at run_attempts summarize_faults
    """,
}
MAX_PUBLIC = 94


ROOT = Path(__file__).resolve().parents[1]


def exported(module: types.ModuleType) -> dict[str, object]:
    """What `from module import name` gives a user without an underscore; submodules and language features left out."""
    hidden = (types.ModuleType, type(importlib.import_module("__future__").annotations))
    return {
        name: value
        for name, value in vars(module).items()
        if (not name.startswith("_") or name == "__version__") and not isinstance(value, hidden)
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_frozen(name: str) -> None:
    """A name that is new, gone, or exported by accident (an import without an underscore) fails here."""
    found, frozen = set(exported(importlib.import_module(name))), set(PUBLIC[name].split())
    assert found == frozen, (
        f"{name}: new {sorted(found - frozen)}, gone {sorted(frozen - found)}. If that is meant, change PUBLIC in this "
        "file and tests/typing/api.py, and tell users in CHANGELOG.md."
    )


def test_there_are_few_public_names() -> None:
    """A name that is public cannot change without notice: a new one takes the place of another."""
    assert sum(len(names.split()) for names in PUBLIC.values()) <= MAX_PUBLIC


def test_every_other_package_says_that_it_is_internal() -> None:
    """In its docstring, which is what a reader opens first."""
    import lightning_moe_ckpt

    for module in pkgutil.iter_modules(lightning_moe_ckpt.__path__, "lightning_moe_ckpt."):
        if module.ispkg and module.name not in PUBLIC:
            assert "Internal: may change in any version." in (importlib.import_module(module.name).__doc__ or ""), (
                module
            )


def documented() -> list[tuple[str, object]]:
    """Public classes and functions of this package; aliases of types have no docstring of their own."""
    pairs = [
        (f"{module}.{name}", value)
        for module in PUBLIC
        for name, value in exported(importlib.import_module(module)).items()
        if inspect.isclass(value) or inspect.isfunction(value)
    ]
    return [(name, value) for name, value in pairs if value.__module__.startswith("lightning_moe_ckpt")]


def test_public_names_are_documented() -> None:
    """Each has a docstring of its own (a dataclass without one gets its signature), beginning with a sentence."""
    for name, value in documented():
        text = value.__doc__ or ""
        assert re.match(r"[A-Z`\"].*[.:]", text, flags=re.DOTALL), f"{name}: {text[:60]!r}"
        assert not text.startswith(f"{name.rpartition('.')[2]}("), name


def test_arguments_of_constructors_are_documented() -> None:
    """LightningCLI prints them: every argument of what a YAML file names stands in the docstring, and no other."""
    for path in (
        "callbacks.SparseCheckpoint",
        "callbacks.DenseCheckpoint",
        "callbacks.DifferentialCheckpoint",
        "callbacks.PartialExpertCheckpoint",
        "callbacks.SelectiveExpertCheckpoint",
        "callbacks.CapacityBoost",
        "callbacks.ExpertLoadMonitor",
        "MoEStrategy",
        "testing.FaultInjector",
        "testing.Fault",
        "testing.RandomFaults",
    ):
        module, _, name = f"lightning_moe_ckpt.{path}".rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        texts = [cls.__doc__, *([cls.__init__.__doc__] if "shared" in cls.__init__.__annotations__ else [])]
        told = [name for text in texts for name in told_arguments(text)]
        assert told == list(inspect.signature(cls).parameters), name


def told_arguments(text: str) -> list[str]:
    section = inspect.cleandoc(text).partition("Args:\n")[2].partition("\n\n")[0]
    return re.findall(r"^ {4}(\w+): ", section, flags=re.MULTILINE)


def annotated(value: object) -> Iterator[tuple[str, object]]:
    """Types of what a user gives and gets: arguments of functions and constructors, and values of properties."""
    if not inspect.isclass(value) or is_typeddict(value):
        yield from get_type_hints(value).items()
        return
    yield from get_type_hints(value.__init__).items()
    for name, member in inspect.getmembers(value, lambda member: isinstance(member, property)):
        yield from ((name, hint) for hint in get_type_hints(member.fget).values())


def classes_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and get_origin(hint) is None:
        yield hint
    for part in hint if isinstance(hint, list) else get_args(hint):
        yield from classes_in(part)


def test_public_signatures_lead_to_public_names() -> None:
    """Every class of this package in them is public, or has its reference in `docs/api`: nobody has to look for a type inside."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    references = [name.rpartition(".") for name in re.findall(r"^::: ([\w.]+)", text, flags=re.MULTILINE)]
    known = {id(getattr(importlib.import_module(module), name)) for module, _, name in references}
    hidden = {
        f"{name}({argument}): {cls.__qualname__}"
        for name, value in documented()
        for argument, hint in annotated(value)
        for cls in classes_in(hint)
        if not argument.startswith("_") and cls.__module__.startswith("lightning_moe_ckpt") and id(cls) not in known
    }
    assert not hidden


def test_raised_errors_exist() -> None:
    """What docstrings list under "Raises" are exceptions: of this package, or built in."""
    for name, value in documented():
        section = re.search(r"Raises:\n((?: +.*\n?)+)", inspect.getdoc(value) or "")
        for error in re.findall(r"^    (\w+):", section[1] if section else "", flags=re.MULTILINE):
            owner = importlib.import_module(value.__module__)
            errors = importlib.import_module("lightning_moe_ckpt.errors")
            cls = getattr(owner, error, None) or getattr(errors, error, None) or owner.__builtins__.get(error)
            assert inspect.isclass(cls), f"{name}: {error}"
            assert issubclass(cls, BaseException), f"{name}: {error}"


def test_the_typing_file_uses_every_public_name() -> None:
    """mypy checks `tests/typing/api.py` with the rest; this sees that nothing is missing in it."""
    tree = ast.parse((ROOT / "tests" / "typing" / "api.py").read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    for module, names in PUBLIC.items():
        short = module.partition(".")[2]
        missing = [name for name in names.split() if name not in used and f"{short or module}.{name}" not in used]
        assert not missing, f"{module}: {missing}"
