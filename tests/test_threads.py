"""A crew fails together, keeps its first failure, and is joined within its deadline."""

import threading

from server_harness import wait_until

from seedx.threads import Crew


def test_the_first_failure_stops_all_and_is_kept():
    crew = Crew()
    crew.spawn("waits", crew.stop.wait, 60)

    def breaks():
        raise KeyError("the cause")

    def follows():
        crew.stop.wait(60)
        raise RuntimeError("a consequence")

    crew.spawn("follows", follows)
    crew.spawn("breaks", breaks)
    wait_until(crew.stop.is_set)
    assert crew.join(60.0) == []
    assert isinstance(crew.failure, KeyError)
    assert "the cause" in crew.describe_failure()
    assert "in breaks" in crew.describe_failure()
    assert "consequence" not in crew.describe_failure()


def test_a_system_exit_on_a_thread_is_a_failure_too():
    crew = Crew()

    def leaves():
        raise SystemExit(3)

    crew.spawn("leaves", leaves)
    wait_until(crew.stop.is_set)
    assert isinstance(crew.failure, SystemExit)


def test_what_fails_after_the_stop_is_no_failure():
    crew = Crew()

    def follows():
        crew.stop.wait(60)
        raise RuntimeError("closed")

    crew.spawn("follows", follows)
    assert crew.join(60.0) == []
    assert crew.failure is None
    assert crew.describe_failure() == ""


def test_join_names_those_that_hang_and_keeps_its_deadline():
    crew, let_go = Crew(), threading.Event()
    crew.spawn("hangs", let_go.wait)
    crew.spawn("ends", lambda: None).join(60)
    assert crew.join(0.1) == ["hangs"]
    let_go.set()


def test_a_thread_of_the_crew_may_join_it():
    crew, names = Crew(), []
    crew.spawn("joins", lambda: names.append(crew.join(60.0)))
    wait_until(lambda: names)
    assert names == [[]]
