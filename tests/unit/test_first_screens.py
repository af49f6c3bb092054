"""The first thing that a person sees: lines of `why`, of `local`, and a table of 80 columns."""

import io
from dataclasses import replace

from records import make_input, make_record
from rich.console import Console
from runlab import RUN, Lab

from diloco.common.protocol import names, wire
from diloco.common.storage.tape import Entry, Recorded
from diloco.judge.doctor import Report
from diloco.operate.local import screen
from diloco.replay.why_screen import AsItComes
from diloco.run.observed import Observed
from diloco.run.state import Finding
from diloco.show.status.screen import learners_table


def seen_with(losses: dict[str, float]) -> Observed:
    """A run whose learners tell these losses."""
    seen = Observed(RUN, 0, Lab().context.settings)
    for seq, (name, loss) in enumerate(losses.items(), 1):
        join = wire.Join(run=RUN, learner=name, layout="0" * 32, host="h")
        seen.take(Entry(seq, 0.0, names.join(RUN, name), join, 0))
        beat = wire.Heartbeat(
            learner=name, incarnation=seq, local_step=8, global_step=8, tokens=80, loss=loss,
            tokens_per_s=10.0, step_time_s=0.1, stall_s=0.0, run_s=1.0, bytes_up=0, bytes_down=0,
            updates_sent=1, state="training",
        )  # fmt: skip
        seen.hear(beat, 1000.0)
    return seen


def line(losses: dict[str, float], usual: list[float]) -> str:
    observed = seen_with(losses).run(1000.0)
    frame = screen.Picture(
        run=RUN, learners={}, daemons={}, observed=observed, losses=usual, note="", behind=False,
        elapsed_s=1.0,
    )  # fmt: skip
    return screen.line(frame)


def test_the_line_of_a_local_run_names_who_is_far_from_the_median():
    assert "loss 2.100 (c: 91)  " in line({"a": 2.0, "b": 2.1, "c": 91.0}, [2.1])
    assert "loss 2.100  " in line({"a": 2.0, "b": 2.1, "c": 3.0}, [2.1])
    assert "loss -  " in line({}, [])


def test_of_learners_with_long_figures_no_cell_is_folded_at_80_columns():
    seen = seen_with({"island-europe-1": 2.0, "island-asia-22": 2.1})
    for version in range(1, 4):
        inputs = tuple(
            make_input(learner=name, tokens_credited=10**12, norm=12345.0, loss=-1234.5)
            for name in ("island-europe-1", "island-asia-22")
        )
        seen.note_record(Recorded(make_record(version=version, inputs=inputs), version, 1.0))
    paper = Console(file=io.StringIO(), width=80)
    paper.print(learners_table(seen.run(1000.0).learners))
    shown = paper.file.getvalue().splitlines()
    assert len(shown) == 3, "a title, and a line for each"
    assert "island-europe-1" in shown[2]
    assert all(word in shown[0] for word in ("state", "merged", "rej.", "loss", "norm"))


def test_through_a_pipe_each_alert_is_told_once_as_it_is_found(capsys):
    shown = AsItComes(Console(), lambda one: one.severity != "ok", lines=True)
    late = Finding(severity="warning", about="learner b", sentence="is late by 1 s", advice="look")
    report = Report("lab", [late, Finding(severity="note", about="run", sentence="is new")])
    shown.told(report, "reading the tape")
    later = replace(late, sentence="is late by 2 s")
    report.findings = [Finding(severity="error", about="store", sentence="is away"), later]
    shown.told(report, "reading the store")
    told = capsys.readouterr()
    assert told.out == "warning  learner b: is late by 1 s\nerror  store: is away\n"
    assert told.err == "reading the tape ...\nreading the store ...\n"


def test_a_document_for_scripts_stands_alone(capsys):
    shown = AsItComes(Console(stderr=True), lambda _: True, lines=False)
    shown.told(Report("lab", [Finding(severity="error", about="a", sentence="b")]), "reading")
    assert capsys.readouterr() == ("", "")
