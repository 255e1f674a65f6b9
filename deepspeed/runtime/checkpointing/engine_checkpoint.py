"""The engine's weights as a state dict and as one file, and with them all that saves and loads an
engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import together
from deepspeed.checkpoint.torch_files import write_file
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.checkpointing.loading import LoadingMixin
from deepspeed.runtime.checkpointing.saving import SavingMixin


class CheckpointMixin(SavingMixin, LoadingMixin):
    """`save_checkpoint`, `load_checkpoint` and the state of `DeepSpeedEngine`."""

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load the model's weights from a model-states file's content; masters follow.

        Args:
            checkpoint: Content of the file.
            strict: Names must match exactly.
            custom_load_fn: Called as `fn(src=state_dict, dst=module)` instead.
            fetch_z3_params: No effect below stage 3.
        """
        state = checkpoint[keys.MODULE]
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.module.load_state_dict(state, strict=strict)
        self._refresh_masters()

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights alone, in the model's dtype, as one file. All ranks must call it."""

        def save() -> None:
            if dist.get_rank() == 0:
                os.makedirs(save_dir, exist_ok=True)
                state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
                temporary = os.path.join(save_dir, file_names.saving(save_filename))
                write_file(temporary, clone_tensors_for_torch_save(state))
                os.replace(temporary, os.path.join(save_dir, save_filename))

        together(save, self.device, f"saving {save_filename}")
        return True

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """Upstream's older name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    # What clients gather weights with; below stage 3 every rank has them whole.

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """The whole state dict on rank 0 (host memory), None elsewhere."""
        if dist.get_rank() != 0:
            return None
        return clone_tensors_for_torch_save(
            self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        )
