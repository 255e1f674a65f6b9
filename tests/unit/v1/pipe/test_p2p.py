"""What one pipeline stage hands over arrives at the next as it was: every kind of value, in order,
with the fewest transfers.
"""

from __future__ import annotations

import math
import random
import time
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.comm.watch import intent
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.messages import wire
from deepspeed.runtime.pipe.messages.channel import Channel, PipelineShapeError
from deepspeed.runtime.pipe.p2p import make_channel_groups
from deepspeed.verify.streams import check_streams
from unit.common import DistributedTest
from unit.v1.looping import each

HOST = torch.device("cpu")


def channels(dynamic: bool, *pairs: tuple[int, int]) -> list[Channel]:
    """One channel per (source, destination)."""
    groups = make_channel_groups(pairs)
    device = torch.device(get_accelerator().current_device_name())
    return [
        Channel(src, dst, tag, group=group, device=device, dynamic=dynamic, name=f"channel {tag}")
        for tag, ((src, dst), group) in enumerate(zip(pairs, groups, strict=True))
    ]


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit, with types, dtypes, shapes and requires_grad."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        facts = [(t.dtype, t.shape, t.requires_grad) for t in (left, right)]
        return facts[0] == facts[1] and left.detach().tolist() == right.detach().tolist()
    return repr(left) == repr(right)


def payloads() -> list[Any]:
    """One value of each kind that stages exchange."""
    generator = torch.Generator().manual_seed(3)
    big = torch.randn(130, 257, generator=generator)
    halves = (torch.float64, torch.bfloat16, torch.float16)
    kinds = [torch.randn(3, 5, generator=generator).to(dtype) for dtype in halves]
    integers = (torch.int64, torch.int32, torch.int16, torch.uint8)
    kinds += [torch.arange(7, dtype=dtype) for dtype in integers]
    apart = (torch.ones(()), [None, torch.ones(1)])
    flags = (torch.ones(2, requires_grad=True), torch.zeros(2, 2, dtype=torch.int64), None, apart)
    return [
        big,
        big.clone().requires_grad_(),
        big.t(),
        big[::2, 1::3],
        torch.tensor([[True, False, True]]),
        torch.tensor(1.5),
        torch.tensor(4),
        torch.empty(0, 5),
        (torch.empty(3, 0, dtype=torch.bool), None),
        torch.complex(big[:2, :2], big[2:4, :2]).conj(),
        tuple(kinds),
        [big, torch.tensor([1, 2]), big.bool(), big.double()],
        flags,
        None,
        (),
        ([], ((),)),
        (True, 1, 1.0, -0.0, math.inf, "text \u00e9", 2**70, False, None),
        tuple(torch.full((n % 3,), float(n), requires_grad=n % 2 == 0) for n in range(40)),
        ("x" * 5000, big),
    ]


class TestValues(DistributedTest):
    world_size = 2

    def test_every_kind_arrives_as_it_was(self) -> None:
        # Kills: dtype or shape lost, bool or empty tensors in the backend's way, description longer
        # than a header, gradient flags.
        (channel,) = channels(True, (0, 1))
        values = payloads()
        if dist.get_rank() == 0:
            for value in values:
                channel.send(value)
        else:
            channel.expect(len(values))
            for index, value in enumerate(values):
                received = channel.recv()
                assert same(received, value), (index, received, value)
        channel.finish()
        assert channel.messages == channel.metadata_messages == len(values)

    def test_static_channels_describe_the_first_message_only(self) -> None:
        # Kills: a description per message, tensors of one message that share memory, more receives
        # posted than messages come.
        (channel,) = channels(False, (0, 1))
        count = 20

        def value(number: int) -> Any:
            flagged = torch.full((4, 3), float(number), requires_grad=True)
            return (flagged, torch.tensor([number]), None, [torch.ones(70, 200)])

        for batch in range(2):
            if dist.get_rank() == 0:
                for number in range(count):
                    channel.send(value(number + batch))
            else:
                channel.expect(count)
                for number in range(count):
                    first, second, nothing, (third,) = received = channel.recv()
                    assert same(received, value(number + batch))
                    assert first.is_leaf and first.grad_fn is None and first._base is None
                    storages = [one.untyped_storage() for one in (first, second, third)]
                    assert len({storage.data_ptr() for storage in storages}) == 3
                    assert nothing is None
            channel.finish()
        assert channel.messages == 2 * count
        assert channel.metadata_messages == 1
        channel.reset()
        if dist.get_rank() == 0:
            channel.send(torch.ones(9))
        else:
            assert same(channel.recv(), torch.ones(9))
        channel.finish()
        assert channel.metadata_messages == 2

    def test_random_shapes_on_a_dynamic_channel(self) -> None:
        (channel,) = channels(True, (0, 1))
        chance = random.Random(5)
        dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]

        def value() -> Any:
            tensors = []
            for _ in range(chance.randrange(4)):
                shape = [chance.randrange(6) for _ in range(chance.randrange(4))]
                if chance.random() < 0.2:
                    shape = [chance.randrange(30, 60), 300]
                tensors.append(torch.full(shape, chance.randrange(100)).to(chance.choice(dtypes)))
            return tensors if chance.random() < 0.5 else tuple(tensors)

        sends = dist.get_rank() == 0
        if not sends:
            channel.expect(200)
        for number in range(200):
            expected = value()
            if sends:
                channel.send(expected)
            else:
                assert same(channel.recv(), expected), number
        channel.finish()
        assert channel.metadata_messages == 200

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_four_channels_in_both_directions_keep_their_order(self, dynamic: bool) -> None:
        # Kills: channels that take each other's messages. All sends come before all receives: a
        # send that waits never ends.
        all_of_them = channels(dynamic, (0, 1), (1, 0), (0, 1), (1, 0))
        rank, count = dist.get_rank(), 30
        for channel in all_of_them:
            if channel.dst == rank:
                channel.expect(count)
        for number in range(count):
            for index, channel in enumerate(all_of_them):
                if channel.src == rank:
                    channel.send((torch.full((50, 50), float(number)), torch.tensor(index)))
        for channel in reversed(all_of_them):
            for number in range(count if channel.dst == rank else 0):
                body, index = channel.recv()
                assert bool((body == number).all()) and int(index) == all_of_them.index(channel)
        for channel in all_of_them:
            channel.finish()

    def test_gradients_travel_without_description(self) -> None:
        # Kills: a description on the way back; `expect_like` that posts what `recv_like` doesn't
        # take.
        (channel,) = channels(True, (0, 1))
        shapes = [[(3, 4), (2,)], [(100, 200)], [], [(0, 3), (5,)]]
        for announced in (False, True):
            messages = [
                [torch.full(shape, float(index)) for shape in group]
                for index, group in enumerate(shapes)
            ]
            likes = [[torch.empty_like(one, device="meta") for one in some] for some in messages]
            if dist.get_rank() == 0:
                for message in messages:
                    channel.send_like(message)
            else:
                for like in likes if announced else ():
                    channel.expect_like(like)
                for message, like in zip(messages, likes, strict=True):
                    assert same(channel.recv_like(like), tuple(message))
            channel.finish()
        assert channel.metadata_messages == 0

    def test_another_shape_on_a_static_channel_is_refused(self) -> None:
        # Kills: bytes of one shape taken for another; one error test per thing that must not
        # change.
        (channel,) = channels(False, (0, 1))
        first = (torch.ones(2, 3), torch.tensor([1]), 5)
        ones, one = first[:2]
        others = [
            (torch.ones(3, 2), one, 5),
            (ones.half(), one, 5),
            (torch.ones(2, 3, requires_grad=True), one, 5),
            (ones, one, 6),
            (ones, one, True),
            (ones, one),
            [ones, one, 5],
        ]
        if dist.get_rank() == 1:
            channel.expect(2)
            assert same(channel.recv(), first) and same(channel.recv(), first)
            return
        channel.send(first)
        for other in others:
            with pytest.raises(PipelineShapeError) as caught:
                channel.send(other)
            remedies = ("dynamic_shape=True", "reset_activation_shape")
            for part in ("channel 0", "float32[2, 3]", *remedies):
                assert part in str(caught.value)
        channel.send(first)
        channel.finish()

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_sent_memory_is_let_go_during_the_batch(
        self, dynamic: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a sender that holds every activation until the end of the batch.
        monkeypatch.setattr(f"{Channel.__module__}.HELD_BYTES", 64 * 1024)
        there, back = channels(dynamic, (0, 1), (1, 0))
        alive = []
        for number in range(12):
            if dist.get_rank() == 0:
                tensor = torch.full((20_000,), float(number))
                alive.append(tensor.untyped_storage()._weak_ref())
                there.send(tensor)
                del tensor
                back.recv()
            else:
                assert there.recv()[0] == number
                back.send(None)

        def held() -> int:
            return sum(not torch.UntypedStorage._expired(reference) for reference in alive)

        # The thread that lets go may be late on busy cores. What is held below the limit and the
        # last one stay.
        end = time.monotonic() + 20
        while held() > 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert held() <= 2
        there.finish()
        back.finish()


def exchange(dynamic: bool) -> None:
    """A pipeline's traffic: activations one way, gradients the other, each rank computing on what
    arrives.
    """
    activations, gradients = channels(dynamic, (0, 1), (1, 0))
    device = torch.device(get_accelerator().current_device_name())
    for batch in range(2):
        count, rows = 5, 3 + batch * dynamic
        shape, how = (rows, 70, 60), {"device": device, "requires_grad": True}
        sent = [torch.full(shape, float(number), **how) * 2 for number in range(count)]
        if dist.get_rank() == 0:
            for tensor in sent:
                activations.send((tensor, torch.ones(3, dtype=torch.bool, device=device), None))
                gradients.expect_like([tensor])
            for number, tensor in enumerate(sent):
                (gradient,) = gradients.recv_like([tensor])
                assert bool((gradient == 3.0 + number).all())
        else:
            activations.expect(count)
            for number in range(count):
                received, mask, nothing = activations.recv()
                assert nothing is None and bool(mask.all())
                assert bool((received == 2.0 * number).all())
                (received * 3 + received.detach() * 0).sum().backward()
                gradients.send_like([received.grad + number])
        activations.finish()
        gradients.finish()


class TestWatched(DistributedTest):
    world_size = 2

    @each(dynamic=[False, True], schedule=[0, 1, 2])
    def test_streams_are_ordered(self, dynamic: bool, schedule: int) -> None:
        # Kills: memory read before it has arrived, or reused while it is on its way, on a device.
        with simulate(schedule=schedule), check_streams():
            exchange(dynamic)

    @each(dynamic=[False, True])
    def test_both_sides_agree_on_every_transfer(self, dynamic: bool) -> None:
        # Kills: a transfer that only one side makes, or of another size; a check that takes
        # receives ahead of need for a circle.
        intent.enable(20.0)
        exchange(dynamic)
        intent.disable()


class TestUpstreamFunctions(DistributedTest):
    world_size = 2

    def test_tensors_and_objects(self) -> None:
        places = {"get_stage_id": dist.get_rank, "stage_to_global": lambda stage_id: stage_id}
        p2p.init_process_groups(SimpleNamespace(pipe_parallel_size=2, **places))
        assert p2p.can_send_recv()
        plain = {"a": [1, 2.5, None, "x"], "b": (torch.arange(3), True)}
        for asynchronous in (False, True):
            tensor = torch.arange(5.0)
            if dist.get_rank() == 0:
                p2p.send(tensor, 1, async_op=asynchronous)
            else:
                tensor.zero_()
                p2p.recv(tensor, 0, async_op=asynchronous)
            p2p.wait()
            assert tensor.tolist() == [0, 1, 2, 3, 4]
        if dist.get_rank() == 0:
            with pytest.raises(TypeError, match="plain data"):
                p2p.send_obj(Decimal(1), 1)
            p2p.send_obj(plain, 1)
            with pytest.raises(ValueError, match="only neighbours"):
                p2p.send(torch.ones(1), 0)
        else:
            received = p2p.recv_obj(0)
            assert received["a"] == plain["a"] and received["b"][1] is True
            assert received["b"][0].tolist() == [0, 1, 2]


class TestOneRank(DistributedTest):
    world_size = 1

    def test_a_rank_sends_to_itself(self) -> None:
        (channel,) = channels(False, (0, 0))
        sent = (torch.ones(2, 2, requires_grad=True) * 3, torch.tensor([True]), None, 7)
        channel.expect(2)
        channel.send(sent)
        channel.send(sent)
        for _ in range(2):
            received = channel.recv()
            assert same(received, sent)
            assert received[0].is_leaf and received[0].data_ptr() != sent[0].data_ptr()
        (gradients,) = channels(False, (0, 0))
        gradients.send_like([torch.ones(2)])
        assert same(gradients.recv_like([torch.ones(2)]), (torch.ones(2),))
        with pytest.raises(RuntimeError, match="before it has sent"):
            channel.recv()

    def test_what_cannot_be_sent_is_refused_by_name(self) -> None:
        (channel,) = channels(False, (0, 0))
        for value in ({"a": torch.ones(1)}, torch.Size([1]), 1j, b""):
            with pytest.raises(TypeError, match=type(value).__name__):
                channel.send((torch.ones(1), value))
        with pytest.raises(TypeError, match="sparse"):
            channel.send(torch.ones(2, 2).to_sparse())


def test_large_tensors_are_not_copied() -> None:
    specs = wire.specs_of([torch.empty(100, 200), torch.empty(3), torch.empty(4)])
    tensors = [torch.ones(100, 200), torch.ones(3), torch.ones(4)]
    large, shared = wire.layout_of(specs).pieces(tensors, HOST)
    assert large.data_ptr() == tensors[0].data_ptr()
    assert shared.numel() == 32
