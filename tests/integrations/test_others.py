"""Models that compute natively in PEFT, bitsandbytes, accelerate, lm-eval and pipelines: the same results."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import NATIVE, theirs
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("peft", reason="needs ligermodels[integrations]")
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, pipeline

import ligermodels as lm


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    """Padded on the right, no label on padding."""
    tokenizer = tiny.tokenizer()
    found = []
    for i in range(count):
        batch = tokenizer([tiny.sentence(4 * i + j, 5 + 2 * j) for j in range(4)], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        found.append({"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels})
    return found


def losses(model: Any) -> list[float]:
    """Of training steps on what is trainable."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    found = []
    for batch in batches():
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"target_modules": "all-linear"}, {"modules_to_save": ["lm_head", "norm"]}],
    ids=lambda options: next(iter(options), "lora"),
)
def test_peft(options: dict[str, Any], native: str, folder: Path, passes: list[int], tmp_path: Path) -> None:
    """Losses; the adapter on disk is the one that a model of transformers loads."""

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options))

    plain = adapted(theirs(folder))
    wanted = losses(plain)
    assert not passes
    model = adapted(NATIVE[native](folder))
    found = losses(model)
    assert len(passes) == 3
    assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    batch = batches(1)[0]
    with torch.no_grad():
        logits = PeftModel.from_pretrained(theirs(folder), tmp_path).eval()(**batch).logits
        ours = model.eval()(**batch).logits
    real = batch["attention_mask"].bool()
    assert_close(ours[real], logits[real], rtol=1e-4, atol=1e-4)
    merged = lm.from_transformers(model.merge_and_unload())
    assert_close(
        merged(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[real],
        ours[real],
        rtol=1e-4,
        atol=1e-4,
    )


ADAPTERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "embeddings": ("gemma", lambda: LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["embed_tokens", "q_proj"])),
    "head": ("llama", lambda: LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["lm_head", "q_proj"])),
    "tokens": ("gemma", lambda: LoraConfig(task_type="CAUSAL_LM", r=3, trainable_token_indices=[5, 9])),
}
"""LoRA of single modules: model type and config."""

OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 9},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "FOURIERFT": {"n_frequency": 9},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "OFT": {"r": 0, "oft_block_size": 4},
    "POLY": {"n_tasks": 2},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "PSOFT": {"r": 4},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 10},
    "RANDLORA": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [3, 5]},
    "VBLORA": {"vector_length": 4, "num_vectors": 16},
    "VERA": {"r": 4},
    "WAVEFT": {"n_frequency": 9},
}
"""What PEFT's methods need, as sizes that divide those of the tiny model."""
WITHOUT = {
    "CPT": "needs logits beside the loss in training",
    "PVERA": "draws noise for padding too",
    "XLORA": "needs adapters on disk",
}
"""Methods that are not compared."""
ADAPTERS |= {
    kind.value: ("llama", partial(config, task_type="CAUSAL_LM", **OPTIONS.get(kind.value, {})))
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    if kind.value not in WITHOUT
}


@pytest.mark.parametrize("order", ["nativize first", "get_peft_model first"])
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_in_either_order(case: str, order: str, tmp_path: Path) -> None:
    """With padding on the left, which prompts make padding between tokens; and with the adapter switched off."""
    if case == "ADAPTION_PROMPT" and order == "get_peft_model first":
        pytest.skip("replaces attention, and nativize refuses it")
    model_type, config = ADAPTERS[case]
    folder = tiny.save(tmp_path, model_type, tie_word_embeddings=case != "head")
    batch = {name: x.flip(1) for name, x in batches(1)[0].items()}

    def results(native: bool) -> list[Tensor]:
        hf = theirs(folder)
        if native and order == "nativize first":
            lm.nativize(hf)
        torch.manual_seed(3)
        model = get_peft_model(hf, config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if native and order != "nativize first":
            lm.nativize(model)
        tasks = {"task_ids": torch.arange(4) % 2} if case in ("MULTITASK_PROMPT_TUNING", "POLY") else {}
        torch.manual_seed(4)
        loss = model.train()(**batch, **tasks).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        ids = batches(1)[0]["input_ids"]
        with model.eval().disable_adapter():
            without = model(input_ids=ids, **tasks).logits
        return [loss, *gradients, model(input_ids=ids, **tasks).logits, without]

    assert_close(results(native=True), results(native=False), rtol=1e-3, atol=1e-4)


def test_nf4_and_lora(folder: Path, passes: list[int]) -> None:
    pytest.importorskip("bitsandbytes")
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)

    def adapted(native: bool) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=quantised)
        torch.manual_seed(3)
        return get_peft_model(lm.nativize(model) if native else model, LoraConfig(task_type="CAUSAL_LM", r=4))

    wanted = losses(adapted(native=False))
    found = losses(adapted(native=True))
    assert len(passes) == 3
    assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_checkpoints_of_bitsandbytes(folder: Path, tmp_path: Path, kind: str, nested: bool) -> None:
    """Read without bitsandbytes: the weights, in float32, are those that it dequantises."""
    pytest.importorskip("bitsandbytes")
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=quantised)
    model.save_pretrained(tmp_path)
    wanted = model.dequantize(torch.float32).state_dict()
    found = lm.from_pretrained(tmp_path, dtype=torch.float32).hf_state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert_close(tensor, wanted[name].float(), rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_of_bitsandbytes_is_kept(tmp_path: Path, nested: bool) -> None:
    """With quantize="nf4": the numbers that bitsandbytes dequantises, in layers of 4 bits; skipped layers are plain."""
    pytest.importorskip("bitsandbytes")
    tiny.save(tmp_path / "plain", hidden_size=128, intermediate_size=192, head_dim=32)
    skipped = ["lm_head", "model.layers.1.mlp.up_proj"]
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=skipped,
    )  # fmt: skip
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantization_config": quantised}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options)
    model.save_pretrained(tmp_path / "nf4")
    wanted = model.dequantize(torch.bfloat16).state_dict()
    found = lm.from_pretrained(tmp_path / "nf4", dtype=torch.bfloat16, quantize="nf4")
    plain = [name for name, module in found.decoder.named_modules() if getattr(module, "weight", None) is not None]
    assert [name for name in plain if name.startswith("blocks") and "norm" not in name] == ["blocks.1.mlp.gate_up"]
    state = lm.dequantize(found).hf_state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())


def test_lm_eval(folder: Path, passes: list[int]) -> None:
    """Log-likelihoods and generated text."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    def results(model: Any) -> tuple[Any, Any]:
        harness = HFLM(pretrained=model, tokenizer=tiny.tokenizer(), batch_size=3, device="cpu")
        pairs = [(tiny.sentence(i, 4), " " + tiny.sentence(i + 1, 2 + i)) for i in range(5)]
        asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        texts = [(tiny.sentence(i, 3 + i), {"until": ["<end>"], "max_gen_toks": 6}) for i in range(4)]
        return harness.loglikelihood(asked), harness.generate_until(
            [Instance("generate_until", {}, text, i) for i, text in enumerate(texts)]
        )

    wanted = results(theirs(folder).eval())
    assert not passes
    for make in NATIVE.values():
        found = results(make(folder).eval())
        assert passes
        passes.clear()
        assert_close([score for score, _ in found[0]], [score for score, _ in wanted[0]], rtol=1e-5, atol=1e-5)
        assert [greedy for _, greedy in found[0]] == [greedy for _, greedy in wanted[0]]
        assert found[1] == wanted[1]


def test_pipeline(folder: Path) -> None:
    def text(model: Any) -> Any:
        made = pipeline("text-generation", model=model.eval(), tokenizer=tiny.tokenizer(), device="cpu")
        return made([tiny.sentence(1, 4), tiny.sentence(2, 6)], max_new_tokens=5, do_sample=False, batch_size=2)

    wanted = text(theirs(folder))
    for make in NATIVE.values():
        assert text(make(folder)) == wanted


def test_the_command_line_of_checkpoints_is_unaware(folder: Path, tmp_path: Path) -> None:
    """What a wrapped model saves, `lm.from_pretrained` opens: the tied weight once."""
    hf = NATIVE["wrap"](folder)
    hf.save_pretrained(tmp_path / "out")
    again = lm.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = batches(1)[0]["input_ids"]
    assert_close(again(ids).logits, hf.eval()(ids).logits)
