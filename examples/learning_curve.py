"""A reward curve in the terminal, as a picture, and on a short HTML page."""

from collections.abc import Sequence
from pathlib import Path

HEIGHT = 10

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; max-width: 50em; margin: 2em auto }} img {{ max-width: 100% }}</style>
<h1>{title}</h1>
<p>Mean of the first fifth {first:.2f}, of the last fifth {last:.2f}.</p>
<img src="reward.png" alt="reward by evaluation">
<table><tr><th>evaluation<th>reward</tr>{rows}</table></html>
"""


def fifths(curve: Sequence[float]) -> tuple[float, float]:
    """The mean of the first and of the last fifth."""
    size = max(1, len(curve) // 5)
    return sum(curve[:size]) / size, sum(curve[-size:]) / size


def print_curve(curve: Sequence[float]) -> None:
    """Draw the curve with a column for each value, between 0 and 1."""
    for line in range(HEIGHT, 0, -1):
        cells = "".join("█" if value * HEIGHT >= line - 0.5 else " " for value in curve)
        print(f"{line / HEIGHT:4.1f} │{cells}")
    print("     └" + "─" * len(curve))
    first, last = fifths(curve)
    print(f"mean reward: first fifth {first:.2f}, last fifth {last:.2f}")


def write_page(out: Path, curve: Sequence[float], *, title: str) -> Path:
    """Write ``reward.png`` and ``index.html`` into ``out``; returns the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5))  # drawn without pyplot: no window system is asked for
    axes = figure.subplots()
    axes.plot(range(len(curve)), curve, marker=".")
    axes.set(xlabel="evaluation", ylabel="mean reward", ylim=(0, 1), title=title)
    figure.tight_layout()
    figure.savefig(out / "reward.png", dpi=120)
    first, last = fifths(curve)
    rows = "".join(f"<tr><td>{number}<td>{value:.3f}</tr>" for number, value in enumerate(curve))
    page = out / "index.html"
    page.write_text(PAGE.format(title=title, first=first, last=last, rows=rows), encoding="utf-8")
    return page
