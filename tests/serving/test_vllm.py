"""A real server opens what this package writes: vLLM 0.32 on the CPU, in an environment of its own.

`make test-serving` makes the environment and runs this; or LIGERMODELS_VLLM_PYTHON names the Python of one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess, needs_vllm
from named_exports import export_named

import ligermodels as lm
from ligermodels.integrations.vllm import ARCHITECTURE
from ligermodels.speculative.draft_layer import layer_like
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.tree import chain

pytestmark = needs_vllm

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TEXT = torch.randint(3, 512, (1, 64), generator=torch.Generator().manual_seed(3)).repeat(1, 3)[:, :180]
PROMPT, NEW, DRAFTED = TEXT[0, :10].tolist(), 40, 4


def served(
    engines: EngineProcess,
    model: Path,
    speculative: dict[str, Any] | None = None,
    dtype: str = "float32",
    *,
    native: bool = False,
    ranks: int = 1,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """What vLLM generates after PROMPT; with `native` by this package's modules around vLLM's attention, and with
    vLLM's latent attention otherwise."""
    options = {
        "dtype": dtype, "max_model_len": 256, "enable_prefix_caching": False, "speculative_config": speculative,
        "hf_overrides": {"architectures": [ARCHITECTURE]} if native else {}, "tensor_parallel_size": ranks,
        "enable_lora": adapter is not None,
    }  # fmt: skip
    arguments: dict[str, Any] = {"environment": {"VLLM_MLA_DISABLE": "0"}, "options": options}
    arguments["adapter"] = None if adapter is None else str(adapter)
    (answer,) = engines.serve(model, prompts=[PROMPT], max_tokens=NEW, **arguments)
    return answer


def trained(model: Any, parameters: Any, steps: int) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(TEXT, labels=TEXT).loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that knows a text, so that heads learn it in a few steps."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    model = lm.from_config({"model_type": "llama", **SIZES, "tie_word_embeddings": False}, dtype="float32")
    trained(model, model.parameters(), 60)
    model.save_pretrained(folder, overwrite=True)
    return folder


def check(engines: EngineProcess, model: Any, folder: Path, speculative: dict[str, Any], **options: Any) -> None:
    """The server's tokens are the greedy ones, and it takes exactly as many steps as we do: so each draft is ours."""
    ours = model.generate([PROMPT], max_new_tokens=NEW, tree=chain(DRAFTED), return_stats=True)
    tokens = ours.sequences[0, len(PROMPT) :].tolist()
    assert torch.equal(ours.sequences, model.base.generate([PROMPT], max_new_tokens=NEW, do_sample=False))
    assert 1.2 < ours.tokens_per_step < 4.5  # a head that is always or never right would hide errors
    dtype = str(model.base.dtype).removeprefix("torch.")
    theirs = served(engines, folder, {"num_speculative_tokens": DRAFTED, **speculative}, dtype, **options)
    assert theirs["tokens"] == [tokens]
    assert theirs["drafts"] == ours.steps
    assert abs(theirs["accepted"] - (NEW - 1 - ours.steps)) <= DRAFTED  # the last step may draft beyond the end


@pytest.mark.parametrize(("profile", "options"), [
    ("speculators", {}),
    ("speculators", {"norm_before_residual": True, "vocabulary": 96}),
    ("speculators", {"fc_norm": True, "norm_output": True}),
    ("speculators", {"layer": "qwen3", "boundaries": (1, 2, 4)}),
    ("specforge", {"vocabulary": 96}),
    ("specforge", {"boundaries": (0, 2, 3)}),
    ("speculators", {"native": True}),
    ("specforge", {"vocabulary": 96, "boundaries": (0, 2, 3), "native": True}),
    ("speculators", {"vocabulary": 96, "native": True, "ranks": 2}),
], ids=str)  # fmt: skip
def test_eagle3(profile: Any, options: dict[str, Any], target: Path, engines: EngineProcess, tmp_path: Path) -> None:
    base, options = lm.from_pretrained(target), dict(options)
    run = {name: options.pop(name) for name in ("native", "ranks") if name in options}
    if size := options.get("vocabulary"):
        options = {**options, "vocabulary": DraftVocabulary.counted([TEXT], size, 512)}
    torch.manual_seed(1)
    model = lm.Eagle3Model.from_base(base, DRAFTED, **options)
    trained(model, model.head_parameters(), 9)
    export_named(model, tmp_path, profile, str(target))
    check(engines, model, target, {"method": "eagle3", "model": str(tmp_path)}, **run)


@pytest.mark.parametrize(("profile", "options"), [
    ("speculators", {"vocabulary": 96}),
    ("speculators", {"boundaries": (0, 2, 3), "num_layers": 1}),
    ("z-lab", {}),
    ("z-lab", {"window": 16}),
    ("speculators", {"window": 16}),
    ("speculators", {"window": 16, "causal": False}),
], ids=str)  # fmt: skip
def test_dflash(profile: Any, options: dict[str, Any], target: Path, engines: EngineProcess, tmp_path: Path) -> None:
    base, options = lm.from_pretrained(target), dict(options)
    if size := options.get("vocabulary"):
        options = {**options, "vocabulary": DraftVocabulary.counted([TEXT], size, 512)}
    if window := options.pop("window", None):
        options["layers"] = {**layer_like(base.config, "qwen3", 2), "layer_types": ["sliding_attention"] * 2}
        options["layers"] |= {"sliding_window": window, "use_sliding_window": True}
    else:
        options["num_layers"] = 2
    torch.manual_seed(1)
    model = lm.DFlashModel.from_base(base, DRAFTED + 1, **options, num_anchors=64)
    trained(model, model.head_parameters(), 25)
    first, *others = (mixer.k_norm for mixer in model.head.mixers)
    for norm in others:  # vLLM's grouped norm on the CPU takes the first layer's weight for the context of all layers
        norm.load_state_dict(first.state_dict())
    export_named(model, tmp_path, profile, str(target))
    check(engines, model, target, {"method": "dflash", "model": str(tmp_path)})


EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {
    **EXPERTS, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip
WITH_MTP: dict[str, dict[str, Any]] = {
    "glm4_moe": {**GROUPED, "partial_rotary_factor": 0.5},
    "deepseek_v3": {  # vLLM's latent attention on the CPU has 512 + 64 channels, and is right with YaRN alone
        **GROUPED, "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64, "kv_lora_rank": 512,
        "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "qwen3_next": {  # its recurrent layers are bfloat16 with heads of 128 channels
        **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64, "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "steps", "dtype"), [
    ("glm4_moe", 3, "float32"), ("deepseek_v3", 8, "float32"), ("qwen3_next", 3, "bfloat16"),
])  # fmt: skip
def test_mtp(model_type: str, steps: int, dtype: str, engines: EngineProcess, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = lm.from_config({"model_type": model_type, **SIZES, **WITH_MTP[model_type]}, dtype="float32")
    trained(base, base.parameters(), 60)
    torch.manual_seed(1)
    model = lm.MTPModel.from_base(base, DRAFTED)
    trained(model, model.head_parameters(), steps)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path, overwrite=True)
    check(engines, model, tmp_path, {"method": "mtp"})


@pytest.mark.parametrize(("native", "ranks"), [(False, 1), (True, 1), (True, 2)])
def test_medusa(native: bool, ranks: int, target: Path, engines: EngineProcess, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = lm.MedusaModel.from_base(lm.from_pretrained(target), DRAFTED)
    trained(model, model.head_parameters(), 25)
    model.export(tmp_path, "vllm")
    check(engines, model, target, {"method": "medusa", "model": str(tmp_path)}, native=native, ranks=ranks)


def test_adapter(target: Path, engines: EngineProcess, tmp_path: Path) -> None:
    """A LoRA adapter in PEFT's format, opened by vLLM's own class, changes its tokens as it changes ours."""
    model = lm.from_pretrained(target)
    without = model.generate([PROMPT], max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    torch.manual_seed(3)
    lm.add_lora(model, r=8)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    lm.save_adapter(model, tmp_path)
    wanted = model.generate([PROMPT], max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert not torch.equal(wanted, without)
    found = served(engines, target, adapter=tmp_path)
    assert found["tokens"] == [wanted[0, len(PROMPT) :].tolist()]
