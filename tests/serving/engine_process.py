"""A process with vLLM, in which tests start one engine after another."""

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

PYTHON = os.environ.get("LIGERMODELS_VLLM_PYTHON")
needs_vllm = pytest.mark.skipif(not PYTHON, reason="LIGERMODELS_VLLM_PYTHON names no interpreter")


class EngineProcess:
    """One process for all engines of a test process, since vLLM takes longer to import than to run small models."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def serve(self, model: Path, **arguments: Any) -> list[dict[str, Any]]:
        """The answer of a new engine for each of its steps; see `answers` of serve.py for the arguments."""
        answer, log = self._ask(model, arguments)
        if isinstance(answer, dict) and "expect weight to be bfloat16, float16" in answer["error"]:
            pytest.skip("vLLM's experts on CPUs with AMX take no float32")
        assert isinstance(answer, list), f"{answer['error']}\n{log[-3000:]}"
        return answer

    def error(self, model: Path, last: bool = False, **arguments: Any) -> tuple[str, str]:
        """The error of an engine that does not start, and the log of its workers.

        Args:
            model: folder of the checkpoint.
            last: end the process afterwards: vLLM starts no other engine where one with drafts has failed.
            arguments: of `answers` of serve.py.
        """
        answer, log = self._ask(model, arguments)
        assert isinstance(answer, dict), "the engine has started"
        if last:
            self.close()
        return answer["error"], log

    def _ask(self, model: Path, arguments: dict[str, Any]) -> tuple[Any, str]:
        """The answer, and everything else that the process has printed before."""
        if self._process is None:
            command = [str(PYTHON), str(Path(__file__).with_name("serve.py"))]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"model": str(model), **arguments}) + "\n")
        self._process.stdin.flush()
        log = ""
        for line in self._process.stdout:
            if line.startswith(("[{", '{"error"')):
                return json.loads(line), log
            log += line
        self.close()
        return {"error": "the process of vLLM has ended"}, log

    def close(self) -> None:
        """End the process; the next engine gets a new one."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=60)
        self._process = None

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
