"""TRL's trainers on the native head: the losses, metrics and parameters of TRL's own, which does not run."""

from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from tiny import theirs
from torch.testing import assert_close

pytest.importorskip("trl", reason="needs ligermodels[integrations]")
from accelerate import Accelerator
from peft import LoraConfig
from test_nativize_multimodal import make as make_multimodal
from test_trainers import CASES, QUIET, dpo, grpo, kto, logged, prompts, rloo, sft
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.modeling_outputs import CausalLMOutput
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.trainer import utils
from trl.trainer.utils import _ChunkedLogProbFunction

from ligermodels import ops
from ligermodels.errors import ConfigError, InputError
from ligermodels.integrations import use_native_head
from ligermodels.integrations.token_statistics import OUTPUTS, token_statistics
from ligermodels.layers import HeadConfig
from ligermodels.ops.loss import linear_statistics

NATIVE = {**tiny.NATIVE, "made native by use_native_head": theirs}
LORA = {"r": 3, "target_modules": ["q_proj", "v_proj", "up_proj"], "lora_alpha": 8, "init_lora_weights": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
"""Beside these and the trainer's own keys, options have `model_type` with the fields of its config."""

TRL: dict[str, tuple[Callable[..., Any], Callable[[], Any], dict[str, Any]]] = {
    **CASES,
    "sft evaluated": (sft, tiny.texts, {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}),
    "sft dft": (sft, tiny.texts, {"loss_type": "dft"}),
    "sft compiled": (sft, tiny.texts, {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "sft experts": (
        sft,
        tiny.texts,
        {
            "gradient_accumulation_steps": 2,
            "router_aux_loss_coef": 0.3,
            "model": {"model_type": "qwen3_moe", **EXPERTS},
        },
    ),
    "dpo wpo": (dpo, tiny.preferences, {"use_weighting": True, "gradient_checkpointing": True}),
    "dpo softcap": (dpo, tiny.preferences, {"use_weighting": True, "model": {"model_type": "gemma2"}}),
    "dpo mixed precision": (dpo, tiny.preferences, {"bf16": True}),
    "kto": (kto, tiny.judged, {}),
    "kto scaled": (kto, tiny.judged, {"model": {"model_type": "granite", "logits_scaling": 4.0}}),
    "grpo temperature": (grpo, prompts, {"temperature": 0.7, "loss_type": "dapo", "num_iterations": 2}),
    "grpo entropy": (grpo, prompts, {"entropy_coef": 0.05, "temperature": 1.3, "beta": 0.0}),
    "grpo fp32": (grpo, prompts, {"cast_lm_head_to_fp32": True, "temperature": 0.7}),
    "rloo": (rloo, prompts, {"temperature": 0.7}),
    "sft lora": (sft, tiny.texts, {"peft_config": LORA}),
    "dpo lora": (dpo, tiny.preferences, {"peft_config": LORA}),
    "grpo lora": (grpo, prompts, {"peft_config": LORA}),
    "sft saved head": (sft, tiny.texts, {"peft_config": {**LORA, "modules_to_save": ["lm_head"]}}),
}
RUNS = [
    (case, native)
    for case in TRL
    for native in (NATIVE if case in ("sft", "dpo", "grpo fp32", "sft lora") else ("nativize",))
]
TIMES = ("runtime", "_per_second", "step_time")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts calls of the op, those of its GEMMs (forward, and backward where that recomputes logits), and of TRL's."""
    counts = {"ours": 0, "gemms": 0, "theirs": 0}

    def count(place: Any, name: str, key: str) -> None:
        through = getattr(place, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[key] += 1
            return through(*args, **kwargs)

        monkeypatch.setattr(place, name, counted)

    count(ops, "linear_log_probs", "ours")
    count(linear_statistics, "linear_rows", "gemms")
    count(linear_statistics, "linear_gradients", "gemms")
    count(_ChunkedLogProbFunction, "apply", "theirs")
    return counts


def options_of(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trainer's options, and the model's."""
    options = dict(TRL[case][2])
    model = {"initializer_range": 0.3, "tie_word_embeddings": case == "sft", **options.pop("model", {})}
    if "peft_config" in options:
        options["peft_config"] = LoraConfig(task_type="CAUSAL_LM", **options["peft_config"])
    return options, model


def trained(trainer: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    records = [
        {key: float(value) for key, value in record.items() if not key.endswith(TIMES)} for record in logged(trainer)
    ]
    return records, {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize(("case", "native"), RUNS)
def test_as_trl(case: str, native: str, used: dict[str, int], passes: list[int], tmp_path: Path) -> None:
    make, data = TRL[case][:2]
    options, fields = options_of(case)
    folder = tiny.save(tmp_path / "model", **fields)
    torch.manual_seed(3)
    wanted, parameters = trained(make(theirs(folder), tmp_path / "theirs", data(), **options))
    calls = used["theirs"]
    assert used == {"ours": 0, "gemms": 0, "theirs": calls} and calls and not passes

    torch.manual_seed(3)
    trainer = make(NATIVE[native](folder), tmp_path / "ours", data(), **options_of(case)[0])
    assert use_native_head(trainer) is trainer
    rows: list[torch.Size] = []

    def record(head: Any, args: Any, kwargs: Any, found: Any) -> None:
        rows.extend([each.shape for each in found.values()] if isinstance(found, dict) else [found.shape])

    head = trainer.model.get_output_embeddings()
    head.register_forward_hook(record, with_kwargs=True)
    found, ours = trained(trainer)
    assert used["theirs"] == calls and used["ours"] >= calls
    assert passes or "experts" in case  # their router's logits are transformers'
    if make not in (grpo, rloo):  # these generate, from logits
        assert rows and all(len(shape) == 2 for shape in rows)
    if case.startswith("sft"):  # without gradients of the head none computes logits again
        again = 2 if any(each.requires_grad for each in head.parameters()) else 1
        evaluated = sum("eval_loss" in record for record in found)
        assert used["gemms"] == again * (used["ours"] - evaluated) + evaluated

    tolerance = {"rel": 5e-2, "abs": 2e-2} if "bf16" in options else {"rel": 1e-4, "abs": 1e-5}
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        assert one.keys() == two.keys()
        for key in two:
            assert one[key] == pytest.approx(two[key], **tolerance), key
    if make is dpo and "peft_config" not in options:  # the reference computes just as the policy does
        assert found[0]["rewards/chosen"] == found[0]["rewards/rejected"] == 0
    assert ours.keys() == parameters.keys()
    for name, each in parameters.items():
        assert_close(ours[name], each, rtol=tolerance["rel"], atol=tolerance["abs"], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_statistics(softcap: float | None, temperature: float) -> None:
    """Against TRL's kernels, of every output and with the gradients of all operands."""
    H, V, scale = 9, 37, 0.6
    torch.manual_seed(0)
    targets = torch.randint(V, (3, 11))
    targets[0, :5] = targets[2] = -100
    mask = targets != -100
    inputs = [torch.randn(shape) for shape in ((3, 11, H), (V, H), (V,))]
    inputs[1][7] = inputs[1][3]  # equal logits: the first of them is the prediction
    inputs[2][7] = inputs[2][3] = 9.0
    targets[1, :2] = torch.tensor([3, 7])
    results = []
    for of in ("ours", "theirs"):
        hidden, weight, bias = leaves = [each.clone().requires_grad_() for each in inputs]
        if of == "ours":
            config = HeadConfig(softcap=softcap, logit_scale=scale)
            found = token_statistics(config, hidden, weight, targets, bias, outputs=OUTPUTS, temperature=temperature)
            assert not any(each[~mask].any() for each in found.values())
            found = {name: each[mask] for name, each in found.items()}
        else:
            each = _ChunkedLogProbFunction.apply(
                hidden[mask], weight, bias, targets[mask], temperature, 16, softcap, scale, OUTPUTS
            )
            found = dict(zip(("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"), each, strict=True))
        loss = (found["log_probs"] * torch.linspace(0.5, 2, int(mask.sum()))).sum() + found["entropy"].square().sum()
        results.append((found, torch.autograd.grad(loss, leaves)))
    (ours, our_gradients), (wanted, gradients) = results
    assert ours["is_top1"].any() and not ours["is_top1"].all()
    assert_close(ours, {name: wanted[name] for name in ours}, rtol=1e-5, atol=1e-5)
    assert_close(our_gradients, gradients, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_served_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a trainer of TRL, got dict"):
        use_native_head({})
    arguments = CPOConfig(str(tmp_path), **QUIET)
    cpo = CPOTrainer(
        theirs(folder), args=arguments, train_dataset=tiny.preferences(), processing_class=tiny.tokenizer()
    )
    with pytest.raises(InputError, match="CPOTrainer has not set TRL's fused head on its LlamaForCausalLM"):
        use_native_head(cpo)

    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=47, n_embd=8, n_layer=1, n_head=2))
    unsupported = sft(model, tmp_path, tiny.texts())
    forward = model.forward
    with pytest.raises((ConfigError, InputError), match="gpt2"):
        use_native_head(unsupported)
    assert model.forward == forward

    lora = LoraConfig(task_type="CAUSAL_LM", **LORA, modules_to_save=["lm_head"])
    adapted = sft(theirs(folder), tmp_path, tiny.texts(), peft_config=lora)
    forward = adapted.model.get_base_model().forward
    with pytest.raises(
        InputError, match=r"lm_head is a ModulesToSaveWrapper.*nativize the model before get_peft_model"
    ):
        use_native_head(adapted)
    assert adapted.model.get_base_model().forward == forward

    trainer = use_native_head(sft(tiny.NATIVE["wrap"](folder), tmp_path, tiny.texts()))
    with pytest.raises(InputError, match="this SFTTrainer has the native head already"):
        use_native_head(trainer)
    ids = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(InputError, match="shift_labels"):
        trainer.model(input_ids=ids, shift_labels=ids, fused_lm_head=True)
    with pytest.raises(InputError, match="labels"):
        trainer.model(input_ids=ids, fused_lm_head=True)


@pytest.mark.parametrize("after", ["nativize", "use_native_head"])
@pytest.mark.parametrize(
    ("model_type", "change"), [("gemma2", {"final_logit_softcapping": 0.5}), ("granite", {"logits_scaling": 4.0})]
)
def test_a_config_changed_later_has_its_effect(
    model_type: str, change: dict[str, float], after: str, used: dict[str, int], tmp_path: Path
) -> None:
    folder = tiny.save(tmp_path / "model", initializer_range=0.3, model_type=model_type)
    model = theirs(folder)
    model.config.update(change)
    wanted, parameters = trained(sft(model, tmp_path / "theirs", tiny.texts()))
    used["theirs"] = 0

    model = tiny.NATIVE["nativize"](folder)
    if after == "nativize":
        model.config.update(change)
    trainer = use_native_head(sft(model, tmp_path / "ours", tiny.texts()))
    trainer.model.config.update(change)
    found, ours = trained(trainer)
    assert used["ours"] and not used["theirs"]
    assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert_close(ours, parameters, rtol=1e-3, atol=1e-4)


def test_the_routers_loss_of_a_multimodal_model(used: dict[str, int]) -> None:
    """Its settings are those of the language model's config."""
    model: Any = make_multimodal("qwen3_vl_moe").train()
    model.config.get_text_config().update({"output_router_logits": True, "router_aux_loss_coef": 0.3})
    utils.add_fused_lm_head(model)
    ids = torch.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "fused_lm_head": True}
    wanted = model(**inputs)
    use_native_head(SimpleNamespace(model=model, accelerator=Accelerator(cpu=True)))
    found = model(**inputs)
    assert used["ours"] and wanted.aux_loss > 1
    assert_close((found.loss, found.aux_loss), (wanted.loss, wanted.aux_loss), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["sft", "gkd"])
def test_a_loss_of_logits_is_an_error(kind: str, folder: Path, tmp_path: Path) -> None:
    model = tiny.NATIVE["wrap"](folder)
    if kind == "sft":
        trainer = sft(model, tmp_path, tiny.texts(), label_smoothing_factor=0.1)
    else:
        arguments = GKDConfig(str(tmp_path), **QUIET, max_length=32, lmbda=0.0)
        trainer = GKDTrainer(
            model, theirs(folder), arguments, train_dataset=tiny.chats(), processing_class=tiny.tokenizer()
        )
    use_native_head(trainer)
    with pytest.raises(InputError, match="computes its loss from logits"):
        trainer.train()


@pytest.mark.parametrize("change", ["no fused head", "other options", "other results"])
def test_another_trl(change: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = sft(tiny.NATIVE["wrap"](folder), tmp_path, tiny.texts())
    if change == "no fused head":
        monkeypatch.delattr(utils, "add_fused_lm_head")
    elif change == "other options":
        other = FunctionType((lambda self, *args, **kwargs: None).__code__, vars(utils))
        trainer.model.forward = MethodType(other, trainer.model)
    else:
        monkeypatch.setattr(utils, "FusedCausalLMOutput", CausalLMOutput)
    forward = trainer.model.forward
    with pytest.raises(InputError, match=r"trl 1\.16, which trl \d"):
        use_native_head(trainer)
    assert trainer.model.forward == forward
