"""The whole workflow at a small size: a Llama from scratch, Medusa heads on it, decoding, exports, and chats."""

from ligermodels.demo.corpus import END, installed_sources, python_sources, train_tokenizer
from ligermodels.demo.settings import DemoSettings, GpuDemoSettings, llama_config
from ligermodels.demo.workflow import run_demo

__all__ = [
    "END",
    "DemoSettings",
    "GpuDemoSettings",
    "installed_sources",
    "llama_config",
    "python_sources",
    "run_demo",
    "train_tokenizer",
]
