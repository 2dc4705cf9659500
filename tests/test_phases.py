"""Long silent phases say what is being done; the clock is a fake one."""

import io

import pytest
from rich.console import Console

from experiments import build, files, layouts, main, phases, recorder, report, train
from fedjax_pfl import simulate


class Clock:
    """Timers that run when `pass_` says so."""

    def __init__(self):
        self.timers, self.now = [], 0.0

    def __call__(self, seconds, function, args):
        timer = _Timer(seconds, function, args)
        self.timers.append(timer)
        return timer

    def pass_(self, seconds):
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.running]:
            timer.left -= seconds
            if timer.left <= 0:
                timer.running = False
                timer.function(*timer.args)


class _Timer:
    def __init__(self, seconds, function, args):
        self.left, self.function, self.args, self.running = (
            seconds,
            function,
            args,
            False,
        )

    def start(self):
        self.running = True

    def cancel(self):
        self.running = False


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(phases.threading, "Timer", clock)
    return clock


def test_what_takes_longer_than_five_seconds_is_said_once(clock):
    console = Console(file=io.StringIO(), width=100)
    with phases.said(console, "Compiling"):
        clock.pass_(4.9)
        assert not console.file.getvalue()
        clock.pass_(0.2)
        clock.pass_(100)
    with pytest.raises(OSError), phases.said(console, "Writing"):
        raise OSError
    clock.pass_(100)
    assert console.file.getvalue() == "Compiling ...\n"


def test_long_rounds_are_said_as_often_as_lines_are_printed(clock):
    def rounds():
        for t in range(100):
            clock.pass_(6)
            yield {"round": t, "loss": 1.0}
        clock.pass_(6)
        yield {"round": 100}

    console = Console(file=io.StringIO(), width=100)
    with report.Reporter(console, 0, 100) as reporter:
        for row in reporter.watched(rounds()):
            reporter.update(row)
    lines = console.file.getvalue().splitlines()
    said = [line for line in lines if line.endswith("...")]
    assert said[:2] == [
        f"round {t}/100: evaluating and training clients ..." for t in (1, 2)
    ]
    assert (
        said[-1] == "Evaluating all clients after the last round ..."
        and len(said) == 22
    )
    assert len(lines) - len(said) == 21  # the lines of rounds


def test_a_run_says_what_takes_long(clock, tmp_path, monkeypatch, capsys):
    """Each phase of a run takes six seconds; those from the first round on are its
    training."""
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: clock.now)
    for place, name in (
        (build, "prepare"),
        (train, "compiled"),
        (layouts, "choose"),
        (recorder.Recorder, "keep"),
    ):
        monkeypatch.setattr(place, name, slow(clock, getattr(place, name)))
    monkeypatch.setattr(recorder.Recorder, "show", slow(clock, recorder.Recorder.show))
    tiny = [
        "--data_fraction=0.2",
        "--clients=5",
        "--model=linear",
        "--width=1",
        "--devices=1",
        "--rounds=1",
    ]
    assert main.run(["--algo=local", *tiny, f"--workdir={tmp_path / 'run'}"]) == 0
    said = [
        line.removesuffix(" ...")
        for line in capsys.readouterr().out.splitlines()
        if line.endswith(" ...") and "Everything" not in line
    ]
    assert list(dict.fromkeys(said)) == [
        "Loading the data and making the clients",
        "Trying how many clients to train at once",
        "Compiling",
        "Writing the checkpoint after round 1, and the tables",
        "Writing tables and curves",
    ]
    # two checkpoints, the second with the closing scores; not the tables after them
    assert (
        files.read_json(tmp_path / "run" / "summary.json")["seconds"]["train"] == 2 * 6
    )


def slow(clock, function):
    def given(*args, **kwargs):
        clock.pass_(6)
        return function(*args, **kwargs)

    return given


def test_what_a_round_raises_is_handed_on():
    reporter = report.Reporter(Console(file=io.StringIO()), 0, 2)

    def rounds():
        yield 0
        raise simulate.DivergenceError("x")

    with pytest.raises(simulate.DivergenceError):
        list(reporter.watched(rounds()))
