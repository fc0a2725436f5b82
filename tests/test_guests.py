"""Requests of others to an engine that learns."""

from dataclasses import replace

from seedx.inference.guests import Guests
from seedx.inference.requests import Handle, Request


class Noting:
    healthy = True

    def __init__(self):
        self.requests, self.handle = [], Handle(lambda _: None)

    def submit(self, request, listener=None):
        self.requests.append((request, listener))
        return self.handle


def test_guests_neither_go_first_nor_hold_back_a_swap():
    scheduler, request = Noting(), Request((1, 2), 3, priority=5, on_swap="finish", seed=7)
    guests = Guests(scheduler)
    assert guests.healthy
    assert guests.submit(request, print) is scheduler.handle
    guests.submit(replace(request, priority=-2, on_swap="restart"))
    first, second = scheduler.requests
    assert first == (replace(request, priority=0, on_swap="continue"), print)
    assert second == (replace(request, priority=-2, on_swap="continue"), None)
