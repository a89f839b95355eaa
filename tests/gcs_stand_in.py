"""A stand-in for Google Cloud Storage: its JSON API over objects in memory, as far as checkpoints need it.

Strongly consistent, like the real one; listings come in pages of a few names; a write can be bound to a generation.
What it has no answer for is answered with 501 and kept in `unknown`, so that a test can see that nothing was missed.
"""

from __future__ import annotations

import base64
import contextlib
import email
import email.message
import hashlib
import http.server
import itertools
import json
import os
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

_PAGE = 50  # names in a listing; the real one has 1000
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_BUCKET = re.compile(r"/storage/v1/b/([^/]+)(/o)?")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")
_COPY = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)")


class Bucket:
    """The objects of all buckets by "bucket/name", and what is to go wrong."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, bytes]] = {}  # generation, contents
        self.refuse: Callable[[str, str], int | None] = lambda method, name: None  # a status to answer with instead
        self.unknown: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self._generations = itertools.count(1)
        self._sessions: dict[str, tuple[str, dict[str, str], bytes]] = {}
        self._lock = threading.RLock()

    def names(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    def flip(self, name: str, at: int) -> None:
        """One bit of an object is another; its generation stays."""
        generation, data = self.objects[name]
        changed = bytearray(data)
        changed[at] ^= 1
        self.objects[name] = generation, bytes(changed)

    def answer(self, method: str, target: str, headers: email.message.Message, body: bytes) -> tuple[int, Any, Any]:
        """Status, headers and body (bytes, or what becomes JSON) for a request."""
        url = urllib.parse.urlsplit(target)
        query = {key: values[0] for key, values in urllib.parse.parse_qs(url.query, keep_blank_values=True).items()}
        with self._lock:
            if match := _UPLOAD.fullmatch(url.path):
                return self._upload(method, match[1], target, query, headers, body)
            if match := _COPY.fullmatch(url.path):
                source, to = (f"{match[i]}/{urllib.parse.unquote(match[i + 1])}" for i in (1, 3))
                return self._with(method, source, lambda data: self._put(to, data, {}), copied=True)
            if match := _OBJECT.fullmatch(url.path):
                return self._object(method, f"{match[1]}/{urllib.parse.unquote(match[2])}", query, headers)
            if match := _BUCKET.fullmatch(url.path):
                refused = self._refused(method, f"{match[1]}/{query.get('prefix', '')}")
                return refused or (self._list(match[1], query) if match[2] else (200, {}, {"name": match[1]}))
        self.unknown.append(f"{method} {target}")
        return 501, {}, {"error": {"code": 501, "message": f"no answer for {method} {target}"}}

    def _refused(self, method: str, name: str) -> tuple[int, Any, Any] | None:
        self.requests.append((method, name))
        status = self.refuse(method, name)
        return None if status is None else _error(status, f"refused: {method} {name}")

    def _upload(
        self, method: str, bucket: str, target: str, query: dict[str, str], headers: email.message.Message, body: bytes
    ) -> tuple[int, Any, Any]:
        if method == "PUT" or (method == "POST" and "upload_id" in query):
            name, conditions, before = self._sessions[query["upload_id"]]
            if refused := self._refused("PUT", name):
                return refused
            whole = before + body
            total = headers.get("Content-Range", "bytes */-1").rpartition("/")[2]
            if total == "*" or int(total) > len(whole):
                self._sessions[query["upload_id"]] = name, conditions, whole
                return 308, ({"Range": f"bytes=0-{len(whole) - 1}"} if whole else {}), b""
            return self._put(name, whole, conditions)
        if query["uploadType"] == "multipart":
            kind = headers["Content-Type"]
            message = email.message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body)
            described, contents = (part.get_payload(decode=True) for part in message.get_payload())  # type: ignore[union-attr,call-arg,union-attr]
            name, body = f"{bucket}/{json.loads(described)['name']}", contents  # type: ignore[arg-type,assignment]
        elif query["uploadType"] == "resumable":
            name = f"{bucket}/{query.get('name') or json.loads(body)['name']}"
        else:
            name = f"{bucket}/{query['name']}"
        if refused := self._refused("POST", name):
            return refused
        if query["uploadType"] == "resumable":
            upload = f"upload-{next(self._generations)}"
            self._sessions[upload] = name, query, b""
            host = headers["Host"]
            return 200, {"Location": f"http://{host}{target}&upload_id={upload}"}, {}
        return self._put(name, body, query)

    def _put(self, name: str, data: bytes, conditions: dict[str, str]) -> tuple[int, Any, Any]:
        generation = self.objects.get(name, (0, b""))[0]
        if (wanted := conditions.get("ifGenerationMatch")) is not None and int(wanted) != generation:
            return _error(412, f"{name} has generation {generation}")
        self.objects[name] = next(self._generations), data
        return 200, {}, self._described(name)

    def _object(
        self, method: str, name: str, query: dict[str, str], headers: email.message.Message
    ) -> tuple[int, Any, Any]:
        if method == "DELETE":
            return self._with(method, name, lambda data: (204, {}, self.objects.pop(name) and b""))
        if query.get("alt") == "media":
            return self._with(method, name, lambda data: self._contents(name, data, headers, query))
        return self._with(method, name, lambda data: (200, {}, self._described(name)))

    def _with(
        self, method: str, name: str, do: Callable[[bytes], tuple[int, Any, Any]], *, copied: bool = False
    ) -> tuple[int, Any, Any]:
        if refused := self._refused(method, name):
            return refused
        if name not in self.objects:
            return _error(404, f"No such object: {name}")
        status, headers, body = do(self.objects[name][1])
        return (status, headers, {"done": True, "resource": body, **body}) if copied else (status, headers, body)

    def _contents(
        self, name: str, data: bytes, headers: email.message.Message, query: dict[str, str]
    ) -> tuple[int, Any, Any]:
        generation = str(self.objects[name][0])
        if query.get("ifGenerationNotMatch") == generation:
            return 304, {}, b""
        told = {"x-goog-generation": generation, "x-goog-stored-content-length": str(len(data)), "ETag": generation}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))
        if asked is None:
            return 200, told, data
        first = int(asked[1]) if asked[1] else max(0, len(data) - int(asked[2]))
        last = min(int(asked[2]) if asked[1] and asked[2] else len(data) - 1, len(data) - 1)
        if first > last:
            return 416, {"Content-Range": f"bytes */{len(data)}"}, b""
        return 206, {**told, "Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1]

    def _described(self, name: str) -> dict[str, Any]:
        generation, data = self.objects[name]
        bucket, _, inside = name.partition("/")
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": inside,
            "size": str(len(data)),
            "generation": str(generation),
            "metageneration": "1",
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "etag": str(generation),
            "storageClass": "STANDARD",
        }

    def _list(self, bucket: str, query: dict[str, str]) -> tuple[int, Any, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        after = max(query.get("pageToken", ""), query.get("startOffset", ""))
        items: list[dict[str, Any]] = []
        prefixes, token = set[str](), None
        for name in self.names(f"{bucket}/{prefix}"):
            inside = name.partition("/")[2]
            rest = inside[len(prefix) :]
            folder = prefix + rest.partition(delimiter)[0] + delimiter if delimiter and delimiter in rest else None
            if inside < after or folder in prefixes or (query.get("endOffset") and inside >= query["endOffset"]):
                continue
            if len(items) + len(prefixes) >= min(_PAGE, int(query.get("maxResults", _PAGE))):
                token = inside
                break
            if folder is not None:
                prefixes.add(folder)
            else:
                items.append(self._described(name))
        found: dict[str, Any] = {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}
        return 200, {}, found if token is None else {**found, "nextPageToken": token}


def _error(status: int, message: str) -> tuple[int, Any, Any]:
    return status, {}, {"error": {"code": status, "message": message, "errors": [{"message": message}]}}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, answer = self.bucket.answer(self.command, self.path, self.headers, body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/octet-stream" if answer is data else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _do

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # whoever asked may be killed, or not wait for the answer
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving() -> Iterator[tuple[Bucket, dict[str, str]]]:
    """A bucket for everybody, and the variables of the environment by which TensorStore and gcsfs find it."""
    bucket = Bucket()
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        environ = {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "NO_GCE_CHECK": "true",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask another service what kind of bucket this is
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",  # TensorStore would look for a machine's own
        }
        try:
            yield bucket, environ
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":  # to try by hand: prints the variables, serves until it is killed
    with serving() as (_, variables):
        print(" ".join(f"{name}={value}" for name, value in variables.items()), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    os._exit(0)
