"""A made-up source tree: upstream's names, in the shapes that programs look for, not its code."""

import subprocess
from pathlib import Path

FILES = {
    "deepspeed/runtime/zero/stage_1_and_2.py": '''
from dataclasses import dataclass, field

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import (inf, combine_grad_norm_groups,
                                     mask_nan_or_inf_with_val_inplace)


@dataclass
class IPGBucket:
    elements: int = 0
    has_moe_params: bool = False

    def clear(self):
        self.elements = 0


class DeepSpeedZeroOptimizer:

    def reduce_independent_p_g_buckets_and_remove_grads(self, param, i):
        bucket = self.ipg_buckets[param.dtype]
        if self.contiguous_gradients:
            self.fill(bucket, param)

        # One more.
        bucket.elements += param.numel()

    def reduce_ipg_grads(self, comm_dtype=None):
        self.average_tensor(None, comm_dtype)

    def average_tensor(self, tensor, communication_data_type):
        if self.overlap_comm:
            stream = self.reduction_stream
            stream.wait_stream(get_accelerator().default_stream())
        else:
            stream = get_accelerator().default_stream()

        with get_accelerator().stream(stream):
            dist.all_reduce(tensor)

    def complete_grad_norm_calculation_for_cpu_offload(self, params):
        total_norm = sum(params)
        total_dev_norm = float(total_norm)
        dist.all_reduce(total_dev_norm)
        return total_dev_norm

    def get_grad_norm_direct(self, gradients, params, norm_type=2):
        """Something else."""
        if norm_type == inf:
            total_norm = max(gradients)
            dist.all_reduce(total_norm)
            self._model_parallel_all_reduce(tensor=total_norm)
        else:
            total_norm = sum(gradients)
            dist.all_reduce(total_norm)
            self._model_parallel_all_reduce(tensor=total_norm)
            total_norm = total_norm.pow(1. / norm_type)

        mask_nan_or_inf_with_val_inplace(total_norm, device=self.device)

        return total_norm

    def scaled_global_norm(self, norm_type=2):
        norm_groups = [self.get_grad_norm_direct(g, g) for g in self.groups]
        if self.has_moe_layers:
            self._average_expert_grad_norms(norm_groups)
        return combine_grad_norm_groups(norm_groups)

    def step(self, closure=None):
        prev_scale = self.loss_scale
        self._update_scale(self.overflow)
        self._global_grad_norm = self.scaled_global_norm() / prev_scale
        self.unscale_and_clip_grads([], self._global_grad_norm)

    def _average_expert_grad_norms(self, norm_groups):
        dist.all_reduce(norm_groups)

    def unscale_and_clip_grads(self, grad_groups_flat, total_norm):
        if not grad_groups_flat:
            return
        # The scale.
        combined_scale = self.loss_scale
        if self.clip_grad > 0.:
            combined_scale = total_norm / self.loss_scale
        return combined_scale

    def _update_scale(self, has_overflow=False):
        self.loss_scaler.update_scale(has_overflow)
''',
    "deepspeed/runtime/zero/stage3.py": """
class DeepSpeedZeroOptimizer_Stage3:

    def step(self, closure=None):
        self._update_scale(self.overflow)
        self._global_grad_norm = self.norm() / self.loss_scale
        self.unscale_and_clip_grads(0, self._global_grad_norm)

    def unscale_and_clip_grads(self, sub_group_id, total_norm):
        combined_scale = self.loss_scale
        return combined_scale

    def _update_scale(self, has_overflow=False):
        self.loss_scaler.update_scale(has_overflow)
""",
    "deepspeed/runtime/fp16/fused_optimizer.py": """
class FP16_Optimizer:

    def step(self, closure=None):
        self._update_scale(False)
        for i, group in enumerate(self.groups):
            if group.expert:
                expert_grads_for_norm = {}
                expert_grads_for_norm[group.name].append(self.fp32_groups_flat[i])
        self.check(self.groups)
        self.log(self.groups)
        self.count(self.groups)
        self._global_grad_norm = self.norm() / self.loss_scale_config.cur_scale
        print("reducing to", self.loss_scale_config.cur_scale)

    def unscale_and_clip_grads(self, grad_groups_flat, total_norm):
        combined_scale = self.loss_scale_config.cur_scale
        return combined_scale

    def _update_scale(self, skip):
        self.loss_scale_config.cur_scale *= 2
""",
    "deepspeed/runtime/fp16/unfused_optimizer.py": """
class FP16_UnfusedOptimizer:

    def step(self, closure=None):
        self._update_scale(False)

    def unscale_and_clip_grads(self, total_norm):
        combined_scale = self.loss_scale_config.cur_scale
        return combined_scale

    def _update_scale(self, skip):
        self.loss_scale_config.cur_scale *= 2
""",
    "deepspeed/runtime/bf16_optimizer.py": """
import torch
from deepspeed import comm as dist
from deepspeed.runtime.utils import get_global_norm_of_tensors, get_norm_with_moe_layers


class BF16_Optimizer:

    def step(self, closure=None):
        non_expert_grads_for_norm, expert_grads_for_norm = self.get_grads_for_norm()
        non_expert_groups_norm = get_global_norm_of_tensors(non_expert_grads_for_norm)
        all_groups_norm = non_expert_groups_norm
        if self.has_moe_layers:
            all_groups_norm = get_norm_with_moe_layers(all_groups_norm, expert_grads_for_norm)

        self._global_grad_norm = all_groups_norm

    def accumulate_hp_grads_and_remove_lp(self, lp_param, group_idx, param_idx):
        pass
""",
    "deepspeed/runtime/pipe/engine.py": """
class PipelineEngine:

    def _allocate_or_extend_buffers(self, idx, shape, dtype):
        if len(self._grad_layer_buf) <= idx:
            self._grad_layer_buf.append(self._allocate_buffer(shape, dtype=dtype)[0])
        return self._grad_layer_buf[idx]
""",
    "deepspeed/runtime/engine.py": """
class DeepSpeedEngine:

    def _backward_epilogue(self):
        self.start_timers()
        if self.enable_backward_allreduce:
            # Reduce.
            self.allreduce_gradients()

        if isinstance(self.optimizer, ZeROOptimizer):
            self.optimizer.backward_epilogue()
            self.optimizer.exit_backward()

    def scale(self, loss):
        scaled_loss = loss
        if isinstance(self.optimizer, ZeROOptimizer):
            scaled_loss = self.optimizer.scale_if_loss(scaled_loss)
        elif self.scaler:
            scaled_loss = self.scaler.scale(scaled_loss)
        return scaled_loss

    def backward(self, loss):
        try:
            if isinstance(self.optimizer, ZeROOptimizer):
                loss = self.optimizer.scale_if_loss(loss)
            elif self.scaler:
                loss = self.scaler.scale(loss)

            loss.backward()
        finally:
            self.running = False
""",
    "deepspeed/runtime/utils.py": """
def get_norm_with_moe_layers(non_expert_norm, expert_tensors):

    def to_tensor(v):
        return get_accelerator().FloatTensor(float(v))

    return to_tensor(non_expert_norm)
""",
    "deepspeed/runtime/zero/partition_parameters.py": """
class GatheredParameters:

    def __enter__(self):
        if not self.enabled:
            return
        self.params[0].all_gather(param_list=self.params)

    def __exit__(self, *exc):
        if not self.enabled:
            return
        self.params[0].partition(param_list=self.params)
""",
    "deepspeed/utils/groups.py": '''
mesh_device = None


def _get_sequence_data_parallel_world_size():
    """How many."""
    return 1


def _get_sequence_data_parallel_group():
    global mpu
    return None
''',
    "deepspeed/sequence/layer.py": """
def _generate_layout_params(scatter_idx, batch_dim_idx, seq_world_size, input):
    if batch_dim_idx == 0:
        if scatter_idx < 2:
            post_all2all_res_shape = [1]
        else:
            post_all2all_res_shape = [2]
    else:
        if scatter_idx < 2:
            post_all2all_res_shape = [bs, 3]
        else:
            post_all2all_res_shape = [4]
    return post_all2all_res_shape
""",
}


PACKAGE = {
    "version.txt": "0.99.1\n",
    "deepspeed/__init__.py": "",
    "deepspeed/comm/__init__.py": "",
    # Building an op leaves a line, and another where it would have to wait for a lock.
    "deepspeed/ops.py": """
import os
from pathlib import Path


def build(name):
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    with (folder / "built.txt").open("a") as file:
        file.write("waits\\n" if (folder / "op" / "lock").exists() else f"{name}\\n")
""",
    "deepspeed/comm/torch.py": """
from deepspeed.ops import build


def build_shm_op():
    build("shared memory")
""",
    "deepspeed/accelerator/__init__.py": """
from deepspeed.ops import build


class Builder:

    def __init__(self, name):
        self.load = lambda: build(name)


class CPU:
    _name = "cpu"

    def communication_backend_name(self):
        return "gloo"

    def create_op_builder(self, name):
        return Builder(name)


def get_accelerator():
    return CPU()
""",
}
"""As much of a package as test runs import."""
HARNESS = """
import os
import pytest


class DistributedTest:

    @pytest.fixture(autouse=True)
    def needs_a_size(self):
        if "LOCAL_SIZE" not in os.environ:
            pytest.skip("the host has to say how many ranks it is for")
"""
"""What it shares with upstream's is that nothing runs where LOCAL_SIZE is not set."""


def write(root: Path, files: dict[str, str] = FILES) -> Path:
    """Make the tree below ``root``; returns it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


def git(root: Path, *words: str) -> str:
    """What git prints."""
    who = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
    done = subprocess.run(
        ["git", "-C", str(root), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def checkout(root: Path, tests: dict[str, str] | None = None) -> Path:
    """Make a git checkout of one commit on which all patches apply, with ``tests``; returns it."""
    suite = {"common.py": HARNESS, "__init__.py": "", **(tests or {})}
    # As in releases, no hook asks for the default stream: that fix changes lines that fix 1 does.
    files = {name: text.replace("default_", "current_") for name, text in FILES.items()}
    write(root, {**files, **PACKAGE, **{f"tests/unit/{n}": text for n, text in suite.items()}})
    git(root.parent, "init", "--quiet", "--initial-branch=main", str(root))
    for key, value in (("user.name", "A Contributor"), ("user.email", "who@example.org")):
        git(root, "config", key, value)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "all")
    return root
