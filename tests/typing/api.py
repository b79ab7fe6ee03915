"""Every public name used as a user would use it. mypy checks this file; nothing runs it.

`test_public_api.py` sees to it that no name is left out. An assertion here that fails means that the types users see
have changed: say so in the changelog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset
from typing_extensions import Unpack, assert_type, override

import lightning_moe_ckpt
from lightning_moe_ckpt import (
    MoEStrategy,
    callbacks,
    data,
    errors,
    inspection,
    metrics,
    moe,
    native,
    operators,
    parallel,
    policies,
    storage,
    strategy,
    testing,
)

# -- the package, callbacks, strategy


def train(model: LightningModule) -> None:
    assert_type(lightning_moe_ckpt.__version__, str)
    popularity = callbacks.Popularity(counts="soft", half_life_steps=200.0, per_capacity=True)
    sparse = callbacks.SparseCheckpoint(
        Path("checkpoints"),
        window="auto",
        budget_nbytes=2**20,
        planner="packed",
        order="popularity",
        popularity=popularity,
        max_window=8,
        over_budget="dense",
        retention=callbacks.Retention(last=3, every_n_steps=1000, days=7),
        resume="must",
        batches="log",
        stop_grace=timedelta(seconds=20),
        on_change="mine",
        freeze_heap=False,
        overhead_target=0.05,
        storage_at_least=timedelta(minutes=5),
    )
    monitor = callbacks.ExpertLoadMonitor(every_n_steps=10)
    assert_type(callbacks.CapacityBoost(boost=0.1, dropless=True).debts, dict[str, tuple[int, ...]])
    assert_type(sparse.accounting, policies.TokenLedger | None)
    plan = MoEStrategy(expert_parallel=2, gradient_reduction="allreduce", timeout=timedelta(minutes=1))
    assert_type(plan.groups, parallel.ParallelGroups)
    assert_type(plan.reducer, parallel.GradientReducer | None)
    assert_type(plan.last_grad_norm, Tensor | None)
    Trainer(strategy=plan, callbacks=[sparse, monitor]).fit(model)
    assert_type(sparse.wait_committed(timeout=10.0), bool)
    assert_type(sparse.replaying, bool)
    assert_type(sparse.report.window, int)
    assert_type(sparse.report.stall_seconds, dict[str, float])
    assert_type(sparse.report.device_stall_seconds, dict[str, float])
    assert_type(sparse.report.resumed_from, int | None)
    assert_type(sparse.report.overhead_share, float)
    assert_type(sparse.report.overhead.share, float)
    assert_type(sparse.report.overhead.tiers, dict[str, float])
    assert_type(monitor.latest, dict[str, float])


def seed(items: Dataset[int]) -> None:
    seeded = data.SeededItems(items, seed=3)
    seeded.set_epoch(2)
    assert_type(seeded[0], int)


def train_dense(model: LightningModule) -> None:
    dense = callbacks.DenseCheckpoint("s3://bucket/run", every_n_steps=50, storage_options={"anon": False})
    Trainer(strategy=strategy.MoEStrategy(), callbacks=[dense]).fit(model)
    assert_type(dense.every_n_steps, int)
    chained = callbacks.DifferentialCheckpoint("/ckpt", every_n_steps=64, batch=8, keep=3)
    assert_type(chained.batch, int)
    chains: policies.Chains | None = policies.DifferentialPolicy(every_n_steps=8, batch=2).chains
    assert chains is not None
    assert_type(chains.ends_batch(2), bool)
    mode: policies.DifferentialMode = "bf16"
    assert_type(callbacks.DifferentialCheckpoint("/ckpt", mode=mode).mode, policies.DifferentialMode)
    assert_type(callbacks.DifferentialCheckpoint("/ckpt", mode="compressed", error_feedback=True).error_feedback, bool)
    lossy = callbacks.PartialExpertCheckpoint(
        "/ckpt", every_n_steps=2, k=1, snapshot_k=4, select="load_aware", plt_budget=0.03, keep=3
    )
    Trainer(strategy=strategy.MoEStrategy(), callbacks=[lossy]).fit(model)
    assert_type(lossy.snapshot_k, int | Literal["auto"] | None)
    chosen = callbacks.SelectiveExpertCheckpoint("/ckpt", every_n_steps=2, local_budget=2**20, remote_budget="auto")
    assert_type(chosen.local_budget, int | Literal["auto"])
    assert_type(callbacks.SelectiveExpertCheckpoint("/ckpt", delta="bf16", resync_every=9).resync_every, int)


def wrap(url: str, **shared: Unpack[callbacks.CheckpointArguments]) -> list[Callback]:
    """Arguments that all take can be passed on; one that there is not, or of another type, is an error."""
    callbacks.DenseCheckpoint(url, kepp=3)  # type: ignore[call-arg]
    callbacks.SparseCheckpoint(url, keep="3")  # type: ignore[arg-type]
    return [callbacks.SparseCheckpoint(url, **shared), callbacks.PartialExpertCheckpoint(url, k=2, **shared)]


# -- the layer


def layer(x_TD: Tensor) -> Tensor:
    experts = moe.MoELayer(16, 32, 8, top_k=2, capacity_factor=1.25, activation=torch.tanh, bias=False)
    y_TD: Tensor = experts(x_TD)
    assert_type(experts.forward(x_TD), Tensor)
    assert_type(experts.l_aux, Tensor | None)
    assert_type(experts.capacity(num_tokens=64), int | Tensor | None)
    assert_type(experts.tokens_per_expert, Tensor)
    assert_type(experts.read_and_reset_counts(), Tensor)
    assert_type(list(experts.expert_parameters()), list[tuple[str, nn.Parameter]])
    routing = moe.route(torch.randn(4, 8), 2, normalize=True)
    assert_type(routing, moe.Routing)
    assert_type(routing.topk_idx, Tensor)
    return moe.balance_loss(routing.probs, routing.topk_idx[:, 0]) + y_TD.sum()


# -- metrics


def measure(counts_E: Tensor, report: Mapping[str, int]) -> dict[str, Tensor]:
    assert_type(metrics.load_skew(counts_E), Tensor)
    skew, load = metrics.LoadSkew(num_experts=8), metrics.ExpertLoad(8)
    skew.update(counts_E)
    load.update(counts_E)
    assert_type(skew.compute(), Tensor)
    assert_type(load.compute(), Tensor)
    stall, share = metrics.StallPerStep(), metrics.StallShare()
    stall.update(0.1, steps=2)
    share.update(0.1, seconds=2.0)
    captured, persisted = metrics.CapturedPerStep(), metrics.PersistedPerSecond()
    captured.update(1024, steps=2)
    persisted.update(1024, seconds=0.5)
    generations, position = metrics.Generations(metrics.TIERS), metrics.WindowPosition()
    generations.update(10, report)
    position.update(6, 2)
    assert_type(metrics.portion_of_lost_tokens(counts_E, counts_E), float)
    assert_type(metrics.moementary_lost_tokens(counts_E, counts_E, [8, 8]), float)
    plt, mlt = metrics.PortionOfLostTokens(16), metrics.MoementaryLostTokens([8, 8])
    plt.update(counts_E, counts_E)
    mlt.update(counts_E, counts_E)
    metrics.TokensAtRisk(("memory", "storage")).update({"memory": 1, "storage": 2})
    tokens, taken = metrics.ExpertTokens(16), metrics.ExpertsTaken(("memory", "storage"))
    tokens.update(counts_E, counts_E, counts_E)
    taken.update(report)
    assert_type(taken.compute(), dict[str, Tensor])
    assert_type(generations.compute(), dict[str, Tensor])
    return position.compute()


# -- operators: layouts and optimizers of one's own


class StackedMoE(nn.Module):
    num_experts = 4


class MyAdamW(torch.optim.AdamW):
    pass


def describe(fqn: str, module: nn.Module, index: operators.ParameterIndex) -> operators.MoELayerSpec | None:
    stacked, ids = index.under(f"{fqn}.experts"), (0, 1, 2, 3)
    assert_type(stacked, dict[str, nn.Parameter])
    experts = operators.stacked_slices(stacked, ids, len(ids))
    assert_type(experts, dict[int, tuple[operators.ParamSlice, ...]])
    assert_type(operators.merged_slices(stacked, ids, len(ids)), dict[int, tuple[operators.ParamSlice, ...]])
    assert_type(operators.whole_slice(fqn, next(module.parameters())), operators.ParamSlice)
    taps: list[operators.CountTap] = [
        operators.IndexTap(f"{fqn}.experts"),
        operators.RowsTap({0: f"{fqn}.experts.0"}),
        operators.AttributeTap(fqn, "tokens_per_expert"),
        operators.MaskTap(f"{fqn}.gate", output=0),
    ]
    return operators.MoELayerSpec(
        fqn=fqn,
        num_experts=len(ids),
        local_expert_ids=ids,
        experts=experts,
        router=(f"{fqn}.gate.weight",),
        top_k=2,
        count=taps[0],
        probabilities=operators.ProbabilityTap(f"{fqn}.gate", score="softmax"),
        capacity=operators.CapacityTap(fqn),
        live_capacity=operators.AttributeCapacity(fqn, ("capacity_factor",), "layer"),
        bias=operators.BiasView(layer=fqn, owner=f"{fqn}.gate", attribute="expert_bias"),
        extra=operators.AttributeState(((fqn, "cumulative_load"),)),
        graphs=((fqn, "l_aux"),),
    )


def boost(model: nn.Module, layer: operators.MoELayerSpec) -> None:
    if layer.live_capacity is not None and layer.live_capacity.limited(model):
        view: operators.CapacityView = layer.live_capacity
        before = view.get(model)
        assert_type(before, operators.Capacity)
        view.set(model, view.scaled(before, [1.1, *[1.0] * (layer.num_experts - 1)]))
    if layer.bias is not None:
        assert_type(layer.bias.trained(model), Tensor)
        assert_type(layer.bias.add(model, torch.zeros(layer.num_experts)), Callable[[], None])
    extra: operators.ExtraState | None = layer.extra
    if extra is not None:
        extra.set(model, extra.get(model))
    per_expert: operators.CapacityView = operators.ExpertCapacity(layer.fqn, "capacity_factor", layer.num_experts)
    assert_type(per_expert.scope, Literal["expert", "layer", "model"])


def adapt() -> None:
    factory: operators.AdapterFactory = describe
    operators.register_adapter(StackedMoE, factory)
    operators.unregister_adapter(StackedMoE)
    operators.register_optimizer(MyAdamW, like=torch.optim.AdamW)


def look(model: nn.Module, optimizer: Optimizer) -> None:
    found = operators.discover(model, ep_size=1)
    assert_type(found, operators.OperatorSet)
    assert_type(found.names, tuple[str, ...])
    operator = found[found.names[0]]
    assert_type(operator, operators.Operator)
    assert_type(operators.split(operator, 1024, 12), list[operators.Operator])
    measure: operators.Measure = "tokens"
    counter = operators.LoadCounter(found, model, measure)
    counter.distrust(["blocks.0.moe"])
    counts = operators.CountProbe(found, model)
    counts.install()
    assert_type(counts.check(total=lambda vector: vector), list[operators.CountFailure])
    operators.prove_counts(model, lambda: model(torch.ones(1)).sum().backward(), found)
    counter.install()
    assert_type(found.loads(counter.read_and_reset()), dict[str, int])
    schema = operators.StateSchema.of(optimizer)
    weight = next(model.parameters())
    assert_type(schema.entries(weight), tuple[operators.StateEntry, ...])
    watch: operators.StateWatch = schema.watch([weight])
    assert_type(watch.holds, bool)
    assert_type(schema.get_state(weight, "exp_avg"), Tensor | None)
    groups = operators.groups_state(optimizer)
    assert_type(groups, list[dict[str, object]])
    operators.load_groups_state(optimizer, groups)
    probe = operators.ComputeDtypeProbe(model, torch.bfloat16)
    assert_type(probe.verdict(), dict[str, torch.dtype])
    assert_type(operators.RecordKind("full"), operators.RecordKind)


# -- policies


def plan(found: operators.OperatorSet, counts_E: Tensor) -> policies.Plan:
    by: policies.Order = "popularity"
    assert_type(policies.decayed_popularity(counts_E, counts_E, half_life_steps=10.0), Tensor)
    assert_type(policies.popularity_per_capacity(counts_E, counts_E), Tensor)
    assert_type(policies.should_reorder(counts_E, [1.0, 2.0]), bool)
    popularity: policies.Popularity = callbacks.Popularity()
    assert_type(popularity.reorder_every_n_steps, int)
    items = policies.positions(found, counts_E, sizes={}, by=by)
    assert_type(items, list[policies.PlanItem])
    window = policies.plan_window(items, budget_nbytes=4096, planner="algorithm1", over_budget="dense")
    assert_type(window, policies.Plan)
    assert_type(policies.plan_for_window(items, 4), policies.Plan)
    assert_type(policies.split_nbytes(items, 4096), int)
    named = policies.assign_positions(window, found, counts_E)
    assert_type(named, policies.Plan)
    assert_type(named.full(0), tuple[str, ...])
    (audience,) = named.steps[0].audiences
    assert_type(policies.AUDIENCES, tuple[policies.Audience, ...])
    everything: policies.Experts = policies.Selection.everything([]).memory
    assert_type(policies.Selection(everything, everything).plan(found), policies.Plan)
    assert_type(audience, policies.Audience)
    assert_type(policies.all_names(found), list[str])
    assert_type(policies.expert_names(found.layers[0]), list[str])
    return policies.Plan((policies.WindowStep(named.steps[0].files),), interval_steps=2, partial=True)


def choose(found: operators.OperatorSet, tokens_E: Tensor) -> policies.Selection:
    layouts = policies.expert_layouts(found, dict.fromkeys(found.names, 1024))
    assert_type(layouts, tuple[policies.ExpertLayout, ...])
    accounting = policies.TokenLedger.start(
        [each.num_experts for each in layouts], k=1, levels=[*policies.LEVELS, policies.PEER]
    )
    accounting = accounting.add(tokens_E).take(0, policies.Selection.everything(layouts))
    accounting = accounting.complete(policies.MEMORY, 0).complete(policies.STORAGE, 0)
    accounting, lost_E = accounting.restore(tokens_E, torch.full_like(tokens_E, policies.NEVER))
    book = accounting.saved[policies.STORAGE]
    assert_type(book, policies.TierLedger)
    assert_type(book.pending, tuple[policies.Pending, ...])
    assert_type(accounting.plt, float)
    assert_type(lost_E, Tensor)
    k = policies.next_k(1, last_k=1, plt=0.01, last_loss=0.01, plt_budget=0.05, num_experts=8)
    k = policies.DynamicK(plt_budget=0.05).in_force(k, accounting)
    debts = policies.TokenDeficits.none(8).with_lost([1] * 8)
    assert_type(policies.boost_factors(debts.open, 0.1), list[float])
    assert_type(policies.faded_use([0.5] * 8, [policies.WATCHED_STEPS / 10] * 8), list[float])
    by: policies.ExpertOrder = "load_aware"
    given: policies.Budget = "auto"
    rules: list[policies.ExpertPolicy] = [
        policies.PartialPolicy(k=k, order=by),
        policies.SelectivePolicy(local_budget=given, deltas=policies.Deltas(kind="bf16")),
    ]
    periodic: list[policies.PeriodicPolicy] = [*rules, policies.DensePolicy(every_n_steps=3)]
    every: list[policies.Policy] = [*periodic, policies.SparsePolicy(window=3)]
    assert_type(every[0].needs, frozenset[policies.Measurement])
    assert_type(every[0].plan(policies.PlanInputs(operators=found)), policies.Plan)
    tables: list[policies.ExpertTable] = accounting.with_k(k).tables(layouts)
    assert_type(rules[0].max_age(tables, {}) <= policies.MAX_GENERATIONS, bool)
    return rules[0].select(accounting.generations, tables, {})


def shared_out(piece: operators.ParamSlice) -> list[tuple[operators.ParamSlice, int]]:
    assert_type(policies.writers_of([4 * piece.numel], [0, 1]), Sequence[int | None])
    return policies.cut_among(piece, [0, 1])


def spread(piece: operators.ParamSlice) -> list[policies.WrittenPart[str]]:
    pieces = [policies.RecordPiece(record="a", piece=piece, nbytes_per_element=4)]
    return policies.assign_writers(pieces, [0, 1]) + policies.assign_adaptively(pieces, [0, 1], {0: 1024})


# -- parallel


def reduce(model: nn.Module, flat: Tensor) -> Tensor:
    parallel.init_fresh_process_group("gloo", rank=0, world_size=1, timeout=timedelta(seconds=30))
    assert_type(parallel.shares_agent_store(), bool)
    assert_type(parallel.restart_is_likely(ValueError()), bool)
    parallel.check_ep_size(1, world_size=1)
    groups = parallel.build_groups(1)
    name: parallel.GroupName = "world"
    group = groups.group(name)
    assert group is not None
    parallel.set_current_groups(groups)
    assert_type(parallel.current_groups(), parallel.ParallelGroups)
    parallel.broadcast_tensors([flat], group, src=0)
    sharded = parallel.expert_parallel_fqns(model)
    assert_type(sharded, set[str])
    assert_type(list(parallel.expert_parallel_modules(model)), list[tuple[str, parallel.ExpertParallelModule]])
    mode: parallel.ReductionMode = "ordered"
    reducer = parallel.GradientReducer(
        model.named_parameters(), groups=groups, is_expert_parallel=sharded, mode=mode, flags=["stop"]
    )
    reducer.prepare(sync=True)
    reducer.finish()
    gradients = ((name, p.grad) for name, p in model.named_parameters())
    norm = parallel.global_grad_norm(gradients, expert_parallel=sharded, groups=groups)
    with parallel.closed_doors(open_ports={29500}), parallel.GroupAbort(2) as abort:
        assert_type(abort.abort(), None)
    return norm + parallel.ordered_all_reduce(flat, group, divisor=2) + parallel.plain_all_reduce(flat, group)


def hook(wrapped: DistributedDataParallel) -> None:
    wrapped.register_comm_hook(parallel.OrderedHookState(), parallel.ordered_hook)


# -- storage


def store(url: str) -> list[storage.GenerationId]:
    backend = storage.open_backend(storage.checked_url(url), storage_options={"key": "value"})
    assert_type(backend, storage.Backend)
    assert_type(storage.create_once(backend, "key", b"value"), bool)
    assert_type(backend.list("snap/"), list[storage.Entry])
    own: list[storage.Backend] = [storage.PosixBackend("a"), storage.FsspecBackend("memory://b")]
    own.append(storage.ObjectBackend("s3://bucket/run", timeout=timedelta(seconds=30)))
    safe = storage.Retrying(own[0], patience=timedelta(seconds=2))
    resume: storage.Resume = "auto"
    run = storage.RunStore.open(safe, resume=resume)
    commits = run.candidates()
    assert_type(commits, list[storage.Commit])
    assert_type(commits[0].lineage, storage.Lineage | None)
    marker = run.read_marker(commits[0], rank=0)
    assert_type(marker, storage.RankMarker)
    assert_type(marker.segments[0], storage.SegmentEntry)
    assert_type(marker.segments[0].records[0], storage.RecordEntry)
    assert_type(storage.RecordColumns.of(marker.segments[0].records).offset, Sequence[int])
    data = memoryview(bytearray(marker.segments[0].nbytes))
    run.read_range(marker.segments[0], 0, data)
    assert_type(storage.digest_of(data), str)
    assert_type(storage.segment_key(storage.GenerationId(step=1, incarnation=1), rank=0, step=1), str)
    assert_type(storage.DIGEST_NAME, str)
    assert_type(storage.CONSTANTS, str)
    assert_type(storage.read_constants(backend, {}), tuple[storage.SegmentEntry, ...])
    assert_type(storage.lacking_memory(storage.MAX_MARKER_NBYTES + storage.MAX_HEADER_NBYTES), str | None)
    assert_type(storage.RecordRows(marker.segments[0].records).digested(data).line, bytes)
    bad: storage.BadCopies = {"moe/expert.3": [storage.GenerationId(step=1, incarnation=1)]}
    assert_type(storage.carry_forward(marker, ["moe/expert.3"], bad), tuple[storage.ReferencedEntry, ...])
    assert_type(storage.Pace(bandwidth=2**20).chunk_nbytes(2**24), int)
    assert_type(storage.carry_spares(marker, ["moe/expert.3"], ["moe/expert.4"]), tuple[storage.ReferencedEntry, ...])
    for file, record in storage.full_records(marker):
        assert_type((file.nbytes, record), tuple[int, storage.RecordEntry])
    return run.retain(storage.Retention(last=2, every_n_steps=1000, days=1.5))


def look_at_memory(ring: bytes, beside: bytes) -> dict[int, int]:
    header = storage.RingHeader.from_bytes(ring[: storage.RING_HEADER_NBYTES], "ring")
    whole = storage.MemoryMarker.from_bytes(beside, "beside")
    assert_type(whole.marker, storage.RankMarker)
    assert_type(header.small, tuple[storage.SlotClass, ...])
    assert_type(whole.experts, tuple[storage.ExpertSlot, ...])
    return {step: header.extent(slot)[0] for step, slot in whole.slots.items()}


def collect(backend: storage.Backend) -> storage.JudgedGeneration:
    found = storage.collect_garbage(backend, storage.Retention(days=2), dry_run=True)
    assert_type(found, storage.Garbage)
    assert_type(storage.repair_log(backend, dry_run=True), storage.RepairedLog)
    return found.goes[0]


def describe_module(marker: storage.RankMarker) -> storage.HuggingFaceEntry | None:
    line = marker.module
    assert_type(line, storage.ModuleLine | None)
    if line is None:
        return None
    entry = line.read()
    assert_type(entry, storage.ModuleEntry)
    return entry.hugging_face[0]


def look_at_segments(url: str, segment: storage.SegmentEntry) -> Iterator[memoryview]:
    ranged = storage.open_backend(url)
    assert_type(ranged, storage.Backend)
    view = storage.RunView.open(ranged)
    assert_type(view.generations(), list[storage.StoredGeneration])
    storage.scrub_segment(ranged, segment)
    storage.check_header(ranged, segment)
    for record in segment.records:
        storage.scrub_record(ranged, segment.key, record)
    assert_type(storage.check_places(segment, memoryview(ranged.get(segment.key))), storage.SegmentLayout)
    return storage.read_chunks(ranged, segment.key, segment.nbytes)


def lay_out(buffer: Tensor) -> Tensor:
    dtype = storage.dtype_of(storage.dtype_code(torch.bfloat16))
    spec = storage.TensorSpec("a", dtype, (2, 3))
    assert_type(spec.kind, storage.TensorKind)
    layout = storage.SegmentLayout([spec], metadata={"by": "me"})
    spelled: storage.SpelledRows = ([], layout.places)
    assert_type(storage.RecordRows(lambda: spelled), storage.RecordRows)
    assert_type(layout.spans["a"], storage.Span)
    layout.write_header(buffer)
    return layout.view(buffer, "a")


# -- inspection


def examine(url: str, out: Path) -> inspection.Export:
    ranged = storage.open_backend(url)
    verdict = inspection.verify(ranged, everything=True)
    assert_type(verdict, inspection.Verdict)
    assert_type(verdict.problems, list[inspection.FileProblem])
    assert_type(verdict.sound, bool)
    assert_type(inspection.select(storage.RunView.open(ranged), step=None), storage.StoredGeneration)
    wanted: inspection.ExportFormat = "safetensors"
    return inspection.export(ranged, out, inspection.ExportOptions(format=wanted, force=True), step=100)


def screen() -> None:
    inspection.Screen().print("found")


# -- native


def copy(source: Tensor, target: Tensor) -> float:
    pair: native.Copy = (source, target)
    engine = native.create_engine(source.device)
    assert_type(engine, native.CopyEngine)
    engines: list[native.CopyEngine] = [native.CpuCopyEngine(), native.CudaCopyEngine(torch.device("cuda"))]
    native.copy_through(engines[0], [pair])
    prepared = engine.prepare([pair])
    assert_type(prepared, native.CopyList)
    ticket = engine.submit(prepared)
    assert_type(ticket, native.Ticket)
    ticket.wait(timedelta(seconds=1))
    bubbles = native.Bubbles(engine, source.device)
    bubbles.enter(native.PipelinePhase.OUTSIDE)
    figures: native.BubbleFigures | None = bubbles.figures()
    assert figures is None
    first: native.Column = np.zeros(1, np.int64)
    table = native.CopyTable(
        sources=[source], source=first, start=first, numel=first + 1, dtypes=[source.dtype], dtype=first, offset=first
    )
    arranged = engine.prepare_table(table, target.view(torch.uint8))
    assert_type(arranged, native.PreparedTable)
    engine.submit_table(arranged, target.view(torch.uint8)).wait()
    native.Preparation(target.view(torch.uint8), threads=2).wait()
    return engine.fence(ticket) + native.measure_bandwidth(2**20)


def compiled() -> native.CopyEngine:
    for status in native.explain():
        assert_type(status, native.PartStatus)
        assert_type(status.active, bool)
        assert_type(status.library, native.Library | None)
    library = native.explain()[0].library
    if library is None:
        raise native.NativeError
    assert_type(native.examine(), list[native.Finding])
    if torch.cuda.is_available():
        return native.CompiledCudaEngine(library, torch.device("cuda"))
    return native.CompiledCpuEngine(library, threads=2)


def replay(state: native.AdamState, gradient: Tensor) -> Tensor:
    how = native.GradientCompression(keep_ratio=0.02)
    compressed: list[native.CompressedGradient] = native.compress_gradients([gradient], how)
    first = compressed[0]
    if isinstance(first, native.SparseGradient):
        assert_type(first.trimmed(), native.SparseGradient)
    else:
        assert_type(first, native.QuantizedGradient)
    native.replay_adam(state, [native.AdamStep(gradient=first, step=1, lr=1e-3)])
    if gradient.numel() < native.MAX_PART_NUMEL:
        assert_type(native.packed_nbytes(gradient.numel(), how), int)
        assert_type(native.unpack_gradient(native.pack_gradient(first), gradient.numel()), native.CompressedGradient)
    native.append(file=1, chunk=memoryview(b"record"), position=0)
    assert_type(native.Ranges([(0, 4)]).digest(memoryview(b"record"), b","), tuple[bytes | memoryview, str])
    return native.decompress_gradient(first)


# -- testing: contracts and kills for tests of one's own


def watch(around: Callable[[storage.Backend], storage.Backend]) -> storage.Backend:
    with storage.wrapping_backends(around):
        return storage.open_backend("memory://watched")


class TestMyLayer(testing.AdapterContract):
    @override
    def make_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    @override
    def loss(self, model: nn.Module, seed: int) -> Tensor:
        loss: Tensor = model(torch.ones(2)).sum()
        return loss


class TestMyBackend(testing.BackendContract):
    @override
    def make_backend(self, tmp_path: Path) -> storage.Backend:
        return testing.CrashingBackend(storage.PosixBackend(tmp_path), crash_at=3, when="after")


class TestMyTier(testing.TierContract):
    halves: testing.TierHalves

    @override
    def make_tier(self, tmp_path: Path) -> AbstractContextManager[testing.TierHalves]:
        return nullcontext(self.halves)


def fit(life: testing.Attempt) -> dict[str, object]:
    own: list[Callback] = life.callbacks(callbacks.DenseCheckpoint(life.url))
    trainer = Trainer(callbacks=own, devices=life.world_size)
    model = LightningModule()
    trainer.fit(model)
    assert_type(testing.capture_end(trainer, model), dict[str, Any])
    return {}


def kill_and_resume(tmp_path: Path) -> Literal["finished", "killed", "stopped"]:
    kills = [testing.Kill(phase="forward", step=3)]
    seams = [testing.Seam(module="os", attribute="fsync", replacement=lambda _: None)]
    try:
        reference = testing.run_lives(fit, url="memory://clean", workdir=tmp_path)
        killed = testing.run_lives(fit, url=str(tmp_path / "url"), workdir=tmp_path, kills=kills, seams=seams)
    except (testing.AttemptFailed, testing.Crashed) as error:
        raise RuntimeError from error
    assert_type(killed, list[testing.AttemptResult])
    testing.assert_same_end(reference, killed)
    assert_type(testing.differences(reference[-1].end(), killed[-1].end()), list[str])
    return killed[-1].outcome


def break_the_network() -> str:
    """A store behind a proxy that fails."""
    with testing.FaultyProxy(9000, seed=1) as proxy:
        proxy.weather = testing.Weather(latency=timedelta(seconds=1), failing=0.3)
        assert_type(proxy.num_failed, int)
        return proxy.endpoint


def break_on_purpose(tmp_path: Path) -> testing.FaultSummary:
    script: list[testing.Fault] = [
        testing.fail_at(0, 7, "before_optimizer_step"),
        testing.Fault(kind="node_loss", rank=3),
    ]
    at_random = testing.RandomFaults(mtbf=30.0, seed=1, kinds=[testing.fail_at("all", 0, kind="full_disk", steps=3)])
    Trainer(callbacks=[testing.FaultInjector(script, random=at_random, folder=tmp_path)])
    summary = testing.summarize_faults(tmp_path)
    assert_type(summary.kinds, tuple[testing.FaultTally, ...])
    assert_type(summary.ettr, float)
    return summary


# -- errors


def remedies() -> Sequence[type[errors.CheckpointError]]:
    """Each can also be caught as the built-in that it is."""
    values: list[type[ValueError]] = [errors.ConfigurationError, errors.Corrupt]
    configuration: list[type[errors.ConfigurationError]] = [
        errors.UnknownLayout,
        errors.UnsupportedOptimizer,
        errors.WrongCounts,
        errors.IdentityMismatch,
    ]
    system: list[type[OSError]] = [errors.StorageError, errors.StorageRefused, errors.KeyExists, errors.KeyMissing]
    runtime: list[type[RuntimeError]] = [errors.Fenced, errors.NoUsableGeneration]
    others = [errors.CodecError, errors.OtherData, errors.RingFull]
    make: Callable[[str], errors.CheckpointError] = errors.Corrupt
    return [type(make("")), *others, errors.CheckpointError] if values and configuration and system and runtime else []
