"""All families of this package. Importing this module registers them under their `model_type`."""

from __future__ import annotations

from ligermodels.archs import (
    afmoe,
    apertus,
    arcee,
    bailing,
    bamba,
    cohere,
    deepseek,
    ernie,
    exaone,
    falcon_h1,
    gemma,
    gemma4,
    glm,
    glm_moe,
    glm_moe_lite,
    gpt_oss,
    granite,
    hunyuan,
    kimi_linear,
    laguna,
    lara,
    lfm2,
    lfm3,
    llama,
    llama4,
    mellum,
    mimo,
    minimax,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    muse,
    nemotron,
    olmo,
    phi,
    qwen,
    qwen3_5,
    qwen_moe,
    qwen_omni,
    qwen_vl,
    sarvam,
    seed_oss,
    smollm,
    solar,
)
from ligermodels.models.families import register

MODULES = (
    llama, mistral, mixtral, gemma, gemma4, qwen, qwen_moe, qwen_vl, qwen_omni, qwen3_5, phi, olmo, granite, smollm,
    glm, glm_moe, minimax, ernie, exaone, seed_oss, arcee, mellum, gpt_oss, deepseek, glm_moe_lite,
    mistral4, mistral3, muse, cohere, apertus, afmoe, solar, hunyuan, lfm2, bamba, nemotron, falcon_h1, lfm3, laguna,
    mimo, llama4, kimi_linear, bailing, sarvam, lara,
)  # fmt: skip

for _module in MODULES:
    for _family in _module.FAMILIES:
        register(_family)
