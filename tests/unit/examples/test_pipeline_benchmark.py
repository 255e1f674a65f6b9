"""The pipeline benchmark compares like with like."""

import sys

import pipeline
import pipeline_bubble
import pipeline_systems
import pytest
import serving
import torch


def test_torch_gets_the_parts_that_the_engines_partition_into() -> None:
    # Kills parts that differ between systems: the first has the embedding, the last the head, all
    # have equally many blocks.
    # optional: only this test needs the package
    from deepspeed.runtime.utils import partition_balanced

    work = pipeline_systems.Workload(blocks=8, width=8)
    weights = [
        float(isinstance(layer, pipeline_systems.PipeBlock))
        for layer in pipeline_systems.build_layers(work)
    ]
    for parts in (2, 4, 8):
        assert pipeline_systems.part_bounds(8, 10, parts) == partition_balanced(weights, parts)


def test_a_sleeping_layer_sleeps_once_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills a layer whose two-part backward sleeps twice for the same gradient.
    from deepspeed.runtime.pipe.split_backward import SplitBackward  # optional: as above

    naps: list[float] = []
    monkeypatch.setattr(pipeline_systems.time, "sleep", naps.append)
    layer = pipeline_systems.PipeBlockThatSleeps(0.5)
    x = torch.ones(3, requires_grad=True)
    output = layer(x).sum()
    assert len(naps) == 1
    split = SplitBackward([torch.autograd.graph.get_gradient_edge(output)], [torch.ones(())], [x])
    split.backward_inputs()
    assert split.is_split and len(naps) == 2
    split.backward_weights()
    assert len(naps) == 3


def test_predictions_are_the_formulas() -> None:
    arguments = pipeline_bubble.parse_arguments([])
    # (micro-batches + stages - 1) passes forward and backward, of 2 layers of 3 times 10 ms
    assert pipeline_bubble.predict("1f1b", arguments).makespan == pytest.approx((8 + 3) * 60)
    assert (
        pipeline_bubble.predict("zero_bubble", arguments).makespan
        < pipeline_bubble.predict("1f1b", arguments).makespan
    )


def test_upstream_needs_its_interpreter() -> None:
    assert pipeline.UPSTREAM not in pipeline.chosen_systems(pipeline.parse_arguments([]))
    with pytest.raises(ValueError, match="--peer-python"):
        pipeline.start_ranks(pipeline.UPSTREAM, pipeline_systems.Workload(), 2, None, sys.stderr)


def test_only_small_messages_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.dist, "all_reduce", lambda tensor: None)

    def step() -> None:
        serving.dist.all_reduce(torch.zeros(1))
        serving.dist.all_reduce(torch.zeros(1000))

    assert serving.count_scalars(step, 3) == {"all_reduce": 3}
