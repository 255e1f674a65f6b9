"""The numerics oracle on real ranks: silent on what is right, the right name on what is not."""

import ast
import importlib
import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.moe import sharded_moe
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.gradients.reduce_rule import ReduceFactors, ReduceRule
from deepspeed.runtime.optimizers import step_sequence
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.messages import stage_channels
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from deepspeed.runtime.sharding import publisher
from deepspeed.runtime.streams import StagingBuffers
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.verify import lowered_sizes
from deepspeed.verify.oracle import cli
from deepspeed.verify.oracle import plan as oracle_plan
from deepspeed.verify.oracle.parts import Parts
from deepspeed.verify.oracle.plan import Plan, RunKind, with_shape
from deepspeed.verify.oracle.report import culprits
from deepspeed.verify.sizes import SIZES, piece_numel
from unit.common import DistributedTest
from unit.verify import oracle_runs
from unit.verify.oracle_runs import MODELS, TRAINING, config_of, failures, plan_of, report_of

PRECISIONS = ("fp32", "bf16", "fp16")
SMALL = (
    "num_hidden_layers=1&hidden_size=32&intermediate_size=48&num_attention_heads=4&vocab_size=64"
)
# Model, configuration, ZeRO stages that are checked, into what the model is divided.
DIVIDED: dict[str, tuple[str, dict[str, Any], tuple[int, int], Parts]] = {
    "tensor": (
        f"hf:llama?{SMALL}&sequence=8",
        {"tensor_parallel": {"autotp_size": 2}},
        (1, 3),
        Parts(),
    ),
    "spread experts": (
        f"hf:mixtral?{SMALL}&num_key_value_heads=2&num_local_experts=4&sequence=8",
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
        (1, 3),
        Parts(),
    ),
    "sequences": (f"hf:llama?{SMALL}&sequence=8", {"sequence_parallel_size": 2}, (2, 3), Parts()),
    "stages": ("pipeline", {}, (0, 1), Parts(stages=2)),
    "experts": ("experts", {}, (1, 2), Parts(experts=2)),
    "experts in stages": ("experts_in_stages", {}, (0, 1), Parts(stages=2, experts=2)),
}


def divided(
    kind: str, kinds: tuple[RunKind, ...], stage: int, precision: str, schedules: int = 0
) -> Plan:
    """Of four ranks."""
    model, block, _, parts = DIVIDED[kind]
    how: dict[str, Any] = {"sizes": (1000, 4000), "ranks": 4, "parts": parts}
    config = config_of(stage, precision, **block)
    return plan_of(config, model, kinds, schedules=schedules, **how)


class TestCleanRuns(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_every_precision_passes(self, stage: int) -> None:
        """Kills: a bound that rounding exceeds, a wrong expectation of clipping or divisor."""
        for precision in PRECISIONS:
            report = report_of(plan_of(config_of(stage, precision), "with_dropout", TRAINING))
            assert failures(report) == [], precision
            divisors = [row.divisor for row in report.rows if row.divisor is not None]
            assert divisors and all(divisor == pytest.approx(4, rel=0.05) for divisor in divisors)
            assert any("dropout" in note for note in report.notes)

    def test_a_half_precision_model_without_a_precision_block(self) -> None:
        """Kills: a reference in fp32, masters expected at stage 0, where there are none."""
        for stage in (0, 1, 2):
            report = report_of(plan_of(config_of(stage), "half", TRAINING))
            assert failures(report) == [], stage

    def test_other_ways_to_say_it(self) -> None:
        """Kills: an expectation that knows the default configuration only."""
        warmup = {"warmup_num_steps": 2, "warmup_max_lr": 0.01}
        more: list[dict[str, Any]] = [
            {"prescale_gradients": True},
            {"gradient_allreduce_op": "sum", "gradient_clipping": 0.0},
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
            {"scheduler": {"type": "WarmupLR", "params": warmup}},
            {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "bias_correction": False}}},
            {"fp16": {"enabled": True}},  # dynamic: the first steps overflow and are skipped
        ]
        for extra in more:
            plan = plan_of(config_of(1, **extra), "right", (RunKind.SGD, RunKind.USER), steps=4)
            assert failures(report_of(plan)) == [], extra

    def test_offload_and_accumulation_of_one(self) -> None:
        config = config_of(2, gradient_accumulation_steps=1)
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        assert failures(report_of(plan_of(config, "right", TRAINING))) == []

    @pytest.mark.parametrize("stage", [2, 3])
    def test_watched_and_simulated_runs_pass(self, stage: int) -> None:
        """Kills: a ledger, intent check, compiled or simulated run that is not really made."""
        kinds = (RunKind.SGD, RunKind.COMPILED, RunKind.LEDGER, RunKind.COLLECTIVES, RunKind.SIM)
        report = report_of(plan_of(config_of(stage, "bf16"), "right", kinds, schedules=1))
        assert failures(report) == []
        passed = {row.check for row in report.rows if row.verdict.value == "PASS"}
        assert {"gradient ledger", "collective agreement", "stream races"} <= passed
        assert {"memory lifetimes", "simulated device = host", "eager = compiled"} <= passed

    @pytest.mark.world_size(4)
    @pytest.mark.parametrize("kind", DIVIDED)
    def test_ranks_that_share_a_model_pass(self, kind: str) -> None:
        """Kills: parts compared with whole parameters, ranks of one replica with other data."""
        pytest.importorskip("transformers")
        ways = (("bf16", RunKind.USER), ("fp32", RunKind.SGD))
        for stage, (precision, run) in zip(DIVIDED[kind][2], ways, strict=True):
            assert failures(report_of(divided(kind, (run,), stage, precision))) == [], stage

    @pytest.mark.world_size(4)
    @pytest.mark.parametrize("kind", ["sequences", "experts in stages"])
    def test_what_ranks_do_with_it_passes(self, kind: str) -> None:
        """Kills: a run that ranks of one kind of division cannot make."""
        pytest.importorskip("transformers")
        kinds = (RunKind.SPLIT, RunKind.LEDGER, RunKind.COLLECTIVES, RunKind.SIM)
        report = report_of(divided(kind, kinds, 1, "bf16", schedules=1))
        assert failures(report) == []

    def test_the_second_half_of_a_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kills: moments, a schedule or weights that begin anew."""
        warmup = {"warmup_num_steps": 3, "warmup_max_lr": 0.01}
        config = config_of(2, "bf16", scheduler={"type": "WarmupLR", "params": warmup})
        kinds, folder = (RunKind.USER, RunKind.RESUMED), str(tmp_path / "half")
        plan = plan_of(config, "right", kinds, steps=4, checkpoint=folder)
        # On the ranks that are here.
        first, second = (
            replace(run, shape=plan.shape, config=with_shape(run.config, plan.shape))
            for run in plan.runs
        )
        assert failures(report_of(replace(plan, runs=[first, second]))) == []
        load = DeepSpeedEngine.load_checkpoint
        for left_out, text in (
            ("load_optimizer_states", "value after the step"),
            ("load_lr_scheduler_states", "learning rates"),
        ):
            forgetful = partialmethod(load, **{left_out: False})
            monkeypatch.setattr(DeepSpeedEngine, "load_checkpoint", forgetful)
            (failed,) = failures(report_of(replace(plan, runs=[second])))
            assert failed.startswith("checkpoint = not stopped") and text in failed

    def test_checks_that_are_not_possible_are_told_in_the_verdict(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kills: exit code 0 for single samples, of which no other cut of the batch can be made."""
        monkeypatch.setattr(
            cli, "run_plan", lambda plan, timeout_s, progress: oracle_runs.session_of(plan)
        )
        monkeypatch.setattr(oracle_plan, "exact_runs", lambda *_: [])  # one is of one rank
        config = tmp_path / f"ds_config.{dist.get_rank()}.json"  # each rank writes its own
        config.write_text(json.dumps(config_of(1)))
        arguments = "--steps 1 --schedules 0 --compile none --data".split()
        model = ["--config", str(config), "--model", f"{MODELS}:right"]
        with redirect_stdout(io.StringIO()) as out:
            assert cli.main([*model, *arguments, f"{MODELS}:single_samples"]) == cli.INCOMPLETE
        *_, verdict = out.getvalue().splitlines()
        left_out = "2 left out: model: micro-batches = whole batch, accumulation invariance"
        assert verdict.startswith("INCOMPLETE") and verdict.endswith(left_out)
        assert "not covered: kernels" in out.getvalue() and "stream races" in out.getvalue()


class TestFaults(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_divided_twice(self, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: a reference that takes its divisor from the system."""
        right = ReduceRule.factors

        def twice(*args: Any, **kwargs: Any) -> ReduceFactors:
            factors = right(*args, **kwargs)
            return ReduceFactors(factors.pre, factors.post / 2)

        monkeypatch.setattr(ReduceRule, "factors", twice)
        report = report_of(plan_of(config_of(1, precision), "right", (RunKind.SGD,)))
        found = failures(report)
        assert any("divided by 8" in text and "not by 4" in text for text in found), found
        assert "2.weight" in {name for row in report.rows for name in row.parameters}

    def test_the_data_of_a_rank_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: a comparison with this rank's own data only."""
        right = DeepSpeedEngine.backward

        def without_rank_1(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return right(self, loss * (dist.get_rank() == 0), *args, **kwargs)

        monkeypatch.setattr(DeepSpeedEngine, "backward", without_rank_1)
        for precision in ("fp32", "bf16"):
            report = report_of(plan_of(config_of(2, precision), "right", TRAINING))
            checks = {row.check for row in report.rows if row.verdict.value == "FAIL"}
            assert {"SGD", "SGD: gradient norm", "accumulation invariance"} <= checks

    def test_a_shard_that_does_not_follow_its_master(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: parameters of stage 3 that nobody looks at between steps."""
        monkeypatch.setattr(publisher.Publisher, "updated", lambda self, start, end: None)
        failed = failures(report_of(plan_of(config_of(3, "bf16"), "right", (RunKind.SGD,))))
        assert any("weight is not its master rounded" in row for row in failed), failed

    def test_a_norm_of_one_shard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: a reported norm that nobody computes anew; all else stays as it is."""
        monkeypatch.setattr(stage_1_and_2, "reduce_squared_norm", lambda squares, group: squares)
        failed = failures(report_of(plan_of(config_of(3), "right", (RunKind.SGD,))))
        assert any("the reported norm is off" in row for row in failed), failed
        assert not any(": gradient of" in row for row in failed), failed

    def test_an_optimizer_that_steps_too_far(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: parameters that are not compared, as the gradients are right here."""
        monkeypatch.setattr(step_sequence, "clip_factor", lambda norm, limit: 1.0)
        report = report_of(plan_of(config_of(1), "right", (RunKind.SGD, RunKind.USER)))
        wrong = [row for row in report.rows if row.verdict.value == "FAIL"]
        assert any("value after the step" in row.detail and row.check == "SGD" for row in wrong)

    @pytest.mark.world_size(4)
    def test_a_tied_weight_of_one_stage(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: gradients that each stage has to itself."""
        instructions = PipelineEngine._INSTRUCTION_MAP
        monkeypatch.setitem(instructions, ReduceTiedGrads, lambda engine: None)
        failed = failures(report_of(divided("stages", (RunKind.SGD,), 1, "fp32")))
        assert any("at step 0 tied_modules.in.weight is off" in row for row in failed), failed

    @pytest.mark.world_size(4)
    def test_gradients_of_a_piece(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: pieces of sequences that are compared with pieces."""
        pytest.importorskip("transformers")
        monkeypatch.setattr(ParallelMap, "replicas", ParallelMap.data)
        failed = failures(report_of(divided("sequences", (RunKind.SGD,), 2, "fp32")))
        assert any("gradient of model" in row for row in failed), failed

    @pytest.mark.world_size(4)
    def test_gradients_for_other_experts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: experts that are compared with those of the same number on each rank."""
        backward = staticmethod(lambda ctx, grad: (None, grad))
        monkeypatch.setattr(sharded_moe._AllToAll, "backward", backward)
        report = report_of(divided("experts", (RunKind.SGD,), 1, "fp32"))
        experts = "layer.deepspeed_moe.experts.deepspeed_experts"
        assert f"{experts}.3.weight" in culprits(report), failures(report)

    @pytest.mark.world_size(4)
    def test_receives_that_are_posted_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kills: a device without limits, on which all of them find a processor."""
        issued = lambda lane, count: (setattr(lane, "_issued", 1 << 30), lane.post())  # noqa: E731
        monkeypatch.setattr(stage_channels._Lane, "issued", issued)
        config, parts = config_of(1), Parts(stages=2)
        kinds, how = (RunKind.SIM,), {"schedules": 1, "ranks": 4, "parts": parts}
        failed = failures(report_of(plan_of(config, "interleaved", kinds, **how)))
        assert any(row.startswith("queues") and "_post_next" in row for row in failed), failed

    def test_a_loss_that_is_a_sum(self) -> None:
        """The engine is right and the model is not: the row of the model says so."""
        report = report_of(plan_of(config_of(1, "bf16"), "sum_loss", (RunKind.SGD,)))
        (row,) = [row for row in report.rows if row.check.startswith("model:")]
        assert row.verdict.value == "FAIL" and "in one plain process" in row.detail

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_gradients_dropped_on_odd_micro_batches(self, precision: str) -> None:
        """Kills: a reference that repeats the model's bug in the same places."""
        plan = plan_of(config_of(1, precision), "forgetful", (RunKind.SGD, RunKind.SPLIT))
        report = report_of(plan)
        assert failures(report)
        assert report.to_json()["culprits"] == ["2.weight"]


PACKAGE = Path(deepspeed.__file__).parent
# Constants of that kind which keep no path from a small model.
OTHERS = {
    ("runtime/gradients/ledger/fingerprint.py", "ROWS_AT_ONCE"): "of a check, not of a step",
    ("runtime/gradients/buckets.py", "ALIGNED_NUMEL"): "a unit of places in memory",
    ("runtime/zero/estimates/stages_1_and_2.py", "BUCKET_NUMEL"): "a formula's default",
    ("runtime/zero/parameters/own_draws.py", "KEPT_NUMEL"): "a limit, beyond which is an error",
}
LEAST = 1024


ENDINGS = ("_NUMEL", "_CHUNK", "AT_ONCE")


def is_name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def sizes_in(path: Path) -> list[str]:
    """Module constants that count elements, by their names."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = (one.id for target in targets for one in ast.walk(target) if is_name(one))
        found += [name for name in names if name.isupper() and name.endswith(ENDINGS)]
    return found


def test_every_size_of_the_training_path_is_lowered() -> None:
    # Kills: a constant that a later change adds, above every model of the tests.
    known = {(module.replace(".", "/") + ".py", name) for module, name in SIZES}
    found = {
        (f"deepspeed/{path.relative_to(PACKAGE).as_posix()}", name)
        for part in ("runtime", "ops", "moe", "sequence", "comm")
        for path in (PACKAGE / part).rglob("*.py")
        for name in sizes_in(path)
    }
    others = {(f"deepspeed/{path}", name) for path, name in OTHERS}
    assert found - others == known


def test_sizes_are_lowered_and_put_back() -> None:
    before = [getattr(importlib.import_module(module), name) for module, name in SIZES]
    assert all(size >= LEAST for size in before)
    with pytest.raises(ZeroDivisionError), lowered_sizes(100):
        assert publisher.UPDATE_NUMEL == 100
        raise ZeroDivisionError
    assert before == [getattr(importlib.import_module(module), name) for module, name in SIZES]
    with pytest.raises(ValueError, match="numel=0"), lowered_sizes(0):
        pass
    assert piece_numel(1600, 2) == 100 and piece_numel(3, 2) == 1


class TestOracle(DistributedTest):
    world_size = 2

    def test_parameters_on_the_host_pass(self) -> None:
        """Kills: shards in page-locked memory compared with what is on the device."""
        config = config_of(3, "bf16")
        host = {"device": "cpu", "pin_memory": True}
        config["zero_optimization"] |= {"offload_param": host, "offload_optimizer": host}
        assert failures(report_of(plan_of(config, "right", (RunKind.SIM,), schedules=1))) == []

    def test_reused_staging_buffers_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a run in which no buffer is used twice, or without the optimizer that fills them.
        config = config_of(1, "bf16")
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        plan = plan_of(config, "right", (RunKind.SIM,), steps=2, schedules=1)
        assert failures(report_of(plan)) == []

        take = StagingBuffers.take

        def forgetful(self: StagingBuffers, *args: object) -> object:
            self._free = type(self._free)((memory, None) for memory, _ in self._free)
            return take(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(StagingBuffers, "take", forgetful)
        failed = failures(report_of(plan))
        assert any("the host never waits" in row for row in failed), failed
