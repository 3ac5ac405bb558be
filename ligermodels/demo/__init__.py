"""The whole workflow at a small size: a Llama trained from scratch, Medusa heads on it, decoding, and exports."""

from ligermodels.demo.corpus import END, python_sources, train_tokenizer
from ligermodels.demo.gpu import GpuDemoSettings, run_gpu_demo
from ligermodels.demo.job import DemoSettings, follower_baseline, frequency_baseline, run_demo
from ligermodels.demo.steps import llama_config

__all__ = [
    "END",
    "DemoSettings",
    "GpuDemoSettings",
    "follower_baseline",
    "frequency_baseline",
    "llama_config",
    "python_sources",
    "run_demo",
    "run_gpu_demo",
    "train_tokenizer",
]
