"""Extra capacity for experts in debt after a restore, and its donors.

An expert in debt gets a part more than its share until it has processed as many tokens beyond that share as were lost.
The extra is taken from experts that do not fill their shares, so a step costs the same. Donors keep their largest use
so far, which fades slowly: the next step may need it again.

Source: MOETION (2024), Sec. 6; we differ in paying a debt only with tokens that an expert would not have processed
without more capacity (ordinary tokens would pay it in a few steps), and in a bound on a debt's age.

Shape suffix: E experts of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_moe_ckpt.errors import Corrupt

USE_DECAY = 0.99
"""Part of the largest use that counts a step later: half after 69 steps."""

WATCHED_STEPS = 10
"""Steps that experts are watched before giving anything."""


@dataclass(frozen=True, slots=True)
class TokenDeficits:
    """Token deficits of one layer; entries by global expert index."""

    lost: tuple[int, ...]
    """Tokens lost over all faults, from the ledger."""
    repaid: tuple[int, ...]
    """Tokens processed beyond the capacity without boost."""
    expired: tuple[int, ...]
    """Tokens not made up for in time."""

    @classmethod
    def none(cls, num_experts: int) -> TokenDeficits:
        """Return the deficits of experts that have lost nothing."""
        return cls((0,) * num_experts, (0,) * num_experts, (0,) * num_experts)

    @property
    def open(self) -> tuple[int, ...]:
        """Tokens still to make up for."""
        return tuple(max(a - b - c, 0) for a, b, c in zip(self.lost, self.repaid, self.expired, strict=True))

    @property
    def any(self) -> bool:
        """Whether some expert is in debt."""
        return any(self.open)

    def with_lost(self, lost_E: Sequence[int]) -> TokenDeficits:
        """Return the deficits with the ledger's present numbers; repaid tokens stay repaid."""
        return replace(self, lost=tuple(lost_E))

    def repay(self, extra_E: Sequence[int]) -> TokenDeficits:
        """Return the deficits once experts in debt have processed `extra_E` more tokens; other experts owe nothing."""
        paid = (a + b if owed else a for a, b, owed in zip(self.repaid, extra_E, self.open, strict=True))
        return replace(self, repaid=tuple(paid))

    def expire(self) -> TokenDeficits:
        """Return the deficits with all open tokens given up."""
        return replace(self, expired=tuple(a + b for a, b in zip(self.expired, self.open, strict=True)))

    def to_state(self) -> dict[str, list[int]]:
        """Return plain values."""
        return {"lost": list(self.lost), "repaid": list(self.repaid), "expired": list(self.expired)}

    @classmethod
    def from_state(cls, state: Any) -> TokenDeficits:
        """Read what `to_state` wrote. Raises `Corrupt`."""
        try:
            lost, repaid = (tuple(map(int, state[name])) for name in ("lost", "repaid"))
            found = cls(lost, repaid, tuple(map(int, state.get("expired", [0] * len(lost)))))
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"The state of a capacity boost cannot be read: {error}.") from error
        if not len(found.lost) == len(found.repaid) == len(found.expired):
            raise Corrupt("The state of a capacity boost has debts of other experts than repayments.")
        return found


def faded_use(use_E: Sequence[float], now_E: Sequence[float]) -> list[float]:
    """Return each expert's largest use so far, with older uses fading; `now_E` is a step's use."""
    return [max(USE_DECAY * before, now) for before, now in zip(use_E, now_E, strict=True)]


def boost_factors(
    debt_E: Sequence[int], boost: float, *, use_E: Sequence[float] | None = None, room_E: Sequence[int] | None = None
) -> list[float]:
    """Return the factor of each expert's capacity.

    Args:
        debt_E: tokens to make up for.
        boost: extra capacity of an expert in debt, 0.1 for a tenth.
        use_E: largest used part of each expert's capacity without boost, on any rank; `None` before it is known, when
            nobody gives.
        room_E: tokens that each expert could have processed in the last step at that capacity.

    Returns:
        `1 + boost` for experts in debt; for others 1 less their gift: a part of their unused capacity, so that no
        expert drops a token unless its use grows.
    """
    factors = [1 + boost if debt else 1.0 for debt in debt_E]
    if use_E is None or room_E is None:
        return factors
    wanted = boost * sum(room for room, debt in zip(room_E, debt_E, strict=True) if debt)
    unused = [0.0 if debt else max(1.0 - u, 0.0) * r for r, u, debt in zip(room_E, use_E, debt_E, strict=True)]
    part = min(1.0, wanted / sum(unused)) if sum(unused) else 0.0
    # An expert without tokens keeps a part: no library takes a capacity of zero.
    return [f - min(part * u / r, 0.5) if u else f for f, u, r in zip(factors, unused, room_E, strict=True)]
