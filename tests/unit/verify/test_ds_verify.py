"""The command `ds_verify`: exit codes, files, wrong use, ranks that die or hang, pure parts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.verify.oracle import UsageError, picture, ranks, verdicts
from deepspeed.verify.oracle.batches import GlobalBatches, Shape
from deepspeed.verify.oracle.cli import main
from deepspeed.verify.oracle.judge import Deviation, StepFindings
from deepspeed.verify.oracle.parts import Parts
from deepspeed.verify.oracle.plan import (
    Plan,
    RunKind,
    Settings,
    in_shards,
    in_small_groups,
    make_plan,
    shape_of,
)
from deepspeed.verify.oracle.ranks import Outcome, Session, run_plan
from deepspeed.verify.oracle.reference import uncuttable
from deepspeed.verify.oracle.report import Report, Row, Verdict, render
from deepspeed.verify.oracle.verdicts import family_of, make_report
from deepspeed.verify.oracle.workload import Workload, load_workload
from unit.verify.oracle_runs import MODELS, TRAINING, config_of, plan_of

Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config_of(1)))
    return str(path)


def test_the_planted_bug_fails_and_is_named(config: str, tmp_path: Path, capsys: Capture) -> None:
    """The whole command. Kills: an exit code or a file that does not say what was found."""
    pytest.importorskip("matplotlib")
    wanted = tmp_path / "r.json", tmp_path / "r.html"
    few = "--steps 2 --schedules 1 --compile none".split()
    arguments = ["--config", config, "--model", f"{MODELS}:forgetful", *few]
    assert main([*arguments, "--json", str(wanted[0]), "--report", str(wanted[1])]) == 1
    found = json.loads(wanted[0].read_text())
    assert found["passed"] is False and found["culprits"] == ["2.weight"]
    (exact,) = (row for row in found["rows"] if row["check"].startswith("exact"))
    assert exact["parameters"] == ["2.weight"]
    # It takes four steps, of which there are batches for two.
    (later,) = (row for row in found["rows"] if row["check"] == "parameters frozen later")
    assert later["verdict"] == "PASS"
    said = capsys.readouterr()
    assert "2.weight" in said.out
    assert "s: 12 runs on 2 ranks\n" in said.err and "s: 1 of 12, SGD\n" in said.err
    page = wanted[1].read_text()
    assert "2.weight" in page and "data:image/png;base64," in page
    assert "src=" not in page.replace('src="data:', "") and "http" not in page  # self-contained


MISUSES = {
    "nowhere": "has no function 'nowhere'",
    "without_batches": "there are no batches",
    "frozen": "requires a gradient",
    "no_loss": "without a loss function",
    "too_few": "need 16",
    "wrong_rows": "train_micro_batch_size_per_gpu",
    "random_forward": "forward is random",
}
NAMED = ("--world-size 0", "--steps 0", "--schedules -1", "--timeout 0", "--compile nothing")
# Arguments of the command, and what it says of them.
WRONG = {
    **{f"--model {MODELS}:{function}": text for function, text in MISUSES.items()},
    **{arguments: arguments for arguments in (*NAMED, "--data nothing.pt")},
    "--checkpoint .": "a folder that does not exist yet",
    "--report r.pdf": ".html or .png",
    "--json /no/such/folder/r.json": "there is no folder",
    "--model nothing": "expected package.module:function",
    "--model no_such_module:f": "no_such_module",
    "--config nothing.json": "nothing.json",
}


@pytest.mark.parametrize(("arguments", "text"), WRONG.items(), ids=WRONG.values())
def test_mistakes_are_told_at_once(config: str, arguments: str, text: str, capsys: Capture) -> None:
    """Kills: a mistake that only shows in the log of a rank."""
    given = ["--config", config, "--model", f"{MODELS}:right", *arguments.split()]
    assert main(given) == 2
    assert text in capsys.readouterr().err


# One rank only can share these batches.
ELASTIC = {
    **{"enabled": True, "version": 0.1, "ignore_non_elastic_batch_info": True},
    **{"max_train_batch_size": 7, "micro_batch_sizes": [4, 6], "min_gpus": 1, "max_gpus": 4},
}


def test_ranks_that_a_configuration_cannot_have(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "c.json"
    for config, text in (
        (config_of(1, tensor_parallel={"autotp_size": 2}), "--world-size 3: tensor_parallel"),
        (config_of(1, elasticity=ELASTIC), "World size (3)"),
        (config_of(1, elasticity={**ELASTIC, "max_train_batch_size": 5}), "All micro batches"),
        (config_of(1, sequence_parallel_size=2), "--world-size 3: sequence_parallel_size is 2"),
    ):
        path.write_text(json.dumps(config))
        model = ["--model", f"{MODELS}:right", "--world-size", "3"]
        assert main(["--config", str(path), *model]) == 2
        told = capsys.readouterr().err
        assert text in told and "Traceback" not in told


def test_as_many_ranks_as_average_every_gradient() -> None:
    """Kills: layers that two ranks share, all of whose gradients are one rank's; a group of ranks
    that is all of them, and so keeps no copies of shards.
    """
    experts = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    for more, wanted in (
        ({}, (2, 2)),
        ({"tensor_parallel": {"autotp_size": 2}}, (4, 2)),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, (4, 4)),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, (4, 4)),
        ({"zero_optimization": {"stage": 1, "num_optimizer_instances": 2}}, (4, 4)),
        (experts, (4, 4)),
    ):
        ranks, shape = shape_of(in_small_groups({**config_of(1), **more}), None)
        assert (ranks, shape.world) == wanted


def test_experts_are_spread_inside_of_a_stage() -> None:
    """Kills: ranks of which no stage has enough for all experts."""
    parts = Parts(stages=2, experts=2)
    assert shape_of(config_of(1), None, parts)[0] == 8
    with pytest.raises(UsageError, match="--world-size 2: ep_size of MoE"):
        shape_of(config_of(1), 2, parts)


def test_a_small_model_is_in_shards() -> None:
    """Kills: a check of stage 3 whose parameters all persist, which trains like stage 2."""
    config = {**config_of(3), "zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto"}}
    cut = in_shards(config, [4, 400, 20, 100])["zero_optimization"]
    assert cut["stage3_param_persistence_threshold"] == 101
    assert cut["stage3_prefetch_bucket_size"] == 131 and "prefetch_bucket_size" not in cut
    alike = in_shards(config, [9, 9])["zero_optimization"]
    assert alike["stage3_param_persistence_threshold"] == 0
    assert in_shards(config_of(2), [9, 9]) == config_of(2)


def test_the_second_half_is_on_other_ranks() -> None:
    """Kills: a checkpoint that is read by the ranks and at the stage that saved it."""
    for stage, count, parts, wanted in (
        (2, 2, Parts(), (3, 1, Shape(1, 4, 4))),
        (3, 2, Parts(experts=2), (1, 4, Shape(4, 1, 4))),
        (1, 4, Parts(stages=2), (0, 2, Shape(1, 4, 4))),
        (0, 8, Parts(stages=2, experts=2), (1, 4, Shape(2, 4, 4))),
    ):
        how: dict[str, Any] = {"ranks": count, "parts": parts, "checkpoint": "c"}
        plan = plan_of(config_of(stage), "right", tuple(RunKind), **how)
        run = next(run for run in plan.runs if run.kind is RunKind.RESUMED)
        assert (run.config["zero_optimization"]["stage"], plan.ranks_of(run), run.shape) == wanted


class Launch:
    """Stands for a start of ranks that all end at once."""

    started: list[tuple[int, list[RunKind]]] = []
    refusal: Outcome | None = None

    def __init__(self, plan: Plan, *_: object) -> None:
        self.started.append((plan.ranks, [run.kind for run in plan.runs]))
        results = {} if self.refusal else {run.name: {} for run in plan.runs}
        self.logs = [SimpleNamespace(results=results)]

    def ready(self) -> list[dict[str, Any]]:
        return [{}]

    def follow(self) -> Outcome | None:
        return self.refusal


def test_runs_of_other_ranks_are_started_apart(monkeypatch: Patch) -> None:
    """Kills: a second half on the ranks of the first; a refusal that is met again in each run, as
    what fails in each is.
    """
    monkeypatch.setattr(ranks, "_Launch", Launch)
    kinds = (RunKind.USER, RunKind.RESUMED, RunKind.LEDGER)
    plan = plan_of(config_of(1), "right", kinds, checkpoint="c")
    assert run_plan(plan, 1.0, print).outcomes.keys() == {run.name for run in plan.runs}
    assert Launch.started == [(2, [RunKind.USER, RunKind.LEDGER]), (1, [RunKind.RESUMED])]
    monkeypatch.setattr(Launch, "refusal", Outcome(failure="no", kind="DeepSpeedConfigError"))
    with pytest.raises(DeepSpeedConfigError, match="no"):
        run_plan(plan, 1.0, print)
    monkeypatch.setattr(Launch, "refusal", Outcome(failure="no", kind="RuntimeError"))
    kinds = (*TRAINING, RunKind.LEDGER, RunKind.COLLECTIVES)
    Launch.started.clear()
    session = run_plan(plan_of(config_of(1), "right", kinds), 1.0, print)
    assert len(Launch.started) == 3 and "not tried" in session.outcomes["collectives"].failure
    Launch.started.clear()
    kinds = (RunKind.SGD, RunKind.EXACT, RunKind.ALONE)
    run_plan(plan_of(config_of(1), "right", kinds), 1.0, print)
    assert [kinds for _, kinds in Launch.started] == [[*kinds[:2]], [RunKind.EXACT]]


STANDS = {
    "sys.exit(3)": (60.0, "rank 1 exited with 3"),
    "time.sleep(60)": (0.5, "no progress for 0.5 s"),
}


@pytest.mark.parametrize("code", STANDS)
def test_a_rank_that_does_not_go_on(code: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Kills: a parent that waits for ever, or that leaves the other rank behind."""
    timeout_s, text = STANDS[code]
    program = f"import os, sys, time\nif os.environ['RANK'] == '0': time.sleep(60)\n{code}\n"
    (tmp_path / "stopping.py").write_text(program)
    monkeypatch.setattr(ranks, "WORKER", "stopping")
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    monkeypatch.chdir(tmp_path)
    plan = plan_of(config_of(1), "right", (RunKind.SGD,))
    session = run_plan(plan, timeout_s, lambda event, values: None)
    assert text in session.not_started


# Pure parts


def bare_plan(backend: str = "none", **more: Any) -> Plan:
    """A plan of a model that nobody builds."""
    config = config_of(1, reproducibility={"seed": 3, "digest_every": 1})
    settings = Settings(config, "m", steps=1, schedules=0, compile=backend)
    return make_plan(settings, config, 2, Shape(2, 2, 4), sizes=[1], **more)


def test_an_optimizer_of_the_host_runs_both_ways(monkeypatch: Patch) -> None:
    # Kills: schedules without it, whose operators stand for the native ones that the host runs;
    # native ones that could not be built, and a report that is silent of it.
    block = {"type": "AdamW", "params": {"lr": 0.1}}
    config = config_of(
        2, optimizer=block, zero_optimization={"offload_optimizer": {"device": "cpu"}}
    )
    settings = Settings(config, "m", steps=1, schedules=2)
    plan = make_plan(settings, config, 2, Shape(2, 2, 4), sizes=[1])
    ways = {run.kind for run in plan.runs if run.config.get("optimizer") == block}
    assert {RunKind.USER, RunKind.SIM} <= ways
    for run in plan.runs:
        if run.kind is not RunKind.ALONE:
            assert run.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    session, told = Session(), "native optimizers of the host (no C++ compiler)"
    session.outcomes = {run.name: Outcome(failure="was not reached") for run in plan.runs}
    for compiler in ("c++", None):
        monkeypatch.setattr(CPUAdamBuilder, "compiler", lambda self, found=compiler: found)
        report = make_report(plan, session, {"config": config})
        assert (told in report.not_covered) == (compiler is None)


def test_what_becomes_of_the_compiled_model(monkeypatch: Patch) -> None:
    # Kills: a compiler's error or lack shown as the model's fault; other failures as harmless.
    def row_of(backend: str, **failed: str) -> Row:
        plan = bare_plan(backend=backend)
        session = Session()
        for run in plan.runs:
            session.outcomes[run.name] = Outcome(**(failed or {"failure": "was not reached"}))
        rows = make_report(plan, session, {}).rows
        (row,) = [row for row in rows if row.check == "eager = compiled"]
        return row

    for backend, kind, verdict in (
        ("aot_eager", "Unsupported", Verdict.NOT_RUN),
        ("aot_eager", "NotImplementedError", Verdict.NOT_RUN),
        ("aot_eager", "RuntimeError", Verdict.FAIL),
        ("inductor", "Unsupported", Verdict.FAIL),
        ("none", "", Verdict.NOT_RUN),
    ):
        row = row_of(backend, failure="rank 0 raised", kind=kind)
        assert row.verdict is verdict, (backend, kind, row)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    row = row_of("inductor")
    assert row.verdict is Verdict.NOT_RUN and "needs a C++ compiler" in row.detail


def test_what_has_no_canonical_sum() -> None:
    # Kills: a refusal of the sum told as the configuration's fault, or by nobody.
    plan, session = bare_plan(), Session()
    told = {"failure": "rank 0: DeepSpeedConfigError: no such sum", "kind": "DeepSpeedConfigError"}
    session.outcomes = {run.name: Outcome(**told) for run in plan.runs}
    report = make_report(plan, session, {})
    (row,) = [row for row in report.rows if row.check.startswith("exact")]
    assert (row.verdict, row.detail) == (Verdict.NOT_RUN, "no such sum")
    assert row.check in report.not_covered
    (only,) = {run.config["reproducibility"]["seed"] for run in plan.runs[-2:]}
    assert only == 3 and "digest_every" not in plan.runs[0].config["reproducibility"]


def test_without_a_step_nothing_was_compared() -> None:
    # Kills: a pass of a second half, or of a simulated run, all of whose steps were skipped.
    for check in ("checkpoint = not stopped", "simulated device = host"):
        row = verdicts._compared(Row(check), [StepFindings(2, skipped="a sum overflows")])
        assert row.check == check and row.verdict is Verdict.LEFT_OUT
        assert row.detail == "no step could be compared (a sum overflows)"
    assert verdicts._compared(Row("any"), [StepFindings(2)]).verdict is Verdict.PASS


def test_sgd_runs_where_only_host_optimizers_do() -> None:
    # Kills: keys that SGD is refused with, left in its run: the command would take no such
    # configuration.
    offload = {"device": "nvme", "nvme_path": "/files", "speculative_update": True}
    given = {**config_of(2), "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    plan = make_plan(Settings(given, "m.py:f"), given, 2, Shape(2, 2, 4), (8, 4))
    zeros = [run.config["zero_optimization"]["offload_optimizer"] for run in plan.runs[:2]]
    assert zeros[0]["device"] == "cpu" and "speculative_update" not in zeros[0]
    assert zeros[1] == offload


def test_a_run_of_skipped_steps_is_left_out() -> None:
    # Kills: a failure of a configuration whose loss scale begins above a short run's steps.
    run = bare_plan().runs[0]
    (row,) = verdicts._family_rows("SGD", run, [StepFindings(0, skipped="a sum overflows")])
    assert row.verdict is Verdict.LEFT_OUT and "initial_scale_power" in row.detail
    (row,) = verdicts._family_rows("SGD", run, [])
    assert row.verdict is Verdict.FAIL


def test_what_ranks_hold_of_their_own_is_named() -> None:
    held = ({"w of (0, 1)": "a"}, {"w of (0, 1)": "b"})
    row = verdicts._ranks_row("SGD", Outcome([{"faults": [], "checksums": [one]} for one in held]))
    assert row.verdict is Verdict.FAIL and row.parameters == ["w"]
    assert row.detail == "after step 0 ranks 0 and 1 hold another w"


def test_splits_keep_the_global_batch() -> None:
    shape = Shape(world=2, accumulation=2, rows=6)
    assert {(s.accumulation, s.rows) for s in shape.splits()} == {(1, 12), (6, 2)}
    assert Shape(2, 1, 1).splits() == []
    # Ranks see one order of micro-batches.
    shape = Shape(world=3, accumulation=2, rows=1)
    places = [shape.place(rank, micro) for rank in range(3) for micro in range(2)]
    assert sorted(places) == list(range(6))


def test_another_cut_has_the_same_samples_in_order() -> None:
    """Kills: a split that repeats or drops samples."""
    workload = Workload(
        torch.nn.Linear(1, 1),
        lambda step, micro, rank: torch.arange(4.0) + 100 * step + 10 * micro + 40 * rank,
    )
    batches = GlobalBatches(workload, Shape(2, 2, 4), steps=2)
    whole = batches.whole(1)
    assert whole.numel() == 16
    for split in Shape(2, 2, 4).splits():
        pieces = batches.micro_batches(1, split)
        assert len(pieces) == split.micro_batches
        assert torch.equal(torch.cat(pieces), whole)


def test_data_from_a_file_is_dealt_in_order(tmp_path: Path) -> None:
    path = tmp_path / "data.pt"
    torch.save((torch.randn(64, 8), torch.randn(64, 1)), path)
    workload = load_workload(f"{MODELS}:right", str(path), 0, 4)
    batches = GlobalBatches(workload, Shape(2, 2, 4), steps=2)
    assert torch.equal(batches.whole(1)[0], torch.load(path)[0][16:32])


def test_families_and_nan() -> None:
    """Kills: a comparison that NaN passes."""
    assert family_of("transformer.h.11.attn.c_attn.weight") == "transformer.h.*.attn.c_attn.weight"
    assert family_of("0.weight") == "*.weight"
    assert family_of("conv1.weight") == "conv1.weight"
    assert not Deviation(math.nan, 1.0, 1.0).is_within


def test_a_plan_survives_its_journey() -> None:
    plan = plan_of(config_of(2), "right", tuple(RunKind), schedules=2)
    assert TypeAdapter(Plan).validate_json(json.dumps(asdict(plan))) == plan
    simulated = [run for run in plan.runs if run.kind is RunKind.SIM]
    assert [run.piece_numel > 0 for run in simulated] == [True, True, False]


def test_the_table_shows_every_row_and_the_page_escapes() -> None:
    failed = Row("a <b>", Verdict.FAIL, "x is wrong", parameters=["w"])
    rows = [failed, Row("c", Verdict.NOT_RUN, "because")]
    report = Report(rows, ["a note"], {}, {}, ["kernels", "times"])
    summary = ("not covered: kernels; times", "FAIL: 0 passed, 1 failed, 1 not run")
    texts = ("x is wrong", "because", "a note", *summary, "w")
    assert all(text in render(report) for text in texts)
    assert "a &lt;b&gt;" in picture.page(report, b"")
    assert not report.passed and Report([replace(rows[1])], [], {}, {}).passed


def test_a_hugging_face_model_from_a_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    spec = "hf:gpt2?n_layer=1&n_embd=8&n_head=2&vocab_size=16&sequence=6"
    workload = load_workload(spec, None, 0, 2)
    batches = GlobalBatches(workload, Shape(2, 1, 2), steps=1)
    assert batches.whole(0)["input_ids"].shape == (4, 6)
    assert workload.loss_of(workload.copy_module(), batches.whole(0), torch.float32).isfinite()
    small = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(small))
    again = load_workload(f"hf:{tmp_path}", None, 0, 2)
    assert len(again.module.transformer.h) == 2


@pytest.mark.parametrize("spec", ["hf:gpt2?no_such_key=1", "hf:no_such_type", "hf:gpt2?sequence=1"])
def test_a_wrong_hugging_face_model(config: str, spec: str, capsys: Capture) -> None:
    """Without transformers the message is that it is missing; each names the argument."""
    assert main(["--config", config, "--model", spec]) == 2
    assert "--model hf:" in capsys.readouterr().err


def test_the_simulated_device_sees_several_buckets() -> None:
    """Kills: a search for races on a model that fits one bucket, where none can be."""
    config = {**config_of(2), "zero_optimization": {"stage": 2}}
    plan = plan_of(config, "right", tuple(RunKind), schedules=1)
    zero = {run.name: run.config["zero_optimization"] for run in plan.runs}
    sizes = {name: block.get("reduce_bucket_size") for name, block in zero.items()}
    assert sizes["schedule 0"] == 100
    assert sizes["SGD"] is None and sizes["as configured"] is None


def test_a_batch_norm_is_not_cut_otherwise() -> None:
    """Kills: a failure blamed on the engine that is the model's own."""
    workload = Workload(torch.nn.BatchNorm1d(1), lambda step, micro, rank: torch.ones(4, 1))
    reason = uncuttable(workload, GlobalBatches(workload, Shape(2, 2, 4), steps=1))
    assert "BatchNorm" in reason
    plan = bare_plan(backend="none", no_split=reason)
    assert RunKind.SPLIT not in {run.kind for run in plan.runs}
    report = make_report(plan, Session(), {})
    assert [row.detail for row in report.rows if row.check == "accumulation invariance"] == [reason]
