"""Audit steps: compare the state that ranks should hold alike, and have a step done twice, on another rank where there is one.

Ranks that train data-parallel copies of one model have the same weights, so any of them can do another one's work. In an
audited step, before its own, each rank plays the role of the rank at some distance (another node's, where there is one).
Expert-parallel ranks and stages do so together. Digests of the gradients of both are compared before the optimizer steps. Where
they differ, owner, player and a third rank do the step again, operation by operation, and `judge` names the rank at fault, unless
code has called for other work. All of that is undone.

A run's first step is not played. The second is played by all, by its owner too: where the owner's own repetition differs, kernels are
not deterministic; where other ranks differ, a step depends on its rank. Neither is a fault, and distances and operators that never were
equal are not compared later. Nor are steps compared any more once one of them could not be played, on whichever rank.

Invariant: training with audits has the bits of training without.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch._dynamo.utils import counters
from torch.compiler import set_stance

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.fit._run import FitSession
from lightning_moe_ckpt.fit._sessions import Standing
from lightning_moe_ckpt.fit.in_place._plays import Operations, Play, Role, gradients_aside, pass_on, play_step
from lightning_moe_ckpt.fit.in_place._undo import PlayUndo, StepUndo, Watch
from lightning_moe_ckpt.fit.loggers._metrics import gather_in_stage, module_metrics
from lightning_moe_ckpt.fit.loggers._once import silenced
from lightning_moe_ckpt.fit.loops._trainer import compiled_modules, takes_iterator
from lightning_moe_ckpt.operators import LoadCounter, is_sharded
from lightning_moe_ckpt.parallel._groups import is_of_collective
from lightning_moe_ckpt.process import AuditFigures, Finding, HookClock, OnFault, Trace, clocked, distance, judge
from lightning_moe_ckpt.session import CheckpointSession

log = rank_logger(__name__)

_NAMED = 4
_REPEATS = 4
"""Repetitions on a device, where kernels may differ rarely."""
_Turn = Literal["watched", "first", "ordinary"]
"""Purpose of the next step: to make what only a first step makes; to be audited in more ways than later ones; to be audited if due."""


class Audits:
    """Audits of one fit's steps, at every step that `every` divides."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, run: FitSession, *, every: int, on_fault: OnFault
    ) -> None:
        self._trainer, self._module, self._run, self._every, self._on_fault = trainer, module, run, every, on_fault
        self.clock: HookClock = run.clock
        """Clock of hooks, audits included."""
        self.figures = AuditFigures()
        """Audits so far."""
        self._session: CheckpointSession | None = None
        self._turn: _Turn = "watched"
        self._step = -1
        self._trusted: set[int] = set()
        """Distances at whose plays all ranks have agreed before."""
        self._known: set[str] = set()
        """Operators whose state is known to differ."""
        self._attempt: StepUndo | None = None
        """State before the step that is audited."""
        self._usual: set[str] = set()
        """Operations between ranks that were in steps which all ranks did alike."""
        self._compiled = _compiled()
        self._role: Role | None = None
        self._sent: dict[int, bytes | None] = {}
        """Other ranks' roles, by distance."""
        self._plays: dict[int, Play] = {}
        """Plays before the step under way, by distance."""
        self._own: Play | None = None
        """The step under way, as it counts."""
        self._pace: tuple[float, float] | None = None
        """Time, and seconds in audits, at the step behind the first audit."""

    # -- hooks

    @clocked
    def step_begins(self, arguments: tuple[Any, ...]) -> None:
        """Begin to audit the step under way, if it is due, before its own forward. Collective in a step that is due."""
        began, step = time.perf_counter(), self._trainer.global_step + 1
        sessions = self._run.sessions
        is_new = sessions.now is not self._session
        if self._own is not None and not is_new:  # a step that gave no loss has no backward
            self._skipped()
        if (step == self._step and not is_new) or sessions.standing is not Standing.TOGETHER:
            return  # a later batch of this step, or a stage that repeats steps alone
        self._step = step
        if is_new:  # groups were made anew: ranks may be new that know nothing of the audits before
            self._session, self._turn, self.clock = sessions.now, "watched", self._run.clock
            self._trusted, self._known, self._usual = {*sessions.now.suspects.trusted}, set(), set()
        self.close()
        self._say_cost()
        due = self._turn != "ordinary" or step % self._every == 0
        if not due or not self._exchange.all_agree(not sessions.now.replaying):
            return
        if self._turn == "watched":
            self._leave_out([*self._reasons()])
            self._turn = "first"
        else:
            began += self._begin_audit(arguments)
            self._spent(began)

    @clocked
    def backward_ends(self) -> None:
        """Compare the step under way, if it is audited, before its gradients are used. Collective then."""
        began, own = time.perf_counter(), self._own
        if own is None:
            return
        if self._run.sessions.now is not self._session:  # the step was begun again, beside a stage that had failed
            self.close()
            return
        own.__exit__()
        finding, clean = self._compare(own)
        self.close()
        self._turn = "ordinary"
        self._spent(began)
        self._ended(finding, clean=clean)

    # -- whether steps can be played

    @property
    def _exchange(self) -> Any:
        return self._run.session.job.exchange

    def _reasons(self) -> Iterator[str]:
        """Yield why steps cannot be played."""
        module = self._module
        if not module.automatic_optimization:
            yield "in manual optimization a step cannot be told from its optimizer"
        if takes_iterator(self._trainer):
            yield "`training_step(dataloader_iter)` fetches its batch itself"
        if is_sharded(module):
            yield "parameters are in shards"
        if module.device.type != "cpu" and torch.backends.cudnn.benchmark:
            yield "`cudnn.benchmark` chooses kernels by their time"
        for name, metric in module_metrics(module):
            if metric.process_group is not None or metric.dist_sync_fn not in (None, gather_in_stage):
                yield f"the metric `{name}` chooses by itself which ranks it asks"

    def _unplayable(self) -> list[str]:
        """Return why this step cannot be played, as far as it can be told before."""
        if compiled_modules(self._module) or _compiled() != self._compiled:
            return ["compiled code cannot be followed"]
        return []

    def _leave_out(self, reasons: list[str]) -> None:
        """Agree on why steps are not played, and say it once. Collective."""
        said = cast("list[list[str]]", self._exchange.gather_values([*self.figures.left_out, *reasons]))
        found = tuple(dict.fromkeys(reason for row in said for reason in row))
        if found and not self.figures.left_out:
            log.warning("audits compare state alone, and do no step twice: %s", "; ".join(found), alike=True)
        self.figures = replace(self.figures, left_out=found)

    # -- an audit

    @property
    def _replicas(self) -> int:
        return int(self._run.session.job.groups.dp_size)

    def _at(self, distance_: int) -> int:
        """Return the rank with the same part, so many replicas further."""
        groups = self._run.session.job.groups
        peers = groups.ranks("expert_data")
        return peers[(groups.dp_rank + distance_) % len(peers)]

    def _distances(self) -> list[int]:
        """Return the distances between players and owners: ordinary audits use the first one, others all."""
        groups = self._run.session.job.groups
        first = distance(self._run.sessions.hosts, groups.stage_size, groups.ep_size)
        return [first, first % (self._replicas - 1) + 1] if self._replicas > 2 else [first]

    def _begin_audit(self, arguments: tuple[Any, ...]) -> float:
        """Compare states, and play roles; return the seconds that the first audit takes longer than others. Collective."""
        session = self._run.session
        odd = session.odd_copies()
        new = {name: ranks for name, ranks in odd.items() if name not in self._known}
        self._known |= {*new}
        finding = None
        if new and self._turn == "first":
            listed = ", ".join(f"{name} (ranks {list(ranks)})" for name, ranks in [*new.items()][:_NAMED])
            log.warning("not audited, since ranks begin with different ones: %s", listed, alike=True)
        elif new:
            ranks = tuple(sorted({rank for each in new.values() for rank in each}))
            finding = self._finding("state", ranks, tuple(new), sticky=True)
        if odd or self.figures.left_out:  # gradients of weights that differ would differ
            self._turn = "ordinary"
            self._ended(finding, clean=not odd)
            return 0.0
        self._role = Role(self._trainer, self._module, self._run, arguments)
        distances, more = self._distances(), 0.0
        for each in dict.fromkeys([*distances, 0] if self._turn == "first" else distances[:1]):
            began = time.perf_counter()
            self._sent[each] = self._received(each)
            self._plays[each] = self._played(self._sent[each])
            more += (time.perf_counter() - began) * (each != distances[0])
        self._leave_out([*self._failures(self._plays.values())])
        session.forward_begins(self._run.sessions.last_step)  # what plays have counted is none of the step's
        if self.figures.left_out:
            self.close()
            self._turn = "ordinary"
            self._ended(None)
            return more
        watch = Watch(self._module)
        self._attempt = StepUndo(self._trainer, self._module, self._run, arguments, watch, whole=True)
        self._own = Play(self._module, session.job.operators)
        self._own.__enter__()
        return more

    def _failures(self, plays: Iterable[Play]) -> Iterator[str]:
        """Yield why plays cannot be compared with the step that counts."""
        for play in plays:
            if play.failed:
                yield play.failed
            asked = play.operations.asked - self._usual if play.operations is not None else set()
            # Of two ranks sums are equal where these have changed places, if they were once.
            if self._turn == "first" and not (self._replicas > 2 and self._run.session.job.groups.num_stages == 1):
                self._usual |= asked
            elif asked:
                # Sums over ranks are rounded otherwise where ranks have changed places.
                yield f"a step asks other ranks ({', '.join(sorted(asked))}), whose roles change places in an audit"

    def _received(self, distance_: int) -> bytes | None:
        """Return another rank's role; nothing for one's own, `None` if some rank's cannot be sent. Collective."""
        assert self._role is not None
        if distance_ == 0:
            return b""
        digests = [row[0] for row in self._exchange.gather([self._role.buffers_digest()])]
        to = self._at(-distance_)
        sent = self._role.sent(buffers=digests[to] != digests[self._exchange.rank])
        return pass_on(self._exchange, sent, to=to, source=self._at(distance_))

    def _played(self, sent: bytes | None, *, listed: bool = False) -> Play:
        """Play a role from its bytes, one's own from none, and undo it all. Collective."""
        assert self._role is not None
        before, operations = Operations(), Operations(listed=listed)
        play = Play(self._module, self._run.session.job.operators, operations)
        role, arguments = self._role, self._role.arguments
        counts = [undo for counter in [*LoadCounter.installed] for undo in counter.hold()]  # a play is no step
        with (
            gradients_aside(self._module),
            silenced(self._trainer.loggers),
            set_stance("force_eager"),
            ExitStack() as stack,
        ):
            try:
                undo = PlayUndo(self._trainer, self._module, self._run, arguments)
                stack.callback(undo.undo, operations, before)
                reasons = [*self._unplayable(), *(f"a step could use up {each}" for each in undo.unheld)]
                play.failed = role.unsent or "; ".join(reasons)
                if sent and not play.failed:
                    with before:
                        arguments = role.take_up(sent)
            except Exception as error:  # noqa: BLE001  # the user's objects may raise anything
                play.failed = f"another rank's part of a step cannot be taken: {type(error).__name__}: {error}"
            if self._exchange.all_agree(sent is not None and not play.failed):
                self._play(play, arguments)
        for each in counts:
            each()
        return play

    def _play(self, play: Play, arguments: tuple[Any, ...]) -> None:
        groups = self._run.session.job.groups
        try:
            with play:
                play_step(self._trainer, self._module, arguments)
        except Exception as error:
            if is_of_collective(error) or groups.ep_size > 1 or groups.num_stages > 1:
                raise  # other ranks wait for this one inside the step
            play.failed = f"a step cannot be done in another rank's place, or again: {type(error).__name__}: {error}"

    def _compare(self, own: Play) -> tuple[Finding | None, bool]:
        """Compare the step that counts with its plays, and look closer where they differ. Return whether it is known to be right. Collective."""
        first, distances = self._turn == "first", [*self._plays]
        rows = self._exchange.gather([play.trace[-1][1] for play in (own, *self._plays.values())])
        peers = cast("list[list[int]]", self._exchange.gather([self._at(each) for each in distances]))
        differing = {
            each: [row[at + 1] != rows[source[at]][0] for row, source in zip(rows, peers, strict=True)]
            for at, each in enumerate(distances)
        }
        if first and any(differing.get(0, ())):
            ranks = [rank for rank, differs in enumerate(differing[0]) if differs]
            why = f"the same step gives other gradients on the same device, on rank {ranks}: some kernel is not deterministic"
            self._leave_out([why])
            return None, True
        wrong = [each for each, found in differing.items() if any(found)]
        self._trusted |= {*distances} - {*wrong}
        trusted = self._trusted.issuperset(wrong)
        finding = self._triage(own) if wrong and (trusted or first) else None
        # From an earlier incarnation only the ranks that gave way are known: others may be on devices of another kind by now.
        known = {*finding.ranks} & {*self._run.session.suspects.ranks} if finding is not None else {0}
        if not trusted or (first and not known):
            trusted, finding = False, None
            self._trusted -= {*wrong}
        if first and wrong and not trusted and not self.figures.left_out:
            ranks = sorted({rank for each in wrong for rank, differs in enumerate(differing[each]) if differs})
            log.warning(
                "ranks %s get other gradients from the same batch than its own rank does, from the first audit on: either a step depends on "
                "its rank, or one of these devices computes wrong. That is no finding; steps count as audited once they agree",
                ranks,
                alike=True,
            )
        return finding, trusted and finding is None

    def _triage(self, own: Play) -> Finding | None:
        """Do the step again on its owner, on its player, and on a third rank, and judge. Collective."""
        assert self._role is not None
        rank, distances = self._exchange.rank, self._distances()
        lost = self._attempt.lost() if self._attempt is not None else ""
        self._leave_out([f"gradients differ where they cannot be looked into: {lost}"] if lost else [])
        if self.figures.left_out:
            return None
        watch = Watch(self._module)
        after = StepUndo(self._trainer, self._module, self._run, self._role.arguments, watch, whole=True)
        with gradients_aside(self._module):
            assert self._attempt is not None
            self._attempt.undo()
            whole = self._role.sent(buffers=True) if self._replicas > 1 else b""
            traces: dict[int, list[Trace]] = {rank: [own.trace]}
            for each, play in self._plays.items():
                traces.setdefault(self._at(each), []).append(play.trace)
            repeats = 2 if self._module.device.type == "cpu" else _REPEATS
            plays = [self._played(sent, listed=True) for sent in [*[b""] * repeats, whole]]
            traces[rank] += [each.trace for each in plays]
            listed = [cast("Operations", each.operations) for each in plays]
            found = [listed[0].parting(each.rows) for each in listed[1:]]
            for each in distances if self._replicas > 1 else ():
                sent = self._sent[each] if each in self._sent else self._received(each)
                plays.append(self._played(sent, listed=True))
                traces.setdefault(self._at(each), []).append(plays[-1].trace)
                operations = cast("Operations", plays[-1].operations)
                rows = pass_on(self._exchange, operations.rows, to=self._at(each), source=self._at(-each))
                found.append(listed[0].parting(rows or b""))
            after.put_back()
        watch.accesses.close()
        self._leave_out([*self._failures(plays)])
        if self.figures.left_out:
            return None
        rows_ = self._exchange.gather_values([[[owner, played] for owner, played in traces.items()], found])
        said = cast("list[tuple[list[tuple[int, list[Trace]]], list[list[str]]]]", rows_)
        table = {player: dict(row) for player, (row, _) in enumerate(said)}
        partings = {kind: name for _, row in said for kind, name in filter(None, row)}
        groups = self._run.session.job.groups
        verdict = judge(table, lambda each: each % groups.stage_size // groups.ep_size, partings)
        if verdict.harmless:
            self._leave_out([verdict.harmless])
        if not verdict.ranks:
            return None
        return self._finding("compute", verdict.ranks, self._operators(own), sticky=verdict.sticky)

    def _skipped(self) -> None:
        """End the audit of a step without backward."""
        own, self._own = self._own, None
        assert own is not None
        own.__exit__()
        is_clean = self._exchange.world_size == 1 and all(own.trace == each.trace for each in self._plays.values())
        self._turn = "ordinary"
        self._ended(None, clean=is_clean)

    def _operators(self, own: Play) -> tuple[str, ...]:
        """Return the operators whose gradients differ between the step that counts and its plays. Collective."""
        played = [[self._at(each), play.gradients] for each, play in self._plays.items()]
        names = [operator.name for operator in self._run.session.job.operators]
        rows = cast("list[list[Any]]", self._exchange.gather_values([own.gradients, played, names]))
        found = set[str]()
        for _, plays, _ in rows:
            for owner, gradients in plays:
                made = rows[owner][0]
                found |= {name for name in {**made, **gradients} if made.get(name) != gradients.get(name)}
        order = dict.fromkeys(name for row in rows for name in [*row[2], *sorted(found)])
        return tuple(name for name in order if name in found)

    def _finding(self, check: Any, ranks: tuple[int, ...], operators: tuple[str, ...], *, sticky: bool) -> Finding:
        hosts = self._run.sessions.hosts
        step = self._step - (check == "state")
        who = " or ".join(f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}" for rank in ranks)
        what = "holds other bits than ranks that should hold the same"
        if check == "compute":
            again = ", and does so again" if sticky else "; done again, they were right"
            what = f"computes other gradients than it should{again}"
        named = ", ".join(operators[:_NAMED]) + (f" and {len(operators) - _NAMED} more" * (len(operators) > _NAMED))
        text = f"step {step}: {who} {what}: {named}"
        nodes = tuple(dict.fromkeys(hosts[rank] for rank in ranks)) if hosts else ()
        return Finding(step=step, check=check, ranks=ranks, nodes=nodes, operators=operators, sticky=sticky, text=text)

    def _spent(self, began: float) -> None:
        self.figures = replace(self.figures, seconds=self.figures.seconds + time.perf_counter() - began)

    def _ended(self, finding: Finding | None, *, clean: bool = True) -> None:
        """Note an audit's result, and act on it. Raises `SilentFault` unless the run is to train on."""
        figures = self.figures
        self.figures = replace(
            figures,
            audits=figures.audits + 1,
            audited=self._step - 1 if clean else figures.audited,
            findings=figures.findings + ((finding,) if finding is not None else ()),
        )
        self._run.session.audit = self.figures
        if clean:
            self._run.session.passed_audit(self._step - 1, self._trusted)
        if finding is None:
            return
        log.error("an audit has found a fault: %s", finding.text, alike=True)
        if self._on_fault != "warn":
            self._run.sessions.condemn(finding.ranks, finding.text, ends=self._on_fault == "stop")

    def _say_cost(self) -> None:
        """Log the cost of audits, two steps behind the first one."""
        now, spent = time.perf_counter(), self.figures.seconds
        if self._pace is None and self.figures.audits == 1 and self._turn == "ordinary":
            self._pace = now, spent
        elif self._pace is not None and self._pace[0]:
            step = now - self._pace[0] - (spent - self._pace[1])
            self._pace = 0.0, spent
            log.info(
                "an audit took %.3g s, at a step of %.3g s: %.2f %% of training at one in %d steps",
                *(spent, step, 100 * spent / (spent + self._every * step), self._every),
                alike=True,
            )

    def close(self) -> None:
        """Let go of the step under way."""
        if self._own is not None:
            self._own.__exit__()
        if self._attempt is not None:
            self._attempt.accesses.close()
        self._attempt = self._role = self._own = None
        self._sent, self._plays = {}, {}


def _compiled() -> int:
    """Return how many frames torch has compiled in this process."""
    return int(counters["frames"]["total"])
