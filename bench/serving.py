"""The service beside the bare predictor: requests per second, latency, memory, and what it does with too much.

    python bench/serving.py RUN [NAME=RUN ...] --seconds 5 --requests 100000
    python bench/serving.py RUN --minilm --only speed          # also an untrained MiniLM over the run's labels

*Bare* is `Predictor.predict` called in a loop in this process, with one text and with 64 at a time; *served* is a
`dexter serve` process asked over keep-alive connections by clients that send their next text when the last is
answered. Clients and service share the machine. Texts are those of the run's labels, one to four of them strung
together. Latencies are milliseconds seen by a client, *CPU* is the processor time per text, of the service if it is
served. The last row has the share of the bare rate that 64 clients get, in turns of a second each.

*Memory*: the service's resident set after 2,000 requests, and after `--requests` more. *Large bodies*: what a body of
300 MB costs, announced and not. *Flood*: what is left of the answers of 64 clients where 900 connections send five
times as many requests in any case (open), ask again as soon as they are refused (closed), or a second later, as they
are told (polite); calm and flood take turns. Answers count until the last request of a turn is answered. The least that
a refusal can cost is what a bare loop takes that receives a request and sends a 429, and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dexter.predict.predictor import Predictor

WARM_REQUESTS = 2_000
FLOOD_CONNECTIONS, FLOOD_FACTOR, FLOOD_TURNS, PAUSE_SECONDS = 900, 5, 3, 1.0
LARGE_BODY = 300 * 2**20


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as temporary:
        runs = dict(name_and_folder(argument) for argument in options.runs)
        first = next(iter(runs.values()))
        if options.minilm:
            runs["minilm"] = make_minilm(first, Path(temporary) / "minilm")
        texts = mixed_texts(first, 4_096)
        if options.only in (None, "speed"):
            print("| run | | requests/s | p50 ms | p99 ms | CPU us |\n|---|---|---|---|---|---|")
            for name, folder in runs.items():
                measure_speed(name, folder, texts, options.seconds)
        if options.only in (None, "limits"):
            measure_limits(first, texts)
        if options.only in (None, "flood"):
            measure_flood(first, texts, options.seconds)
        if options.only in (None, "memory"):
            measure_memory(first, texts, options.requests)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, or NAME=FOLDER")
    parser.add_argument("--minilm", action="store_true", help="also an untrained MiniLM over the first run's labels")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--requests", type=int, default=100_000, help="of the memory measurement")
    parser.add_argument("--only", choices=["speed", "limits", "flood", "memory"])
    return parser.parse_args()


def name_and_folder(argument: str) -> tuple[str, Path]:
    name, separator, folder = argument.rpartition("=")
    return (name, Path(folder)) if separator else (Path(folder).resolve().name, Path(folder))


def mixed_texts(run: Path, count: int) -> list[str]:
    labels = Predictor.load(run).labels.texts
    generator = np.random.default_rng(0)
    return [" ".join(labels[at] for at in generator.integers(0, len(labels), 1 + n % 4)) for n in range(count)]


def make_minilm(run: Path, folder: Path) -> Path:
    """A model of the same labels whose encoder is MiniLM as published: as fast as a trained one."""
    from dexter.encoders.head_arrays import DualArrays
    from dexter.encoders.pretrained import locate_minilm
    from dexter.encoders.transformer import TransformerEncoder
    from dexter.model.model import Model

    labels = Predictor.load(run).labels
    encoder = TransformerEncoder.from_pretrained(locate_minilm())
    vectors_LD = encoder.embed(encoder.tokenize(labels.texts, side="label"))
    head = DualArrays(temperature=0.05)
    Model(encoder=encoder, head=head, labels=labels, representations_LD=vectors_LD, facts={}).save(folder)
    return folder


# ---------------------------------------------------------------- speed


@dataclass
class Seen:
    """What clients saw."""

    seconds: float = 0.0
    milliseconds: dict[int, list[float]] = field(default_factory=dict)
    """By status."""
    cpu: float = 0.0
    """Processor time of the service."""

    def count(self, status: int = 200) -> int:
        """Number of answers."""
        return len(self.milliseconds.get(status, []))

    def add(self, status: int, milliseconds: float) -> None:
        """Note one answer."""
        self.milliseconds.setdefault(status, []).append(milliseconds)

    def rate(self, status: int = 200) -> float:
        """Answers per second."""
        return self.count(status) / self.seconds

    def latency(self, percent: float, status: int = 200) -> float:
        """A percentile of the milliseconds."""
        return float(np.percentile(self.milliseconds.get(status, [np.nan]), percent))


def measure_speed(name: str, folder: Path, texts: Sequence[str], seconds: float) -> None:
    predictor = Predictor.load(folder)
    for size in (1, 64):
        print_row(name, f"bare, {size} at a time", bare(predictor, texts, size, seconds), size)
    with serving(folder) as service:
        for num_clients in (1, 8, 64):
            clients = Clients(service, texts, num_clients)
            clients.ask(num_clients, seconds=1.0)
            print_row(name, f"served, {num_clients} clients", clients.ask(num_clients, seconds=seconds))
        alone, served = Seen(), Seen()
        for _ in range(max(2, int(seconds))):
            bare(predictor, texts, 64, 1.0, alone)
            clients.ask(64, seconds=1.0, seen=served)
        rate = served.rate() / (64 * alone.rate())
        cpu = alone.cpu / (64 * alone.count()) / (served.cpu / served.count())
        print(f"| {name} | served beside bare, in turns | {100 * rate:.0f}% | | | {100 * cpu:.0f}% |", flush=True)


def bare(predictor: Predictor, texts: Sequence[str], size: int, seconds: float, seen: Seen | None = None) -> Seen:
    seen, started, cpu, position = seen or Seen(), time.perf_counter(), time.process_time(), 0
    while (now := time.perf_counter()) - started < seconds:
        predictor.predict([texts[(position + offset) % len(texts)] for offset in range(size)], 5)
        seen.add(200, 1_000 * (time.perf_counter() - now))
        position += size
    seen.seconds += time.perf_counter() - started
    seen.cpu += time.process_time() - cpu
    return seen


def print_row(name: str, what: str, seen: Seen, texts_per_call: int = 1) -> None:
    rate, each = seen.rate() * texts_per_call, 1e6 * seen.cpu / (seen.count() * texts_per_call)
    print(
        f"| {name} | {what} | {rate:,.0f} | {seen.latency(50):.1f} | {seen.latency(99):.1f} | {each:.0f} |", flush=True
    )
    if others := {status: len(values) for status, values in seen.milliseconds.items() if status != 200}:
        print(f"other answers: {others}")


# ---------------------------------------------------------------- limits and memory


def measure_limits(folder: Path, texts: Sequence[str]) -> None:
    with serving(folder) as service:
        Clients(service, texts, 8).ask(8, num_requests=WARM_REQUESTS)
        for announced in (True, False):
            before, started = service.resident_mb(), time.perf_counter()
            status, sent = send_large(service.port, announced=announced)
            took, after = time.perf_counter() - started, service.resident_mb()
            how = "announced" if announced else "in chunks"
            print(
                f"body of {LARGE_BODY >> 20} MB, {how}: {status} after {1_000 * took:.0f} ms and {sent / 2**20:.1f} MB "
                f"sent; resident {before:.0f} -> {after:.0f} MB"
            )


def measure_flood(folder: Path, texts: Sequence[str], seconds: float) -> None:
    with launch(_BARE_LOOP) as bare_loop:
        seen = Clients(bare_loop, texts, FLOOD_CONNECTIONS).ask(FLOOD_CONNECTIONS, seconds=seconds)
        print(f"bare loop: {1e6 * seen.cpu / seen.count(429):.1f} us of CPU per 429, {seen.rate(429):,.0f}/s")
    print(
        "| flood | answers by CPU | by time | 429 per answer | us of CPU per 429 | per answer | 429 p50 ms | p99 ms "
        "| 200 p50 ms | resident MB |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    with serving(folder) as service:
        clients = Clients(service, texts, FLOOD_CONNECTIONS)
        clients.ask(64, num_requests=WARM_REQUESTS)
        for kind in ("open", "closed", "polite"):
            calm, flood, before = Seen(), Seen(), service.resident_mb()
            for _ in range(FLOOD_TURNS):
                clients.ask(64, seconds=seconds, seen=calm)
                rate = FLOOD_FACTOR * calm.rate() if kind == "open" else None
                pause = PAUSE_SECONDS if kind == "polite" else 0.0
                clients.ask(FLOOD_CONNECTIONS, seconds=seconds, rate=rate, pause=pause, seen=flood)
            answer = calm.cpu / calm.count()
            refusal = (flood.cpu - answer * flood.count()) / max(1, flood.count(429))
            assert set(flood.milliseconds) <= {200, 429}, flood.milliseconds.keys()
            print(
                f"| {kind} | {100 * answer * flood.count() / flood.cpu:.0f}% | {100 * flood.rate() / calm.rate():.0f}% "
                f"| {flood.count(429) / flood.count():.1f} | {1e6 * refusal:.0f} | {1e6 * answer:.0f} "
                f"| {flood.latency(50, 429):.0f} | {flood.latency(99, 429):.0f} | {flood.latency(50):.0f} "
                f"| {before:.0f} -> {service.resident_mb():.0f} |",
                flush=True,
            )


def measure_memory(folder: Path, texts: Sequence[str], num_requests: int) -> None:
    with serving(folder) as service:
        clients = Clients(service, texts, 64)
        clients.ask(64, num_requests=WARM_REQUESTS)
        before, files = service.resident_mb(), service.num_files()
        seen = clients.ask(64, num_requests=num_requests)
        statuses = {status: len(values) for status, values in seen.milliseconds.items()}
        print(
            f"{num_requests:,} requests in {seen.seconds:.0f} s, answers {statuses}: resident {before:.1f} -> "
            f"{service.resident_mb():.1f} MB, open files {files} -> {service.num_files()}"
        )


# ---------------------------------------------------------------- the service and its clients


@dataclass
class Service:
    """A `dexter serve` process."""

    pid: int
    port: int

    def resident_mb(self) -> float:
        """Memory in use."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1_024

    def cpu_seconds(self) -> float:
        """Processor time so far, of all threads."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(each.read_text().split()[0]) for each in threads) / 1e9

    def num_files(self) -> int:
        """Open files and connections."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())


_LAUNCH = """
import sys, json
from pathlib import Path
from dexter.serving.server import serve
from dexter.serving.settings import ServeSettings
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
serve({"run": Path(sys.argv[1])}, ServeSettings(port=0, **json.loads(sys.argv[2])))
"""


_BARE_LOOP = """
import select, signal, socket, sys
listener, poll, connections = socket.create_server(("127.0.0.1", 0), backlog=2_048), select.epoll(), {}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
answer = b"HTTP/1.1 429 Too Many Requests\\r\\nContent-Length: 300\\r\\n\\r\\n" + b"x" * 300
poll.register(listener.fileno(), select.EPOLLIN)
print(f"http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
while True:
    for number, _ in poll.poll():
        if number == listener.fileno():
            connection = listener.accept()[0]
            connections[connection.fileno()] = connection
            poll.register(connection.fileno(), select.EPOLLIN)
        elif connections[number].recv(65_536):
            connections[number].send(answer)
        else:
            poll.unregister(number)
            connections.pop(number).close()
"""


def serving(folder: Path, **settings: object) -> AbstractContextManager[Service]:
    return launch(_LAUNCH, str(folder), json.dumps(settings))


@contextmanager
def launch(script: str, *arguments: str) -> Iterator[Service]:
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        while not (port := re.search(r"http://127\.0\.0\.1:(\d+)", said)):
            if not said:
                sys.exit("the service did not start")
            said = process.stderr.readline()
        service = Service(process.pid, int(port[1]))
        Clients(service, ["ready?"], 1).ask(1, num_requests=1)
        yield service
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


class Clients:
    """Connections to a service, asked by one loop without a library: what a client costs is not the service's."""

    def __init__(self, service: Service, texts: Sequence[str], num_connections: int) -> None:
        self._service, self._requests = service, [as_request(text) for text in texts]
        self._poll, self._sockets, self._num_sent = select.epoll(), {}, 0
        self._unused = deque(self._connect() for _ in range(num_connections))

    def _connect(self) -> int:
        connection = socket.create_connection(("127.0.0.1", self._service.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._sockets[connection.fileno()] = connection
        self._poll.register(connection.fileno(), select.EPOLLIN)
        return connection.fileno()

    def ask(
        self,
        num_clients: int,
        *,
        seconds: float = float("inf"),
        num_requests: float = float("inf"),
        rate: float | None = None,
        pause: float = 0.0,
        seen: Seen | None = None,
    ) -> Seen:
        """Ask for a time or a number of requests, and wait for all answers; with a rate, as fast as that.

        A client that is refused pauses first. With a rate, requests go to whichever client is idle; one more than there
        are clients is not sent.
        """
        seen, cpu, started, num_due = seen or Seen(), self._service.cpu_seconds(), time.perf_counter(), 0
        idle = deque(self._unused.popleft() for _ in range(num_clients))
        asked: dict[int, float] = {}
        pausing: deque[tuple[float, int]] = deque()
        parts: dict[int, bytes] = {}
        while ((now := time.perf_counter()) < started + seconds and num_due < num_requests) or asked:
            if now < started + seconds:
                while pausing and pausing[0][0] <= now:
                    idle.append(pausing.popleft()[1])
                room = num_requests - num_due if rate is None else int((now - started) * rate) - num_due
                for _ in range(int(min(room, len(idle)))):
                    asked[client := idle.popleft()] = now
                    self._sockets[client].send(self._requests[self._num_sent % len(self._requests)])
                    self._num_sent += 1
                    num_due += 1
                num_due += 0 if rate is None else max(0, int((now - started) * rate) - num_due)
            for client, _ in self._poll.poll(0.001):
                if client not in asked:  # the service has closed an idle connection
                    waiting = idle if client in idle else self._unused
                    waiting.remove(client)
                    self._poll.unregister(client)
                    self._sockets.pop(client).close()
                    waiting.append(self._connect())
                    continue
                answer = parts.pop(client, b"") + self._sockets[client].recv(2**18)
                if not answer:
                    sys.exit("the service has closed a connection instead of answering")
                end, length = answer.find(b"\r\n\r\n") + 4, LENGTH.search(answer)
                if end < 4 or length is None or len(answer) < end + int(length[1]):
                    parts[client] = answer
                    continue
                now, status = time.perf_counter(), int(answer[9:12])
                seen.add(status, 1_000 * (now - asked.pop(client)))
                if status == 429 and pause:
                    pausing.append((now + pause, client))
                else:
                    idle.append(client)
        self._unused.extend(idle)
        self._unused.extend(client for _, client in pausing)
        seen.seconds += time.perf_counter() - started
        seen.cpu += self._service.cpu_seconds() - cpu
        return seen


LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def as_request(text: str) -> bytes:
    body = json.dumps({"inputs": text, "k": 5}).encode()
    return b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(body), body)


HEAD = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def send_large(port: int, *, announced: bool) -> tuple[int, int]:
    """Send a large body until there is an answer: its status (0: none arrived), and how much was sent."""
    length = b"Content-Length: %d" % LARGE_BODY if announced else b"Transfer-Encoding: chunked"
    part, sent, answer = b" " * 2**16, 0, b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        with suppress(ConnectionError):
            connection.sendall(HEAD + length + b"\r\n\r\n")
            while sent < LARGE_BODY and not select.select([connection], [], [], 0)[0]:
                connection.sendall(part if announced else b"10000\r\n" + part + b"\r\n")
                sent += len(part)
        with suppress(ConnectionError):
            answer = connection.recv(2**16)
    return int(answer.split(b" ", 2)[1]) if answer else 0, sent


if __name__ == "__main__":
    main()
