"""A transformers model that computes natively: the same numbers, names and methods, by native layers."""

import copy
import functools
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from two_ranks import in_two_ranks
from zoo_oracles import NULLS

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError
from ligermodels.integrations.cache_name import NAME
from ligermodels.integrations.decoder import HFDecoder

TOKENS = 23


def make(name: str, attention: str = "eager", **changes: Any) -> PreTrainedModel:
    """A random model of the zoo, all parameters away from their initial values."""
    fields = {k: v for k, v in copy.deepcopy(zoo.CONFIGS[name]).items() if v is not None or k in NULLS} | changes
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


@pytest.mark.parametrize("name", sorted({*zoo.EACH_FAMILY, *zoo.OF_EACH_KIND} - zoo.ONLY_NATIVE))
def test_a_native_model_gives_the_numbers_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients and logits, natively as counted by passes; for each kind of layer generated tokens too, and
    logits after `restore`."""
    hf, inputs = make(name), batch()
    cases = {case: {**inputs, **options} for case, options in CASES.items()}
    of_each_kind = name in zoo.OF_EACH_KIND
    # The loss, and what is not computed natively, are the same code for all families.
    if name not in ("gemma2", "gpt_oss", "qwen2_moe"):
        del cases["items"], cases["hidden states"]
    # Of these models transformers' eager masks, or states, let documents see one another.
    if name.startswith(("gpt_oss", "afmoe")) or name in {*zoo.HYBRIDS, *zoo.KIMI, *zoo.MAMBAS, *zoo.SHORT_CONVS}:
        del cases["documents"]
    if name == "lfm2-biases":  # transformers' convolutions then see the biases of padding before the first token
        del cases["padding"]
    if not of_each_kind and "documents" in cases:  # one layout of tokens: both take the padding out, or cut the row
        del cases["padding"]
    wanted = {case: loss_and_gradients(hf, **given) for case, given in cases.items()}
    prompt: Any = {"input_ids": inputs["input_ids"][:, 6:15], "max_new_tokens": 5, "do_sample": False}
    keys, text = list(hf.state_dict()), hf.eval().generate(**prompt, eos_token_id=None) if of_each_kind else None
    logits = hf(inputs["input_ids"], labels=inputs["labels"]).logits.detach()

    passes: list[int] = []
    through = HFDecoder.forward
    monkeypatch.setattr(HFDecoder, "forward", lambda self, *a, **k: passes.append(1) or through(self, *a, **k))
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
    if not of_each_kind:
        return
    assert torch.equal(hf.generate(**prompt, eos_token_id=None), text)
    lm.restore(hf)
    assert not any({"native", "forward"} & vars(module).keys() for module in hf.modules())
    assert torch.equal(hf(inputs["input_ids"], labels=inputs["labels"]).logits, logits)


@pytest.mark.parametrize("name", sorted({*zoo.OF_EACH_KIND, *zoo.MAMBAS} - zoo.ONLY_NATIVE))
def test_passes_with_a_cache_in_bfloat16(name: str) -> None:
    """They run transformers' code, which has float32 beside bfloat16, with native norms and activations."""
    hf, ids = make(name).to(torch.bfloat16).eval(), batch()["input_ids"]

    @torch.no_grad()
    def logits() -> Tensor:
        prefill = hf(ids[:, :-1], use_cache=True)
        step = hf(ids[:, -1:], **{NAME: getattr(prefill, NAME)})
        return torch.cat([prefill.logits, step.logits], dim=1)

    wanted = logits().float()
    lm.nativize(hf)
    # In the mean: rounding sends some tokens to other experts.
    assert (logits().float() - wanted).abs().mean() < 0.1 * wanted.abs().mean()


@pytest.mark.parametrize("name", sorted(zoo.ONLY_NATIVE))
def test_layers_without_a_counterpart_are_refused(name: str) -> None:
    """Before anything is changed."""
    hf = make(name)
    reasons = "a mixer of Parallel[A-Za-z]+Config is|norms of kind 'layer' are|blocks of one layer are"
    words = rf"nativize: (({reasons}) not supported|Llama4ForCausalLM does not have its backbone)"
    with pytest.raises((ConfigError, InputError), match=words):
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


class Wide(nn.Linear):
    """Returns float32 under autocast, as many adapters of PEFT do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize("name", ["llama-3", "deepseek_v2-greedy", "gemma4_text-per-layer-inputs", "kimi_linear"])
def test_projections_in_float32_under_autocast(name: str) -> None:
    """One by one, so that their results meet those of others in bfloat16."""
    inputs = batch()
    found: dict[bool, list[Tensor]] = {}
    for native in (False, True):
        hf = make(name)
        layers = [m for m in hf.get_decoder().layers.modules() if type(m) is nn.Linear]
        names = {key.rpartition(".")[2] for key, m in hf.named_modules() if m in layers}
        hf = lm.nativize(hf) if native else hf
        found[native] = []
        for own in sorted(names):
            changed = [m for key, m in hf.named_modules() if key.rpartition(".")[2] == own and m in layers]
            for module in changed:
                module.__class__ = Wide
            with torch.autocast("cpu", torch.bfloat16):
                found[native].append(loss_and_gradients(hf, **inputs)[0].loss.detach())
            for module in changed:
                module.__class__ = nn.Linear
    assert len(found[True]) > 5
    assert_close(torch.stack(found[True]), torch.stack(found[False]), rtol=0.02, atol=0.0)


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
    ids = inputs["input_ids"]
    for given in ({}, {"input_ids": ids, "inputs_embeds": hf.get_input_embeddings()(ids)}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            hf(**given)


IDS = torch.full((2, 5), 4)
ROWS = torch.arange(5)[None]


def bad_inputs(hidden: int, vocab: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Inputs, with IDS where they have no tokens, and the message: of a backbone too, unless of a loss or logits."""
    dtypes = (torch.int32, torch.int16, torch.uint8, torch.float32, torch.bool, torch.complex64)
    embeds = torch.zeros(2, 5, hidden)
    keep = {"logits_to_keep": 2, "labels": IDS}
    bounds = torch.tensor([0, 2, 10])
    found: dict[str, tuple[dict[str, Any], str]] = {
        **{f"labels of {kind}": ({"labels": IDS.to(kind)}, f"labels: .* got {kind}") for kind in dtypes},
        "labels as a list": ({"labels": IDS.tolist()}, "labels: must be a tensor .*, got list"),
        "labels in numpy": ({"labels": IDS.numpy()}, "labels: must be a tensor .*, got ndarray"),
        "labels of padding as a list": ({"labels": [1], "attention_mask": IDS * 0 + 1}, "labels: .*, got list"),
        "labels of another length": ({"labels": IDS[:, :4]}, r"labels: must be .* 10; got torch.int64 \(2, 4\)"),
        "labels of no axis": ({"input_ids": IDS[:1, :1], "labels": IDS[0, 0]}, r"labels: must be .* 1; got .* \(\)"),
        "labels beyond": ({"labels": IDS + vocab}, rf"labels: must lie in \[0, {vocab}\), or be -100"),
        "labels below": ({"labels": IDS - 5}, "labels: must lie in"),
        "labels that were ignored": (
            {"labels": IDS, "ignore_index": 7, "shift_labels": IDS - 104},
            "shift_labels: .* be 7",
        ),
        "labels without values": ({"labels": IDS.to("meta")}, "labels: is on the meta device"),
        "labels of all tokens for two": (keep, r"labels: must be .* 4; got .* \(2, 5\)"),
        "shifted labels as a list": ({"labels": IDS, "shift_labels": IDS.tolist()}, "shift_labels: .*, got list"),
        "count as text": ({"labels": IDS, "num_items_in_batch": "4"}, "num_items_in_batch: must be a number"),
        "count of NaN": ({"labels": IDS, "num_items_in_batch": float("nan")}, "num_items_in_batch: "),
        "two counts": ({"labels": IDS, "num_items_in_batch": IDS[0, :2]}, "num_items_in_batch: must be one number"),
        "logits kept: below 0": ({"logits_to_keep": -2}, "logits_to_keep: "),
        "logits kept: half": ({"logits_to_keep": 1.5}, "logits_to_keep: "),
        "logits kept: beyond": (
            {"logits_to_keep": torch.tensor([5])},
            "logits_to_keep: must be indices of the 5 tokens",
        ),
        "logits kept: a list": ({"logits_to_keep": [0]}, "logits_to_keep: "),
        "ids without a token": ({"input_ids": IDS[:, :0]}, r"input_ids: has no token, \(2, 0\)"),
        "ids without a row": ({"input_ids": IDS[:0]}, r"input_ids: has no token, \(0, 5\)"),
        "ids of one axis": ({"input_ids": IDS[0]}, r"input_ids: must be .* \(B, T\); got torch.int64 \(5,\)"),
        **{f"ids of {kind}": ({"input_ids": IDS.to(kind)}, f"input_ids: .* got {kind}") for kind in dtypes[1:]},
        "ids as a list": ({"input_ids": IDS.tolist()}, r"input_ids: must be a tensor \(B, T\), got list"),
        "ids beyond": ({"input_ids": IDS + vocab}, rf"input_ids: .* \[0, {vocab}\), but \[0, 0\] is {vocab + 4}"),
        "ids beyond int32": ({"input_ids": IDS + 2**62}, "input_ids: token ids must lie in"),
        "ids below": ({"input_ids": IDS.int() - 9}, r"input_ids: .* but \[0, 0\] is -5"),
        "ids beyond, with a cache": ({"input_ids": IDS + vocab, "use_cache": True}, "input_ids: token ids must lie in"),
        "ids beyond, as padding": ({"input_ids": IDS - 5, "attention_mask": (ROWS > 1).repeat(2, 1)}, "input_ids: "),
        "ids without values": ({"input_ids": IDS.to("meta")}, "input_ids: is on the meta device"),
        "ids, sparse": ({"input_ids": IDS.to_sparse()}, "input_ids: must be a dense tensor"),
        "embeddings of another size": ({"inputs_embeds": torch.ones(2, 5, 12)}, r"inputs_embeds: .*, of shape .*12"),
        "embeddings of int64": ({"inputs_embeds": embeds.long()}, "inputs_embeds: must be floating"),
        "embeddings of bfloat16": (
            {"inputs_embeds": embeds.bfloat16()},
            "inputs_embeds: .* the model is torch.float32",
        ),
        "embeddings without values": ({"inputs_embeds": embeds.to("meta")}, "inputs_embeds: is on the meta device"),
        "mask as a list": ({"attention_mask": IDS.tolist()}, "attention_mask: must be a tensor .*, got list"),
        "mask as a number": ({"attention_mask": 1}, "attention_mask: must be a tensor .*, got int"),
        "mask in numpy": ({"attention_mask": IDS.numpy()}, "attention_mask: must be a tensor .*, got ndarray"),
        "mask as a dict": ({"attention_mask": {"full_attention": None}}, "attention_mask: of this model is no dict"),
        **{
            f"mask of shape {list(shape)}": ({"attention_mask": torch.ones(shape)}, "attention_mask: must be .* got .*")
            for shape in ((), (5,), (1, 5), (3, 5), (2, 4), (2, 6), (2, 5, 5), (2, 1, 4, 5), (2, 1, 5, 4), (3, 1, 5, 5))
        },
        **{
            f"mask of {value}": ({"attention_mask": torch.full((2, 5), value)}, "attention_mask: may hold only 1 .* 0")
            for value in (2, -1, 0.5, float("nan"), float("-inf"))
        },
        "mask of complex": ({"attention_mask": torch.ones(2, 5) + 0j}, "attention_mask: .* got torch.complex64"),
        "mask, sparse": ({"attention_mask": torch.ones(2, 5).to_sparse()}, "attention_mask: must be a dense tensor"),
        "mask without values": ({"attention_mask": torch.ones(2, 5, device="meta")}, "attention_mask: is on the meta"),
        "positions as a list": ({"position_ids": [0, 1, 2, 3, 4]}, "position_ids: must be a tensor .*, got list"),
        "positions of bool": ({"position_ids": ROWS > 2}, "position_ids: .* got torch.bool"),
        **{
            f"positions of shape {list(shape)}": (
                {"position_ids": torch.ones(shape).long()},
                "position_ids: must be .* of",
            )
            for shape in ((), (5,), (1, 4), (1, 6), (3, 5), (3, 2, 5))
        },
        "bounds as a list": ({"cu_seq_lens_q": [0, 2, 10]}, "cu_seq_lens_q: must be a tensor .*, got list"),
        "bounds of floats": ({"cu_seq_lens_q": bounds.float()}, "cu_seq_lens_q: .* got torch.float32"),
        "bounds beyond": ({"cu_seq_lens_q": bounds + 1}, "cu_seq_lens_q: must rise from 0 to the row's length, 10"),
        "cache as a number": ({"past_key_values": 3}, "past_key_values: must be a cache .*, got int"),
    }
    return {
        name: (given if given.keys() & {"input_ids", "inputs_embeds"} else {"input_ids": IDS, **given}, message)
        for name, (given, message) in found.items()
    }


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_inputs_that_no_model_takes_are_named(training: bool) -> None:
    """By the causal language model, and by its backbone; afterwards it computes what it did before."""
    model = lm.nativize(make("llama-3")).train(training)
    loss = {"labels", "shift_labels", "logits_to_keep"}
    wanted = model(IDS, labels=IDS).loss
    for name, (inputs, message) in bad_inputs(model.config.hidden_size, model.config.vocab_size).items():
        for module in (model,) if inputs.keys() & loss else (model, model.model):
            with pytest.raises(InputError) as caught:
                module(**inputs)
            assert re.match(message, str(caught.value)), (name, str(caught.value))
    assert torch.equal(model(IDS, labels=IDS).loss, wanted)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize(
    "given",
    [
        {"labels": IDS.flatten()},
        {"labels": IDS.flatten(), "attention_mask": torch.ones(2, 5)},
        {"labels": IDS.T},
        {"labels": IDS.tolist(), "shift_labels": IDS},
        {"labels": IDS - 104, "shift_labels": IDS},
        {"labels": torch.tensor([[4, 2, 4, 4, 2]]).repeat(2, 1), "ignore_index": 2},
        {"labels": torch.cat([IDS[:, :1] - 50, IDS[:, 1:]], dim=1), "output_hidden_states": True},  # no target
        {"labels": IDS[:, 3:], "logits_to_keep": 2},
        {"labels": IDS[:, 3:], "logits_to_keep": torch.tensor([3, -1], dtype=torch.int32)},
        {"labels": IDS[:, 3:], "logits_to_keep": ROWS[0] > 2},
        {"attention_mask": torch.ones(1, 1, 5, 5).tril().bool()},
        {"attention_mask": torch.ones(2, 1, 1, 5).bool()},
        {"position_ids": ROWS / 2},
        {"position_ids": ROWS + 2**40},
        {"num_items_in_batch": torch.tensor([7]), "labels": IDS},
    ],
    ids=lambda given: ", ".join(
        f"{name} {getattr(x, 'dtype', x)} {list(getattr(x, 'shape', ()))}" for name, x in given.items()
    ),
)
def test_unusual_inputs_that_transformers_takes_give_its_numbers(given: dict[str, Any], training: bool) -> None:
    hf = make("llama-3").train(training)
    ids = batch()["input_ids"][:, 6:11]
    wanted = hf(ids, **given)
    found = lm.nativize(hf)(ids, **given)
    assert (found.loss is None) == (wanted.loss is None)
    if wanted.loss is not None:
        assert_close(found.loss, wanted.loss.view_as(found.loss), rtol=1e-5, atol=1e-6)
    if found.logits is not None:
        assert zoo.relative_error(found.logits, wanted.logits) < 1e-5


def test_a_pass_without_values_leaves_the_model_as_it_was() -> None:
    """As of a model on the meta device, whose weights come later."""
    with torch.device("meta"):
        hf = make("llama-3")
    shapes = lm.nativize(hf)(IDS.to("meta")).logits.shape
    assert shapes == (2, 5, hf.config.vocab_size)
    loaded = make("llama-3")
    hf.to_empty(device="cpu").load_state_dict(loaded.state_dict())
    hf.model.rotary_emb = loaded.model.rotary_emb
    assert zoo.relative_error(hf(IDS).logits, loaded(IDS).logits) < 1e-5


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
    """With a layer that has a window, and one without; in training see test_nativize_gemma4.py."""
    hf, ids = lm.nativize(make("gemma2", num_hidden_layers=2)).eval(), batch()["input_ids"]
    found = torch._dynamo.explain(hf)(ids)
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
    from transformers.integrations.neftune import neftune_post_forward_hook  # imports PEFT, where it is installed

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
    with pytest.raises(InputError, match="LlamaModel does not have its backbone and head where"):
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
    monkeypatch.setattr(kind, "forward", functools.wraps(through)(lambda *args: called.append(1) or through(*args)))
    lm.nativize(hf)
    assert zoo.relative_error(hf(inputs["input_ids"]).logits, wanted) < 1e-5 and not called

    # As expert parallelism does: fewer experts, and an index past the last one for those that are elsewhere.
    count = experts.num_experts
    for weight in ("gate_up_proj", "down_proj"):
        setattr(experts, weight, nn.Parameter(getattr(experts, weight)[: count - 1].detach()))
    experts.num_experts = count - 1
    x, index = torch.randn(5, hf.config.hidden_size), torch.tensor([[0], [count - 1], [1], [count - 1], [0]])
    assert not experts(x, index, torch.ones(5, 1))[[1, 3]].any() and called
