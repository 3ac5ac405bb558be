"""Trained rows of tokens beside LoRA: training, sharding, quantised bases, larger vocabularies, errors. PEFT's own
results are in tests/integrations/test_token_rows_peft.py."""

import copy
import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from two_ranks import in_two_ranks
from zoo import BASE, CONFIGS, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels.adapt.adapter import rewrite_adapter
from ligermodels.adapt.lora import lora_disabled
from ligermodels.adapt.token_rows import token_rows
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.parallel.tensor import tensor_parallel, tensor_part
from ligermodels.training import FusedAdamW

LLAMA = {**BASE, "model_type": "llama", "num_hidden_layers": 2}
TIED = {**LLAMA, "tie_word_embeddings": True}
EVEN = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
ROWS = [17, 5, 128, 60]
BOTH = {"embed_tokens": ROWS, "lm_head": [128, 5]}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "tied": (TIED, ROWS),
    "untied": (LLAMA, BOTH),
    "embedding": (LLAMA, ROWS),
}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, **options: Any) -> lm.CausalLM:
    config, indices = KINDS[kind]
    torch.manual_seed(0)
    return adapted(lm.from_config(config), trainable_token_indices=indices, **options)


def adapted(model: lm.CausalLM, **options: Any) -> lm.CausalLM:
    """With LoRA and rows, and values other than their first."""
    torch.manual_seed(1)
    lm.add_lora(model, **{"r": 3, "target_modules": ["v_proj"], **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def tokens(batch: int = 2, length: int = 19) -> Tensor:
    ids = torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(1))
    ids[:, 3:7] = torch.tensor(ROWS)
    return ids


def merged(kind: str) -> lm.CausalLM:
    """The same model with all values in its weights, which are trained."""
    return lm.merge_lora(build(kind)).requires_grad_()


# -- values and gradients ----------------------------------------------------------------------------------------------


@of_each_kind
def test_values_and_gradients_are_those_of_the_merged_weights(kind: str) -> None:
    model, whole = build(kind), merged(kind)
    for compute in (
        lambda each: each(tokens(), labels=tokens(), label_smoothing=0.1).loss,
        lambda each: each(tokens()).logits.square().mean(),
        lambda each: each.log_probs(tokens(), tokens()).log_probs.mean(),
    ):
        found, wanted = compute(model), compute(whole)
        assert relative_error(found, wanted) < 1e-5
        for each, result in ((model, found), (whole, wanted)):
            each.zero_grad()
            result.backward()
        for name, rows in token_rows(model).items():
            gradient = whole.get_parameter(f"{name}.weight").grad
            assert relative_error(rows.rows.grad, gradient[list(rows.token_indices)]) < 1e-5
    assert model.decoder.embed.weight.grad is None and model.head.weight.grad is None
    ids = tokens(2, 7)
    assert torch.equal(model.eval().generate(ids, max_new_tokens=9), whole.eval().generate(ids, max_new_tokens=9))


@of_each_kind
def test_only_rows_have_a_state_in_the_optimizer(kind: str) -> None:
    model = build(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = {name: len(p) for name, p in trained.items() if "lora" not in name}
    rows = {"decoder.embed.update.rows": 4}
    assert sizes == (rows | {"head.update.rows": 2} if kind == "untied" else rows)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1)
    first = [float(model(tokens(), labels=tokens()).loss.detach())]
    for _ in range(12):
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first.append(float(loss.detach()))
    assert first[-1] < first[0] - 0.05
    assert all(torch.equal(model.get_parameter(name), p) for name, p in before.items())
    with lora_disabled(model):
        torch.manual_seed(0)
        assert relative_error(model(tokens()).logits, lm.from_config(KINDS[kind][0])(tokens()).logits) < 1e-6


@of_each_kind
@pytest.mark.parametrize("mode", ["compiled", "selective", "full"])
def test_compiled_and_with_activation_checkpointing(kind: str, mode: str) -> None:
    model, plain = build(kind), build(kind)
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if mode == "compiled" else model
    if mode != "compiled":
        model.activation_checkpointing = mode
    for each, module in ((model, called), (plain, plain)):
        optimizer = FusedAdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        optimizer.step_in_backward()
        for _ in range(2):
            module(tokens(), labels=tokens()).loss.backward()
    torch.testing.assert_close(model(tokens()).logits, plain(tokens()).logits)


def test_an_adapter_of_a_model_in_bfloat16() -> None:
    model = adapted(lm.from_config(LLAMA, dtype=torch.bfloat16), trainable_token_indices=BOTH, dtype=torch.float32)
    assert {rows.rows.dtype for rows in token_rows(model).values()} == {torch.float32}
    assert model(tokens()).logits.dtype == torch.bfloat16
    model(tokens(), labels=tokens()).loss.backward()
    assert all(rows.rows.grad.dtype == torch.float32 for rows in token_rows(model).values())


# -- quantised bases ---------------------------------------------------------------------------------------------------


@of_each_kind
@pytest.mark.parametrize("head", [None, "int4"])
def test_a_quantised_base(kind: str, head: Any, tmp_path: Path) -> None:
    config, indices = KINDS[kind]
    make_checkpoint(tmp_path / "base", {**config, **EVEN})
    options = {"quantize": "int4", "quantize_head": head}
    model = adapted(lm.from_pretrained(tmp_path / "base", **options), trainable_token_indices=indices)
    model(tokens(), labels=tokens()).loss.backward()
    assert all(rows.rows.grad.abs().sum() > 0 for rows in token_rows(model).values())
    loss, logits = model(tokens(), labels=tokens()).loss, model(tokens()).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    assert relative_error(loss, wanted) < 1e-5
    lm.save_adapter(model, tmp_path / "adapter")
    again = lm.load_adapter(lm.from_pretrained(tmp_path / "base", **options), tmp_path / "adapter")
    assert torch.equal(again(tokens()).logits, logits)
    plain = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert (
        token_rows(plain).keys() == token_rows(model).keys()
    )  # a tied head has the embedding's, if it is quantised too
    lm.merge_lora(again, dequantize=True).save_pretrained(tmp_path / "merged")
    assert relative_error(lm.from_pretrained(tmp_path / "merged")(tokens()).logits, logits) < 1e-4


# -- files -------------------------------------------------------------------------------------------------------------


@of_each_kind
def test_a_round_trip_is_exact(kind: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", KINDS[kind][0])
    model = adapted(lm.from_pretrained(tmp_path / "base"), trainable_token_indices=KINDS[kind][1])
    with pytest.raises(InputError, match=r"LoRA|rows of tokens"):
        model.save_pretrained(tmp_path / "no")
    lm.save_adapter(model, tmp_path / "one")
    again = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "one", is_trainable=True)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert all(rows.rows.requires_grad for rows in token_rows(again).values())
    rewrite_adapter(lm.from_pretrained(tmp_path / "base", device="meta"), tmp_path / "one", tmp_path / "two")
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("one", "two")]
    assert configs[0]["trainable_token_indices"] == configs[1]["trainable_token_indices"]
    assert sum(tensor.numel() for name, tensor in one.items() if "token_adapter" in name) <= 6 * 60


@of_each_kind
def test_prepared_on_the_meta_device(kind: str, tmp_path: Path) -> None:
    """LoRA and rows start as the base, also if they are added before the weights are read."""
    config, indices = KINDS[kind]
    make_checkpoint(tmp_path / "base", config)
    base = lm.from_pretrained(tmp_path / "base")
    options = {"trainable_token_indices": indices}
    model = lm.from_pretrained(tmp_path / "base", prepare=lambda model: lm.add_lora(model, **options))
    assert relative_error(model(tokens()).logits, base(tokens()).logits) < 1e-5
    model = lm.from_config(config, prepare=lambda model: lm.add_lora(model, **options))
    logits = model(tokens()).logits
    with lora_disabled(model):
        assert relative_error(logits, model(tokens()).logits) < 1e-5 and logits.isfinite().all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_grows_by_tokens_that_have_all_rows(tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", TIED if tied else LLAMA)
    larger = lm.from_config({**(TIED if tied else LLAMA), "vocab_size": 133})
    ids = [131, 5, 132]
    lm.save_adapter(
        adapted(larger, trainable_token_indices={"embed_tokens": ids, "lm_head": ids}), tmp_path / "adapter"
    )
    model = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert model.config.vocab_size == 133 and model(torch.tensor([[131, 5, 132]])).logits.shape[-1] == 133
    rewrite_adapter(lm.from_pretrained(tmp_path / "base", device="meta"), tmp_path / "adapter", tmp_path / "again")
    logits = model(torch.tensor([[131, 5, 132]])).logits
    lm.merge_lora(model).save_pretrained(tmp_path / "merged")
    assert relative_error(lm.from_pretrained(tmp_path / "merged")(torch.tensor([[131, 5, 132]])).logits, logits) < 1e-5
    # Without the row of one of the tokens, or without those of the head.
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    further = {"embed_tokens": [133, 5, 132], "lm_head": [133, 5, 132]}
    for indices in ([133, 5, 132], [0, 5, 132]) if tied else (further, {**further, "embed_tokens": [0, 1, 2]}):
        config["trainable_token_indices"] = indices
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        base = lm.from_pretrained(tmp_path / "base")
        with pytest.raises(
            CheckpointError, match=r"base model has 131 tokens; its vocabulary can grow by tokens whose"
        ):
            lm.load_adapter(base, tmp_path / "adapter")
        assert base.config.vocab_size == 131 and not token_rows(base)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "indices", "message"),
    [
        (LLAMA, [], "must be a list of different token ids"),
        (LLAMA, [3, 3], r"different token ids, got \[3, 3\]"),
        (LLAMA, [True], "different token ids"),
        (LLAMA, "5", "different token ids"),
        (LLAMA, [131], r"must lie in \[0, 131\)"),
        (LLAMA, [-1], r"must lie in \[0, 131\)"),
        (LLAMA, {"q_proj": [3]}, "'q_proj' must name one of model.embed_tokens, lm_head"),
        (LLAMA, {3: [3]}, "3 must name one of"),
        (TIED, {"lm_head": [3]}, "tied to the embedding"),
        (TIED, {"embed_tokens": [4], "lm_head": [3]}, "tied to the embedding"),
        (TIED, {"embed_tokens": torch.tensor([4]), "lm_head": torch.tensor([4])}, "different token ids"),
        (TIED, {"embed_tokens": [4], "model.embed_tokens": [3]}, "names model.embed_tokens twice"),
        (CONFIGS["ernie4_5_moe-biases"], {"lm_head": [4]}, "LM head of ernie4_5_moe has a bias, which PEFT leaves out"),
    ],
)
def test_bad_indices(config: dict[str, Any], indices: Any, message: str) -> None:
    model = lm.from_config(config)
    with pytest.raises(InputError, match=f"trainable_token_indices: .*{message}"):
        lm.add_lora(model, trainable_token_indices=indices)
    assert not token_rows(model) and all(p.requires_grad for p in model.parameters())


def test_the_same_ids_of_a_tied_head_in_another_order() -> None:
    model = lm.add_lora(lm.from_config(TIED), trainable_token_indices={"embed_tokens": [4, 6], "lm_head": (6, 4)})
    assert len({*token_rows(model).values()}) == 1


def test_models_that_do_not_fit() -> None:
    model = lm.from_config(LLAMA)
    with pytest.raises(InputError, match=r"model.embed_tokens is trained whole by modules_to_save"):
        lm.add_lora(model, trainable_token_indices=[5], modules_to_save=["embed_tokens"])
    lm.add_lora(model, trainable_token_indices=[5], modules_to_save=["lm_head"])
    model = build("untied")
    with pytest.raises(InputError, match=r"lm_head has trained rows of tokens; lm.merge_lora"):
        lm.MedusaModel.from_base(model, num_heads=1)
    lm.MedusaModel.from_base(lm.merge_lora(model), num_heads=1)


@pytest.mark.parametrize(
    ("indices", "rename", "error"),
    [
        ([1, 2], {}, "shape"),
        ([1, 1, 2, 3], {}, "list of different token ids"),
        ({"embed_tokens": [1, 2, 3, -4]}, {}, "list of different token ids"),
        ({"lm_head": [1, 2, 3, 4]}, {}, "has no ids for model.embed_tokens"),
        (None, {}, "has no ids for model.embed_tokens"),
        ({"embed_tokens": ROWS, "lm_head": ROWS}, {}, "has no rows of lm_head"),
        (ROWS, {"model.embed_tokens": "model.norm"}, "rows of model.norm, which is neither"),
        (ROWS, {"model.embed_tokens": "lm_head"}, "has no ids for lm_head"),
    ],
)
def test_files_that_do_not_fit(indices: Any, rename: dict[str, str], error: str, tmp_path: Path) -> None:
    lm.save_adapter(build("embedding"), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "trainable_token_indices": indices}))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for old, new in rename.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    model = lm.from_config(LLAMA)
    with pytest.raises((CheckpointError, ConfigError), match=error):
        lm.load_adapter(model, tmp_path)
    assert not token_rows(model)


def test_new_tokens_and_a_quantised_head(tmp_path: Path) -> None:
    """The head has no rows for them; quantised after the adapter was loaded, it has."""
    new = {"embed_tokens": [131, 132], "lm_head": [131, 132]}
    lm.save_adapter(
        adapted(lm.from_config({**LLAMA, **EVEN, "vocab_size": 133}), trainable_token_indices=new), tmp_path
    )
    ids = torch.tensor([[3, 131, 132]])
    torch.manual_seed(0)
    base = lm.from_config({**LLAMA, **EVEN})
    quantised = lm.quantize(copy.deepcopy(base), "int4", head="int4")
    before = quantised.eval()(tokens()).logits
    with pytest.raises(InputError, match=r"vocab_size: the adapter has 133 tokens and the quantised LM head 131"):
        lm.load_adapter(quantised, tmp_path)
    assert torch.equal(quantised(tokens()).logits, before) and not token_rows(quantised)
    assert quantised.config.vocab_size == 131
    later = lm.quantize(lm.load_adapter(base, tmp_path), "int4", head="int4").eval()
    assert later(ids).logits.shape == (1, 3, 133)


def test_a_huge_id_takes_no_memory(tmp_path: Path) -> None:
    lm.save_adapter(build("embedding"), tmp_path)
    path = tmp_path / "adapter_config.json"
    huge = [*ROWS[:-1], 2**31 - 1]
    path.write_text(json.dumps({**json.loads(path.read_text()), "trainable_token_indices": huge}))
    limit, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, hard))
    try:
        with pytest.raises(CheckpointError, match=r"has ids up to 2,147,483,647, and the base model has 131 tokens"):
            lm.load_adapter(lm.from_config(LLAMA), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


# -- several ranks -----------------------------------------------------------------------------------------------------


def train_sharded(rank: int, folder: Path, mesh: DeviceMesh, kind: str) -> None:
    plain, model = build(kind), build(kind)
    lm.parallelize(model, lm.ParallelPlan())
    for each in (plain, model):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            each(tokens(), labels=tokens()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(one, DTensor) and one.requires_grad == ("lora_" in name or name.endswith("rows"))
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-6)
    found = model.eval().generate(tokens(2, 9), max_new_tokens=4)
    assert torch.equal(found, plain.eval().generate(tokens(2, 9), max_new_tokens=4))
    indices = KINDS[kind][1]
    options = {"plan": lm.ParallelPlan(), "prepare": lambda model: lm.add_lora(model, trainable_token_indices=indices)}
    torch.manual_seed(rank)  # A is the same on all ranks
    new = lm.from_pretrained(folder / "base", **options)
    other = lm.from_pretrained(folder / "base", **options)  # with the next numbers
    name = next(name for name, _ in new.named_parameters() if name.endswith("lora_A"))
    assert not torch.equal(new.get_parameter(name).full_tensor(), other.get_parameter(name).full_tensor())
    base = lm.from_pretrained(folder / "base")
    for name, rows in token_rows(new).items():
        assert torch.equal(rows.rows.full_tensor(), base.get_parameter(f"{name}.weight")[list(rows.token_indices)])
    torch.testing.assert_close(new(tokens()).logits, base(tokens()).logits, rtol=1e-4, atol=1e-5)
    lm.save_adapter(model, folder / "sharded")
    if rank == 0:
        lm.save_adapter(plain, folder / "plain")
        one, other = (load_file(folder / name / "adapter_model.safetensors") for name in ("sharded", "plain"))
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


@of_each_kind
def test_fsdp2(kind: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", KINDS[kind][0])
    in_two_ranks(train_sharded, tmp_path, kind)


def test_tensor_parallelism_is_refused() -> None:
    model = lm.add_lora(lm.from_config({**LLAMA, **EVEN}), trainable_token_indices=ROWS)
    mesh = SimpleNamespace(ndim=1, size=lambda: 2)
    for call in (tensor_parallel, tensor_part):
        with pytest.raises(ConfigError, match=r"TokenRows\): has no rule for tensor parallelism; .* FSDP2 alone"):
            call(model, mesh)  # type: ignore[operator]
