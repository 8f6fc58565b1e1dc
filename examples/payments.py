"""An agent that pays invoices over HTTP: each one once, whenever it is killed.

The payment service comes with it, as a server of its own that works like most: it does the work for the first request
with an ``Idempotency-Key``, refuses every other one with that key (409), and tells on request what came of it. Start
it, and in another terminal the agent::

    python -m examples.payments 8000 paid.jsonl
    PAYMENTS_URL=http://127.0.0.1:8000 dalsegno run examples.payments:agent --job payments \
        --source invoices.jsonl --key customer --sink out.jsonl

Each line of the source is an object with ``customer``, ``invoice`` and ``cents``. Kill either of the two whenever you
like and start it again: each invoice has one line in ``paid.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dalsegno import (
    Agent,
    IdempotencyKey,
    InputEvent,
    OutputEvent,
    RetryPolicy,
    RunnerContext,
    action,
)

# --- the agent ------------------------------------------------------------------------------------------------------

# What may be over in a moment: no connection, no answer in time (both are OSErrors), or a server that is busy.
TRY_AGAIN = RetryPolicy(attempts=8, backoff=0.2, retry_on=lambda error: is_temporary(error))


class Payments(Agent):
    @action(InputEvent)
    async def pay(self, event: InputEvent, ctx: RunnerContext) -> None:
        invoice, cents = event.input["invoice"], event.input["cents"]
        due = await ctx.now() + timedelta(days=14)
        receipt = await ctx.durable_execute(
            pay, invoice, cents, due.date().isoformat(), effect="idempotent", retry=TRY_AGAIN
        )
        ctx.send_event(OutputEvent(output={"invoice": invoice, "receipt": receipt["receipt"]}))


def pay(invoice: str, cents: int, due: str, key: IdempotencyKey) -> dict[str, Any]:
    """Pay once for this *key*, and return the receipt, also if an earlier attempt has paid already."""
    try:
        return request("POST", "/payments", key, {"invoice": invoice, "cents": cents, "due": due})
    except urllib.error.HTTPError as error:
        if error.code != 409:
            raise
        return request("GET", f"/payments/{key}", key)


def request(method: str, path: str, key: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request, with a time limit of its own: nothing could end the thread that it blocks."""
    url = os.environ.get("PAYMENTS_URL", "http://127.0.0.1:8000") + path
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body is not None else None
    asked = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(asked, timeout=10) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def is_temporary(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 425, 429, 500, 502, 503, 504)
    return isinstance(error, OSError)


agent = Payments()


# --- the service ----------------------------------------------------------------------------------------------------


class Service(ThreadingHTTPServer):
    """Pays by writing lines into *ledger*. *when_paid* is called with the key before the answer leaves."""

    daemon_threads = True

    def __init__(self, port: int, ledger: Path, when_paid: Callable[[str], None] = lambda key: None) -> None:
        self.ledger = ledger
        self.when_paid = when_paid
        self.refused = 0
        self._lock = threading.Lock()
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        self._payments = {payment["key"]: payment for payment in map(json.loads, lines)}
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def pay(self, key: str, order: dict[str, Any]) -> dict[str, Any] | None:
        """The payment, or None if there is one for that key."""
        with self._lock:
            if key in self._payments:
                self.refused += 1
                return None
            payment = {"key": key, "receipt": f"R{len(self._payments) + 1}", **order}
            with self.ledger.open("a") as ledger:
                ledger.write(json.dumps(payment) + "\n")
            self._payments[key] = payment
        self.when_paid(key)
        return payment

    def find(self, key: str) -> dict[str, Any] | None:
        with self._lock:
            return self._payments.get(key)


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        payment = self.server.pay(self.headers["Idempotency-Key"], order)
        self._answer(*(201, payment) if payment else (409, {"error": "this key has been used"}))

    def do_GET(self) -> None:
        payment = self.server.find(self.path.rpartition("/")[2])
        self._answer(*(200, payment) if payment else (404, {"error": "nothing was paid with this key"}))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client was killed
            self.close_connection = True


if __name__ == "__main__":
    with Service(int(sys.argv[1]), Path(sys.argv[2])) as service:
        service.serve_forever()
