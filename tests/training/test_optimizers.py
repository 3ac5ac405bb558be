"""Every optimizer of a recipe: 8-bit states, CUDA graphs, steps in the backward pass, and runs that are resumed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from pairwise import by_turns
from runs import losses, recipe_for
from safetensors.torch import load_file
from torch import Tensor, nn
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.arguments import OptimizerName
from ligermodels.errors import ConfigError, GraphWarning, InputError
from ligermodels.training import (
    Console,
    FineTuningRecipe,
    FusedAdamW,
    Muon,
    adamw,
    dry_run,
    fine_tune,
    graph_step,
    hidden_matrices,
)
from ligermodels.training.folder import RECIPE
from ligermodels.training.optimizer import optimizer_named
from ligermodels.training.parameter_groups import parameter_groups
from ligermodels.training.step import EagerStep

pytestmark = pytest.mark.usefixtures("one_thread")
OURS = ("adamw", "adamw8bit", "muon", "muon8bit")


def model_of(name: str = "llama-2", dtype: torch.dtype = torch.bfloat16) -> lm.CausalLM:
    torch.manual_seed(0)
    one_layer = {"num_hidden_layers": 1} if name == "llama-2" else {}
    return lm.from_config({**CONFIGS[name], **one_layer}, dtype=dtype)


def optimizer_of(name: OptimizerName, model: nn.Module, lr: float = 1e-2, **options: Any) -> Any:
    groups = parameter_groups([(model.parameters(), lr)], 0.1)
    options = {"betas": (0.9, 0.95), "rounding": "stochastic", "seed": 3, **options}
    return optimizer_named(name, groups, model=model, **options)


def ids(step: int, size: int = 12) -> Tensor:
    return torch.randint(3, 131, (2, size), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        loss = model(ids(step), labels=ids(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("name", ["adamw8bit", "muon8bit"])
def test_states_have_eight_bits(name: OptimizerName) -> None:
    """Of matrices: codes, and a float32 for each 256 elements of a row; of vectors the dtype of the parameter."""
    model = model_of("qwen3_moe")
    optimizer = optimizer_of(name, model)
    train(model, optimizer, range(1))
    hidden = hidden_matrices(model) if name == "muon8bit" else {}
    for p in model.parameters():
        found = {key: (x.dtype, tuple(x.shape)) for key, x in optimizer.state[p].items() if key != "step"}
        keys = ["momentum_m5"] if p in hidden else ["exp_avg", "exp_avg_sq"]
        if p.ndim == 1:
            assert found == {key: (torch.bfloat16, tuple(p.shape)) for key in keys}
        else:
            scales = (*p.shape[:-1], -(-p.shape[-1] // 256))
            assert found == {f"{key}_codes": (torch.uint8, tuple(p.shape)) for key in keys} | {
                f"{key}_scales": (torch.float32, scales) for key in keys
            }


@pytest.mark.parametrize("name", OURS)
def test_a_state_dict_resumes_bit_for_bit(name: OptimizerName) -> None:
    """Also in a model of another dtype than the states have, to which torch would cast them; and a copy."""
    model = model_of()
    optimizer = optimizer_of(name, model)
    train(model, optimizer, range(2))
    other = model_of()
    other.load_state_dict(model.state_dict())
    again = optimizer_of(name, other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    both = copy.deepcopy((model, optimizer))  # a copy of the optimizer has copies of the parameters
    wanted = train(model, optimizer, range(2, 5))
    assert train(other, again, range(2, 5)) == train(*both, range(2, 5)) == wanted
    check_equal(model, other)
    for a, b in zip(optimizer.state_dict()["state"].values(), again.state_dict()["state"].values(), strict=True):
        assert {key: x.dtype for key, x in a.items()} == {key: x.dtype for key, x in b.items()}


@pytest.mark.parametrize(("name", "number"), by_turns(OURS, [int, float]))
def test_numbers_of_steps_may_be_plain_numbers(name: OptimizerName, number: type) -> None:
    """As in checkpoints of torch before 1.12."""
    model = model_of()
    optimizer = optimizer_of(name, model)
    train(model, optimizer, range(2))
    state_dict = copy.deepcopy(optimizer.state_dict())
    wanted = train(*copy.deepcopy((model, optimizer)), range(2, 5))
    for state in state_dict["state"].values():
        state["step"] = number(state["step"])
    again = optimizer_of(name, model)
    again.load_state_dict(state_dict)
    assert train(model, again, range(2, 5)) == wanted
    assert all(isinstance(state["step"], torch.Tensor) for state in again.state_dict()["state"].values())


@pytest.mark.parametrize("name", OURS)
def test_a_compiled_step(name: OptimizerName) -> None:
    """Alone and within a function it is the step, without a graph for each parameter."""
    plain, compiled, whole = model_of(), model_of(), model_of()
    train(plain, optimizer_of(name, plain), range(2))
    torch._dynamo.reset()
    counts = torch._dynamo.testing.CompileCounter()
    optimizer = optimizer_of(name, compiled)
    optimizer.step = torch.compile(optimizer.step, backend=counts)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer_of(name, compiled), factor=1)
    train(compiled, optimizer, range(2))
    assert counts.frame_count == 0 and schedule.get_last_lr()
    within = optimizer_of(name, whole)
    step = torch.compile(lambda: within.step(), backend=counts)
    for i in range(2):
        whole(ids(i), labels=ids(i)).loss.backward()
        step()
        within.zero_grad()
    assert counts.op_count == 0
    for other in (compiled, whole):
        assert all(torch.equal(x, y) for x, y in zip(plain.parameters(), other.parameters(), strict=True))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="its kernels are compiled"):
        torch.compile(within.step, fullgraph=True)()


@pytest.mark.parametrize("name", OURS)
def test_hooks_change_the_state_that_is_loaded(name: OptimizerName) -> None:
    """A state dict that is only valid after the hook; 8-bit codes are the hook's."""
    model, other = model_of(), model_of()
    optimizer, again = optimizer_of(name, model), optimizer_of(name, other)
    train(model, optimizer, range(1))
    first = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(1, 2))
    again.register_load_state_dict_pre_hook(lambda _, packed: packed["inner"])
    again.load_state_dict({"inner": first, "state": optimizer.state_dict()["state"]})
    for index, state in again.state_dict()["state"].items():
        assert all(torch.equal(value, first["state"][index][key]) for key, value in state.items())
    with pytest.raises(InputError, match="state_dict: must be a state_dict"):
        again.load_state_dict({"inner": {"state": {}}})
    again.load_state_dict({"inner": first})


def test_momentum_with_the_codes_of_an_earlier_version_is_refused() -> None:
    model = model_of()
    optimizer = optimizer_of("muon8bit", model)
    train(model, optimizer, range(1))
    saved, before = copy.deepcopy(optimizer.state_dict()), str(optimizer.state_dict())
    for state in saved["state"].values():
        for part in ("codes", "scales"):
            if f"momentum_m5_{part}" in state:
                state[f"momentum_buffer_{part}"] = state.pop(f"momentum_m5_{part}")
    with pytest.raises(InputError, match=r"momentum_buffer_codes: .*codes of an earlier version.*start a new one"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == before  # nothing was loaded


@pytest.mark.parametrize("names", [("muon", "muon8bit"), ("muon8bit", "muon")], ids=" to ".join)
def test_states_keep_their_bits_in_the_other_optimizer(names: tuple[OptimizerName, OptimizerName]) -> None:
    model = model_of()
    optimizer = optimizer_of(names[0], model)
    train(model, optimizer, range(2))
    other = copy.deepcopy(model)
    again = optimizer_of(names[1], other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, again, range(2, 4)) == train(model, optimizer, range(2, 4))


def test_torchs_adamw_does_not_take_codes_for_moments() -> None:
    model = model_of()
    optimizer = optimizer_of("adamw8bit", model)
    train(model, optimizer, range(1))
    theirs = torch.optim.AdamW(model.parameters())
    state = optimizer.state_dict()
    state["param_groups"] = [{**theirs.state_dict()["param_groups"][0], "params": list(range(len(state["state"])))}]
    theirs.load_state_dict(state)
    with pytest.raises(KeyError, match="exp_avg"):
        train(model, theirs, range(1))


@pytest.mark.parametrize("name", OURS)
def test_steps_in_the_backward_pass(name: OptimizerName) -> None:
    models = [model_of(), model_of()]
    optimizers = [optimizer_of(name, model) for model in models]
    optimizers[1].step_in_backward()
    assert train(models[0], optimizers[0], range(3)) == train(models[1], optimizers[1], range(3))
    check_equal(*models)


@pytest.mark.parametrize("name", ["adamw8bit", "muon8bit"])
def test_training_goes_as_with_states_of_more_bits(name: OptimizerName) -> None:
    """The loss of a text that is learnt by heart falls as with states in the dtype of the parameters."""

    def learn(name: OptimizerName) -> list[float]:
        model = model_of(dtype=torch.float32)
        optimizer = optimizer_of(name, model, lr=1e-2)
        found = []
        for _ in range(15):
            loss = model(ids(0), labels=ids(0)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    wanted, found = learn(name.removesuffix("8bit")), learn(name)  # type: ignore[arg-type]
    assert wanted[0] == found[0] > 4 and wanted[-1] < 0.5 * wanted[0]
    assert found[-1] == pytest.approx(wanted[-1], abs=0.05 * wanted[0])


# -- CUDA graphs -------------------------------------------------------------------------------------------------------

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=(pytest.mark.gpu, pytest.mark.kernels))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw8bit", "muon", "muon8bit"])
def test_graphs_are_bit_for_bit_the_steps_without(name: OptimizerName, device: str) -> None:
    ends = []
    for graphed in (False, True):
        model = model_of().to(device)
        optimizer = optimizer_of(name, model)
        eager = EagerStep(model, optimizer, 1.0)
        take: Callable[..., Any] = graph_step(model, optimizer) if graphed else eager
        for step in range(4):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            batch = {"input_ids": ids(step).to(device), "labels": ids(step).to(device)}
            options = {"num_items_in_batch": torch.tensor(22, device=device)}
            take([batch], **options) if graphed else take([batch], options)
        ends.append(model)
    assert not graphed or (take._graphs and not take._is_off)  # type: ignore[attr-defined]
    check_equal(*ends)


class TensorSGD(torch.optim.SGD):
    """An optimizer of a user's own that fulfils the contract: its learning rate is in a tensor."""

    rate: Tensor | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                rate = torch.tensor(group["lr"]) if self.rate is None else self.rate
                p.data -= rate * p.grad

    def recording_refusal(self) -> str:
        return "it is Sunday" if self.param_groups[0]["lr"] == 0 else ""

    def recording(self) -> Any:
        optimizer = self

        class Numbers:
            rate = torch.zeros(())

            def advance(self) -> None:
                self.rate.fill_(optimizer.param_groups[0]["lr"])

            def __enter__(self) -> None:
                optimizer.rate = self.rate

            def __exit__(self, *_: object) -> None:
                optimizer.rate = None

        return Numbers()


def test_an_optimizer_that_fulfils_the_contract_is_recorded() -> None:
    ends = []
    for graphed in (False, True):
        model = model_of(dtype=torch.float32)
        optimizer = TensorSGD(model.parameters(), lr=0.1)
        take: Any = graph_step(model, optimizer) if graphed else EagerStep(model, optimizer, 1.0)
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            batch = {"input_ids": ids(step), "labels": ids(step)}
            take([batch]) if graphed else take([batch], {})
        ends.append(model)
    assert len(take._graphs) == 1
    check_equal(*ends)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.warns(GraphWarning, match="it is Sunday"):
        graph_step(model, optimizer)([batch])


# -- runs --------------------------------------------------------------------------------------------------------------


def recipe_of(base: Path, data: Path, name: str, **changes: Any) -> FineTuningRecipe:
    settings = recipe_for(base, data, optimizer=name, dtype="bfloat16", evaluate_every=None, steps=4).settings()
    del settings["max_grad_norm"]
    recipe = FineTuningRecipe(**{key: value for key, value in settings.items() if key in FineTuningRecipe.model_fields})
    return recipe.changed({"schedule": "constant", "checkpoint_every": 2, **changes})


IN_BACKWARD = {"optimizer_in_bwd": True, "micro_batch_tokens": None}


@pytest.mark.parametrize(
    ("name", "changes"), [("adamw8bit", IN_BACKWARD), ("muon8bit", {})], ids=["in the backward pass", "after"]
)
def test_runs_resume_bit_for_bit(base: Path, data: Path, tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    recipe = recipe_of(base, data, name, **changes)
    said: list[str] = []
    fine_tune(recipe, tmp_path / "whole", console=Console(said.append))
    fine_tune(recipe.changed({"steps": 2}), tmp_path / "out")
    fine_tune(recipe, tmp_path / "out", resume=True)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole") and len(losses(tmp_path / "out")) == 4
    if changes:
        assert f"{name}, in the backward pass without clipping: learning rate 0.005, schedule constant" in said
        plain = recipe.changed({"optimizer_in_bwd": False, "max_grad_norm": None})
        fine_tune(plain.changed({"steps": 2}), tmp_path / "plain")
        fine_tune(recipe, tmp_path / "plain", resume=True)  # the setting may change
        assert losses(tmp_path / "plain") == losses(tmp_path / "whole")
        weights = [load_file(tmp_path / out / "model.safetensors") for out in ("whole", "out", "plain")]
        assert all(torch.equal(each[key], tensor) for key, tensor in weights[0].items() for each in weights)


def test_a_run_with_clipping_is_not_advised_to_resume_without(base: Path, data: Path, tmp_path: Path) -> None:
    """Each message advises what the next one allows: the setting that was given is the one to leave out."""
    recipe, out = recipe_of(base, data, "adamw", steps=1, micro_batch_tokens=None), tmp_path / "out"
    fine_tune(recipe, out)
    whole = FineTuningRecipe.read(out / RECIPE)  # as the command reads it
    with pytest.raises(
        ConfigError, match=r"known; leave optimizer_in_bwd out, or start a run with max_grad_norm: null"
    ):
        fine_tune(whole.changed({"optimizer_in_bwd": True}), out, resume=True)
    with pytest.raises(
        ConfigError, match=r"max_grad_norm was 1\.0, is None; give the value that it had, or start over"
    ):
        fine_tune(recipe.changed({"optimizer_in_bwd": True}), out, resume=True)
    with pytest.raises(ConfigError, match=r"max_grad_norm was 1\.0, is None; leave it out, or start over"):
        fine_tune(recipe.changed({"max_grad_norm": None}), out, resume=True)


@pytest.mark.parametrize(
    ("changes", "gpus", "message"),
    [
        ({"max_grad_norm": 0.5}, 1, "max_grad_norm: is 0.5, and optimizer_in_bwd .*max_grad_norm: null"),
        ({"micro_batch_tokens": 32}, 1, "micro_batch_tokens: makes 2 micro-batches per step, and optimizer_in_bwd"),
        ({"optimizer": "adafactor"}, 1, r"optimizer: adafactor has no updates in the backward pass \(optimizer_in_bwd"),
        ({"optimizer": "muon"}, 2, r"optimizer: muon has no updates of sharded parameters .*\(optimizer_in_bwd"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(
    base: Path, data: Path, changes: dict[str, Any], gpus: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dry_run(recipe_of(base, data, "adamw", **{**IN_BACKWARD, **changes}), gpus=gpus)


def test_clipping_is_the_default_where_it_can_be() -> None:
    recipe = FineTuningRecipe(optimizer_in_bwd=True)
    assert recipe.max_grad_norm is None and recipe.changed({"steps": 3}).max_grad_norm is None
    assert recipe.changed({"optimizer_in_bwd": False}).max_grad_norm == 1.0


def test_adamw_rounds_as_it_is_told() -> None:
    """With a tiny learning rate torch's rounding to the nearest number loses the update, and stochastic rounding
    applies it on average."""
    changed = {}
    options: list[dict[str, Any]] = [{"rounding": "nearest"}, {"rounding": "stochastic"}]
    for each in options:
        p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        adamw([p], 1e-3, weight_decay=0.0, **each).step()
        changed[each["rounding"]] = int((p != 1).sum())
    assert changed["nearest"] == 0 and 0 < changed["stochastic"] < p.numel()


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_sparse_gradient_is_refused(in_backward: bool) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = FusedAdamW(embedding.parameters())
    if in_backward:
        optimizer.step_in_backward()
    with pytest.raises(InputError, match=r"of shape \(10, 4\) is sparse, which FusedAdamW does not implement"):
        embedding(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


def test_bad_arguments() -> None:
    p = nn.Parameter(torch.zeros(4, 4))
    for make in (
        lambda: FusedAdamW([p], state_bits=4),  # type: ignore[arg-type]
        lambda: Muon([p], matrices={}, state_bits=4),  # type: ignore[arg-type]
        lambda: adamw([p], 1.0, state_bits=16),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match="state_bits: must be 8, or None"):
            make()
