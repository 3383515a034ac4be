"""Rings: batches pass from owner to owner whole, once and in order; nobody waits for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch

from myxtts.pipeline.ring import Ring, RingClosed, Slot, State

CPU = torch.device("cpu")
WIDTH = 512
"""Numbers in a batch: enough that a copy can be interrupted."""

StampRing = Ring[np.ndarray, int]


def make_ring(depth: int, name: str = "test") -> StampRing:
    return Ring(name, [np.full(WIDTH, -1, np.int64) for _ in range(depth)], CPU)


def pause(dice: random.Random) -> None:
    """Sometimes long, mostly short, often none: what makes threads meet in every order."""
    chance = dice.random()
    if chance < 0.02:
        time.sleep(0.002)
    elif chance < 0.3:
        time.sleep(0)


def fill(ring: StampRing, count: int, seed: int) -> None:
    """A producer, one of several: claims a place, fills its slot with the number of the batch, hands it over."""
    dice = random.Random(seed)
    while (number := ring.next_number()) < count:
        slot = ring.acquire(number)
        assert slot.number == number
        pause(dice)
        for at in range(0, WIDTH, 128):  # in pieces: whoever reads too early finds two batches in one
            slot.content[at : at + 128] = number
        ring.commit(slot, number)
    ring.finish(count)


def move(source: StampRing, target: StampRing, seed: int) -> None:
    """A worker: copies what it takes from one ring to the next."""
    dice = random.Random(seed)
    while (slot := source.take()) is not None:
        to = target.acquire()
        pause(dice)
        to.content[:] = slot.content
        target.commit(to, slot.read_ticket())
        source.release(slot)
    target.finish(source.num_taken)


def stamps(ring: StampRing, seed: int) -> Iterator[tuple[int, int, int]]:
    """What a reader finds: the ticket, and the least and the greatest number in the batch."""
    dice = random.Random(seed)
    while (slot := ring.take()) is not None:
        assert slot.state is State.LEASED
        before = int(slot.content.min())
        pause(dice)
        yield slot.read_ticket(), before, int(slot.content.max())
        slot.content[:] = -2  # whoever reads after the release shows
        ring.release(slot)


@pytest.mark.parametrize(
    ("depths", "num_producers", "count"),
    [((3, 2, 3), 3, 4000), ((1, 1, 1), 1, 1500), ((1, 4, 2), 2, 1500), ((8, 2, 3), 5, 3000)],
)
def test_stamped_batches_arrive_whole_once_and_in_order(
    depths: tuple[int, ...], num_producers: int, count: int
) -> None:
    rings = [make_ring(depth) for depth in depths]
    with ThreadPoolExecutor(num_producers + len(rings)) as pool:
        works = [pool.submit(fill, rings[0], count, seed) for seed in range(num_producers)]
        works += [pool.submit(move, *pair, 50 + at) for at, pair in enumerate(pairwise(rings))]
        found = list(stamps(rings[-1], 99))
        for work in works:
            work.result(timeout=10)
    assert found == [(number, number, number) for number in range(count)]
    assert all(slot.state is State.FREE for ring in rings for slot in ring.slots)
    assert {ring.num_taken for ring in rings} == {count}


def test_batches_are_taken_in_order_however_they_are_committed() -> None:
    ring = make_ring(3)
    slots = [ring.acquire(ring.next_number()) for _ in range(3)]
    for slot in (slots[2], slots[0], slots[1]):
        ring.commit(slot, slot.number)
    assert [ring.take().read_ticket() for _ in range(3)] == [0, 1, 2]


def test_memory_is_used_again_and_never_added() -> None:
    ring = make_ring(2)
    memory = [slot.content for slot in ring.slots]
    for number in range(7):
        slot = committed(ring, number)
        assert slot.content is memory[number % 2]
        assert ring.take() is slot
        ring.release(slot)
    with pytest.raises(ValueError, match="ring empty needs at least one slot"):
        Ring("empty", [], CPU)


def in_thread(work: Callable[[], object]) -> Future[object]:
    """Start something that will wait, and give it the time to do so."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    time.sleep(0.02)
    return future


def committed(ring: StampRing, ticket: int = 0) -> Slot[np.ndarray, int]:
    slot = ring.acquire()
    ring.commit(slot, ticket)
    return slot


def test_a_full_ring_holds_its_producer_until_a_slot_is_released() -> None:
    ring = make_ring(2)
    committed(ring)
    committed(ring)
    waiting = in_thread(ring.acquire)
    taken = ring.take()
    time.sleep(0.02)
    assert not waiting.done()  # taken is not given back
    ring.release(taken)
    assert waiting.result(timeout=5) is taken
    assert taken.number == 2


def test_after_finish_the_rest_is_delivered_and_then_none() -> None:
    ring, empty = make_ring(3), make_ring(3)
    slots = [committed(ring, number) for number in range(2)]
    ring.finish(2)
    ring.finish(3)  # another producer that found nothing either: the earliest end counts
    assert [ring.take(), ring.take(), ring.take(), ring.take()] == [*slots, None, None]
    waiting = in_thread(empty.take)
    empty.finish(0)
    assert waiting.result(timeout=5) is None


@pytest.mark.parametrize("cause", [OSError("the disk is gone"), None])
def test_poison_raises_the_first_cause_for_those_who_wait_and_those_who_come_later(cause: OSError | None) -> None:
    full, empty, open_ring = make_ring(1), make_ring(1), make_ring(2)
    committed(full)
    committed(open_ring)
    waiting = [in_thread(full.acquire), in_thread(full.acquire), in_thread(empty.take), in_thread(empty.take)]
    poisoned_at = time.perf_counter()
    for ring in (full, empty, open_ring):
        ring.poison(cause)
        ring.poison(OSError("second"))
    late = [in_thread(open_ring.take), in_thread(open_ring.acquire)]  # a ready batch and a free slot are kept
    for waiter in waiting + late:
        with pytest.raises(RingClosed, match="ring test is closed") as caught:
            waiter.result(timeout=5)
        assert caught.value.__cause__ is cause
    assert time.perf_counter() - poisoned_at < 0.5


def test_use_in_the_wrong_state_raises() -> None:
    ring = make_ring(2)
    slot = ring.acquire()

    def refused(use: Callable[..., None], *ticket: int, state: str) -> None:
        with pytest.raises(RuntimeError, match=rf"slot \d of ring test is {state}"):
            use(slot, *ticket)

    refused(ring.release, state="filling, not leased")
    ring.commit(slot, 0)
    refused(ring.commit, 0, state="ready, not filling")
    refused(ring.release, state="ready, not leased")
    assert ring.take() is slot
    refused(ring.commit, 0, state="leased, not filling")
    ring.release(slot)
    refused(ring.release, state="free, not leased")


def test_waits_are_counted_and_measured() -> None:
    ring = make_ring(2)
    committed(ring)
    ring.release(ring.take())
    assert (ring.num_taken, ring.num_waits, ring.waited_s) == (1, 0, 0.0)
    waiting = in_thread(ring.take)
    time.sleep(0.05)
    committed(ring)
    waiting.result(timeout=5)
    assert (ring.num_taken, ring.num_waits) == (2, 1)
    assert 0.05 <= ring.waited_s < 5
    ring.finish(2)
    assert ring.take() is None
    assert (ring.num_taken, ring.num_waits) == (2, 1)  # the end is no starvation


def test_full_means_ready_or_in_use_and_also_that_nothing_more_will_come() -> None:
    ring = make_ring(2)
    assert not ring.is_full
    slot = committed(ring)
    other = ring.acquire()
    assert (ring.is_full, ring.num_ready, ring.num_acquired) == (False, 1, 2)
    ring.commit(other, 1)
    assert (ring.is_full, ring.num_ready) == (True, 2)
    assert ring.take() is slot
    assert (ring.is_full, ring.num_ready) == (True, 1)
    ring.release(slot)
    assert not ring.is_full
    ring.finish(2)
    assert ring.is_full
