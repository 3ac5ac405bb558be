"""Llama: frequencies, modules, both rope schemas, packing, loss options, compilation; see test_families.py too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from zoo import BASE, CONFIGS, LLAMAS, make_checkpoint, relative_error

import ligermodels as lm

TOLERANCE = 1e-5
MODULES = {"mixer_norm": "input_layernorm", "mixer": "self_attn", "mlp_norm": "post_attention_layernorm", "mlp": "mlp"}


@pytest.fixture(scope="module", params=LLAMAS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("llama")
    oracle = make_checkpoint(folder, LLAMAS[request.param])
    return folder, oracle, lm.from_pretrained(folder)


def tokens(batch: int = 3, length: int = 41) -> torch.Tensor:
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


def test_inverse_frequencies_are_equal(pair: tuple[Path, LlamaForCausalLM, lm.CausalLM]) -> None:
    _, oracle, model = pair
    assert torch.equal(model.decoder.ropes[0].inv_freq, oracle.model.rotary_emb.inv_freq)
    # Casting a model must not round its frequencies.
    cast = lm.CausalLM(model.config).to(torch.bfloat16)
    assert torch.equal(cast.decoder.ropes[0].inv_freq, oracle.model.rotary_emb.inv_freq)


def test_every_module_and_the_logits(pair: tuple[Path, LlamaForCausalLM, lm.CausalLM]) -> None:
    _, oracle, model = pair
    seen: dict[str, dict[str, torch.Tensor]] = {"ours": {}, "theirs": {}}

    def watch(side: str, name: str, module: torch.nn.Module):
        def keep(_module, _inputs, output):
            seen[side][name] = output[0] if isinstance(output, tuple) else output

        return module.register_forward_hook(keep)

    hooks = [watch("ours", "embed", model.decoder.embed), watch("theirs", "embed", oracle.model.embed_tokens)]
    hooks += [watch("ours", "norm", model.decoder.norm), watch("theirs", "norm", oracle.model.norm)]
    for i, (block, layer) in enumerate(zip(model.decoder.blocks, oracle.model.layers, strict=True)):
        hooks += [watch("ours", f"{i}", block), watch("theirs", f"{i}", layer)]
        for ours, theirs in MODULES.items():
            hooks.append(watch("ours", f"{i}.{ours}", getattr(block, ours)))
            hooks.append(watch("theirs", f"{i}.{ours}", getattr(layer, theirs)))
    with torch.no_grad():
        logits, wanted = model(tokens()).logits, oracle(tokens()).logits
    for hook in hooks:
        hook.remove()
    assert len(seen["theirs"]) == 2 + 5 * len(model.decoder.blocks)
    errors = {name: relative_error(seen["ours"][name], wanted) for name, wanted in seen["theirs"].items()}
    assert max(errors.values()) < TOLERANCE, errors
    assert relative_error(logits, wanted) < TOLERANCE


def test_export_is_byte_equal_and_opens_in_transformers(
    pair: tuple[Path, LlamaForCausalLM, lm.CausalLM], tmp_path: Path
) -> None:
    folder, oracle, model = pair
    out = tmp_path / "out"
    model.save_pretrained(out, max_shard_size="50KB")
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    ours = {name: t for shard in out.glob("*.safetensors") for name, t in load_file(shard).items()}
    theirs = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == t.dtype and torch.equal(ours[name], t) for name, t in theirs.items())

    reopened = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(reopened(tokens()).logits, oracle(tokens()).logits)
        assert torch.equal(lm.from_pretrained(out)(tokens()).logits, model(tokens()).logits)
    config = json.loads((out / "config.json").read_text())
    before = json.loads((folder / "config.json").read_text())
    changed = {"rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype"}
    assert {k: v for k, v in config.items() if k not in changed} == {
        k: v for k, v in before.items() if k not in changed
    }
    # Readers of either schema find the same rope.
    assert (
        config["rope_theta"] == config["rope_parameters"]["rope_theta"] == oracle.config.rope_parameters["rope_theta"]
    )
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    assert {**scaling, "rope_theta": config["rope_theta"]} == config["rope_parameters"]


@pytest.mark.parametrize("how", ["cu_seqlens", "position_ids"])
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_packed_documents_equal_separate_ones(tmp_path: Path, how: str, backend: str) -> None:
    make_checkpoint(tmp_path / "model", LLAMAS["llama-3.1"])
    model = lm.from_pretrained(tmp_path / "model", attention=backend)
    lengths = [13, 1, 27]
    ids = tokens(1, sum(lengths))
    bounds = torch.tensor([0, 13, 14, 41], dtype=torch.int32)
    if how == "cu_seqlens":
        packed = {"cu_seqlens": bounds}
    else:
        packed = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    together = model(ids, labels=ids, return_logits=True, **packed)
    apart = [model(part, labels=part, return_logits=True) for part in ids.split(lengths, dim=1)]
    assert relative_error(together.logits, torch.cat([o.logits for o in apart], dim=1)) < TOLERANCE
    # Each document of n tokens has n - 1 targets: none crosses into the next.
    wanted = sum(o.loss * (n - 1) for o, n in zip(apart, lengths, strict=True)) / (sum(lengths) - len(lengths))
    assert relative_error(together.loss, wanted) < TOLERANCE


def test_several_rows_whose_positions_restart(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", LLAMAS["llama-3"])
    model = lm.from_pretrained(tmp_path / "model")
    ids = tokens(2, 20)
    positions = torch.stack([torch.arange(20), torch.cat([torch.arange(8), torch.arange(12)])])
    together = model(ids, position_ids=positions).logits
    assert relative_error(together[:1], model(ids[:1]).logits) < TOLERANCE
    assert relative_error(together[1:, 8:], model(ids[1:, 8:]).logits) < TOLERANCE


def test_loss_options(pair: tuple[Path, LlamaForCausalLM, lm.CausalLM]) -> None:
    _, _, model = pair
    ids = tokens()
    weights = torch.rand(ids.shape)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        w = weights[:, 1:].flatten()
        assert (
            relative_error(model(ids, labels=ids, token_weights=weights).loss, (each * w).sum() / w.sum()) < TOLERANCE
        )
        assert relative_error(model(ids, labels=ids, num_items_in_batch=7).loss, each.sum() / 7) < TOLERANCE
        per_token = model(ids, labels=ids, reduction="none").loss
    assert relative_error(per_token[:, :-1].flatten(), each) < TOLERANCE
    assert not per_token[:, -1].any()


def test_compiled_as_one_graph() -> None:
    """Packed documents, for any sizes; without documents: test_dynamic_shapes; for given sizes: the next test."""
    torch.compiler.reset()  # what other tests have compiled makes sizes dynamic
    model = lm.from_config({**LLAMAS["llama-3.2"], "num_hidden_layers": 1})
    ids, bounds = tokens(1), torch.tensor([0, 13, 41], dtype=torch.int32)
    step = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    found = []
    for call in (model, step):
        model.zero_grad()
        loss = call(ids, labels=ids, cu_seqlens=bounds).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for eager, compiled in zip(*found, strict=True):
        assert relative_error(compiled, eager) < TOLERANCE


PADDED = {
    "left": [[0] * 5 + [1] * 14, [1] * 19],
    "right": [[1] * 12 + [0] * 7, [1] + [0] * 18],
    "both": [[0, 0] + [1] * 9 + [0] * 8, [0] * 18 + [1]],
    "none": [[1] * 19, [1] * 19],
    "positions": [[*range(7), *range(12)], [*range(19)]],
}
"""Masks of a batch of two rows, and positions that restart."""


@pytest.mark.parametrize(
    ("name", "kinds", "backend"),
    [
        ("llama-3.2", ["left", "right", "both", "none"], "aot_eager"),
        ("llama-3.2", ["positions"], "eager"),
        ("qwen3_moe", ["both"], "eager"),
    ],
)
def test_padding_and_positions_in_one_graph(name: str, kinds: list[str], backend: str) -> None:
    """One graph has the numbers of eager calls, for any padding; padding may hold any id and label.

    The backend "eager" makes no graph of the backward pass, which takes half of the time."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = lm.from_config({**CONFIGS[name], "num_hidden_layers": 1 + (name != "llama-3.2")}, dtype=torch.float64)
    step = torch.compile(model, fullgraph=True, backend=backend)
    count = torch.compile(model.num_targets, fullgraph=True, backend="eager")
    for kind in kinds:
        given = torch.tensor(PADDED[kind])
        inputs = {"position_ids" if kind == "positions" else "attention_mask": given}
        ids = torch.randint(3, 90, given.shape)
        if kind != "positions":
            ids = ids.masked_fill(given == 0, 10**6)
        labels = ids.clamp(max=99)
        found = {}
        with torch._dynamo.config.patch(error_on_recompile=kind != kinds[0]):
            for call in (model, step):
                model.zero_grad()
                out = call(ids, labels=labels, return_logits=True, **inputs)
                out.loss.backward()
                gradients = [p.grad.clone() for p in model.parameters()]
                found[call] = [out.loss.detach(), out.logits.detach(), *gradients]
            for compiled, eager in zip(found[step], found[model], strict=True):
                assert relative_error(compiled, eager) < TOLERANCE
            assert torch.equal(count(labels, **inputs), model.num_targets(labels, **inputs))


def test_padding_between_tokens_is_named_in_a_graph() -> None:
    torch.compiler.reset()
    model = lm.from_config({**LLAMAS["llama-3.2"], "num_hidden_layers": 1})
    step = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"torch\.compile takes no padding between the tokens of a row"):
        step(torch.ones(1, 3, dtype=torch.long), attention_mask=torch.tensor([[1, 0, 1]]))


def test_from_config_and_inputs_embeds() -> None:
    model = lm.from_config(LLAMAS["llama-3.2"], dtype=torch.float64)
    assert model.head.weight is model.decoder.embed.weight
    assert model.to(torch.float32).head.weight is model.decoder.embed.weight
    assert model.decoder.embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    ids = tokens()
    assert torch.equal(model(inputs_embeds=model.decoder.embed(ids)).logits, model(ids).logits)


def test_the_config_of_a_caller_and_of_its_model_are_apart() -> None:
    """Nested fields too: a caller may build several models from one dict that it changes in between."""
    scaling: dict[str, Any] = {"rope_type": "linear", "factor": 2.0}
    model = lm.from_config({**CONFIGS["llama-3"], "rope_scaling": scaling}, device="meta")
    scaling["factor"] = 4.0
    assert model.hf_config["rope_scaling"]["factor"] == 2.0 and model.checked_export_spec()
    model.hf_config["rope_scaling"]["factor"] = 8.0
    assert scaling["factor"] == 4.0


def test_attention_backend_is_chosen_by_what_it_can_do() -> None:
    from ligermodels.ops.attention.attention import AttentionRequest, choose

    request = AttentionRequest("cpu", torch.float32, 64, 8, 8, 0.125, None, None, False, False)
    assert choose(request).name == "sdpa"
    capped = request._replace(softcap=30.0)
    assert choose(capped).name == "reference"
    with pytest.raises(lm.errors.BackendError, match="softcap"):
        choose(capped, "sdpa")
    with pytest.raises(lm.errors.BackendError, match=r"flash-attn-2.*CUDA"):
        choose(request, "flash-attn-2")
    with pytest.raises(lm.errors.BackendError, match=r"unknown.*sdpa"):
        choose(request, "nope")
