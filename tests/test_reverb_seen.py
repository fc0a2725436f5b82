"""Keys of a queue that were sampled."""

from seedx.replay.reverb_seen import Seen


def test_keys_are_remembered_until_the_checkpoint_after_the_next():
    seen = Seen()
    assert [seen.add(key) for key in (1, 2, 1)] == [True, True, False]
    seen.rotate()
    assert not seen.add(1)
    assert seen.add(3)
    seen.rotate()
    assert not seen.add(3)
    assert not seen.add(1)  # came again before the last checkpoint
    for _ in range(2):
        seen.rotate()
    assert seen.add(3)


def test_what_is_known_at_a_restart_is_remembered_until_it_comes_again():
    seen = Seen()
    seen.add(1)
    seen.rotate()
    seen.add(2)
    seen.restored()
    for _ in range(5):
        seen.rotate()
    assert [seen.add(1), seen.add(2)] == [False, False]
    for _ in range(2):
        seen.rotate()
    assert [seen.add(1), seen.add(2)] == [True, True]


def test_a_bound_on_the_keys_is_kept_and_said_once(capsys):
    seen = Seen(max_keys=10)
    assert all(seen.add(key) for key in range(20))
    assert not capsys.readouterr().out
    assert not any(seen.add(key) for key in range(10, 20))
    assert all(seen.add(key) for key in range(20, 60))
    assert capsys.readouterr().out.count("more than 20 items of the Reverb queue") == 1
    assert not any(seen.add(key) for key in range(50, 60))
