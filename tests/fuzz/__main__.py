"""``make fuzz``: draw cases from seeds, run them, and say which law is broken by what.

python -m fuzz --seed 7 --cases 1           # one case again
python -m fuzz --cases 500 --seconds 600    # from a seed of the clock, for at most ten minutes
python -m fuzz --processes --cases 100      # in real processes
"""

import argparse
import logging
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.cases import Case, draw
from fuzz.runs import REFUSED, check, in_processes, smallest


def main() -> None:
    """Run cases until one of the limits; the exit status says whether all laws held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="of the first case; the others follow it")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins after so many")
    parser.add_argument("--processes", action="store_true", help="in real processes instead of loopback")
    parser.add_argument("--show", action="store_true", help="print the cases")
    parser.add_argument("--whole", action="store_true", help="leave what fails as it is drawn, instead of making it smaller")
    options = parser.parse_args()
    logging.getLogger("gossamer").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    first = options.seed if options.seed is not None else int(time.time()) % 10**6 * 1000
    print(f"seeds {first} to {first + options.cases - 1}", flush=True)
    done, failed = Counter[str](), 0
    end = time.monotonic() + options.seconds
    numbers = iter(range(first, first + options.cases))
    for chosen in _batches(numbers, options.processes):
        if time.monotonic() > end:
            break
        told = in_processes(chosen, 60.0 + 20 * len(chosen)) if options.processes else [check(case) for case in chosen]
        for case, broken in zip(chosen, told, strict=True):
            done.update(_kinds(case))
            if options.show:
                print(case.code(), flush=True)
            if broken == REFUSED:
                done["cases refused with a reason"] += 1
            elif broken:
                failed += 1
                _report(case, broken, options.processes, options.whole)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(done.items())))
    print(f"{done['cases']} cases, {failed} failed")
    sys.exit(failed > 0)


def _batches(numbers, processes: bool):
    """Cases to be run together: in loopback one at a time, in processes some of one world, to share a launch."""
    waiting: dict[int, list[Case]] = {}
    for number in numbers:
        case = draw(number)
        if not processes:
            yield [case]
            continue
        if case.world == 1:
            continue
        waiting.setdefault(case.world, []).append(case)
        if len(waiting[case.world]) == 8:
            yield waiting.pop(case.world)
    yield from waiting.values()


def _report(case: Case, broken: str, processes: bool, whole: bool) -> None:
    where = " --processes" if processes else ""
    print(f"\nFAILED: PYTHONPATH=tests python -m fuzz --seed {case.seed} --cases 1{where}\n{case.code()}\n{broken}", flush=True)
    if not processes and not whole:
        least, text = smallest(case, broken)
        print(f"smaller: {least.code()}\n{text}\n", flush=True)


TOLD = ("batchnorm", "tied", "tied_by_memory", "single", "half", "channels_last", "transposed", "rarely", "unused", "giant")
OF_OURS = ("MasterWeights", "GossipAdamW", "OneBitAdam", "QAdam")


def _kinds(case: Case) -> list[str]:
    algorithm = case.make_algorithm()
    parts = [subject for subject in ("gradients", "weights") if algorithm.part(subject) is not None]
    exchanged = " and ".join(parts) or "inside the optimizer"
    kinds = ["cases", "exact" if algorithm.traits.exact and parts == ["gradients"] else exchanged]
    options = ("linear", "several", "scaler", "overflow", "evaluate", "resume", "join", "overlap_forward", "clip")
    kinds += [f"with a {layer}" for layer in dict.fromkeys(each.split(":")[0] for each in case.layers) if layer in TOLD]
    kinds += [f"with {case.optimizer.partition('(')[0]}"] if case.optimizer.startswith(OF_OURS) else []
    kinds += ["with lag"] if algorithm.cadence.lag else []
    return kinds + [f"with {name}" for name in options if getattr(case, name) not in (False, None, 0, 0.0)]


if __name__ == "__main__":
    main()
