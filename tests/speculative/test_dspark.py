"""DFlash and DSpark against a float64 reference over the tensors of an exported head; drafting; files."""

import itertools
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from named_exports import export_named
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import CONFIGS, MIXTURES, OF_EACH_KIND

import ligermodels as lm
from ligermodels import ops
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning, InputError
from ligermodels.layers.targets import shift_labels
from ligermodels.layers.tokens import KeptPadding, Tokens, Unpadding
from ligermodels.speculative.block_draft import BlockDraftModel
from ligermodels.speculative.block_head import BlockDraftConfig
from ligermodels.speculative.block_training import Blocks, default_layer_ids, sample_blocks
from ligermodels.speculative.decoding import TreeStep
from ligermodels.speculative.draft_layer import layer_like
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.load import load_multi_head
from ligermodels.speculative.tree import Tree, chain
from ligermodels.speculative.verify import verify_heads

ALL = {**CONFIGS, **MIXTURES}
TARGET: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SOFTCAPPED = {**TARGET, "model_type": "gemma2", "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 6,
              "sliding_window": 32, "attn_logit_softcapping": 50.0}  # fmt: skip
EVERY_THIRD = torch.arange(1, 61, 3)
BLOCK = 4
VARIANTS: dict[str, tuple[type[BlockDraftModel], dict[str, Any]]] = {
    "dflash": (lm.DFlashModel, {}),
    "dflash-dpace": (lm.DFlashModel, {"dpace_alpha": 0.3}),
    "bare": (lm.DSparkModel, {"markov_rank": 0, "confidence": False, "gamma": None}),
    "vanilla": (lm.DSparkModel, {"markov_rank": 5}),
    "gated": (lm.DSparkModel, {"markov_rank": 5, "markov_head_type": "gated", "confidence_with_markov": False}),
    "rnn": (lm.DSparkModel, {"markov_rank": 5, "markov_head_type": "rnn", "divergence": "forward_kl"}),
    "windows": (lm.DFlashModel, {"windows": (True, True)}),
    "mixed": (lm.DFlashModel, {"windows": (True, False)}),
    "bidirectional": (lm.DSparkModel, {"windows": (True, True), "causal": False, "markov_rank": 5}),
    "causal": (lm.DSparkModel, {"causal": True, "markov_rank": 0, "confidence": False}),
}
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 2, "head_dim": 4,
    "global_head_dim": 6, "layer_types": ["full_attention"] * 2, "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "final_logit_softcapping": 1.5, "tie_word_embeddings": False,
    "enable_moe_block": False, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
    "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.67,
                                           "rope_theta": 10_000.0}, "sliding_attention": {"rope_type": "default"}},
}  # fmt: skip
"""Layers of Gemma 4's kind: https://github.com/deepseek-ai/DeepSpec, deepspec/modeling/dspark/gemma4."""
VARIANTS["gemma4"] = (lm.DSparkModel, {"layers": GEMMA4, "markov_rank": 5, "divergence": "forward_kl"})
VARIANTS["gemma4-values"] = (
    lm.DSparkModel, {"layers": {**GEMMA4, "attention_k_eq_v": False}, "markov_rank": 0, "confidence": False}
)  # fmt: skip
WINDOW = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEES: dict[str, list[tuple[int, bool]]] = {
    "windows": [(WINDOW, True)] * 2, "mixed": [(WINDOW, True), (99, False)], "bidirectional": [(WINDOW, False)] * 2,
    "causal": [(99, True)] * 2,
}  # fmt: skip
"""Of each layer the positions that a slot sees up to its own, and whether it sees no later slot."""


def target(config: dict[str, Any] = TARGET, dtype: str = "float64") -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.ndim == 1 else 0.2)
    return model


def stirred(kind: str, base: lm.CausalLM, **options: Any) -> Any:
    """A head with random norms too, so that no factor of 1 hides an error."""
    model_class, own = VARIANTS[kind]
    size = BLOCK + (model_class is lm.DFlashModel)
    boundaries = (0, 3) if len(base.config.blocks) == 4 else None
    own = dict(own)
    if (windows := own.pop("windows", None)) is not None:
        types = ["sliding_attention" if window else "full_attention" for window in windows]
        own["layers"] = layer_like(base.config, "qwen3", 2)
        own["layers"] |= {"layer_types": types, "sliding_window": WINDOW, "use_sliding_window": True}
    own |= options
    number = {} if "layers" in own else {"num_layers": 2}
    model = model_class.from_base(base, size, **{"boundaries": boundaries, **number, **own})
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.head_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(parameter) * 0.2)
    return model


def tensors_of(model: Any, folder: Path) -> dict[str, Tensor]:
    model.export(folder, base_model="some/target", overwrite=True)
    return load_file(folder / "model.safetensors")


def ids_of(length: int, batch: int = 1) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


# -- formulas ----------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: Tensor, positions: Tensor, turning: int = 3) -> Tensor:
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half) * (torch.arange(half) < turning)
    angles = positions[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def reference_hidden(
    w: dict[str, Tensor], states: Tensor, token: int, anchor: int, size: int, mask: int, kind: str = "dflash"
) -> Tensor:
    """(size, H): the slots of one block after a document's states (T, n H), of which it sees those before the anchor.
    Facts: arXiv 2602.06036; sliding windows as in vLLM, whose window counts the slot itself."""
    c = norm(states[:anchor] @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][[token] + [mask] * (size - 1)]
    x = x * 24**0.5 if "gemma4" in kind else x
    where = torch.arange(anchor + size)
    sees, before = iter(SEES.get(kind, [(99, False)] * 9)), where[anchor:, None] - where
    for layer in itertools.takewhile(lambda p: f"{p}.input_layernorm.weight" in w, (f"layers.{i}" for i in range(9))):
        h = norm(x, w[f"{layer}.input_layernorm.weight"])
        source = torch.cat([c, h])
        values = "k" if kind == "gemma4" else "v"
        q, k, v = (
            (inputs @ w[f"{layer}.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, 6))
            for part, inputs in (("q", h), ("k", source), (values, source))
        )
        turning = 2 if "gemma4" in kind else 3  # of the 3 frequencies of 6 channels; the others are 0
        q = rotate(norm(q, w[f"{layer}.self_attn.q_norm.weight"]), where[anchor:], turning)
        k = rotate(norm(k, w[f"{layer}.self_attn.k_norm.weight"]), where, turning)
        v = norm(v, torch.ones(6, dtype=v.dtype)) if "gemma4" in kind else v
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        window, causal = next(sees)
        hidden = (before >= window) | ((before < 0) & causal)
        scale = 1.0 if "gemma4" in kind else 6**-0.5
        weights = (torch.einsum("thd,shd->hts", q, k) * scale).masked_fill(hidden, -math.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weights, v).flatten(1) @ w[f"{layer}.self_attn.o_proj.weight"].T
        gate, up, down = (w[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        if "gemma4" in kind:
            x = x + norm(mixed, w[f"{layer}.post_attention_layernorm.weight"])
            y = norm(x, w[f"{layer}.pre_feedforward_layernorm.weight"])
            y = (F.gelu(y @ gate.T, approximate="tanh") * (y @ up.T)) @ down.T
            x = (x + norm(y, w[f"{layer}.post_feedforward_layernorm.weight"])) * w[f"{layer}.layer_scalar"]
        else:
            x = x + mixed
            y = norm(x, w[f"{layer}.post_attention_layernorm.weight"])
            x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return norm(x, w["norm.weight"])


def reference(w: dict[str, Tensor], hidden: Tensor, before: Tensor | list[int]) -> tuple[Tensor, Tensor | None]:
    """Logits (K, V_d) and confidence logits (K,) of slots with hidden states (K, H) after the tokens `before` (K,)."""
    logits, confidence = hidden @ w["lm_head.weight"].T, None
    logits = 1.5 * (logits / 1.5).tanh() if "layers.0.layer_scalar" in w else logits
    state = torch.zeros(5, dtype=hidden.dtype)
    found = []
    for slot, token in enumerate(before):
        if "markov_head.markov_w1.weight" not in w:
            break
        e = code = w["markov_head.markov_w1.weight"][token]
        if "markov_head.gate_proj.weight" in w:
            z = torch.cat([hidden[slot], e])
            code = (w["markov_head.gate_proj.weight"] @ z + w["markov_head.gate_proj.bias"]).sigmoid() * e
        if "markov_head.joint_proj.weight" in w:
            z = torch.cat([state, e, hidden[slot]])
            f, u, o = (w["markov_head.joint_proj.weight"] @ z + w["markov_head.joint_proj.bias"]).chunk(3)
            state, code = f.sigmoid() * state + (1 - f.sigmoid()) * u.tanh(), o.tanh()
        found.append(logits[slot] + w["markov_head.markov_w2.weight"] @ code)
    if "confidence_head.proj.weight" in w:
        features = hidden
        if w["confidence_head.proj.weight"].shape[1] > hidden.shape[1]:
            features = torch.cat([hidden, w["markov_head.markov_w1.weight"][torch.as_tensor(before)]], dim=-1)
        confidence = features @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    return (torch.stack(found) if found else logits), confidence


@pytest.mark.filterwarnings("ignore:sliding_window_non_causal")
@pytest.mark.parametrize(
    ("kind", "reduced"), [*zip(VARIANTS, itertools.cycle([False, True])), ("dflash", True), ("rnn", False)]
)
def test_blocks_are_those_of_the_formulas(kind: str, reduced: bool, tmp_path: Path) -> None:
    """Logits, with and without neighbours in a packed row; and the loss, its gradients, acceptance and agreement."""
    base = target(SOFTCAPPED)
    wide = {"rtol": 2e-6, "atol": 1e-6} if "gemma4" in kind else {}  # angles are rounded to fp32, and scores are larger
    vocabulary = DraftVocabulary(EVERY_THIRD, 61) if reduced else None
    model = stirred(kind, base, vocabulary=vocabulary)
    options, tokens = model.training_options, torch.arange(61) if vocabulary is None else EVERY_THIRD
    dflash, mask = isinstance(model, lm.DFlashModel), 60
    w, lengths = tensors_of(model, tmp_path), [9, 1, 2, 12]
    for tensor in w.values():
        if tensor.is_floating_point():
            tensor.requires_grad_()
    texts = [ids_of(length)[0] + i for i, length in enumerate(lengths)]
    texts = [text % 61 for text in texts]
    labels = [text.clone() for text in texts]
    labels[3][[2, 8]] = -100
    terms, found, kept = [], [], []
    for text, label in zip(texts, labels, strict=True):
        states, _ = lm.capture(base, text[None], model.config.boundaries)
        everything = base(text[None]).logits[0]  # acceptance is by the model's distribution over all its tokens
        truth, whole = everything[:, tokens].log_softmax(-1), everything.log_softmax(-1)
        for a in range(len(text)):
            hidden = reference_hidden(w, states[0], int(text[a]), a, BLOCK + dflash, mask, kind)[int(dflash) :]
            before = text[[min(a + k, len(text) - 1) for k in range(BLOCK)]]
            logits, confidence = reference(w, hidden, before)
            found.append(logits)
            kept.append(torch.arange(BLOCK) + a < len(text) - 1)
            ahead = label[a + 1 : a + 1 + BLOCK].tolist()
            supervised = range(next((k for k, token in enumerate(ahead) if token < 0), len(ahead)))
            if label[a] < 0 or not supervised:
                continue
            log_q, q_right, rows = logits.log_softmax(-1), [], []
            for k in supervised:
                p, place = truth[a + k], (tokens == text[a + 1 + k]).nonzero()
                ce = -log_q[k, place[0, 0]] if len(place) else torch.zeros((), dtype=torch.float64)
                q_right.append(ce.detach().neg().exp() if len(place) else torch.zeros(()))
                l1 = (log_q[k].exp() - p.exp()).abs().sum()
                alpha = 1 - (log_q[k].detach().exp() - p.exp()).abs().sum() / 2
                distance = (p.exp() * (p - log_q[k])).sum() if options.divergence == "forward_kl" else l1
                value = options.ce_weight * ce + options.divergence_weight * distance
                extra = torch.zeros(())
                if confidence is not None:
                    extra = F.binary_cross_entropy_with_logits(confidence[k], alpha)
                alpha = torch.minimum(whole[a + k][tokens], log_q[k].detach()).exp().sum()
                agrees = float(tokens[log_q[k].argmax()] == whole[a + k].argmax())
                rows.append((value, extra, alpha, agrees))
            weights = [math.exp(-k / options.gamma) if options.gamma else 1.0 for k in supervised]
            if options.dpace_alpha is not None:
                u = [0.7 * float(q) + 0.3 for q in q_right]
                weights = [sum(math.prod(u[: i + 1]) for i in range(j, len(u))) for j in range(len(u))]
            terms.append([(weight, *row) for weight, row in zip(weights, rows, strict=True)])

    packed, bounds = torch.cat(texts)[None], torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    together = model(packed, cu_seqlens=bounds).logits[:, 0].transpose(0, 1)
    for a, (logits, inside) in enumerate(zip(found, kept, strict=True)):
        torch.testing.assert_close(together[a][inside], logits[inside], **wide)
    torch.testing.assert_close(model(texts[0][None]).logits[:, 0, 3], found[3], **wide)

    flat = [term for block in terms for term in block]
    whole = len(flat) if options.dpace_alpha is not None else sum(term[0] for term in flat)
    loss = sum(weight * (value + options.confidence_weight * extra) for weight, value, extra, *_ in flat) / whole
    out = model(packed, labels=torch.cat(labels)[None], cu_seqlens=bounds)
    torch.testing.assert_close(out.loss, loss, **wide)
    slots = [[block[k] for block in terms if len(block) > k] for k in range(BLOCK)]
    assert out.counts.tolist() == [len(slot) for slot in slots]
    means = torch.stack([torch.stack([row[1] for row in slot]).mean() for slot in slots])
    torch.testing.assert_close(out.head_losses.detach(), means.detach(), **wide)
    for name, place in (("acceptance", 3), ("agreement", 4)):  # given that the slots before are accepted
        reached = [[math.prod(float(row[place]) for row in block[:k]) for block in terms if len(block) > k]
                   for k in range(BLOCK)]  # fmt: skip
        shares = [sum(r * float(row[place]) for r, row in zip(reach, slot, strict=True)) / max(sum(reach), 1e-9)
                  for reach, slot in zip(reached, slots, strict=True)]  # fmt: skip
        torch.testing.assert_close(getattr(out, name).double(), torch.tensor(shares, dtype=torch.float64), **wide)
    native = {name: p for name, p in model.head.named_parameters()}
    pairs = {"fc.weight": "fc.weight", "norm.weight": "norm.weight", "layers.1.mlp.down_proj.weight":
             "layers.1.mlp.down.weight", "layers.0.self_attn.k_norm.weight": "layers.0.mixer.k_norm.weight",
             "layers.0.self_attn.q_proj.weight": "layers.0.mixer.q.weight", "hidden_norm.weight": "hidden_norm.weight",
             "markov_head.markov_w1.weight": "markov.w1.weight", "markov_head.markov_w2.weight": "markov.w2.weight",
             "markov_head.joint_proj.bias": "markov.joint.bias", "markov_head.gate_proj.weight": "markov.gate.weight",
             "confidence_head.proj.weight": "confidence.proj.weight"}  # fmt: skip
    names = [name for name in pairs if name in w]
    wanted = torch.autograd.grad(loss, [w[name] for name in names])
    out.loss.backward()
    for name, gradient in zip(names, wanted, strict=True):
        torch.testing.assert_close(native[pairs[name]].grad, gradient, msg=name, **wide)
    assert all(parameter.grad is None for parameter in base.parameters())
    assert all(parameter.grad is not None for parameter in model.head_parameters())
    small = model(packed, labels=torch.cat(labels)[None], cu_seqlens=bounds, memory_budget=1)
    torch.testing.assert_close(small.loss, out.loss)


def test_the_network_is_that_of_transformers(tmp_path: Path) -> None:
    """Our slots, from the cache and in training, against transformers' DFlash assistant with the same weights."""
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    config_class = pytest.importorskip("transformers").MuseGlimmerAssistantConfig
    base = target()
    model = stirred("dflash", base)
    w = tensors_of(model, tmp_path)
    shape = {name: TARGET[name] for name in TARGET if name not in ("model_type", "num_hidden_layers", "rms_norm_eps")}
    config = config_class(
        **shape, num_hidden_layers=2, rms_norm_eps=1e-5, block_size=BLOCK + 1, mask_token_id=60,
        target_layer_ids=[boundary - 1 for boundary in model.config.boundaries],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, layer_types=["full_attention"] * 2,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = assistant.MuseGlimmerAssistantModel(config).double().eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    missing = theirs.load_state_dict({names.get(name, name): x for name, x in w.items()}, strict=False)
    assert not missing.missing_keys and set(missing.unexpected_keys) == {"embed_tokens.weight", "lm_head.weight"}
    text, anchor = ids_of(12)[0], 7
    states, _ = lm.capture(base, text[None], model.config.boundaries)
    slots = w["embed_tokens.weight"][[int(text[anchor])] + [60] * BLOCK]
    out = theirs(
        noise_embeds=slots[None],
        context_hidden_states=states[:, :anchor],
        position_ids=torch.arange(anchor + BLOCK + 1)[None],
        use_cache=False,
    )
    wanted = out.last_hidden_state[0, 1:] @ w["lm_head.weight"].T
    torch.testing.assert_close(model(text[None]).logits[:, 0, anchor], wanted, rtol=1e-5, atol=1e-6)  # fp32 rotations


def test_anchors() -> None:
    """Without replacement, ascending, among tokens that are supervised together with the next one; the same each time
    and beside other sequences; other ones with another seed."""
    labels = ids_of(40, 2)
    labels[0, [3, 4, 20]] = -100
    following = torch.stack([F.pad(labels[:, k:], (0, k), value=-100) for k in (1, 2, 3)])
    allowed = {t for t in range(39) if labels[0, t] >= 0 and labels[0, t + 1] >= 0}

    def sample(row: slice, count: int, seed: int) -> Blocks:
        return sample_blocks(labels[row], following[:, row], Tokens(), count, seed)

    blocks = sample(slice(0, 1), 10, 0)
    chosen = blocks.anchors.tolist()
    assert len(set(chosen)) == 10 and chosen == sorted(chosen) and set(chosen) <= allowed
    for anchor, row in zip(chosen, blocks.targets.tolist(), strict=True):
        ahead = [*labels[0, anchor + 1 : anchor + 4].tolist(), -100, -100, -100][:3]
        end = ahead.index(-100) if -100 in ahead else 3
        assert row == ahead[:end] + [-100] * (3 - end)
    assert not torch.equal(sample(slice(0, 1), 10, 1).anchors, blocks.anchors)
    other, both = sample(slice(1, 2), 10, 0), sample(slice(0, 2), 10, 0)
    assert torch.equal(both.anchors, torch.cat([blocks.anchors, 40 + other.anchors]))
    assert torch.equal(both.targets, torch.cat([blocks.targets, other.targets]))
    every = sample(slice(0, 1), 99, 0)
    found = (every.targets[:, 0] >= 0).sum()
    assert len(every.anchors) == 40 and set(every.anchors[:found].tolist()) == allowed and found == len(allowed)
    often = torch.bincount(torch.cat([sample(slice(0, 1), 10, seed).anchors for seed in range(700)]))
    assert (often[list(allowed)] / 700 - 10 / len(allowed)).abs().max() < 0.08


@pytest.mark.parametrize("compiled_layout", [False, True], ids=["unpadded", "kept padding"])
@pytest.mark.parametrize("labelled", [False, True], ids=["padding ignored", "padding labelled"])
def test_padding_leaves_the_anchors(compiled_layout: bool, labelled: bool) -> None:
    """On the right and on the left, with the attention mask or, if its labels are -100 and on the right, without."""
    ids = ids_of(30, 1)
    ids[0, [2, 3, 17]] = -100

    def sample(labels: Tensor, packing: Tokens) -> list[int]:
        rows = packing.take(labels, -100)
        following = torch.stack([shift_labels(rows, k, getattr(packing, "cu_seqlens", None)) for k in (1, 2, 3)])
        blocks = sample_blocks(labels, following, packing, 9, 0)
        places = packing.take(torch.arange(labels.numel()).view_as(labels)).flatten()
        return places[blocks.anchors].tolist()

    wanted = sample(ids, Tokens())
    for left, right in ((0, 7), (5, 0), (0, 1)):
        padded = F.pad(ids, (left, right), value=9 if labelled else -100)
        mask = F.pad(torch.ones_like(ids), (left, right))
        found = sample(padded, (KeptPadding if compiled_layout else Unpadding)(mask))
        assert found == [left + anchor for anchor in wanted]
    if not labelled:
        assert sample(F.pad(ids, (0, 7), value=-100), Tokens()) == wanted


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_have_the_anchors_of_the_batch(packed: bool) -> None:
    """With fewer anchors than tokens: a batch is the sum of its sequences, packed or not."""
    model, ids = stirred("vanilla", target(), num_anchors=4), ids_of(20, 3)
    positions = torch.cat([torch.arange(13), torch.arange(7)]).expand(3, -1) if packed else None
    whole = model(ids, labels=ids, position_ids=positions)
    items = model.num_targets(ids, position_ids=positions)
    assert items[0] == 12 and torch.equal(items, whole.counts)
    parts = [
        model(ids[[i]], labels=ids[[i]], position_ids=None if positions is None else positions[[i]],
              num_items_in_batch=items).loss for i in range(3)
    ]  # fmt: skip
    torch.testing.assert_close(sum(parts), whole.loss)


@pytest.mark.parametrize("kind", ["dflash", "vanilla"])
def test_padding_masked_labels_and_normalisers(kind: str) -> None:
    """A padded batch is its rows alone; micro-batches add up; sums are sums; the options of the loss."""
    model = stirred(kind, target())
    short, long = ids_of(7), ids_of(11)
    labels_short, labels_long = short.clone(), long.clone()
    labels_long[:, :4] = -100
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    padded = torch.cat([F.pad(short, (4, 0)), long]), torch.cat([F.pad(labels_short, (4, 0), value=-100), labels_long])
    out = model(padded[0], labels=padded[1], attention_mask=mask)
    alone = [model(short, labels=labels_short, reduction="sum"), model(long, labels=labels_long, reduction="sum")]
    items = model.num_targets(padded[1], attention_mask=mask)
    assert items.tolist() == [6 + 6, 5 + 5, 4 + 4, 3 + 3] == out.counts.tolist()
    torch.testing.assert_close(out.head_losses, (alone[0].head_losses + alone[1].head_losses) / items)
    parts = [model(x, labels=y, num_items_in_batch=items).loss for x, y in ((short, labels_short), (long, labels_long))]
    torch.testing.assert_close(out.loss, sum(parts))
    weights = sum(items * torch.tensor(model.loss_weights()))
    torch.testing.assert_close(out.loss, (alone[0].loss + alone[1].loss) / weights)
    none = model(short, labels=torch.full_like(short, -100))
    assert none.loss == 0 and none.counts.tolist() == [0] * BLOCK
    none.loss.backward()
    torch.testing.assert_close(model(short, labels=short, position_ids=torch.arange(7)[None]).loss,
                               model(short, labels=short).loss)  # fmt: skip
    by_rows = model(torch.cat([short, short]), labels=torch.cat([short, short]))
    torch.testing.assert_close(by_rows.loss, model(short, labels=short).loss)
    embeds = model.base.decoder.embed(short)
    torch.testing.assert_close(model(inputs_embeds=embeds, labels=short).loss, model(short, labels=short).loss)
    with torch.no_grad():
        scored, logits = model(long, labels=labels_long), model(long).logits[:, 0]
        rows = model.num_targets(labels_long)
    assert scored.ranks.shape == (BLOCK, 1, 11) and (scored.ranks >= 0).sum((1, 2)).tolist() == rows.tolist()
    better = (logits[1, 5] > logits[1, 5, long[0, 7]]).sum()
    assert scored.ranks[1, 0, 5] == better and scored.ranks[1, 0, :4].max() == -1  # the first anchor is token 4
    token_weights = torch.rand(1, 11, dtype=torch.float64)
    weighted = model(long, labels=labels_long, token_weights=token_weights)
    assert not torch.equal(weighted.head_losses, scored.head_losses)
    same = model(long, labels=labels_long, token_weights=torch.full_like(token_weights, 3.0))
    torch.testing.assert_close(same.loss, model(long, labels=labels_long).loss)
    holes = long.clone()
    holes[:, 5:8] = -100
    of_holes = [token_weights.masked_fill(holes == -100, value) for value in (1.0, math.nan)]
    one, nan = (model(long, labels=holes, token_weights=each) for each in of_holes)
    assert torch.equal(one.loss, nan.loss) and torch.equal(one.head_losses, nan.head_losses)
    for options, message in (
        ({"reduction": "none"}, "reduction"), ({"label_smoothing": 0.1}, "label_smoothing: is no option"),
        ({"num_items_in_batch": torch.ones(2)}, "must be 1 or 4 numbers"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            model(short, labels=short, **options)


# -- drafting ----------------------------------------------------------------------------------------------------------


KINDS = OF_EACH_KIND[1::2]
"""The others are in `test_eagle3.py`."""


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_are_those_of_plain_decoding(name: str) -> None:
    """For many kinds of layers, batches of unequal prompts; a chain and a tree in turn."""
    base = target(ALL[name], "float32")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 6, 7]]
    options: dict[str, Any] = {"max_new_tokens": 10, "pad_token_id": 0, "repetition_penalty": 1.0}
    plain = base.generate(prompts, do_sample=False, **options)
    ways = (("rnn", None), ("dflash", Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])))
    kind, tree = ways[KINDS.index(name) % 2]
    assert torch.equal(stirred(kind, base).generate(prompts, tree=tree, **options), plain)


@pytest.mark.filterwarnings("ignore:sliding_window_non_causal")
@pytest.mark.parametrize(
    ("kind", "reduced"),
    [*zip(("dflash", "vanilla", "gated", "rnn", "gemma4", "gemma4-values", *SEES), itertools.cycle([False, True]))],
)
def test_drafts_are_those_of_the_formulas(kind: str, reduced: bool, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Every draft, from a cache of the true states before the last verified token."""
    base = target()
    model = stirred(kind, base, vocabulary=DraftVocabulary(EVERY_THIRD, 61) if reduced else None)
    w, drafted = tensors_of(model, tmp_path), []
    drafter_class = type(model.drafter(model.default_tree()))
    draft = drafter_class.draft

    def recorded(self: Any, sequences: Any) -> Tensor:
        found = draft(self, sequences)
        for b, text in enumerate(sequences.text):
            if not sequences.done[b]:
                drafted.append((text[: int(sequences.cache_seqlens[b]) + 1].clone(), found[b, :, 0].clone()))
        return found

    monkeypatch.setattr(drafter_class, "draft", recorded)
    model.generate([[3, 1, 4, 1, 5], [8, 2]], max_new_tokens=9, pad_token_id=0)
    assert len(drafted) > 6
    tokens, first = EVERY_THIRD if reduced else torch.arange(61), int(not model.from_anchor)
    for text, found in drafted:
        states, _ = lm.capture(base, text[None], model.config.boundaries)
        anchor = len(text) - 1
        hidden = reference_hidden(w, states[0], int(text[-1]), anchor, BLOCK + first, 60, kind)[first:]
        wanted = list[int]()
        for slot in range(BLOCK):
            before = [int(text[-1]), *wanted]
            logits, _ = reference({k: x for k, x in w.items() if "confidence" not in k}, hidden[: slot + 1], before)
            wanted.append(int(tokens[logits[slot].argmax()]))
        assert found.tolist() == wanted


@pytest.mark.parametrize("kind, name", [("vanilla", "llama"), ("gated", "qwen3_next")])
def test_drafts_without_confidence_are_not_accepted(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence accepts drafts as far as its products of confidences and the model allow; the same tokens result,
    in passes of the same size."""
    base = target({"llama": TARGET, **ALL}[name], "float32")
    model, prompts = stirred(kind, base), [[3, 1, 4, 1, 5], [8, 2]]
    options: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 0, "return_stats": True}
    plain = base.generate(prompts, max_new_tokens=12, pad_token_id=0, do_sample=False)
    new = [row[5:].tolist() for row in plain]  # of both prompts; the longer has 5 tokens
    drafter_class = type(model.drafter(model.default_tree()))
    compute, steps = drafter_class._confident, list[tuple[Tensor, Tensor, Tensor]]()

    def recorded(self: Any, sequences: Any, hidden: Tensor, found: Tensor) -> Tensor:
        for row, count in enumerate(sequences.count.tolist()):  # as if the head were right in the first three slots
            found[row, :3, 0] = torch.tensor([*new[row][count:], 0, 0, 0][:3])
        before, e = [sequences.root, *found[:, :-1, 0].unbind(1)], model.head.markov.w1
        embeds = torch.stack([e(token) for token in before], dim=1)
        features = torch.cat([hidden, embeds], dim=-1) if kind == "vanilla" else hidden
        products = model.head.confidence.proj(features)[..., 0].sigmoid().cumprod(1)
        steps.append((sequences.count.clone(), found[..., 0], products))
        return compute(self, sequences, hidden, found)

    monkeypatch.setattr(drafter_class, "_confident", recorded)
    checked = list[int]()
    base.register_forward_pre_hook(lambda _, args: checked.append(args[0].shape[1]))
    gained = set[int]()
    for threshold in (1e-9, 0.2, 0.4, 0.7, 1.0):
        model.confidence_threshold = threshold
        checked.clear(), steps.clear()
        out = model.generate(prompts, **options)
        assert torch.equal(out.sequences, plain) and set(checked[1:]) == {1 + BLOCK}
        for (counts, drafts, products), (after, *_) in itertools.pairwise(steps):
            for row, count in enumerate(counts.tolist()):
                right = drafts[row] == torch.tensor([*new[row][count:], *[-1] * BLOCK][:BLOCK])
                accepted = int((right & (products[row] >= threshold)).long().cumprod(0).sum())
                assert min(count + accepted + 1, 12) == after[row]
                gained.add(accepted)
    assert len(gained) > 2
    assert out.tokens_per_step == 1
    bare = stirred("bare", base)
    bare.confidence_threshold = 0.5
    with pytest.raises(InputError, match="has no confidence head"):
        bare.generate(prompts, **options)
    for threshold, expected in ((1.1, "at most 1"), (-0.1, "at least 0"), ("0.4", "a number")):
        model.confidence_threshold = threshold
        with pytest.raises(InputError, match=f"confidence_threshold: must be .*{expected}"):
            model.generate(prompts, **options)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_loss_under_autocast(kind: str) -> None:
    """The codes of a Markov head may then have another dtype than the hidden states."""
    model, ids = stirred(kind, target(dtype="float32")), ids_of(20, 2)
    losses, gradients = [], []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            losses.append(model(ids, labels=ids).loss)
        gradients.append(torch.autograd.grad(losses[-1], [model.head.fc.weight, model.head.markov.w2.weight]))
    torch.testing.assert_close(losses[1], losses[0], rtol=0.03, atol=0)
    for rounded, exact in zip(*gradients, strict=True):
        assert (rounded - exact).norm() < 0.2 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vanilla", "mixed", "gemma4", "gemma4-values"])
def test_kernels_train_as_torch_does(kind: str) -> None:
    """The loss, its numbers and the gradients of a padded batch, and the tokens of a step of decoding."""
    ids, mask = ids_of(14, 2).to(DEVICE), torch.ones(2, 14, dtype=torch.long, device=DEVICE)
    mask[1, 9:] = 0
    labels, found = ids.masked_fill(mask == 0, -100), []
    model = stirred(kind, target(dtype="float32")).to(DEVICE)
    for backend in ("reference", "triton"):
        with ops.set_backend(backend):
            out = model(ids, labels=labels, attention_mask=mask)
            gradients = torch.autograd.grad(out.loss, list(model.head_parameters()), allow_unused=True)
            tokens = model.generate(ids[:, :5], 4, cuda_graph=False)
        numbers = [out.loss.detach(), out.head_losses, out.acceptance, out.agreement, tokens]
        found.append([*numbers, *(x for x in gradients if x is not None)])
    for ours, truth in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-5 * max(1, truth.abs().max().item()))


@pytest.mark.parametrize("kind", ["dflash", "rnn"])
def test_nothing_waits_for_the_device(kind: str) -> None:
    """On the meta device no value can be looked at: a CUDA graph can hold a step of drafting, and the loss."""
    base, (model_class, options) = lm.from_config(TARGET, device="meta").eval(), VARIANTS[kind]
    model = model_class.from_base(base, BLOCK, num_layers=2, **options)
    model.confidence_threshold = 0.5 if kind == "rnn" else 0.0
    step = TreeStep(base, model.drafter(chain(3)), base.new_state(3, 40), chain(3), 9, [2, 5])
    with torch.no_grad():
        rows = step.start(
            torch.zeros(3, 7, dtype=torch.long, device="meta"), torch.ones(3, 7, dtype=torch.bool, device="meta")
        )
        step(rows)
    ids = torch.zeros(2, 20, dtype=torch.long, device="meta")
    model(ids, labels=ids, num_items_in_batch=torch.ones(model.num_heads, device="meta")).loss.backward()


def test_a_trained_head_proposes_more_than_two_tokens_a_step() -> None:
    """On a target that knows a text: a few steps of training, and acceptance in `generate` as in the metrics."""
    torch.manual_seed(0)
    base = lm.from_config({**TARGET, "hidden_size": 48, "head_dim": 12, "num_hidden_layers": 3}, dtype="float32")
    text = torch.randint(0, 60, (1, 48), generator=torch.Generator().manual_seed(3)).repeat(1, 2)[:, :60]
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        base(text, labels=text).loss.backward()
        optimizer.step()
    model = lm.DSparkModel.from_base(base.eval(), BLOCK, num_layers=1)
    optimizer = torch.optim.AdamW(model.head_parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    out = model(text, labels=text)
    decoded = model.generate(text[:, :8], max_new_tokens=40, return_stats=True)
    assert torch.equal(decoded.sequences, base.generate(text[:, :8], max_new_tokens=40, do_sample=False))
    expected = 1 + out.agreement.cumprod(0).sum()
    assert decoded.tokens_per_step > 2 and abs(decoded.tokens_per_step - expected) < 0.15 * expected


# -- files -------------------------------------------------------------------------------------------------------------


def test_config_json_of_all_forms(tmp_path: Path) -> None:
    """The fields that servers read, written out by hand; and the names of the tensors."""
    base = target(dtype="float32")
    dflash = stirred("dflash", base, boundaries=(0, 2, 4), num_layers=1, mask_token_id=9)
    dspark = stirred("gated", base, boundaries=(0, 2, 4), num_layers=1, num_anchors=33)
    for name, model in (("speculators", dflash), ("z-lab", dflash), ("speculators", dspark), ("deepspec", dspark)):
        export_named(model, tmp_path / f"{model.kind}-{name}", name, "some/target")
    stored = {path.name: json.loads((path / "config.json").read_text()) for path in tmp_path.iterdir()}
    tensors = {path.name: load_file(path / "model.safetensors") for path in tmp_path.iterdir()}

    a = stored["DFlash-speculators"]
    assert a["speculators_model_type"] == "dflash" and a["architectures"] == ["DFlashDraftModel"]
    assert a["aux_hidden_state_layer_ids"] == [0, 2, 4] and a["mask_token_id"] == 9 and a["block_size"] == 5
    assert a["sample_from_anchor"] is False and a["draft_vocab_size"] == 61 and a["target_hidden_size"] == 24
    assert a["transformer_layer_config"]["model_type"] == "qwen3" and "markov_rank" not in a
    assert a["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert a["speculators_config"]["algorithm"] == "dflash"
    assert a["speculators_config"]["verifier"] == {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    b = stored["DFlash-z-lab"]
    assert b["architectures"] == ["DFlashDraftModel"] and b["model_type"] == "qwen3" and b["block_size"] == 5
    assert b["dflash_config"] == {"mask_token_id": 9, "target_layer_ids": [-1, 1, 3]} and b["num_target_layers"] == 4
    c = stored["DSpark-speculators"]
    assert c["speculators_model_type"] == "dspark" and c["architectures"] == ["DSparkDraftModel"]
    assert c["sample_from_anchor"] is True and c["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    d = stored["DSpark-deepspec"]
    assert d["architectures"] == ["Qwen3DSparkModel"] and d["target_layer_ids"] == [-1, 1, 3]
    assert d["mask_token_id"] == 60 and d["num_anchors"] == 33 and d["num_target_layers"] == 4 and d["block_size"] == 4
    assert d["layer_types"] == ["full_attention"] and d["tie_word_embeddings"] is False and d["num_hidden_layers"] == 1
    for each in (c, d):
        assert (each["markov_rank"], each["markov_head_type"]) == (5, "gated")
        assert each["enable_confidence_head"] is True and each["confidence_head_with_markov"] is False
    layer = {f"self_attn.{part}_proj" for part in "qkvo"} | {"self_attn.q_norm", "self_attn.k_norm", "input_layernorm"}
    layer |= {"post_attention_layernorm"} | {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    names = {f"{name}.weight" for name in ("fc", "hidden_norm", "norm", *(f"layers.0.{part}" for part in layer))}
    assert tensors["DFlash-z-lab"].keys() == names
    assert tensors["DFlash-speculators"].keys() == names | {"embed_tokens.weight", "lm_head.weight"}
    names |= {"embed_tokens.weight", "lm_head.weight", "confidence_head.proj.weight", "confidence_head.proj.bias"}
    names |= {f"markov_head.{part}" for part in ("markov_w1.weight", "markov_w2.weight", "gate_proj.weight",
                                                 "gate_proj.bias")}  # fmt: skip
    assert tensors["DSpark-speculators"].keys() == tensors["DSpark-deepspec"].keys() == names
    w = tensors["DSpark-deepspec"]
    assert w["markov_head.markov_w1.weight"].shape == (61, 5) == w["markov_head.markov_w2.weight"].shape
    assert w["markov_head.gate_proj.weight"].shape == (5, 29) and w["fc.weight"].shape == (24, 72)
    assert w["confidence_head.proj.weight"].shape == (1, 24) and w["layers.0.self_attn.k_proj.weight"].shape == (12, 24)


PROFILES = [("dflash", "speculators"), ("dflash", "z-lab"), ("windows", "speculators"), ("windows", "z-lab"),
            ("mixed", "z-lab"), ("mixed", "speculators"), ("bidirectional", "speculators"),
            ("bidirectional", "deepspec"), ("causal", "deepspec"), ("causal", "speculators"),
            *itertools.product(["bare", "vanilla", "gated", "rnn", "gemma4", "gemma4-values"],
                               ["speculators", "deepspec"])]  # fmt: skip


@pytest.mark.filterwarnings("ignore:sliding_window_non_causal")
@pytest.mark.parametrize("kind, profile", PROFILES)
def test_a_head_comes_back(kind: str, profile: Any, tmp_path: Path) -> None:
    base = target(SOFTCAPPED, "bfloat16")  # with scaled embeddings
    vocabulary = DraftVocabulary(EVERY_THIRD, 61) if kind == "rnn" and profile == "speculators" else None
    model = stirred(kind, base, vocabulary=vocabulary)
    export_named(model, tmp_path, profile, "x")
    again = type(model).from_pretrained(base, tmp_path, num_anchors=3)
    assert again.config == model.config and again.embed is None and again.lm_head is None
    assert again.training_options.num_anchors == 3 and not any(p.requires_grad for p in base.parameters())
    assert torch.equal(again(ids_of(9)).logits, model(ids_of(9)).logits)
    export_named(again, tmp_path / "again", profile, "x")
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    meta = lm.from_config(SOFTCAPPED, dtype="bfloat16", device="meta")
    assert type(model).from_pretrained(meta, tmp_path).config == model.config


def test_other_forms_of_published_heads(tmp_path: Path) -> None:
    """transformers' names of tensors, a file of torch's, block_size within dflash_config, and tensors of its own."""
    base = target(dtype="float32")
    model = stirred("dflash", base)
    gated = stirred("gated", base)
    forms = tmp_path / "forms"
    gated.export(forms, "deepspec")  # SpecForge has DSpark's fields in dflash_config
    config = json.loads((forms / "config.json").read_text())
    config["dflash_config"] = {name: config.pop(name) for name in [*config] if "markov" in name or "confidence" in name}
    (forms / "config.json").write_text(json.dumps(config))
    assert lm.DSparkModel.from_pretrained(base, forms).config == gated.config

    tmp_path = tmp_path / "z-lab"
    model.export(tmp_path, "z-lab")
    path, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(path)
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    own = {"lm_head.weight": torch.randn(61, 24), "embed_tokens.weight": torch.randn(61, 24)}
    torch.save({f"model.{name}": x for name, x in (tensors | own).items()}, tmp_path / "pytorch_model.bin")
    path.unlink()
    config["dflash_config"]["block_size"] = config.pop("block_size")
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = lm.DFlashModel.from_pretrained(base, tmp_path)
    assert torch.equal(again.lm_head.weight, own["lm_head.weight"]) and not again.lm_head.weight.requires_grad
    assert torch.equal(again.embed.weight, own["embed_tokens.weight"])
    assert {id(p) for p in again.head_parameters()} == {id(p) for p in again.parameters() if p.requires_grad}
    assert not torch.equal(again(ids_of(9)).logits, model(ids_of(9)).logits)
    with pytest.raises(InputError, match="lm_head of the head's own"):
        again.export(tmp_path / "c", "z-lab")
    again.export(tmp_path / "whole", base_model="x")
    assert torch.equal(load_file(tmp_path / "whole" / "model.safetensors")["lm_head.weight"], own["lm_head.weight"])
    again.embed = again.lm_head = None
    torch.testing.assert_close(again(ids_of(9)).logits, model(ids_of(9)).logits)
    torch.save(torch.randn(24), tmp_path / "mask_embedding.pt")
    with pytest.raises(ConfigError, match=r"mask_embedding\.pt: a mask token with an embedding of its own"):
        lm.DFlashModel.from_pretrained(base, tmp_path)


@pytest.mark.parametrize("kind, profile", [("dflash", "z-lab"), ("dflash", "speculators"), ("vanilla", "deepspec")])
def test_a_softcap_and_a_scale_of_the_embeddings_in_files(kind: str, profile: str, tmp_path: Path) -> None:
    """Fields of z-lab's heads for Gemma. The softcap changes the distribution that drafts are sampled from; the scale
    is a factor of the embeddings as they are stored."""
    base, first, again = target(SOFTCAPPED, "float32"), tmp_path / "first", tmp_path / "again"
    model = stirred(kind, base)
    export_named(model, first, profile, "x")
    config = json.loads((first / "config.json").read_text())
    nested = config.get("dflash_config", {})
    assert nested.get("input_embedding_scale") == (base.config.embed_scale if profile == "z-lab" else None)

    def load(changes: dict[str, Any]) -> Any:
        (first / "config.json").write_text(json.dumps({**config, **changes}))
        return type(model).from_pretrained(base, first)

    capped = load({"dflash_config": {**nested, "final_logit_softcapping": 2.0}})
    hidden = torch.randn(3, 24)
    for project in (capped.projection.logits, capped.project_with(torch.float32)):
        torch.testing.assert_close(project(hidden), 2 * (model.projection.logits(hidden) / 2).tanh())
    plain = model.project_with(torch.bfloat16)
    large = hidden.bfloat16() * (9 / plain(hidden.bfloat16()).max())  # capped in bfloat16, several would be equal to 2
    assert torch.equal(capped.project_with(torch.bfloat16)(large).argmax(-1), plain(large).argmax(-1))
    export_named(capped, again, profile, "x")
    assert type(model).from_pretrained(base, again).config == capped.config != model.config
    assert verify_heads(again, SOFTCAPPED).passed
    assert load({"final_logit_softcapping": 2.0}).config == capped.config
    assert load({"final_logit_softcapping": 0, "output_multiplier": 1.0}).config == model.config
    for changes, message in (
        ({"output_multiplier": 2.0}, "output_multiplier: 2.0 is not implemented"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping: must be a number above 0"),
        ({"dflash_config": {**nested, "input_embedding_scale": 1.0}}, "scale: 1.0 .* with embeddings times 4.8"),
        ({"dflash_config": {**nested, "input_embedding_scale": "4"}}, "input_embedding_scale: '4' is not implemented"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(changes)


@pytest.mark.parametrize("profile", ["speculators", "deepspec"])
def test_a_softcap_of_a_head_precedes_the_one_of_its_layers(profile: str, tmp_path: Path) -> None:
    base, first, again = target(dtype="float32"), tmp_path / "first", tmp_path / "again"
    model = stirred("gemma4", base)
    export_named(model, first, profile, "x")
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps({**config, "dflash_config": {"final_logit_softcapping": 0.5}}))
    capped = lm.DSparkModel.from_pretrained(base, first)
    assert (model.config.decoder.head.softcap, capped.config.decoder.head.softcap) == (1.5, 0.5)
    export_named(capped, again, profile, "x")
    assert lm.DSparkModel.from_pretrained(base, again).config.decoder == capped.config.decoder
    assert verify_heads(first, TARGET).passed


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    base = target(dtype="float32")
    stirred("vanilla", base).export(tmp_path / "speculators", base_model="x")
    stirred("dflash", base).export(tmp_path / "z-lab", "z-lab")
    files = {}
    for form in ("speculators", "z-lab"):
        folder = tmp_path / form
        config = json.loads((folder / "config.json").read_text())
        files[form] = config, load_file(folder / "model.safetensors")

    def load(form: str, changes: dict[str, Any] | None = None, **replaced: Any) -> Any:
        config, tensors = files[form]
        changed = {name: value for name, value in (config | (changes or {})).items() if value is not ...}
        (tmp_path / form / "config.json").write_text(json.dumps(changed))
        kept = {name: x for name, x in (tensors | replaced).items() if x is not None}
        save_file(kept, tmp_path / form / "model.safetensors")
        model_class = lm.DSparkModel if form == "speculators" else lm.DFlashModel
        return model_class.from_pretrained(base, tmp_path / form)

    layers, nested = files["speculators"][0]["transformer_layer_config"], files["z-lab"][0]["dflash_config"]
    sliding = {**layers, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    for error, form, changes, message in (
        (ConfigError, "speculators", {"speculators_model_type": "eagle3"}, "holds an EAGLE-3 head, not a DSpark head"),
        (
            ConfigError,
            "speculators",
            {"transformer_layer_config": {**layers, "model_type": "gemma"}},
            "be one of qwen3, gem",
        ),
        (ConfigError, "speculators", {"mask_token_id": ...}, "mask_token_id: config.json of the head does not"),
        (ConfigError, "speculators", {"aux_hidden_state_layer_ids": ...}, "aux_hidden_state_layer_ids"),
        (ConfigError, "speculators", {"aux_hidden_state_layer_ids": [3, 1]}, "ascending"),
        (ConfigError, "speculators", {"aux_hidden_state_layer_ids": "2"}, "list of whole numbers"),
        (ConfigError, "speculators", {"sample_from_anchor": False}, "sample_from_anchor: False is not implemented"),
        (ConfigError, "speculators", {"markov_head_type": "lstm"}, "markov_head_type"),
        (CheckpointError, "speculators", {"aux_hidden_state_layer_ids": [1, 9]}, "the model has 4 layers"),
        (CheckpointError, "speculators", {"target_hidden_size": 32}, "target_hidden_size: of the head is 32"),
        (CheckpointError, "speculators", {"markov_head_type": "rnn"}, "joint_proj"),
        (ConfigError, "z-lab", {"dflash_config": nested | {"use_swa": True}}, "sliding_window is missing"),
        (ConfigError, "z-lab", {"architectures": ["DFlash2DraftModel"]}, "architectures: .* not implemented.*DFlash2"),
        (
            ConfigError,
            "z-lab",
            {"dflash_config": nested | {"use_aux_hidden_state": False}},
            "use_aux_hidden_state: Fal",
        ),
        (ConfigError, "z-lab", {"dflash_config": nested | {"selector_rank": 256}}, "selector_rank: 256 is not impl"),
        (ConfigError, "z-lab", {"conv_kernel_size": 2}, "conv_kernel_size: 2 is not implemented, a layer of DFlash2"),
        (ConfigError, "z-lab", {"architectures": ["Gemma4DSparkModel"]}, "holds a DSpark head, not a DFlash head"),
        (ConfigError, "z-lab", {"projector_type": "domino"}, "projector_type: 'domino'"),
        (ConfigError, "z-lab", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
    ):
        with pytest.raises(error, match=message):
            load(form, changes)
    windows, types = {"sliding_window": 4}, ["sliding_attention", "full_attention"]
    for changes, sees in (  # as vLLM reads them: of each layer, whether it is causal, and its window
        ({"dflash_config": nested | {"causal": True, "use_aux_hidden_state": True}}, [(True, None)] * 2),
        ({"is_causal": True, "dflash_config": nested | {"causal": False}}, [(True, None)] * 2),
        ({"dflash_config": nested | {"use_swa": True}, **windows}, [(False, 4)] * 2),
        ({"dflash_config": nested | {"use_swa": True, "swa_window_size": 6}, **windows}, [(False, 6)] * 2),
        ({"layer_types": types, **windows}, [(True, 4), (False, None)]),
        ({"layer_types": types, **windows, "dflash_config": nested | {"causal": False}}, [(False, 4), (False, None)]),
        ({"layer_types": types, **windows, "dflash_config": nested | {"swa_window_size": 2}},
         [(True, 2), (False, None)]),
    ):  # fmt: skip
        config = load("z-lab", changes).config
        assert [tuple(config.sees(layer)[name] for name in ("causal", "window")) for layer in range(2)] == sees
    layers = load("speculators").config.layers
    for kinds, value, sees in (
        (["sliding_attention"] * 2, False, [(True, 4)] * 2), (types, False, [(True, 4), (False, None)]),
        (types, True, [(False, 4), (False, None)]), (types, ..., [(False, 4), (False, None)]),
        (None, ..., [(False, None), (False, 4)]),
    ):  # fmt: skip
        changed = {**layers, "layer_types": kinds, "sliding_window": 4}
        changed = sliding if kinds is None else changed
        given = {"transformer_layer_config": changed, "sliding_window_non_causal": value}
        with pytest.warns(ConfigWarning, match="sliding_window_non_causal") if value is ... else nullcontext():
            config = load("speculators", given).config
        assert [tuple(config.sees(layer)[name] for name in ("causal", "window")) for layer in range(2)] == sees
    with pytest.warns(ConfigWarning, match=r"vLLM 0.32 then takes the other.*profile='z-lab'"):
        stirred("mixed", base).export(tmp_path / "mixed", base_model="x")

    for replaced, message in (
        ({"norm.weight": None}, "norm.weight"),
        ({"fc.weight": torch.zeros(24, 24)}, "fc.weight"),
        ({"markov_head.markov_w1.weight": None}, "markov_w1"),
        ({"confidence_head.proj.weight": None}, "confidence_head"),
        ({"attention_conv.weight": torch.zeros(2)}, "attention_conv"),
        ({"embed_tokens.weight": torch.zeros(60, 24)}, "embed_tokens.weight has the shape"),
        ({"lm_head.weight": torch.zeros(60, 24)}, "lm_head.weight"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load("speculators", **replaced)
    gemma4 = {**GEMMA4, "tie_word_embeddings": False, "num_hidden_layers": 2}
    for changed in (
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
        {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 61}, {"num_kv_shared_layers": 1},
        {"layer_types": ["sliding_attention", "full_attention"]},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{next(iter(changed))}: .* is not implemented in the layers of a head"):
            BlockDraftConfig({**gemma4, **changed}, (1,), 24, 61, 4, 60, True)
    with pytest.raises(ConfigError, match="speculators_model_type: 'peagle' heads are not implemented"):
        (tmp_path / "p").mkdir(), (tmp_path / "p" / "config.json").write_text('{"speculators_model_type": "peagle"}')
        load_multi_head(base, tmp_path / "p")
    with pytest.raises(ConfigError, match="speculators_model_type: 'peagle' heads are not implemented"):
        verify_heads(tmp_path / "p", TARGET)
    with pytest.warns(ConfigWarning, match="sample_from_anchor is missing"):
        load("speculators", {"sample_from_anchor": ...})
    different = r"different layers, as boundaries: dflash_config.target_layer_ids \[0, 3\], target_layer_ids \[0, 2\]"
    with pytest.warns(ConfigWarning, match=different):
        assert load("z-lab", {"target_layer_ids": [-1, 1]}).config.boundaries == (0, 3)

    for options, message in (
        ({"block_size": 1}, "block_size"), ({"boundaries": [3, 9]}, "at most 4"), ({"mask_token_id": 61}, "mask_token"),
        ({"vocabulary": DraftVocabulary.whole(60)}, "vocab_size"), ({"gamma": 0}, "gamma"),
        ({"divergence": "js"}, "divergence"), ({"dpace_alpha": 2.0}, "dpace_alpha"), ({"num_anchors": 0}, "num_anchor"),
        ({"dpace_alpha": 0.5, "divergence_weight": 1.0}, "D-PACE weighs the cross entropy"),
        ({"ce_weight": 0}, "^ce_weight, divergence_weight: both are 0"), ({"num_layers": 0}, "^num_layers: must be"),
        *(({"layers": wrong}, "^layers: must be a Hugging Face config") for wrong in ("llama", 5, {"model_type": "x"})),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            lm.DFlashModel.from_base(base, **options)
    for layer in ("gpt2", 5, {}):
        with pytest.raises(InputError, match=r"^layer: must be a Hugging Face config.*llama or qwen3; got"):
            lm.Eagle3Model.from_base(base, layer=layer)  # type: ignore[arg-type]
    lm.DSparkModel.from_base(base, 4, num_layers=1, ce_weight=0, divergence_weight=0)  # trains its confidence head
    for other in (lm.DFlashModel.from_base(base, 4, num_layers=1), lm.Eagle3Model.from_base(base)):
        with pytest.raises(InputError, match=r"^z_loss: .*takes token_weights, reduction, memory_budget"):
            other(torch.ones(1, 9).long(), labels=torch.ones(1, 9).long(), z_loss=1.0)
    model = stirred("vanilla", base, vocabulary=DraftVocabulary(EVERY_THIRD, 61))
    for profile, message in (("deepspec", "no reduced draft vocabulary"), ("z-lab", "one of speculators, deepspec")):
        with pytest.raises(InputError, match=message):
            model.export(tmp_path / "c", profile)
    with pytest.raises(InputError, match="give its folder or hub id"):
        model.export(tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with pytest.raises(InputError, match="is 5 tokens deep, but a block proposes 4"):
        model.generate([[1, 2]], tree=Tree.from_paths([(0,) * depth for depth in range(1, 6)]))


@pytest.mark.parametrize("layers, target_layers, ids", [
    (5, 36, (1, 9, 17, 25, 33)), (5, 28, (1, 7, 13, 19, 25)), (1, 36, (18,)), (2, 4, (1,)), (5, 2, (0, 1)),
])  # fmt: skip
def test_default_layer_ids(layers: int, target_layers: int, ids: tuple[int, ...]) -> None:
    """Those of published heads: 36 layers of Qwen3-8B, 28 of Qwen3-1.7B; and models that are too small."""
    assert default_layer_ids(layers, target_layers) == ids
