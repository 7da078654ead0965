"""The service beside the bare predictor: requests per second, latency, memory, and what it does with too much.

    python bench/serving.py RUN [NAME=RUN ...] --seconds 5 --requests 100000
    python bench/serving.py RUN --minilm --only speed          # also an untrained MiniLM over the run's labels

*Bare* is `Predictor.predict` called in a loop in this process, with one text and with 64 at a time; *served* is a
`dexter serve` process asked over keep-alive connections by clients that send their next text when the last is
answered. Clients and service share the machine, and each client's own work is in its figures. Texts are those of the
run's labels, one to four of them strung together. Latencies are milliseconds seen by a client.

*Memory*: the service's resident set after 2,000 requests, and after `--requests` more. *Large bodies*: what a body of
300 MB costs, announced and not. *Flood*: requests at five times the rate of 64 clients, which do not wait for answers
to others, against `max_in_flight` 64. *CPU* is the service's processor time per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dexter.predict.predictor import Predictor

WARM_REQUESTS = 2_000
FLOOD_CONNECTIONS, FLOOD_FACTOR = 500, 5
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
            measure_limits(first, texts, options.seconds)
        if options.only in (None, "memory"):
            measure_memory(first, texts, options.requests)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, or NAME=FOLDER")
    parser.add_argument("--minilm", action="store_true", help="also an untrained MiniLM over the first run's labels")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--requests", type=int, default=100_000, help="of the memory measurement")
    parser.add_argument("--only", choices=["speed", "limits", "memory"])
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

    def add(self, status: int, milliseconds: float) -> None:
        """Note one answer."""
        self.milliseconds.setdefault(status, []).append(milliseconds)

    def rate(self, status: int = 200) -> float:
        """Answers per second."""
        return len(self.milliseconds.get(status, [])) / self.seconds

    def latency(self, percent: float, status: int = 200) -> float:
        """A percentile of the milliseconds."""
        return float(np.percentile(self.milliseconds.get(status, [np.nan]), percent))


def measure_speed(name: str, folder: Path, texts: Sequence[str], seconds: float) -> None:
    for size in (1, 64):
        predictor, cpu = Predictor.load(folder), time.process_time()
        seen = bare(predictor, texts, size, seconds)
        print_row(name, f"bare, {size} at a time", seen, size, cpu=time.process_time() - cpu)
    with serving(folder) as service:
        for clients in (1, 8, 64):
            asyncio.run(ask(service.port, texts, clients=clients, seconds=1.0))
            cpu = service.cpu_seconds()
            seen = asyncio.run(ask(service.port, texts, clients, seconds))
            print_row(name, f"served, {clients} clients", seen, cpu=service.cpu_seconds() - cpu)


def bare(predictor: Predictor, texts: Sequence[str], size: int, seconds: float) -> Seen:
    seen, started, position = Seen(), time.perf_counter(), 0
    while (now := time.perf_counter()) - started < seconds:
        predictor.predict([texts[(position + offset) % len(texts)] for offset in range(size)], 5)
        seen.add(200, 1_000 * (time.perf_counter() - now))
        position += size
    seen.seconds = time.perf_counter() - started
    return seen


def print_row(name: str, what: str, seen: Seen, texts_per_call: int = 1, *, cpu: float) -> None:
    rate = seen.rate() * texts_per_call
    each = 1e6 * cpu / (rate * seen.seconds)
    print(
        f"| {name} | {what} | {rate:,.0f} | {seen.latency(50):.1f} | {seen.latency(99):.1f} | {each:.0f} |", flush=True
    )
    if others := {status: len(values) for status, values in seen.milliseconds.items() if status != 200}:
        print(f"other answers: {others}")


# ---------------------------------------------------------------- limits and memory


def measure_limits(folder: Path, texts: Sequence[str], seconds: float) -> None:
    with serving(folder) as service:
        asyncio.run(ask(service.port, texts, clients=8, num_requests=WARM_REQUESTS))
        for announced in (True, False):
            before, started = service.resident_mb(), time.perf_counter()
            status, sent = send_large(service.port, announced=announced)
            took, after = time.perf_counter() - started, service.resident_mb()
            how = "announced" if announced else "in chunks"
            print(
                f"body of {LARGE_BODY >> 20} MB, {how}: {status} after {1_000 * took:.0f} ms and {sent / 2**20:.1f} MB "
                f"sent; resident {before:.0f} -> {after:.0f} MB"
            )
    with serving(folder, max_in_flight=64) as service:
        asyncio.run(ask(service.port, texts, clients=8, num_requests=WARM_REQUESTS))
        cpu = service.cpu_seconds()
        calm, before = asyncio.run(ask(service.port, texts, 64, seconds)), service.resident_mb()
        calm_cpu, cpu = service.cpu_seconds() - cpu, service.cpu_seconds()
        flood = asyncio.run(ask(service.port, texts, FLOOD_CONNECTIONS, 2 * seconds, rate=FLOOD_FACTOR * calm.rate()))
        flood_cpu = service.cpu_seconds() - cpu
        after, later = service.resident_mb(), asyncio.run(ask(service.port, texts, 64, seconds))
        per_cpu = flood.rate() * flood.seconds / flood_cpu / (calm.rate() * calm.seconds / calm_cpu)
        counts = Counter({status: len(values) for status, values in flood.milliseconds.items()})
        print(
            f"flood of {counts.total() / flood.seconds:,.0f} requests/s ({FLOOD_FACTOR} x {calm.rate():,.0f} wanted), "
            f"{FLOOD_CONNECTIONS:,} connections: {dict(counts)}; answered {flood.rate():,.0f}/s "
            f"({100 * flood.rate() / calm.rate():.0f}% of {calm.rate():,.0f}/s with 64 clients; "
            f"{100 * per_cpu:.0f}% per second of processor time); 429 p50 "
            f"{flood.latency(50, 429):.0f} ms, p99 {flood.latency(99, 429):.0f} ms; afterwards {later.rate():,.0f}/s; "
            f"resident {before:.0f} -> {after:.0f} MB"
        )


def measure_memory(folder: Path, texts: Sequence[str], num_requests: int) -> None:
    with serving(folder) as service:
        asyncio.run(ask(service.port, texts, clients=64, num_requests=WARM_REQUESTS))
        before, files = service.resident_mb(), service.num_files()
        seen = asyncio.run(ask(service.port, texts, clients=64, num_requests=num_requests))
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
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[Service]:
    command = [sys.executable, "-c", _LAUNCH, str(folder), json.dumps(settings)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        while not (port := re.search(r"http://127\.0\.0\.1:(\d+)", said)):
            if not said:
                sys.exit("the service did not start")
            said = process.stderr.readline()
        service = Service(process.pid, int(port[1]))
        asyncio.run(ask(service.port, ["ready?"], clients=1, num_requests=1))
        yield service
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


async def ask(
    port: int,
    texts: Sequence[str],
    clients: int,
    seconds: float | None = None,
    *,
    num_requests: int | None = None,
    rate: float | None = None,
) -> Seen:
    """Ask with so many clients, for a time or a number of requests; with a rate, as fast as that and not faster."""
    seen, taken, started = Seen(), 0, time.perf_counter()
    requests = [as_request(text) for text in texts]

    async def client(place: int) -> None:
        nonlocal taken
        turn = place
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while taken < num_requests if seconds is None else time.perf_counter() - started < seconds:
            if rate is not None:
                await asyncio.sleep(max(0.0, started + turn / rate - time.perf_counter()))
                turn = max(turn + clients, int((time.perf_counter() - started) * rate))
            number, taken = taken, taken + 1
            asked = time.perf_counter()
            writer.write(requests[number % len(requests)])
            status, closed = await read_answer(reader)
            seen.add(status, 1_000 * (time.perf_counter() - asked))
            if closed:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    await asyncio.gather(*(client(place) for place in range(clients)))
    seen.seconds = time.perf_counter() - started
    return seen


def as_request(text: str) -> bytes:
    body = json.dumps({"inputs": text, "k": 5}).encode()
    return b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(body), body)


HEAD = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status, and whether the connection is closed after it."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
    return int(head[9:12]), b"connection: close" in head


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
