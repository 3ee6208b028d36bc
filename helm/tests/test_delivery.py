"""How a model reaches the workers: `lockstep pull` from a server that breaks and from an S3-like store, several at once, and
workers that read their slices from the store itself.

The store is of this file: objects under /bucket/key, ranges, ETags, and a signature that must be there.
"""

import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import re
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.parse

BINARY = os.environ["LOCKSTEP_BIN"]
MODEL = pathlib.Path(os.environ["LOCKSTEP_TEST_MODEL"])
# Longest wait for anything.
PATIENCE = 60
CONTENT = bytes((index * 2654435761 >> 24) & 255 for index in range(3_000_000))
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Store:
    """Serves `objects` (path → bytes) with ranges; the first answers to GET end after so many bytes."""

    def __init__(self, objects, breaks=(), delay=0.0, needs_signature=False):
        self.objects, self.breaks, self.requests, self.lock = objects, list(breaks), [], threading.Lock()
        etags = {path: f'"{hashlib.md5(content).hexdigest()}"' for path, content in objects.items()}
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                self.answer(False)

            def do_GET(self):
                self.answer(True)

            def answer(self, has_body):
                wanted = self.headers.get("range")
                with store.lock:
                    store.requests.append((self.command, self.path, wanted))
                    # Google's client escapes the slashes of a name.
                    path = urllib.parse.unquote(self.path)
                    limit = store.breaks.pop(0) if has_body and store.breaks else None
                is_signed = self.headers.get("authorization", "").startswith("AWS4-HMAC-SHA256 Credential=someone/")
                content = store.objects.get(path)
                if needs_signature and not is_signed:
                    return self.refuse(403)
                if content is None:
                    return self.refuse(404)
                etag = etags[path]
                if self.headers.get("if-match", etag) != etag:
                    return self.refuse(412)
                first, last = 0, len(content) - 1
                if wanted:
                    first, end = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()
                    first, last = int(first), min(int(end or last), last)
                self.send_response(206 if wanted else 200)
                if wanted:
                    self.send_header("content-range", f"bytes {first}-{last}/{len(content)}")
                self.send_header("content-length", str(last + 1 - first))
                self.send_header("etag", etag)
                self.send_header("last-modified", "Sat, 01 Nov 2025 10:00:00 GMT")
                self.end_headers()
                if has_body:
                    time.sleep(delay)
                    body = memoryview(content)[first : last + 1]
                    self.wfile.write(body if limit is None else body[:limit])
                    if limit is not None:
                        self.close_connection = True
                        self.connection.shutdown(socket.SHUT_RDWR)

            def refuse(self, status):
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def environment(self):
        """What tells S3's tools to come here."""
        return {
            "PATH": os.environ["PATH"],
            "AWS_ENDPOINT": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "eu-central-1",
        }

    def ranges(self, command="GET"):
        return [wanted for asked, _, wanted in self.requests if asked == command]


def pull(source, output, *arguments, **options):
    command = [BINARY, "pull", source, f"--output={output}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **options)


class Delivery(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_a_broken_connection_is_resumed(self):
        with Store({"/m.gguf": CONTENT}, breaks=[1_000_000, 500_000]) as store:
            pulled = pull(f"{store.url}/m.gguf", self.folder, f"--sha256={SHA256}")
            self.assertEqual(pulled.returncode, 0, pulled.stderr)
            self.assertEqual((self.folder / "m.gguf").read_bytes(), CONTENT)
            ranges = store.ranges()
            self.assertIsNone(ranges[0])
            self.assertTrue(all(re.match(r"bytes=[1-9]\d*-", later) for later in ranges[1:]), ranges)

    def test_a_wrong_checksum_is_refused(self):
        with Store({"/m.gguf": CONTENT, "/bucket/m.gguf": CONTENT}) as store:
            for source in (f"{store.url}/m.gguf", "s3://bucket/m.gguf"):
                pulled = pull(source, self.folder, f"--sha256={'0' * 64}", env=store.environment())
                self.assertEqual(pulled.returncode, 1)
                self.assertIn(f"sha256 is {SHA256}, expected {'0' * 64}", pulled.stderr)
                self.assertFalse((self.folder / "m.gguf").exists())

    def test_of_many_at_once_one_fetches(self):
        """Init containers on a shared volume: with --wait all succeed, and the bytes come once."""
        with Store({"/m.gguf": CONTENT}, delay=0.5) as store:
            command = [BINARY, "pull", f"{store.url}/m.gguf", f"--output={self.folder}", f"--sha256={SHA256}"]
            waiting = [subprocess.Popen([*command, "--wait"], stdout=subprocess.PIPE, text=True) for _ in range(4)]
            outputs = [process.communicate(timeout=PATIENCE)[0] for process in waiting]
            self.assertEqual([process.returncode for process in waiting], [0] * 4)
            self.assertEqual(len(store.ranges()), 1)
            self.assertEqual(sum("was there already" in output for output in outputs), 3)

    def test_without_waiting_the_second_is_refused(self):
        with Store({"/m.gguf": CONTENT}, delay=2) as store:
            first = subprocess.Popen([BINARY, "pull", f"{store.url}/m.gguf", f"--output={self.folder}"], stdout=subprocess.DEVNULL)
            while not store.requests:
                time.sleep(0.01)
            second = pull(f"{store.url}/m.gguf", self.folder)
            self.assertEqual((second.returncode, first.wait(PATIENCE)), (1, 0))
            self.assertIn("another process is fetching this file", second.stderr)

    def test_an_object_arrives_over_breaks_with_credentials(self):
        with Store({"/bucket/models/m.gguf": CONTENT}, breaks=[700_000], needs_signature=True) as store:
            pulled = pull("s3://bucket/models/m.gguf", self.folder, f"--sha256={SHA256}", env=store.environment())
            self.assertEqual(pulled.returncode, 0, pulled.stderr)
            self.assertEqual((self.folder / "m.gguf").read_bytes(), CONTENT)

    def test_objects_arrive_from_the_other_clouds(self):
        """Google's by its JSON key, Azure's by the address of its emulator, each over a connection that breaks."""
        key = self.folder / "key.json"
        objects = {"/bucket/models/m.gguf": CONTENT, "/devstoreaccount1/container/models/m.gguf": CONTENT}
        for source in ("gs://bucket/models/m.gguf", "az://container/models/m.gguf"):
            with self.subTest(source), Store(objects, breaks=[600_000]) as store:
                google = {"gcs_base_url": store.url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
                key.write_text(json.dumps(google))
                variables = {"GOOGLE_SERVICE_ACCOUNT": str(key), "AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": store.url}
                output = self.folder / source.split(":")[0] / "m.gguf"
                pulled = pull(source, output, f"--sha256={SHA256}", env={"PATH": os.environ["PATH"], **variables})
                self.assertEqual(pulled.returncode, 0, pulled.stderr)
                self.assertEqual(output.read_bytes(), CONTENT)
                self.assertEqual(len(store.ranges()), 2, store.requests)

    def test_without_credentials_the_error_says_what_to_set(self):
        """And at once: the machine's own identity is asked for, where there is none."""
        wanted = {"s3://bucket/m.gguf": "AWS_ACCESS_KEY_ID", "gs://bucket/m.gguf": "GOOGLE_APPLICATION_CREDENTIALS"}
        with Store({}) as store:
            # No proxy of this machine answers for the address of clouds' machines.
            variables = {"PATH": os.environ["PATH"], "HTTP_PROXY": store.url, "http_proxy": store.url}
            for source, variable in wanted.items():
                begin = time.monotonic()
                pulled = pull(source, self.folder / "m.gguf", env=variables)
                self.assertEqual(pulled.returncode, 1)
                self.assertIn(f"{source}: no credentials: set {variable}", pulled.stderr.replace("GOOGLE_SERVICE_ACCOUNT or ", ""))
                self.assertLess(time.monotonic() - begin, 20, pulled.stderr)

    def test_an_interrupted_pull_of_an_object_goes_on(self):
        with Store({"/bucket/m.gguf": CONTENT}, breaks=[400_000] * 2 + [0] * 100) as store:
            process = subprocess.Popen(
                [BINARY, "pull", "s3://bucket/m.gguf", f"--output={self.folder}"], env=store.environment(), stderr=subprocess.DEVNULL
            )
            partial = self.folder / "m.gguf.partial"
            end = time.monotonic() + PATIENCE
            while not (partial.exists() and partial.stat().st_size >= 400_000):
                self.assertLess(time.monotonic(), end)
                time.sleep(0.02)
            process.kill()
            process.wait()
            held = partial.stat().st_size
            store.breaks.clear()
            store.requests.clear()
            pulled = pull("s3://bucket/m.gguf", self.folder, env=store.environment())
            self.assertEqual(pulled.returncode, 0, pulled.stderr)
            self.assertIn(SHA256, pulled.stdout)
            self.assertEqual(store.ranges(), [f"bytes={held}-{len(CONTENT) - 1}"])

    def test_what_cannot_be_had_is_said_at_once(self):
        with Store({}, needs_signature=True) as store:
            missing = pull("s3://bucket/none.gguf", self.folder, env=store.environment())
            self.assertEqual(missing.returncode, 1)
            self.assertIn("s3://bucket/none.gguf", missing.stderr)
            stranger = {**store.environment(), "AWS_ACCESS_KEY_ID": "another"}
            self.assertEqual(pull("s3://bucket/none.gguf", self.folder, env=stranger).returncode, 1)
            self.assertLess(len(store.requests), 8)

    def test_workers_read_their_slices_from_the_store(self):
        """Two stages over two workers: each reads its half of the layers, nothing is written to a disk."""
        with Store({"/bucket/smol.gguf": MODEL.read_bytes()}, breaks=[5_000_000], needs_signature=True) as store:
            ready = self.folder / "ready.json"
            command = [BINARY, "up", "--model=s3://bucket/smol.gguf", "--workers=2", "--pipeline-parallel=2", "--device=cpu"]
            command += ["--threads-per-worker=1", "--grpc-port=0", "--http-port=0", f"--ready-file={ready}", "--exit-on-stdin-close"]
            log = self.enterContext(open(self.folder / "log", "w"))
            up = subprocess.Popen(command, env={**store.environment(), "HOME": str(self.folder)}, stdin=subprocess.PIPE, stdout=log, stderr=log)
            with contextlib.ExitStack() as stack:
                stack.callback(up.wait, PATIENCE)
                stack.callback(up.stdin.close)
                end = time.monotonic() + PATIENCE
                while not ready.exists():
                    text = pathlib.Path(log.name).read_text()
                    self.assertTrue(up.poll() is None and time.monotonic() < end, text)
                    time.sleep(0.1)
                server = json.loads(ready.read_text())["grpc"]
                said = subprocess.run(
                    [BINARY, "generate", f"--server={server}", "--temperature=0", "--max-tokens=8", "The capital of France is"],
                    capture_output=True, text=True, timeout=PATIENCE,
                )  # fmt: skip
            self.assertEqual(said.returncode, 0, said.stderr)
            self.assertIn("Paris", said.stdout)
            asked = 0
            for wanted in store.ranges():
                self.assertIsNotNone(wanted, "the whole object was asked for")
                first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups()
                asked += int(last) + 1 - int(first)
            # Each its half of the layers, both the header and the tied embedding, which is a quarter: 1.35 in all.
            self.assertLess(asked, 1.5 * MODEL.stat().st_size)


if __name__ == "__main__":
    unittest.main()
