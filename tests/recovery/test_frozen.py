"""What is frozen while steps are done again saves work: counted operations of every replayed step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralModel
from typing_extensions import override

from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import discover
from lightning_moe_ckpt.recovery import Frozen
from lightning_moe_ckpt.recovery._frozen import FrozenView

Kind = Literal["stacked", "eager", "batched_mm", "grouped_mm", "dense", "encoder", "compiled"]
EXPERTS_OF_OTHERS: tuple[Kind, ...] = ("eager", "batched_mm", "grouped_mm")
WINDOW, FAILS_AT, STEPS = 6, 15, 18


class _Blocks(nn.Module):
    """Two residual blocks of a matrix, and an MoE layer or a wide perceptron."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.inner = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.outer = nn.ModuleList(
            MoELayer(48, 96, 8)
            if kind == "stacked"
            else nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48))
            for _ in range(2)
        )
        if kind == "compiled":
            for each in self.inner:
                each.compile(backend="aot_eager")

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        x += 0.1  # in place: of an embedding that is frozen, too
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + inner(x).tanh()
            x = x + outer(x)
        return x


class _Encoder(nn.Module):
    """Attention of torch, with weights that no module of their own runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(48, 4, 192, batch_first=True, norm_first=True) for _ in range(3)
        )

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class _Transformer(nn.Module):
    def __init__(self, experts: str) -> None:
        super().__init__()
        size: dict[str, Any] = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
        size["experts_implementation"] = experts
        config = MixtralConfig(**size, num_local_experts=8, num_attention_heads=4, num_key_value_heads=4)
        self.inner = MixtralModel(config)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.inner(tokens).last_hidden_state
        return out


def _flops_of_groups(a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[-1]


class _Counted(LightningModule):
    """Counts the operations of each optimizer step, and reads gradients behind it, without a look whether they are there."""

    def __init__(self, kind: Kind, fails_at: int | None, *, asks: str) -> None:
        super().__init__()
        self._asks = asks
        self.model: nn.Module = (
            _Encoder() if kind == "encoder" else _Transformer(kind) if kind in EXPERTS_OF_OTHERS else _Blocks(kind)
        )
        self.head = nn.Linear(48, 64)
        self.flops: dict[int, int] = {}
        """By the number of optimizer steps behind each; those after the failure are like all others."""
        self._fails_at = fails_at
        self._counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _flops_of_groups})

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == self._fails_at:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # else it goes on in other tests
            raise RuntimeError("fails here")
        if self._asks:
            batch.add_(1).remainder_(64)
        logits = self.head(self.model(nn.functional.dropout(batch[:, :-1].float(), 0.1).long().clamp(max=63)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        if self._asks == "a hook":

            def changes(gradient: Tensor) -> Tensor:
                handle.remove()
                return gradient.div(gradient.norm())

            handle = self.model.inner[0].weight.register_hook(changes)  # type: ignore[index, union-attr]
        elif self._asks:
            (gradient,) = torch.autograd.grad(loss, self.model.inner[0].weight, retain_graph=True)  # type: ignore[index, union-attr]
            loss = loss * gradient.norm().clamp(0.5, 2).detach()
        return loss

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx >= FAILS_AT - 2 * WINDOW:  # in every run: it has its own ways to compute some functions
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= FAILS_AT - 2 * WINDOW:  # in every run: it has its own ways to compute some functions
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.flops[self.global_step] = self._counter.get_total_flops()
        self._look()

    def _look(self) -> None:
        for param in self.parameters():
            assert param.grad is not None
            assert param.grad.isfinite().all()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Looks(Callback):
    """Reads gradients at some steps, as users do who log norms; `of` are parameters by their name's start."""

    def __init__(self, every: int, of: str = "") -> None:
        self._every, self._of = every, of
        self.norms: dict[int, Tensor] = {}

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step % self._every == 0:
            gradients = [param.grad for name, param in pl_module.named_parameters() if name.startswith(self._of)]
            self.norms[trainer.global_step] = torch.nn.utils.get_total_norm(
                [each for each in gradients if each is not None]
            )


def _fit(
    folder: Path,
    kind: Kind,
    *others: Callback,
    fails_at: int | None = None,
    save: bool = True,
    asks: str = "",
) -> _Counted:
    seed_everything(3)
    module = _Counted(kind, fails_at, asks=asks)
    callbacks: list[Callback] = (
        [SparseCheckpoint(str(folder / "run"), window=WINDOW, planner="algorithm1", untouched=["module.*"])]
        if save
        else []
    )
    silent: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    callbacks += others
    trainer = Trainer(max_steps=STEPS, callbacks=callbacks, accelerator="cpu", default_root_dir=str(folder), **silent)
    data = torch.randint(0, 64, (4 * STEPS, 9), generator=torch.Generator().manual_seed(5))
    loader: Any = DataLoader(data, batch_size=4)  # type: ignore[arg-type]  # a tensor is a dataset
    with nullcontext() if fails_at is None else pytest.raises(RuntimeError, match="fails here"):
        trainer.fit(module, loader)
    return module


@pytest.mark.parametrize(
    "kind",
    [
        *("stacked", "batched_mm", "dense", "encoder"),
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("eager", "grouped_mm")),
    ],
)
def test_replayed_steps_compute_no_gradient_of_what_is_frozen(kind: Kind, tmp_path: Path) -> None:
    """Each step of the window saves less than the one before, and what comes of it is what an undisturbed run has."""
    alone = _fit(tmp_path / "alone", kind, save=False)
    _fit(tmp_path, kind, fails_at=FAILS_AT)
    resumed = _fit(tmp_path, kind)
    for (name, want), got in zip(alone.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(want, got), name
    shares = [1 - resumed.flops[step] / alone.flops[step] for step in sorted(resumed.flops)]
    assert shares[0] > 0.26, f"a third of a step is weight gradients, of which most wait in its first one: {shares}"
    assert shares == sorted(shares, reverse=True), "more and more is active"
    assert shares[-1] == 0


def test_what_is_compiled_computes_everything_and_the_rest_does_not(tmp_path: Path) -> None:
    """A compiler would make another program for each step of the window: only modules beside its own leave gradients out."""
    alone = _fit(tmp_path / "alone", "compiled", save=False)
    _fit(tmp_path, "compiled", fails_at=FAILS_AT)
    resumed = _fit(tmp_path, "compiled")
    for (name, want), got in zip(alone.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(want, got), name
    share = max(1 - resumed.flops[step] / alone.flops[step] for step in resumed.flops)
    outside = 4 * 48 * 192 + 48 * 64  # of these and 2 * 48 * 48 compiled weights
    assert 0.2 < share <= outside / (outside + 2 * 48 * 48) / 3


@pytest.mark.parametrize(("every", "of"), [pytest.param(1, "", marks=pytest.mark.soak), (3, ""), (1, "head")])
def test_hooks_find_the_gradients_at_which_they_look(every: int, of: str, tmp_path: Path) -> None:
    """The journal says at which ones they looked in the original run: these are computed, and no others."""
    looks = [_Looks(every, of) for _ in range(3)]
    alone = _fit(tmp_path / "alone", "stacked", looks[0], save=False)
    _fit(tmp_path, "stacked", looks[1], fails_at=FAILS_AT)
    resumed = _fit(tmp_path, "stacked", looks[2])
    for (name, want), got in zip(alone.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(want, got), name
    assert looks[2].norms, "it has looked"
    assert all(torch.equal(looks[0].norms[step], norm) for step, norm in looks[2].norms.items())
    repeated = [step for step in sorted(resumed.flops) if step <= FAILS_AT - FAILS_AT % WINDOW]
    for step in repeated:
        share = 1 - resumed.flops[step] / alone.flops[step]
        seen = (step - 1) % every == 0 and not of
        assert share == 0 if seen else share > 0.1, f"step {step} leaves out {share}"


@pytest.mark.parametrize("asks", ["autograd", "a hook"])
def test_a_step_that_asks_for_gradients_of_weights_is_replayed(asks: str, tmp_path: Path) -> None:
    """The journal has what it asks autograd for. With a hook put in place within, the step is done once more, as before."""
    alone = _fit(tmp_path / "alone", "dense", save=False, asks=asks)
    _fit(tmp_path, "dense", fails_at=FAILS_AT, asks=asks)
    resumed = _fit(tmp_path, "dense", asks=asks)
    for (name, want), got in zip(alone.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(want, got), name
    if asks == "autograd":
        assert any(resumed.flops[step] < alone.flops[step] for step in resumed.flops), "other gradients are left out"


EXPERTS, ENDS = 5, (3, 3, 20, 29, 37)
IDS, MASK = torch.tensor([4, 0, 2, 2, 1, 3, 0, 4, 4]), torch.tensor([True, False, True, True, True])


def _in_groups(x_NK: Tensor, w_EKM: Tensor) -> Tensor:
    return torch._grouped_mm(x_NK, w_EKM, offs=torch.tensor(ENDS, dtype=torch.int32))


def _under_autocast(x_ENK: Tensor, w_EKM: Tensor, *, cache: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        return x_ENK @ w_EKM + torch.bmm(x_ENK, w_EKM)


USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "index": (lambda x, w: torch.cat([x[i] @ w[i] for i in range(EXPERTS)]), True),
    "index, a tensor": (lambda x, w: torch.cat([x[i] @ w[torch.tensor(i)] for i in range(EXPERTS)]), True),
    "unbind": (lambda x, w: torch.cat([a @ b for a, b in zip(x, w.unbind(), strict=True)]), True),
    "batch": (torch.bmm, True),
    "batch, transposed twice": (lambda x, w: x @ w.transpose(1, 2).mT, True),
    "batch, autocast": (_under_autocast, True),
    "batch, autocast with a cache": (partial(_under_autocast, cache=True), False),
    "batches": (lambda x, w: torch.cat([torch.bmm(part, w) for part in x.chunk(3, 1)] * 2, 1), True),
    "groups": (_in_groups, True),
    "groups, transposed": (lambda x, w: _in_groups(x, w.transpose(-2, -1)), True),
    "by keyword": (lambda x, w: torch.stack(torch.unbind(input=x @ w.transpose(dim0=1, dim1=2))), True),
    "permuted": (lambda x, w: x @ w.permute(0, 2, 1), True),
    "halves of rows": (lambda x, w: torch.cat([x @ half for half in w.chunk(2, dim=2)], 2), True),
    "runs of rows": (lambda x, w: torch.cat([x[:2] @ w[:2], x[2:] @ w.narrow(0, 2, 3)]), True),
    "in another type": (lambda x, w: x.double() @ w.to(torch.float64), True),
    "reshaped": (lambda x, w: x @ w.flatten(1).view(EXPERTS, 48, 48).contiguous(), True),
    "stack first": (lambda x, w: torch.bmm(w, x.mT), True),
    "gathered": (lambda x, w: torch.bmm(w[IDS], x[:, 0][IDS].unsqueeze(-1)).squeeze(-1), True),
    "gathered by a function": (lambda x, w: torch.bmm(x[:, :2][IDS], w.index_select(0, IDS)), True),
    "by equation": (lambda x, w: torch.einsum("enk,ekm->enm", x, w), True),
    "by equation, transposed": (lambda x, w: torch.einsum("e n k, e m k -> e n m", x, w), True),
    "gathered by pairs": (lambda x, w: x[:, :1, None] @ w[torch.stack([IDS[:EXPERTS], IDS[-EXPERTS:]], 1)], False),
    "masked": (lambda x, w: x[MASK] @ w[MASK], False),
    "in another order": (lambda x, w: x @ w.flip(0), False),
    "transposed over experts, by keyword": (
        lambda x, w: x[:1].expand(48, -1, -1)[..., :EXPERTS] @ w.transpose(dim0=0, dim1=1),
        False,
    ),
    "of four dimensions": (lambda x, w: x @ w.view(EXPERTS, 1, 48, 48), False),
    "over experts": (lambda x, w: torch.einsum("enk,ekm->nm", x, w), False),
    "elementwise": (lambda x, w: x[:, :1] * w.sum(-1, keepdim=True).mT, False),
}
"""Ways to use a stack, and whether rows are left out in them."""


@pytest.mark.parametrize("active", ["10110", "00001", "01010", "11111"])
@pytest.mark.parametrize("use", USES)
def test_rows_of_a_stack_without_a_gradient_change_no_other_bit(use: str, active: str) -> None:
    """Outputs, and gradients of inputs and of active rows, are those of the whole stack; the others have zeros, or their own."""
    compute, leaves_out = USES[use]
    rng = torch.Generator().manual_seed(1)
    active_E = torch.tensor([each == "1" for each in active])
    x = torch.randn((37, 48) if "groups" in use else (EXPERTS, 37, 48), generator=rng)
    w = torch.randn(EXPERTS, 48, 48, generator=rng)
    found: list[list[Tensor]] = []
    for partly in (False, True):
        inputs, stack = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = compute(inputs, FrozenView.of(stack, active_E) if partly else stack)
        assert type(out) is Tensor
        torch.autograd.backward(out, torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype))
        assert inputs.grad is not None
        assert stack.grad is not None
        found.append([out.detach(), inputs.grad, stack.grad[active_E], stack.grad[~active_E]])
    *whole, _ = found[0]
    *rows, others = found[1]
    assert all(torch.equal(a, b) for a, b in zip(whole, rows, strict=True))
    assert leaves_out == (not others.any()) or active == "11111"


class _Returns(nn.Module):
    """Gives what has no graph in training beside what has one, and sees other weights where `functional_call` runs it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("seen", torch.zeros(()))

    @override
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y = x @ self.weight.t()
        if torch.is_grad_enabled():
            y.retain_grad()  # refused where nothing has a gradient
        return y, mask, y.detach().mean(), self.seen, self.weight.sum()


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Returns() for _ in range(4))

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, list[bool]]:
        mask, graphs = torch.zeros(8), []
        for part in self.parts:
            doubled = {"weight": 2 * part.get_parameter("weight")}
            more: Any = torch.func.functional_call(part, doubled, (x, mask))
            x, mask, *others = part(x + 0.1 * more[0], mask)
            graphs += [each.requires_grad for each in (x, mask, *others)]
        return x, graphs


@pytest.mark.parametrize("hooks", ["none", "gradient", "accumulated"])
def test_modules_cannot_tell_that_they_are_frozen(hooks: str) -> None:
    """What has a graph in training has one, and nothing else; hooks on parameters get whole gradients; others' weights are seen."""
    torch.manual_seed(0)
    model, met = _Chain(), list[Tensor]()
    for param in model.parameters() if hooks == "gradient" else ():
        param.register_hook(lambda gradient: met.append(gradient.clone()))  # type: ignore[no-untyped-call]
    for param in model.parameters() if hooks == "accumulated" else ():
        param.register_post_accumulate_grad_hook(lambda param: met.append(param.grad.clone()))  # type: ignore[no-untyped-call]
    operators = discover(model, ep_size=1)
    frozen = Frozen(model, operators, as_user=lambda: None)
    active = operators.operators[0]
    found = []
    for freezes in (False, True):
        if freezes:
            frozen.freeze({active.name})
        model.zero_grad()
        met.clear()
        out, graphs = model(torch.linspace(-1, 1, 24).view(3, 8))
        out.square().mean().backward()
        gradient = model.get_parameter(active.slices[0].fqn).grad
        assert gradient is not None
        found.append((graphs, [out.detach(), gradient.clone(), *met]))
    frozen.fill_gradients()
    frozen.drop_gradients()
    left = {name for name, param in model.named_parameters() if param.grad is not None}
    assert left == {piece.fqn for piece in active.slices}, "no other parameter takes a step"
    frozen.give_back_gradients()
    assert all(param.grad is not None for param in model.parameters())
    frozen.thaw()
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) == len(found[1][1])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


class _Uses(nn.Module):
    """Uses of matrices for which torch chooses another way where these need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.matrix = nn.Parameter(torch.randn(16, 16) / 4)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.matrix, nn.Parameter)
        x = self.second(self.first(x[:, :-1])[:, 1:])
        x = self.matrix @ (x.mT[:, :, 1:] @ torch.ones(x.shape[1] - 1, 3)) + (x.transpose(0, 1)[:2] @ self.matrix).sum()
        x = self.attention(x.mT, x.mT, x.mT)[0]
        self.encoder.eval()
        with torch.no_grad():
            target = self.encoder(x)
        out: Tensor = self.encoder.train()(x) - target
        return out


@pytest.mark.parametrize("autocast", ["", "bfloat16", "bfloat16, a cache"])
def test_torch_chooses_kernels_as_in_training(autocast: str) -> None:
    torch.manual_seed(0)
    module, x = _Uses(), torch.randn(4, 7, 16)
    found = []
    for freezes in (False, True):
        frozen = Frozen(module, discover(module, ep_size=1), as_user=lambda: None)
        if freezes:
            frozen.freeze(set())
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast), cache_enabled="cache" in autocast):
            out = module(inputs)
        out.float().square().mean().backward()
        assert frozen.leaves_out == freezes
        assert inputs.grad is not None
        found.append((out.detach(), inputs.grad))
        frozen.thaw()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class _InParts(MoELayer):
    """Works on its batch in parts: a stack has more than one use in each call."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.bmm(each, self.w1) for each in x.chunk(2, 1)], 1)


@pytest.mark.parametrize("autocast", ["", "bfloat16", "bfloat16, a cache"])
def test_gradients_of_active_rows_add_up_in_the_order_of_training(autocast: str) -> None:
    torch.manual_seed(0)
    module, x = _InParts(16, 32, 4), torch.randn(4, 12, 16)
    operators = discover(module, ep_size=1)
    found = []
    for active in (set(operators.names), {operators.names[1], operators.names[2]}):
        frozen = Frozen(module, operators, as_user=lambda: None)
        frozen.freeze(active)
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast), cache_enabled="cache" in autocast):
            out = module(x) + module(x.flip(1) * 0.3).sin() + module(x * 0.7).cos()
        out.float().square().mean().backward()
        assert isinstance(module.w1.grad, Tensor)
        found.append(module.w1.grad[1:3].clone())
        frozen.thaw()
    assert torch.equal(*found)
