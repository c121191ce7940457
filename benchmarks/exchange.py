"""What an exchange of weights costs: in shared memory over one torch.lerp_ of their size, on the network over sockets.

Two processes hold real weights and real transports and exchange over shared memory: each copies its weights and checks
them, adds the difference of the two snapshots, and folds it in. The same two processes run the lerp, both at once. Then
they exchange over TCP, and send the same bytes through plain sockets; and the same on a link of limited rate.

example: python benchmarks/exchange.py --parameters 41000000 --json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import common
import exchanging
from driven import Driven, Took
from exchanging import connect, pair, wall_s
from link import LinkUnavailableError, limited_link

from antiphon.records import Json, record

PARAMETERS = 41_000_000
LINK_GBIT_PER_S = 4.0
LOOPBACK = "127.0.0.1"
WARMUPS = 2

PASSES = {"copy": 2, "difference": 3, "fold": 3}
"""Arrays that each part of an exchange reads or writes, at the least."""
LERP_PASSES = 3
FRESH = 2
"""Arrays that are written unread (snapshot, D), so that the cache reads them first; the lerp has none."""


def shared_samples(repeats: int, ends: Driven) -> dict[str, list[float]]:
    """Return what each repeat gave: ratios of the dearer end, and seconds."""
    samples: dict[str, list[float]] = {}
    for repeat in range(-WARMUPS, repeats):
        lerp, floor, exchange = ends.all("lerp"), ends.all("floor"), ends.all("exchange", "shared")
        if repeat < 0:
            continue
        values = {
            "shared_over_lerp_cpu": _over(exchange, lerp),
            "shared_over_lerp_wall": _from_start(exchange) / wall_s(lerp),
            "floor_over_lerp_cpu": _over(floor, lerp),
            "lerp_cpu_s": max(took["cpu_s"] for took in lerp),
            "lerp_wall_s": wall_s(lerp),
            "shared_cpu_s": max(took["cpu_s"] for took in exchange),
            "shared_wall_s": _from_start(exchange),
            **{f"shared_{part}": max(took[part] for took in exchange) for part in ("snapshot_s", "add_s", "fold_s")},
        }
        _note(samples, values)
        common.progress(
            f"repeat {repeat + 1} of {repeats}: an exchange is {values['shared_over_lerp_cpu']:.2f} lerps of CPU time"
            f" at each end, {values['shared_over_lerp_wall']:.2f} of wall time"
        )
    return samples


def _note(samples: dict[str, list[float]], values: dict[str, float]) -> None:
    for name, value in values.items():
        samples.setdefault(name, []).append(value)


def _over(measured: Sequence[Took], base: Sequence[Took]) -> float:
    return max(over["cpu_s"] / under["cpu_s"] for over, under in zip(measured, base, strict=True))


def _from_start(exchange: Sequence[Took]) -> float:
    """From learner 0's start to the later commit."""
    return max(took["ended_s"] for took in exchange) - exchange[0]["began_s"]


def _from_snapshots(pull: Sequence[Took]) -> float:
    """From when both ends have the copy that they send to when both have the other's, and found it whole."""
    return max(took["ended_s"] for took in pull) - max(took["snapshot_ended_s"] for took in pull)


def _on_the_wire(exchange: Sequence[Took]) -> float:
    """From when the later end has its snapshot to when the initiator, having the difference, adds it."""
    return exchange[0]["ended_s"] - exchange[0]["add_s"] - exchange[1]["snapshot_ended_s"]


def network_samples(repeats: int, ends: Driven) -> dict[str, list[float]]:
    """Return the same of the network over loopback; both plain sockets and network send an array each way at once."""
    connect(ends, [LOOPBACK, LOOPBACK])
    samples: dict[str, list[float]] = {}
    for repeat in range(-WARMUPS, repeats):
        sockets, pull, exchange = ends.all("sockets"), ends.all("pull"), ends.all("exchange", "float32")
        if repeat < 0:
            continue
        values = {
            "network_bytes_over_sockets": wall_s(sockets) / _from_snapshots(pull),
            "network_exchange_over_sockets": wall_s(sockets) / _from_start(exchange),
            "sockets_s": wall_s(sockets),
            "network_bytes_s": _from_snapshots(pull),
            "network_exchange_s": _from_start(exchange),
            "sockets_cpu_s": max(took["cpu_s"] for took in sockets),
            "network_bytes_cpu_s": max(took["cpu_s"] for took in pull),
            "network_exchange_cpu_s": max(took["cpu_s"] for took in exchange),
        }
        _note(samples, values)
        common.progress(
            f"repeat {repeat + 1} of {repeats}: over plain sockets the network brings"
            f" {values['network_bytes_over_sockets']:.2f} of the bytes a second, and an exchange in"
            f" {1 / values['network_exchange_over_sockets']:.2f} of the time"
        )
    return samples


def limited_samples(parameters: int, repeats: int) -> tuple[dict[str, list[float]], str]:
    """Return what a link of limited rate between two namespaces gave; or nothing, and why there is none."""
    samples: dict[str, list[float]] = {}
    try:
        with limited_link(LINK_GBIT_PER_S) as hosts, pair(parameters, [host.prefix for host in hosts]) as ends:
            connect(ends, [host.address for host in hosts])
            for repeat in range(-WARMUPS, repeats):
                sockets_s = wall_s(ends.all("sockets"))
                float32, bfloat16 = ends.all("exchange", "float32"), ends.all("exchange", "bfloat16")
                values = {
                    "bfloat16_gain": _from_start(float32) / _from_start(bfloat16),
                    "bfloat16_wire_gain": _on_the_wire(float32) / _on_the_wire(bfloat16),
                    "limited_sockets_s": sockets_s,
                    "limited_float32_s": _from_start(float32),
                    "limited_bfloat16_s": _from_start(bfloat16),
                }
                if repeat >= 0:
                    _note(samples, values)
    except LinkUnavailableError as error:
        return {}, str(error)
    return samples, ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the script's own arguments."""
    parser.add_argument(
        "--parameters", type=int, default=PARAMETERS, metavar="N", help=f"float32 weights (default {PARAMETERS})"
    )
    parser.add_argument("--no-link", action="store_true", help="leave the limited link out (it needs root)")


def run(args: argparse.Namespace) -> Json:
    """Measure, print, and return the record."""
    common.at_least("--parameters", args.parameters, 1)
    result = record("benchmarks/exchange.py", threads_per_learner=1)
    with pair(args.parameters) as ends:
        ends.all("start")
        before = ends.all("checksum")
        samples = shared_samples(args.repeats, ends)
        after = ends.all("checksum")
        samples |= network_samples(args.repeats, ends)
    note = "left out (--no-link)"
    if not args.no_link:
        limited, note = limited_samples(args.parameters, args.repeats)
        samples |= limited
    result |= {name: common.median(values) for name, values in samples.items()}
    result |= {
        "parameters": args.parameters,
        "repeats": args.repeats,
        "passes": {**PASSES, "lerp": LERP_PASSES},
        "floor_over_lerp_bytes": sum(PASSES.values()) / LERP_PASSES,
        "floor_over_lerp_bytes_fresh": (sum(PASSES.values()) + FRESH) / LERP_PASSES,
        "sum_error": _sum_error(before, after),
        "limited_link": note or f"{LINK_GBIT_PER_S:g} Gbit/s",
        "samples": samples,
    }
    show(result, args.json)
    return result


def _sum_error(before: Sequence[Took], after: Sequence[Took]) -> float:
    """By how much the sum of all weights moved, over the sum of their magnitudes."""
    moved = sum(took["sum"] for took in after) - sum(took["sum"] for took in before)
    return abs(moved) / sum(took["magnitude"] for took in before)


def show(result: Json, as_json: bool) -> None:
    """Print the table."""

    def spread(name: str) -> str:
        values = result["samples"][name]
        return f"{result[name]:.2f}  ({min(values):.2f} to {max(values):.2f})"

    rows = [
        ["one lerp, ms", f"{result['lerp_wall_s'] * 1e3:.1f}"],
        ["exchange over lerp, CPU time of each end", spread("shared_over_lerp_cpu")],
        ["exchange over lerp, wall time", spread("shared_over_lerp_wall")],
        ["its passes alone, whole arrays, CPU time", spread("floor_over_lerp_cpu")],
        ["its passes by bytes (with what a cache reads first)", _floors(result)],
        ["snapshot / difference / fold, ms", _parts(result)],
        ["sum of all weights moved by, of their magnitudes", f"{result['sum_error']:.1e}"],
        ["plain sockets, both ways at once, ms", f"{result['sockets_s'] * 1e3:.1f}"],
        ["network over plain sockets: bytes", spread("network_bytes_over_sockets")],
        ["network over plain sockets: whole exchange", spread("network_exchange_over_sockets")],
        *_limited_rows(result, spread),
        ["load at start", f"{result['environment']['load_at_start']}"],
    ]
    common.print_table(f"An exchange of {result['parameters']:,} weights", ["", "median"], rows, as_json)


def _floors(result: Json) -> str:
    return f"{result['floor_over_lerp_bytes']:.2f}  ({result['floor_over_lerp_bytes_fresh']:.2f})"


def _parts(result: Json) -> str:
    return " / ".join(f"{result[f'shared_{part}_s'] * 1e3:.1f}" for part in ("snapshot", "add", "fold"))


def _limited_rows(result: Json, spread: Callable[[str], str]) -> list[list[str]]:
    link = result["limited_link"]
    if "bfloat16_gain" not in result:
        return [["limited link", link]]
    seconds = " / ".join(f"{result[f'limited_{what}_s'] * 1e3:.0f}" for what in ("sockets", "float32", "bfloat16"))
    return [
        [f"{link}: sockets / float32 / bfloat16, ms", seconds],
        [f"{link}: gain of bfloat16, whole exchange", spread("bfloat16_gain")],
        [f"{link}: gain of bfloat16, without copying and adding", spread("bfloat16_wire_gain")],
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--end"]:
        sys.exit(exchanging.work(int(sys.argv[-1])))
    sys.exit(common.main(__doc__ or "", configure, run))
