"""Sequence-parallel training equals one process with whole sequences.

Mutations seen to fail here: divide by the data-parallel ranks only; reduce over the data group
only; the exchange's backward being its forward; a loss whose backward takes its own slice only; key
heads split without regard to query heads."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from deepspeed.verify import check_streams
from unit import models
from unit.common import DistributedTest
from unit.models import config_of, seeded
from unit.v1.gathering import Tensors, from_all_ranks, gradients_of, masters_of
from unit.v1.looping import each, each_pair

STEPS = 2
VOCABULARY, LENGTH, ROWS, HEAD = 11, 8, 2, 3
LEARNING_RATE = 0.2
IGNORED = -100
# fp32: sums are grouped otherwise (over ranks, and in the attention's exchange), relative to a
# gradient's norm a few 1e-7. bf16: weights, activations and each rank's gradient are rounded to 8
# bits in another order; a wrong factor is off by 0.5 or 1.
TOLERANCE = {"fp32": 3e-6, "bf16": 0.04}


class CausalCore(nn.Module):
    """Attention over whole sequences, [s, b, h, d] or [b, s, h, d]; key heads may be fewer."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The context, heads and features in one dimension."""
        order = (1, 2, 0, 3) if self.positions == 0 else (0, 2, 1, 3)
        query, key, value = (t.permute(order) for t in (query, key, value))  # [b, h, s, d]
        times = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
        scores = query @ key.transpose(-1, -2) / HEAD**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        context = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        back = (2, 0, 1, 3) if self.positions == 0 else (0, 2, 1, 3)
        return context.permute(back).flatten(2)


class Block(nn.Module):
    """Embeds, attends, and returns logits, [b, s, vocabulary]."""

    def __init__(self, heads: int = 4, key_heads: int = 4, positions: int = 1) -> None:
        super().__init__()
        self.heads, self.key_heads, self.positions = heads, key_heads, positions
        width = heads * HEAD
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * key_heads * HEAD)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.attention: Any = CausalCore(positions)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits of tokens [b, s] at places [s]."""
        hidden = self.embed(tokens) + self.place(places)
        rows_first = self.positions == 1
        normed = self.norm(hidden) if rows_first else self.norm(hidden).transpose(0, 1)
        query = self.query(normed).unflatten(-1, (self.heads, HEAD))
        key, value = self.key_value(normed).unflatten(-1, (2, self.key_heads, HEAD)).unbind(2)
        batch = () if isinstance(self.attention, CausalCore) else (1 - self.positions,)
        context = self.out(self.attention(query, key, value, *batch))
        hidden = hidden + (context if rows_first else context.transpose(0, 1))
        return self.head(hidden.tanh())


def make_model(heads: int = 4, key_heads: int = 4, positions: int = 1) -> Block:
    """The same weights each time."""
    return seeded(Block, heads, key_heads, positions, seed=1)


def samples(
    step: int, micro: int, data_rank: int, ignore: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [b, s]; with `ignore` another number of labels counts on every rank."""
    seed = 1000 * step + 100 * data_rank + micro
    tokens, labels = models.tokens(seed, VOCABULARY, 2, ROWS, LENGTH)
    if ignore:
        labels[0, 3 + data_rank :] = IGNORED
        labels[1, 0] = IGNORED
    return tokens, labels


def reference_step(
    model: Block, step: int, accumulation: int, data_ranks: int, ignore: bool = False
) -> tuple[float, Tensors]:
    """One SGD step on the whole batch; returns the loss and the gradients before it."""
    indices = [(micro, rank) for rank in range(data_ranks) for micro in range(accumulation)]
    batch = [samples(step, *index, ignore) for index in indices]
    tokens, labels = (torch.cat(parts) for parts in zip(*batch, strict=True))
    logits = model(tokens, torch.arange(LENGTH))
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.item(), {name: param.grad.clone() for name, param in model.named_parameters()}


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def own_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Style 1: the mean over the tokens of this rank."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    of = (logits.float().flatten(0, 1), labels.flatten())
    return F.cross_entropy(*of, reduction="sum", ignore_index=IGNORED)


def gathered(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Style 2: all ranks make the same loss of gathered sums and counts, as client libraries do."""
    group = groups._get_sequence_parallel_group()
    totals = differentiable.all_gather(summed(logits, labels), group=group)
    counts = differentiable.all_gather((labels != IGNORED).sum(), group=group)
    return sum(totals) / sum(counts)


def ours(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Style 3: our cross entropy gathers the losses; its input is [s, b, vocabulary]."""
    group = groups._get_sequence_parallel_group()
    return vocab_sequence_parallel_cross_entropy(logits.transpose(0, 1), labels.t(), group).mean()


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Style 4: unequal counts; the sum over this rank's tokens by the mean count of all ranks."""
    count = (labels != IGNORED).sum().float()
    dist.all_reduce(count)
    return summed(logits, labels) * dist.get_world_size() / count


STYLES: dict[str, Loss] = {
    "own mean": own_mean,
    "gathered": gathered,
    "ours": ours,
    "weighted": weighted,
}


def make_mpu(data: int, sequence: int) -> Any:
    """An mpu that knows sequence groups, as client libraries have it."""
    rank = dist.get_rank()
    starts = range(0, data * sequence, sequence)
    rows = [dist.new_group(range(first, first + sequence)) for first in starts]
    return SimpleNamespace(
        get_sequence_parallel_group=lambda: rows[rank // sequence],
        get_sequence_parallel_world_size=lambda: sequence,
        get_sequence_parallel_rank=lambda: rank % sequence,
    )


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, floor: float) -> bool:
    """Equal within the tolerance of its norm, or of `floor` where it nearly vanishes."""
    found, wanted = found.double(), wanted.double()
    return (found - wanted).norm().item() <= tolerance * max(wanted.norm().item(), floor)


def norm_of(tensors: Tensors) -> float:
    return math.sqrt(sum(value.double().square().sum().item() for value in tensors.values()))


class Run:
    """One engine and its reference."""

    def __init__(
        self,
        sizes: tuple[int, int],
        how: str,
        stage: int,
        precision: str,
        accumulation: int = 1,
        style: str = "own mean",
        heads: tuple[int, int] = (4, 4),
        positions: int = 1,
    ) -> None:
        groups.reset()
        self.sizes, self.accumulation, self.style = sizes, accumulation, style
        self.tolerance, self.is_plain = TOLERANCE[precision], stage == 0 and precision == "fp32"
        self.name = f"{sizes} {how} zero {stage} {precision} x{accumulation} {style}"
        self.reference = make_model(*heads, positions)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        model = make_model(*heads, positions)
        if dist.get_rank() % sizes[1]:
            # Only the first rank's weights count: the broadcast must cover ranks that share a
            # sequence.
            nn.init.zeros_(model.head.weight)
        keys: dict[str, Any] = {"verify": {"collectives": True}}
        more: dict[str, Any] = {}
        if how == "mesh":
            more["mesh_param"] = sizes
        elif how == "mpu":
            more["mpu"] = make_mpu(*sizes)
        else:
            keys["sequence_parallel_size"] = sizes[1]
        zero = {"reduce_bucket_size": 100}
        config = config_of(stage, ROWS, accumulation, precision, zero_optimization=zero, **keys)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, **more
        )
        group = groups._get_sequence_parallel_group()
        model.attention = DistributedAttention(model.attention, group, 2, positions)
        self.params = dict(model.named_parameters())

    def micro_step(self, step: int, micro: int) -> float:
        """Forward and backward of one micro-batch; returns this rank's loss."""
        rank, size = groups._get_sequence_parallel_rank(), self.sizes[1]
        data_rank = groups._get_data_parallel_rank()
        tokens, labels = samples(step, micro, data_rank, self.style == "weighted")
        places = torch.arange(LENGTH).chunk(size)[rank]
        loss = STYLES[self.style](self.engine(tokens[:, places], places), labels[:, places])
        self.engine.backward(loss)
        return loss.item()

    def check(self, found: Tensors, wanted: Tensors, what: str) -> None:
        """Compare by name."""
        floor = 0.05 * norm_of(wanted)
        for name, value in wanted.items():
            told = f"{self.name}: {what} of {name}: {found[name]} is not {value}"
            assert close(found[name], value, self.tolerance, floor), told

    def run(self, steps: int = STEPS) -> None:
        """Train and compare after every step."""
        # Sequence ranks share samples.
        assert self.engine.train_batch_size() == ROWS * self.accumulation * self.sizes[0]
        for step in range(steps):
            losses = []
            for micro in range(self.accumulation):
                if micro:
                    self.engine.step()
                losses.append(self.micro_step(step, micro))
            reference, within = self.reference, self.tolerance
            with torch.no_grad():
                before = {name: param.clone() for name, param in reference.named_parameters()}
                for param in reference.parameters():
                    param.data = param.data.to(self.dtype)
            of_all = (self.accumulation, self.sizes[0], self.style == "weighted")
            wanted_loss, wanted = reference_step(reference, step, *of_all)
            self.check(gradients_of(self.params, self.is_plain), wanted, f"step {step}: gradient")
            self.engine.step()
            loss = torch.tensor(losses).mean()
            dist.all_reduce(loss)
            mean = loss.item() / dist.get_world_size()
            assert abs(mean - wanted_loss) <= within * wanted_loss, self.name
            found, norm = float(self.engine.get_global_grad_norm()), norm_of(wanted)
            assert abs(found - norm) <= within * norm, self.name
            for name, param in reference.named_parameters():
                param.data = before[name] - LEARNING_RATE * wanted[name].float()
            masters = {name: param.detach() for name, param in reference.named_parameters()}
            self.check(masters_of(self.params, self.is_plain), masters, f"step {step}: parameter")
        self.engine.destroy()


class TestTwoRanks(DistributedTest):
    world_size = 2

    @each_pair(how=["mesh", "mpu", "config"], stage=[0, 1, 2], precision=["fp32", "bf16"])
    def test_equals_one_process(self, how: str, stage: int, precision: str) -> None:
        Run((1, 2), how, stage, precision, accumulation=2 if stage else 1).run()

    def test_ranks_that_share_no_sequence(self) -> None:
        Run((2, 1), "mesh", 1, "fp32").run()

    @each(row=list(zip(STYLES, itertools.cycle((0, 2)), strict=False)))
    def test_every_loss_style(self, row: tuple[str, int]) -> None:
        # Kills: a divisor that is right for one way to write the loss and off by the degree for
        # another.
        style, stage = row
        Run((1, 2), "mesh", stage, "fp32", style=style).run(steps=1)

    # Equal, repeated and uneven numbers of heads, with places before and behind them.
    @each(row=[(5, 5, 0), (5, 5, 1), (4, 2, 0), (4, 1, 1), (3, 1, 0), (6, 3, 0), (6, 3, 1)])
    def test_heads(self, row: tuple[int, int, int]) -> None:
        *heads, positions = row
        Run((1, 2), "mesh", 1, "fp32", heads=(heads[0], heads[1]), positions=positions).run(1)


class TestSimulated(DistributedTest):
    """Where all work is late a missing wait reads NaN, and the stream checker names it."""

    world_size = 2

    def test_streams(self) -> None:
        # Kills: an exchange on its own stream that does not wait for its input, or whose result is
        # used before it is there.
        results = []
        with simulate(), check_streams():
            for stream in (None, get_accelerator().Stream()):
                device = get_accelerator().current_device_name()
                model = make_model(key_heads=2).to(device)
                world = dist.get_world_group()
                model.attention = DistributedAttention(model.attention, world, 2, 1, stream)
                tokens, labels = (t.to(device) for t in samples(0, 0, 0))
                places = torch.arange(LENGTH, device=device).chunk(2)[dist.get_rank()]
                own_mean(model(tokens[:, places], places), labels[:, places]).backward()
                results.append({name: param.grad.cpu() for name, param in model.named_parameters()})
        wanted = make_model(key_heads=2)
        _, grads = reference_step(wanted, 0, 1, 1)
        for found in results:
            for name, value in grads.items():
                dist.all_reduce(found[name])
                assert close(found[name] / 2, value, TOLERANCE["fp32"], 0.05), name


class TestFourRanks(DistributedTest):
    world_size = 4

    @each(
        row=[
            ((2, 2), "mesh", 0, "fp32"),
            ((2, 2), "mpu", 1, "fp32"),
            ((2, 2), "config", 2, "bf16"),
            ((1, 4), "mpu", 0, "fp32"),
            ((1, 4), "mesh", 2, "bf16"),
            ((1, 4), "config", 1, "bf16"),
        ]
    )
    def test_equals_one_process(self, row: tuple[tuple[int, int], str, int, str]) -> None:
        Run(*row, accumulation=2).run()

    # Not "gathered": on gloo, torch's own backward of all_gather takes ranks of a group for global
    # ones and raises.
    @each(style=[style for style in STYLES if style != "gathered"])
    def test_every_loss_style(self, style: str) -> None:
        Run((2, 2), "mesh", 1, "fp32", style=style).run(steps=1)

    @each(heads=[(7, 7), (6, 3), (4, 2), (6, 2), (10, 5)])
    def test_heads(self, heads: tuple[int, int]) -> None:
        Run((1, 4), "mesh", 1, "fp32", heads=heads).run(steps=1)


def initialize(**more: Any) -> Any:
    """An engine of one linear layer."""
    model = nn.Linear(3, 2)
    config = config_of(0, 1, **more.pop("config", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **more)[0]


class TestSetup(DistributedTest):
    world_size = 4

    def test_mesh_and_configuration_make_the_same_groups(self) -> None:
        # Kills: a mesh that outlives its engine, so that a later engine without one halves its
        # batch unnoticed.
        rank = dist.get_rank()
        for more in (
            {"mesh_param": (2, 2)},
            {"config": {"sequence_parallel_size": 2, "data_parallel_size": 2}},
        ):
            engine = initialize(**more)
            group = groups._get_sequence_parallel_group()
            assert dist.get_all_ranks_from_group(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert groups._get_data_parallel_group_ranks() == [rank % 2, rank % 2 + 2]
            assert engine.train_batch_size() == 2 and engine.dp_world_size == 2
            engine.destroy()
            assert groups.mesh_device is None
        assert initialize().train_batch_size() == 4

    def test_upstreams_module_is_an_mpu(self) -> None:
        # Kills: getters of other groups than the engine's; what only a mesh could say.
        with pytest.raises(RuntimeError, match="call .*initialize_sequence_parallel"):
            parallel_state_sp.get_sequence_parallel_rank()
        with pytest.raises(AttributeError, match="hold the whole model"):
            parallel_state_sp.get_model_parallel_rank  # noqa: B018
        parallel_state_sp.initialize_sequence_parallel(2)
        rank = dist.get_rank()
        of_all = parallel_state_sp.get_sequence_data_parallel_group()
        assert dist.get_all_ranks_from_group(of_all) == [0, 1, 2, 3]
        assert parallel_state_sp.get_sequence_data_parallel_rank() == rank
        assert parallel_state_sp.get_sequence_data_parallel_world_size() == 4
        engine = initialize(mpu=parallel_state_sp)
        group = groups._get_sequence_parallel_group()
        assert group is parallel_state_sp.get_sequence_parallel_group()
        assert dist.get_all_ranks_from_group(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert parallel_state_sp.get_sequence_parallel_world_size() == 2
        assert parallel_state_sp.get_sequence_parallel_rank() == rank % 2
        assert engine.train_batch_size() == 2 and engine.dp_world_size == 2
        engine.destroy()

    def test_ranks_of_a_sequence_get_the_same_samples(self) -> None:
        engine = initialize(mesh_param=(2, 2))
        loader = engine.deepspeed_io(list(range(8)))
        drawn = torch.cat(list(loader))
        first, second, third, fourth = (own.tolist() for own in from_all_ranks(drawn))
        assert first == second and third == fourth and sorted(first + third) == list(range(8))
        engine.destroy()

    def test_contradictions_name_both_numbers(self) -> None:
        # All before a collective of one rank alone: no rank waits.
        mesh, mpu = {"mesh_param": (2, 2)}, {"mpu": make_mpu(2, 2)}
        shape = r"expected \(data parallel ranks, sequence parallel ranks\), got \(4,\)"
        for match, more in (
            ("2 data-parallel times 3 .* there are 4 ranks", {"mesh_param": (2, 3)}),
            (shape, {"mesh_param": (4,)}),
            ("beside an mpu", {**mesh, **mpu}),
        ):
            with pytest.raises(ValueError, match=match):
                initialize(**more)
        parts = "data_parallel_size"
        for size, told, more, keys in (
            (3, "sequence_parallel_size: 3 does not divide the 4", {}, {}),
            (4, "sequence_parallel_size: 4, but the mesh has 2", mesh, {}),
            (4, "but the mpu has 2", mpu, {}),
            (2, f"{parts}: 4, but there are 2 data-parallel ranks", {}, {parts: 4}),
        ):
            with pytest.raises(DeepSpeedConfigError, match=told):
                initialize(**more, config={"sequence_parallel_size": size, **keys})

    def test_gradients_travel_in_the_type_of_its_own_key(self) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "communication_data_type": "bf16",
        }
        own = {"seq_parallel_communication_data_type": "bf16"}
        for keys, dtype in (
            ({}, torch.bfloat16),
            ({"sequence_parallel_size": 2}, torch.float32),
            ({"sequence_parallel_size": 2, **own}, torch.bfloat16),
        ):
            assert DeepSpeedConfig({**config, **keys}).communication_data_type == dtype
