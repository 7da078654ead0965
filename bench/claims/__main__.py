"""The command line of the claims: run, status, page."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence

import bench.claims
from bench.claims.claim import Claim, Results
from bench.claims.runner import run_missing
from bench.claims.trial import Trial


def load_claims() -> dict[int, Claim]:
    """Return every claim by its number."""
    names = [module.name for module in pkgutil.iter_modules(bench.claims.__path__) if module.name.startswith("claim_")]
    claims = [importlib.import_module(f"bench.claims.{name}").CLAIM for name in names]
    return {claim.number: claim for claim in sorted(claims, key=lambda claim: claim.number)}


def in_order(claims: Sequence[Claim], *, encoder: str, seeds: int) -> Iterator[Trial]:
    """Yield the trials of claims: three seeds of two studies of each, then of the other studies, then all seeds."""
    for studies, some in ((slice(2), range(3)), (slice(2, None), range(3)), (slice(None), range(3, seeds))):
        for claim in claims:
            found = claim.trials(studies, some)
            yield from (trial for trial in found if trial.seed < seeds and encoder in ("", trial.encoder))


def main() -> None:
    """Read the arguments and do it."""
    parser = argparse.ArgumentParser(description=bench.claims.__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["run", "status", "page"])
    parser.add_argument("claims", nargs="*", type=int, help="numbers of claims, the most important first; all if none")
    parser.add_argument("--encoder", default="", help="run only the trials of this encoder: static, MiniLM")
    parser.add_argument("--seeds", type=int, default=99, help="run at most this many seeds")
    arguments = parser.parse_args()
    known = load_claims()
    chosen = [known[number] for number in arguments.claims or known]
    if arguments.what == "run":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.exit(1 if run_missing(in_order(chosen, encoder=arguments.encoder, seeds=arguments.seeds)) else 0)
    if arguments.what == "status":
        for claim in chosen:
            (num_run, num_trials), seen = Results(claim).progress(), claim.seen
            words = f" (its words: after {seen})" if claim.why and seen != num_run else ""
            print(f"claim {claim.number}: {num_run} of {num_trials}, {claim.title}{words}")
        return
    from bench.claims.page import write_page

    write_page(list(known.values()))


if __name__ == "__main__":
    main()
