# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from unit.common import DistributedTest

WIDTH = 8
LAYER = WIDTH * WIDTH + WIDTH


class OrderedStream:
    """Knows what it is ordered after: how much of the work of each stream."""

    def __init__(self, *args, **kwargs):
        self.issued = 0
        self.after = {}

    def wait_stream(self, stream):
        for other, count in {**stream.after, stream: stream.issued}.items():
            self.after[other] = max(self.after.get(other, 0), count)

    def wait_event(self, event):
        for other, count in event.after.items():
            self.after[other] = max(self.after.get(other, 0), count)


class OrderedEvent:

    def record(self, stream):
        self.after = {**stream.after, stream: stream.issued}


class StreamedHost(CPU_Accelerator):
    """The host with streams that only keep the books."""

    current = OrderedStream()
    Stream = OrderedStream
    Event = OrderedEvent

    def is_synchronized_device(self):
        return False

    def resolves_data_dependency(self):
        return False

    def use_host_timers(self):
        return True

    def current_stream(self, device_index=None):
        return self.current

    @contextmanager
    def stream(self, stream):
        outer, self.current = self.current, stream
        yield
        self.current = outer


class TestBucketProducerStreams(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        "overlap_comm,bucket_size",
        [(True, 2 * LAYER), (True, LAYER // 2), (False, 2 * LAYER)],
        ids=["overlap", "overlap-large-parameters", "no-overlap"],
    )
    def test(self, overlap_comm, bucket_size):
        host = StreamedHost()
        before = get_accelerator()
        set_accelerator(host)
        try:
            with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
                self._train(host, overlap_comm, bucket_size)
        finally:
            set_accelerator(before)

    def _train(self, host, overlap_comm, bucket_size):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(5)))
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": 2,
                    "overlap_comm": overlap_comm,
                    "reduce_bucket_size": bucket_size,
                    "contiguous_gradients": True,
                },
            },
        )
        optimizer, caller = engine.optimizer, host.current
        streams = [OrderedStream() for _ in range(3)]
        produced, early = {}, []

        def join():
            for stream in streams:
                caller.wait_stream(stream)
            host.current = caller

        def producer(name, stream):

            def hook(grad):
                if not produced:
                    torch.autograd.Variable._execution_engine.queue_callback(join)
                host.current = stream
                stream.issued += 1
                produced[name] = (stream, stream.issued)
                return grad

            return hook

        names = {}
        for index, (name, param) in enumerate(engine.module.named_parameters()):
            names[id(param)] = name
            param.register_hook(producer(name, streams[index % 3]))

        def checked(collective):

            def call(*args, **kwargs):
                for bucket in optimizer.ipg_buckets.values():
                    for group, index, _ in bucket.params:
                        name = names[id(optimizer.bit16_groups[group][index])]
                        stream, count = produced[name]
                        if stream is not host.current and host.current.after.get(stream, 0) < count:
                            early.append(name)
                return collective(*args, **kwargs)

            return call

        with (
                mock.patch.object(dist, "all_reduce", checked(dist.all_reduce)),
                mock.patch.object(dist, "reduce", checked(dist.reduce)),
        ):
            engine.backward(engine(torch.ones(1, WIDTH)).sum())
        assert produced
        assert not early, f"reduced without a wait for the stream of {sorted(set(early))}"
