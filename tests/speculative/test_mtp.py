"""Heads of multi-token prediction: formulas, loss and gradients, lossless drafting, and files."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.modeling_layers
from mtp_oracle import Oracle, add_head
from safetensors.torch import load_file, save_file
from test_quantized import make_quantised
from torch import nn
from zoo import BASE, CONFIGS, LLAMA, MIXTURES, MULTIMODAL, PHI_LONGROPE, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning, InputError
from ligermodels.layers import AttentionConfig
from ligermodels.speculative.decoding import TreeStep
from ligermodels.speculative.step_drafter import StepDrafter
from ligermodels.speculative.tree import DynamicTree, Tree, chain

ALL = {**CONFIGS, **MIXTURES, **MULTIMODAL}
DEEPSEEKS = ["glm4_moe", "glm4_moe_lite", "deepseek_v3", "bailing_hybrid"]
"""Configs whose checkpoints number the layers of their head after the model's, as DeepSeek-V3's do."""
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 6, 7]]


def with_layers(name: str, num_layers: int) -> dict[str, Any]:
    """The config of this name, saying that its head has so many layers."""
    config = dict(ALL[name])
    if name in DEEPSEEKS:
        return {**config, "num_nextn_predict_layers": num_layers}
    text = {**config.get("text_config", config), "mtp_num_hidden_layers": num_layers}
    return {**config, "text_config": text} if "text_config" in config else text


def stock(folder: Path, name: str, num_layers: int = 1, **changes: Any) -> Oracle:
    """A checkpoint with a head, and its oracle."""
    oracle = make_checkpoint(folder, {**with_layers(name, num_layers), **changes})
    return Oracle(oracle, add_head(folder, oracle, like_deepseek=name in DEEPSEEKS, num_layers=num_layers))


def ids_of(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def stir(model: lm.MTPModel) -> lm.MTPModel:
    draw = torch.Generator().manual_seed(2)
    for parameter in model.head_parameters():
        parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def made(name: str, num_layers: int = 1) -> lm.MTPModel:
    """A new head on random weights, away from its start."""
    torch.manual_seed(0)
    base = lm.from_config(ALL[name], dtype="float32")
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.normal_(0, 0.3 if parameter.ndim == 1 else 0.15)
    return stir(lm.MTPModel.from_base(base.eval(), num_layers=num_layers))


# -- formulas ----------------------------------------------------------------------------------------------------------


SEVERAL = [("qwen3_5_text", 2), ("qwen3_next", 3), ("glm4_moe", 2), ("deepseek_v3", 3)]
"""Configs, and numbers of layers of a head."""


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [(name, 1) for name in ("qwen3_5_text", "qwen3_5_text-other-sizes", "qwen3_next", "qwen3_5", *DEEPSEEKS)] + SEVERAL,
)
def test_every_step_is_that_of_the_formulas(name: str, num_layers: int, tmp_path: Path) -> None:
    """Step j by layer j, past the last layer by that one."""
    oracle, ids = stock(tmp_path, name, num_layers), ids_of(41)
    model = lm.MTPModel.from_pretrained(tmp_path, num_steps=4)
    with torch.no_grad():
        logits = model(ids).logits
    for step, wanted in enumerate(oracle.steps(ids, 4)):
        assert relative_error(logits[step, :, : wanted.shape[1]], wanted) < 2e-5, step


@pytest.mark.skipif(not hasattr(transformers.modeling_layers, "MtpModel"), reason="this transformers has no MtpModel")
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_head_like_deepseek_is_that_of_transformers(num_layers: int, tmp_path: Path) -> None:
    stock(tmp_path, "glm4_moe", num_layers)
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype="float32")
    main.set_experts_implementation("eager")
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\."]  # it has those of the published sizes
    theirs = transformers.modeling_layers.MtpModel.from_pretrained(main).eval()
    theirs.set_experts_implementation("eager")
    ids, model = ids_of(23), lm.MTPModel.from_pretrained(tmp_path, num_steps=2)
    with torch.no_grad():
        hidden, logits = main.model(ids).last_hidden_state, model(ids).logits
        for step in range(2):
            places = torch.arange(1, 23 - step)[None]
            cache = transformers.cache_utils.MtpCache(config=theirs.config)
            hidden = theirs.forward_layer(
                min(step, num_layers - 1), hidden[:, : 22 - step], places, cache, input_ids=ids[:, 1 + step :]
            )
            assert relative_error(logits[step, :, : 22 - step], theirs._project_to_logits(hidden)) < 2e-5


# -- loss --------------------------------------------------------------------------------------------------------------


def plain_loss(model: lm.MTPModel, hidden: torch.Tensor, labels: torch.Tensor, documents: list[int]) -> torch.Tensor:
    """The loss by whole logits, one document and one step after another; attention of the block by itself."""
    sums, counts = [torch.zeros((), dtype=hidden.dtype)] * model.num_heads, [0] * model.num_heads
    for start, end in itertools.pairwise(documents):
        h, embeds = hidden[:, start:end], model.base.decoder.embed(labels[:, start:end].clamp(min=0))
        for step in range(min(model.num_heads, end - start - 2)):
            layer = min(step, model.head.num_layers - 1)
            h = model.head(embeds[:, 1 + step :], h[:, : end - start - 1 - step], layer=layer)
            logits = F.linear(h[:, :-1], model.base.head.weight).log_softmax(-1)
            right = labels[:, start + 2 + step : end]
            kept = right != -100
            sums[step] = sums[step] - logits.gather(2, right.clamp(min=0)[..., None])[..., 0][kept].sum()
            counts[step] += int(kept.sum())
    weights = torch.tensor([0.6**step for step in range(model.num_heads)]).double()
    return sum(w * s / c for w, s, c in zip(weights / weights.sum(), sums, counts, strict=True))


@pytest.mark.parametrize(
    ("name", "num_layers"), [("llama-3.1", 1), ("qwen3_5_text", 1), ("gemma3_text", 2), ("glm4_moe", 2)]
)
def test_loss_and_gradients_of_packed_documents(name: str, num_layers: int) -> None:
    model, labels = made(name, num_layers).double(), ids_of(40)
    documents = [0, 2, 3, 19, 40]
    bounds = torch.tensor(documents, dtype=torch.int32)
    ids = labels.clone()
    with torch.no_grad():
        hidden = model.base(ids, cu_seqlens=bounds, return_last_hidden_state=True).last_hidden_state
    wanted = plain_loss(model, hidden, labels, documents)
    gradients = torch.autograd.grad(wanted, list(model.head_parameters()))
    places = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(documents)])
    for given in ({"cu_seqlens": bounds}, {"position_ids": places[None]}):
        model.zero_grad()
        out = model(ids, labels=labels, **given)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(wanted.item(), rel=1e-9)
        for (each, parameter), gradient in zip(model.head.named_parameters(), gradients, strict=True):
            assert relative_error(parameter.grad, gradient) < 1e-6 and gradient.any(), each
    assert all(parameter.grad is None for parameter in model.base.parameters())
    assert out.counts.tolist() == [
        sum(max(0, e - s - 2 - j) for s, e in itertools.pairwise(documents)) for j in range(3)
    ]
    assert model.num_targets(labels, cu_seqlens=bounds).tolist() == out.counts.tolist()


def test_ignored_labels_padding_and_checkpointing_leave_the_loss_the_same() -> None:
    model, ids = made("llama-3.1").double(), ids_of(24, 2)
    labels = ids.clone()
    labels[0, :15], labels[1, 20:] = -100, -100
    wanted = model(ids, labels=labels)
    wanted.loss.backward()
    gradients = [p.grad.clone() for p in model.head_parameters()]
    padded, mask = F.pad(ids, (3, 0), value=0), F.pad(torch.ones_like(ids), (3, 0))
    ways = [
        ("full", {"input_ids": ids, "labels": labels}),
        ("none", {"input_ids": padded, "labels": F.pad(labels, (3, 0), value=-100), "attention_mask": mask}),
        ("none", {"inputs_embeds": model.base.decoder.embed(ids).detach(), "labels": labels}),
    ]
    for mode, given in ways:
        model.zero_grad()
        model.base.activation_checkpointing = mode
        out = model(**given)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-10)
        assert out.head_losses.tolist() == pytest.approx(wanted.head_losses.tolist(), rel=1e-10)
        assert all(relative_error(p.grad, g) < 1e-9 for p, g in zip(model.head_parameters(), gradients, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("llama-3.2", torch.bfloat16, 3e-2), ("glm4_moe", torch.float64, 1e-6), ("gpt_oss", torch.bfloat16, 3e-2)],
)
def test_a_head_of_another_dtype_than_its_model(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """It computes in its own: the loss and its gradients, and drafts, which leave the model's tokens as they are."""
    model, ids = made(name, 2), ids_of(24, 2)
    wanted = model(ids, labels=ids).loss
    wanted.backward()
    gradients = {key: parameter.grad for key, parameter in model.head.named_parameters()}
    text = model.generate(PROMPTS, 20, draft=None, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.zero_grad()
    model.head.to(dtype)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=tolerance)
    for key, parameter in model.head.named_parameters():
        assert parameter.grad.dtype == dtype and parameter.grad.isfinite().all()
        if dtype is torch.float64:
            assert relative_error(parameter.grad, gradients[key].double()) < 1e-4, key
    assert torch.equal(model.generate(PROMPTS, 20, eos_token_id=None, pad_token_id=0), text)


# -- drafting ----------------------------------------------------------------------------------------------------------

ALL["longrope"] = {**BASE, **PHI_LONGROPE, "sliding_window": 9, "original_max_position_embeddings": 21}
ALL["dynamic"] = {**LLAMA, "max_position_embeddings": 21, "rope_scaling": {"type": "dynamic", "factor": 3.0}}
LOSSLESS = ["llama-3.2", "gemma3_text", "qwen3_5_text", "deepseek_v3", "gpt_oss", "ministral3"]


TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        *((name, TREE) for name in (*LOSSLESS, "longrope", "dynamic")),
        *((name, tree) for name in ("qwen3_5_text", "dynamic") for tree in (None, DynamicTree(3, 3, 9))),
    ],
)
def test_drafting_gives_the_tokens_of_the_model_alone(name: str, tree: Tree | DynamicTree | None) -> None:
    model = made(name, 2 if isinstance(tree, Tree) else 1)
    options: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(PROMPTS, 12, draft=None, do_sample=False, **options)
    found = model.generate(PROMPTS, 12, draft="mtp", tree=tree, return_stats=True, **options)
    assert found.sequences.tolist() == wanted.tolist()
    if name not in ("gemma3_text", "qwen3_5_text", "dynamic"):  # tokens that end a text are no matter of layers
        return
    stop = int(wanted[0, -6])
    ended = model.generate(PROMPTS, 12, tree=tree, eos_token_id=stop, pad_token_id=0)
    assert (
        ended.tolist() == model.base.generate(PROMPTS, 12, do_sample=False, eos_token_id=stop, pad_token_id=0).tolist()
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "num_layers"), [("llama-3.2", 1), ("qwen3_5_text", 1), ("llama-3.2", 2), ("glm4_moe", 3), ("llama-3.2", 5)]
)
def test_drafts_with_the_cache_are_those_without(name: str, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft against one pass over the whole text; at this temperature nearly all candidates are accepted, so that
    paths of several tokens are followed, and not those of the first candidates."""
    model, seen = made(name, num_layers), []
    tree = Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 0, 1), (1, 0, 1, 0)])
    draft = StepDrafter.draft

    def recomputed(text: list[int], depth: int) -> list[int]:
        hidden = model.base(torch.tensor([text[:-1]]), return_last_hidden_state=True).last_hidden_state
        tokens, found = text[1:], []
        for step in range(depth):
            layer = min(step, num_layers - 1)
            y = model.head(model.base.decoder.embed(torch.tensor([tokens])), hidden, layer=layer)
            found.append(int(model.base.logits(y[:, -1]).argmax()))
            if step + 1 < num_layers:
                tokens, hidden = [*tokens[1:], found[-1]], y
            else:
                tokens, hidden = [*tokens, found[-1]], torch.cat([hidden, y[:, -1:]], dim=1)
        return found

    def checked(self: StepDrafter, sequences: Any) -> torch.Tensor:
        best = draft(self, sequences)
        for row, (text, length, done) in enumerate(
            zip(sequences.text.tolist(), (sequences.start + sequences.count).tolist(), sequences.done, strict=True)
        ):
            if not done:
                assert best[row, :, 0].tolist() == recomputed(text[:length], best.shape[1])
                seen.append(length)
        return best

    monkeypatch.setattr(StepDrafter, "draft", checked)
    out = model.generate(PROMPTS, 20, tree=tree, temperature=1e4, eos_token_id=None, pad_token_id=0, return_stats=True)
    assert len(seen) == out.steps and out.tokens_per_step > 1.2


@torch.no_grad()
@pytest.mark.parametrize(("tree", "num_layers"), [(chain(3), 3), (DynamicTree(3, 4, 9), 1)], ids=["chain", "dynamic"])
def test_a_step_waits_for_nothing(tree: Tree | DynamicTree, num_layers: int) -> None:
    """On the meta device no value can be looked at: a graph can hold a step."""
    model = lm.MTPModel.from_base(lm.from_config(CONFIGS["gemma2"], device="meta").eval(), num_layers=num_layers)
    step = TreeStep(model.base, model.drafter(tree), model.base.new_state(3, 40), tree, 9, [2, 5])
    rows = step.start(torch.zeros(3, 7, dtype=torch.long, device="meta"), torch.ones(3, 7, dtype=bool, device="meta"))
    places = [*map(id, vars(rows).values()), *map(id, step.drafter._hidden)]
    step(rows)
    assert [*map(id, vars(rows).values()), *map(id, step.drafter._hidden)] == places


# -- files -------------------------------------------------------------------------------------------------------------


def same_files(one: Path, other: Path) -> None:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [*((name, 1) for name in ("qwen3_5_text", "qwen3_next", "qwen3_5_moe", *DEEPSEEKS)), *SEVERAL],
)
def test_a_stock_checkpoint_goes_out_as_it_came(name: str, num_layers: int, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if num_layers == 1 else torch.float32
    oracle = make_checkpoint(tmp_path / "in", with_layers(name, num_layers), dtype=dtype)
    tensors = add_head(tmp_path / "in", oracle, like_deepseek=name in DEEPSEEKS, num_layers=num_layers)
    model = lm.MTPModel.from_pretrained(tmp_path / "in", dtype=dtype)
    model.save_pretrained(tmp_path / "out")
    same_files(tmp_path / "in", tmp_path / "out")
    model.save_pretrained(tmp_path / "alone", keep="model")
    assert load_file(tmp_path / "alone" / "model.safetensors").keys() >= tensors.keys()
    model.save_head(tmp_path / "head")
    own = load_file(tmp_path / "head" / "model.safetensors")
    copies = {name for name in tensors if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert own.keys() == tensors.keys() - copies and all(torch.equal(own[name], tensors[name]) for name in own)
    again = lm.MTPModel.from_pretrained(lm.from_pretrained(tmp_path / "alone", dtype=dtype), tmp_path / "head")
    stored = [
        model.head.state_dict(),
        again.head.state_dict(),
        lm.MTPModel.from_pretrained(tmp_path / "alone").head.state_dict(),
    ]
    assert all(torch.equal(stored[0][key], other[key]) for key in stored[0] for other in stored[1:])


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [("llama-3.2", 1), ("qwen3_5_text", 2), ("gemma3_text", 1), ("glm4_moe", 1), ("glm4_moe", 2), ("qwen3_next", 2)],
)
def test_a_new_head_goes_out_and_comes_back(name: str, num_layers: int, tmp_path: Path) -> None:
    config = {key: value for key, value in ALL[name].items() if key != "mtp_num_hidden_layers"}
    oracle = make_checkpoint(
        tmp_path / "in", {**config, **({"num_nextn_predict_layers": 0} if name == "glm4_moe" else {})}
    )
    model = stir(lm.MTPModel.from_base(lm.from_pretrained(tmp_path / "in"), num_layers=num_layers))
    model.save_pretrained(tmp_path / "out")
    field = "num_nextn_predict_layers" if name == "glm4_moe" else "mtp_num_hidden_layers"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written[field] == num_layers
    assert name != "qwen3_next" or written["num_nextn_predict_layers"] == 2  # the field that vLLM reads
    again = lm.MTPModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    again.save_pretrained(tmp_path / "twice")
    same_files(tmp_path / "out", tmp_path / "twice")
    # The model with the head is the checkpoint that it was, and without it, the checkpoint before it had the head.
    base = lm.from_pretrained(tmp_path / "out")
    base.save_pretrained(tmp_path / "whole")
    same_files(tmp_path / "out", tmp_path / "whole")
    for keep in ("model", "without-heads"):
        base.save_pretrained(tmp_path / keep, keep=keep)
        same_files(tmp_path / "in", tmp_path / keep)
        assert json.loads((tmp_path / keep / "config.json").read_text())[field] == 0
    theirs, ids = type(oracle).from_pretrained(tmp_path / "out", attn_implementation="eager").eval(), ids_of(9)
    if name not in ("glm4_moe", "qwen3_next"):
        assert torch.equal(theirs(ids).logits, oracle(ids).logits)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    stock(folder, "qwen3_5_text")
    base, tensors = lm.from_pretrained(folder), load_file(folder / "model.safetensors")

    def refused(change: dict[str, torch.Tensor], kept: Any = lambda name: True) -> str:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "bad")
        changed = {name: tensor for name, tensor in tensors.items() if kept(name)} | change
        save_file(changed, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError) as error:
            lm.MTPModel.from_pretrained(base, tmp_path / "bad")
        return str(error.value)

    assert "no head of multi-token prediction" in refused({}, lambda name: not name.startswith("mtp."))
    assert "missing from the checkpoint: mtp.fc.weight" in refused({}, lambda name: name != "mtp.fc.weight")
    assert "mtp.fc.weight [3, 4] instead of [60, 120]" in refused({"mtp.fc.weight": torch.zeros(3, 4)})
    assert "not expected in the checkpoint: mtp.other" in refused({"mtp.other": torch.zeros(1)})
    found = refused({"mtp.layers.1.input_layernorm.weight": torch.zeros(60)})
    assert "mtp_num_hidden_layers" in found and "says 1 layers" in found and "have tensors of 2" in found
    for change, name in (({"num_steps": 0}, "num_steps"), ({"decay": -1.0}, "decay"), ({"dtype": "float32"}, "dtype")):
        with pytest.raises(InputError, match=name):
            lm.MTPModel.from_pretrained(base, **change)
    for wrong in ({"num_steps": 0}, {"decay": -1.0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            lm.MTPModel.from_base(base, **wrong)
    with pytest.raises(CheckpointError, match="from_base"):
        lm.MTPModel.from_pretrained(lm.from_config(CONFIGS["llama-3.2"]))
    assert all(parameter.requires_grad for parameter in base.parameters()), "frozen by a call that failed"
    for make in (lm.MTPModel.from_base, lm.MTPModel.from_pretrained, lm.MedusaModel.from_base):
        for other in (nn.Linear(2, 2), None, lm.MTPModel.from_base(lm.from_config(CONFIGS["llama-3.2"]))):
            with pytest.raises(InputError, match=f"base: takes a native CausalLM, got a {type(other).__name__}"):
                make(other)
    model = lm.MTPModel.from_base(base)
    for given, name in (({"draft": "medusa"}, "draft"), ({"tree": 3}, "tree"), ({"top_k": 3}, "top_k")):
        with pytest.raises(InputError, match=name):
            model.generate([[1]], 4, **given)
    with pytest.raises(InputError, match="131"):
        model.generate([[1]], 4, tree=Tree.from_paths([(i,) for i in range(132)]))
    with pytest.raises(ConfigError, match="per_layer_inputs"):
        lm.MTPModel.from_base(
            lm.from_config(next(v for k, v in CONFIGS.items() if v.get("hidden_size_per_layer_input")))
        )


def test_a_copy_that_is_none_is_told(tmp_path: Path) -> None:
    stock(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.embed_tokens.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(ConfigWarning, match=r"model\.layers\.2\.embed_tokens\.weight"):
        lm.MTPModel.from_pretrained(tmp_path)


def test_the_block_is_that_of_full_attention() -> None:
    for name in ("qwen3_5_text", "gemma3_text", "gpt_oss"):
        model = made(name)
        mixer = model.base.config.blocks[-1].mixer
        full = [
            b.mixer for b in model.base.config.blocks if isinstance(b.mixer, AttentionConfig) and b.mixer.window is None
        ]
        assert model.head.block.mixer.config in (full or [mixer]) and isinstance(model.head, nn.Module)


def test_a_head_in_fp8_is_dequantised(tmp_path: Path) -> None:
    stock(tmp_path, "qwen3_5_text")
    plain = make_quantised(tmp_path, CONFIGS["qwen3_5_text"], "block")
    model = lm.MTPModel.from_pretrained(tmp_path, dtype=torch.float32)
    model.save_head(tmp_path / "head")
    found = load_file(tmp_path / "head" / "model.safetensors")
    assert found.keys() == {name for name in plain if name.startswith("mtp.")}
    assert all(torch.equal(tensor, plain[name].float()) for name, tensor in found.items())
    model.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == plain.keys()
