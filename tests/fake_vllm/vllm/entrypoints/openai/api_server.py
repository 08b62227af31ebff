"""A small HTTP server in the place of vLLM's: a real process that a test kills and stops. It rates a message by its
length; some words in a message make it misbehave."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ARGUMENTS = dict(each.removeprefix("--").split("=", 1) for each in sys.argv[1:] if "=" in each)
KEY = os.environ["VLLM_API_KEY"]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["messages"][0]["content"]
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            self._send(401, {"error": "no key"})
        elif "flood" in text:
            self._reply("x" * 2**23 + "Rating: 1")
        elif "busy" in text:
            self._send(503, {"error": "busy"})
        elif "arguments" in text:
            wanted = (ARGUMENTS["host"], ARGUMENTS["max-num-seqs"], ARGUMENTS["max-model-len"])
            matches = (
                wanted == ("127.0.0.1", "4", "300") and request["max_tokens"] == 16 and request["temperature"] == 0
            )
            self._reply(f"Rating: {int(matches and KEY not in ' '.join(sys.argv))}")
        else:
            self._reply(f"It is fine. Rating: {len(text)}")

    def _reply(self, text: str) -> None:
        self._send(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    if "seed" in ARGUMENTS:
        sys.exit("no kernel image is available")
    ThreadingHTTPServer((ARGUMENTS["host"], int(ARGUMENTS["port"])), Handler).serve_forever()
