"""Tensor parallelism against one process: losses, every gradient, generation and export, by gloo on the CPU."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from two_ranks import by_first_rank, in_ranks, in_two_ranks, own_parts, tokens_of_first_rank
from zoo import BASE, GEMMA4, GPT_OSS, MIXTURES, SANDWICH

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError
from ligermodels.parallel.tensor import check_tensor_parallel, tensor_parallel, tensor_part, tensor_placements
from ligermodels.parallel.trace import FirstRank
from ligermodels.speculative.joint import JointMedusa
from ligermodels.training.fused_adamw import FusedAdamW


def even(config: dict[str, Any]) -> dict[str, Any]:
    """With sizes that two ranks divide."""
    return {key: size + size % 2 if key.endswith("intermediate_size") else size for key, size in config.items()}


EVEN = {**BASE, "intermediate_size": 96, "num_hidden_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**EVEN, "model_type": "llama"},
    "llama-tied": EVEN | {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "gemma2": SANDWICH
    | {"model_type": "gemma2", "intermediate_size": 96, "head_dim": 14, "num_key_value_heads": 2}
    | {"final_logit_softcapping": 3.0},
    "qwen3": {**EVEN, "model_type": "qwen3"},
    "olmo2": {**EVEN, "model_type": "olmo2"},
    "qwen3_moe": {
        **EVEN,
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 30,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
    "qwen2_moe": {**MIXTURES["qwen2_moe"], "moe_intermediate_size": 30, "shared_expert_intermediate_size": 44},
    "gpt_oss": GPT_OSS | {"intermediate_size": 96},
    "deepseek_v3": even(zoo.CONFIGS["deepseek_v3"]),
    "gemma4": even(GEMMA4["gemma4_text-per-layer-inputs"]) | {"num_key_value_heads": 2},
    "qwen3_5": even(zoo.CONFIGS["qwen3_5_text"]) | {"num_hidden_layers": 2, "full_attention_interval": 2},
    "muse_glimmer": even(zoo.CONFIGS["muse_glimmer_text"]),
    "lfm2": even(zoo.CONFIGS["lfm2-biases"]),
    "kimi_linear": even(zoo.CONFIGS["kimi_linear"]),
    "bailing_hybrid": even(zoo.CONFIGS["bailing_hybrid"]),
    "bamba": even(zoo.CONFIGS["bamba"]) | {"mamba_n_groups": 2},
    "falcon_h1": even(zoo.CONFIGS["falcon_h1"]) | {"mamba_n_groups": 2},
    "nemotron_h": even(zoo.CONFIGS["nemotron_h-latent-experts-and-biases"])
    | {"n_groups": 2, "moe_intermediate_size": 30, "moe_shared_expert_intermediate_size": 44},
}
"""A vocabulary, 131, that ranks do not divide; tied, with biases; softcaps and post-norms; norms of heads, and of all
heads together; experts, with a shared one and its gate, with biases and sinks; latent attention; shared keys and
values, and inputs of each layer; recurrent mixers, one with key heads of which each has three value heads; norms
without weights; short convolutions; blocks of one layer, and latent experts without a gate; attention beside Mamba2."""


def build(name: str) -> lm.CausalLM:
    torch.manual_seed(0)
    # Norms of small latents would magnify the rounding of float32, so that a true difference could hide in it.
    model = lm.from_config(CONFIGS[name], dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:  # norms, biases and sinks
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def draw(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 131, (2, 13), generator=generator)
    return ids, ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.5, -100)


def of_labels(model: nn.Module, seed: int, **options: Any) -> Tensor:
    ids, labels = draw(seed)
    return model(ids, labels=labels, **options).loss


def of_log_probs(model: nn.Module, seed: int) -> Tensor:
    ids, labels = draw(seed)
    out = model.log_probs(ids, labels, return_entropy=True)
    return (out.log_probs.sin() + 0.1 * out.entropy).sum() / labels.numel()


def of_logits(model: nn.Module, seed: int) -> Tensor:
    return model(draw(seed)[0]).logits.sin().sum() / 100


def check_gradients(
    sharded: nn.Module, plain: nn.Module, loss: Callable[[nn.Module, int], Tensor], seed: int = 0, replicas: int = 1
) -> None:
    """Of several replicas, FSDP2 averages the gradients."""
    sharded.zero_grad(), plain.zero_grad()
    found = loss(sharded, seed)
    found.backward()
    wanted = by_first_rank(plain, lambda plain: torch.stack([loss(plain, each) for each in range(replicas)]))
    torch.testing.assert_close(found.detach(), wanted[seed])
    pairs = dict(plain.named_parameters())
    assert len(pairs) == len(list(sharded.parameters()))
    for name, parameter in sharded.named_parameters():
        gradient, other = parameter.grad, pairs[name].grad
        assert isinstance(parameter, DTensor) and (gradient is None) == (other is None), name
        if gradient is not None:
            assert gradient.placements == parameter.placements, (name, gradient.placements, parameter.placements)
            own = own_parts(gradient, other)
            torch.testing.assert_close(*own, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def check_generation(model: Any, plain: Any, seed: int | None = None) -> None:
    """seed: of this rank's own prompts; else all ranks have the same."""
    options = {"max_new_tokens": 4, "eos_token_id": [], "pad_token_id": 0}
    ids = draw(seed or 0)[0]
    found = model.generate(ids, **options)
    if seed is None:
        wanted = tokens_of_first_rank(lambda: plain.generate(ids, **options))
    else:
        wanted = plain.generate(ids, **options)
    assert torch.equal(found, wanted)


def check_export(model: lm.CausalLM, plain: lm.CausalLM, folder: Path) -> None:
    model.save_pretrained(folder / "sharded", max_shard_size=20_000)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "plain", max_shard_size=20_000)
        for file in (folder / "plain").iterdir():
            assert file.read_bytes() == (folder / "sharded" / file.name).read_bytes(), file.name
    dist.barrier()


def train_generate_save(rank: int, folder: Path, mesh: DeviceMesh, *names: str) -> None:
    for name in names:
        check_model(rank, folder / name, mesh, name)
    if "llama" in names:
        for name in EXPORTED:
            plain, model = build(name), build(name)
            tensor_parallel(model, mesh)
            check_export(model, plain, folder / name)
    for name, mode in (("qwen3_5", "selective"), ("qwen3_moe", "full")):
        if name in names:
            check_lora_with_checkpointing(mesh, name, mode)
    if "llama" in names:
        check_refusals(mesh)
        check_lora(mesh, folder)
        check_medusa(mesh)


def check_model(rank: int, folder: Path, mesh: DeviceMesh, name: str) -> None:
    plain, model = build(name), build(name)
    if rank:  # the first rank's weights count
        with torch.no_grad():
            model.decoder.norm.weight.zero_()
    tensor_parallel(model, mesh)
    check_export(model, plain, folder)
    check_generation(model, plain)
    if name in OF_THE_HEAD:
        check_head(rank, model, plain)
    modes = ("selective", "full", "none")
    for mode in modes if name == "llama" else modes[list(CONFIGS).index(name) % 3 :][:1]:
        model.activation_checkpointing = plain.activation_checkpointing = mode
        check_gradients(model, plain, of_labels)
    if name != "llama":
        return
    check_gradients(copy.deepcopy(model), plain, of_labels)
    packed = {"cu_seqlens": torch.tensor([0, 5, 13, 20, 26], dtype=torch.int32)}
    ids, labels = (x.view(1, -1) for x in draw(0))
    torch.testing.assert_close(model(ids, labels=labels, **packed).loss, plain(ids, labels=labels, **packed).loss)
    for each in (model, plain):
        each.zero_grad()
        optimizer = FusedAdamW(each.parameters(), lr=1e-2)
        of_labels(each, 0).backward()
        norm = nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        optimizer.step()
    torch.testing.assert_close(of_labels(model, 0), of_labels(plain, 0), rtol=1e-4, atol=1e-4)
    assert norm > 0.1


EXPORTED = ("olmo2", "gpt_oss", "deepseek_v3", "gemma4", "lfm2", "nemotron_h", "falcon_h1", "kimi_linear")
"""Losses, gradients and tokens of their layers, with each mode of activation checkpointing: test_every_kind."""
OF_THE_HEAD = ("llama", "llama-tied", "gemma2", "qwen3_moe")
"""Heads of each kind: untied, tied, with a softcap, and beside a loss of the routers. The head is the same code behind
all blocks."""


def check_head(rank: int, model: lm.CausalLM, plain: lm.CausalLM) -> None:
    """What is made of logits: samples, sums of them, log-probabilities, and the options of the loss."""
    sampled = model.generate(
        draw(0)[0], max_new_tokens=6, do_sample=True, generator=torch.Generator().manual_seed(rank)
    )
    others = [torch.empty_like(sampled) for _ in range(2)]
    dist.all_gather(others, sampled)
    assert torch.equal(*others)
    check_gradients(model, plain, of_logits)
    check_gradients(model, plain, of_log_probs)
    check_gradients(
        model, plain, partial(of_labels, label_smoothing=0.1, z_loss=1e-2, class_weights=torch.rand(131).add(0.1))
    )


def with_lora(name: str, **options: Any) -> lm.CausalLM:
    """LoRA whose updates are not zero."""
    model = lm.add_lora(build(name), r=3, **options)
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            nn.init.normal_(parameter, std=0.1)
    return model


def check_lora(mesh: DeviceMesh, folder: Path) -> None:
    def with_dropout(model: nn.Module, seed: int) -> Tensor:
        torch.manual_seed(5)
        return of_labels(model.train(), seed)

    # Of what is given whole, all ranks drop what one process drops.
    plain, model = (with_lora("llama", lora_dropout=0.3, target_modules=["q_proj", "up_proj"]) for _ in range(2))
    tensor_parallel(model, mesh)
    check_gradients(model, plain, with_dropout)
    assert abs(with_dropout(plain, 0) / of_labels(plain.eval(), 0) - 1) > 1e-4
    plain, model = with_lora("llama-tied"), with_lora("llama-tied")
    tensor_parallel(model, mesh)
    check_gradients(model, plain, of_labels)
    check_generation(model, plain)
    lm.save_adapter(model, folder / "adapter")
    dist.barrier()
    again = lm.load_adapter(build("llama-tied"), folder / "adapter")
    torch.testing.assert_close(of_labels(again, 0), of_labels(plain, 0))


def check_lora_with_checkpointing(mesh: DeviceMesh, name: str, mode: Any) -> None:
    plain, model = with_lora(name), with_lora(name)
    tensor_parallel(model, mesh)
    for each in ("none", mode):
        model.activation_checkpointing = each
        check_gradients(model, plain, of_labels)


def check_medusa(mesh: DeviceMesh) -> None:
    for lm_head in ("own", "shared"):
        plain, model = (lm.MedusaModel.from_base(build("llama-tied"), num_heads=2, lm_head=lm_head) for _ in range(2))
        for each in (plain, model):
            torch.manual_seed(1)
            for parameter in each.heads.parameters():
                nn.init.normal_(parameter, std=0.05)
        tensor_parallel(model, mesh)
        check_gradients(model, plain, of_labels)
        check_generation(model, plain)
    check_gradients(JointMedusa(model), JointMedusa(plain), partial(of_labels, heads_loss_weight=0.3))
    reference = build("llama-tied").requires_grad_(False)
    with pytest.raises(InputError, match="not implemented for tensor-parallel heads"):
        of_labels(JointMedusa(model, reference), 0, heads_loss_weight=0.3)


def check_refusals(mesh: DeviceMesh) -> None:
    def refuse(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=words):
            call()

    sharded = build("llama")
    tensor_parallel(sharded, mesh)
    refuse(InputError, "is sharded already", lambda: tensor_parallel(sharded, mesh))
    refuse(InputError, "takes a native CausalLM", lambda: tensor_parallel(nn.Linear(2, 2), mesh))
    flat = init_device_mesh("cpu", (1, 2))
    refuse(InputError, "must have one dimension", lambda: tensor_parallel(build("llama"), flat))
    for words, change in {
        r"decoder.blocks.0.mixer \(GRU\)": lambda m: setattr(m.decoder.blocks[0], "mixer", nn.GRU(60, 60)),
        r"mlp.gate_up \(Bilinear\): is in the place": lambda m: setattr(
            m.decoder.blocks[1].mlp, "gate_up", nn.Bilinear(2, 2, 2)
        ),
        r"mixer.extra: tensor_parallel of Attention": lambda m: m.decoder.blocks[1].mixer.register_parameter(
            "extra", nn.Parameter(torch.zeros(1))
        ),
    }.items():
        changed = build("llama")
        change(changed)
        before = copy.copy(dict(changed.named_parameters()))
        refuse(ConfigError, words, partial(tensor_parallel, changed, mesh))
        assert all(p is before[name] for name, p in changed.named_parameters())


def two_dimensions(rank: int, folder: Path, mesh: DeviceMesh, *names: str) -> None:
    """Two replicas, or shards of FSDP2, of two tensor-parallel ranks."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    data = grid["shard"].get_local_rank()
    for name in names:
        plain, model = build(name), build(name)
        tensor_parallel(model, grid["tensor"])
        for block in model.decoder.blocks:
            fully_shard(block, mesh=grid["shard"])
        fully_shard(model, mesh=grid["shard"])
        model.activation_checkpointing = "none" if name == "olmo2" else "full"
        if name == "llama-tied":
            check_generation(model, plain, data)
        check_export(model, plain, folder / name)
        check_gradients(model, plain, of_labels, data, replicas=2)
        if name in ("llama-tied", "qwen3_moe"):
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain)]
            torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        for each in (model, plain):
            FusedAdamW(each.parameters(), lr=1e-3).step()
        torch.testing.assert_close(of_labels(model, data), of_labels(plain, data), rtol=1e-4, atol=1e-4)
        if name in ("olmo2", "qwen3_5"):  # with norms of all heads, and with a recurrent mixer
            over_four(rank, mesh, name)


def over_four(rank: int, mesh: DeviceMesh, name: str) -> None:
    """All ranks divide each product; of the norms, which are replicated, each has a fourth of the gradient to sum."""
    sizes = {key: 4 * size for key, size in CONFIGS[name].items() if key.endswith("intermediate_size")}
    heads = {"num_key_value_heads": 4, "num_attention_heads": 8}
    CONFIGS["wide"] = {**CONFIGS[name], **sizes, **heads}
    if name == "qwen3_5":
        CONFIGS["wide"] |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    plain, model = build("wide"), build("wide")
    tensor_parallel(model, mesh)
    check_gradients(model, plain, of_labels)
    check_generation(model, plain)


@pytest.mark.parametrize("names", [("llama", "llama-tied"), ("gemma2", "qwen3_moe", "qwen3_5")])
def test_equals_one_process(names: tuple[str, ...], tmp_path: Path) -> None:
    """Gradients of layers with other options: test_every_kind."""
    in_two_ranks(train_generate_save, tmp_path, *names)


def test_fsdp2_on_top(tmp_path: Path) -> None:
    """FSDP2 shards parameters by their placements, and these families have all of them."""
    in_ranks(4, two_dimensions, tmp_path, "llama-tied", "olmo2", "qwen3_moe", "qwen3_5")


@pytest.mark.parametrize(
    "config, ranks, words",
    [
        (
            CONFIGS["llama"],
            4,
            r"blocks\[0\].mixer.num_kv_heads \(num_key_value_heads\): 2 .*work for this model: 1, 2$",
        ),
        (BASE | {"model_type": "llama"}, 2, r"blocks\[0\].mlp.size \(intermediate_size\): 97 cannot"),
        (MIXTURES["qwen2_moe"], 2, r"size \(\w+_size\): \d+ cannot be split evenly over 2"),
        (CONFIGS["deepseek_v3"], 4, r"blocks\[0\].mixer.num_heads \(num_attention_heads\): 6 .*: 1, 2$"),
        (
            CONFIGS["qwen3_5"] | {"linear_num_key_heads": 3},
            2,
            r"num_key_heads \(linear_num_key_heads\): 3 cannot be split evenly over 2",
        ),
        (zoo.CONFIGS["lfm2"], 8, r"blocks\[0\].mixer.channels \(hidden_size\): 60 cannot be split evenly over 8"),
        (
            CONFIGS["bamba"] | {"mamba_n_groups": 3},
            2,
            r"num_groups \(mamba_n_groups\): 3 cannot be split evenly over 2",
        ),
        (CONFIGS["llama"] | {"num_key_value_heads": 6, "vocab_size": 4}, 3, "vocab_size: 4 is too small"),
    ],
)
def test_what_does_not_divide_is_named(config: dict[str, Any], ranks: int, words: str) -> None:
    if "vocab_size" in words:
        config = {**config, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    with torch.device("meta"):
        found = lm.from_config(config).config
    with pytest.raises(ConfigError, match=words):
        check_tensor_parallel(found, ranks)


def test_every_family_has_a_rule_for_each_layer() -> None:
    """Whether sizes divide is another matter."""
    for config in zoo.CONFIGS.values():
        model = lm.from_config(config, device="meta")
        assert tensor_placements(model, 2)
        for block in model.config.blocks:
            for layer in (block.mixer, block.mlp, block.after):
                if layer is not None:
                    layer.tensor_shard(1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_part_has_the_sizes_of_the_first_rank(config: dict[str, Any]) -> None:
    """Of each parameter, so that what is planned with it is what a rank holds."""
    model = lm.from_config(config, device="meta")
    dims = tensor_placements(model, 2)
    for (name, whole), shard in zip(
        model.named_parameters(), tensor_part(model, FirstRank(2)).parameters(), strict=True
    ):
        dim = dims.get(id(whole))
        assert shard.shape == (whole if dim is None else whole.chunk(2, dim)[0]).shape, name
