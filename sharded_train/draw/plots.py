"""Line and bar charts for notebooks, on matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from sharded_train.errors import ConfigError

COLOURS = ("#3f6fd8", "#e08a1e", "#2a9d78", "#d4609c", "#8b5fd0", "#1c9fb8", "#8c6d46")
MOST_LEVEL = 70  # characters of all names below bars, beyond which they would touch
PAPER: Any = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
}  # whatever the theme


def plot(
    lines: Mapping[str, Sequence[float]],
    x: Sequence[Any],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    log: str = "",
    kind: str = "line",
) -> Any:
    """A matplotlib figure of values by name over `x`; `kind` "line" or "bar", `log` names logarithmic axes ("x", "xy").

    Labels have their units: `ylabel="memory, GiB"`. It brings white paper, so that it can be read on dark pages too.

    Raises ConfigError: matplotlib is not installed, or a line has not as many values as `x`.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigError("draw.plot needs matplotlib: pip install 'sharded-train[notebooks]'") from error
    for name, values in lines.items():
        if len(values) != len(x):
            raise ConfigError(f"draw.plot: {name!r} has {len(values)} values, x has {len(x)}")
    with matplotlib.rc_context(PAPER):

        class Plot(Figure):
            """Shows itself in a notebook without pyplot."""

            def _repr_png_(self) -> bytes:
                png = io.BytesIO()
                self.savefig(png, format="png", dpi=110)
                return png.getvalue()

        figure = Plot(figsize=(8.4, 3.8), dpi=110, layout="constrained")
        axes = figure.subplots()
        for i, (name, values) in enumerate(lines.items()):
            colour = COLOURS[i % len(COLOURS)]
            if kind == "bar":
                wide = 0.8 / len(lines)
                at = [j + (i - (len(lines) - 1) / 2) * wide for j in range(len(x))]
                axes.bar(at, values, width=wide, color=colour, label=name)
            else:
                # Of those that lie on one another all are seen: whole below, then dashed, then dotted.
                dashes, size = (("-", 6), ("--", 4.5), (":", 3))[i % 3]
                mark = "o" if len(x) < 30 else ""
                axes.plot(x, values, color=colour, linestyle=dashes, marker=mark, markersize=size, label=name)
        if kind == "bar":
            words = [str(each) for each in x]
            slanted: dict[str, Any] = {"rotation": 40, "ha": "right"} if sum(map(len, words)) > MOST_LEVEL else {}
            axes.set_xticks(range(len(x)), words, **slanted)
        elif "x" not in log and all(isinstance(each, int) for each in x):
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))  # there is no step 2.5
        for each in log:
            getattr(axes, f"set_{each}scale")("log", base=2)
            getattr(axes, f"{each}axis").set_major_formatter("{x:g}")
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axes.grid(axis="y", color="#d9dee5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1:
            figure.legend(loc="outside right upper", frameon=False)
    return figure
