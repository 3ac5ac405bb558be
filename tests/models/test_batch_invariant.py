"""Models under `batch_invariant`: the bits of a prompt or document alone, in any batch, packed, trained and decoded."""

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import NUMPY_SUMS_ROWS_ALIKE
from torch import Tensor
from zoo import CONFIGS, EACH_FAMILY

import ligermodels as lm
from ligermodels import ops
from ligermodels.errors import BackendError, InputError
from ligermodels.ops.runtime import dispatch

NAMES = ["llama-2", "gemma2", "qwen3", "qwen3_moe"]
REFUSED = {
    **dict.fromkeys(["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "sarvam_mla"], "LatentAttention"),
    **dict.fromkeys(["lara_mini", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"], "GatedDeltaNet"),
    **dict.fromkeys(["bamba", "granitemoehybrid", "nemotron_h"], "Mamba2"),
    "falcon_h1": "ParallelMixers",
    **dict.fromkeys(["bailing_hybrid", "kimi_linear"], "KimiDeltaAttention"),
    "internlm3": "DynamicScaling",
}
"""Families -> the first part that has no batch-invariant form."""
LENGTHS = [7, 1, 23, 16, 3, 12, 9]
NEW = 4
NO_EOS = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}


def build(
    name: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, **fields: int
) -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config({**CONFIGS[name], **fields})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    model.batch_invariant = True
    return model.to(device, dtype)


def prompts(model: lm.CausalLM, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, model.config.vocab_size, (n,), generator=generator).to(model.device) for n in lengths]


def generated(model: lm.CausalLM, rows: list[Tensor], **options: Any) -> list[tuple[Tensor, Tensor]]:
    """For each prompt its tokens with NEW further ones, and the logits (NEW, V) of these."""
    logits: list[Tensor] = []

    def keep(ids: Tensor, scores: Tensor) -> Tensor:
        logits.append(scores.clone())
        return scores

    ids = model.generate([row.tolist() for row in rows], NEW, logits_processor=[keep], **NO_EOS, **options)
    return [(ids[i, -len(row) - NEW :], torch.stack(logits)[:, i]) for i, row in enumerate(rows)]


def check(model: lm.CausalLM, lengths: list[int]) -> None:
    """Decoding alone, in batches of 3 and of all, and the forward pass over the same tokens, alone and packed."""
    rows = prompts(model, lengths)
    alone = [generated(model, [row])[0] for row in rows]
    for batch in (range(3), range(len(rows))):
        for (ids, logits), each in zip(generated(model, [rows[i] for i in batch]), batch, strict=True):
            assert torch.equal(ids, alone[each][0]) and torch.equal(logits, alone[each][1])
    texts = [ids for ids, _ in alone]
    bounds = [0, *accumulate(map(len, texts))]
    packed, cu_seqlens = torch.cat(texts)[None], torch.tensor(bounds, dtype=torch.int32, device=model.device)
    with torch.no_grad():
        of_packed = model(packed, cu_seqlens=cu_seqlens).logits[0]
    probabilities = model.log_probs(packed, packed, cu_seqlens=cu_seqlens).log_probs
    losses = model(packed, labels=packed, cu_seqlens=cu_seqlens, reduction="none").loss
    assert probabilities is not None and losses is not None and probabilities.requires_grad
    for (ids, logits), (start, end) in zip(alone, pairwise(bounds), strict=True):
        with torch.no_grad():
            found = model(ids[None]).logits[0]
        assert torch.equal(found, of_packed[start:end])
        assert torch.equal(found[-NEW - 1 : -1].float(), logits)  # as decoded
        own = model.log_probs(ids[None], ids[None]).log_probs
        assert own is not None and torch.equal(own[0], probabilities[0, start:end])
        own = model(ids[None], labels=ids[None], reduction="none").loss
        assert own is not None and torch.equal(own[0], losses[0, start:end])


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in NAMES), ("qwen3_moe", "bfloat16")])
def test_equal_bits(name: str, dtype: str) -> None:
    check(build(name, dtype=getattr(torch, dtype)), LENGTHS)


@pytest.mark.parametrize("name", EACH_FAMILY)
@torch.no_grad()
def test_every_family(name: str) -> None:
    """Equal bits alone, packed, in a padded prefill and decoded; or an error that names a layer and the mode."""
    model, lengths = build(name).eval(), [7, 1, 18]
    rows = prompts(model, lengths)
    if name in REFUSED:
        with pytest.raises(BackendError, match=f"batch_invariant: .*{REFUSED[name]}"):
            model(rows[0][None])
        return
    alone = [model(row[None]).logits[0] for row in rows]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    assert torch.equal(model(torch.cat(rows)[None], cu_seqlens=bounds).logits[0], torch.cat(alone))
    state, known = model.new_state(3, 18), [5, 1, 16]
    ids = torch.nn.utils.rnn.pad_sequence([row[:n] for row, n in zip(rows, known, strict=True)], batch_first=True)
    mask = torch.arange(16) < torch.tensor(known)[:, None]
    logits = model(ids, attention_mask=mask, state=state).logits
    assert all(torch.equal(logits[i, :n], alone[i][:n]) for i, n in enumerate(known))
    for step in range(2):
        places = [min(n + step, length - 1) for n, length in zip(known, lengths, strict=True)]
        logits = model(
            torch.stack([row[at : at + 1] for row, at in zip(rows, places, strict=True)]), state=state
        ).logits
        assert all(torch.equal(logits[i, 0], alone[i][places[i]]) for i in (0, 2))


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.skipif(not dispatch.INTERPRETED, reason="Triton compiles here: see test_equal_bits_on_a_gpu")
@pytest.mark.skipif(not NUMPY_SUMS_ROWS_ALIKE, reason="numpy sums rows in different orders on this CPU")
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_equal_bits_in_the_interpreter(name: str) -> None:
    with ops.set_backend("triton"):
        check(build(name), [7, 1, 18])


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, {}) for name in NAMES),
        ("qwen3", {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}),
    ],
)
def test_equal_bits_on_a_gpu(name: str, fields: dict[str, int], dtype: torch.dtype) -> None:
    """With and without CUDA graphs of the steps."""
    model = build(name, "cuda", dtype, **fields)
    check(model, [*LENGTHS, 150])
    (row,) = prompts(model, [40])
    (_, graphed), (_, eager) = generated(model, [row])[0], generated(model, [row], cuda_graph=False)[0]
    assert torch.equal(graphed, eager)


def test_gradients() -> None:
    """Of the loss, as without the mode, and with activations that are computed again after it; the setting is as
    before after each call."""
    model = build("qwen3_moe")
    (row,) = prompts(model, [20])

    def gradients() -> tuple[Tensor, ...]:
        loss = model(row[None], labels=row[None]).loss
        assert loss is not None and not ops.set_batch_invariant.value
        return torch.autograd.grad(loss, list(model.parameters()))

    kept = gradients()
    for model.activation_checkpointing in ("selective", "full"):
        assert all(map(torch.equal, gradients(), kept))
    model.batch_invariant = False
    for found, wanted in zip(kept, gradients(), strict=True):
        assert (found - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7


def test_switches(tmp_path: Path) -> None:
    """The model's attribute, the argument of `generate`, the argument of `from_pretrained`, and the setting."""
    model = build("llama-2")
    rows = prompts(model, LENGTHS)
    wanted = generated(model, rows)
    model.save_pretrained(tmp_path)
    loaded = lm.from_pretrained(tmp_path, batch_invariant=True)
    assert loaded.batch_invariant and torch.equal(generated(loaded, rows)[3][1], wanted[3][1])
    model.batch_invariant = False
    assert torch.equal(generated(model, rows, batch_invariant=True)[3][1], wanted[3][1])
    for _ in model.stream([row.tolist() for row in rows], NEW, batch_invariant=True, **NO_EOS):
        assert not ops.set_batch_invariant.value
    with ops.set_batch_invariant(True):
        assert torch.equal(generated(model, rows)[3][1], wanted[3][1])


def test_what_is_refused() -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    model = build("llama-2")
    model.decoder.blocks[0].mlp = torch.nn.Identity()
    with pytest.raises(BackendError, match=r"batch_invariant: blocks\[0\]\.mlp \(Identity\)"):
        model(ids)
    model = build("gemma4_text-experts")  # a mixture beside a dense layer
    model.decoder.blocks[1].mlp.experts._expert_mesh = object()
    with pytest.raises(BackendError, match=r"batch_invariant: expert parallelism of blocks\.1\.mlp\.experts"):
        model(ids)
    quantized = build("qwen3")
    lm.quantize(quantized, "int4")
    with pytest.raises(BackendError, match=r"batch_invariant: blocks\.0\..*with QuantizedCompute"):
        quantized(ids)
    model = build("qwen3")
    heads = lm.MedusaModel.from_base(model, num_heads=2)
    with pytest.raises(InputError, match="batch_invariant: speculative decoding"):
        heads.generate(ids, max_new_tokens=2)
    model.batch_invariant = False
    with pytest.raises(InputError, match="batch_invariant: speculative decoding"):
        model.generate(ids, 2, draft=heads, batch_invariant=True)
