"""The objectives of `ligermodels.losses` against those that TRL's trainers compute from the same log-probabilities.

The trainers are made without a model: their own code runs on the outputs of a function in its place.
"""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("trl", reason="needs ligermodels[integrations]")
from trl import DPOTrainer, GRPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from ligermodels import losses

PAIRS, LENGTH, BETA = 5, 13, 0.4
CPU = torch.device("cpu")


def trainer(kind: type, **attributes: Any) -> Any:
    """A trainer of this kind with nothing but these attributes, and what every trainer asks for."""
    made = object.__new__(kind)
    vars(made).update(
        accelerator=SimpleNamespace(
            device=CPU, num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        model=SimpleNamespace(training=False), aux_loss_enabled=False, beta=BETA, _total_train_tokens=0, _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)), **attributes,
    )  # fmt: skip
    return made


def draw(rows: int, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, 0 outside the mask as TRL's models give them; those of a model near; a mask of completions of
    all lengths."""
    mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1))
    mask[0], mask[1, 1:] = True, False
    log_probs = (-3 * torch.rand(rows, length) - 0.05) * mask
    return log_probs, (log_probs + 0.3 * torch.randn(rows, length)) * mask, mask


def outputs(log_probs: Tensor) -> SimpleNamespace:
    """What the trainers ask of a model's outputs; all but the log-probabilities goes to their logs."""
    zeros = torch.zeros(log_probs.shape)
    return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)


def with_prompt(mask: Tensor) -> Tensor:
    """A mask of completions over inputs, whose first token is the prompt."""
    return torch.nn.functional.pad(mask, (1, 0))


def compare(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The losses, and their gradients."""
    x = x.detach().requires_grad_()
    found, wanted = ours(x), theirs(x)
    assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    one, two = torch.autograd.grad(found, x)[0], torch.autograd.grad(wanted, x)[0]
    assert two.any()
    assert_close(one, two, rtol=1e-4, atol=1e-6)


DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid_norm": {},
    "hinge": {},
    "ipo": {},
    "robust": {"label_smoothing": 0.1},
    "exo_pair": {"label_smoothing": 1e-3},
    "nca_pair": {},
    "bco_pair": {},
    "sppo_hard": {},
    "aot": {"label_smoothing": 0.2},
    "aot_unpaired": {},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {"discopop_tau": 0.3},
    "sft": {},
}
OF_SCORES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")


@pytest.mark.parametrize(
    ("loss_type", "divergence"),
    [(each, "reverse_kl") for each in DPO]
    + [(each, f) for each in OF_SCORES for f in ("forward_kl", "js_divergence", "alpha_divergence")],
)
def test_dpo(loss_type: str, divergence: str) -> None:
    options = {**DPO[loss_type], "f_divergence_type": divergence}
    # TRL's coefficient is that of t^(a - 1), the paper's that of u^-a.
    ours_alpha = {"f_alpha_divergence_coef": 0.3} if divergence == "alpha_divergence" else {}
    log_probs, ref, mask = draw(2 * PAIRS)
    made = trainer(
        DPOTrainer, ld_alpha=None, precompute_ref_logps=True, f_divergence_type=divergence,
        f_alpha_divergence_coef=1 - 0.3, loss_types=[loss_type], loss_weights=[1.0], use_weighting=False,
        label_smoothing=options.get("label_smoothing", 0.0),
        args=SimpleNamespace(discopop_tau=options.get("discopop_tau", 0.05)),
    )  # fmt: skip
    ref_chosen, ref_rejected = ref.sum(1).chunk(2)
    ids = torch.zeros(2 * PAIRS, LENGTH + 1, dtype=torch.long)
    batch = dict(
        input_ids=ids, attention_mask=ids, completion_mask=with_prompt(mask).long(), ref_chosen_logps=ref_chosen,
        ref_rejected_logps=ref_rejected,
    )  # fmt: skip

    def ours(x: Tensor) -> losses.PreferenceLoss:
        return losses.dpo_loss(x, ref, mask, beta=BETA, loss_type=loss_type, **options, **ours_alpha)

    compare(
        lambda x: ours(x).loss, lambda x: made._compute_loss(lambda **_: outputs(x * mask), batch, False), log_probs
    )
    if divergence == "reverse_kl":  # TRL logs rewards by the log-ratios whatever the divergence
        found, logs = ours(log_probs), made._metrics["eval"]
        for name, rewards in (("chosen", found.chosen_rewards), ("rejected", found.rejected_rewards)):
            assert rewards.mean().item() == pytest.approx(logs[f"rewards/{name}"][-1], rel=1e-5)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("shift", [-0.3, 0.3])
def test_kto(loss_type: str, shift: float) -> None:
    """With a KL above and one below 0."""
    rows = 2 * PAIRS - 1
    log_probs, ref, mask = draw(rows)
    kl_log_probs, _, kl_mask = draw(rows)
    ref_kl = losses.sequence_log_probs(kl_log_probs, kl_mask) - shift
    label = torch.rand(rows) < 0.4
    assert label.any() and not label.all()
    calculated = loss_type == "kto"
    made = trainer(
        KTOTrainer, calculate_KL=calculated, precompute_ref_logps=True, loss_type=loss_type, desirable_weight=1.3,
        undesirable_weight=0.6,
    )  # fmt: skip
    ids = torch.zeros(rows, LENGTH + 1, dtype=torch.long)
    batch = dict(
        input_ids=ids, attention_mask=ids, completion_mask=with_prompt(mask).long(), label=label, ref_KL_logps=ref_kl,
        KL_input_ids=ids + 1, KL_attention_mask=ids, KL_completion_mask=with_prompt(kl_mask).long(),
        ref_logps=ref.sum(1),
    )  # fmt: skip

    def theirs(x: Tensor) -> Tensor:
        of_model = {0: x * mask, 1: kl_log_probs}
        return made._compute_loss(lambda input_ids, **_: outputs(of_model[int(input_ids.max())]), batch, False)

    kl = (losses.sequence_log_probs(kl_log_probs, kl_mask) - ref_kl).mean() if calculated else None
    options = {"beta": BETA, "loss_type": loss_type, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    compare(lambda x: losses.kto_loss(x, ref, mask, label, kl, **options).loss, theirs, log_probs)
    rewards = losses.kto_loss(log_probs, ref, mask, label, kl, **options).rewards
    assert rewards[label].mean().item() == pytest.approx(made._metrics["eval"]["rewards/chosen"][-1], rel=1e-5)
    assert rewards[~label].mean().item() == pytest.approx(made._metrics["eval"]["rewards/rejected"][-1], rel=1e-5)


class Completions:
    """A batch as CPO's and ORPO's trainers take it, of prompts of 3 tokens, and a model that gives its logits."""

    def __init__(self) -> None:
        self.ids, self.vocab_size = torch.randint(0, 17, (2 * PAIRS, LENGTH)), 17
        width = torch.randint(5, LENGTH + 1, (2 * PAIRS, 1))
        width[0] = width[PAIRS] = LENGTH  # else TRL cuts the batch
        self.attended = torch.arange(LENGTH) < width
        self.of_completion = self.attended & (torch.arange(LENGTH) >= 3)
        self.logits = torch.randn(2 * PAIRS, LENGTH, self.vocab_size)
        labels = torch.where(self.of_completion, self.ids, -100)
        fields = {"input_ids": self.ids, "attention_mask": self.attended.long(), "labels": labels}
        self.batch = {
            f"{side}_{name}": x
            for name, value in fields.items()
            for side, x in zip(("chosen", "rejected"), value.chunk(2), strict=True)
        }

    def log_probs(self, logits: Tensor) -> Tensor:
        return logits[:, :-1].log_softmax(-1).gather(2, self.ids[:, 1:, None]).squeeze(2)

    def compare(self, made: Any, ours: Callable[[Tensor, Tensor], losses.PreferenceLoss], *, rewards: bool) -> None:
        logs: dict[str, Any] = {}

        def theirs(logits: Tensor) -> Tensor:
            loss, found = made.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits), self.batch)
            logs.update(found)
            return loss

        mask = self.of_completion[:, 1:]
        compare(lambda logits: ours(self.log_probs(logits), mask).loss, theirs, self.logits)
        found = ours(self.log_probs(self.logits), mask)
        for name, value in (("chosen", found.chosen_rewards), ("rejected", found.rejected_rewards)):
            if rewards:
                assert value.mean().item() == pytest.approx(logs[f"rewards/{name}"], rel=1e-5)


CPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"label_smoothing": 0.1},
    "hinge": {"label_smoothing": 0.0},
    "ipo": {"label_smoothing": 0.0},
    "simpo": {"label_smoothing": 0.2},
}


@pytest.mark.parametrize("loss_type", CPO)
def test_cpo_and_simpo(loss_type: str) -> None:
    simpo, options = loss_type == "simpo", CPO[loss_type]
    made = trainer(
        CPOTrainer, loss_type=loss_type, alpha=0.0, cpo_alpha=0.0 if simpo else 0.7, simpo_gamma=0.9,
        is_encoder_decoder=False, pad_token_id=0, **options,
    )  # fmt: skip

    def ours(log_probs: Tensor, mask: Tensor) -> losses.PreferenceLoss:
        if simpo:
            return losses.simpo_loss(log_probs, mask, beta=BETA, simpo_gamma=0.9, **options)
        return losses.cpo_loss(log_probs, mask, beta=BETA, loss_type=loss_type, cpo_alpha=0.7, **options)

    Completions().compare(made, ours, rewards=loss_type != "ipo")  # TRL logs those of "ipo" by averages


def test_orpo() -> None:
    """TRL counts the prompt in the likelihood."""
    made, batch = trainer(ORPOTrainer, is_encoder_decoder=False, padding_value=0), Completions()
    nll_mask = batch.attended[:, 1:]
    batch.compare(made, lambda x, mask: losses.orpo_loss(x, mask, beta=BETA, nll_mask=nll_mask), rewards=True)


GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"epsilon_high": 0.3, "delta": 1.5},
    "bnpo": {"epsilon": 0.1},
    "dr_grpo": {"max_completion_length": 20},
    "dapo": {"epsilon_high": 0.28, "num_items_in_batch": torch.tensor(77)},
    "cispo": {"epsilon_high": 1.2, "num_items_in_batch": torch.tensor(77)},
    "sapo": {"sapo_temperature_neg": 1.4},
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("beta", "unbiased"), [(0.0, False), (0.2, False), (0.2, True)])
@pytest.mark.parametrize("loss_type", GRPO)
def test_grpo(loss_type: str, beta: float, unbiased: bool, level: str) -> None:
    rows, options = 7, GRPO[loss_type]
    log_probs, old, mask = draw(rows)
    ref, advantages = log_probs + 0.3 * torch.randn(rows, LENGTH), torch.randn(rows)
    if level == "sequence":
        old = old + torch.linspace(-0.5, 0.5, rows).unsqueeze(1)  # whole sequences beyond the bounds
    made = trainer(
        GRPOTrainer, loss_type=loss_type, importance_sampling_level=level, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, epsilon_low=options.get("epsilon", 0.2),
        epsilon_high=options.get("epsilon_high", options.get("epsilon", 0.2)), use_vllm=False,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        max_completion_length=options.get("max_completion_length"),
        args=SimpleNamespace(
            delta=options.get("delta"), use_bias_correction_kl=unbiased, sapo_temperature_pos=1.0,
            sapo_temperature_neg=options.get("sapo_temperature_neg"), steps_per_generation=1,
        ),
    )  # fmt: skip
    made.beta = beta
    ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    batch = dict(
        prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask.long(), advantages=advantages,
        old_per_token_logps=old, ref_per_token_logps=ref, num_items_in_batch=options.get("num_items_in_batch"),
    )  # fmt: skip

    def ours(x: Tensor) -> losses.GRPOLoss:
        return losses.grpo_loss(
            x, advantages, mask, old, ref if beta else None, loss_type=loss_type, beta=beta,
            importance_sampling_level=level, use_bias_correction_kl=unbiased, **options,
        )  # fmt: skip

    def theirs(x: Tensor) -> Tensor:
        made._get_per_token_logps_and_entropies = lambda *_, **__: (x, torch.zeros(rows, LENGTH), None)
        return made._compute_loss(None, batch)

    compare(lambda x: ours(x).loss, theirs, log_probs)
    found, logs = ours(log_probs), made._metrics["eval"]
    for value, name in (
        (found.kl, "kl"), (found.clip_ratio_low, "clip_ratio/low_mean"), (found.clip_ratio, "cispo_clip_ratio"),
        (found.clip_ratio_high, "clip_ratio/high_mean"), (found.clip_ratio, "clip_ratio/region_mean"),
    ):  # fmt: skip
        if name in logs:
            assert value is not None and value.item() == pytest.approx(logs[name][-1], rel=1e-4, abs=1e-7), name
    if found.clip_ratio is not None:
        assert found.clip_ratio > 0


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
def test_gkd(beta: float) -> None:
    student, teacher, hidden_of_teacher = torch.randn(29, 8), torch.randn(29, 12), torch.randn(3, 7, 12)
    mask = torch.rand(3, 7) < 0.6
    labels = torch.where(mask, 1, -100)

    def theirs(x: Tensor) -> Tensor:
        logits = [torch.nn.functional.linear(*pair) for pair in ((x, student), (hidden_of_teacher, teacher))]
        return GKDTrainer.generalized_jsd_loss(*logits, labels, beta=beta, temperature=1.7)

    for memory_budget in (1, 2**20):
        options = {"beta": beta, "temperature": 1.7, "memory_budget": memory_budget}
        compare(
            lambda x, o=options: losses.generalized_jsd_loss(x, student, hidden_of_teacher, teacher, mask, **o),
            theirs, torch.randn(3, 7, 8),
        )  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_distillation_with_all_that_a_head_may_have(beta: float) -> None:
    """Against TRL's own chunks: biases, scales and softcaps of both heads, and the gradient of the student's weight."""
    H, V = 8, 29
    hidden, teacher_hidden, teacher_weight = torch.randn(3, 7, H), torch.randn(3, 7, 12), torch.randn(V, 12)
    mask, bias, teacher_bias = torch.rand(3, 7) < 0.6, torch.randn(V), torch.randn(V)

    def theirs(weight: Tensor) -> Tensor:
        return _chunked_divergence_loss(
            hidden, teacher_hidden, weight, teacher_weight, mask.long(), beta, student_lm_head_bias=bias,
            teacher_lm_head_bias=teacher_bias, student_logit_scale=0.5, teacher_logit_scale=1.5,
            student_final_logit_softcapping=3.0, teacher_final_logit_softcapping=5.0, temperature=1.7,
        )[0]  # fmt: skip

    def ours(weight: Tensor) -> Tensor:
        return losses.generalized_jsd_loss(
            hidden, weight, teacher_hidden, teacher_weight, mask, beta=beta, bias=bias, teacher_bias=teacher_bias,
            logit_scale=0.5, teacher_logit_scale=1.5, softcap=3.0, teacher_softcap=5.0, temperature=1.7,
            memory_budget=4096,
        )  # fmt: skip

    compare(ours, theirs, torch.randn(V, H))
