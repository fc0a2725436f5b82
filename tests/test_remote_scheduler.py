"""A scheduler in another process, or here behind a socket, is to a learner what its own would be."""

import contextlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from bits import assert_bit_equal
from decode_harness import Serving, make_params, warm_engine
from processes import until
from rollout_harness import Alphabet, S

from seedx import decode_role
from seedx.inference.decode_host import DecodeHost
from seedx.inference.decoder import Decoder
from seedx.inference.remote_scheduler import DecodeHostLostError, RemoteScheduler
from seedx.inference.requests import Handle, QueueFullError, Request
from seedx.inference.scheduler import Scheduler
from seedx.security import Access
from seedx.threads import Crew
from seedx.transport.errors import CorruptedError, WeightsLostError
from seedx.transport.open import open_publisher
from seedx.transport.publisher import Publisher

# What the learner's requests differ in, of several lengths, and more than there are slots.
REQUESTS = (
    Request((1, 2, 3), 12, temperature=0.7, seed=2**63 + 5, num_samples=3, stop_tokens=(0, 9)),
    Request((4,), 20, temperature=1.0, seed=7, num_samples=2, priority=-1),
    Request((5, 6, 7, 8, 9), 8, temperature=0.0, seed=1),
    Request((2, 3), 30, top_k=5, top_p=0.9, seed=11, num_samples=2, stop=("B", "no such text")),
)


class Published(Publisher):
    """In place of a publisher: keeps versions."""

    def __init__(self):
        self.versions, self.is_closed = [], False

    def publish(self, version, params):
        self.versions.append((version, params))

    def close(self):
        self.is_closed = True


class Noted(Scheduler):
    """A scheduler that notes what it is asked."""

    version, healthy = 0, True

    def __init__(self, **figures):
        self.taken, self.turns, self.full = [], 0, 0
        self._figures = figures

    def submit(self, request, listener=None):
        if self.full:
            self.full -= 1
            raise QueueFullError("full", 0.01)
        self.taken.append((request, Handle(lambda _: None)))
        return self.taken[-1][1]

    @contextlib.contextmanager
    def together(self):
        yield
        self.turns += 1

    def figures(self):
        return self._figures


@contextlib.contextmanager
def hosts(directory, *schedulers, publisher=None, give_up_s=S, num_slots=4):
    """Decode hosts of schedulers, and what a learner has of them; None: nobody listens there."""
    crew, own, publisher = Crew(), Crew(), publisher or Published()
    addresses = [f"unix:{directory}/decode-{i}.sock" for i in range(len(schedulers))]
    servers = []
    for address, scheduler in zip(addresses, schedulers, strict=True):
        if scheduler is not None:
            servers.append(DecodeHost(address, own.fail))
            servers[-1].begin(scheduler)
    remote = RemoteScheduler(addresses, publisher, num_slots=num_slots, give_up_s=give_up_s, crew=crew)
    remote.start()
    try:
        yield SimpleNamespace(**locals())
    finally:
        crew.stop.set()
        remote.close()
        assert not crew.join(S)
        assert publisher.is_closed
        for server in servers:
            server.close()
        assert own.failure is None


@pytest.fixture
def scheduler():
    with Serving(warm_engine(), make_params(0), tokenizer=Alphabet()) as started:
        yield started


def ask(decoder, requests=REQUESTS):
    with decoder.together():
        handles = [decoder.submit(request) for request in requests]
    return [handle.result(S) for handle in handles]


def assert_equal(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert [(c.finish_reason, c.text) for c in one] == [(c.finish_reason, c.text) for c in other]
        for mine, yours in zip(one, other, strict=True):
            for name in ("tokens", "logprobs", "raw_logprobs", "versions"):
                assert getattr(mine, name).dtype == getattr(yours, name).dtype
                np.testing.assert_array_equal(getattr(mine, name), getattr(yours, name), name)


def test_everything_comes_back_bit_for_bit_as_from_a_scheduler_of_ones_own(tmp_path, scheduler):
    wanted = ask(scheduler)
    with hosts(tmp_path, scheduler) as at:
        assert isinstance(scheduler, Decoder)
        assert isinstance(at.remote, Decoder)
        assert_equal(ask(at.remote), wanted)
        # A completion may be told before the dispatch that made it is counted.
        until(lambda: at.remote.figures()["decode/tokens"] == scheduler.figures()["decode/tokens"], "its figures")
    assert {len(group) for group in wanted} == {1, 2, 3}
    assert {c.finish_reason for group in wanted for c in group} == {"stop", "length"}


def test_no_token_is_older_than_the_version_that_the_learner_had(tmp_path, scheduler):
    held = Published()
    with hosts(tmp_path, scheduler, publisher=held) as at:
        assert set(np.concatenate([c.versions for group in ask(at.remote) for c in group])) == {0}
        at.remote.publish(3, make_params(1))
        late = at.remote.submit(Request((1, 2), 8, seed=3))
        direct = scheduler.submit(Request((1, 2), 8, seed=3)).result(S)  # after which it could have been answered
        assert not late.done
        scheduler.publish(*held.versions[-1])
        [completion] = late.result(S)
    assert set(completion.versions) == {3}
    assert completion.tokens.tolist() != direct[0].tokens.tolist()


def test_what_a_lost_host_had_is_asked_of_it_again_with_the_same_seeds(tmp_path, scheduler):
    wanted = ask(scheduler)
    silent = Noted()
    with hosts(tmp_path, silent) as at:
        handles = [at.remote.submit(request) for request in REQUESTS]
        cancelled = at.remote.submit(Request((9,), 4))
        until(lambda: len(silent.taken) == 5, "the requests")
        at.servers.pop().close()
        cancelled.cancel()
        assert [c.finish_reason for c in cancelled.result(0.0)] == ["cancelled"]
        more = at.remote.submit(REQUESTS[0])  # while there is none
        again = DecodeHost(at.addresses[0], at.own.fail)
        at.servers.append(again)
        again.begin(scheduler)
        found = [handle.result(S) for handle in handles]
        for one, other in zip([*found, more.result(S)], [*wanted, wanted[0]], strict=True):
            assert [c.tokens.tolist() for c in one] == [c.tokens.tolist() for c in other]
        assert at.remote.figures()["decode/lost_hosts"] == 1
        assert at.crew.failure is None


def test_a_request_that_is_cancelled_frees_its_slots_and_comes_back_at_once(tmp_path, scheduler):
    with hosts(tmp_path, scheduler) as at:
        long = at.remote.submit(Request((1,), 60, seed=1, num_samples=40))
        until(lambda: long.num_done > 0, "the first completions")
        long.cancel()
        completions = long.result(0.0)
        reasons = [completion.finish_reason for completion in completions]
        assert "cancelled" in reasons
        assert {"length", "stop"} & set(reasons)
        assert all(completion.text is not None for completion in completions)
        until(lambda: at.remote.figures()["decode/waiting"] == 0, "the queue")
        assert len(ask(at.remote)) == len(REQUESTS)
        long.cancel()  # which changes nothing


def test_a_learner_that_is_gone_leaves_nothing_at_work(tmp_path, scheduler):
    with hosts(tmp_path, scheduler) as at:
        at.remote.submit(Request((1,), 60, num_samples=200))
        until(lambda: at.remote.figures().get("decode/waiting", 0) > 100, "the queue")
    until(lambda: not scheduler._completions.groups, "the end of what was asked")


def test_a_host_that_never_comes_up_is_named_in_time(tmp_path):
    with hosts(tmp_path, None, give_up_s=0.3) as at:
        handle = at.remote.submit(REQUESTS[0])
        assert at.crew.stop.wait(S)
        assert isinstance(at.crew.failure, DecodeHostLostError)
        for part in ("decode-0 at unix:", "for 0.3 s", "UNAVAILABLE", "logs/decode-0.log"):
            assert part in str(at.crew.failure)
        assert not handle.done


def test_a_host_that_is_not_ready_is_waited_for(tmp_path, scheduler):
    with hosts(tmp_path, None) as at:
        at.servers.append(DecodeHost(at.addresses[0], at.own.fail))
        handle = at.remote.submit(REQUESTS[2])
        assert at.remote.figures() == {"decode/hosts": 0, "decode/lost_hosts": 0}
        at.servers[0].begin(scheduler)
        assert len(handle.result(S)) == 1


def test_a_request_that_cannot_be_done_is_a_failure_that_says_why(tmp_path, scheduler):
    with hosts(tmp_path, scheduler) as at:
        at.remote.submit(Request((1, 2), 0))
        assert at.crew.stop.wait(S)
        assert "decode-0 refuses a request (INVALID_ARGUMENT): max_tokens (0)" in str(at.crew.failure)


def test_requests_are_spread_over_hosts_and_stay_together_on_each(tmp_path):
    noted = [Noted(**{"decode/version": 4, "decode/tokens": 10, "decode/occupancy": 0.5}) for _ in range(2)]
    noted[1]._figures |= {"decode/version": 3, "decode/occupancy": 1.0}
    noted[0].full = 1  # of guests' requests
    with hosts(tmp_path, *noted) as at:
        with at.remote.together():
            with at.remote.together():
                handles = [at.remote.submit(request) for request in REQUESTS]
            handles.append(at.remote.submit(REQUESTS[0]))
            handles[0].cancel()  # nobody was told of it yet
        until(lambda: [len(each.taken) for each in noted] == [2, 2], "the requests")
        figures = at.remote.figures()
    assert [each.turns for each in noted] == [1, 1]
    assert [request.prompt for request, _ in noted[0].taken] == [REQUESTS[2].prompt, REQUESTS[0].prompt]
    assert [request.prompt for request, _ in noted[1].taken] == [REQUESTS[1].prompt, REQUESTS[3].prompt]
    assert figures == {
        "decode/version": 3,
        "decode/tokens": 20,
        "decode/occupancy": 0.75,
        "decode/hosts": 2,
        "decode/lost_hosts": 0,
    }
    assert not noted[0].full


# ---- a host's own


def test_a_host_whose_weights_never_come_whole_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode_role, "_GIVE_UP_S", 0.3)
    follower = decode_role.Follower(f"unix:{tmp_path}/learner.sock", make_params(0))

    def receive(newer_than, timeout_s):
        raise CorruptedError("tensor a has another checksum")

    monkeypatch.setattr(follower, "_reader", SimpleNamespace(receive=receive))
    with pytest.raises(CorruptedError, match="another checksum"):
        follower.next()
    assert "it is read again" in capsys.readouterr().out


def test_a_host_follows_the_weights_and_ends_when_the_learner_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(decode_role, "_RECEIVE_S", 0.1)
    monkeypatch.setattr(decode_role, "_GIVE_UP_S", 0.3)
    address, params = f"unix:{tmp_path}/learner.sock", make_params(0)
    publisher = open_publisher(address, Access(), lambda error: None)
    follower = decode_role.Follower(address, params)
    for version, seed in ((0, 0), (7, 1)):
        publisher.publish(version, make_params(seed))
        weights = follower.next()
        assert weights.version == version
        assert_bit_equal(weights.params, make_params(seed))
        for leaf, like in zip(jax.tree.leaves(weights.params), jax.tree.leaves(params), strict=True):
            assert leaf.sharding == like.sharding
    publisher.close()
    with pytest.raises(WeightsLostError, match=r"learner\.sock is lost"):
        follower.next()
