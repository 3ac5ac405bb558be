"""A transformers model that computes natively: the same numbers, names and methods, by native layers."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook
from two_ranks import in_two_ranks

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError
from ligermodels.integrations.decoder import DecoderView

TOKENS = 23


def make(name: str, attention: str = "eager") -> PreTrainedModel:
    """A random model of the zoo, all parameters away from their initial values."""
    fields = {k: v for k, v in copy.deepcopy(zoo.CONFIGS[name]).items() if v is not None or k == "sliding_window"}
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(1)
    hf = zoo.plain(AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return hf


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Ids with padding on either side, and labels that lie on no padding and are not predicted from it."""
    torch.manual_seed(seed)
    ids = torch.randint(3, 131, (2, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, -4:] = 0, 0
    labels = ids.masked_fill((torch.rand(ids.shape) < 0.3) | (mask == 0), -100)
    labels[0, 6] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def positions() -> Tensor:
    """Two documents in each row."""
    return torch.cat([torch.arange(9), torch.arange(TOKENS - 9)]).expand(2, -1)


CASES: dict[str, Any] = {
    "labels": {"attention_mask": None},
    "padding": {},
    "items": {"attention_mask": None, "num_items_in_batch": torch.tensor(17)},
    "documents": {"attention_mask": None, "position_ids": positions(), "use_cache": False},
    "hidden states": {"output_hidden_states": True},
}


def loss_and_gradients(hf: PreTrainedModel, **inputs: Any) -> tuple[Any, dict[str, Tensor]]:
    hf.train()
    hf.zero_grad()
    out = hf(**inputs)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", sorted(zoo.CONFIGS.keys() - zoo.ONLY_NATIVE))
def test_a_native_model_gives_the_numbers_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, logits and generated tokens, natively as counted by passes, and again after `restore`."""
    hf, inputs = make(name), batch()
    cases = {case: {**inputs, **options} for case, options in CASES.items()}
    # Of these models transformers' eager masks, or states, let documents see one another.
    if name.startswith("gpt_oss") or name in zoo.HYBRIDS:
        del cases["documents"]
    wanted = {case: loss_and_gradients(hf, **given) for case, given in cases.items()}
    prompt: Any = {"input_ids": inputs["input_ids"][:, 6:15], "max_new_tokens": 5, "do_sample": False}
    keys, text = list(hf.state_dict()), hf.eval().generate(**prompt, eos_token_id=None)
    logits = hf(inputs["input_ids"], labels=inputs["labels"]).logits.detach()

    passes: list[int] = []
    through = DecoderView.__call__
    monkeypatch.setattr(DecoderView, "__call__", lambda self, *a, **k: passes.append(1) or through(self, *a, **k))
    assert lm.nativize(hf) is hf and list(hf.state_dict()) == keys
    for case, given in cases.items():
        passes.clear()
        out, gradients = loss_and_gradients(hf, **given)
        by_length = hf.get_decoder().native.rope_by_length
        native = case != "hidden states" and not (by_length and case == "padding")
        assert len(passes) == native, case
        assert (out.logits is None) == (case != "hidden states")
        assert_close(out.loss, wanted[case][0].loss, rtol=1e-5, atol=1e-6)
        assert gradients.keys() == wanted[case][1].keys()
        for key, gradient in gradients.items():
            assert_close(gradient, wanted[case][1][key], rtol=1e-3, atol=2e-5)
    hf.eval()
    passes.clear()
    assert zoo.relative_error(hf(inputs["input_ids"], labels=inputs["labels"]).logits, logits) < 1e-5
    assert passes
    assert torch.equal(hf.generate(**prompt, eos_token_id=None), text)

    lm.restore(hf)
    assert not any({"native", "forward"} & vars(module).keys() for module in hf.modules())
    assert torch.equal(hf(inputs["input_ids"], labels=inputs["labels"]).logits, logits)


@pytest.mark.parametrize("name", sorted(zoo.ONLY_NATIVE))
def test_layers_without_a_counterpart_are_refused(name: str) -> None:
    """Before anything is changed."""
    hf = make(name)
    with pytest.raises(ConfigError, match="a mixer of LatentAttentionConfig is not supported"):
        lm.nativize(hf)
    assert not any({"native", "forward"} & vars(module).keys() for module in hf.modules())


@pytest.mark.parametrize("where", ["under the padding", "after the padding"])
def test_labels_that_transformers_predicts_from_padding_count_here_too(where: str) -> None:
    hf, inputs = make("llama-3"), batch()
    inputs["labels"][0, 5 if where == "under the padding" else 6] = 7
    wanted = loss_and_gradients(hf, **inputs)[0].loss
    out = loss_and_gradients(lm.nativize(hf), **inputs)[0]
    assert_close(out.loss, wanted)
    assert_close(hf.eval()(**inputs).loss, wanted)


def test_a_batch_in_bfloat16_by_autocast() -> None:
    hf, inputs = make("gemma2"), batch()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = loss_and_gradients(hf, **inputs)[0].loss
        loss = loss_and_gradients(lm.nativize(hf), **inputs)[0].loss
    assert loss.dtype == wanted.dtype
    assert_close(loss, wanted, rtol=2e-2, atol=0)


@pytest.mark.parametrize("name", ["llama-3", "mistral-window"])
def test_padding_between_tokens_counts_for_positions_as_in_transformers(name: str) -> None:
    hf, inputs = make(name), batch()
    inputs["attention_mask"] = torch.ones(2, TOKENS, dtype=torch.long)
    inputs["attention_mask"][0, 5:8] = 0
    inputs["labels"][:, :9] = -100
    wanted = loss_and_gradients(hf, **inputs)[0].loss
    assert_close(loss_and_gradients(lm.nativize(hf), **inputs)[0].loss, wanted)


def test_inputs_that_do_not_fit_are_the_errors_of_transformers() -> None:
    hf, inputs = lm.nativize(make("llama-3")), batch()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for given in ({}, {"input_ids": ids, "inputs_embeds": hf.get_input_embeddings()(ids)}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            hf(**given)
    with pytest.raises(IndexError):  # a mask of one row for two
        hf(ids, attention_mask=mask[1:])


IDS = torch.ones(2, 5, dtype=torch.long)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": IDS[:, :0]}, r"input_ids: has no token, \(2, 0\)"),
        ({"input_ids": IDS[:0]}, r"input_ids: has no token, \(0, 5\)"),
        ({"input_ids": IDS[0]}, r"input_ids: must be int32 or int64, of shape \(B, T\); got torch.int64 \(5,\)"),
        ({"input_ids": IDS.float()}, r"input_ids: .* got torch.float32 \(2, 5\)"),
        ({"input_ids": IDS.tolist()}, r"input_ids: must be a tensor \(B, T\), got list"),
        ({"inputs_embeds": torch.ones(2, 5, 12)}, r"inputs_embeds: must be floating, of shape \(B, T, \d+\); got .*12"),
        ({"input_ids": IDS, "attention_mask": IDS.tolist()}, "attention_mask: must be a tensor .*, got list"),
        ({"input_ids": IDS, "attention_mask": 1}, "attention_mask: must be a tensor .*, got int"),
        ({"input_ids": IDS, "labels": IDS[:, :4]}, r"labels: must be a tensor \(2, 5\), .* got \(2, 4\)"),
    ],
    ids=lambda each: None if isinstance(each, dict) else each.split(":")[0],
)
def test_inputs_of_wrong_shapes_are_named(inputs: dict[str, Any], message: str, training: bool) -> None:
    model = lm.nativize(make("llama-3")).train(training)
    for module in (model,) if "labels" in inputs else (model, model.model):
        with pytest.raises(InputError, match=message):
            module(**inputs)


def test_the_cache_of_a_pass_that_kept_none_is_an_error_when_given_back() -> None:
    hf, ids = make("llama-3"), batch()["input_ids"]
    lm.nativize(hf)
    found = hf(ids[:, :5])
    with pytest.raises(InputError, match="use_cache=True"):
        hf(ids[:, 5:6], past_key_values=found.past_key_values)
    with pytest.raises(AttributeError, match="use_cache=True"):
        found.past_key_values.get_seq_length()
    found = hf(ids[:, :5], use_cache=True)
    assert found.past_key_values.get_seq_length() == 5
    assert hf(ids[:, :5], use_cache=False).past_key_values is None


def test_a_pickled_model_is_one_of_its_own() -> None:
    hf, inputs = lm.nativize(make("gemma2")), batch()
    wanted = loss_and_gradients(hf, **inputs)[0].loss
    file = io.BytesIO()
    torch.save(hf, file)
    with torch.no_grad():
        hf.model.embed_tokens.weight.zero_()
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert_close(loss_and_gradients(again, **inputs)[0].loss, wanted)


def test_a_compiled_model_is_one_graph() -> None:
    hf, ids = lm.nativize(make("gemma2")), batch()["input_ids"]
    for training in (False, True):
        found = torch._dynamo.explain(hf.train(training))(ids, **({"labels": ids} if training else {}))
        assert found.graph_count == 1, found.break_reasons


@pytest.mark.parametrize("path", ["model.layers.0", "self_attn", "input_layernorm", "post_attention_layernorm", "mlp"])
@pytest.mark.parametrize("training", [False, True])
def test_a_hook_sees_and_changes_what_it_does_in_transformers(path: str, training: bool) -> None:
    """Under padding too, which the native pass takes out, and at norms, which it joins with additions."""
    inputs = batch()
    real = inputs["attention_mask"].bool()

    def run(native: bool) -> tuple[Tensor, list[Any]]:
        hf, seen = make("gemma2"), []
        hf = lm.nativize(hf) if native else hf

        def half(module: nn.Module, args: Any, output: Any) -> Any:
            seen.append([x.shape for x in (output if isinstance(output, tuple) else [output]) if x is not None])
            return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2

        hf.get_submodule(path if "." in path else f"model.layers.1.{path}").register_forward_hook(half)
        out = hf.train(training)(**inputs)
        return out.loss if training else out.logits[real], seen

    (found, seen), (wanted, seen_there) = run(native=True), run(native=False)
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert seen == seen_there


def test_noise_on_embeddings_is_of_the_size_that_transformers_gives_it() -> None:
    """NEFTune goes by the shape of the batch, padding included."""
    losses = []
    for native in (False, True):
        hf = lm.nativize(make("llama-3")) if native else make("llama-3")
        embedding = hf.get_input_embeddings()
        embedding.neftune_noise_alpha = 5.0
        embedding.register_forward_hook(neftune_post_forward_hook)
        torch.manual_seed(0)
        losses.append(loss_and_gradients(hf, **batch())[0].loss)
    assert_close(*losses)


def test_hooks_of_a_device_map_stay() -> None:
    accelerate = pytest.importorskip("accelerate")
    hf, ids = make("llama-3"), batch()["input_ids"]
    wanted = hf(ids).logits
    accelerate.cpu_offload(hf, execution_device=torch.device("cpu"))
    assert_close(lm.nativize(hf)(ids).logits, wanted, rtol=1e-4, atol=1e-5)
    assert_close(lm.restore(hf)(ids).logits, wanted)


def _sharded(rank: int, folder: Path, mesh: Any) -> None:
    for name in ("gemma2", "mixtral", "gemma4_text-per-layer-inputs"):
        hf, inputs = make(name), batch()
        native = lm.nativize(copy.deepcopy(hf))
        for layer in native.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(native, mesh=mesh)
        wanted, gradients = loss_and_gradients(hf, **inputs)
        out, found = loss_and_gradients(native, **inputs)
        assert out.logits is None
        assert_close(out.loss, wanted.loss)
        for key, gradient in found.items():
            assert_close(gradient.full_tensor(), gradients[key], rtol=1e-3, atol=5e-5)


def test_a_sharded_model_on_two_processes(tmp_path: Path) -> None:
    in_two_ranks(_sharded, tmp_path)


class Doubled(nn.Module):
    """Takes a projection's place, as an adapter does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


@pytest.mark.parametrize("path", ["self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_what_takes_a_modules_place_takes_part_and_hooks_fire(path: str) -> None:
    hf, ids = make("qwen3"), batch()["input_ids"]
    layer = hf.model.layers[1]
    parent, _, name = path.rpartition(".")

    def logits() -> Tensor:
        return hf(ids).logits

    plain = logits()
    lm.nativize(hf)
    setattr(layer.get_submodule(parent), name, Doubled(layer.get_submodule(path)))
    assert_close(logits(), hf(ids, output_hidden_states=True).logits, rtol=1e-4, atol=1e-5)  # by transformers' code
    seen: list[str] = []
    for each in ("input_layernorm", "self_attn", "self_attn.k_norm", "mlp", path):
        layer.get_submodule(each).register_forward_hook(lambda *_, each=each: seen.append(each))
    found = logits()
    assert set(seen) == {"input_layernorm", "self_attn", "self_attn.k_norm", "mlp", path}
    lm.restore(hf)
    assert_close(found, logits(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-2)


def test_forwards_that_others_replace_take_part() -> None:
    """As Liger's patches of a model do, with `use_liger_kernel=True`: the last one to patch a module wins."""
    hf, inputs = make("gemma2"), batch()
    wanted, gradients = loss_and_gradients(hf, **inputs)
    layer = lm.nativize(hf).model.layers[1]
    called: list[str] = []

    def replace(path: str) -> None:
        module = layer.get_submodule(path)

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            called.append(path)
            return type(self).forward(self, x)

        module.forward = forward.__get__(module)

    paths = ["input_layernorm", "post_feedforward_layernorm", "mlp"]
    for path in paths:
        replace(path)
    out, found = loss_and_gradients(hf, **inputs)
    assert called == ["input_layernorm", "mlp", "post_feedforward_layernorm"]
    assert_close(out.loss, wanted.loss)
    for name, gradient in found.items():
        assert_close(gradient, gradients[name], rtol=1e-3, atol=2e-5)


def test_copies_gradient_checkpointing_and_a_head_of_ones_own() -> None:
    hf, inputs = make("gemma2"), batch()
    wanted, gradients = loss_and_gradients(hf, **inputs)
    lm.nativize(hf)
    twin = copy.deepcopy(hf)
    with torch.no_grad():
        hf.model.layers[0].mlp.up_proj.weight.zero_()
    twin.gradient_checkpointing_enable()
    out, found = loss_and_gradients(twin, **inputs)
    assert out.logits is None
    assert_close(out.loss, wanted.loss)
    for name, gradient in found.items():
        assert_close(gradient, gradients[name], rtol=1e-3, atol=2e-5)
    twin.lm_head = Doubled(twin.lm_head)
    out = loss_and_gradients(twin, **inputs)[0]
    assert out.logits is not None and not torch.allclose(out.loss, wanted.loss)


def test_a_saved_native_model_is_the_checkpoint_that_transformers_writes(tmp_path: Path) -> None:
    hf = make("llama-3.2")
    hf.save_pretrained(tmp_path / "theirs")
    lm.nativize(hf).save_pretrained(tmp_path / "native")
    files = {each.name: each.read_bytes() for each in (tmp_path / "theirs").iterdir()}
    assert {each.name: each.read_bytes() for each in (tmp_path / "native").iterdir()} == files


def test_what_cannot_compute_natively_is_refused_by_name() -> None:
    hf = make("llama-3")
    with pytest.raises(InputError, match="does not compute natively"):
        lm.restore(hf)
    lm.nativize(hf)
    with pytest.raises(InputError, match="natively already"):
        lm.nativize(hf)
    with pytest.raises(InputError, match=r"nn\.DataParallel"):
        hf._replicate_for_data_parallel()
    patched = make("llama-3")
    patched.model.norm.forward = lambda x: x
    with pytest.raises(InputError, match="replaced the forward of a LlamaRMSNorm"):
        lm.nativize(patched)
    with pytest.raises(InputError, match=r"LlamaModel is not a \.\.\.ForCausalLM"):
        lm.nativize(patched.model)
    with pytest.raises(InputError, match="expected a transformers causal language model, got Linear"):
        lm.nativize(nn.Linear(2, 2))
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    with pytest.raises(ConfigError, match="gpt2"):
        lm.nativize(other)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_compute_natively_and_a_share_of_them_as_their_class_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, inputs = make(name), batch()
    wanted = hf.eval()(inputs["input_ids"]).logits
    experts = next(module for module in hf.modules() if hasattr(module, "gate_up_proj"))
    kind, called = type(experts), []
    through = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args: called.append(1) or through(*args))
    lm.nativize(hf)
    assert zoo.relative_error(hf(inputs["input_ids"]).logits, wanted) < 1e-5 and not called

    # As expert parallelism does: fewer experts, and an index past the last one for those that are elsewhere.
    count = experts.num_experts
    for weight in ("gate_up_proj", "down_proj"):
        setattr(experts, weight, nn.Parameter(getattr(experts, weight)[: count - 1].detach()))
    experts.num_experts = count - 1
    x, index = torch.randn(5, hf.config.hidden_size), torch.tensor([[0], [count - 1], [1], [count - 1], [0]])
    assert not experts(x, index, torch.ones(5, 1))[[1, 3]].any() and called
