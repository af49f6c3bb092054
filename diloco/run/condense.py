"""Long time series in few rows: who follows a run without end holds no more of it than this.

Neighbouring updates of a learner and fragment become one row: tokens, steps and bytes are their
sums, time and place in the data the later one's, all else the mean. So sums stay exact, and curves
lose detail that no screen shows.
"""

import numpy as np

from diloco.run.timeseries import Column, Columns, TimeSeries

SUMS = frozenset({"tokens", "steps", "bytes", "updates"})
LATER = frozenset({"time_s", "position", "round"})
# Of updates sent and of updates merged, each.
MOST_ROWS = 200_000


def condense(series: TimeSeries, most_rows: int = MOST_ROWS) -> bool:
    """Halve the tables of updates that have more rows than this; whether there were any."""
    keys = {"updates": ("learner", "incarnation", "fragment"), "inputs": ("learner", "fragment")}
    done = False
    for name, key in keys.items():
        table: Columns = getattr(series, name)
        if len(table) > most_rows:
            table.replace(_halved(table.newest(len(table)), key))
            done = True
    return done


def _halved(columns: dict[str, Column], key: tuple[str, ...]) -> dict[str, Column]:
    """Rows of the same key two by two, in order of time."""
    order = np.lexsort([columns["time_s"], *(columns[name] for name in reversed(key))])
    sorted_rows = {name: values[order] for name, values in columns.items()}
    changed = np.zeros(len(order), bool)
    for name in key:
        changed[1:] |= sorted_rows[name][1:] != sorted_rows[name][:-1]
    changed[0] = True
    places = np.arange(len(order))
    within = places - np.maximum.accumulate(np.where(changed, places, 0))
    (begins,) = np.nonzero(within % 2 == 0)
    counts = np.diff(np.append(begins, len(order)))
    made = {}
    for name, values in sorted_rows.items():
        sums = np.add.reduceat(values, begins)
        if name in SUMS:
            made[name] = sums
        elif name in LATER:
            made[name] = values[begins + counts - 1]
        else:
            made[name] = sums / counts
    again = np.argsort(made["time_s"], kind="stable")
    return {name: values[again] for name, values in made.items()}
