"""Test the promises of every MoE layer description: inherit, give a model and a loss, and run pytest.

```python
class TestMyLayer(AdapterContract):
    def make_model(self) -> nn.Module:
        return MyModel(...)

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        return model(make_batch(seed)).square().mean()
```

Register your adapter first, for instance in a fixture. To find out which expert processed which token, the contract
runs the layer again with other weights in one expert: every row of the output that changes is a token of that expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ckpt.operators import (
    LoadCounter,
    MoELayerSpec,
    Operator,
    OperatorSet,
    ParamSlice,
    RecordKind,
    StateSchema,
    discover,
    prove_counts,
)
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery import Frozen
from lightning_moe_ckpt.snapshot._lay_out import shards_of
from lightning_moe_ckpt.snapshot._layout import StateView
from lightning_moe_ckpt.snapshot._shards import Field

_SEEDS = (1, 2)
"""Seeds for the two micro-batches in a step."""

_TERM = 100.0
"""Term beside scores from 0 to 1; every token chooses the expert that has it."""


class AdapterContract:
    """Tests for a model's operators and token counts. Every test builds the model anew with the same seed."""

    def make_model(self) -> nn.Module:
        """Return a small model with at least one MoE layer that `discover` finds."""
        raise NotImplementedError

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        """Return a scalar loss with a graph: forward on a batch that depends on `seed` alone."""
        raise NotImplementedError

    def processed(self, model: nn.Module, seeds: Sequence[int]) -> Mapping[str, Sequence[int]] | None:
        """Return the tokens per expert over these batches, by layer; `None` lets the contract find them out.

        Override it if counts are taken before drops, or if a layer's output does not have one row per token.
        """
        return None

    # -- operators

    def test_every_parameter_is_in_exactly_one_operator(self, model: nn.Module, operators: OperatorSet) -> None:
        """Operators cover every element of every parameter once, and include experts and a router."""
        covered = {fqn: torch.zeros(p.numel(), dtype=torch.int64) for fqn, p in model.named_parameters()}
        for operator in operators:
            for piece in operator.slices:
                covered[piece.fqn][piece.start : piece.stop] += 1
        wrong = [fqn for fqn, times in covered.items() if not torch.equal(times, torch.ones_like(times))]
        assert not wrong, f"not in exactly one operator: {wrong}"
        kinds = {operator.kind for operator in operators}
        assert {"expert", "router"} <= kinds, f"only {kinds} were found"

    def test_buffers_of_a_router_exist(self, model: nn.Module, operators: OperatorSet) -> None:
        """Every buffer that an operator names is there to be captured."""
        named = {name for operator in operators for name in operator.buffers}
        assert named <= {name for name, _ in model.named_buffers()}

    def test_every_operator_comes_back_bit_for_bit(self, model: nn.Module, operators: OperatorSet) -> None:
        """Restoring one operator's weights and optimizer state changes no other operator, and training goes on as before."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self._train(model, optimizer, steps=2)
        taken = OperatorCopies(model, operators, StateSchema.of(optimizer))
        self._train(model, optimizer, steps=2)
        went_on = OperatorCopies(model, operators, StateSchema.of(optimizer))
        for name in operators.names:
            taken.restore(name)
            assert taken.equal(name), f"`{name}` is not what was taken"
            others = [other for other in operators.names if other != name and not went_on.equal(other, own=True)]
            assert not others, f"restoring `{name}` changed {others}"
            went_on.restore(name)
        for name in operators.names:
            taken.restore(name)
        taken.restore_rest()
        self._train(model, optimizer, steps=2)
        differ = [name for name in operators.names if not went_on.equal(name)]
        assert not differ, f"training from what was restored ends with others of {differ}"

    def test_what_is_frozen_leaves_other_gradients_alone(self, model: nn.Module, operators: OperatorSet) -> None:
        """Replay freezes operators; gradients of active operators must not change."""
        trained = [param for param in model.parameters() if param.requires_grad]

        def as_user() -> None:
            for param in trained:
                param.requires_grad_(True)

        frozen, want = Frozen(model, operators, as_user=as_user), self._gradients(model)
        for active in self._active_sets(operators):
            frozen.freeze({op.name for op in active})
            got = self._gradients(model)
            frozen.thaw()
            differ = [op.name for op in active if not all(equal(*_slices(piece, want, got)) for piece in op.slices)]
            assert not differ, f"with others frozen, {differ} have other gradients"

    # -- counts

    def test_counts_are_the_tokens_that_experts_process(self, model: nn.Module, operators: OperatorSet) -> None:
        """Counts over two micro-batches equal those found by changed weights, or given by `processed`."""
        calls = BlockCalls(model, operators.layers)
        got = self._count(model, operators)
        calls.remove()
        known = self.processed(model, _SEEDS)
        for layer in operators.layers:
            want = known[layer.fqn] if known is not None else calls.processed(layer)
            assert got[layer.fqn] == list(want), f"`{layer.fqn}` processed {list(want)}, {got[layer.fqn]} were counted"
            assert sum(want), f"no token passed `{layer.fqn}`; give it some"

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_recomputation_is_not_counted_again(
        self, model: nn.Module, operators: OperatorSet, use_reentrant: bool
    ) -> None:
        """Activation checkpointing runs the layer's forward twice; tokens count once."""
        want = self._count(model, operators)
        with recomputing(model, operators.layers, use_reentrant=use_reentrant):
            assert self._count(model, operators) == want

    def test_evaluation_is_not_counted(self, model: nn.Module, operators: OperatorSet) -> None:
        """Tokens of validation do not count."""
        model.eval()
        got = self._count(model, operators, backward=False)
        assert not any(sum(counts) for counts in got.values()), f"in evaluation {got} were counted"

    def test_one_step_proves_the_counts(self, model: nn.Module, operators: OperatorSet) -> None:
        """The check of a fit's first step accepts the counts."""
        prove_counts(model, lambda: self._backward(model), operators)

    def test_counting_changes_no_bit(self, model: nn.Module, operators: OperatorSet) -> None:
        """Counting changes neither gradients nor random numbers."""
        want, state = self._gradients(model), torch.get_rng_state()
        counter = LoadCounter(operators, model)
        counter.install()
        got = self._gradients(model)
        counter.remove()
        differ = [fqn for fqn, grad in got.items() if not equal(grad, want[fqn])]
        assert not differ, f"counting changed gradients of {differ}"
        assert torch.equal(torch.get_rng_state(), state), "counting drew random numbers"

    # -- capacity

    def test_a_capacity_view_changes_the_live_capacity(self, model: nn.Module, operators: OperatorSet) -> None:
        """A small capacity changes the layer's output; the old capacity gives the old output."""
        views = [(layer, view) for layer in operators.layers if (view := layer.live_capacity) and view.limited(model)]
        if not views:
            pytest.skip("no layer has a live capacity")
        calls = BlockCalls(model, [layer for layer, _ in views])
        self._backward(model)
        calls.remove()
        for layer, view in views:
            before, output = view.get(model), calls.output(layer)
            view.set(model, view.scaled(before, [1e-3] * layer.num_experts))
            assert not torch.equal(calls.output(layer), output), f"`{layer.fqn}` takes no notice of its capacity"
            view.set(model, before)
            assert view.get(model) == before
            assert torch.equal(calls.output(layer), output), f"`{layer.fqn}` does not forget another capacity"

    # -- bias

    def test_a_bias_view_moves_choices_and_leaves_the_trained_bias_alone(
        self, model: nn.Module, operators: OperatorSet
    ) -> None:
        """A large term makes more tokens choose an expert; without it the counts are as before."""
        biased = [(layer.fqn, layer.bias) for layer in operators.layers if layer.bias is not None]
        if not biased:
            pytest.skip("no layer has a selection-only bias")
        usual = self._count(model, operators)
        for fqn, view in biased:
            trained = view.trained(model)
            bits, expert = trained.clone(), usual[fqn].index(min(usual[fqn]))
            term_E = torch.zeros(len(usual[fqn]), device=trained.device)
            term_E[expert] = _TERM
            remove = view.add(model, term_E)
            moved = self._count(model, operators)[fqn]
            remove()
            assert moved[expert] > usual[fqn][expert], f"`{fqn}` takes no notice of its bias"
            assert self._count(model, operators) == usual, f"`{fqn}` does not forget a term beside its bias"
            assert view.trained(model) is trained, f"`{fqn}` has another bias than before"
            assert torch.equal(trained, bits), f"`{fqn}`: the term has gone into the trained bias"

    # -- private

    @pytest.fixture
    def model(self) -> nn.Module:
        """Return the model under test, in training mode."""
        torch.manual_seed(0)
        return self.make_model().train()

    @pytest.fixture
    def operators(self, model: nn.Module) -> OperatorSet:
        """Return the operators found in the model."""
        return discover(model)

    def _count(self, model: nn.Module, operators: OperatorSet, *, backward: bool = True) -> dict[str, list[int]]:
        counter = LoadCounter(operators, model)
        assert not counter.uncounted, f"nothing counts {counter.uncounted}"
        counter.install()
        if backward:
            self._backward(model)
        else:
            self.loss(model, _SEEDS[0])
        counts = counter.read_and_reset().tolist()
        counter.remove()
        starts = operators.count_offsets
        return {each.fqn: counts[starts[each.fqn] : starts[each.fqn] + each.num_experts] for each in operators.layers}

    def _backward(self, model: nn.Module) -> None:
        for seed in _SEEDS:
            torch.manual_seed(seed)
            self.loss(model, seed).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        model.zero_grad()
        self._backward(model)
        return {fqn: None if p.grad is None else p.grad.clone() for fqn, p in model.named_parameters()}

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            self._backward(model)
            optimizer.step()

    def _active_sets(self, operators: OperatorSet) -> Iterator[list[Operator]]:
        """Yield active operators: all but experts, every other expert alone, every third operator, and the last one alone."""
        yield [op for op in operators if op.kind != "expert"]
        yield [op for op in operators if op.expert_idx is not None and op.expert_idx % 2]
        yield list(operators)[::3]
        yield list(operators)[-1:]


def _slices(piece: ParamSlice, *gradients: Mapping[str, Tensor | None]) -> list[Tensor | None]:
    return [None if (g := each[piece.fqn]) is None else g.flatten()[piece.start : piece.stop] for each in gradients]


_TRIES = 3
"""Numbers of other weights tried per expert: a unit that is off before and after would hide a token."""


_Call = tuple[tuple[Any, ...], Mapping[str, Any], Tensor]
"""Arguments, keywords and random state."""


class BlockCalls:
    """Record of all calls of a model's MoE blocks in training mode, until removed; repeats them in the same way."""

    def __init__(self, model: nn.Module, layers: Sequence[MoELayerSpec]) -> None:
        self._model = model
        self._calls: dict[str, list[_Call]] = {layer.fqn: [] for layer in layers}
        self._handles = [
            model.get_submodule(fqn).register_forward_pre_hook(partial(self._record, calls), with_kwargs=True)
            for fqn, calls in self._calls.items()
        ]

    def remove(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()

    def output(self, layer: MoELayerSpec) -> Tensor:
        """Return the rows of the block's output over all calls, `[T, ...]`."""
        return torch.cat([self._rows(layer, call) for call in self._calls[layer.fqn]])

    def processed(self, layer: MoELayerSpec) -> list[int]:
        """Return the number of rows that depend on each expert."""
        params = dict(self._model.named_parameters(remove_duplicate=False))
        usual, found = self.output(layer), []
        for expert in range(layer.num_experts):
            slices = [params[s.fqn].detach().view(-1)[s.start : s.stop] for s in layer.experts[expert]]
            weights = [piece.clone() for piece in slices]
            changed = torch.zeros(len(usual), dtype=torch.bool, device=usual.device)
            for _ in range(_TRIES):
                for piece in slices:
                    piece.normal_()
                # Not by bits: how a product is summed may depend on where its operands lie.
                changed |= ~torch.isclose(self.output(layer), usual, rtol=1e-4, atol=1e-5).flatten(1).all(1)
            for piece, weight in zip(slices, weights, strict=True):
                piece.copy_(weight)
            found.append(int(changed.sum()))
        return found

    def _record(self, calls: list[_Call], _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((_cloned(args), _cloned(kwargs), torch.get_rng_state()))

    def _rows(self, layer: MoELayerSpec, call: _Call) -> Tensor:
        args, kwargs, rng_state = call
        # Routers draw noise, and some change their input in place.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(rng_state)
            out = self._model.get_submodule(layer.fqn)(*_cloned(args), **_cloned(kwargs))
        return cast("Tensor", out[0] if isinstance(out, tuple | list) else out).flatten(0, -2)


class OperatorCopies:
    """Copies of all operators with their optimizer state, by the slices that checkpoints take; all buffers, too."""

    def __init__(self, model: nn.Module, operators: OperatorSet, schema: StateSchema) -> None:
        self._model, self._layers = model, operators.layers
        self._view = StateView(model, operators, schema, {})
        groups = ParallelGroups()
        tables = {op.name: shards_of({op.name: RecordKind.FULL}, self._view, groups).values() for op in operators}
        fields = {n: [each for own in rows for each in self._view.table(own).fields] for n, rows in tables.items()}
        self._fields = {name: [each for each in own if each.key != "present"] for name, own in fields.items()}
        self._taken = {name: [self._copy(field) for field in fields] for name, fields in self._fields.items()}
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._extra = {layer.fqn: _cloned(layer.extra.get(model)) for layer in self._layers if layer.extra is not None}

    def restore(self, name: str) -> None:
        """Restore one operator."""
        for field, value in zip(self._fields[name], self._taken[name], strict=True):
            param, live = self._view.params[field.shard.slice.fqn], self._view.live(field)
            if value is None:
                # An expert that had no token yet has no state yet.
                self._view.schema.drop_state(param)
                continue
            if live is None:
                self._view.schema.ensure_state(param)
                live = self._view.live(field)
            assert live is not None
            live.copy_(value)

    def restore_rest(self) -> None:
        """Restore state outside of operators: buffers and plain attributes."""
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._buffers[name])
        for layer in self._layers:
            if layer.extra is not None:
                layer.extra.set(self._model, self._extra[layer.fqn])

    def equal(self, name: str, *, own: bool = False) -> bool:
        """Return whether one operator is bitwise equal to its copy; `own` leaves out the step count, which experts in one tensor share."""
        pairs = zip(self._fields[name], self._taken[name], strict=True)
        return all(equal(self._view.live(field), value) for field, value in pairs if field.shape is None or not own)

    def _copy(self, field: Field) -> Tensor | None:
        live = self._view.live(field)
        return None if live is None else live.clone()


@contextmanager
def recomputing(model: nn.Module, layers: Sequence[MoELayerSpec], *, use_reentrant: bool) -> Iterator[None]:
    """Throw the activations of MoE blocks away within the context."""
    blocks = [model.get_submodule(layer.fqn) for layer in layers]
    for block in blocks:
        block.forward = partial(_recomputed, block.forward, use_reentrant)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _recomputed(forward: Callable[..., Any], use_reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` under activation checkpointing; the reentrant kind takes no keywords and needs inputs with gradients."""

    def run(*inputs: Any) -> Any:
        # Some routers change their input in place, which checkpointing would then begin with again.
        return forward(*(tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in inputs), **kwargs)

    return checkpoint(run, *(_requiring(arg) for arg in args), use_reentrant=use_reentrant)


def _requiring(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.requires_grad:
        return value
    return value.detach().requires_grad_(mode=torch.is_grad_enabled())


def _cloned(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.detach().clone()
    if isinstance(values, Mapping):
        return {name: _cloned(value) for name, value in values.items()}
    return type(values)(map(_cloned, values)) if type(values) in {tuple, list} else values


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have the same bits, or both are missing."""
    return a is b if a is None or b is None else torch.equal(a, b)
