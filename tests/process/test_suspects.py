"""Who is wrong, from tables of what ranks made of the same work."""

from __future__ import annotations

import itertools

import pytest

from lightning_moe_ckpt.process import MADE, RECEIVED, Trace, distance, judge, odd_holders

Table = dict[int, dict[int, list[Trace]]]


def made(value: int, *messages: tuple[int, int]) -> Trace:
    return [*([kind, digest] for kind, digest in messages), [MADE, value]]


def ring(replicas: int, wrong: dict[tuple[int, int, int], int]) -> Table:
    """Plays of plain replicas, each role by its owner three times, and twice by the ranks before it, but for what is `wrong`:
    by player, owner and number.
    """
    table: Table = {}
    for player, shift in itertools.product(range(replicas), range(min(replicas, 3))):
        owner = (player + shift) % replicas
        right = 100 + owner
        table.setdefault(player, {})[owner] = [
            made(wrong.get((player, owner, number), right)) for number in range(3 if shift == 0 else 2)
        ]
    return table


def always(player: int, replicas: int) -> dict[tuple[int, int, int], int]:
    """A rank with the same wrong result of each role, whenever it plays it."""
    return {(player, owner, number): 900 + owner for owner in range(replicas) for number in range(3)}


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_equal_plays_name_nobody(replicas: int) -> None:
    """There is no verdict without a difference."""
    verdict = judge(ring(replicas, {}), lambda rank: rank)
    assert (verdict.ranks, verdict.harmless) == ((), "")


@pytest.mark.parametrize(("replicas", "player"), [(3, 0), (3, 2), (4, 1), (5, 4)])
def test_a_sticky_fault_is_out_of_line_with_two_others(replicas: int, player: int) -> None:
    """Three plays of a role say whose is wrong."""
    verdict = judge(ring(replicas, always(player, replicas)), lambda rank: rank)
    assert (verdict.ranks, verdict.sticky) == ((player,), True)


def test_two_replicas_do_not_say_which_is_wrong() -> None:
    """A sticky fault of one of two could be the other's."""
    verdict = judge(ring(2, always(1, 2)), lambda rank: rank)
    assert (verdict.ranks, verdict.sticky) == ((0, 1), True)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("in_own", [True, False])
def test_a_transient_fault_is_named_by_its_own_repetition(replicas: int, in_own: bool) -> None:
    """One play that its own rank does not get again, in the step that counts or in another one's role."""
    owner = 0 if in_own else 1 % replicas
    verdict = judge(ring(replicas, {(0, owner, 0): 900}), lambda rank: rank)
    assert (verdict.ranks, verdict.sticky) == ((0,), False)


def test_results_that_vary_on_one_rank_are_sticky() -> None:
    """Each repetition gives something else."""
    wrong = {(1, 1, number): 900 + number for number in range(3)}
    assert judge(ring(3, wrong), lambda rank: rank)[:2] == ((1,), True)


def test_results_that_vary_on_two_replicas_are_kernels() -> None:
    """Two faults at once are less likely than a kernel that is not deterministic."""
    verdict = judge(ring(3, {(0, 0, 0): 900, (1, 1, 1): 901}), lambda rank: rank)
    assert not verdict.ranks
    assert "not deterministic" in verdict.harmless


@pytest.mark.parametrize(
    ("partings", "named"),
    [({}, True), ({"device": "mm"}, True), ({"code": "mul"}, False), ({"device": "mm", "code": "mul"}, True)],
)
def test_nobody_is_named_for_what_code_called_for(partings: dict[str, str], named: bool) -> None:
    """Of two replicas with different results for each other's roles, which differ in one operation first."""
    verdict = judge(ring(2, always(1, 2)), lambda rank: rank, partings)
    assert bool(verdict.ranks) is named
    assert not named or not verdict.harmless
    assert named or next(iter(partings.values())) in verdict.harmless


def test_where_a_batch_lies_in_memory_is_no_fault() -> None:
    """Its owner gets from the bytes that it sent what the others got from them."""
    table = ring(2, {(1, 0, 0): 900, (1, 0, 1): 900, (0, 0, 2): 900})
    verdict = judge(table, lambda rank: rank)
    assert not verdict.ranks
    assert "lies in memory" in verdict.harmless


def test_who_got_a_wrong_message_is_not_at_fault() -> None:
    """Of two stages the one is named whose own work parted first, though gradients of both differ."""
    right = [made(1, (MADE, 5), (RECEIVED, 6)), made(2, (RECEIVED, 5), (MADE, 6))]
    wrong = [made(8, (MADE, 5), (RECEIVED, 7)), made(9, (RECEIVED, 5), (MADE, 7))]  # the second stage erred in forward
    # Ranks 0 and 1 are replicas of the first stage, 2 and 3 of the second; replica 1, of ranks 1 and 3, erred once.
    table: Table = {
        0: {0: [right[0]] * 3, 1: [right[0]] * 2},
        1: {1: [wrong[0], right[0], right[0]], 0: [right[0]] * 2},
        2: {2: [right[1]] * 3, 3: [right[1]] * 2},
        3: {3: [wrong[1], right[1], right[1]], 2: [right[1]] * 2},
    }
    assert judge(table, lambda rank: rank % 2).ranks == (3,)
    table[1][1], table[3][3] = [wrong[0]] * 3, [wrong[1]] * 3
    assert judge(table, lambda rank: rank % 2).ranks == (2, 3)  # one of two replicas, in the stage that erred


def test_a_state_is_the_majoritys() -> None:
    """Of three the odd one, of two both."""
    assert odd_holders({4: "a", 5: "a", 6: "a"}) == ()
    assert odd_holders({4: "a", 5: "b", 6: "a"}) == (5,)
    assert odd_holders({4: "a", 5: "b"}) == (4, 5)
    assert odd_holders({0: "a", 1: "a", 2: "b", 3: "b"}) == (0, 1, 2, 3)


def test_a_role_is_played_on_another_node_if_there_is_one() -> None:
    """Distances count replicas; the nearest of the best one is taken."""
    assert distance(("a",), 1, 1) == 0
    assert distance(("a", "a", "a"), 3, 1) == 1
    assert distance(("a", "a", "b", "b"), 4, 1) == 2
    assert distance(("a", "a", "b", "b"), 4, 2) == 1  # two ranks share the experts
    assert distance(("a", "b", "a", "b"), 2, 1) == 1  # in two stages
    assert distance((), 4, 1) == 1
