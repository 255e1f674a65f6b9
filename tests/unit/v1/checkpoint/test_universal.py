"""Universal checkpoints go on in any other division over ranks, bit-equal by name."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import UNIVERSAL_FOLDER
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.utils import groups
from unit.common import DistributedFixture, DistributedTest

from . import test_experts
from . import test_pipeline as pipeline
from .runs import differences
from .test_resharding import CASES, STEPS, expected, make, masters_and_moments, train

TAG = "universal"


def convert(source: str, *options: str, tag: str | None = None) -> None:
    """Make `<source>/universal` of a checkpoint in `source`, the newest if no tag is given."""
    if tag is None:
        with open(os.path.join(source, "latest")) as file:
            tag = file.read()
    folders = [
        "--input_folder",
        os.path.join(source, tag),
        "--output_folder",
        os.path.join(source, TAG),
    ]
    main(parse_arguments([*folders, *options]))


UNIVERSAL = {"checkpoint": {"load_universal": True}}
# Saved as the first, loaded as the second.
ACROSS = [
    ("fp32-2-dealt", "fp32-1"),
    ("fp32-0", "fp32-2"),
    ("bf16-0", "bf16-0"),
    ("bf16-2", "accumulate-1"),
]
ACROSS += [
    ("fp16-2", "fp16-2"),
    ("fp16-2", "fp16-0"),
    ("fp16-0-whole", "fp16-2"),
    ("fp32-2-elastic", "fp32-0"),
]
STAGE_1, STAGE_2 = ({"zero_optimization": {"stage": stage}} for stage in (1, 2))
PIPELINES: dict[str, dict[str, Any]] = {
    "fp32-1": {**STAGE_1, "grouped": True},
    "fp32-0": {},
    "bf16-1": {"bf16": {"enabled": True}, **STAGE_1},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "fp32-0": {},
    "fp32-2": STAGE_2,
    "bf16-1": {"bf16": {"enabled": True}, **STAGE_1},
}


class SavedByTwo(DistributedFixture):
    """Some cases, saved by two ranks and converted, with what each holds."""

    world_size = 2
    exec_timeout = 120

    def run(self, class_tmpdir: Any) -> None:
        for case in sorted({case for case, _ in ACROSS}):
            engine = make(case)
            train(engine, STEPS)
            self.save(engine, f"{class_tmpdir}/{case}", expected(engine))
        for case, keys in EXPERTS.items():
            engine = test_experts.make(2, 1, **keys)
            test_experts.train(engine, STEPS)
            self.save(engine, f"{class_tmpdir}/experts-{case}", test_experts.whole(engine))
        groups.reset()  # a pipeline divides the ranks otherwise
        for case, keys in PIPELINES.items():
            engine = pipeline.make(2, **keys)
            pipeline.train(engine, STEPS)
            self.save(engine, f"{class_tmpdir}/pipeline-{case}", pipeline.whole(engine))

    @staticmethod
    def save(engine: Any, folder: str, held: Any) -> None:
        engine.save_checkpoint(folder)
        if dist.get_rank() == 0:
            torch.save(held, f"{folder}.pt")
            convert(folder)


def load(engine: Any, folder: str) -> Any:
    """Load the universal checkpoint in `folder`; returns what the run that saved it held."""
    path, _ = engine.load_checkpoint(folder)
    assert path == os.path.join(folder, TAG)
    return torch.load(f"{folder}.pt", weights_only=False)


class TestOtherDivisions(DistributedTest):
    """Kills: elements in the order of files; padding kept; a group's options for another's; the
    step, scale or position in the data lost; a frozen, tied or expert's weight forgotten.
    """

    world_size = [1, 3]
    exec_timeout = 120

    def test_the_same_by_name(self, SavedByTwo: Any, class_tmpdir: Any) -> None:
        # One test: the fixture runs for each.
        self.other_worlds(str(class_tmpdir))
        self.other_expert_groups(str(class_tmpdir))
        groups.reset()
        self.other_stages(str(class_tmpdir))

    def other_worlds(self, folder: str) -> None:
        for case, into in ACROSS:
            CASES["universal"] = {**CASES[into], **UNIVERSAL}
            engine = make("universal", seed=2)
            train(engine, 1)  # state that loading must replace
            wanted, found = load(engine, f"{folder}/{case}"), expected(engine)
            if case != into:
                wanted, found = masters_and_moments(wanted), masters_and_moments(found)
            assert differences(wanted, found) == [], (case, into)
            train(engine, 1)

    def other_stages(self, folder: str) -> None:
        for case, keys in PIPELINES.items():
            engine = pipeline.make(dist.get_world_size(), seed=2, **keys, **UNIVERSAL)
            pipeline.train(engine, 1)
            wanted = load(engine, f"{folder}/pipeline-{case}")
            assert differences(wanted, pipeline.whole(engine)) == [], case
            assert engine.global_steps == STEPS
            pipeline.train(engine, 1)

    def other_expert_groups(self, folder: str) -> None:
        for case, keys in EXPERTS.items():
            engine = test_experts.make(1, 2, **keys, **UNIVERSAL)  # each rank has all of them
            wanted = load(engine, f"{folder}/experts-{case}")
            assert differences(wanted, test_experts.whole(engine)) == [], case
            test_experts.train(engine, 1)


class TestIncomplete(DistributedTest):
    """Of upstream's folder without a manifest. Kills: what is missing taken for zeros or left."""

    world_size = 1

    def test_refused_and_nothing_changed(self, tmpdir: Any) -> None:
        CASES["universal"] = {
            **CASES["fp32-2"],
            "checkpoint": {"load_universal": True, "verify": "off"},
        }
        engine = make("universal")
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir), tag="t")
        convert(str(tmpdir))
        train(engine, 1)
        before = expected(engine)
        good = Path(str(tmpdir), TAG, UNIVERSAL_FOLDER)
        for damage, message in (
            (
                lambda zero: shutil.rmtree(zero / "last.weight"),
                r"of the \d+ elements .* of first\.weight",
            ),
            (
                lambda zero: (zero / "first.bias" / "exp_avg.pt").unlink(),
                "only some of .* have optimizer state 'exp_avg'",
            ),
            (
                lambda zero: os.truncate(zero / "first.bias" / "exp_avg_sq.pt", 700),
                r"exp_avg_sq\.pt .* cannot be read",
            ),
            (
                lambda zero: shutil.copytree(zero / "last.bias", zero / "more.bias"),
                "more.bias is not in this model",
            ),
            (
                lambda zero: shutil.copy(zero / "last.bias" / "fp32.pt", zero / "first.bias"),
                r"first\.bias has shape \(3,\)",
            ),
            (
                lambda zero: (zero / "optimizer_state.pt").unlink(),
                r"optimizer_state\.pt does not exist",
            ),
            (shutil.rmtree, "is no universal checkpoint.*ds_to_universal"),
        ):
            zero = (
                Path(shutil.copytree(good.parent, Path(str(tmpdir), "bad"), dirs_exist_ok=True))
                / UNIVERSAL_FOLDER
            )
            damage(zero)
            with pytest.raises(CheckpointError, match=message):
                engine.load_checkpoint(str(tmpdir), tag="bad")
            assert differences(before, expected(engine)) == []
            shutil.rmtree(zero.parent)
        engine.load_checkpoint(str(tmpdir))
        assert differences(before, expected(engine)) != []
