"""Whole steps as CUDA graphs: bit for bit the steps of the loop without them; and what is said where there are none."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from zoo import CONFIGS
from zoo import LLAMA as BASE

import ligermodels as lm
from ligermodels.data.batches import Batch
from ligermodels.data.documents import TokenDocuments
from ligermodels.data.packing import PackedBatches
from ligermodels.errors import GraphWarning, InputError
from ligermodels.ops.runtime.dispatch import is_recording
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.joint import JointMedusa
from ligermodels.training import FusedAdamW, StepMetrics, cuda_graph, graph_step, train, warmup_cosine
from ligermodels.training.cuda_graph import GraphStep, pays
from ligermodels.training.step import EagerStep

QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_attention_heads": 32, "head_dim": 128,
}  # fmt: skip
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=(pytest.mark.gpu, pytest.mark.kernels))]
"""On a CPU the recorded function runs itself, on the same tensors at fixed addresses."""


def llama(**changes: Any) -> lm.CausalLM:
    config = {**BASE, "model_type": "llama", "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96}
    sizes = {"num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
    return lm.from_config({**config, **sizes, **changes}, dtype=torch.bfloat16)


def lora() -> lm.CausalLM:
    return lm.add_lora(llama(), r=4, lora_dropout=0.25)


def medusa() -> JointMedusa:
    return JointMedusa(lm.MedusaModel.from_base(llama(), num_heads=2))


def checkpointed() -> lm.CausalLM:
    model = llama()
    model.activation_checkpointing = "selective"
    return model


def mixture() -> lm.CausalLM:
    sizes = {
        "vocab_size": 160,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
    }  # of a grouped GEMM, which does not wait
    layers = {"num_hidden_layers": 2, "mlp_only_layers": []}
    return lm.from_config({**CONFIGS["qwen3_moe"], **sizes, **layers}, dtype=torch.bfloat16)


def recurrent() -> lm.CausalLM:
    layers = {"num_hidden_layers": 2, "full_attention_interval": 2}
    return lm.from_config({**CONFIGS["qwen3_5_text"], "vocab_size": 160, **layers}, dtype=torch.bfloat16)


def eagle() -> lm.Eagle3Model:
    return lm.Eagle3Model.from_base(llama(), 3, vocabulary=DraftVocabulary(torch.arange(3, 131), 160))


def mtp() -> lm.MTPModel:
    return lm.MTPModel.from_base(recurrent(), 2)


def dspark() -> lm.DSparkModel:
    return lm.DSparkModel.from_base(llama(), 4, num_layers=1, num_anchors=16, markov_rank=16)


MODELS: dict[str, Callable[[], Any]] = {
    "full": llama,
    "lora": lora,
    "medusa": medusa,
    "checkpointed": checkpointed,
    "mixture": mixture,
    "recurrent": recurrent,
    "eagle": eagle,
    "dspark": dspark,
    "mtp": mtp,
}


def batches(seq_len: int = 128) -> Iterator[Batch]:
    """Packed rows, of which every token but the last of a document has a target: more than 97 % of them, below which
    the loop without a graph skips rows."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(400, 1200, (40,), generator=generator).tolist()
    documents = TokenDocuments(torch.randint(3, 131, (n,), generator=generator).tolist() for n in lengths)
    return iter(PackedBatches(documents, seq_len=seq_len, batch_size=2, seed=0))


def run(
    kind: str, device: str, cuda_graph: str, *, in_backward: bool = False, **options: Any
) -> tuple[list[StepMetrics], Any, FusedAdamW]:
    torch.manual_seed(3)
    model = MODELS[kind]().to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = FusedAdamW(parameters, lr=3e-3, rounding="stochastic", seed=5)
    if in_backward:
        optimizer.step_in_backward()
    reports: list[StepMetrics] = []
    torch.manual_seed(4)
    train(
        model,
        batches(256 if kind in ("medusa", "mtp") else 128),  # the last head has no target for three tokens of a row
        steps=3,
        optimizer=optimizer,
        schedule=warmup_cosine(optimizer, 3, warmup_steps=1),
        on_step=reports.append,
        report_every=1,
        cuda_graph=cuda_graph,  # type: ignore[arg-type]
        loss_options=(lambda step: {"heads_loss_weight": 0.1 * step}) if kind == "medusa" else None,
        **{"accumulation_steps": 2, **options},  # type: ignore[arg-type]
    )
    return reports, model, optimizer


def states(optimizer: FusedAdamW) -> dict[str, torch.Tensor]:
    every = optimizer.state_dict()["state"]
    return {f"{index}.{key}": value for index, state in every.items() for key, value in state.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MODELS)
def test_steps_are_bit_for_bit_those_without_a_graph(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(kind, device, "off")
    if device == "cpu":
        monkeypatch.setattr("ligermodels.training.loop.make_step", lambda step, *_: GraphStep(step))
    check_same(plain, run(kind, device, "on"), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["medusa", "checkpointed", "mixture"])
def test_updates_in_the_backward_pass_are_bit_for_bit_those_after_it(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a graph, and in a graph."""
    options: Any = {"accumulation_steps": 1, "max_grad_norm": None}
    plain, inside = (run(kind, device, "off", in_backward=each, **options) for each in (False, True))
    check_same(plain, inside, device, norm_tolerance=1e-2)  # torch sums the squares of all tensors in another order
    if device == "cpu":
        monkeypatch.setattr("ligermodels.training.loop.make_step", lambda step, *_: GraphStep(step))
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphWarning)
        check_same(inside, run(kind, device, "on", in_backward=True, **options), device)


def test_what_needs_all_gradients_is_refused_with_updates_in_the_backward_pass() -> None:
    options: Any = {"in_backward": True}
    with pytest.raises(InputError, match=r"max_grad_norm: is 1.0, .*step_in_backward"):
        run("full", "cpu", "off", accumulation_steps=1, **options)
    with pytest.raises(InputError, match=r"accumulation_steps: there are 2 micro-batches, .*step_in_backward"):
        run("full", "cpu", "off", max_grad_norm=None, **options)
    model = llama()
    optimizer = FusedAdamW(model.parameters())
    for handle in optimizer.step_in_backward():
        handle.remove()
    graph_step(model, optimizer, max_grad_norm=1.0)([next(batches())])  # the hooks are gone


def check_same(plain: Any, graphed: Any, device: str, *, norm_tolerance: float = 0.0) -> None:
    for wanted, found in zip(plain[0], graphed[0], strict=True):
        for name in ("step", "loss", "grad_norm", "learning_rate", "targets"):
            tolerance = norm_tolerance if name == "grad_norm" else 0.0
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=tolerance), (name, found, wanted)
    wanted, found = ({**dict(each[1].named_parameters()), **states(each[2])} for each in (plain, graphed))
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        # On a CPU, steps of float32 parameters without a graph are torch's own.
        bits = torch.equal if device == "cuda" or tensor.dtype == torch.bfloat16 else torch.allclose
        assert bits(tensor, found[name]) and found[name].grad is None, name


def test_documents_of_other_numbers_share_a_graph() -> None:
    model = llama()
    step = graph_step(model, FusedAdamW(model.parameters()))
    numbers = set()
    for batch in islice(batches(), 6):
        numbers.add(len(batch["cu_seqlens"]))
        step([batch], num_items_in_batch=int(model.num_targets(batch["labels"], cu_seqlens=batch["cu_seqlens"])))
    assert len(numbers) > 1 and len(step._graphs) == 1


def test_kernels_are_compiled_for_the_tokens_that_a_graph_computes() -> None:
    """All tokens of the row, also those without a target: here the last of each short document, and half of the rest.

    A step without a graph leaves them out of the head's products, which then have another shape."""
    model = llama()
    documents = TokenDocuments([[3, 4, 5, *range(6, 6 + n)] for n in range(3)] * 20)
    batch = next(PackedBatches(documents, seq_len=64, batch_size=2))
    batch["labels"][:, ::2] = -100
    counts: list[int | None] = []
    watch = lambda module, args, options: counts.append(options["num_targets"])  # noqa: E731
    model.head.register_forward_pre_hook(watch, with_kwargs=True)
    model(**batch)
    step = EagerStep(model, FusedAdamW(model.parameters()))
    cuda_graph._dry_run(step, [batch], {})
    computed, compiled = counts
    assert computed is not None and computed < batch["labels"].numel() and compiled is None
    assert not is_recording() and all(parameter.grad is None for parameter in model.parameters())


def test_rows_of_other_lengths_share_a_graph() -> None:
    """Padding has no targets, and changes no loss and no gradient beyond rounding."""
    torch.manual_seed(3)
    models = [llama(), llama()]
    models[1].load_state_dict(models[0].state_dict())
    step = graph_step(models[0], FusedAdamW(models[0].parameters()))
    eager = EagerStep(models[1], FusedAdamW(models[1].parameters()), 1.0)
    for batch, length in zip(batches(), (256, 250, 253, 255), strict=False):
        cut = {name: batch[name][:, :length] for name in ("input_ids", "labels")}
        cut["cu_seqlens"] = torch.cat([batch["cu_seqlens"][batch["cu_seqlens"] < length], torch.tensor([length])]).int()
        items = {"num_items_in_batch": models[0].num_targets(cut["labels"], cu_seqlens=cut["cu_seqlens"])}
        found, wanted = step([cut], **items), eager([cut], items)
        torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-4, atol=0)
        torch.testing.assert_close(found.grad_norm, wanted.grad_norm, rtol=2e-2, atol=0)
    assert len(step._graphs) == 1


def refused(kind: str) -> tuple[Any, FusedAdamW, dict[str, torch.Tensor]]:
    model = lora() if kind == "dropout" else llama()
    batch: dict[str, torch.Tensor] = dict(next(batches()))
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "an input requires a gradient":
        del batch["cu_seqlens"]
        batch["inputs_embeds"] = torch.ones(*batch.pop("input_ids").shape, 64, dtype=torch.bfloat16).requires_grad_()
    if kind == "the optimizer does not have all parameters":
        parameters = [*model.decoder.blocks.parameters()]
    optimizer: Any = torch.optim.SGD(parameters) if kind == "SGD" else FusedAdamW(parameters)
    if kind in ("dropout", "offload"):
        model.activation_checkpointing = "offload" if kind == "offload" else "full"
    if kind == "attention_mask":
        del batch["cu_seqlens"]
        batch["attention_mask"] = torch.ones_like(batch["labels"])
    return model, optimizer, batch


@pytest.mark.parametrize(
    "kind",
    [
        "SGD", "dropout", "attention_mask", "offload", "an input requires a gradient",
        "the optimizer does not have all parameters",
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_said_once_and_runs(kind: str) -> None:
    model, optimizer, batch = refused(kind)
    before = [p.detach().clone() for p in model.parameters()]
    step = graph_step(model, optimizer)
    with pytest.warns(GraphWarning, match=f"steps run without a CUDA graph: .*{kind}"):
        step([batch])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step([batch])
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_changes_after_recording_counts() -> None:
    """Loaded states, frozen parameters, other betas, and copies of the optimizer: as in steps without a graph."""
    ends = []
    for graphed in (False, True):
        torch.manual_seed(3)
        model = llama()
        optimizer = FusedAdamW(model.parameters(), lr=1e-2, rounding="stochastic")
        eager = EagerStep(model, optimizer, 1.0)
        step = GraphStep(eager) if graphed else lambda parts, eager=eager, **options: eager(parts, options)
        for index, batch in enumerate(islice(batches(), 5)):
            if index == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if index == 2:
                optimizer.param_groups[0]["betas"] = (0.5, 0.9)
            if index == 3:
                model.decoder.embed.weight.requires_grad_(False)
            step([batch], z_loss=1e-4)
        ends.append(dict(model.named_parameters()))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


MATMUL = {"allow_tf32": True, "fp32_precision": "tf32"}
"""Settings of float32 matrix products -> another value. After the second, which torch 2.8 lacks, newer releases refuse
to read what `torch.set_float32_matmul_precision` sets."""


def changed(setting: str, model: lm.CausalLM, optimizer: FusedAdamW, patched: pytest.MonkeyPatch) -> None:
    if setting == "dropout":
        update: Any = model.decoder.blocks[0].mlp.down.update  # type: ignore[union-attr]
        update.dropout = 0.5
    elif setting == "z loss":
        model.router_z_loss_coef = 0.1
    elif setting == "softcap":
        model.head.config = replace(model.head.config, softcap=7.0)
    elif setting == "betas":
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    elif setting == "batch invariance":
        patched.setattr(lm.ops.set_batch_invariant, "value", True)  # until the end of the test
    elif setting == "forward":
        patched.setattr(model.decoder.blocks[0], "forward", model.decoder.blocks[0].forward)  # as accelerate's hooks
    elif setting in MATMUL:
        setattr(torch.backends.cuda.matmul, setting, MATMUL[setting])
    else:
        owners = {"module": model.decoder.blocks[0], "parameter": optimizer.param_groups[0]["params"][0]}
        owner, _, register = setting.partition(".")
        getattr({**owners, "optimizer": optimizer}[owner], register)(lambda *_: None)


@pytest.fixture
def default_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")  # of all settings in MATMUL


@pytest.mark.usefixtures("default_precision")
@pytest.mark.parametrize(
    "setting",
    [
        *("dropout", "z loss", "softcap", "betas", "module.register_forward_hook", "module.register_forward_pre_hook"),
        *("module.register_full_backward_hook", "parameter.register_hook", "optimizer.register_step_post_hook"),
        *("parameter.register_post_accumulate_grad_hook", "batch invariance", "forward"),
        *(name for name in MATMUL if hasattr(torch.backends.cuda.matmul, name)),
    ],
)
@pytest.mark.filterwarnings("error::ligermodels.errors.GraphWarning")
def test_settings_that_change_after_recording_record_again(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; a graph that was recorded with the former settings would go on with them. The step with the change has no
    graph: what changes in each step would be recorded in each."""
    recorded = counted(monkeypatch)
    model = lora()
    optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step, batch = GraphStep(EagerStep(model, optimizer)), next(batches())
    for index in range(5):
        if index == 2:
            changed(setting, model, optimizer, monkeypatch)
        step([batch])
        assert len(recorded) == 1 + index // 3


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps that have been recorded since."""
    recorded: list[Any] = []

    class Counted(cuda_graph._RecordedStep):
        def __init__(self, *args: Any) -> None:
            recorded.append(self)
            super().__init__(*args)

    monkeypatch.setattr(cuda_graph, "_RecordedStep", Counted)
    return recorded


def test_what_changes_in_each_step_is_not_recorded_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Betas by torch's OneCycleLR: the steps have no graph until they stay, and are those without one."""
    recorded, ends = counted(monkeypatch), []
    for graphed in (False, True):
        torch.manual_seed(3)
        model = llama()
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=5)
        eager = EagerStep(model, optimizer, 1.0)
        step = GraphStep(eager) if graphed else lambda parts, eager=eager, **options: eager(parts, options)
        for index, batch in enumerate(islice(batches(), 8)):
            warned = graphed and index == 2
            with pytest.warns(GraphWarning, match="change from step to step") if warned else nullcontext():
                step([batch], z_loss=1e-4)
            if index < 4:
                schedule.step()
            assert len(recorded) == graphed * (1 + (index >= 5))
        ends.append(dict(model.named_parameters()))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_an_error_leaves_no_gradient_for_the_next_step() -> None:
    """Of the micro-batches before the wrong one."""
    model, batch = llama(), next(batches())
    step = EagerStep(model, FusedAdamW(model.parameters()), None)
    with pytest.raises(InputError, match="wrong: no such argument"):
        step([batch, {**batch, "wrong": batch["labels"]}], {})
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("graphed", [False, True])
def test_micro_batches_that_are_none_or_no_tensors_are_refused(graphed: bool) -> None:
    model, batch = llama(), next(batches())
    eager = EagerStep(model, FusedAdamW(model.parameters()), 1.0)
    step: Any = GraphStep(eager) if graphed else lambda parts: eager(parts, {})
    wrong: list[tuple[Any, str]] = [
        ([], "micro_batches: there are none"),
        ([batch, {**batch, "position_ids": None}], "position_ids: a micro-batch has tensors only, got None"),
        ([{**batch, "z_loss": 0.1}], "z_loss: a micro-batch has tensors only, got 0.1; .* as options of the step"),
    ]
    for parts, message in wrong:
        with pytest.raises(InputError, match=message):
            step(parts)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), "1"])
def test_a_largest_norm_that_is_not_above_0_is_refused(norm: Any) -> None:
    """A norm below 0 would turn the gradient round."""
    model = llama()
    with pytest.raises(InputError, match="max_grad_norm: must be above 0, or None not to clip, got"):
        graph_step(model, FusedAdamW(model.parameters()), max_grad_norm=norm)


def test_casts_that_autocast_caches_are_not_recorded() -> None:
    """A replay would not cast the weights again."""
    model = llama().float()
    step, batch = graph_step(model, FusedAdamW(model.parameters())), next(batches())
    step([batch])
    with (
        pytest.warns(GraphWarning, match="steps run without a CUDA graph: torch.autocast is on"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        step([batch])


def test_gradients_of_an_earlier_backward_pass_count() -> None:
    model = llama()
    batch = next(batches())
    model(**batch).loss.backward()
    step = graph_step(model, FusedAdamW(model.parameters()), max_grad_norm=None)
    alone = EagerStep(model, torch.optim.SGD(model.parameters(), lr=0.0)).backward
    with pytest.warns(GraphWarning, match="gradients of an earlier backward pass"):
        both = step([batch]).grad_norm
    assert both > 1.5 * alone([batch], {}).grad_norm


def test_an_optimizer_can_be_copied() -> None:
    model = llama()
    model(**next(batches())).loss.backward()
    copy.deepcopy(FusedAdamW(model.parameters())).step()


def test_a_graph_of_a_model_on_a_cpu_is_said_to_be_none() -> None:
    with pytest.warns(GraphWarning, match="the model is on cpu"):
        run("full", "cpu", "on")
    with pytest.raises(InputError, match="cuda_graph: must be 'auto', 'on' or 'off', got True"):
        run("full", "cpu", True)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_step_that_waits_for_the_gpu_runs_without_a_graph() -> None:
    model = llama().to("cuda")
    model.decoder.blocks[0].register_forward_hook(lambda module, args, out: out.hidden.sum().item() and None)
    step = graph_step(model, FusedAdamW(model.parameters()))
    batch = {name: tensor.cuda() for name, tensor in next(batches()).items()}
    with pytest.warns(GraphWarning, match=r"test_cuda_graph.py:\d+ waits for the GPU"):
        first = step([batch]).losses[0]
    assert step([batch]).losses[0] < first
    torch.cuda.manual_seed(1)
    numbers = torch.randn(3, device="cuda")  # the generator goes on
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.randn(3, device="cuda"), numbers)


def test_auto_says_why_a_small_model_has_no_graph() -> None:
    model = llama()
    step = EagerStep(model, torch.optim.SGD(model.parameters()))
    step.device = torch.device("cuda")
    with pytest.warns(GraphWarning, match="without a CUDA graph, and would be faster by it: SGD does not support it"):
        cuda_graph.make_step(step, "auto", [next(batches())])


@pytest.mark.parametrize(
    ("config", "tokens", "is_recorded"),
    [
        ({"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}, 2048, True),
        ({"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}, 16384, True),
        ({"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}, 4096, True),
        ({"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}, 16384, False),
        ({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}, 4096, False),
        # 30B parameters, of which a token uses 3B.
        ({**QWEN3_MOE, "num_hidden_layers": 48, "vocab_size": 151936}, 2048, True),
        ({**QWEN3_MOE, "num_hidden_layers": 48, "vocab_size": 151936}, 8192, False),
    ],
)
def test_auto_records_small_models_and_short_batches(config: dict[str, Any], tokens: int, is_recorded: bool) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    model = lm.from_config({**BASE, "model_type": "llama", **heads, **config}, device="meta")
    batch = Batch({"labels": torch.empty(1, tokens, device="meta")})
    step = EagerStep(model, FusedAdamW(model.parameters()))
    assert pays(step, [batch]) is is_recorded
    assert pays(step, [batch], is_sharded=True) or not is_recorded


def test_the_numbers_of_an_optimizer_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written outside of the graph: a wait there, such as for a copy to the GPU, is no reason against one."""
    places: list[str] = []

    @contextmanager
    def watched(device: torch.device) -> Iterator[list[str]]:
        found, before = list[str](), len(places)
        yield found
        found += places[before:]

    model = llama()
    step = graph_step(model, optimizer := FusedAdamW(model.parameters()))
    recording = optimizer.recording
    monkeypatch.setattr(cuda_graph, "waits_for", watched)
    monkeypatch.setattr(optimizer, "recording", lambda: (places.append("numbers.py:1"), recording())[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphWarning)
        step([next(batches())])
    assert places and len(step._graphs) == 1
