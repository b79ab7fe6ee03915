"""The table of optimizers and policies in docs/models.md is what the code answers and what the campaign runs; `MOE_CKPT_WRITE_DOCS=1` writes it."""

from __future__ import annotations

import inspect
import os
import re
from collections import defaultdict
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any

import campaign.test_optimizers as campaigns
import pytest
import torch
from campaign._optimizers import OTHERS, make_other
from torch import nn
from torch.optim import Optimizer

from lightning_moe_ckpt.errors import UnsupportedOptimizer
from lightning_moe_ckpt.operators import StateSchema
from lightning_moe_ckpt.operators._coupling import Coupling, coupling_of
from lightning_moe_ckpt.operators._optimizer_classes import _REFUSED_OPTIONS
from lightning_moe_ckpt.policies import DensePolicy, DifferentialPolicy, PartialPolicy, Policy, SparsePolicy

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "    | an element's update depends on |", "\n\n    "
TABLED = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
POLICIES: dict[str, type[Policy]] = {
    "Dense": DensePolicy,
    "Differential": DifferentialPolicy,
    "Sparse": SparsePolicy,
    "Partial, Selective": PartialPolicy,
}
INSTALLED = ("torch.", "transformers.", "campaign.")
"""Where classes of the table come from, by the begin of their module's name: all that every checkout has."""
KILLED = {"Dense": "test_everything_at_once", "Sparse": "test_parts_are_exact", "Differential": "test_differences"}
"""Begin of the name of the campaign's test, by policy; its parameters are the optimizers with which runs are killed."""
REASONS = {
    "updates an element by others": "an update reaches others",
    "keeps state in another optimizer": "another optimizer within",
    r"\.eval` gives validation": "`eval()`",
    "beside tensors of the parameter's shape": "numbers in its state",
}
OWN = {
    "ByHand": "one written by hand",
    "Lamb": "LAMB",
    "PerMatrix": "one that divides by each matrix's norm",
    "RowByRow": "one with statistics of rows",
    "Sharp": "SAM",
    "LookingAhead": "Lookahead",
    "Heavy": "one with far more state than parameters",
    "Modes": "one with other weights for validation",
    "Registered": "one that has a finaliser",
    "Quantised": "one with tensors made of others",
}
"""Names for a reader who does not know the campaign's own classes."""
WORDS: dict[Coupling, str] = {
    "element": "itself: *element*",
    "matrix": "its matrix: *matrix*",
    "parameter": "its tensor: *parameter*",
    "global": "other tensors, or random numbers: *global*",
}


def made(name: str) -> Optimizer:
    """An optimizer over a stack, matrices and a vector, as far as it takes them."""
    groups = [{"params": [nn.Parameter(torch.randn(shape)) for shape in [(3, 8, 12), (16, 12), (12, 16)]]}]
    groups.append({"params": [nn.Parameter(torch.randn(64))]})
    return TABLED[name](groups, lr=0.1) if name in TABLED else make_other(name, groups)


def killed(policy: str) -> set[str]:
    """The optimizers whose runs under a policy the campaign kills, in soaks too; of tabled ones all tests of the campaign kill some."""
    tests = inspect.getmembers(campaigns, inspect.isfunction)
    marks = [m for name, test in tests if name.startswith(KILLED.get(policy, "-")) for m in test.pytestmark]  # type: ignore[attr-defined]
    found = set[str]()
    for names, rows in (mark.args for mark in marks if "optimizer" in mark.args[0]):
        # `pytest.param` keeps what it is given in `values`; a single argument may stand alone.
        given = [getattr(row, "values", row if isinstance(row, tuple) else (row,)) for row in rows]
        found |= {values[0 if names == "optimizer" else names.index("optimizer")] for values in given}
    assert found or policy not in KILLED
    return found | TABLED.keys()


def answer(name: str, policy: str) -> str:
    """What a policy does with an optimizer."""
    cls = POLICIES[policy]
    try:
        StateSchema.of(made(name), in_parts=cls.cuts, mixed=not cls.exact)
    except UnsupportedOptimizer as error:
        (reason,) = [words for pattern, words in REASONS.items() if re.search(pattern, str(error))]
        return f"no: {reason}"
    if not cls.exact:
        return "yes, not exact"
    return "exact" if name in killed(policy) else "yes"


def reach(name: str) -> Coupling:
    """The coupling by which parts are cut, or that copies show where none are."""
    try:
        return StateSchema.of(made(name), in_parts=True).reach.coupling
    except UnsupportedOptimizer:
        return coupling_of(made(name)).coupling


def table(names: Collection[str]) -> str:
    rows = defaultdict[tuple[str, ...], list[str]](list)
    for name in names:
        cls = type(made(name))
        package = cls.__module__.partition(".")[0]
        called = OWN[cls.__qualname__] if package == "campaign" else cls.__qualname__
        called += "" if package in {"torch", "campaign"} else f" of {package}"
        if called in chain.from_iterable(rows.values()):
            continue  # the same class with other options
        answers = {policy: answer(name, policy) for policy in POLICIES}
        assert all(answers[policy] == "exact" for policy in KILLED if name in killed(policy) - TABLED.keys()), name
        rows[(WORDS[reach(name)], *answers.values())].append(called)
    order = list(WORDS.values())
    lines = [["an element's update depends on", "class", *POLICIES], ["---"] * (2 + len(POLICIES))]
    for (words, *cells), classes in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        lines.append([words, ", ".join(classes), *cells])
    return "\n".join(f"    | {' | '.join(line)} |" for line in lines)


def test_the_page_says_what_each_policy_does_with_each_class() -> None:
    """A row that nobody runs, or another answer, shows here."""
    everywhere = [name for name in OTHERS if type(made(name)).__module__.startswith(INSTALLED)]
    text, wanted = PAGE.read_text(encoding="utf-8"), table([*TABLED, *everywhere])
    begin = text.index(BEGIN)
    end = text.index(END, begin)
    if os.environ.get("MOE_CKPT_WRITE_DOCS"):
        PAGE.write_text(text[:begin] + wanted + text[end:], encoding="utf-8")
        return
    assert text[begin:end] == wanted, "write the table with MOE_CKPT_WRITE_DOCS=1"


CLASSES = {name: cls for name, cls in vars(torch.optim).items() if inspect.isclass(cls) and cls is not Optimizer}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("option", ["foreach", "fused", "maximize", "capturable", "differentiable"])
def test_every_option_of_every_class_of_torch_is_taken_or_refused_by_name(name: str, option: str) -> None:
    """The first three change no state's layout and no coupling; the last two are refused by every policy, since nothing proves them here."""
    cls: Any = CLASSES[name]
    if option not in inspect.signature(cls).parameters:
        pytest.skip("the class has no such option")
    shapes = [(6, 5)] * 2 if name == "Muon" else [(3, 4, 5), (6, 5), (7,)]
    plain = cls([nn.Parameter(torch.ones(shape)) for shape in shapes])
    try:
        optimizer = cls([nn.Parameter(torch.ones(shape)) for shape in shapes], **{option: True})
    except RuntimeError as error:
        pytest.skip(str(error))
    if option in _REFUSED_OPTIONS:
        for in_parts in (False, True):
            with pytest.raises(UnsupportedOptimizer, match=f"`{name}`, group 0, .*`{option}=True`"):
                StateSchema.of(optimizer, in_parts=in_parts)
        return
    schemas = [StateSchema.of(each) for each in (plain, optimizer)]
    layouts = [[s.entries(p) for g in s.optimizer.param_groups for p in g["params"]] for s in schemas]
    assert layouts[0] == layouts[1]
    if name not in {"LBFGS", "SparseAdam"}:
        assert coupling_of(optimizer).coupling == coupling_of(plain).coupling
