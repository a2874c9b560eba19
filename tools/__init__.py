"""
Commands beside the model: each file is one, `python -m tools.NAME`; questions.py belongs to `python eval.py --tasks`.
eval.py, data.py and checkpoint.py start three of them; no other code needs any. Here is what several of them share:
the look of tables and pictures.
"""
import contextlib

from configurator import write_file


def print_table(rows, columns):
    """Prints rows (dicts) in aligned columns, {header: (key, format)}: the first to the left, the others to the right.
    A column without a value is left out."""
    columns = [[header, *("-" if row.get(key) is None else format(row[key], form) for row in rows)]
               for header, (key, form) in columns.items() if any(row.get(key) is not None for row in rows)]
    widths = [max(map(len, column)) for column in columns]
    for first, *others in zip(*columns):
        print("  ".join([first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:]))]))


@contextlib.contextmanager
def picture(path, **about):
    """A context with the axes of an empty plot, which is then written to the file `path`, a PNG. about: title, labels
    and scales, for `Axes.set`. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure
    ax = Figure(figsize=(8, 4.8), layout="constrained").subplots()
    yield ax
    ax.set(**about)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8)
    write_file(path, lambda file: ax.figure.savefig(file, dpi=130, format="png"))
    print(f"wrote {path or 'nothing'}")
