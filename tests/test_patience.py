from seedx.replay import patience
from seedx.replay.patience import SAY_AFTER_S, Patience
from seedx.replay.replay import ReplayGoneError, ReplayTimeoutError


def test_a_server_that_goes_during_a_wait_is_said_too(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    waits = Patience("acting")
    for second in range(30):
        now[0] += 1
        gone = second in (20, 21, 25)
        waits.timed_out(ReplayGoneError("no answer") if gone else ReplayTimeoutError("full"))
    assert capsys.readouterr().out == (
        "acting has waited for 10 s and goes on waiting: full\n"
        "acting has waited for 20 s and goes on waiting: no answer\n"
    )


def test_a_long_wait_is_said_once(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    waits = Patience("learning")

    def wait(seconds):
        for _ in range(seconds):
            now[0] += 1
            waits.timed_out(ReplayTimeoutError(f"at {now[0]:g}"))

    wait(int(SAY_AFTER_S))
    assert capsys.readouterr().out == ""
    wait(100)
    assert capsys.readouterr().out == "learning has waited for 10 s and goes on waiting: at 11\n"
    waits.over()
    wait(int(SAY_AFTER_S))
    assert capsys.readouterr().out == ""
    wait(1)
    assert capsys.readouterr().out == "learning has waited for 10 s and goes on waiting: at 121\n"
