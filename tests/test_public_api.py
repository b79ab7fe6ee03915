"""The public names, frozen: what users import, each documented and each in the typing file."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
from pathlib import Path

import pytest

PUBLIC: dict[str, str] = {
    "lightning_moe_ckpt": """
        MoEStrategy __version__
    """,
    "lightning_moe_ckpt.callbacks": """
        CapacityBoost CheckpointArguments DenseCheckpoint DifferentialCheckpoint ExpertLoadMonitor
        PartialExpertCheckpoint Popularity Retention SelectiveExpertCheckpoint SparseCheckpoint
    """,
    "lightning_moe_ckpt.data": """
        SeededItems
    """,
    "lightning_moe_ckpt.strategy": """
        MoEStrategy
    """,
    "lightning_moe_ckpt.moe": """
        MoELayer Routing balance_loss route
    """,
    "lightning_moe_ckpt.metrics": """
        CapturedPerStep ExpertLoad ExpertTokens ExpertsTaken Generations LoadSkew MoementaryLostTokens
        PersistedPerSecond PortionOfLostTokens StallPerStep StallShare TIERS TokensAtRisk WindowPosition load_skew
        moementary_lost_tokens portion_of_lost_tokens
    """,
    "lightning_moe_ckpt.operators": """
        AdapterFactory AttributeCapacity AttributeState AttributeTap BiasView Capacity CapacityTap
        CapacityView ComputeDtypeProbe CountFailure CountProbe CountTap ExpertCapacity ExtraState IndexTap LoadCounter MaskTap
        Measure MoELayerSpec Operator OperatorSet ParamSlice ParameterIndex ProbabilityTap RecordKind
        RowsTap StateEntry StateSchema StateWatch discover groups_state load_groups_state merged_slices prove_counts
        register_adapter register_optimizer split stacked_slices unregister_adapter whole_slice
    """,
    "lightning_moe_ckpt.policies": """
        AUDIENCES TokenLedger Audience Budget Chains TokenDeficits Deltas DensePolicy DifferentialMode DifferentialPolicy DynamicK ExpertLayout ExpertOrder ExpertPolicy ExpertTable Experts LEVELS
        MAX_GENERATIONS MEMORY Measurement NEVER Order PEER PartialPolicy Pending PeriodicPolicy Plan PlanInputs PlanItem Policy Popularity
        RecordPiece STORAGE Selection SelectivePolicy SparsePolicy TierLedger WindowStep WrittenPart all_names assign_adaptively assign_positions assign_writers boost_factors cut_among decayed_popularity expert_layouts expert_names
        next_k plan_for_window plan_window popularity_per_capacity
        positions should_reorder split_nbytes writers_of
        WATCHED_STEPS faded_use
    """,
    "lightning_moe_ckpt.parallel": """
        ExpertParallelModule GradientReducer GroupAbort GroupName OrderedHookState ParallelGroups ReductionMode
        broadcast_tensors build_groups check_ep_size closed_doors current_groups expert_parallel_fqns
        expert_parallel_modules global_grad_norm init_fresh_process_group ordered_all_reduce ordered_hook
        plain_all_reduce restart_is_likely set_current_groups shares_agent_store
    """,
    "lightning_moe_ckpt.storage": """
        CONSTANTS read_constants
        Backend BadCopies ReferencedEntry Commit DIGEST_NAME Entry ExpertSlot FsspecBackend Garbage GenerationId HuggingFaceEntry
        JudgedGeneration Lineage MAX_HEADER_NBYTES MAX_MARKER_NBYTES MemoryMarker ModuleEntry ModuleLine ObjectBackend
        Pace SlotClass
        PosixBackend RING_HEADER_NBYTES RankMarker RecordColumns RecordEntry RecordRows RepairedLog Resume Retention Retrying RingHeader
        RunStore RunView SegmentEntry SegmentLayout Span SpelledRows StoredGeneration TensorKind TensorSpec carry_forward carry_spares check_header check_places
        checked_url collect_garbage create_once digest_of dtype_code dtype_of full_records lacking_memory open_backend read_chunks repair_log
        scrub_record scrub_segment segment_key wrapping_backends
    """,
    "lightning_moe_ckpt.inspection": """
        Export ExportFormat ExportOptions FileProblem Screen Verdict
        export select verify
    """,
    "lightning_moe_ckpt.native": """
        AdamState AdamStep BubbleFigures Bubbles Column CompiledCpuEngine CompiledCudaEngine CompressedGradient Copy CopyEngine CopyList
        CopyTable CpuCopyEngine CudaCopyEngine Finding GradientCompression Library NativeError PartStatus PipelinePhase
        Preparation PreparedTable QuantizedGradient Ranges SparseGradient Ticket append compress_gradients
        MAX_PART_NUMEL copy_through create_engine decompress_gradient examine
        explain measure_bandwidth pack_gradient packed_nbytes replay_adam unpack_gradient
    """,
    "lightning_moe_ckpt.testing": """
        AdapterContract BackendContract Crashed CrashingBackend Fault FaultInjector FaultSummary FaultTally FaultyProxy Kill Attempt
        AttemptFailed AttemptResult RandomFaults Seam TierContract TierHalves Weather assert_same_end capture_end differences fail_at run_lives summarize_faults
    """,
    "lightning_moe_ckpt.errors": """
        CheckpointError CodecError ConfigurationError Corrupt Fenced IdentityMismatch KeyExists KeyMissing
        NoUsableGeneration OtherData RingFull StorageError StorageRefused UnknownLayout UnsupportedOptimizer
        WrongCounts
    """,
}


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
