"""Memory of sampling in a dry run of GRPO: the bytes that a run allocates."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_policy import recipe_for, texts
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training import FineTuningRecipe, dry_run, fine_tune
from ligermodels.training.prepare_base import prepare_lora, prepare_sampling
from ligermodels.training.sampling_memory import SamplingMemory
from ligermodels.training.sampling_model import SamplingModel

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rewards_by_length.py").write_text("def length(completions): return [len(x) for x in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "rewards_by_length:length"


def live_tensors() -> list[torch.Tensor]:
    """All tensors with memory."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return [x for x in tensors if not isinstance(x, (FakeTensor, FunctionalTensor))]


def live_bytes(device: str) -> int:
    """Bytes of all tensors, of those that share memory once."""
    tensors = live_tensors()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
    total = end = 0
    for start, size in sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages}):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sampling_quantize": "int4", "quantize_exclude": ["mlp.down"]},
        {"sampling_quantize": "float8", "lora_rank": 2, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_bytes_of_a_run(
    settings: dict[str, Any], device: str, base: Path, rewards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is as large as the copy that a run makes, and the cache as that for its completions, if the longest
    prompt is as long as it may be."""
    data, states = texts(tmp_path / "prompts.jsonl"), list[tuple[int, int]]()
    longest = max(map(len, map(Tokenizer(base).encode, ("Hello there" + " you" * i for i in range(5)))))
    recipe = recipe_for(base, data, rewards, max_completion_length=6, seq_len=longest + 6, steps=6, **settings)
    recipe = recipe.changed({"batch_tokens": 12 * recipe.seq_len, "micro_batch_tokens": 6 * recipe.seq_len})
    found = dry_run(recipe).sampling
    assert isinstance(found, SamplingMemory)
    model = lm.from_pretrained(base, dtype=getattr(torch, recipe.dtype or "float32"), device=device)
    prepare_lora(recipe, model)
    kind = recipe.sampling_quantize
    sampling = SamplingModel(model, partial(prepare_sampling, recipe, kind), quantizes=kind is not None)
    gc.collect()
    gc.freeze()  # `gc.get_objects` leaves out the millions of objects that other tests have made
    others = live_tensors()  # held, so that no tensor of another test is freed meanwhile
    before = live_bytes(device)
    with sampling() as sampler:
        copied = live_bytes(device) - before
        state = sampler.new_state(12, recipe.seq_len - 1)
        cached = live_bytes(device) - before - copied
    about = pytest.approx if device == "cpu" else partial(pytest.approx, rel=0.1, abs=2**16)  # blocks of 512 bytes
    assert (found.copy, found.cache) == (about(copied), about(cached)) and cached > 0 and bool(copied) == bool(kind)
    assert live_bytes(device) - before == cached, "the copy is freed"
    del state, others
    new_state = CausalLM.new_state
    monkeypatch.setattr(CausalLM, "new_state", lambda self, *sizes: [states.append(sizes), new_state(self, *sizes)][1])
    fine_tune(recipe, tmp_path / "out", device=device)
    assert max(states) == (12, recipe.seq_len - 1)


def test_several_gpus(base: Path, rewards: str, tmp_path: Path) -> None:
    """Each has a whole copy, and an evaluation samples from weights that are not rounded."""
    recipe = recipe_for(base, texts(tmp_path / "prompts.jsonl"), rewards)
    model = lm.from_pretrained(base, dtype=torch.float32)
    whole, tables = (sum(x.nbytes for x in tensors) for tensors in (model.parameters(), model.buffers()))
    one: Any = dry_run(recipe).sampling
    two: Any = dry_run(recipe, gpus=2).sampling
    assert one.copy == 0 and (two.copy, 2 * two.cache) == (whole + tables, one.cache)
    half: Any = dry_run(recipe.changed({"parallel": {"param_dtype": "bfloat16"}}), gpus=2).sampling
    assert (2 * (half.copy - tables), 2 * half.cache) == (whole, two.cache)
    rounded = recipe.changed({"sampling_quantize": "int4"})
    small: Any = dry_run(rounded, gpus=2).sampling
    assert 0 < small.copy < whole and small.cache == two.cache
    evaluated: Any = dry_run(
        rounded.changed({"validation_fraction": 0.3, "micro_batch_tokens": 12 * 24}), gpus=2
    ).sampling
    assert evaluated.copy == whole + tables


def test_what_is_printed(base: Path, rewards: str, tmp_path: Path) -> None:
    data = texts(tmp_path / "prompts.jsonl")
    flags = [
        "--objective",
        "grpo",
        "--reward",
        rewards,
        "--sampling-quantize",
        "int4",
        "--seq-len",
        "1024",
        "--dry-run",
    ]
    result = CliRunner().invoke(app, ["train", str(base), "--data", str(data), *flags])
    (row,) = [line for line in result.output.splitlines() if line.startswith("sampling")]
    assert all(f"{part} " in row for part in ("weights", "optimizer", "copy", "cache")) and "reference" not in row
    (tmp_path / "texts.jsonl").write_text('{"text": "Hello there you"}\n')
    assert dry_run(FineTuningRecipe(base=base, data=tmp_path / "texts.jsonl", validation_fraction=0.0)).sampling is None
