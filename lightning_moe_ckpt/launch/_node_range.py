"""Nodes that come and go: `--nnodes MIN:MAX`.

Torch's rendezvous completes a round when MAX nodes are there, or `last_call_timeout` seconds after the MIN-th has come. A later
node waits in a list. Torch's agents see it within a tenth of a second and start all ranks anew, again for each such node. Here
the first node's supervisor looks, and lets nodes in at most every so often, because all ranks stop and load for it. A round
also completes early with all nodes of the round before and those in the list: only a lost node is waited for.

A node without signs of life for `keep_alive_interval` times `keep_alive_max_attempt` seconds is no part of the round any more.
If alive, that node may be left out of the next round: two jobs for one run. Each node looks for that too, and joins again.

Source: torch 2.13 `torch/distributed/elastic/rendezvous/dynamic_rendezvous.py`.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

_PAST = datetime.min.replace(tzinfo=timezone.utc)


class NodeRange:
    """A node's view of meetings, by torch's rendezvous, which answers otherwise from then on; without effect on a fixed number of
    nodes.

    Starts of all ranks with more nodes are `grow_seconds` apart, or more.
    """

    def __init__(self, handler: object, grow_seconds: float) -> None:
        self.gone = ""
        """Node for whose return this node waits; empty without one."""
        self.grown = 0
        """Number of rounds begun for other nodes, and not for a failure."""
        dynamic: Any = handler if isinstance(handler, DynamicRendezvousHandler) else None
        self.varies: bool = dynamic is not None and dynamic.settings.min_nodes < dynamic.settings.max_nodes
        self._grow_seconds, self._grows_at = grow_seconds, float("inf")
        self._round: int | None = None
        """Number of the last round with this node; None before the first."""
        if self.varies:
            self._settings, self._node = dynamic.settings, dynamic._this_node  # noqa: SLF001  # torch has no public way
            self._holder, self._expected = dynamic._state_holder, self._settings.max_nodes  # noqa: SLF001  # as above
            self._sync, self._holder.sync = self._holder.sync, self._sync_and_complete
            self._num_waiting, dynamic.num_nodes_waiting = dynamic.num_nodes_waiting, lambda: 0

    def expect(self, before: int | None) -> None:
        """Let the next round complete early, with as many nodes as the one before (None without one) and those that wait."""
        if self.varies and before is not None:
            # A waiting node may take the place of the lost one.
            self._expected = before + max(0, self._num_waiting() - bool(self.gone))

    def met(self, before: int | None, nodes: int, ranks: int) -> str:
        """Note that a round begins, and return a sentence about its nodes and ranks if these are others than before."""
        self.gone, self._grows_at = "", time.monotonic() + self._grow_seconds
        if not self.varies:
            return ""
        self._round, most = self._holder.state.round, self._settings.max_nodes
        changed = nodes != (before or most)
        return f"going on with {nodes} of {most} nodes, {ranks} rank{'s' * (ranks > 1)}" if changed else ""

    def look(self, *, lets_in: bool) -> str:
        """Return why all ranks should be started anew, empty if they should not; `lets_in`: this node may let more nodes in."""
        if not self.varies:
            return ""
        waiting, state = self._num_waiting(), self._holder.state
        if state.participants and self._node not in state.participants and state.round != self._round:
            return "other nodes have met without this one"
        waiting = min(waiting, self._settings.max_nodes - len(state.participants))
        if waiting <= 0 or not lets_in or time.monotonic() < self._grows_at:
            return ""
        self._grows_at = float("inf")
        return f"{waiting} node{'s have' if waiting > 1 else ' has'} come, and SIGTERM stops ranks at their next step"

    def after_loss(self, nodes: int) -> str:
        """Return when ranks are started anew after the loss of one of `nodes` nodes, as the end of a sentence."""
        if not (self.varies and self.gone):
            return ""
        settings, left = self._settings, f"{nodes - 1} of {self._settings.max_nodes} nodes"
        if nodes > settings.min_nodes:
            return f" with {left}, in {settings.timeout.last_call.total_seconds():g} s unless it returns"
        return f" when it returns: {left} left, and `--nnodes` asks for {settings.min_nodes}"

    def standing(self) -> str:
        """Return the nodes of a meeting under way, as the end of a sentence."""
        if not self.varies:
            return ""
        state, settings = self._holder.state, self._settings
        if state.complete and self._round is not None:
            return ": not all have left the last round"
        here, then = f": {len(state.participants)} of {settings.max_nodes} nodes here", "which let others in later"
        if not state.complete:
            seconds = (state.deadline - datetime.now(timezone.utc)).total_seconds() if state.deadline else None
            goes_on = "" if seconds is None else f"going on with these in {max(0.0, seconds):.0f} s"
            then = goes_on or f"and `--nnodes` asks for {settings.min_nodes}"
        return f"{here}, {then}"

    def _sync_and_complete(self) -> bool | None:
        changed: bool | None = self._sync()
        state = self._holder.state
        if state.deadline is not None and len(state.participants) >= self._expected:
            state.deadline = _PAST
        return changed
