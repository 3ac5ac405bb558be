"""The weight map: views that cover each native tensor once, so that what is loaded goes out to the byte."""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ligermodels.convert.mappings import (
    WeightMapping,
    concat,
    experts_gate_up,
    experts_gate_up_in_one,
    grouped_qkv,
    grouped_qkv_in_one,
    heads,
    interleaved_gate_up,
    interleaved_gate_up_in_one,
    rename,
    stack,
)
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError

DIM = st.integers(1, 5)
REST = st.lists(st.integers(0, 4), max_size=2)


class Stored(dict[str, Tensor]):
    """Tensors in memory, read as a checkpoint; `log` lists the reads."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.log: list[str] = []

    @property
    def headers(self) -> Mapping[str, Tensor]:
        return self

    def read(self, name: str) -> Tensor:
        self.log.append(name)
        return self[name]


@st.composite
def renamed(draw: st.DrawFn) -> tuple[WeightMapping, list[int]]:
    return rename("w", "a"), draw(st.lists(st.integers(0, 5), max_size=3))  # Scalars too.


@st.composite
def concatenated(draw: st.DrawFn) -> tuple[WeightMapping, list[int]]:
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    before, after = draw(REST), draw(REST)
    names = [f"a{i}" for i in range(len(sizes))]
    return concat("w", names, sizes, dim=len(before)), [*before, sum(sizes), *after]


@st.composite
def grouped(draw: st.DrawFn) -> tuple[WeightMapping, list[int]]:
    kv_heads, group, head_dim = draw(DIM), draw(DIM), draw(DIM)
    pairs = 2 * draw(st.integers(0, head_dim // 2))
    value_dim = head_dim if pairs else draw(DIM)
    shape = [kv_heads * ((group + 1) * head_dim + value_dim), *draw(REST)]  # Without more dimensions: a bias.
    if draw(st.booleans()):
        return heads("w", "norm", kv_heads, head_dim, pairs), [kv_heads * head_dim, *draw(REST)]
    return grouped_qkv("w", "q", "k", "v", kv_heads, group, head_dim, pairs, value_dim), shape


@st.composite
def stacked(draw: st.DrawFn) -> tuple[WeightMapping, list[int]]:
    count = draw(DIM)
    return stack("w", [f"experts.{i}" for i in range(count)]), [count, *draw(REST)]


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[WeightMapping, list[int]]:
    size, rest = 2 * draw(st.integers(0, 5)), draw(REST)  # Without more dimensions: a bias.
    if draw(st.booleans()):
        return interleaved_gate_up("w", "gate", "up"), [size, *rest]
    if draw(st.booleans()):
        return interleaved_gate_up_in_one("w", "gate_up"), [size, *rest]
    count = draw(DIM)
    if draw(st.booleans()):
        return experts_gate_up_in_one("w", "gate_up"), [count, size, *rest]
    names = [[f"experts.{i}.{part}" for i in range(count)] for part in ("gate", "up")]
    return experts_gate_up("w", *names), [count, size, *rest]


@st.composite
def grouped_in_one(draw: st.DrawFn) -> tuple[WeightMapping, list[int]]:
    kv_heads, group, head_dim = draw(DIM), draw(DIM), draw(DIM)
    pairs = 2 * draw(st.integers(0, head_dim // 2))
    shape = [kv_heads * (group + 2) * head_dim, *draw(REST)]
    return grouped_qkv_in_one("w", "qkv", kv_heads, group, head_dim, pairs), shape


def numbered(shape: list[int]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@given(st.one_of(renamed(), concatenated(), grouped(), grouped_in_one(), stacked(), interleaved()))
def test_views_cover_each_element_once_and_load_inverts_export(case: tuple[WeightMapping, list[int]]) -> None:
    mapping, shape = case
    weights = pickle.loads(pickle.dumps(WeightMap([mapping])))  # A model, and so its map, can be sent to a process.
    native = numbered(shape)
    exported = weights.export({"w": native})
    stored = Stored({name: read() for name, _, _, read in exported})

    assert sorted(torch.cat([t.flatten() for t in stored.values()]).tolist()) == list(range(native.numel()))
    assert all(stored[name].shape == shape and stored[name].dtype == dtype for name, shape, dtype, _ in exported)

    weights.plan(stored, {"w": torch.empty(shape, dtype=torch.int64, device="meta")})
    loaded = torch.full(shape, -1)
    weights.load(stored, {"w": loaded})
    assert torch.equal(loaded, native)
    assert sorted(stored.log) == sorted(view.source for view in mapping.views)  # Once for each view.

    # A tensor that is not contiguous, such as a slice of a larger one, is no different.
    wide = torch.stack([loaded.fill_(-1), native], dim=-1)
    weights.load(stored, {"w": wide[..., 0]})
    assert torch.equal(wide[..., 0], wide[..., 1])


@pytest.mark.parametrize("rest", [(), (7,)])
def test_layouts_are_those_the_layers_use(rest: tuple[int, ...]) -> None:
    kv_heads, group, head_dim = 3, 2, 5
    q, k, v = (torch.randn(n * head_dim, *rest) for n in (kv_heads * group, kv_heads, kv_heads))
    rows = []
    for head in range(kv_heads):
        rows += [q[i * head_dim : (i + 1) * head_dim] for i in range(head * group, (head + 1) * group)]
        rows += [each[head * head_dim : (head + 1) * head_dim] for each in (k, v)]
    gate, up = torch.randn(4, *rest), torch.randn(4, *rest)
    experts = [torch.randn(2, *rest) for _ in range(3)]
    gates, ups = ([torch.randn(5, *rest) for _ in range(2)] for _ in range(2))
    weights = WeightMap(
        [
            grouped_qkv("qkv", "q", "k", "v", kv_heads, group, head_dim),
            concat("gate_up", ["gate", "up"], [4, 4]),
            stack("experts", ["e0", "e1", "e2"]),
            experts_gate_up("experts_gate_up", ["g0", "g1"], ["u0", "u1"]),
        ]
    )
    wanted = {"qkv": torch.cat(rows), "gate_up": torch.cat([gate, up]), "experts": torch.stack(experts)}
    wanted["experts_gate_up"] = torch.stack(
        [torch.stack(pair, 1).flatten(0, 1) for pair in zip(gates, ups, strict=True)]
    )
    state = {name: torch.nn.Parameter(torch.zeros_like(each)) for name, each in wanted.items()}
    stored = {"q": q, "k": k, "v": v, "gate": gate, "up": up}
    for letter, tensors in (("e", experts), ("g", gates), ("u", ups)):
        stored |= {f"{letter}{i}": each for i, each in enumerate(tensors)}
    weights.load(Stored(stored), state)
    assert all(torch.equal(state[name], each) for name, each in wanted.items())


@pytest.mark.parametrize("in_one", [False, True])
@pytest.mark.parametrize("rest", [(), (7,)])
def test_rotated_neighbours_become_halves(rest: tuple[int, ...], in_one: bool) -> None:
    """The first 4 of the 5 rows of each query head and key head; v stays."""
    order, kv_heads, group, head_dim = torch.tensor([0, 2, 1, 3, 4]), 3, 2, 5
    sizes = [kv_heads * group * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    stored = dict(zip("qkv", torch.randn(sum(sizes), *rest).split(sizes), strict=True))
    q, k, v = (each.unflatten(0, (kv_heads, -1, head_dim)) for each in stored.values())
    wanted = torch.cat([q[:, :, order], k[:, :, order], v], dim=1).flatten(0, 2)
    if in_one:
        mapping = grouped_qkv_in_one("w", "qkv", kv_heads, group, head_dim, 4)
        stored = {"qkv": torch.cat(list(stored.values()))}
    else:
        mapping = grouped_qkv("w", "q", "k", "v", kv_heads, group, head_dim, 4)
    loaded = torch.empty_like(wanted)
    WeightMap([mapping]).load(Stored(stored), {"w": loaded})
    assert torch.equal(loaded, wanted)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("rest", [(), (7,)])
def test_gate_and_up_are_interleaved(rest: tuple[int, ...], size: int, mapped: bool, tmp_path: Path) -> None:
    """From tensors apart and from stacked ones, of one layer and of experts; and back out, byte for byte."""
    gates, ups = (torch.randn(3, size, *rest) for _ in range(2))
    stored = {f"{name}.{i}": each[i] for name, each in (("gate", gates), ("up", ups)) for i in range(3)}
    stored |= {"both": torch.cat([gates[0], ups[0]]), "all": torch.cat([gates, ups], dim=1)}
    weights = WeightMap(
        [
            interleaved_gate_up("apart", "gate.0", "up.0"),
            interleaved_gate_up_in_one("in_one", "both"),
            experts_gate_up("experts", ["gate.1", "gate.2"], ["up.1", "up.2"]),
            experts_gate_up_in_one("experts_in_one", "all"),
        ]
    )
    wanted = torch.stack([gates, ups], dim=2).reshape(3, 2 * size, *rest)
    native = {"apart": wanted[0], "in_one": wanted[0], "experts": wanted[1:], "experts_in_one": wanted}
    state = {name: torch.zeros_like(each) for name, each in native.items()}
    save_checkpoint(tmp_path / "model", [(n, tuple(t.shape), t.dtype, lambda t=t: t) for n, t in stored.items()])
    with Checkpoint(tmp_path / "model") as checkpoint:
        weights.load(checkpoint, state, mapped=mapped)
    assert all(torch.equal(state[name], each) for name, each in native.items())
    exported = {each.name: each.read() for each in weights.export(state)}
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], each) for name, each in stored.items())
    # A shard of whole pairs is the gate_up weight of some of the channels.
    if size > 1:
        gate, up = (
            each.read() for each in WeightMap([interleaved_gate_up("w", "g", "u")]).export({"w": wanted[0, 4:]})
        )
        assert torch.equal(gate, gates[0, 2:]) and torch.equal(up, ups[0, 2:])


def test_rows_of_one_tensor_that_are_two_interleaved_weights() -> None:
    """Views with a `start`: the rows of two layers' gate and up in one tensor."""

    def from_row(mapping: WeightMapping, start: int) -> WeightMapping:
        return replace(mapping, views=tuple(replace(view, start=start) for view in mapping.views))

    rows = torch.arange(30.0).reshape(10, 3)
    weights = WeightMap(
        [from_row(interleaved_gate_up_in_one("a", "both"), 0), from_row(interleaved_gate_up_in_one("b", "both"), 6)]
    )
    state = {"a": torch.zeros(6, 3), "b": torch.zeros(4, 3)}
    weights.load(Stored({"both": rows}), state)
    assert torch.equal(state["a"], rows[[0, 3, 1, 4, 2, 5]]) and torch.equal(state["b"], rows[[6, 8, 7, 9]])
    assert torch.equal(weights.export(state)[0].read(), rows)
    with pytest.raises(CheckpointError, match=r"not split as the weight map says: a \[5, 3\]"):
        weights.export({**state, "a": torch.zeros(5, 3)})


def test_casts_and_reports_progress() -> None:
    weights = WeightMap([rename("a", "x"), concat("b", ["y", "z"], [1, 2])])
    stored = Stored({"x": torch.randn(3), "y": torch.randn(1).half(), "z": torch.randn(2).double()})
    state = {"a": torch.empty(3, dtype=torch.bfloat16), "b": torch.empty(3, dtype=torch.bfloat16)}
    seen: list[tuple[int, int]] = []
    weights.load(stored, state, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(12, 30), (14, 30), (30, 30)]
    assert torch.equal(state["a"], stored["x"].bfloat16())
    assert torch.equal(state["b"], torch.cat([stored["y"].bfloat16(), stored["z"].bfloat16()]))


def test_all_faults_are_listed_in_one_error() -> None:
    weights = WeightMap(
        [
            rename("fine", "model.fine"),
            rename("lost", "model.lost"),
            rename("small", "model.small"),
            rename("coded", "model.coded"),
            rename("absent", "model.absent"),
            concat("torn", ["model.t0", "model.t1"], [2, 3]),
            grouped_qkv("odd", "q", "k", "v", 2, 3, 4),
            rename("again", "model.fine"),
        ],
        ignored=[r"inv_freq$"],
    )
    names = ("fine", "lost", "small", "coded", "torn", "odd", "again", "stray")
    state = {name: torch.empty(6, 4, device="meta") for name in names}
    stored = {"model.fine": torch.empty(6, 4), "model.small": torch.empty(6, 3), "layers.0.inv_freq": torch.empty(2)}
    stored |= {
        "model.coded": torch.empty(6, 4, dtype=torch.int8),
        "model.t0": torch.empty(2),
        "inv_freq.x": torch.empty(1),
    }
    stored |= {f"extra.{i}": torch.empty(1) for i in range(25)}
    with pytest.raises(CheckpointError) as caught:
        weights.plan(stored, state)
    lines = {line.strip() for line in str(caught.value).splitlines()[1:]}

    def line(start: str) -> str:
        return next(each for each in lines if start in each)

    assert line("missing from").endswith(": model.lost, model.absent, model.t1, q, k, v")
    assert "26 not expected" in line("not expected") and line("not expected").endswith("and 6 more")
    assert "inv_freq.x" in line("not expected") and "layers.0.inv_freq" not in str(caught.value)
    assert "model.small [6, 3] instead of [6, 4]" in line("wrong shape")
    assert "model.coded int8 to float32 of coded" in line("quantised")
    assert line("without a mapping").endswith(": stray")
    assert line("not of the model").endswith(": absent")
    assert line("twice").endswith(": model.fine")
    assert "torn [6, 4]" in line("not split") and "odd [6, 4]" in line("not split")
    assert len(lines) == 8

    for fault, mappings in (("stray", [rename("fine", "x")]), ("absent", [rename(n, n) for n in (*names, "absent")])):
        with pytest.raises(CheckpointError, match=fault):
            WeightMap(mappings).export({name: state[name] for name in names})


def test_nothing_is_read_or_written_when_the_plan_fails() -> None:
    weights, state = WeightMap([rename("a", "x"), rename("b", "y")]), {"a": torch.zeros(3), "b": torch.zeros(3)}
    stored = Stored({"x": torch.ones(3), "y": torch.ones(1)})  # A copy of y into b would broadcast.
    with pytest.raises(CheckpointError, match=r"y \[1\] instead of \[3\]"):
        weights.load(stored, state)
    assert not stored.log and not state["a"].any()
    with pytest.raises(CheckpointError, match="b: is on the meta device"):
        weights.load(Stored({"x": torch.ones(3), "y": torch.ones(3)}), {**state, "b": state["b"].to("meta")})


def test_aliases_of_tied_tensors() -> None:
    weights = WeightMap([rename("embed", "model.embed")], aliases={"lm_head": "model.embed"})
    weight, state = torch.randn(5, 3), {"embed": torch.zeros(5, 3)}
    assert [name for name, *_ in weights.export(state)] == ["model.embed"]
    for names in (["model.embed"], ["lm_head"], ["model.embed", "lm_head"]):
        state["embed"].zero_()
        weights.load(Stored({name: weight.clone() for name in names}), state)
        assert torch.equal(state["embed"], weight)
    half = weight.bfloat16()  # the same values in another dtype
    weights.load(Stored({"model.embed": half.float(), "lm_head": half}), state)
    assert torch.equal(state["embed"], half.float())
    state["embed"].zero_()
    with pytest.raises(CheckpointError, match=r"lm_head: differs from model\.embed"):
        weights.load(Stored({"model.embed": weight, "lm_head": weight + 1e-6}), state)
    assert not state["embed"].any()
    with pytest.raises(CheckpointError, match=r"lm_head \[3\] instead of \[5, 3\]"):
        weights.plan({"model.embed": weight, "lm_head": weight[0]}, state)
    with pytest.raises(CheckpointError, match=r"missing.*model\.embed"):
        weights.plan({}, state)


def test_export_follows_the_mappings_and_reads_late() -> None:
    weights = WeightMap([rename("layers.10", "l.10"), rename("layers.9", "l.9"), concat("c", ["c1", "c0"], [1, 1])])
    state = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("c", "layers.9", "layers.10")}
    exported = weights.export(state)
    assert [each.name for each in exported] == ["l.10", "l.9", "c1", "c0"]
    with torch.no_grad():
        state["c"].copy_(torch.tensor([1.0, 2.0]))
    assert exported[2].read().tolist() == [1.0] and not exported[2].read().requires_grad


def test_buffers_of_other_dtypes() -> None:
    """Whole numbers and flags are read and written as they are; they are never cast."""
    weights = WeightMap([rename(name, name.upper()) for name in ("weight", "steps", "flags", "count")])
    stored = Stored(
        {
            "WEIGHT": torch.randn(3),
            "STEPS": torch.tensor([1, 2**40]),
            "FLAGS": torch.tensor([True, False]),
            "COUNT": torch.tensor(7),
        }
    )
    state = {name.lower(): torch.zeros_like(tensor) for name, tensor in stored.items()}
    state["weight"] = state["weight"].bfloat16()
    weights.load(stored, state)
    assert torch.equal(state["weight"], stored["WEIGHT"].bfloat16())
    exported = {each.name: each.read() for each in weights.export(state)}
    assert all(torch.equal(exported[name], stored[name]) for name in ("STEPS", "FLAGS", "COUNT"))
    for name, dtype in (("steps", torch.int32), ("flags", torch.uint8), ("count", torch.float32)):
        with pytest.raises(CheckpointError, match=rf"{name.upper()} \w+ to \w+ of {name}"):
            weights.plan(stored, {**state, name: state[name].to(dtype)})


def test_buffers_of_other_dtypes_in_files(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([1, 2**40]), "b": torch.tensor([True, False, True]), "c": torch.tensor(7)}
    save_checkpoint(tmp_path / "model", [(n, tuple(t.shape), t.dtype, lambda t=t: t) for n, t in tensors.items()])
    for mapped in (True, False):
        state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        with Checkpoint(tmp_path / "model") as checkpoint:
            WeightMap([rename(name, name) for name in tensors]).load(checkpoint, state, mapped=mapped)
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
