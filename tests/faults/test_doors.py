"""No raw exception from input: every fault class of tests/helpers/bad_calls.py ends in an error of ours, soon."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path

import bad_arguments as bad_arguments  # adds its own
import bad_options as bad_options
import bad_values as bad_values
import pytest
import torch
from bad_calls import FAULTS, Fault, Place
from runs import make_base

import ligermodels as lm
from ligermodels.data import rendering
from ligermodels.errors import LigerModelsError

SECONDS = 20
MEMORY = 1 << 30
LONGEST = 2500
"""Characters of a message."""
CLASSES = {key: list(group) for key, group in groupby(FAULTS, key=lambda each: (each.door, each.kind))}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doors") / "model"
    make_base(folder)
    return folder


@pytest.fixture(scope="module")
def model(model_folder: Path) -> lm.CausalLM:
    return lm.from_pretrained(model_folder, mapped=False)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TimeoutError once this takes longer, unless a call of C does."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(fault: Fault, place: Place) -> str:
    """Empty for an error of ours that says what it must; else what happened instead."""
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fault.call(place)
    except LigerModelsError as error:
        text = str(error)
        fits = fault.message in text and text.isprintable() and len(text) <= LONGEST
        return "" if fits else f"{type(error).__name__}, without {fault.message!r}: {text[:300]!r}"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:300]!r}"
    return "passed"


@pytest.mark.parametrize(("door", "kind"), CLASSES, ids=[f"{door}: {kind}" for door, kind in CLASSES])
def test_faults_end_in_errors_of_ours(
    door: str, kind: str, model_folder: Path, model: lm.CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    peak, wrong = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {}
    for number, fault in enumerate(CLASSES[door, kind]):
        tmp = tmp_path / str(number)
        shutil.copytree(model_folder, tmp / "model")
        if found := outcome(fault, Place(tmp / "model", model, tmp)):
            wrong[fault.name] = found
        shutil.rmtree(tmp)
    assert not wrong
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10 < MEMORY


def test_generation_from_many_threads(model: lm.CausalLM) -> None:
    """Threads get the serial tokens, and a model in training comes out as it went in, each module with its own flag."""
    prompts = [[3 + i, 7, 5 * i + 2] for i in range(8)]
    medusa = lm.MedusaModel.from_base(model, num_heads=2, lm_head="shared")
    calls = [partial(each.generate, [prompt], max_new_tokens=12) for prompt in prompts for each in (model, medusa)]
    serial = [call().tolist() for call in calls]
    model.train()
    model.decoder.blocks[0].eval()
    before = [module.training for module in model.modules()]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            assert [found.tolist() for found in threads.map(lambda call: call(), calls)] == serial
            assert [module.training for module in model.modules()] == before
    streams = [model.stream([prompts[0]], max_new_tokens=4) for _ in range(2)]
    next(streams[0]), next(streams[1])
    streams[0].close()
    assert not model.training  # the other one goes on
    streams[1].close()
    assert [module.training for module in model.modules()] == before
    model.eval()


def test_loads_and_saves_leak_neither_files_nor_memory(model_folder: Path, tmp_path: Path) -> None:
    def turn() -> None:
        loaded = lm.from_pretrained(model_folder)
        loaded.save_pretrained(tmp_path / "out", overwrite=True)
        heads = lm.MedusaModel.from_base(loaded, num_heads=2)
        heads.export(tmp_path / "heads", "fasterdecoding", base_model="x/y", overwrite=True)
        lm.MedusaModel.from_pretrained(loaded, tmp_path / "heads").generate([[3, 4]], max_new_tokens=4)
        with suppress(LigerModelsError):
            lm.from_pretrained(tmp_path / "heads")

    def held() -> tuple[int, int]:
        gc.collect()
        mapped = sum("safetensors" in line or "medusa_lm_head" in line for line in open("/proc/self/maps"))  # noqa: SIM115
        return len(os.listdir("/proc/self/fd")), mapped

    for _ in range(3):
        turn()
    first, tracked = held(), Counter(type(each) for each in gc.get_objects())
    for _ in range(10):
        turn()
    assert held() == first
    grown = Counter(type(each) for each in gc.get_objects()) - tracked
    assert not {kind: count for kind, count in grown.items() if issubclass(kind, torch.Tensor | torch.nn.Module)}
