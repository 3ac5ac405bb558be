"""The objective grpo on several processes: losses, gradients and metrics of one process, samples, and resuming."""

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import losses
from test_parallel_runs import EXACT, check_same, up_to
from test_policy import ending, metrics, recipe_for, rewards, texts, written  # noqa: F401  (fixtures)
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_ranks

import ligermodels as lm
from ligermodels.adapt.lora import lora_layers
from ligermodels.adapt.quantize import quantize
from ligermodels.convert.ranks import Ranks
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.layers.initialization import persistent_tensors, whole_parameters
from ligermodels.layers.quantized import quantized_weights
from ligermodels.layers.sharding import gathered, is_sharded
from ligermodels.training import FineTuningRecipe, dry_run, fine_tune, rollouts
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.prepare_base import prepare_lora
from ligermodels.training.rewards import Reward, Rewards
from ligermodels.training.rollouts import Sampler
from ligermodels.training.sampling_model import SamplingModel

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {
        **{"validation_fraction": 0.3, "evaluate_every": 2, "num_iterations": 2},
        **{"sampling_quantize": "int4", "importance_sampling_clip_max": 1.5},
    },
    "grpo": {"loss_type": "grpo", "mask_truncated_completions": True, "num_iterations": 2, "beta": 0.1},
    "batch": {"scale_rewards": "batch", "loss_type": "dr_grpo", "micro_batch_tokens": None},
    "lora": {"lora_rank": 3, "beta": 0.1, "num_iterations": 2, "importance_sampling_level": "sequence"},
}
"""A micro-batch has one group of completions; of "batch" all groups of a rank."""
PLANS: dict[str, Any] = {"lora": {"replicate": 2}}


def recipes(base: Path, data: Path, functions: Any) -> dict[str, FineTuningRecipe]:
    exact = {**EXACT, "steps": 4, "batch_tokens": 12 * 48, "micro_batch_tokens": 3 * 48, "checkpoint_every": None}
    return {name: recipe_for(base, data, functions, **{**exact, **changes}) for name, changes in SETTINGS.items()}


def fixed_samples(
    model: Any, prompts: Sequence[Sequence[int]], length: int, *, num_return_sequences: int, **options: Any
) -> torch.Tensor:
    """Completions, in place of those that `generate` samples, that depend on the prompt and not on its batch."""
    left = [0] * max(map(len, prompts))
    return torch.tensor(
        [
            left + random.Random(f"{prompt} {number}").choices(range(3, 64), k=length)
            for prompt in prompts
            for number in range(num_return_sequences)
        ]
    )


def fixed_with_log_probs(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = fixed_samples(*arguments, **options)
    return ids, -4 - ids[:, -arguments[2] :].float() / 60


def run_fixed(all_recipes: dict[str, FineTuningRecipe], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "generate", fixed_samples)
        patch.setattr(rollouts, "sample_with_log_probs", fixed_with_log_probs)
        for name, recipe in all_recipes.items():
            assert fine_tune(recipe, folder / name).finished


def on_two_ranks(rank: int, folder: Path, mesh: DeviceMesh, base: Path, data: Path, functions: list[str]) -> None:
    plans = {name: {"parallel": PLANS.get(name, {})} for name in SETTINGS}
    run_fixed({name: r.changed(plans[name]) for name, r in recipes(base, data, functions).items()}, folder)


def all_metrics(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "second", "memory", "mfu", "per_s", "gib")
    return [{k: v for k, v in line.items() if not any(word in k.lower() for word in timed)} for line in lines]


def test_two_ranks_train_as_one(ending: Path, rewards: str, tmp_path: Path) -> None:  # noqa: F811
    """On the same completions: loss, norm of the gradient, all metrics, validation and trained parameters. The last of
    ten prompts leaves a rank without a batch in the evaluation."""
    data = texts(tmp_path / "prompts.jsonl", 10)
    functions = [f"{rewards}:{name}" for name in ("length", "sometimes")]
    in_ranks(2, on_two_ranks, tmp_path / "two", ending, data, functions)
    run_fixed(recipes(ending, data, functions), tmp_path / "one")
    for name in SETTINGS:
        two, one = tmp_path / "two" / name, tmp_path / "one" / name
        if name != "batch":  # the order of a sum in float32 changes its standard deviation
            check_same(two, one)
        for found, wanted in zip(all_metrics(two), all_metrics(one), strict=True):
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)  # float32
        assert len({loss for _, loss, _ in losses(one)}) > 2 and all(norm > 0 for _, _, norm in losses(one)), name
        assert metrics(two, "reward") and metrics(two, "rewards/sometimes/mean")
    assert len(metrics(tmp_path / "two/dapo", "validation_reward")) == 2


# -- the copy that samples ---------------------------------------------------------------------------------------------


def changed(model: lm.CausalLM) -> None:
    """Change all parameters, as an optimizer's step does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.mul_(1.1 + 0.01 * len(name)).add_(0.01)


def loaded(base: Path, recipe: FineTuningRecipe, plan: lm.ParallelPlan, dtype: torch.dtype) -> lm.CausalLM:
    """A sharded model, with LoRA if the recipe says so."""
    model = lm.from_pretrained(base, dtype=dtype, prepare=partial(prepare_lora, recipe), plan=plan)
    torch.manual_seed(3)
    for update in lora_layers(model).values():
        with whole_parameters(update, update.lora_parameters()):
            update.init_weights()
    return model


def whole_copies(rank: int, folder: Path, mesh: DeviceMesh, base: Path, data: Path) -> None:
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(rank))
    for settings in ({}, {"lora_rank": 2}, {"lora_rank": 2, "quantize": "int4"}):
        recipe = recipe_for(base, data, "module:function", **settings)
        plans = [lm.ParallelPlan(), lm.ParallelPlan(replicate=2), lm.ParallelPlan(param_dtype="bfloat16")]
        for plan in plans if not settings else plans[:1]:
            dtype = torch.float32 if plan.param_dtype else torch.float64
            model = loaded(base, recipe, plan, dtype)
            sampling = SamplingModel(model, partial(prepare_lora, recipe))
            for _ in range(2):  # also after an update, and again with memory
                with sampling() as copy:
                    assert not is_sharded(copy) and not copy.training
                    for name, tensor in persistent_tensors(model).items():
                        wanted = gathered(tensor).to(persistent_tensors(copy)[name].dtype)
                        assert torch.equal(persistent_tensors(copy)[name], wanted), name
                    logits = copy(ids, return_logits=True).logits
                    if rank == 0:  # without the other rank: nothing is exchanged
                        copy.generate(ids, max_new_tokens=3 + rank)
                assert all(tensor.is_meta for tensor in copy.parameters())
                assert all(parameter.requires_grad for parameter in model.parameters()) == (not settings)
                if plan.param_dtype:
                    assert copy.dtype == torch.bfloat16 and model.dtype == torch.float32
                else:
                    torch.testing.assert_close(logits, model(ids, return_logits=True).logits, rtol=1e-12, atol=1e-12)
                changed(model)


def rounded_copies(rank: int, folder: Path, mesh: DeviceMesh, base: Path, data: Path) -> None:
    for kind, settings in (("int4", {}), ("float8", {"lora_rank": 2})):
        recipe = recipe_for(base, data, "module:function", **settings)
        rounded = recipe.model_copy(update={"quantize": kind})
        plain = lm.from_pretrained(base, dtype=torch.float32)
        model = loaded(base, recipe, lm.ParallelPlan(), torch.float32)
        changed(plain)
        changed(model)
        with SamplingModel(model, partial(prepare_lora, rounded), quantizes=True)() as copy:
            codes = quantized_weights(copy)
            assert len(codes) > 3 and codes.keys() == quantized_weights(quantize(plain, kind)).keys()
            for name, wanted in quantized_weights(plain).items():
                assert torch.equal(codes[name].dense(torch.float32), wanted.dense(torch.float32)), name
            found, tensors = persistent_tensors(copy), persistent_tensors(model)
            lora = [name for name in found if ".update." in name]
            assert bool(lora) == bool(settings)
            for name in lora:
                assert torch.equal(found[name], gathered(tensors[name]))
        assert not quantized_weights(model)


def test_a_sharded_model_samples_by_a_rounded_copy(base: Path, tmp_path: Path) -> None:
    in_ranks(2, rounded_copies, tmp_path / "two", base, texts(tmp_path / "prompts.jsonl"))


def test_a_sharded_model_samples_by_a_whole_copy(base: Path, tmp_path: Path) -> None:
    in_ranks(2, whole_copies, tmp_path / "two", base, texts(tmp_path / "prompts.jsonl"))


# -- runs that sample --------------------------------------------------------------------------------------------------


def sampled_runs(rank: int, folder: Path, mesh: DeviceMesh, recipe: FineTuningRecipe) -> None:
    drawn = list[list[list[int]]]()

    def recorded(*arguments: Any, call: Any = Sampler.__call__) -> Any:
        result = call(*arguments)
        drawn.append([sample.completion for sample in result.samples])
        return result

    Sampler.__call__ = recorded  # type: ignore[method-assign]
    assert fine_tune(recipe, folder / "run").finished
    ours, theirs = Ranks.of_group().gather(drawn)
    assert len(ours) == len(theirs) > 3
    assert ours[0] != theirs[0] and len({str(each) for each in ours}) == len(ours)
    if rank:
        Rewards.__call__ = lambda *_: Reward._checked(Reward(recipe.reward[0]), 1.0, 6)  # type: ignore[method-assign]
    error = (InputError, "^reward: .* must return a list") if rank else (CheckpointError, "^reward: rank 1 failed: Inp")
    with pytest.raises(error[0], match=error[1]):
        fine_tune(recipe, folder / "failing")


def resumed(rank: int, folder: Path, mesh: DeviceMesh, recipe: FineTuningRecipe) -> None:
    assert fine_tune(recipe, folder, resume=True, overwrite=True).finished


def test_ranks_sample_their_own_prompts(base: Path, rewards: str, tmp_path: Path) -> None:  # noqa: F811
    """All records have the same prompt: only the random numbers differ. An error of one rank ends all, and a run that
    resumes with as many ranks continues with the same samples."""
    data = written(tmp_path / "prompts.jsonl", [{"prompt": "Hello there"}] * 12)
    recipe = recipe_for(base, data, f"{rewards}:length", dtype="float64", validation_fraction=0.2, evaluate_every=3)
    in_ranks(2, sampled_runs, tmp_path / "two", recipe)
    in_ranks(2, up_to, tmp_path / "stopped", recipe, 1, 0)
    in_ranks(2, resumed, tmp_path / "stopped", recipe)
    for out in ("stopped", "two/run"):
        (tmp_path / out / "rendezvous").unlink(missing_ok=True)
    check_same(tmp_path / "stopped", tmp_path / "two/run", rel=0)


def up_to_fixed(rank: int, folder: Path, mesh: DeviceMesh, *arguments: Any) -> None:
    rollouts.generate = fixed_samples  # type: ignore[assignment]
    up_to(rank, folder, mesh, *arguments)


def test_a_run_goes_on_with_other_numbers_of_ranks(ending: Path, rewards: str, tmp_path: Path) -> None:  # noqa: F811
    """Between two steps on the same completions, which are then divided anew."""
    data, out = texts(tmp_path / "prompts.jsonl"), tmp_path / "moved"
    recipe = recipes(ending, data, f"{rewards}:length")["grpo"]
    recipe = recipe.changed({"num_iterations": 8, "steps": 9, "checkpoint_every": 1})
    in_ranks(2, up_to_fixed, out, recipe, 1, 0)
    (middle,) = Checkpoints(out / "checkpoints").steps()[-1:]
    in_ranks(4, up_to_fixed, out, recipe.changed({"parallel": {"replicate": 2}}), middle + 1, middle)
    (last,) = Checkpoints(out / "checkpoints").steps()[-1:]
    assert middle < last < 8
    (out / "rendezvous").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "generate", fixed_samples)
        assert fine_tune(recipe, out, resume=True).finished
        fine_tune(recipe, tmp_path / "whole")
    check_same(out, tmp_path / "whole")


def test_plans_are_refused_by_name(base: Path, rewards: str, tmp_path: Path) -> None:  # noqa: F811
    """Before the model, the data and the reward functions are looked for."""
    recipe = recipe_for(tmp_path / "nowhere", tmp_path / "none.jsonl", "no_module:function")
    for name in ("tensor", "context", "expert"):
        with pytest.raises(ConfigError, match=f"^parallel.{name}: is not supported with the objective grpo; use shard"):
            dry_run(recipe.changed({"parallel": {name: 2}}), gpus=2)
    with pytest.raises(ConfigError, match="is 4 sequences, which 3 ranks cannot divide; make it a multiple of 432"):
        dry_run(recipe_for(base, texts(tmp_path / "p.jsonl"), f"{rewards}:share", micro_batch_tokens=None), gpus=3)
