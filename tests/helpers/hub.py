"""A hub on this machine that answers what `huggingface_hub` and `datasets` ask of the Hugging Face hub."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repository:
    """A model or a data set with one revision."""

    sha: str
    files: dict[str, bytes]
    licence: str = "apache-2.0"
    states_digests: bool = True
    """False as in a mirror that lists the files without their digests."""


@dataclass
class Hub:
    """Repositories by kind and name, such as ``("models", "Qwen/Qwen2.5-3B-Instruct")``, and every request."""

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method, path and, where there is one, the range of bytes."""
    flipped: str | None = None
    """The file that is served with one other bit."""
    broken_after: int | None = None
    """The first file longer than this is cut off after so many bytes, once."""
    address: str = ""


LARGE = 1_000_000
"""The size in bytes from which the hub stores a file beside git."""


def entry(path: str, content: bytes) -> dict[str, object]:
    """Return what the hub lists of a file: git's name of its content, and of a large file the SHA-256."""
    blob = b"blob %d\0" % len(content) + content
    listed = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(blob).hexdigest()}  # noqa: S324
    if len(content) < LARGE:
        return listed
    sha256 = hashlib.sha256(content).hexdigest()
    return listed | {"oid": "0" * 40, "lfs": {"oid": sha256, "size": len(content), "pointerSize": 134}}


class Handler(BaseHTTPRequestHandler):
    """Answer one connection."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path = unquote(url.path)
        asked = self.headers.get("Range")
        self.hub.requests.append(f"{self.command} {path}" + (f" {asked}" if asked else ""))
        if path == "/api/whoami-v2":
            return self._json({"name": "tester", "type": "user", "orgs": [], "auth": {}})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
            kind = f"{asked.get('type') or 'model'}s"
            self.hub.repositories.setdefault((kind, name), Repository("0" * 40, {}))
            return self._json({"url": f"{self.hub.address}/{name}"})
        if match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/([a-z-]+)/([^/]+)(?:/(.*))?)?", path
        ):
            kind, name, action, revision, rest = match.groups()
            repository = self._repository(kind, name, revision)
            if repository is not None:
                self._api(repository, name, action, rest or "", body, parse_qs(url.query))
            return None
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, revision, file = match.groups()
            repository = self._repository("datasets" if kind else "models", name, revision)
            if repository is not None:
                self._file(repository, file)
            return None
        return self._json({"error": "not found"}, 404)

    def _repository(self, kind: str, name: str, revision: str | None) -> Repository | None:
        repository = self.hub.repositories.get((kind, name))
        if repository is None:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in (None, "main", repository.sha):
            self._json({"error": f"Invalid rev id: {revision}"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repository

    def _api(
        self, repository: Repository, name: str, action: str | None, rest: str, body: bytes, query: dict
    ) -> None:
        if action in (None, "revision"):
            files = [{"rfilename": path, "size": len(content)} for path, content in repository.files.items()]
            about = {
                "id": name,
                "sha": repository.sha,
                "siblings": files,
                "private": False,
                "disabled": False,
            }
            self._json(
                about | {"cardData": {"license": repository.licence}, "tags": [], "downloads": 0, "likes": 0}
            )
        elif action == "tree":
            inside = {
                p: content
                for p, content in repository.files.items()
                if p.startswith(f"{rest}/" if rest else "")
            }
            listed = [entry(path, content) for path, content in inside.items()]
            if not repository.states_digests:
                listed = [file | {"oid": None, "lfs": None} for file in listed]
            if query.get("recursive", ["False"])[0].lower() not in ("true", "1"):
                depth = rest.count("/") + 1 if rest else 0
                folders = {"/".join(p.split("/")[: depth + 1]) for p in inside if p.count("/") > depth}
                listed = [file for file in listed if str(file["path"]).count("/") == depth]
                listed += [
                    {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
                    for path in sorted(folders)
                ]
            if listed or not rest:
                self._json(listed)
            else:
                self._json({"error": "no such entry"}, 404, {"X-Error-Code": "EntryNotFound"})
        elif action == "paths-info":
            wanted = parse_qs(body.decode()).get("paths", []) or json.loads(body or b"{}").get("paths", [])
            self._json([entry(path, repository.files[path]) for path in wanted if path in repository.files])
        elif action == "preupload":
            asked = json.loads(body)["files"]
            self._json(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked
                    ]
                }
            )
        elif action == "commit":
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    repository.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._json(
                {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.hub.address}/{name}/commit/1"}
            )
        else:
            self._json({"error": "not found"}, 404)

    def _file(self, repository: Repository, path: str) -> None:
        content = repository.files.get(path)
        if content is None:
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        begin, end = 0, len(content)
        if match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            begin, end = int(match[1]), int(match[2]) + 1 if match[2] else end
        if path == self.hub.flipped:
            content = bytes([content[0] ^ 1]) + content[1:]
        part = content[begin:end]
        self.send_response(206 if len(part) < len(content) else 200)
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": repository.sha,
            "Accept-Ranges": "bytes",
            "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}",
            "Content-Length": str(len(part)),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        cut, self.hub.broken_after = self.hub.broken_after, None
        if cut is not None and len(part) > cut:
            self.wfile.write(part[:cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return None
        if cut is not None:
            self.hub.broken_after = cut
        self.wfile.write(part)
        return None

    def _json(self, answer: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the repositories at ``hub.address`` until the block ends."""
    handler = type("Handler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
