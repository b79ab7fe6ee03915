"""Which pipeline stages recover alone, by where all ranks are, and which runs let them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryPrecision, BinaryRecall, MulticlassConfusionMatrix
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_moe_ckpt.callbacks import CapacityBoost, ExpertLoadMonitor
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.fit._state import copied
from lightning_moe_ckpt.fit.in_place._decision import LOST, TOO_OFTEN, Decision, Where
from lightning_moe_ckpt.fit.in_place._stage_alone import StageAlone
from lightning_moe_ckpt.fit.in_place._undo import Watch, _hold_users, _unzeroed, never_alone
from lightning_moe_ckpt.fit.loggers._metrics import hold_metrics
from lightning_moe_ckpt.fit.objects._memento import Memento
from lightning_moe_ckpt.journal import differs
from lightning_moe_ckpt.operators._count_taps import TokenCounts
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.parallel._upstream import Mode, UpstreamLog

NEW, WITHIN, AT_COMMIT, ELSEWHERE = range(4)


Place = tuple[int, ...]
"""Where a rank is, the steps that it knows to be taken, and, if it repeats some, up to which one, and among which stages."""


def decided(*places: Place, stages: int = 4, may: int = 1, generation: int = 1) -> Decision | str:
    """What follows, by where each rank is."""
    rows = [Where(may, place, taken, generation, *more) for place, taken, *more in places]
    return Decision.of(rows, ParallelGroups.placed(0, len(rows), ep_size=1, num_stages=stages))


def test_all_go_back_once_when_one_rank_says_that_stages_do_not_come_to_a_step() -> None:
    """Whichever rank has counted the tries; without that word the stage recovers alone."""
    rows = [Where(1, WITHIN, 7, 1), Where(1, NEW, -1, 1), Where(1, WITHIN, 7, 1), Where(1, WITHIN, 7, 1)]
    groups = ParallelGroups.placed(0, 4, ep_size=1, num_stages=4)
    for rank in range(4):
        often = [row._replace(possible=TOO_OFTEN) if at == rank else row for at, row in enumerate(rows)]
        assert Decision.of(often, groups) == "stages failed again and again on the way to one step"
    alone = Decision.of(rows, groups)
    assert isinstance(alone, Decision)
    assert alone.failed == (1,)


def test_all_go_back_once_when_a_rank_cannot_undo_its_attempt() -> None:
    """Since it changed a large tensor that none had changed before."""
    rows = [Where(1, NEW, -1, 1), Where(LOST, WITHIN, 7, 1)]
    groups = ParallelGroups.placed(0, 2, ep_size=1, num_stages=2)
    assert Decision.of(rows, groups) == "a step had changed what a rank has no copy of"


@pytest.mark.parametrize(
    ("places", "failed", "step"),
    [
        ([(WITHIN, 7), (WITHIN, 7), (NEW, -1), (WITHIN, 7)], (2,), 7),
        ([(NEW, 7), (WITHIN, 7), (NEW, -1), (WITHIN, 7)], (0, 2), 7),
        ([(WITHIN, 7), (NEW, -1), (NEW, -1), (WITHIN, 7)], (1, 2), 7),
        ([(AT_COMMIT, 6), (WITHIN, 7), (AT_COMMIT, 6), (NEW, -1)], (3,), 7),
        ([(AT_COMMIT, 6), (AT_COMMIT, 6), (WITHIN, 6), (NEW, -1)], (3,), 6),
    ],
    ids=["one", "two apart", "neighbours", "taken by all", "done again"],
)
def test_stages_recover_alone(places: list[tuple[int, int]], failed: tuple[int, ...], step: int) -> None:
    """Up to the step that all who stay have come to, which is taken if one of them knows that all had agreed."""
    assert decided(*places) == Decision(failed, step)


A, B, LAST = (7, 0, 1), (7, 0, 2), (7, 3, 4)
"""Up to step 7, in a segment of four stages."""


@pytest.mark.parametrize(
    ("places", "failed", "going"),
    [
        ([(WITHIN, 4, *A), (WITHIN, 7), (WITHIN, 7), (NEW, -1)], (3,), {0: 4}),
        ([(AT_COMMIT, 4, *A), (WITHIN, 7), (AT_COMMIT, 6), (NEW, -1)], (3,), {0: 4}),
        ([(WITHIN, 5, *B), (AT_COMMIT, 4, *B), (WITHIN, 7), (NEW, -1)], (3,), {0: 5, 1: 5}),
        ([(WITHIN, 7), (AT_COMMIT, 6, *B), (WITHIN, 7), (NEW, -1)], (3,), {0: 7, 1: 7}),
        ([(WITHIN, 4, *A), (WITHIN, 7), (NEW, -1), (WITHIN, 7)], (2,), {0: 4}),
        ([(WITHIN, 4, *A), (NEW, -1), (WITHIN, 7), (WITHIN, 7)], (0, 1), {}),
        ([(NEW, -1), (WITHIN, 7), (WITHIN, 7), (WITHIN, 5, *LAST)], (0,), {3: 5}),
        ([(WITHIN, 5, *B), (NEW, -1), (WITHIN, 7), (WITHIN, 7)], (0, 1), {}),
        ([(WITHIN, 5, *B), (WITHIN, 4, *B), (WITHIN, 7), (NEW, -1)], (0, 1, 3), {}),
        ([(WITHIN, 5, 8, 0, 1), (WITHIN, 7), (WITHIN, 7), (NEW, -1)], (0, 3), {}),
    ],
    ids=[
        *("apart", "at a commit", "a segment", "one of it is back", "with one between", "next to it", "before it"),
        *("its own", "not in one step", "to another step"),
    ],
)
def test_a_stage_goes_on_beside_another_that_fails(
    places: list[Place], failed: tuple[int, ...], going: dict[int, int]
) -> None:
    """From the step that all its ranks are in; it begins again where one of them has failed, or a stage next to it."""
    assert decided(*places) == Decision(failed, 7, going)


@pytest.mark.parametrize(
    ("place", "mode", "rank", "outlasts"),
    [
        (ELSEWHERE, Mode.REPEATING, 6, True),
        (ELSEWHERE, Mode.REPEATING, 4, False),
        (ELSEWHERE, Mode.REPEATING, 3, False),
        (WITHIN, Mode.REPEATING, 6, False),
        (AT_COMMIT, Mode.REPEATING, 6, False),
        (ELSEWHERE, Mode.SILENT, 6, False),
        (ELSEWHERE, Mode.TOGETHER, 6, False),
    ],
    ids=["between", "next to it", "its own", "within", "at a commit", "not yet", "no more"],
)
def test_collectives_between_two_repeated_steps_outlast_a_failure_elsewhere(
    place: int, mode: Mode, rank: int, outlasts: bool
) -> None:
    """Of four stages of two ranks the second repeats steps; a step is left as a whole, and so is what comes before it."""
    log = UpstreamLog()
    log.mode = mode
    strategy = SimpleNamespace(groups=ParallelGroups.placed(2, 8, ep_size=1, num_stages=4))
    alone: Any = SimpleNamespace(_here=Where(1, place, 5, 1, 7, 1, 2), _log=log, _strategy=strategy)
    assert StageAlone.outlasts(alone, rank) is outlasts


def test_what_goes_on_may_come_to_be_all_that_is_left() -> None:
    """Then a stage between them has failed, which is next to both."""
    assert decided((WITHIN, 4, 7, 0, 1), (NEW, -1), (WITHIN, 5, 7, 2, 3), stages=3) == "all stages failed together"


def test_what_only_a_stage_knows_that_goes_back_is_not_so() -> None:
    """Two ranks a stage: one has died behind a commit of which its replica has heard, and nobody else."""
    places = [(AT_COMMIT, 6), (AT_COMMIT, 6), (WITHIN, 7), (NEW, -1)]
    assert decided(*places, stages=2) == Decision((1,), 6)


@pytest.mark.parametrize(
    ("places", "options", "why"),
    [
        ([(NEW, -1), (NEW, 7), (NEW, -1), (NEW, 7)], {}, "all stages failed together"),
        ([(WITHIN, 7), (NEW, -1)], {"stages": 1}, "all stages failed together"),
        ([(WITHIN, 7)] * 4, {}, "no rank is new"),
        ([(WITHIN, 7), (NEW, -1), (ELSEWHERE, 7), (WITHIN, 7)], {}, "other stages were not inside a step"),
        ([(WITHIN, 7), (NEW, -1), (WITHIN, 6), (WITHIN, 7)], {}, "stages were not in the same step"),
        ([(WITHIN, 7), (NEW, -1), (WITHIN, 7), (WITHIN, 7)], {"generation": 0}, "there is no generation yet"),
        ([(WITHIN, 7), (NEW, -1), (WITHIN, 7), (WITHIN, 7)], {"may": 0}, "this run does not let a stage recover alone"),
    ],
)
def test_everybody_recovers(places: list[tuple[int, int]], options: dict[str, int], why: str) -> None:
    """Where one stage alone could not be exact."""
    assert decided(*places, **options) == why


def test_failed_stages_next_to_each_other_are_one_segment() -> None:
    """Each knows its own, up to stages that stayed."""
    decision = Decision((0, 2), 7, {4: 6})
    assert [decision.segment(each) for each in decision.repeating] == [range(1), range(2, 3), range(4, 5)]
    assert Decision((2, 3), 7).segment(3) == range(2, 4)
    assert [decision.taken(each) for each in (1, 4)] == [7, 6]


class Clipping(LightningModule):
    """Clips by itself."""

    @override
    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        """Nothing is clipped."""


class Keeping(LightningModule):
    """Keeps gradients."""

    @override
    def optimizer_zero_grad(self, *args: Any) -> None:
        """Nothing is set to zero."""


class Measuring(LightningModule):
    """Has an ordinary metric, and one that gathers as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.own = MeanMetric(), MeanMetric(dist_sync_fn=gather_all_tensors)


class Looking(Callback):
    """Looks at gradients."""

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """There is nothing to see."""


class Lazy(SGD):
    """Sets nothing to zero."""

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is set to zero."""


class Indebted(CapacityBoost):
    """Has tokens to make up for."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict({"layer": {"debts": 3}})


TWICE = "would be called twice in one step, which `localized_recovery=True` allows"


def reasons(
    module: LightningModule, *callbacks: Callback, optimizer: type[Optimizer] = SGD, asks: bool | None = None
) -> str:
    weight, strategy = Tensor([1.0]).requires_grad_(), SimpleNamespace(localized_recovery=asks)
    optimizers = [optimizer([weight], lr=0.1)]  # type: ignore[call-arg]
    trainer: Any = SimpleNamespace(callbacks=list(callbacks), optimizers=optimizers, strategy=strategy)
    return "; ".join(never_alone(trainer, module, (ModelCheckpoint,)))


@pytest.mark.parametrize(
    ("module", "callbacks", "optimizer", "why"),
    [
        (Clipping, [], SGD, f"`Clipping.configure_gradient_clipping` {TWICE}"),
        (Keeping, [], SGD, "gradients that `Keeping.optimizer_zero_grad` leaves would be added up twice"),
        (Measuring, [], SGD, "the metric `own` chooses by itself which ranks it asks"),
        (LightningModule, [Looking], SGD, f"`Looking.on_after_backward` {TWICE}"),
        (LightningModule, [Indebted], SGD, "`Indebted` asks all ranks by itself"),
        (LightningModule, [], Lazy, "gradients that `Lazy.zero_grad` leaves would be added up twice"),
    ],
)
def test_a_run_that_would_not_be_exact_says_why(
    module: type[LightningModule], callbacks: list[type[Callback]], optimizer: type[Optimizer], why: str
) -> None:
    assert reasons(module(), *(callback() for callback in callbacks), optimizer=optimizer) == why


def test_an_ordinary_run_may() -> None:
    """With what Lightning has, and this package; with hooks inside a step where the user asks for it."""
    own = ExpertLoadMonitor(), CapacityBoost()
    assert reasons(LightningModule(), ModelCheckpoint(), EarlyStopping("loss"), LearningRateMonitor(), *own) == ""
    assert reasons(Clipping(), Looking(), asks=True) == ""
    assert "Keeping.optimizer_zero_grad" in reasons(Keeping(), asks=True)


def test_an_attempt_leaves_nothing_in_callbacks_whose_hooks_it_calls() -> None:
    """In others nothing is looked into."""
    looking, other = Looking(), LearningRateMonitor()
    looking.seen, other.seen = [1], [1]  # type: ignore[attr-defined]
    trainer: Any = SimpleNamespace(callbacks=[looking, other])
    held = _hold_users(trainer, LightningModule())
    for each in (looking, other):
        each.seen.append(2)  # type: ignore[union-attr]
        each.new = 3  # type: ignore[union-attr]
    held.restore()
    assert vars(looking) == {"seen": [1]}
    assert other.seen == [1, 2]  # type: ignore[attr-defined]


def test_gradients_that_no_optimizer_zeroes_are_known() -> None:
    """Those of parameters that no optimizer has, as they are; see `test_stages_alone` for pieces of parameters."""
    owned, kept, fresh = (nn.Parameter(torch.ones(2)) for _ in range(3))
    kept.grad = owned.grad = torch.ones(2)
    trainer: Any = SimpleNamespace(optimizers=[SGD([owned], lr=0.1)])
    found = [*_unzeroed(trainer, [owned, kept, fresh])]
    kept.grad += 1
    assert [weight for weight, _ in found] == [kept, fresh]
    assert found[0][1] is not None
    assert found[0][1].tolist() == [1, 1]
    assert found[1][1] is None


def test_counts_of_an_attempt_are_undone_again_and_again() -> None:
    """The figures of `ExpertLoadMonitor` count each step once."""
    counts = TokenCounts(2)
    counts.add_indices(torch.tensor([0, 1]))
    undo = counts.hold()
    for _ in range(2):
        counts.add_indices(torch.tensor([1, 1]))
        undo()
    assert counts.take().tolist() == [1, 1]


def test_a_buffer_that_an_attempt_replaces_is_put_back() -> None:
    """The object, with its shape and values; and the one that stands for none."""
    module = LightningModule()
    module.register_buffer("changed", torch.tensor([1.0]))
    module.register_buffer("replaced", torch.tensor([1.0]))
    module.register_buffer("absent", None)
    before = dict(module.named_buffers())
    held = holding(Watch(module), module)
    before["changed"] += 1
    module.replaced, module.absent = torch.zeros(3), torch.zeros(3)
    held.restore()
    assert module.state_dict().keys() == {"changed", "replaced"}
    assert all(buffer is before[name] and buffer.tolist() == [1.0] for name, buffer in module.named_buffers())


LARGE = 2**14 + 1
"""Items of a tensor of float32 too large for a copy in each step."""


def holding(watch: Watch, module: LightningModule, *others: object) -> Memento:
    """The memento with which an attempt begins, not left to `DataAccess` of other tests."""
    watch.accesses.close()
    return watch.hold(module, others)


def copied_of(held: Memento) -> dict[int, bool]:
    """By the identity of each tensor, whether there is a copy."""
    return {id(tensor): isinstance(kept, Tensor) for tensor, kept in held.tensors}


def lost_of(held: Memento) -> list[Tensor]:
    """Tensors that cannot be put back."""
    return [tensor for tensor, kept in held.tensors if isinstance(kept, int) and tensor._version != kept]


def test_a_large_buffer_is_copied_in_its_first_attempts_and_where_attempts_change_it() -> None:
    """One changed in place or past its count of changes, from the first on; one that is left alone, three times."""
    module: Any = LightningModule()
    for name in ("calm", "changed", "past"):
        module.register_buffer(name, torch.ones(LARGE))
    module.register_buffer("small", torch.ones(2))
    watch = Watch(module)
    for attempt in range(6):
        held = holding(watch, module)
        copies = copied_of(held)
        found = {name: copies[id(buffer)] for name, buffer in module.named_buffers()}
        assert found == {"calm": attempt < 3, "changed": True, "past": True, "small": True}
        module.changed.add_(1)
        module.past.data.add_(1)
        watch.learn(held)
        held.restore()
        assert all(buffer.eq(1).all() for buffer in module.buffers())


def test_a_buffer_changed_late_cannot_be_put_back_once() -> None:
    """All ranks go back from that attempt; from the next one on there is a copy."""
    module: Any = LightningModule()
    module.register_buffer("late", torch.ones(LARGE))
    watch = Watch(module)
    for _ in range(3):
        watch.learn(holding(watch, module))
    held = holding(watch, module)
    assert lost_of(held) == []
    module.late[3:5] += 1  # through a view
    assert lost_of(held) == [module.late]
    with pytest.raises(CheckpointError, match=r"a tensor of shape \(16385,\)"):
        held.restore()
    watch.learn(held)
    held, before = holding(watch, module), module.late.clone()
    module.late.zero_()
    held.restore()
    assert torch.equal(module.late, before)


def test_a_buffer_that_each_attempt_replaces_is_copied() -> None:
    module: Any = LightningModule()
    watch = Watch(module)
    for _ in range(5):
        module.register_buffer("other", torch.ones(LARGE))
        held = holding(watch, module)
        assert copied_of(held)[id(module.other)]
        watch.learn(held)


@pytest.mark.parametrize("changes", [False, True])
def test_a_large_batch_is_copied_where_attempts_change_batches(changes: bool) -> None:
    """Arrays, which count no changes, and small tensors always are; lists keep their items."""
    module: Any = LightningModule()
    watch = Watch(module)
    for attempt in range(6):
        image, target, array = torch.ones(LARGE), torch.ones(2), np.ones(LARGE)
        batch = [image, target, array]
        held = holding(watch, module, batch)
        assert copied_of(held) == {id(image): attempt < 3 or changes, id(target): True}
        if changes:
            image.mul_(2)
        target.mul_(2)
        array *= 2
        watch.learn(held)
        batch.clear()
        held.restore()
        assert [id(each) for each in batch] == [id(image), id(target), id(array)]
        assert all((each == 1).all() for each in (image, target, array))


def test_a_batch_changed_late_cannot_be_put_back_once() -> None:
    """The batches behind it are copied."""
    module: Any = LightningModule()
    watch = Watch(module)
    for _ in range(3):
        watch.learn(holding(watch, module, [torch.ones(LARGE)]))
    image = torch.ones(LARGE)
    held = holding(watch, module, [image])
    image[1:].neg_()
    assert lost_of(held) == [image]
    watch.learn(held)
    assert [*copied_of(holding(watch, module, [image])).values()] == [True]


def test_a_sparse_tensor_is_watched_by_its_count_of_changes() -> None:
    """It has neither a size in bytes nor a comparison."""
    module: Any = LightningModule()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    watch = Watch(module)
    for _ in range(4):
        held = holding(watch, module)
        watch.learn(held)
    assert copied_of(held) == {id(module.sparse): False}
    module.sparse.mul_(2)
    assert lost_of(held) == [module.sparse]


class Collecting(LightningModule):
    """Has metrics with states of every size."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.many = MulticlassConfusionMatrix(400), CatMetric()
        self.several = MetricCollection([BinaryPrecision(), BinaryRecall()])

    def update(self) -> None:
        self.large.update(torch.tensor([0, 1]), torch.tensor([1, 1]))
        self.many(torch.rand(2))
        self.several.update(torch.rand(8), torch.tensor([0, 1] * 4))

    @property
    def now(self) -> list[object]:
        metrics = [module for module in self.modules() if isinstance(module, Metric)]
        return [
            [metric.update_count, copied(metric.metric_state), metric._computed, metric._forward_cache]
            for metric in metrics
        ]


def test_an_attempt_leaves_nothing_in_metrics() -> None:
    """Not in states larger than what is copied of other attributes, nor in lists of more items than are looked into elsewhere."""
    module = Collecting()
    for _ in range(1001):
        module.many.update(torch.rand(()))
    module.update()
    module.several.compute()
    trainer: Any = SimpleNamespace(callbacks=[])
    before, held, users = module.now, hold_metrics(module), _hold_users(trainer, module)
    assert not users.incomplete
    for undone in (module.update, module.several.reset, module.many.reset):
        undone()
        assert differs(before, module.now)
        held()
        users.restore()
        assert not differs(before, module.now)
    first, second = module.several.values(copy_state=False)
    assert first.tp is second.tp, "metrics that share states do so no more"
