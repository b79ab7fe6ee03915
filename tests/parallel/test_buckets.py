"""Every element has one place, every bucket its size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_moe_ckpt.parallel._pieces import plan_buckets


@given(
    numels=st.lists(st.integers(0, 40), max_size=12),
    bucket_numel=st.integers(0, 50),
    multiple=st.integers(1, 7),
)
def test_slots_tile_the_vector_and_name_their_buckets(numels: list[int], bucket_numel: int, multiple: int) -> None:
    """No gap, no overlap, last registered first; a slot's buckets are exactly those it touches."""
    layout = plan_buckets(
        {f"p{idx}": numel for idx, numel in enumerate(numels)}, bucket_numel=bucket_numel, multiple=multiple
    )
    assert list(layout.slots) == [f"p{idx}" for idx in reversed(range(len(numels)))]
    position = 0
    for name, slot in layout.slots.items():
        assert (slot.start, slot.stop) == (position, position + numels[int(name[1:])])
        position = slot.stop
        for bucket in range(layout.num_buckets):
            start, stop = layout.interval(bucket)
            touches = max(start, slot.start) < min(stop, slot.stop)
            assert touches <= (bucket in slot.buckets)
            assert (bucket in slot.buckets) <= (start <= slot.stop and slot.start <= stop)
    assert position <= layout.numel < position + multiple


@given(numel=st.integers(0, 300), bucket_numel=st.integers(1, 50), multiple=st.integers(1, 7))
def test_buckets_are_equal_multiples_but_for_the_last(numel: int, bucket_numel: int, multiple: int) -> None:
    """A parameter larger than a bucket is cut; every bucket divides among the ranks."""
    layout = plan_buckets({"w": numel}, bucket_numel=bucket_numel, multiple=multiple)
    sizes = [stop - start for start, stop in map(layout.interval, range(layout.num_buckets))]
    assert sum(sizes) == layout.numel
    assert all(size % multiple == 0 and size > 0 for size in sizes)
    assert all(bucket_numel <= size < bucket_numel + multiple for size in sizes[:-1])
