"""A loopback stand-in for the Hugging Face hub: as much of its API as huggingface_hub 1 and 2 use for files."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_accepted"


@dataclass
class Hub:
    """What the server has: `repos` maps repo id to its files, all of one commit, on all of its `branches`.

    Of repos in `gated`, files need TOKEN. GETs of files in `cut` end half-way, and then fail;
    those in `dripped` send ten bytes a second, those in `stalled` nothing. `served` lists the files
    whose content was asked for. Repositories that clients make are added to `repos`; `commits` lists what they say of
    their commits: repository, branch, message, and whether it is a pull request.
    """

    url: str
    repos: dict[str, dict[str, bytes]]
    branches: set[str] = field(default_factory=lambda: {"main", COMMIT})
    gated: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    dripped: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)
    closing: bool = False
    served: list[str] = field(default_factory=list)
    commits: list[tuple[str, str, str, bool]] = field(default_factory=list)


@contextmanager
def serving(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve `repos` on a free port of 127.0.0.1 while the context lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    hub = server.hub = Hub(url, {name: dict(files) for name, files in repos.items()})  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing = True
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub, address = self._hub, urlsplit(self.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._error(401, "")
        match [unquote(part) for part in address.path.split("/")[1:]]:
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                made = json.loads(body)
                repo = f"{made.get('organization') or 'somebody'}/{made['name']}"
                hub.repos.setdefault(repo, {})
                self._json({"url": f"{hub.url}/{repo}", "name": repo, "id": repo})
            case ["api", "models", owner, name, "branch", branch]:
                hub.branches.add(branch)
                self._json({})
            case ["api", "models", owner, name, "preupload", _]:
                paths = [file["path"] for file in json.loads(body)["files"]]
                self._json(
                    {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
                )
            case ["api", "models", owner, name, "commit", branch]:
                header, *files = [json.loads(line) for line in body.splitlines()]
                proposed = "create_pr=1" in address.query
                repo = f"{owner}/{name}"
                hub.commits.append((repo, branch, header["value"]["summary"], proposed))
                for file in files:
                    path, content = file["value"]["path"], file["value"].get("content")
                    hub.repos[repo].pop(path, None)
                    if file["key"] == "file":  # and not "deletedFile"
                        hub.repos[repo][path] = base64.b64decode(content)
                url = f"{hub.url}/{repo}/commit/{COMMIT}"
                self._json({"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": f"{hub.url}/{repo}/discussions/1"})
            case _:
                self._error(404, "")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _route(self) -> None:
        match [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]:
            case ["api", "models", owner, name, *rest]:
                self._api(f"{owner}/{name}", rest)
            case [owner, name, "resolve", revision, *path]:
                self._file(f"{owner}/{name}", revision, "/".join(path))
            case _:
                self._error(404, "")

    def _api(self, repo: str, rest: list[str]) -> None:
        if repo not in self._hub.repos:
            return self._error(401, "RepoNotFound")  # What the hub says to those who have no token.
        if len(rest) > 1 and rest[1] not in self._hub.branches:
            return self._error(404, "RevisionNotFound")
        files = self._hub.repos[repo]
        match rest:
            case [] | ["revision", _]:
                siblings = [{"rfilename": name} for name in files]
                self._json({"_id": "0", "id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []})
            case ["tree", _]:
                self._json(
                    [
                        {"type": "file", "path": name, "oid": _etag(data), "size": len(data)}
                        for name, data in files.items()
                    ]
                )
            case _:
                self._error(404, "")

    def _file(self, repo: str, revision: str, path: str) -> None:
        hub = self._hub
        if repo not in hub.repos:
            return self._error(401, "RepoNotFound")
        if revision not in hub.branches:
            return self._error(404, "RevisionNotFound")
        if repo in hub.gated and (authorization := self.headers.get("Authorization")) != f"Bearer {TOKEN}":
            return self._error(403 if authorization else 401, "GatedRepo")
        if path not in hub.repos[repo]:
            return self._error(404, "EntryNotFound")
        data = hub.repos[repo][path]
        if self.command == "GET":
            hub.served.append(f"{repo}/{path}")
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{_etag(data)}"', "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = path in hub.cut and self.command == "GET"
        sent = data[start : len(data) // 2] if cut else data[start:]
        self._answer(206 if start else 200, sent, headers, length=len(data) - start)
        self.close_connection |= cut

    def _error(self, status: int, code: str) -> None:
        self._answer(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code} if code else {})

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str], length: int | None = None) -> None:
        hub = self._hub
        self.send_response(status)
        for name, value in {**headers, "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "HEAD":
            return
        slow = [urlsplit(self.path).path.endswith(tuple(names) or "//") for names in (hub.dripped, hub.stalled)]
        if any(slow):
            with suppress(OSError):  # the client has gone
                for byte in body:
                    time.sleep(0.1)
                    self.wfile.write(bytes([byte]) if slow[0] else b"")
                    if hub.closing:
                        return
            return
        self.wfile.write(body)

    @property
    def _hub(self) -> Hub:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        return hub


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
