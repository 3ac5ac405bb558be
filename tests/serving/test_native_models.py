"""Native models inside vLLM 0.32 on the CPU: its tokens and log-probabilities are ours, in float32.

`make test-serving` makes the environment and runs this; or LIGERMODELS_VLLM_PYTHON names the Python of one in which
this package is installed too.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from native_checkpoints import (
    HYBRID,
    PYTHON,
    assert_equal,
    has_states,
    needs_vllm,
    ours,
    random_checkpoint,
    servable,
    served,
)
from zoo import EACH_FAMILY

pytestmark = needs_vllm

UNKNOWN = {"internlm3", "iquestcoder", "lfm3", "bailing_hybrid", "lara_mini"}
"""vLLM reads config.json by transformers, which does not have these types."""
OPTIONS = {"gemma4_text-keys-as-values", "gemma4_text-per-layer-inputs", "gemma4_text-experts", "mistral4-groups"}
OPTIONS |= {"phi3-short", "ministral3-window", "glm4_moe-qk-norm", "deepseek_v3-without-experts"}
OPTIONS |= {"falcon_h1-norms-and-biases", "nemotron_h-latent-experts-and-biases", "lfm2-biases"}
NAMES = sorted({*EACH_FAMILY, *OPTIONS} - UNKNOWN) if PYTHON else []


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, list[Any]]]]:
    """What vLLM and this package generate for each config."""
    folder = tmp_path_factory.mktemp("native")
    wanted = [ours(random_checkpoint(folder / name, servable(name))) for name in NAMES]
    asked = [{"model": str(folder / name), "options": HYBRID if has_states(name) else {}} for name in NAMES]
    halves = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    with ThreadPoolExecutor(len(halves)) as threads:
        found = [answer for half in threads.map(served, halves, (folder, folder / NAMES[0])) for answer in half]
    return dict(zip(NAMES, zip(found, wanted, strict=True), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_log_probs(name: str, answers: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]]) -> None:
    """Four requests at once, with prefills in parts of 32 tokens."""
    assert_equal(*answers[name])
