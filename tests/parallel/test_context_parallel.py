"""Context parallelism: each sequence divided over ranks, beside one process with all of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_parallel import batch, build, check_equal, check_training, whole
from test_parallel_runs import check_same, recipes, run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import by_first_rank, in_ranks
from typer.testing import CliRunner
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import IGNORE_INDEX
from ligermodels.speculative.joint import JointMedusa, frozen_copy

FAMILIES = {
    "llama-3.2": "selective",
    "gemma2": "full",
    "gpt_oss": "selective",
    "phi3": "full",
    "qwen3_moe": "none",
    "deepseek_v3": "selective",
    "lfm2-biases": "full",
}
"""Names of configs -> activation checkpointing. Tied; windows and softcap; sinks; frequencies that go by the row's
length; a mixture with a load-balancing loss; latent attention; short convolutions."""
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("none", {}),
    "kimi_linear": ("selective", {}),
    "bamba-other-sizes": ("full", {}),
    "nemotron_h": ("selective", {"n_groups": 4}),
    "falcon_h1": ("none", {"mamba_n_groups": 2}),
}
"""Names of configs -> activation checkpointing, other sizes. Gated DeltaNet; Kimi Delta Attention; Mamba2, of one
group for all ranks, of several, and beside attention."""
SHARED = {"gemma4_text-few-layers": "none", "gemma4_text-per-layer-inputs": "full"}
"""Layers that use the keys and values of other layers, with per-layer inputs."""
KIMI_LAYERS = ["linear_attention", "full_attention"] * 2
PLAN = lm.ParallelPlan(context=2)


def inputs_of_all_kinds() -> dict[str, dict[str, Tensor]]:
    """Batches whose documents end within chunks, at their bounds, and in padding; the last row has fewer tokens than
    there are chunks."""
    found = {"rows": dict(batch(0)), "short": {name: x[:, :3] for name, x in batch(1).items()}}
    ids, labels = (x.reshape(1, -1) for x in dict(batch(2)).values())
    bounds = torch.tensor([0, 5, 7, 7, 21, 26], dtype=torch.int32)
    found["packed"] = {"input_ids": ids, "labels": labels, "cu_seqlens": bounds}
    positions = torch.cat([torch.arange(4), torch.arange(9), torch.arange(13)]).view(2, 13)
    found["restarts"] = {**batch(3), "position_ids": positions}
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = mask[1, 9:] = 0
    found["padded"] = {**batch(4), "attention_mask": mask}
    found["one target"] = {**batch(5)}
    found["one target"]["labels"] = torch.full((2, 13), IGNORE_INDEX).index_fill(1, torch.tensor([2]), 7)
    return found


def few_targets() -> dict[str, Tensor]:
    """Rows in which each rank has a target for less than one token in eight: layers that mix no tokens compute these
    alone."""
    ids = torch.randint(3, 131, (2, 40), generator=torch.Generator().manual_seed(7))
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, place in ((0, 5), (0, 15), (1, 36)):
        labels[row, place] = ids[row, place]
    return {"input_ids": ids, "labels": labels}


def some_inputs(index: int, models: int) -> list[dict[str, Tensor]]:
    """Of the kinds of inputs, those for the model of this index, so that neighbouring `models` have every kind."""
    return list(inputs_of_all_kinds().values())[index % models :: models]


def check_pass(model: lm.CausalLM, plain: lm.CausalLM, inputs: dict[str, Any], **options: Any) -> None:
    """Loss and gradients, as a user's own loop has them."""

    def total(loss: Tensor) -> Tensor:
        return loss if loss.ndim == 0 else (loss**2).sum()

    model.zero_grad(), plain.zero_grad()
    found = model(**inputs, **options).loss
    total(found).backward()
    wanted = by_first_rank(plain, lambda plain: plain(**inputs, **options).loss, total)
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-5, atol=1e-6)
    scale = float(max(p.grad.abs().max() for p in plain.parameters()))
    check_equal(model, plain, lambda p: p.grad, atol=2e-6 * max(1.0, scale))


def families(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for i, (name, mode) in enumerate(FAMILIES.items()):
        plan = PLAN.model_copy(update={"activation_checkpointing": mode})
        plain, model = build(name), lm.parallelize(build(name), plan)
        for inputs in some_inputs(i, 2):
            check_pass(model, plain, inputs)
        if name in ("llama-3.2", "qwen3_moe"):
            check_training(model, plain, torch.optim.SGD, tensor=2)


def shared_keys_values(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for i, (name, mode) in enumerate(SHARED.items()):
        plan = PLAN.model_copy(update={"activation_checkpointing": mode})
        plain, model = build(name), lm.parallelize(build(name), plan)
        assert any(getattr(block.mixer, "kv_from", None) is not None for block in model.config.blocks)
        for inputs in (*some_inputs(i, 2), few_targets()):
            check_pass(model, plain, inputs)


def whole_chunks(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Rows of Llama 4's attention chunks, whose ends are padding on a rank; longer ones are refused."""
    plain, model = (build("llama4_text", attention_chunk_size=30) for _ in range(2))
    lm.parallelize(model, PLAN)
    ids = torch.randint(3, 131, (1, 31), generator=torch.Generator().manual_seed(7))
    check_pass(model, plain, {"input_ids": ids[:, :30], "labels": ids[:, :30]})
    with pytest.raises(InputError, match=r"chunks of 30 tokens.*got room for 31"):
        model(ids)


def recurrent(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for i, (name, (mode, sizes)) in enumerate(RECURRENT.items()):
        plan = PLAN.model_copy(update={"activation_checkpointing": mode})
        plain, model = build(name, **sizes), lm.parallelize(build(name, **sizes), plan)
        for inputs in some_inputs(i, 2):
            check_pass(model, plain, inputs)
    with pytest.raises(ConfigError, match=r"context: blocks\[1\].mixer: num_key_heads .*: 3 cannot be split"):
        lm.parallelize(build("qwen3_5_text-other-sizes"), PLAN)
    with pytest.raises(ConfigError, match=r"mixer: num_key_heads \(linear_num_heads, .*: 3 cannot be split"):
        lm.parallelize(build("kimi_linear", linear_num_heads=3, linear_attn_config=None, layer_types=KIMI_LAYERS), PLAN)
    with pytest.raises(ConfigError, match=r"context: blocks\[0\].mixer: num_groups .*: 3 groups cannot be shared"):
        lm.parallelize(build("bamba"), PLAN)
    model = build("llama-3")
    model.decoder.blocks[1].mixer.context_parallel = False
    with pytest.raises(ConfigError, match=r"context: blocks\[1\].mixer \(Attention\) cannot be given a part"):
        lm.parallelize(model, PLAN)


def uses(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """What else a model is asked for."""
    every = inputs_of_all_kinds()
    plain, model = build("qwen3"), lm.parallelize(build("qwen3"), PLAN)
    weights = torch.rand(2, 13)
    classes = torch.rand(model.config.vocab_size)
    for options in (
        {"token_weights": weights},
        {"class_weights": classes, "token_weights": weights, "label_smoothing": 0.1},
        {"z_loss": 1e-2, "num_items_in_batch": 7},
        {"reduction": "sum"},
        {"reduction": "none"},
    ):
        check_pass(model, plain, every["rows"], **options)
    with pytest.raises(InputError, match="class_weights: beside z_loss"):
        model(**every["rows"], class_weights=classes, z_loss=1e-2)
    for inputs in every.values():
        asked: dict[str, Any] = {"return_logits": True, "return_last_hidden_state": True}
        asked |= {"return_predicted": True, "return_z_loss": True}
        with torch.no_grad():
            both = [each(**inputs, **asked, z_loss=1e-3) for each in (model, plain)]
        assert both[0].keys() == both[1].keys()
        for found, wanted in zip(both[0].values(), both[1].values(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        both = []
        for each in (model, plain):
            each.zero_grad()
            both.append(each.log_probs(**inputs, return_entropy=True))
            (both[-1].log_probs.exp() * torch.arange(both[-1].log_probs.shape[1])).sum().backward()
        torch.testing.assert_close(both[0].entropy, both[1].entropy)
        check_equal(model, plain, lambda p: p.grad)
    ids = batch(0)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
        some = torch.tensor([3, 20, 25])
        torch.testing.assert_close(model(ids, token_indices=some).logits, plain(ids, token_indices=some).logits)
        given = torch.randn(2, 13, 60)
        torch.testing.assert_close(model(inputs_embeds=given).logits, plain(inputs_embeds=given).logits)
    assert torch.equal(*(each.generate(ids, max_new_tokens=4, eos_token_id=None) for each in (model, plain)))

    # Activations are of this rank's tokens.
    seen: list[tuple[int, ...]] = []
    model.decoder.blocks[0].mlp.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    model(**every["rows"])
    assert seen == [(2, 8, 60)]

    several: list[Any] = []
    for spread in (False, True):
        torch.manual_seed(1)
        each = lm.MedusaModel.from_base(build("llama-3"), num_heads=2)
        several.append(lm.parallelize(each, PLAN) if spread else each)
    check_training(several[1], several[0], torch.optim.SGD, tensor=2)


def compiled(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Blocks as graphs, with the exchanges in or between them."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: compile_module(module, backend=backend)  # type: ignore[method-assign]
    every = inputs_of_all_kinds()
    # Without the softcap, whose attention in torch's own ops takes most of the time that is traced.
    changes = {"num_hidden_layers": 1, "attn_logit_softcapping": None, "layer_types": ["sliding_attention"]}
    plain, model = build("gemma2", **changes), build("gemma2", **changes)
    lm.parallelize(model, lm.ParallelPlan(context=2, compile="blocks"))
    check_pass(model, plain, every["packed"])
    assert graphs


def by_plan(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """With ranks that have other data, and with tensor parallelism; loaded and saved."""
    model = lm.from_pretrained(folder / "llama-3", plan=PLAN)
    plain = lm.from_pretrained(folder / "llama-3")
    model.save_pretrained(folder / "out")
    check_training(model, plain, torch.optim.SGD, tensor=2)
    assert all(p.to_local().numel() <= p.numel() / 4 + p[:1].numel() for p in model.parameters())
    plan = lm.ParallelPlan(context=2, replicate=2)
    plain, model = build("qwen3_moe"), lm.parallelize(build("qwen3_moe"), plan)
    check_training(model, plain, torch.optim.SGD, tensor=2)
    config = {**CONFIGS["llama-3"], "intermediate_size": 96}
    both = []
    for spread in (False, True):
        torch.manual_seed(0)
        each = lm.from_config(config)
        both.append(lm.parallelize(each, lm.ParallelPlan(context=2, tensor=2)) if spread else each)
    for inputs in some_inputs(0, 3):
        check_pass(both[1], both[0], inputs)
    assert torch.equal(whole(next(both[1].parameters())), next(both[0].parameters()))
    recurrent_sizes = (
        ("qwen3_5_text", {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "intermediate_size": 96}),
        ("bamba", {"mamba_n_groups": 2, "intermediate_size": 96}),
        ("kimi_linear", {"intermediate_size": 96, "moe_intermediate_size": 30}),
    )
    for i, (name, fields) in enumerate(recurrent_sizes):
        recurrent = build(name, **fields)
        spread_out = lm.parallelize(build(name, **fields), lm.ParallelPlan(context=2, tensor=2))
        for inputs in some_inputs(i, 3):
            check_pass(spread_out, recurrent, inputs)
    # Four parts of each sequence; of the heads of stage 2 too.
    plain, model = build("gemma2"), lm.parallelize(build("gemma2"), lm.ParallelPlan(context=4))
    for inputs in (*some_inputs(0, 2), *some_inputs(1, 6)):
        check_pass(model, plain, inputs)
    joint = []
    for spread in (False, True):
        torch.manual_seed(1)
        heads = lm.MedusaModel.from_base(build("llama-3.2"), num_heads=2)
        joint.append(JointMedusa(lm.parallelize(heads, lm.ParallelPlan(context=4)) if spread else heads))
    check_training(joint[1], joint[0], torch.optim.SGD, tensor=4)
    # A reference, spread alike.
    copied, ids = frozen_copy(both[1]), batch(0)["input_ids"]
    assert [p.placements for p in copied.parameters()] == [p.placements for p in both[1].parameters()]
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, both[1](ids).logits)


def test_families(tmp_path: Path) -> None:
    in_ranks(2, families, tmp_path)


def test_recurrent_mixers(tmp_path: Path) -> None:
    in_ranks(2, recurrent, tmp_path)


def test_everything_that_a_model_is_asked_for(tmp_path: Path) -> None:
    in_ranks(2, uses, tmp_path)


def test_compiled_blocks(tmp_path: Path) -> None:
    in_ranks(2, compiled, tmp_path)


def test_beside_other_degrees(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "llama-3", CONFIGS["llama-3"])
    in_ranks(4, by_plan, tmp_path)
    lm.from_pretrained(tmp_path / "llama-3").save_pretrained(tmp_path / "one")
    files = [(tmp_path / where / "model.safetensors").read_bytes() for where in ("out", "one")]
    assert files[0] == files[1]


def runs(rank: int, folder: Path, mesh: DeviceMesh, base: Path, data: Path) -> None:
    exact = recipes(base, data)
    for name in ("lora", "stage 1", "mtp", "eagle"):
        assert run(exact[name].changed({"parallel": {"context": 2}}), folder / name).finished
    file, out = folder / f"{rank}.yaml", folder / "fine-tuning"
    file.write_text(yaml.safe_dump(exact["fine-tuning"].settings()))
    arguments = ["train", "--recipe", str(file), "--out", str(out), "--device", "cpu", "--context", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("one_thread")
def test_runs_are_those_of_one_process(base: Path, data: Path, tmp_path: Path) -> None:
    in_ranks(2, runs, tmp_path / "two", base, data)
    exact = recipes(base, data)
    for name in ("fine-tuning", "lora", "stage 1", "mtp", "eagle"):
        run(exact[name], tmp_path / "one" / name)
        check_same(tmp_path / "two" / name, tmp_path / "one" / name)


def test_shared_keys_and_values(tmp_path: Path) -> None:
    in_ranks(2, shared_keys_values, tmp_path)


def test_rows_of_attention_chunks(tmp_path: Path) -> None:
    in_ranks(2, whole_chunks, tmp_path)
