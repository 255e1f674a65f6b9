"""Models of transformers with sequences split over ranks train as one process with whole ones.

The reference has no cache: with one, transformers lets packed documents see each other.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from unit.common import DistributedTest
from unit.models import config_of, seeded, tokens
from unit.one_process import assert_gradients
from unit.v1.looping import each

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.utils import groups

transformers = pytest.importorskip("transformers", minversion="5.23")

# What all models import at their first use: here forked ranks have it already.
from transformers import masking_utils, modeling_layers  # noqa: E402, F401
from transformers.modeling_flash_attention_utils import _is_packed_sequence  # noqa: E402

from deepspeed.runtime.sequence_parallel.attention_hf import _Door  # noqa: E402
from deepspeed.runtime.sequence_parallel.sequence_masks import check_library  # noqa: E402
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # noqa: E402

VOCABULARY, ROWS, LENGTH, IGNORED = 13, 2, 16, -100
KINDS = ("packed", "padded", "plain")
# fp32; sums are grouped otherwise over ranks, and attention's kernels see other shapes.
TOLERANCE = 5e-6
WITHIN = {"rtol": TOLERANCE, "atol": 0}

Batch = dict[str, torch.Tensor]


def make_model(name: str) -> Any:
    """The same weights each time; twice as many query heads as key heads, where there are such."""
    common = {"vocab_size": VOCABULARY, "use_cache": False, "attn_implementation": "sdpa"}
    wide = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    wide |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    if name == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
        none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config = transformers.GPT2Config(**sizes, **none, **common)
    elif name == "llama":
        config = transformers.LlamaConfig(**wide, **common)
    else:
        # One layer with, one without a window that is longer than what a rank holds.
        sliding = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
        config = transformers.Qwen2Config(**wide, **sliding, **common)
    return seeded(transformers.AutoModelForCausalLM.from_config, config, seed=5)


def batch_of(kind: str, index: int) -> Batch:
    """Whole sequences; labels are the next tokens."""
    given = tokens(index, VOCABULARY, ROWS, LENGTH)
    labels = F.pad(given[:, 1:], (0, 1), value=IGNORED)
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    batch = {"input_ids": given, "position_ids": positions, "labels": labels}
    if kind == "packed":
        # A document that two ranks share, one inside of a rank, and another cut in each row.
        for row, starts in enumerate(((5, 10, 11), (3,))):
            for start in starts:
                positions[row, start:] -= positions[row, start].clone()
                labels[row, start - 1] = IGNORED
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(given)
        # On the left, where other positions would look at it; and on the right.
        batch["attention_mask"][0, :9] = batch["attention_mask"][1, 13:] = 0
        labels[0, :9] = labels[1, 12:] = IGNORED
    return batch


def piece_of(batch: Batch, rank: int, ranks: int) -> Batch:
    return {key: tensor.chunk(ranks, dim=1)[rank] for key, tensor in batch.items()}


def loss_of(model: Any, batch: Batch, group: Any = None) -> torch.Tensor:
    """The mean over the labels of a sequence, of which the ranks of `group` have pieces."""
    inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}
    count, ranks = (batch["labels"] != IGNORED).sum(), 1
    if group is not None:
        dist.all_reduce(count, group=group)
        ranks = dist.get_world_size(group)
    logits, labels = model(**inputs).logits.flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction="sum") * ranks / count


def mean_of(loss: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Over two or more ranks, of a loss that stays as it is."""
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)


# Each with packed, padded and plain batches; sequences of 2 and of 4 ranks at every stage.
CASES = [("llama", 2, 0), ("gpt2", 2, 1), ("gpt2", 2, 2), ("qwen2", 2, 3), ("qwen2", 4, 0)]
CASES += [("llama", 4, 1), ("gpt2", 4, 2), ("qwen2", 4, 2), ("llama", 4, 3)]


class TestTrains(DistributedTest):
    world_size = 4

    @each(case=CASES)
    def test_as_one_process(self, case: tuple[str, int, int]) -> None:
        # Kills: masks and documents of a rank's own piece, windows counted from its border, padding
        # of the own piece only, a layer's ratio of heads where key heads are repeated, gradients
        # divided by the data-parallel ranks alone.
        name, ranks, stage = case
        groups.reset()
        reference, model = make_model(name), make_model(name)
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model, "sdpa", ranks, ROWS, seq_length=LENGTH, seq_length_is_variable=False
        )
        zero = {"reduce_bucket_size": 500, "stage3_param_persistence_threshold": 0}
        config = config_of(stage, ROWS, len(KINDS), zero_optimization=zero)
        config["verify"] = {"collectives": True}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
        group = mpu.get_sequence_parallel_group()
        rows = dist.get_world_size() // ranks
        own, piece = divmod(dist.get_rank(), ranks)
        assert groups._get_sequence_parallel_rank() == mpu.get_sequence_parallel_rank() == piece
        for index, kind in enumerate(KINDS):
            whole = [batch_of(kind, 10 * index + row) for row in range(rows)]
            wanted = [loss_of(reference, batch) for batch in whole]
            (sum(wanted) / (rows * len(KINDS))).backward()
            loss = loss_of(engine, piece_of(whole[own], piece, ranks), group)
            engine.backward(loss)
            torch.testing.assert_close(mean_of(loss, group), wanted[own].detach(), **WITHIN)
            if index == len(KINDS) - 1:
                assert_gradients(model, reference, TOLERANCE)
            engine.step()
        engine.destroy()


class TestRegistering(DistributedTest):
    world_size = 2

    def test_what_is_split(self, tmpdir: Any) -> None:
        # Kills: another model of the process split too, evaluation split against what was asked,
        # masks that nobody opens, a model by name that isn't split.
        groups.reset()
        other, model = make_model("llama"), make_model("llama")
        other.config = model.config
        batch = batch_of("padded", 1)
        wanted = loss_of(other, batch)
        register = UlyssesSPAttentionHF.register_with_transformers
        mpu = register(model, None, 2, ROWS, disable_in_eval=True)
        rank, group = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group()
        piece = piece_of(batch, rank, 2)
        assert torch.equal(loss_of(other, batch), wanted)
        assert torch.equal(loss_of(model.eval(), batch), wanted)
        model.eval().generate(batch["input_ids"][:1, :4], max_new_tokens=3, do_sample=False)
        split = mean_of(loss_of(model.train(), piece, group))
        torch.testing.assert_close(split, wanted.detach(), **WITHIN)

        model.gradient_checkpointing_enable()
        again = loss_of(model, piece, group)
        again.backward()
        torch.testing.assert_close(mean_of(again), wanted.detach(), **WITHIN)

        folder = Path(str(tmpdir)) / f"model-{rank}"
        other.config.save_pretrained(folder)
        register(str(folder), "sdpa", 2, ROWS)
        later = make_model("llama")
        split = mean_of(loss_of(later, piece, group))
        torch.testing.assert_close(split, wanted.detach(), **WITHIN)
        with pytest.raises(ValueError, match="are 0 to 7: give the model position_ids"):
            later(piece["input_ids"])
        # One rank each: nothing is split any more.
        register(str(folder), "sdpa", 1, ROWS)
        assert torch.equal(loss_of(later, batch), wanted)

    def test_attention_waits_for_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: position ids from which flash attention learns in each layer, with a wait, whether
        # documents are packed; limits of this rank's piece.
        groups.reset()
        told: list[list[Any]] = []
        names = [f"{kind}_{of}" for kind in ("cu_seq_lens", "max_length") for of in "qk"]

        def flash(module: Any, query: Any, *args: Any, **more: Any) -> Any:
            limits = [more.get(name) for name in names]
            with device.count_host_waits() as counted:
                if any(limit is None for limit in limits):
                    # As transformers' flash attention does.
                    assert not _is_packed_sequence(more.get("position_ids"), query.shape[0])
            assert not counted.total, counted.by_place
            told.append([one.tolist() if torch.is_tensor(one) else one for one in limits])
            return sdpa(module, query, *args, **more)

        door = _Door.of("sdpa")
        sdpa = door.attend
        monkeypatch.setattr(door, "attend", flash)
        model = make_model("llama")
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1)
        for kind, edges in (
            ("plain", [None] * 4),
            ("packed", [[0, 5, 10, 11, LENGTH]] * 2 + [5] * 2),
        ):
            batch = {key: tensor[:1] for key, tensor in batch_of(kind, 1).items()}
            with simulate() as device:
                loss_of(model, piece_of(batch, mpu.get_sequence_parallel_rank(), 2))
            assert told == [edges] * 2
            told.clear()

    def test_refusals(self) -> None:
        groups.reset()
        model = make_model("llama")
        register = UlyssesSPAttentionHF.register_with_transformers
        for core in ("eager", "flex_attention", "unheard of"):
            with pytest.raises(ValueError, match="cannot be split over ranks: choose one of"):
                register(model, core, 2, ROWS)
        fixed = {"seq_length_is_variable": False}
        for core, ranks, options, message in (
            ("flash_attention_2", 2, {}, "the model uses 'sdpa'"),
            ("sdpa", 3, {}, "sequence_parallel_size 3 does not divide"),
            ("sdpa", 2, fixed, "give seq_length"),
            ("sdpa", 2, {"seq_length": 15, **fixed}, "pad it to a multiple of 2"),
            ("sdpa", 2, {"seq_length": 16, "max_length": 8}, "give one"),
        ):
            with pytest.raises(ValueError, match=message):
                register(model, core, ranks, ROWS, **options)
        with pytest.raises(ValueError, match="has no config"):
            register(torch.nn.Linear(2, 2), "sdpa", 2, ROWS)
        model.config.num_attention_heads = 1
        with pytest.raises(ValueError, match="1 attention heads cannot be split"):
            register(model, "sdpa", 2, ROWS)
        model.config.num_attention_heads = 4
        model.config.layer_types = ["chunked_attention"] * 2
        with pytest.raises(ValueError, match="chunked_attention"):
            register(model, "sdpa", 2, ROWS)
        model.config.layer_types = None
        mpu = register(model, "sdpa", 2, ROWS, seq_length=LENGTH, seq_length_is_variable=False)
        piece = piece_of(batch_of("padded", 1), mpu.get_sequence_parallel_rank(), 2)
        del piece["labels"]
        with pytest.raises(ValueError, match="got no position_ids"):
            model(piece["input_ids"])
        with pytest.raises(ValueError, match="registered were 2 and 8 per rank"):
            model(**{key: tensor[:1] for key, tensor in piece.items()})
        own = {**piece, "attention_mask": torch.ones(ROWS, 1, 8, 8)}
        with pytest.raises(ValueError, match="got a mask of its own"):
            model(**own)
        with pytest.raises(ValueError, match="leave them out"):
            model(**piece, cu_seq_lens_q=torch.tensor([0, 8]))
        if dist.get_rank() == 0:
            del piece["attention_mask"]
        with pytest.raises(ValueError, match="others none"):
            model(**piece)


@pytest.mark.parametrize("name", ["past_key_values", "cache", "memory"])
def test_the_cache_has_one_name_in_old_and_another_in_new_releases(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Kills: only the name of 5.23 asked for, which 5.24 does not have.
    made: dict[str, Any] = {}
    exec(f"def create(config, inputs_embeds, attention_mask, {name}, position_ids): ...", made)
    monkeypatch.setattr(masking_utils, "create_causal_mask", made["create"])
    unknown = pytest.raises(ImportError, match="makes masks in another way")
    with unknown if name == "memory" else nullcontext():
        check_library()
