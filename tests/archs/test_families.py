"""Every family against transformers: modules, logits, loss, every gradient, tokens, packing, states, heads, exported
bytes."""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import by_turns
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from zoo import (
    BASE,
    CONFIGS,
    EACH_FAMILY,
    MIXTURES,
    NEWER_MIXTURES,
    OF_EACH_KIND,
    gradients_of,
    make_checkpoint,
    plain,
    relative_error,
    stored_as,
)

import ligermodels as lm
from ligermodels.archs import family_of
from ligermodels.cli.describe import checkpoint_facts
from ligermodels.generation.step import rope_thresholds
from ligermodels.verify import verify

TOLERANCE = 2e-5  # float32 GEMMs add up in orders of the CPU's own
Pair = tuple[Path, PreTrainedModel, lm.CausalLM]
of_each_family = pytest.mark.parametrize("pair", sorted({*EACH_FAMILY, *OF_EACH_KIND}), indirect=True)
of_each_kind = pytest.mark.parametrize("pair", OF_EACH_KIND, indirect=True)
ROUTED = {
    name
    for name, config in CONFIGS.items()
    if any(getattr(block.mlp, "router", None) for block in family_of(config).decoder_config(config).blocks)
}


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    """By name, for tests of all configs and tests of some."""
    return {}


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if request.param not in pairs:
        folder = tmp_path_factory.mktemp("model")
        oracle = make_checkpoint(folder, CONFIGS[request.param])
        pairs[request.param] = folder, oracle, lm.from_pretrained(folder)
    return pairs[request.param]


def tokens(batch: int = 3, length: int = 41) -> torch.Tensor:
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


@of_each_kind
def test_every_module(pair: Pair) -> None:
    report = verify(pair[0], tokens=41, tolerance=TOLERANCE)
    assert len(report.places) >= 4 * len(pair[2].decoder.blocks)
    assert report.passed, report.first_mismatch


@of_each_kind
def test_info_of_the_checkpoint(pair: Pair) -> None:
    folder, oracle, model = pair
    found = checkpoint_facts(folder)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    if not any(block.ropes for block in model.config.blocks):
        assert "rope_type" not in found and "rope_theta" not in found
        return
    rope = oracle.config.rope_parameters
    rope = rope.get("full_attention", rope)
    assert (found["rope_type"], found["rope_theta"]) == (rope["rope_type"], rope["rope_theta"])


def test_logits_loss_and_every_gradient(pair: Pair) -> None:
    _, oracle, model = pair
    ids, labels = tokens(), tokens()
    labels[0, :7] = labels[1, 20:30] = -100
    for module in (oracle, model):
        module.zero_grad()
    wanted = oracle(ids, labels=labels)
    wanted.loss.backward()
    output = model(ids, labels=labels, return_logits=True)
    output.loss.backward()
    assert relative_error(output.logits, wanted.logits) < TOLERANCE
    assert relative_error(output.loss, wanted.loss) < TOLERANCE
    theirs = {name: parameter.grad for name, parameter in oracle.named_parameters() if parameter.requires_grad}
    ours = stored_as(oracle, gradients_of(model))
    assert set(ours) == set(theirs)
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    assert max(errors.values()) < 3 * TOLERANCE, errors


@of_each_family
def test_greedy_tokens_of_a_padded_batch(pair: Pair, request: pytest.FixtureRequest) -> None:
    _, oracle, model = pair
    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :8] = 0
    ids[mask == 0] = 0
    eos = oracle.config.eos_token_id
    wanted = oracle.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=eos, pad_token_id=0
    )  # the prompt of 5 tokens outgrows a window of 9, that of 9 also one of 11
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=6), wanted)
    if request.node.callspec.params["pair"] in OF_EACH_KIND:
        alone = model.generate([ids[1, 4:].tolist()], max_new_tokens=6)[0, 5:]
        assert torch.equal(alone, wanted[1, 9 : 9 + len(alone)])


@of_each_family
def test_packed_documents_equal_separate_ones(pair: Pair) -> None:
    model = pair[2]
    lengths = [13, 1, 27]
    ids = tokens(1, sum(lengths))
    bounds = torch.tensor([0, 13, 14, 41], dtype=torch.int32)
    together = model(ids, cu_seqlens=bounds).logits
    apart = [model(part).logits for part in ids.split(lengths, dim=1)]
    assert relative_error(together, torch.cat(apart, dim=1)) < TOLERANCE


@of_each_kind
@torch.no_grad()
def test_states_at_every_boundary(pair: Pair) -> None:
    """Of a batch, a padded batch and packed documents; transformers' last entry is after the final norm."""
    _, oracle, model = pair
    ids, every = tokens(2), range(len(model.decoder.blocks) + 1)

    def theirs(part: torch.Tensor) -> list[torch.Tensor]:
        return oracle(part, output_hidden_states=True).hidden_states

    def check(found: lm.Captured, wanted: list[torch.Tensor], row: int, places: slice) -> None:
        *states, before_norm = found.states[row : row + 1, places].chunk(len(every), dim=-1)
        last = found.last[row : row + 1, places]
        assert len(wanted) == len(every)
        for boundary, (state, others) in enumerate(zip([*states, last], wanted, strict=True)):
            assert relative_error(state, others) < TOLERANCE, boundary
        assert relative_error(model.decoder.norm(before_norm), wanted[-1]) < TOLERANCE
        assert all(
            relative_error(a, b) > 1e-3 for a, b in pairwise([*states, before_norm])
        )  # no neighbour in its place

    whole = theirs(ids)
    for row in range(2):
        check(lm.capture(model, ids, every), [state[row : row + 1] for state in whole], row, slice(None))
    bounds = torch.tensor([0, 13, 14, 41], dtype=torch.int32)
    packed = lm.capture(model, ids[:1], every, cu_seqlens=bounds)
    for start, end in pairwise(bounds.tolist()):
        check(packed, theirs(ids[:1, start:end]), 0, slice(start, end))
    if not rope_thresholds(model):
        mask = torch.ones_like(ids)
        mask[0, :4] = mask[1, 30:] = 0
        padded = lm.capture(model, ids, every, attention_mask=mask)
        check(padded, theirs(ids[:1, 4:]), 0, slice(4, None))
        check(padded, theirs(ids[1:, :30]), 1, slice(30))
        assert not padded.states[mask == 0].any() and not padded.last[mask == 0].any()


@of_each_family
def test_medusa_heads_train_and_decode(pair: Pair) -> None:
    model = pair[2]
    medusa = lm.MedusaModel.from_base(model, num_heads=2)
    ids = tokens()
    optimizer = torch.optim.SGD(medusa.head_parameters(), lr=0.05)
    losses = []
    for _ in range(2):
        losses.append(medusa(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[1] < losses[0]
    prompts = [ids[0, :5].tolist(), ids[1, :23].tolist()]
    plain = model.generate(prompts, max_new_tokens=7, eos_token_id=None, pad_token_id=0)
    assert torch.equal(medusa.generate(prompts, max_new_tokens=7, eos_token_id=None, pad_token_id=0), plain)
    model.requires_grad_(True)


def test_export_is_byte_equal_and_opens_in_transformers(
    pair: Pair, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Opened is what may read as another config, and a config of each kind: equal tensors and an equal config are one
    model."""
    folder, oracle, model = pair
    out = tmp_path / "out"
    model.save_pretrained(out, max_shard_size="50KB")
    ours = {name: t for shard in out.glob("*.safetensors") for name, t in load_file(shard).items()}
    theirs = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == t.dtype and torch.equal(ours[name], t) for name, t in theirs.items())
    config, before = (json.loads((at / "config.json").read_text()) for at in (out, folder))
    heads = {"mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"}
    own, read = ({k: v for k, v in found.items() if k not in heads} for found in (config, before))
    assert family_of(own).decoder_config(own) == family_of(read).decoder_config(read)
    is_of_kind = request.node.callspec.params["pair"] in OF_EACH_KIND
    with torch.no_grad():
        if is_of_kind or theirs_of(out) != theirs_of(folder):
            reopened = plain(AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager"))
            assert relative_error(reopened(tokens()).logits, oracle(tokens()).logits) < TOLERANCE
        if is_of_kind:
            again = lm.from_pretrained(out).state_dict()
            assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    rewritten = {"rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "rope_local_base_freq"}
    assert not any(config.get(name) for name in heads)  # there are no tensors of a head
    assert config["architectures"] == [type(oracle).__name__]
    rewritten |= {"partial_rotary_factor", "architectures", *heads}
    kept = [{k: v for k, v in found.items() if k not in rewritten} for found in (config, before)]
    added = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"} if config["model_type"] == "deepseek_v3" else {}
    assert kept[0] == {**added, **kept[1]}  # vLLM needs them: without them its router has no bias, and is a softmax


def theirs_of(folder: Path) -> dict[str, Any]:
    """The config of transformers, all fields that it computes with."""
    other = {"_name_or_path", "architectures", "dtype", "transformers_version"}
    return {k: v for k, v in AutoConfig.from_pretrained(folder).to_dict().items() if k not in other}


@pytest.mark.parametrize("pair", [name for name in OF_EACH_KIND if name in ROUTED], indirect=True)
def test_bf16_is_no_worse_than_transformers(pair: Pair) -> None:
    folder, oracle, _ = pair
    with torch.no_grad():
        ids = tokens(8)
        exact = copy.deepcopy(oracle).double()(ids).logits
        ours = lm.from_pretrained(folder, dtype=torch.bfloat16)(ids).logits
        theirs = plain(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))(ids).logits
    # Of most tokens: where rounding sends one to another expert, its error is as large as it gets, on either side.
    errors = [(logits - exact).norm(dim=-1).median() for logits in (ours, theirs)]
    assert errors[0] <= 1.1 * errors[1]


@pytest.mark.parametrize(
    ("pair", "mixed"),
    by_turns([name for name in OF_EACH_KIND if name not in ROUTED], [False, True]),
    indirect=["pair"],
    ids=lambda value: {False: "bf16", True: "autocast"}.get(value, value),
)
def test_bf16_loss_and_gradients_are_no_worse_than_transformers(pair: Pair, mixed: bool) -> None:
    """Against fp64: the loss, each gradient and all together; of parameters in bf16, or in fp32 under autocast.

    Without routers: rounding sends a token to another expert on either side; test_moe.py compares the layer.
    """
    folder, oracle, _ = pair
    ids = tokens(8)
    found = []
    dtype = torch.float32 if mixed else torch.bfloat16
    theirs = plain(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    for side in (copy.deepcopy(oracle).double(), theirs, lm.from_pretrained(folder, dtype=dtype)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed and bool(found)):
            loss = side(ids, labels=ids).loss
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in side.named_parameters()}
        if isinstance(side, lm.CausalLM):
            gradients = stored_as(oracle, gradients_of(side))
        found.append({"loss": loss.detach()} | gradients)
    exact, theirs, ours = (with_numbers_together(gradients) for gradients in found)
    errors = {
        name: [float((side[name].double() - truth).norm()) for side in (ours, theirs)] for name, truth in exact.items()
    }
    for name, (our_error, their_error) in errors.items():
        most = 2 if exact[name].numel() > 8 else 3  # the error of a few elements is a sample of chance
        assert our_error <= most * their_error + 4e-3 * float(exact[name].norm()), name
    del errors["loss"]
    together = [sum(error[side] ** 2 for error in errors.values()) ** 0.5 for side in (0, 1)]
    assert together[0] <= 1.1 * together[1], together


def with_numbers_together(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of single numbers of all layers as one tensor: the error of each is a sample of chance."""
    joined: dict[str, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        joined.setdefault(name if gradient.numel() > 1 else name.rpartition(".")[2], []).append(gradient.flatten())
    return {name: torch.cat(parts) for name, parts in joined.items()}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "as it is") for name in ("qwen3_moe", *MIXTURES, "deepseek_v3", "mistral4", *NEWER_MIXTURES)),
        *(("mixtral", how) for how in ("transposed", "transposed, H = 2 I", "transposed, H = I")),
        ("glm4_moe_lite", "transposed"),
    ],
)
def test_experts_in_one_tensor(name: str, how: str, tmp_path: Path) -> None:
    """The layout that transformers 5 may save, and that of some hubs: loaded, and written back as it came."""
    size = "moe_intermediate_size" if "moe_intermediate_size" in CONFIGS[name] else "intermediate_size"
    sizes = {"transposed, H = 2 I": {size: 30}, "transposed, H = I": {size: 60}}.get(how, {})
    oracle = make_checkpoint(tmp_path / "model", {**CONFIGS[name], **sizes})
    file = tmp_path / "model" / "model.safetensors"
    tensors = stored_as(oracle, load_file(file))
    if "transposed" in how:
        tensors = {name: t.transpose(1, 2) if t.ndim == 3 and ".experts." in name else t for name, t in tensors.items()}
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    save_file(tensors, file)
    model = lm.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert relative_error(model(tokens()).logits, oracle(tokens()).logits) < TOLERANCE
    model.save_pretrained(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "minimax_m2", "ernie4_5_moe"])
def test_load_balancing_loss_counts_where_the_config_says_so(name: str, tmp_path: Path) -> None:
    config = {**CONFIGS[name], "output_router_logits": True, "router_aux_loss_coef": 0.3}
    oracle = make_checkpoint(tmp_path / "model", config)
    model = lm.from_pretrained(tmp_path / "model")
    wanted, output = oracle(tokens(), labels=tokens()), model(tokens(), labels=tokens())
    assert relative_error(output.aux_loss, wanted.aux_loss) < TOLERANCE
    assert relative_error(output.loss, wanted.loss) < TOLERANCE

    # In micro-batches each counts by its share of the targets.
    labels = tokens().masked_fill(torch.arange(tokens().shape[1]) % 3 == 0, -100)
    labels[1:] = labels[1:].masked_fill(torch.arange(tokens().shape[1]) % 2 == 0, -100)
    parts = [(tokens()[rows], labels[rows]) for rows in (slice(0, 1), slice(1, None))]
    counts = [int((each[:, 1:] != -100).sum()) for _, each in parts]
    found = sum(model(ids, labels=each, num_items_in_batch=sum(counts)).loss for ids, each in parts)
    outputs = [model(ids, labels=each) for ids, each in parts]
    shares = [count / sum(counts) for count in counts]
    assert relative_error(found, sum(s * each.loss for s, each in zip(shares, outputs, strict=True))) < TOLERANCE


def test_the_rope_of_a_ministral3_that_names_none_goes_out_with_it(tmp_path: Path) -> None:
    """YaRN with queries that grow: readers must not take the absence of settings for the plain rope."""
    config = {name: value for name, value in CONFIGS["ministral3"].items() if name != "rope_parameters"}
    oracle = make_checkpoint(tmp_path / "model", config)
    model = lm.from_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in ("rope_parameters", "rope_scaling"):
        assert written[name]["llama_4_scaling_beta"] == 0.1 and written[name]["factor"] == 16.0
    assert lm.from_pretrained(tmp_path / "out").config == model.config
    positions = torch.arange(41)[None] + 16384 * 3  # beyond the original context of the default
    with torch.no_grad():
        wanted = oracle(tokens(1), position_ids=positions).logits
        assert relative_error(model(tokens(1), position_ids=positions).logits, wanted) < 1e-4


def test_gemma_says_gelu_and_means_the_tanh_form() -> None:
    """As all loaders but a few versions of transformers read it."""
    said, meant = (lm.from_config({**CONFIGS["gemma"], "hidden_act": act}) for act in ("gelu", "gelu_pytorch_tanh"))
    assert said.config == meant.config


@of_each_kind
def test_every_module_is_called_by_its_forward(pair: Pair) -> None:
    """In training and in decoding: else hooks, gathers of shards and adapters in its place would be skipped."""
    model, called = pair[2], set[str]()
    owners = {name: m for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
    hooks = [
        module.register_forward_hook(lambda *_, name=name, **__: called.add(name), with_kwargs=True)
        for name, module in owners.items()
    ]
    ids = tokens(1, 9)
    for run in (lambda: model(ids, labels=ids), lambda: model.generate(ids, max_new_tokens=2, eos_token_id=None)):
        called.clear()
        run()
        assert called == owners.keys()
    for hook in hooks:
        hook.remove()
