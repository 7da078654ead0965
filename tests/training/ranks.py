"""Several ranks for a test: forked processes that meet over gloo, each running the same function."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from dexter.training.distributed import ProcessGroup, joined


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 240.0, start: str = "fork"
) -> list[Any]:
    """What `function(world, *arguments)` returned on each rank; the first failure of any is raised here.

    CUDA cannot be used in a process that was forked: give `start="spawn"`, and a function of a module.
    """
    if num_ranks == 1:
        return [function(ProcessGroup(), *arguments)]
    context = multiprocessing.get_context(start)
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(target=_work, args=(rank, num_ranks, port, pipes[rank][1], function, arguments))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        answers = []
        for rank, (receiving, sending) in enumerate(pipes):
            sending.close()
            assert receiving.poll(seconds), f"rank {rank} did not answer within {seconds} s"
            answers.append(receiving.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [f"rank {rank}: {answer}" for rank, (worked, answer) in enumerate(answers) if not worked]
    assert not failures, "\n".join(failures)
    return [answer for _, answer in answers]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(rank: int, size: int, port: int, pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"test-{port}",
    }
    try:
        with joined() as world:
            pipe.send((True, function(world, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        pipe.close()
        sys.stderr.flush()
        os._exit(1)
    pipe.close()
    os._exit(0)
