"""A picture of a report: when it happened, where it lies, and how large it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waltz_spark.analysis.report import Part, Report
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, NotInstalled, PathMissing

FORMATS = (".png", ".svg", ".pdf")
WIDTH, HEIGHT = 8.0, 7.0
BARS_MAX = 40
"""More partitions than this are shown by the hottest of them."""
_TICKS_MAX = 12


def check(path: Path) -> None:
    """Refuses a picture that cannot be drawn, before anything is read."""
    if path.suffix not in FORMATS:
        raise BadArgument(f"--chart {path}: it has to end in {', '.join(FORMATS)}", not_done="nothing was read")
    if not path.absolute().parent.is_dir():
        raise PathMissing(f"--chart {path}: there is no directory {path.parent}")
    try:
        import matplotlib
    except ImportError as error:
        raise NotInstalled("matplotlib is not installed", extra="charts") from error
    matplotlib.use("Agg")


def draw(report: Report, path: Path) -> None:
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    rows = figure.subplots(3 if report.times else 2, 1)
    hottest = report.hottest()[:BARS_MAX]
    if report.times:
        _bars(rows[0], report.times, "tab:blue", f"payload, MB by {report.time_unit}")
    _bars(rows[-2], hottest, "tab:green", "payload, MB by partition")
    names = [part.name for part in hottest]
    for name, values in (
        ("p50", [part.measure.p50 for part in hottest]),
        ("p99", [part.measure.p99 for part in hottest]),
        ("max", [part.measure.max for part in hottest]),
    ):
        rows[-1].plot(names, values, "o", label=name)
    rows[-1].set_ylabel("payload, bytes")
    rows[-1].set_yscale("symlog", linthresh=10)
    rows[-1].set_ylim(bottom=0, top=2 * max(1, report.total.max))
    rows[-1].set_xlabel("partition, hottest first")
    rows[-1].legend()
    for axes in rows:
        axes.grid(alpha=0.3, axis="y")
        _thin_ticks(axes)
    figure.suptitle(f"{report.source}: {report.total.transactions:,} transactions", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise translate(error, f"writing {path}") from error
    finally:
        pyplot.close(figure)


def _bars(axes: Any, parts: Sequence[Part], color: str, label: str) -> None:
    axes.bar([part.name or "unknown" for part in parts], [part.measure.bytes / 1e6 for part in parts], color=color)
    axes.set_ylabel(label, fontsize=8)


def _thin_ticks(axes: Any) -> None:
    """Hides names that would cover each other."""
    labels = axes.get_xticklabels()
    step = -(-len(labels) // _TICKS_MAX) or 1
    for number, label in enumerate(labels):
        label.set_visible(number % step == 0)
        label.set_fontsize(7)
