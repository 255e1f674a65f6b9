# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from unit.common import DistributedTest

waits = []


class NamedStream:

    def __init__(self, name="reduction"):
        self.name = name

    def wait_stream(self, stream):
        waits.append((self.name, stream.name))


class StreamedHost(CPU_Accelerator):
    current = NamedStream("construction")
    default = NamedStream("default")
    Stream = NamedStream

    def is_synchronized_device(self):
        return False

    def resolves_data_dependency(self):
        return False

    def use_host_timers(self):
        return True

    def current_stream(self, device_index=None):
        return self.current

    def default_stream(self, device_index=None):
        return self.default

    @contextmanager
    def stream(self, stream):
        outer, self.current = self.current, stream
        yield
        self.current = outer


class TestHookStream(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("stage", [1, 2])
    def test(self, stage):
        host = StreamedHost()
        before = get_accelerator()
        set_accelerator(host)
        try:
            with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
                self._train(host, stage)
        finally:
            set_accelerator(before)

    def _train(self, host, stage):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": stage,
                    "overlap_comm": True,
                    "reduce_bucket_size": 80,
                },
            },
        )
        loss = engine(torch.ones(1, 8)).sum()
        host.current = NamedStream("hook")
        waits.clear()
        engine.backward(loss)
        assert ("reduction", "hook") in waits
        assert not {"default", "construction"} & {waited for waiter, waited in waits if waiter == "reduction"}
