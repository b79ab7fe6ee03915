"""Log the tensors and answers that cross a pipeline stage's borders, so that a stage can repeat steps while others wait.

A stage that repeats a step needs the tensors that its neighbours had sent, and the answers that all stages had agreed on:
losses and logged values, norms, flags. A neighbour has kept the tensors, and every rank of the pipeline the same answers. So the
ranks that live feed the one that has died, and nothing of its own is needed, not even its node.

Tensors that a repeating stage sends again go to nobody. Its neighbours have kept digests of the tensors received before: a
difference ends the repetition, see `require_exact`. Neighbours that repeat steps together hand each other the tensors of the
border between them.

Copies of what crosses a border are made in host memory, and digested, without waiting for the stage's device.

Invariant: a step's record has all crossings from the beginning of the step's (last) attempt to the beginning of the next step's,
validation between the two included, in their order.

Source: MoEvement (2026), Sec. 3.4 (upstream logging); we differ in keeping answers beside tensors, so that a stage repeats steps
in the ordinary training loop, and in checking what it sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.journal import differs
from lightning_moe_ckpt.process import MADE, RECEIVED, Messages

T = TypeVar("T")

Direction = Literal["down", "up"]
"""Activations go down, to the next stage; their gradients come up."""

_MAY_BE_PASSED, MAY_BE_MISSING = "norm", "figures"
"""Kinds of answers that a repeated step may pass over, because a journal has the value, or miss: a failure may end the asking."""


class LiveBorder(Protocol):
    """A border between two stages that repeat steps together."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Begin to send copies on the host."""

    def settle(self) -> None:
        """Wait until the other side has received all sent tensors."""

    def receive(self) -> list[Tensor]:
        """Return the next tensors of the other side."""


class Mode(Enum):
    """Questions that a rank asks ranks of other stages."""

    TOGETHER = auto()
    """All that a step needs."""
    SILENT = auto()
    """None: the rank is about to repeat steps."""
    REPEATING = auto()
    """None: tensors and answers of a step are known from before."""


class Diverged(CheckpointError):
    """A stage that repeats steps gives other tensors, or asks other questions, than before: other stages cannot go on with it."""


@dataclass(slots=True)
class Crossings:
    """Tensors and answers that crossed the borders around one rank's stage in one step."""

    answers: list[list[Any]] = field(default_factory=list)
    """Kind and value of each answer, the same on all ranks of a pipeline."""
    sent: dict[str, list[list[Tensor]]] = field(default_factory=lambda: {"down": [], "up": []})
    """Copies on the host of tensors sent, by direction, in order; complete after `HostCopies.wait`."""
    seen: dict[str, list[list[Tensor | int]]] = field(default_factory=lambda: {"down": [], "up": []})
    """Digests of tensors received, by direction."""
    nbytes: int = 0
    """Bytes of the tensors sent."""


@dataclass(slots=True)
class _Given:
    """Source of one repeated step: answers, incoming tensors, and the digests expected of outgoing tensors."""

    answers: deque[list[Any]]
    inputs: dict[str, deque[list[Tensor]]]
    outputs: dict[str, deque[list[int]]]

    def copy(self) -> _Given:
        """Return an independent copy: using one up leaves the other whole."""
        inputs = {name: tensor.copy() for name, tensor in self.inputs.items()}
        outputs = {name: output.copy() for name, output in self.outputs.items()}
        return _Given(self.answers.copy(), inputs, outputs)


class UpstreamLog:
    """One rank's log of crossings, and the source of steps while its stage repeats them. The caller of `keep` enforces `limit_nbytes`."""

    def __init__(self, limit_nbytes: int = 2**30) -> None:
        self.limit_nbytes = limit_nbytes
        self.expected_nbytes = 0
        """Most bytes that the log is expected to take; 0 while unknown."""
        self.keeps = False
        """Whether crossings are kept, see `keep`."""
        self.mode = Mode.TOGETHER
        self._steps: dict[int, Crossings] = {}
        self._now: Crossings | None = None
        self._given: dict[int, _Given] = {}
        self._from: _Given | None = None
        """The unused rest of the source of `_at`."""
        self._at: int | None = None
        """Step that is repeated; `None` outside of repetition."""
        self._into: dict[str, LiveBorder] = {}
        self._out_of: dict[str, LiveBorder] = {}
        self._copies = HostCopies()
        self._diverged = ""
        self._unchecked: list[tuple[str, list[Tensor | int], list[int]]] = []
        """Direction, digests and former digests of tensors sent again."""

    # -- what is kept

    def keep(self, *, keeps: bool) -> None:
        """Keep crossings from the next step on; with `keeps=False` forget all, and keep none."""
        self.keeps = keeps
        if not keeps:
            self.forget()

    @property
    def steps(self) -> range:
        """Steps in the log; the last is under way."""
        return range(min(self._steps, default=0), max(self._steps, default=-1) + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the log."""
        return sum(step.nbytes for step in self._steps.values())

    @property
    def step_nbytes(self) -> int:
        """Bytes of the largest step; 0 before one has ended."""
        return max((step.nbytes for step in self._steps.values() if step is not self._now), default=0)

    def begin_step(self, step: int) -> None:
        """Begin an attempt at `step`, and drop the crossings of an earlier attempt."""
        if self.repeating:
            if step != self._at:
                self.settle()
            self._given = {each: given for each, given in self._given.items() if each >= step}
            self._at, self._from = step, self._given[step].copy()
            self.mode = Mode.REPEATING
        elif not self.keeps:
            return
        self._steps.pop(step, None)
        self._now = self._steps[step] = Crossings()

    def collect(self, horizon: int) -> None:
        """Forget steps before `horizon`, the earliest step that any stage may still repeat."""
        for step in [each for each in self._steps if each < horizon]:
            del self._steps[step]

    def forget(self) -> None:
        """Forget all steps, since this process begins again from another step."""
        self._steps, self._given, self._now, self._from, self._at = {}, {}, None, None, None
        self.mode, self._diverged, self._unchecked = Mode.TOGETHER, "", []
        self.join(None, None)

    def silence(self) -> None:
        """Forget all steps, and ask no other stage until steps are repeated."""
        self.forget()
        self.mode = Mode.SILENT

    def answer(self, kind: str, ask: Callable[[], T]) -> T:
        """Return an answer for all ranks of the pipeline: the former one in a repeated step, else the result of `ask`, which is kept."""
        if self._from is not None:
            value: T = self._next(kind)
        else:
            value = ask()
        self._keep([kind, value])
        return value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep no crossings in this context; a stage that repeats steps does not enter it again."""
        now, self._now = self._now, None
        try:
            yield
        finally:
            self._now = now

    def complete(self, kind: str, value: Any) -> None:
        """Keep an answer received by other ranks, unless this rank has an answer of this kind."""
        if self._now is not None and all(answer[0] != kind for answer in self._now.answers):
            self._now.answers.append([kind, value])

    def sent(self, direction: Direction, tensors: Iterable[Tensor]) -> None:
        """Keep copies of sent tensors. In a repeated step, also note their digests, for `require_exact` to compare with the
        former ones.
        """
        sent = list(tensors)
        if Messages.listener is not None:
            Messages.listener(MADE, sent)
        if self._now is None or not sent:
            return
        copies = list(map(self._copies.take, sent))
        self._now.sent[direction].append(copies)
        self._now.nbytes += sum(copy.nbytes for copy in copies)
        if (border := self._out_of.get(direction)) is not None:
            self._copies.wait()
            border.send(copies)
        elif self._from is not None:
            expected = self._from.outputs[direction]
            self._unchecked.append((direction, digests_of(sent), expected.popleft() if expected else []))

    def received(self, direction: Direction, tensors: Iterable[Tensor]) -> None:
        """Keep digests of tensors received."""
        found = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        if Messages.listener is not None:
            Messages.listener(RECEIVED, found)
        if self._now is not None and found:
            self._now.seen[direction].append(digests_of(found))

    # -- a stage repeats steps

    @property
    def repeating(self) -> bool:
        """Whether steps are repeated, or are about to be."""
        return bool(self._given) or self._from is not None

    @property
    def silent(self) -> bool:
        """Whether other stages are not asked, and no former answers are known either."""
        return self.mode is Mode.SILENT

    @property
    def apart(self) -> bool:
        """Whether other stages are not asked."""
        return self.mode is not Mode.TOGETHER

    def has(self, first: int, last: int) -> bool:
        """Whether all steps from `first` on are kept, `last` excluded."""
        return all(step in self._steps for step in range(first, last))

    def given_for(self, step: int) -> list[Any]:
        """Return this rank's part of a repeated step's source: answers, copies of sent tensors, digests of received tensors."""
        self._copies.wait()
        kept = self._steps[step]
        return [kept.answers, kept.sent, {way: [[*map(int, each)] for each in seen] for way, seen in kept.seen.items()}]

    def repeat(
        self, first: int, answers: Sequence[list[Any]], before: Sequence[Any] | None, behind: Sequence[Any] | None
    ) -> None:
        """Set the source of repeated steps: from `first` on, the answers of each step, from `given_for` on any rank of
        the pipeline.

        `before` and `behind` have the results of `given_for` for each step from the ranks in the neighbouring stages;
        `None` where there is no such stage, and if that stage repeats steps too.
        """
        self.silence()
        empty: list[list[Any]] = [[[], {"down": [], "up": []}, {"down": [], "up": []}]] * len(answers)
        for index, (known, above, below) in enumerate(zip(answers, before or empty, behind or empty, strict=True)):
            self._given[first + index] = _Given(
                answers=deque(known),
                inputs={"down": deque(above[1]["down"]), "up": deque(below[1]["up"])},
                outputs={"down": deque(below[2]["down"]), "up": deque(above[2]["up"])},
            )

    def join(self, before: LiveBorder | None, behind: LiveBorder | None) -> None:
        """Exchange tensors with neighbours that repeat steps too, over these borders; `None` for a neighbour that does not."""
        self._into = {name: each for name, each in (("down", before), ("up", behind)) if each is not None}
        self._out_of = {name: each for name, each in (("down", behind), ("up", before)) if each is not None}

    def take(self, direction: Direction) -> list[Tensor]:
        """Return the next tensors of a repeated step from this direction. Raises `Diverged` if there are no more."""
        assert self._from is not None
        if (border := self._into.get(direction)) is not None:
            tensors = border.receive()
        elif not self._from.inputs[direction]:
            raise Diverged(f"more micro-batches came {direction} than before")
        else:
            tensors = self._from.inputs[direction].popleft()
        self.received(direction, tensors)
        return [tensor.clone() for tensor in tensors]

    def require_exact(self) -> None:
        """Raise `Diverged` if a repeated step was not as before. Called at a commit, because reading digests waits for the device."""
        unchecked, self._unchecked = self._unchecked, []
        for direction, digest, expected in unchecked:
            if [*map(int, digest)] != expected:
                self._note(f"other {'activations' if direction == 'down' else 'gradients'} were sent than before")
        if self._diverged:
            raise Diverged(self._diverged)

    def require_same(self, what: str, found: object, expected: object) -> None:
        """Note a difference if a repeated step gives another value than before."""
        if self._from is not None and differs(found, expected):
            self._note(f"{what} was not the same as before")

    def go_on(self) -> None:
        """End repetition: all stages take the next step together. Raises `Diverged` as `require_exact`."""
        if left := [generation for generation in self._given if generation != self._at]:
            self._note(f"steps {left} were not repeated")
        self.settle()
        self.require_exact()
        self._given, self._from, self._at, self.mode = {}, None, None, Mode.TOGETHER
        self.join(None, None)

    def _next(self, kind: str) -> Any:
        assert self._from is not None
        answers = self._from.answers
        while answers and answers[0][0] != kind and answers[0][0] == _MAY_BE_PASSED:
            self._keep(answers.popleft())
        if not answers or answers[0][0] != kind:
            if kind == MAY_BE_MISSING:
                return None
            raise Diverged(f"all ranks were asked for `{kind}`, before for `{answers[0][0] if answers else 'nothing'}`")
        return answers.popleft()[1]

    def _keep(self, answer: list[Any]) -> None:
        if self._now is not None:
            self._now.answers.append(answer)

    def settle(self) -> None:
        """Wait until neighbours have the repeated step's tensors, and note crossings that are missing in the repetition."""
        if self._from is None:
            return
        for border in self._out_of.values():
            border.settle()
        answers, self._from.answers = self._from.answers, deque()
        for passed in [answer for answer in answers if answer[0] == _MAY_BE_PASSED]:
            self._keep(passed)
        left = [answer[0] for answer in answers if answer[0] != _MAY_BE_PASSED]
        rest = [*left, *(name for each in (self._from.inputs, self._from.outputs) for name in each if each[name])]
        if rest:
            self._note(f"of a step {', '.join(map(str, rest))} did not come again")

    def _note(self, what: str) -> None:
        self._diverged = self._diverged or what


_WORD_NBYTES = 8
_ROW = 1024
"""Words per partial sum."""


class HostCopies:
    """Copies on the host; from a device into pinned memory, on a stream beside its computation."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host that is complete after `wait`. Later computation must not write into `tensor`."""
        own = tensor.detach()
        if not own.is_cuda:
            return own.to("cpu", copy=True)
        if own.device not in self._streams:
            self._streams[own.device] = torch.cuda.Stream(own.device)  # type: ignore[no-untyped-call]
        stream, copy = self._streams[own.device], torch.empty(own.shape, dtype=own.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(own.device))
        with torch.cuda.stream(stream):
            copy.copy_(own, non_blocking=True)
        own.record_stream(stream)  # its memory is no other tensor's before that
        return copy

    def wait(self) -> None:
        """Wait until all copies are complete."""
        for stream in self._streams.values():
            stream.synchronize()


def digests_of(tensors: Sequence[Tensor]) -> list[Tensor | int]:
    """Return digests of types, shapes and every bit of tensors, as int64; without waiting for a device.

    XXH3 on the host; on a device the sum of all words, each times an odd number by its place: another word, another sum.
    """
    return [_digest(tensor.detach()) for tensor in tensors]


def _digest(tensor: Tensor) -> Tensor | int:
    seed = xxh3_64_intdigest(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return xxh3_64_intdigest(flat.numpy().data, seed) - 2**63
    if flat.storage_offset() % _WORD_NBYTES:
        flat = flat.clone()
    whole = len(flat) // _WORD_NBYTES * _WORD_NBYTES
    words, rest = flat[:whole].view(torch.int64), flat[whole:].to(torch.int64)
    odd = 2 * torch.arange(_ROW, device=tensor.device) + 1
    rows = len(words) // _ROW
    sums = [
        (words[: rows * _ROW].view(rows, _ROW) * odd).sum(1),
        *((each * odd[: len(each)]).sum()[None] for each in (words[rows * _ROW :], rest)),
    ]
    by_row = torch.cat(sums)
    places = 2 * torch.arange(len(by_row), device=tensor.device) + 1
    return (by_row * places).sum() + (seed - 2**63)
