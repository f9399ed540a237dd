"""Model checks of the schedule: nothing is held twice, and the sweep always comes to its end."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstore.schedule import Place, SweepSchedule


@dataclass(kw_only=True)
class Sweep:
    """A schedule, and an account of its own of who holds what; every event is checked."""

    order: list[int]
    slots: int
    read_sets: int
    write_sets: int
    reads: bool = True
    writes: bool = True
    taken: list[int] = field(default_factory=list)
    visited: list[int] = field(default_factory=list)
    slot_of: dict[int, int] = field(default_factory=dict)
    reading: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    holding: list[int] = field(default_factory=list)
    settling: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedule = SweepSchedule(
            self.order,
            slots=self.slots,
            read_sets=self.read_sets,
            write_sets=self.write_sets,
            reads=self.reads,
            writes=self.writes,
        )

    # What the stream does, and what comes back from I/O threads.

    def take_up(self) -> Place | None:
        place = self.schedule.next_read()
        if place is None:
            return None
        if place.slot not in range(self.slots):
            raise AssertionError(f"there is no slot {place.slot}")
        if place.slot in self.slot_of.values():
            raise AssertionError(f"slot {place.slot} is held twice: {self.slot_of}, {place}")
        if place.tile != self.order[len(self.taken)]:
            raise AssertionError(f"tile {place.tile} is out of order")
        self.taken.append(place.tile)
        self.slot_of[place.tile] = place.slot
        (self.reading if self.reads else self.ready).append(place.tile)
        if len(self.reading) > self.read_sets:
            raise AssertionError(f"{self.read_sets} read sets carry tiles {self.reading}")
        return place

    def arrive(self, tile: int) -> None:
        self.reading.remove(tile)
        self.ready.append(tile)
        self.schedule.arrived(tile)

    def visit(self) -> Place | None:
        place = self.schedule.next_visit()
        if place is None:
            return None
        if place.tile not in self.ready:
            raise AssertionError(f"tile {place.tile} has not arrived, or was visited before")
        if place.slot != self.slot_of[place.tile]:
            raise AssertionError(f"tile {place.tile} is not in slot {place.slot}")
        self.ready.remove(place.tile)
        self.visited.append(place.tile)
        self.holding.append(place.tile)
        if self.writes:
            self.settling.append(place.tile)
        if len(self.settling) > self.write_sets:
            raise AssertionError(f"{self.write_sets} write sets carry tiles {self.settling}")
        return place

    def release(self, tile: int) -> None:
        self.holding.remove(tile)
        del self.slot_of[tile]
        self.schedule.released(tile)

    def settle(self, tile: int) -> None:
        self.settling.remove(tile)
        self.schedule.settled(tile)

    # What must hold between events.

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do, by this account."""
        return len(self.visited) == len(self.order) and not (self.holding or self.settling)

    def check(self) -> None:
        if self.schedule.done != self.ended:
            raise AssertionError(f"done is {self.schedule.done}: {self}")
        if self.schedule.waits_for_reads != (bool(self.reading) and not self.ready):
            raise AssertionError(f"waits_for_reads is {self.schedule.waits_for_reads}: {self}")
        if self.ended and sorted(self.visited) != sorted(self.order):
            raise AssertionError(f"not every tile was visited once: {self.visited}")

    def can_take_up(self) -> bool:
        return copy.deepcopy(self.schedule).next_read() is not None

    def can_visit(self) -> bool:
        return copy.deepcopy(self.schedule).next_visit() is not None

    def outstanding(self) -> Iterator[tuple[Callable[[Sweep, int], None], int]]:
        """Everything that can come back by itself."""
        for tile in self.reading:
            yield Sweep.arrive, tile
        for tile in self.holding:
            yield Sweep.release, tile
        for tile in self.settling:
            yield Sweep.settle, tile

    def check_progress(self) -> None:
        if self.ended or self.can_take_up() or self.can_visit() or any(self.outstanding()):
            return
        raise AssertionError(f"deadlock: {self}")

    def check_no_resource_idles(self) -> None:
        """What is free is handed out: the sweep overlaps as far as its quotas allow."""
        could_take_up = (
            len(self.taken) < len(self.order)
            and len(self.slot_of) < self.slots
            and not (self.reads and len(self.reading) == self.read_sets)
        )
        could_visit = bool(self.ready) and not (
            self.writes and len(self.settling) == self.write_sets
        )
        if (self.can_take_up(), self.can_visit()) != (could_take_up, could_visit):
            raise AssertionError(f"something is free and not handed out, or the reverse: {self}")


# ------------------------------------------------------------------------------------ random orders


class ScheduleMachine(RuleBasedStateMachine):
    """Any interleaving of the stream and of transfers that come back in any order."""

    slots = 1
    reads = writes = True

    def __init__(self) -> None:
        super().__init__()
        self.sweep = Sweep(order=[], slots=1, read_sets=1, write_sets=1)

    @precondition(lambda self: self.sweep.ended)
    @rule(
        order=st.integers(1, 8).flatmap(lambda n: st.permutations(range(n))),
        read_sets=st.integers(1, 3),
        write_sets=st.integers(1, 3),
    )
    def start(self, order: list[int], read_sets: int, write_sets: int) -> None:
        self.sweep = Sweep(
            order=order,
            slots=self.slots,
            read_sets=read_sets,
            write_sets=write_sets,
            reads=self.reads,
            writes=self.writes,
        )

    @precondition(lambda self: not self.sweep.ended)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        sweep = self.sweep
        moves: list[tuple[Any, ...]] = list(sweep.outstanding())
        moves += [(Sweep.take_up,)] * sweep.can_take_up() + [(Sweep.visit,)] * sweep.can_visit()
        event, *tile = data.draw(st.sampled_from(moves))
        event(sweep, *tile)

    @invariant()
    def is_sound(self) -> None:
        self.sweep.check()
        self.sweep.check_progress()
        self.sweep.check_no_resource_idles()

    def teardown(self) -> None:
        # From wherever the rules left it, the sweep comes to its end.
        run_to_the_end(self.sweep, lambda choices: choices[0])


def run_to_the_end(
    sweep: Sweep, choose: Callable[[list[tuple[Callable[[Sweep, int], None], int]]], Any]
) -> None:
    """The loop of the stream: start what can be started, then wait for one thing."""
    while not sweep.schedule.done:
        while sweep.take_up() is not None:
            pass
        if sweep.visit() is None:
            sweep.check_progress()
            event, tile = choose(list(sweep.outstanding()))
            event(sweep, tile)
        sweep.check()
    assert sweep.ended
    assert sorted(sweep.visited) == sorted(sweep.order)


MODEL_SETTINGS = settings(max_examples=25, stateful_step_count=40)


def machine(slots: int, *, reads: bool = True, writes: bool = True) -> Any:
    name = f"Slots{slots}{'Reads' * reads}{'Writes' * writes}"
    made: Any = type(name, (ScheduleMachine,), {"slots": slots, "reads": reads, "writes": writes})
    made.TestCase.settings = MODEL_SETTINGS
    return made.TestCase


TestOneSlot = machine(1)
TestTwoSlots = machine(2)
TestThreeSlots = machine(3)
TestReadsOnly = machine(2, writes=False)
TestWritesOnly = machine(2, reads=False)
TestNeither = machine(2, reads=False, writes=False)


@given(
    order=st.integers(0, 40).flatmap(lambda n: st.permutations(range(n))),
    slots=st.integers(1, 5),
    sets=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    ways=st.tuples(st.booleans(), st.booleans()),
    random=st.randoms(use_true_random=False),
)
def test_the_streams_loop_ends_in_whatever_order_transfers_end(
    order: list[int],
    slots: int,
    sets: tuple[int, int],
    ways: tuple[bool, bool],
    random: Any,
) -> None:
    sweep = Sweep(
        order=order,
        slots=slots,
        read_sets=sets[0],
        write_sets=sets[1],
        reads=ways[0],
        writes=ways[1],
    )
    run_to_the_end(sweep, random.choice)
    assert sweep.taken == order


# --------------------------------------------------------------------------------------- all orders


def frozen(value: Any) -> Any:
    """A hashable picture of a state."""
    if isinstance(value, dict):
        return frozenset((key, frozen(child)) for key, child in value.items())
    if isinstance(value, (list, deque)):
        return tuple(frozen(child) for child in value)
    if isinstance(value, set):
        return frozenset(value)
    return value


def picture(sweep: Sweep) -> Any:
    account = (
        # What comes back from I/O threads has no order of its own.
        frozenset(sweep.reading),
        frozenset(sweep.holding),
        frozenset(sweep.settling),
        tuple(sweep.ready),
        frozenset(sweep.visited),
        frozenset(sweep.slot_of.items()),
    )
    return account, frozen(vars(sweep.schedule))


def next_states(sweep: Sweep) -> Iterator[Sweep]:
    """Every state that one event leads to."""
    starts: tuple[Callable[[Sweep], Place | None], ...] = (Sweep.take_up, Sweep.visit)
    for start in starts:
        after = copy.deepcopy(sweep)
        if start(after) is not None:
            yield after
    for event, tile in sweep.outstanding():
        after = copy.deepcopy(sweep)
        event(after, tile)
        yield after


def explore(first: Sweep) -> tuple[list[Sweep], int]:
    """Go breadth first through all interleavings: the states at the end of a path, and depth."""
    seen = {picture(first)}
    level, depth, last = [first], 0, []
    while level:
        following = []
        for sweep in level:
            sweep.check()
            sweep.check_progress()
            sweep.check_no_resource_idles()
            ends = True
            for after in next_states(sweep):
                ends = False
                seen_as = picture(after)
                if seen_as not in seen:
                    seen.add(seen_as)
                    following.append(after)
            if ends:
                last.append(sweep)
        depth += bool(following)
        level = following
    return last, depth


@pytest.mark.parametrize("tiles", [3, 4])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("read_sets", [1, 2])
@pytest.mark.parametrize("write_sets", [1, 2])
def test_no_interleaving_deadlocks(tiles: int, slots: int, read_sets: int, write_sets: int) -> None:
    first = Sweep(order=list(range(tiles)), slots=slots, read_sets=read_sets, write_sets=write_sets)
    last, depth = explore(first)
    # Every path ends, at the end of the sweep and nowhere else: each event moves one tile on, and
    # a tile is moved five times (taken up, arrived, visited, released, settled).
    assert last
    assert all(sweep.ended for sweep in last)
    assert depth == 5 * tiles


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize(
    ("reads", "writes", "events"), [(True, False, 4), (False, True, 4), (False, False, 3)]
)
def test_no_interleaving_deadlocks_one_way(
    slots: int, reads: bool, writes: bool, events: int
) -> None:
    first = Sweep(
        order=[2, 0, 3, 1], slots=slots, read_sets=1, write_sets=1, reads=reads, writes=writes
    )
    last, depth = explore(first)
    assert last
    assert all(sweep.ended for sweep in last)
    assert depth == events * 4


# ------------------------------------------------------------------------------------- single facts


def test_no_tiles_at_all() -> None:
    schedule = SweepSchedule([], slots=1, read_sets=1, write_sets=1)
    assert schedule.done
    assert schedule.next_read() is None
    assert schedule.next_visit() is None


def test_a_slot_is_handed_on_only_after_its_release() -> None:
    schedule = SweepSchedule([5, 7], slots=1, read_sets=2, write_sets=2)
    assert schedule.next_read() == Place(5, 0)
    assert schedule.next_read() is None
    schedule.arrived(5)
    assert schedule.next_visit() == Place(5, 0)
    schedule.settled(5)
    assert schedule.next_read() is None
    schedule.released(5)
    assert schedule.next_read() == Place(7, 0)


def test_a_read_set_is_free_when_its_tile_has_arrived() -> None:
    schedule = SweepSchedule([0, 1], slots=2, read_sets=1, write_sets=1)
    assert schedule.next_read() == Place(0, 0)
    assert schedule.next_read() is None
    schedule.arrived(0)
    assert schedule.next_read() == Place(1, 1)


def test_a_write_set_is_free_when_its_tile_has_settled() -> None:
    schedule = SweepSchedule([0, 1], slots=2, read_sets=2, write_sets=1)
    for tile in (0, 1):
        schedule.next_read()
        schedule.arrived(tile)
    assert schedule.next_visit() == Place(0, 0)
    schedule.released(0)
    assert schedule.next_visit() is None
    schedule.settled(0)
    assert schedule.next_visit() == Place(1, 1)


def test_tiles_are_visited_as_they_arrive() -> None:
    schedule = SweepSchedule([0, 1, 2], slots=3, read_sets=3, write_sets=3)
    for _ in range(3):
        schedule.next_read()
    for tile in (2, 0, 1):
        schedule.arrived(tile)
    assert [schedule.next_visit() for _ in range(3)] == [Place(2, 2), Place(0, 0), Place(1, 1)]


def test_not_done_while_a_write_is_on_its_way() -> None:
    schedule = SweepSchedule([0], slots=1, read_sets=1, write_sets=1)
    schedule.next_read()
    schedule.arrived(0)
    schedule.next_visit()
    schedule.released(0)
    assert not schedule.done
    schedule.settled(0)
    assert schedule.done


@pytest.mark.parametrize("event", ["arrived", "released", "settled"])
def test_what_never_started_can_not_come_back(event: str) -> None:
    schedule = SweepSchedule([0, 1], slots=2, read_sets=2, write_sets=2)
    schedule.next_read()
    with pytest.raises(KeyError):
        getattr(schedule, event)(1)
