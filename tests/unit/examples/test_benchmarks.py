"""The benchmarks compare like with like, count what there is, refuse what cannot be."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device
import device_counts
import device_worker
import first_device
import pipeline
import pipeline_bubble
import pipeline_systems
import pytest
import serving
import torch
import torch._dynamo  # startup: here once, not in each rank that is forked
import train_step
import turns
from unit.clients.launching import run_ranks
from unit.launcher import forked


def test_hidden_is_what_the_busiest_stream_covers() -> None:
    # 10 to 60 beside two others: of 5-15, 50-70 and 55-65 together 25 long, 15 lie under it.
    main, first, second = [(10, 40), (30, 60)], [(5, 15), (50, 70)], [(55, 65)]
    assert device_worker.hidden_part([first, main, second]) == pytest.approx(15 / 30)
    assert device_worker.hidden_part([main]) is None


def test_a_process_that_sees_one_device_takes_it() -> None:
    for count, chosen in ((1, 0), (4, 3)):
        devices = SimpleNamespace(device_count=lambda count=count: count)
        assert device_worker.choose(3, devices) == chosen


def test_without_a_device_it_says_how_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device.main([]) == 2
    assert "DS_ACCELERATOR=sim" in capsys.readouterr().err


def test_an_unknown_system_is_named() -> None:
    with pytest.raises(ValueError, match="--systems zero9: choose from torch, ddp"):
        device.chosen_systems(device.parse_arguments(["--systems", "zero9"]))


@pytest.mark.slow
def test_it_runs_to_the_end_on_the_simulated_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "sim")
    monkeypatch.setattr(turns, "subprocess", forked.replacement)
    record = tmp_path / "record.json"
    flags = "--no-tests --systems zero2-overlap --rounds 1 --steps 2".split()
    assert device.main([*flags, "--json", str(record)]) == 0
    assert "| zero2-overlap |" in capsys.readouterr().out
    results = {result["system"]: result for result in json.loads(record.read_text())}
    assert results.keys() == {"ddp", "zero2-overlap"}
    assert results["zero2-overlap"]["peak_mib"] > 0 and results["ddp"]["peak_mib"] is None


# Looks are forked from a process that has run nothing.
FIRST_LOOK = """
import sys, device, first_device
from unit.launcher import forked
first_device.subprocess = forked.replacement
first_device.LOOK_SECONDS = float(sys.argv.pop(1))
assert device.main(sys.argv[1:]) == 1
"""


@pytest.mark.slow
def test_the_first_look_runs_to_its_end(tmp_path: Path) -> None:
    # Those that are left out are the same with other words. Kills: a look that has never run, one
    # that fails and is not told, and one that hangs and holds the others.
    others = {f"units:{order}" for order in ("shrinking", "alternating")} | {
        f"system:{name}" for name in ("zero0", "zero1", "zero2", "fsdp2-fused")
    }
    looks = [look for look in first_device.LOOKS if " with " not in look and look not in others]
    record, program = tmp_path / "first.json", tmp_path / "program.py"
    program.write_text(FIRST_LOOK)

    def take(seconds: float, names: list[str]) -> list[dict[str, Any]]:
        flags = ["--first", "--steps", "1", "--json", str(record), "--looks", ",".join(names)]
        run_ranks(program, tmp_path, str(seconds), *flags, processes=1, DS_ACCELERATOR="sim")
        taken: list[dict[str, Any]] = json.loads(record.read_text())["looks"]
        return taken

    *told, nonsense = take(first_device.LOOK_SECONDS, [*looks, "nonsense"])
    assert [look["name"] for look in told if look["clean"]] == looks, told
    assert not nonsense["clean"] and "KeyError: 'nonsense'" in nonsense["said"]
    found = {look["name"]: look["found"] for look in told}
    assert found["graph"] == {**found["graph"], "not here": "graphs are captured on a device"}
    assert {found["streams"][f"stage {stage}"] for stage in (1, 2, 3)} == {"silent"}
    assert found["trace"]["copied MiB"]["split_with_sizes_copy"] > 0
    assert found["system:zero3"]["formula MiB"] > 0 and found["units:growing"]["formula MiB"] > 0
    page = record.with_suffix(".md").read_text()
    assert "| zero3 |" in page and "## nonsense:" in page and ", FAILED" in page
    assert take(0.05, ["start"])[0]["found"] == {"gave up after s": 0.05}


PROGRAM = """
import torch, pretended
pretended.install()
with pretended.watch, pretended.counting() as counts:
    x = torch.ones(4)
    x.sum().item(), x.cpu().sum().item(), torch.tensor(1.0).item(), x[x > 0]
    x.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0])), x.copy_(x.cpu(), non_blocking=True)
    side = torch.cpu.Stream()
    with torch.cpu.stream(side):
        x += 1
    with torch.cpu.stream(torch.cpu.Stream()):
        pass
    side.synchronize()
assert counts == {
    "wait item": 1, "wait cpu": 2, "wait index by a mask": 1, "wait blocking copy": 1,
    "wait stream": 1,
}, counts
assert pretended.Device.used == {side}
"""


def test_waits_are_those_for_the_device(tmp_path: Path) -> None:
    # Kills: the host's own numbers counted as the device's, a stream counted that has no work, and
    # each kind of wait that is not seen.
    (tmp_path / "program.py").write_text(PROGRAM)
    run_ranks(tmp_path / "program.py", tmp_path, processes=1)


def test_a_step_of_stage_1(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a host wait or a collective more per step on a device's path, also with the other ranks
    # of a large world.
    monkeypatch.setattr(device_counts, "subprocess", forked.replacement)
    arguments = argparse.Namespace(layers=2, world=64, places=False)
    counts = device_counts.measure("zero1", 2, arguments)
    buckets = counts.pop("collective reduce-scatter")
    assert 10 < buckets < 16
    others = {"collective all-reduce": 1, "wait event": 1, "streams": 1}
    assert counts == {"collective all-gather": buckets, **others}


def test_torch_gets_the_parts_that_the_engines_partition_into() -> None:
    # Kills parts that differ between systems: the first has the embedding, the last the head, all
    # have equally many blocks.
    # optional: only this test needs the package
    from deepspeed.runtime.utils import partition_balanced

    work = pipeline_systems.Workload(blocks=8, width=8)
    layers = pipeline_systems.build_layers(work)
    weights = [float(isinstance(layer, pipeline_systems.PipeBlock)) for layer in layers]
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
    plain = pipeline_bubble.predict("1f1b", arguments).makespan
    assert plain == pytest.approx((8 + 3) * 60)
    assert pipeline_bubble.predict("zero_bubble", arguments).makespan < plain


def test_upstream_needs_its_interpreter() -> None:
    assert pipeline.UPSTREAM not in pipeline.chosen_systems(pipeline.parse_arguments([]))
    with pytest.raises(ValueError, match="--peer-python"):
        pipeline.start_ranks(pipeline.UPSTREAM, pipeline_systems.Workload(), 2, None, sys.stderr)
    arguments = train_step.parse_arguments(["--systems", "upstream-zero1"])
    with pytest.raises(ValueError, match="--upstream-python"):
        train_step.chosen_systems(arguments)


def test_only_small_messages_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.dist, "all_reduce", lambda tensor: None)

    def step() -> None:
        serving.dist.all_reduce(torch.zeros(1))
        serving.dist.all_reduce(torch.zeros(1000))

    assert serving.count_scalars(step, 3) == {"all_reduce": 3}


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is three times slower in the second round; that must not show in a ratio.
    times = {"ddp": 1.0, "ddp-fused": 0.5, "zero1": 2.0}
    wall = {name: [[time] * 2, [3 * time] * 2] for name, time in times.items()}
    cpu = {"ddp": [[1.0], [1.0]], "ddp-fused": [[1.0], [1.0]], "zero1": [[0.5], [0.5]]}
    results = train_step.summarize(wall, cpu)
    ratios = {result.system: (result.ratio, result.ratio_fused) for result in results}
    assert ratios == {"ddp": (1.0, 2.0), "ddp-fused": (0.5, 1.0), "zero1": (2.0, 4.0)}
    row = "| zero1 | 4000.00 | 2.00 | 2.00-2.00 | 4.00 | 500.00 | 0.50 |"
    assert row in train_step.table(results)


def test_baseline_is_always_run() -> None:
    arguments = train_step.parse_arguments(["--systems", "zero2,fsdp2"])
    assert train_step.chosen_systems(arguments) == ["ddp", "zero2", "fsdp2"]


@pytest.mark.slow
def test_systems_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "subprocess", forked.replacement)
    record = tmp_path / "record.json"
    flags = "--model tiny --layers 3 --systems zero2 --rounds 2 --steps 3 --warmup 1 --clip 1"
    assert train_step.main([*flags.split(), "--json", str(record)]) == 0
    seconds = json.loads(record.read_text())["seconds"]
    counts = {name: [len(block) for block in rounds] for name, rounds in seconds.items()}
    assert counts == {"ddp": [3, 3], "zero2": [3, 3]}
    captured = capsys.readouterr()
    assert "| zero2 |" in captured.out and sys.executable not in captured.out


def test_a_system_that_fails_is_named_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(turns, "subprocess", forked.replacement)
    workload = train_step.workload(train_step.parse_arguments(["--model", "tiny", "--layers", "1"]))
    with open(tmp_path / "stderr", "w") as stderr:
        pair = train_step.Pair("nonsense", sys.executable, workload, False, stderr)
        with pytest.raises(RuntimeError, match=r"nonsense: rank 0 ended \(exit code 1\)"):
            pair.wait_until_ready()
        pair.close()
    assert all(process.returncode is not None for process in pair._processes)
    said = (tmp_path / "stderr").read_text()
    assert "system 'nonsense' is unknown; use one of torch, ddp, fsdp2" in said
