"""docs/serving.md says what the tests with vLLM run. This test needs no vLLM."""

import re
from pathlib import Path

from native_checkpoints import BY_VLLM, INSIDE_VLLM, UNKNOWN
from zoo import CONFIGS, EACH_FAMILY

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def model_types(names: list[str]) -> set[str]:
    return {CONFIGS[name]["model_type"] for name in names}


def test_the_page_counts_configs() -> None:
    for names, subject in ((INSIDE_VLLM, "native models inside vLLM: "), (BY_VLLM, "by vLLM's own classes: ")):
        assert f"{subject}{len(names)} configs of {len(model_types(names))} model types" in PAGE


def test_the_page_lists_each_model_type_once() -> None:
    section = PAGE.split("### Checkpoints of each model type")[1].split("\n#")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in section.splitlines() if line.startswith("| `")]
    assert set(rows[0]) == model_types(BY_VLLM)
    listed = [name for row in rows for name in row]
    assert sorted(listed) == sorted(model_types([*EACH_FAMILY]))
    assert set(rows[-1]) == model_types([*UNKNOWN])
