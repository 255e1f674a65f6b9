# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from types import SimpleNamespace

import pytest
import torch

from deepspeed.runtime.pipe.engine import PipelineEngine


def allocate(stage, shape, dtype):
    return PipelineEngine._allocate_or_extend_buffers(stage, 0, shape, dtype)


class TestPipeRecvDtype:

    @pytest.mark.parametrize("first", [torch.int64, torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("second", [torch.bool, torch.bfloat16, torch.float32], ids=str)
    def test(self, first, second):

        def allocate_buffer(shape, num_buffers=-1, **kwargs):
            return [torch.zeros(shape, **kwargs) for _ in range(num_buffers)]

        stage = SimpleNamespace(_grad_layer_buf=[], _allocate_buffer=allocate_buffer)
        assert allocate(stage, [4, 3], first).dtype == first
        # It has room, and may have another type.
        buffer = allocate(stage, [2, 3], second)
        assert buffer.dtype == second
        assert list(buffer.shape) == [2, 3]
        # The same type again takes no new memory.
        assert allocate(stage, [2, 3], second).data_ptr() == buffer.data_ptr()
