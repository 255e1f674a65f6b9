"""Over how many ranks of each kind a run divides its model: what is in files, and what is at hand.

Data-parallel ranks are not among them: whoever reads shards of the optimizer counts its files, and
of stage 3 asks `data_ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.files import CheckpointError

if TYPE_CHECKING:
    from deepspeed.comm.parallel_map import ParallelMap


def data_ranks(model: Mapping[str, Any], where: str) -> int:
    """Over how many ranks the run that wrote a model file of stage 3 has sharded its parameters.

    Args:
        model: Content of the file.
        where: The folder, for the error.

    Raises:
        CheckpointError: The file does not say it.
    """
    if keys.DP_WORLD_SIZE not in model:
        raise CheckpointError(
            f"{where}: a model file has no {keys.DP_WORLD_SIZE!r}, over how many ranks parameters "
            "are sharded; it was not saved by engine.save_checkpoint, or was written anew since. "
            "Load the checkpoint as it was saved, or a universal one"
        )
    return int(model[keys.DP_WORLD_SIZE])


class ParallelDegrees(NamedTuple):
    """Pipeline stages, tensor-parallel ranks, and all model-parallel ranks.

    The manifest and the files of processes hold it under the name `cut`, with these fields.
    """

    stages: int
    tensor: int
    parts: int

    @classmethod
    def of_this_run(cls, parallel_map: ParallelMap) -> ParallelDegrees:
        """That of an engine's map."""
        tensor, parts = parallel_map.tensor.size, parallel_map.model.size
        return cls(max(1, parts // tensor), tensor, parts)

    @classmethod
    def of_file(cls, model: Mapping[str, Any]) -> ParallelDegrees:
        """That of the run that wrote a model file.

        One that does not say it is a pipeline's if its weights are in files of layers, otherwise of
        tensor-parallel ranks.
        """
        parts = int(model.get(keys.MP_WORLD_SIZE, 1))
        degrees = model.get(keys.CHECKPOINT_PARALLEL_DIMS) or {}
        in_layers = keys.MODULE in model and model[keys.MODULE] is None
        tensor = int(degrees.get(keys.CHECKPOINT_TP_DEGREE, 1 if in_layers else parts))
        return cls(int(degrees.get(keys.CHECKPOINT_PP_DEGREE, parts // tensor)), tensor, parts)

    def ranks_of_slice(self, tensor_rank: int) -> range:
        """The model-parallel ranks that hold the stages of a tensor-parallel rank, first stage
        first.
        """
        return range(tensor_rank, self.parts, self.tensor)
