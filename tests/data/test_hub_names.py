"""Data sets by their hub names, from a hub that is a folder behind a local HTTP server."""

import hashlib
import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from PIL import Image

datasets = pytest.importorskip("datasets")

COMMIT = "0123456789abcdef" * 2 + "01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """What datasets asks of a hub about one repository, me/pets, at one commit."""

    protocol_version = "HTTP/1.1"
    root: Path
    ranges: list[str]

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        if asked := re.fullmatch(r"/datasets/me/pets/resolve/[^/]+/(.+)", path):
            self.give(self.root / asked[1])
        elif re.fullmatch(r"/api/datasets/me/pets(/revision/[^/]+)?", path):
            siblings = [{"rfilename": file["path"]} for file in self.files()]
            self.answer(200, json.dumps({"id": "me/pets", "sha": COMMIT, "siblings": siblings}))
        elif asked := re.fullmatch(r"/api/datasets/me/pets/tree/[^/]+(/data)?", path):
            folder = {"type": "directory", "path": "data", "oid": COMMIT}
            self.answer(200, json.dumps(self.files() if asked[1] else [folder]))
        else:
            self.answer(404, headers={"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def files(self):
        return [
            {"type": "file", "path": str(p.relative_to(self.root)), "size": p.stat().st_size,
             "oid": hashlib.sha1(p.read_bytes()).hexdigest()}
            for p in sorted(self.root.rglob("*.parquet"))
        ]  # fmt: skip

    def give(self, path):
        if not path.is_file():
            missing = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            return self.answer(404, headers=missing)
        body, code = path.read_bytes(), 200
        headers = {"ETag": f'"{path.name}"', "X-Repo-Commit": COMMIT}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2]), len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            body, code = body[first : last + 1], 206
            self.ranges.append(path.name)
        return self.answer(code, body, headers)

    def answer(self, code, body=b"", headers=None):
        body = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path):
    """A hub's environment, and the names of the files of which parts were asked for."""
    served = type("ThisHub", (Hub,), {"root": tmp_path / "hub", "ranges": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "REGARD_CACHE": str(tmp_path / "regard"),
    }
    yield served, environment
    server.shutdown()


def write_shard(path, values):
    def encoded(value):
        buffer = io.BytesIO()
        Image.new("RGB", (5, 4), (value, 0, 0)).save(buffer, "PNG")
        return buffer.getvalue()

    names = datasets.ClassLabel(names=["zebra", "ant"])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    stored = {"image": [{"bytes": encoded(v), "path": None} for v in values]}
    stored["label"] = [v % 2 for v in values]
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(stored, features=features).to_parquet(path, batch_size=5)


CODE = """
import json, sys
from regard.data.open import open_data
for spec in ("hf:me/pets", "stream:me/pets"):
    data = open_data(spec)
    print(json.dumps({
        "classes": data.classes,
        **{t: [int(s.read(i)[0, 0, 0]) for i in range(len(s))] for t, s in data.splits.items()},
    }))
"""


def test_a_hub_name_is_loaded_and_streamed(hub):
    served, environment = hub
    write_shard(served.root / "data/train-00000-of-00002.parquet", range(10))
    write_shard(served.root / "data/train-00001-of-00002.parquet", range(10, 20))
    write_shard(served.root / "data/validation-00000-of-00001.parquet", range(100, 106))
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted = {
        "classes": ["ant", "zebra"],
        "train": list(range(20)),
        "val": list(range(100, 106)),
    }
    assert [json.loads(line) for line in done.stdout.splitlines()] == [wanted, wanted]
    assert set(served.ranges) == {path.name for path in served.root.rglob("*.parquet")}


OFFLINE = """
import json, sys
from regard.__main__ import run
from regard.data.open import open_data
for spec in ("hf:me/none", "stream:me/none"):
    print(run(["inspect", spec]))
data = open_data("stream:me/pets")
print(sorted(s.name(i) for s in data.splits.values() for i in range(len(s)))[0])
"""


def test_without_a_hub_names_are_refused_and_folders_open(hub, tmp_path):
    """What looks like NAME but lies here is read from here."""
    _, environment = hub
    write_shard(tmp_path / "me/pets/train.parquet", range(20))
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE],
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == ["2", "2", "train.parquet/0"], done.stderr
    for kind in ("hf", "stream"):
        assert f"{kind}:me/none cannot be loaded" in done.stderr
    assert "give a hub name, or the path of" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "inspect").exists()
