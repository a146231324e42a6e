"""A picture of a result: how the run went from second to second, or its figures side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from waltzd.disk.real import translate
from waltzd.errors import NotInstalled

if TYPE_CHECKING:
    from waltzctl.bench.result import Result

WIDTH, HEIGHT = 8.0, 5.0
FORMATS = (".png", ".svg", ".pdf")


def check() -> None:
    """Whether pictures can be drawn: asked before a run that takes minutes."""
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise NotInstalled("matplotlib is not installed", extra="charts") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(result: Result, path: Path) -> None:
    pyplot = _pyplot()
    figure = pyplot.figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    if len(result.windows) > 1:
        _over_time(figure, result)
    else:
        _side_by_side(figure, result)
    figure.suptitle(f"waltzctl bench {result.bench}: {result.place.durability}", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise translate(error, f"writing {path}") from error
    finally:
        pyplot.close(figure)


def _over_time(figure: Any, result: Result) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True)
    seconds = [window.second for window in result.windows]
    upper.plot(seconds, [window.rate for window in result.windows], color="tab:blue")
    upper.set_ylabel("transactions a second")
    upper.set_ylim(bottom=0)
    for name, style, values in (
        ("p50", "-", [1000 * window.p50 for window in result.windows]),
        ("p99", "--", [1000 * window.p99 for window in result.windows]),
    ):
        lower.plot(seconds, values, style, color="tab:orange", label=name)
    lower.set_ylabel("latency, ms")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("seconds")
    lower.legend()
    for axes in (upper, lower):
        axes.grid(alpha=0.3)


def _side_by_side(figure: Any, result: Result) -> None:
    axes = figure.subplots()
    names = [series.name for series in result.series]
    if any(series.latencies for series in result.series):
        axes.barh(names, [1000 * series.latencies.get(50.0, 0.0) for series in result.series])
        axes.set_xlabel("median, ms")
    else:
        axes.barh(names, [series.rate for series in result.series])
        axes.set_xlabel("transactions a second")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
