"""One placement over several devices: every order in which its members can answer, fail and die."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from config.schema import DeviceBudget
from daemon.engines.exchange_memory import ExchangeMemory, exchange_memory
from daemon.engines.groups import Answer, Groups
from engine import protocol
from engine.exchange import Exchange, GroupForm
from engine.memory.group_region import open_region
from engine.protocol import Evicted, EvictModel, LoadDone, LoadFailed, LoadModel, LoadProgress, LoadStreams, SetLease
from loader.shapes.model_shape import Division
from scheduler.node import actions

PLACEMENT = 7
OFFSET = 1 << 20
LEASES = {"cpu:0": 40, "cpu:1": 50, "cpu:2": 60}
AFTER = {device: lease + 5 for device, lease in LEASES.items()}


class Regions:
    """Stands in for the exchange memory and watches what is done to its only region."""

    def __init__(self) -> None:
        self.taken, self.broken, self.num_freed = False, False, 0

    def number(self, device: str) -> int:
        return int(device.rpartition(":")[2])

    def allocate(self, num_bytes: int) -> int:
        assert num_bytes > 0
        assert not self.taken
        self.taken = True
        return OFFSET

    def free(self, offset: int) -> None:
        assert offset == OFFSET
        assert self.taken
        self.taken, self.num_freed = False, self.num_freed + 1

    def break_group(self, offset: int) -> None:
        assert offset == OFFSET
        assert self.taken, "a region that is somebody else's by now"
        self.broken = True


class World:
    """The scheduler and the members of one placement, each of which answers as engines do: an EvictModel always with Evicted,
    though a LoadDone or a LoadFailed may be on its way before it."""

    def __init__(self, num_ranks: int, **of_load: Any) -> None:
        """of_load: what else the scheduler says of the load."""
        self.devices = list(LEASES)[:num_ranks]
        self.regions = Regions()
        self.groups = Groups(self._send, lambda device: LEASES[device] + 1, 16, self.regions, self._tell)
        self.loading = set(self.devices)
        self.loaded: set[str] = set()
        self.evictions = dict.fromkeys(self.devices, 0)
        self.alive = set(self.devices)
        self.holds = set(self.devices)  # those alive whose share is not gone
        self.evict_sent = self.down_told = False
        self.sent: list[tuple[str, protocol.Message]] = []
        self.told: list[Answer] = []
        leader, *others = self.devices
        load = actions.Load(
            cause="c",
            placement_id=PLACEMENT,
            model="m",
            device=leader,
            weights_chunks=3,
            kv_reserved_chunks=2,
            lease_chunks=LEASES[leader],
            further=tuple((device, LEASES[device]) for device in others),
            deadline_s=20.0,
            **of_load,
        )
        message = LoadModel(PLACEMENT, "m", "/m", "float32", "f", 3, 2, LEASES[leader], 64, 4, [1])
        self.groups.load(load, message, GroupForm(Division(len(self.devices))))

    def _send(self, device: str, message: protocol.Message) -> None:
        self.sent.append((device, message))
        if isinstance(message, EvictModel):
            assert self.regions.broken, "a member that leaves would be waited for"
            assert device in self.alive
            self.evictions[device] += 1
            assert self.evictions[device] == 1, "told to leave twice"

    def _tell(self, device: str, answer: Answer) -> None:
        assert device in {"+".join(self.devices), "+".join(one for one in self.devices if one in self.alive), *self.devices}
        if isinstance(answer, LoadProgress):
            return
        assert not any(type(one) is type(answer) for one in self.told), "told twice"
        if isinstance(answer, LoadDone):
            assert self.loaded == set(self.devices) == self.alive
            assert not self.told
            assert not self.evict_sent
        else:
            assert not self.holds, f"told while {self.holds} hold a share"
            assert not self.regions.taken
        if isinstance(answer, LoadFailed):
            assert not self.told
            assert not self.evict_sent
            assert answer.error.endswith(f"(on {device})")
        if isinstance(answer, Evicted):
            assert self.evict_sent
            assert not any(isinstance(one, LoadFailed) for one in self.told)
        self.told.append(answer)

    # ---- what may happen next

    def choices(self) -> list[tuple[str, str]]:
        found = []
        for device in self.devices:
            if device not in self.alive:
                continue
            if device in self.loading:
                found += [("done", device), ("failed", device)]
            if self.evictions[device]:
                found.append(("evicted", device))
            found.append(("dies", device))
        if self.may_evict:
            found.append(("evict", ""))
        return found

    @property
    def may_evict(self) -> bool:
        """Whether the scheduler, as far as it knows, has a placement that it can evict."""
        ended = any(isinstance(one, LoadFailed | Evicted) for one in self.told)
        return bool(self.alive) and not self.evict_sent and not ended

    def do(self, what: str, device: str) -> None:
        match what:
            case "done":
                self.loading.discard(device)
                self.loaded.add(device)
                self.groups.answer(device, LoadDone(PLACEMENT, "m", 1.0, 10))
            case "failed":
                self.loading.discard(device)
                if not self.evictions[device]:
                    self.holds.discard(device)
                self.groups.answer(device, LoadFailed(PLACEMENT, "m", "OSError: no", False))
            case "evicted":
                self.loading.discard(device)
                self.evictions[device] = 0
                self.holds.discard(device)
                self.groups.answer(device, Evicted(PLACEMENT, "m"))
            case "dies":
                self.alive.discard(device)
                self.loading.discard(device)
                self.holds.discard(device)
                self.evictions[device] = 0
                self.groups.engine_ended(device)
                for devices, answer in self.groups.engine_down(device):
                    self._tell(devices, answer)
            case "evict":
                self.evict()

    def evict(self) -> None:
        self.evict_sent = True
        listed = [device for device in self.devices if device in self.alive]
        first, *others = listed
        self.groups.evict(
            actions.Evict(
                cause="c",
                placement_id=PLACEMENT,
                model="m",
                device=first,
                lease_chunks=AFTER[first],
                further=tuple((device, AFTER[device]) for device in others),
            )
        )

    def finish(self) -> None:
        """Lets everybody answer what is open, with the scheduler evicting what nothing has ended, and checks that all is over."""
        while True:
            left = [choice for choice in self.choices() if choice[0] in ("done", "evicted")]
            if left:
                self.do(*left[0])
            elif self.may_evict:
                self.evict()
            else:
                break
        assert not self.regions.taken
        assert self.regions.num_freed == 1
        assert not self.holds
        ends = [one for one in self.told if isinstance(one, LoadFailed | Evicted)]
        assert len(ends) == 1 or (not ends and not self.alive), (self.told, self.alive)
        assert self.evict_sent == any(isinstance(one, Evicted) for one in self.told)
        before = list(self.told)
        for device in self.devices:  # late words about what is over
            for answer in (LoadDone(PLACEMENT, "m", 1.0, 1), LoadFailed(PLACEMENT, "m", "x", False), Evicted(PLACEMENT, "m")):
                assert self.groups.knows(PLACEMENT)
                self.groups.answer(device, answer)
            assert not self.groups.engine_down(device)
        assert self.told == before
        assert self.regions.num_freed == 1


def all_orders(num_ranks: int, depth: int) -> Iterator[list[tuple[str, str]]]:
    """Yields every way in which the first `depth` things can happen."""
    paths: list[list[tuple[str, str]]] = [[]]
    while paths:
        path = paths.pop()
        world = World(num_ranks)
        for choice in path:
            world.do(*choice)
        choices = world.choices() if len(path) < depth else []
        paths += [[*path, choice] for choice in choices]
        if not choices:
            yield path


def test_every_order_of_two_members() -> None:
    num = 0
    for path in all_orders(2, depth=6):
        world = World(2)
        for choice in path:
            world.do(*choice)
        world.finish()
        num += 1
    assert num > 500


@pytest.mark.parametrize("seed", range(3))
def test_random_orders_of_three_members(seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(400):
        world = World(3)
        for _ in range(drawn.randrange(12)):
            choices = world.choices()
            # deaths are rare, or most runs would be about nothing else
            likely = [choice for choice in choices if choice[0] != "dies" or drawn.random() < 0.15]
            if likely:
                world.do(*drawn.choice(likely))
        world.finish()


def test_members_get_their_own_leases_and_ranks() -> None:
    world = World(3)
    loads = [(device, message) for device, message in world.sent if isinstance(message, LoadModel)]
    assert [device for device, _ in loads] == ["cpu:0", "cpu:1", "cpu:2"]
    for rank, (device, message) in enumerate(loads):
        assert message.lease_chunks == LEASES[device]
        assert message.group is not None
        assert (message.group.rank, message.group.members, message.group.region_offset) == (rank, [0, 1, 2], OFFSET)
        assert message.group.region_bytes > 0
    world.do("evict", "")
    assert {d: m.lease_chunks for d, m in world.sent if isinstance(m, EvictModel)} == AFTER


def test_each_member_has_its_part_of_host_memory() -> None:
    world = World(2, source_slots=(4, 5, 6, 7), checksums=(11, 12))
    sent = {device: message for device, message in world.sent if isinstance(message, LoadModel)}
    assert {device: (one.source_slots, one.checksum) for device, one in sent.items()} == {
        "cpu:0": ([4, 5], 11),
        "cpu:1": ([6, 7], 12),
    }
    told: list[tuple[str, Answer]] = []
    world.groups._tell = lambda device, answer: told.append((device, answer))
    world.groups.answer("cpu:1", LoadDone(PLACEMENT, "m", 1.0, 0, kept=True, checksums=[12]))
    world.groups.answer("cpu:0", LoadDone(PLACEMENT, "m", 1.0, 0, kept=True, checksums=[11]))
    assert told == [("cpu:0+cpu:1", LoadDone(PLACEMENT, "m", 1.0, 0, kept=True, checksums=[11, 12]))]


def test_a_bad_share_spoils_the_copy_in_host_memory() -> None:
    told: list[tuple[str, Answer]] = []
    world = World(2, keep_slots=(4, 5))
    assert [one.keep_slots for _, one in world.sent if isinstance(one, LoadModel)] == [[4], [5]]
    world.groups._tell = lambda device, answer: told.append((device, answer))
    world.groups.answer("cpu:0", LoadDone(PLACEMENT, "m", 1.0, 10, kept=True, checksums=[11]))
    world.groups.answer("cpu:1", LoadDone(PLACEMENT, "m", 1.0, 10, source_rejected="checksum"))
    ((_, joint),) = told
    assert isinstance(joint, LoadDone)
    assert (joint.kept, joint.source_rejected) == (False, "checksum (rank 1)")


def test_what_is_told_of_a_load_is_of_all_members() -> None:
    told: list[tuple[str, Answer]] = []
    world = World(2)
    world.groups._tell = lambda device, answer: told.append((device, answer))
    world.groups.answer("cpu:0", LoadProgress(PLACEMENT, 10, 100))
    world.groups.answer("cpu:1", LoadProgress(PLACEMENT, 0, 0))
    world.groups.answer("cpu:1", LoadProgress(PLACEMENT, 30, 90))
    world.groups.answer("cpu:1", LoadStreams(PLACEMENT, "m"))
    world.groups.answer("cpu:1", LoadDone(PLACEMENT, "m", 2.0, 90, kernels_seconds=0.5, map_seconds=0.1))
    world.groups.answer("cpu:0", LoadDone(PLACEMENT, "m", 3.0, 100, kernels_seconds=0.2, map_seconds=0.3, adopted=True))
    assert told == [
        ("cpu:0+cpu:1", LoadProgress(PLACEMENT, 10, 200)),
        ("cpu:0+cpu:1", LoadProgress(PLACEMENT, 0, 0)),
        ("cpu:0+cpu:1", LoadProgress(PLACEMENT, 40, 190)),
        ("cpu:0+cpu:1", LoadDone(PLACEMENT, "m", 3.0, 190, kernels_seconds=0.5, map_seconds=0.3, adopted=True)),
    ]


def test_a_member_that_has_loaded_waits_for_no_kernels() -> None:
    """Each report with bytes_total 0 begins the load's deadline anew, so that a slow member would never miss it."""
    told: list[Answer] = []
    world = World(2)
    world.groups._tell = lambda device, answer: told.append(answer)
    world.groups.answer("cpu:0", LoadProgress(PLACEMENT, 0, 0))
    world.groups.answer("cpu:0", LoadDone(PLACEMENT, "m", 1.0, 50))
    world.groups.answer("cpu:1", LoadProgress(PLACEMENT, 10, 50))
    world.groups.answer("cpu:1", LoadProgress(PLACEMENT, 0, 0))
    assert told == [LoadProgress(PLACEMENT, *of) for of in ((0, 0), (10, 50), (0, 0))]


def test_a_failure_leaves_the_leases_and_names_the_device() -> None:
    world = World(2)
    world.do("failed", "cpu:1")
    (sent,) = [(device, message) for device, message in world.sent if isinstance(message, EvictModel)]
    assert (sent[0], sent[1].lease_chunks) == ("cpu:0", LEASES["cpu:0"] + 1)
    assert world.told == []
    world.do("evicted", "cpu:0")
    assert world.told == [LoadFailed(PLACEMENT, "m", "OSError: no (on cpu:1)", False)]


@pytest.mark.parametrize(
    ("happens", "comes_back"),
    [
        (["done cpu:0", "done cpu:1", "evict"], False),
        (["done cpu:0", "done cpu:1", "dies cpu:1", "evict"], True),
        (["done cpu:0", "failed cpu:1"], True),
        (["done cpu:0", "failed for good"], False),
    ],
)
def test_shares_stay_where_the_model_comes_back(happens: list[str], comes_back: bool) -> None:
    """After a death or a fault it is loaded again soon; whoever evicts it for another reason wants its room."""
    world = World(2)
    for what, _, device in (one.partition(" ") for one in happens):
        if device == "for good":
            world.groups.answer("cpu:1", LoadFailed(PLACEMENT, "m", "CheckpointError: no", permanent=True))
        else:
            world.do(what, device)
    told = [message.comes_back for _, message in world.sent if isinstance(message, EvictModel)]
    assert set(told) == {comes_back}


def test_an_eviction_beside_a_failure_tells_the_new_leases() -> None:
    world = World(2)
    world.do("failed", "cpu:1")
    world.do("evict", "")
    assert world.sent[-2:] == [(device, SetLease(lease_chunks=AFTER[device])) for device in ("cpu:0", "cpu:1")]
    world.do("evicted", "cpu:0")
    assert world.told == [Evicted(PLACEMENT, "m")]


def test_a_death_breaks_the_groups_of_that_device_alone() -> None:
    world = World(2)
    world.groups.engine_ended("cpu:2")
    assert not world.regions.broken
    assert world.groups.models_on("cpu:1") == {"m"}
    world.groups.engine_ended("cpu:1")
    assert world.regions.broken
    assert world.told == []


def test_the_region_of_an_engine_that_does_not_end_is_kept_from_others_until_it_has_ended() -> None:
    told: list[tuple[str, Any]] = []
    world = World(3)
    world.groups._tell = lambda device, answer: told.append((device, answer))
    for device in ("cpu:0", "cpu:1"):
        world.groups.engine_lost(device)
        assert world.regions.broken
        assert world.groups.engine_down(device) == []
    world.groups.evict(actions.Evict(cause="c", placement_id=PLACEMENT, model="m", device="cpu:2", lease_chunks=65))
    world.groups.answer("cpu:2", Evicted(PLACEMENT, "m"))
    assert told == [("cpu:0+cpu:1+cpu:2", Evicted(PLACEMENT, "m"))]
    assert world.regions.taken
    world.groups.engine_ended("cpu:1")
    assert world.regions.taken, "one of them still waits in a driver"
    world.groups.engine_ended("cpu:0")
    assert (world.regions.taken, world.regions.num_freed) == (False, 1)
    world.groups.engine_ended("cpu:0")
    assert world.regions.num_freed == 1


# ---- the memory


def test_regions_do_not_overlap_and_are_empty_again() -> None:
    memory = ExchangeMemory(["cpu:0", "cpu:1"])
    page = 1 << 16
    first, second, third = (memory.allocate(page) for _ in range(3))
    assert first < second < third
    assert min(second - first, third - second) >= page
    seen = Exchange(memory.fd)
    memory.break_group(second)
    assert [seen.is_broken(offset) for offset in (first, second, third)] == [False, True, False]
    memory.free(second)
    assert memory.allocate(2 * page) > third, "there is no room for it between the others"
    assert memory.allocate(page) == second
    assert not seen.is_broken(second)
    with pytest.raises(OSError, match="no room"):
        memory.allocate(1 << 50)
    seen.close()
    memory.close()


@pytest.mark.parametrize("division", [Division(4), Division(4, 2), Division(8, 2, 2), Division(6, num_stages=3)], ids=str)
def test_members_find_all_that_they_share_in_the_region(division: Division) -> None:
    """The daemon sizes it by the model's form, and each engine opens it by its LoadModel."""
    devices = [f"cpu:{number}" for number in range(division.size)]
    memory, sent = ExchangeMemory(devices), list[protocol.Message]()
    groups = Groups(lambda _, message: sent.append(message), lambda _: 0, 16, memory, lambda *_: None)
    leases = tuple((device, 9) for device in devices)
    sizes: dict[str, Any] = {"weights_chunks": 3, "kv_reserved_chunks": 2, "lease_chunks": 9, "deadline_s": 20.0}
    load = actions.Load(cause="c", placement_id=PLACEMENT, model="m", device=devices[0], further=leases[1:], **sizes)
    groups.load(load, LoadModel(PLACEMENT, "m", "/m", "float32", "f", 3, 2, 9, 64, 4, [1]), GroupForm(division, 2, 1024))
    exchange = Exchange(memory.fd)
    for rank, message in enumerate(sent):
        assert isinstance(message, LoadModel)
        region = open_region(exchange, message, 16)
        with region.sharing_reads() as shared:
            assert (region.rank, {view.size for view in shared}) == (rank, {division.stage_size, division.inner_parts} - {1})
    assert len(sent) == division.size
    exchange.close()
    memory.close()


def test_who_gets_an_exchange_memory() -> None:
    def of(*devices: DeviceBudget) -> ExchangeMemory | None:
        return exchange_memory(devices)

    own_part = DeviceBudget("cpu:0/m", 1, model="m")
    gpus = [DeviceBudget(f"cuda:{at}", 1, f"GPU-{at}") for at in range(2)]
    assert of(DeviceBudget("cpu:0", 1), own_part, gpus[0]) is None
    assert of(DeviceBudget("cuda:1/m", 1, "GPU-1", model="m"), gpus[0]) is None
    memory = of(DeviceBudget("cpu:0", 1), own_part, gpus[0], DeviceBudget("cpu:3", 1))
    assert memory is not None
    assert memory.arguments("cuda:0") == memory.arguments("cpu:0/m") == ([], [])
    arguments, passed = memory.arguments("cpu:3")
    assert arguments[:4] == ["--exchange-fd", str(memory.fd), "--engine-number", "1"]
    assert passed == [memory.fd, *memory.doorbells]
    assert len(memory.doorbells) == 2
    memory.close()
    memory = of(gpus[0], DeviceBudget("cpu:0", 1), gpus[1])
    assert memory is not None
    assert [memory.number(gpu.name) for gpu in gpus] == [0, 1]
    assert memory.arguments("cpu:0") == ([], [])
    memory.close()
