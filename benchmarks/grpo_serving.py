"""`serving`: how fast a run learns while others ask its engine for 64 greedy tokens each second, and while nobody asks.

Client and server are in the run's process, as with --serve-port the server is; a client of its own would cost less.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

from decode_setup import random_prompts, result, result_load, take_turns
from grpo_setup import NEW_TOKENS, TINY, Letters, Run
from grpo_speed import time_updates
from grpo_task import PROMPT_TOKENS

from seedx.inference.decode_client import gather, generate
from seedx.inference.decode_metrics import DecodeMetrics
from seedx.inference.decode_pb2 import GenerateRequest
from seedx.inference.decode_server import DecodeServer
from seedx.inference.decode_service import DecodeService
from seedx.inference.guests import Guests
from seedx.security import Access

_INTERVAL_S = 1.0
_TIMEOUT_S = 60.0


def run(plan: argparse.Namespace) -> None:
    """Rounds of one run, alone and asked."""
    one = Run("grpo_task:RandomPrompts", max_staleness=1, devices=1)
    service = DecodeService(DecodeMetrics())
    server = DecodeServer(service, "localhost:0", None, Access(), one.crew.fail)
    server.start()
    service.begin(Guests(one.scheduler), "tiny", Letters(), None)
    client = Client(server.address)
    try:
        contenders = {
            "alone": lambda: time_updates(one, plan.updates),
            "asked": lambda: client.beside(lambda: time_updates(one, plan.updates)),
        }
        seconds = take_turns(contenders, plan.rounds)
    finally:
        server.stop(0.0)
        one.close()
    result_load()
    for name, values in seconds.items():
        result(f"grpo_serving_{name}_updates_per_s", plan.updates / values, "updates/s")
    result("grpo_serving_asked_over_alone", seconds["alone"] / seconds["asked"], "of the rate alone")
    result("grpo_serving_answer_s", max(client.answers_s), "s, the slowest answer")
    result("grpo_serving_answers", len(client.answers_s), "answers")


class Client:
    """Asks once a second, one prompt after the other.

    Attributes:
        answers_s: How long each answer took.
    """

    def __init__(self, address: str) -> None:
        self.answers_s: list[float] = []
        self._address = address
        self._failure: Exception | None = None
        [prompt] = random_prompts(TINY.vocab_size, [PROMPT_TOKENS])
        ids = GenerateRequest.Tokens(ids=prompt)
        self._request = GenerateRequest(tokens=ids, max_tokens=NEW_TOKENS, temperature=0.0)

    def beside(self, work: Callable[[], float]) -> float:
        """What the work returns, during which it asks."""
        stop = threading.Event()
        thread = threading.Thread(target=self._ask, args=(stop,))
        thread.start()
        try:
            return work()
        finally:
            stop.set()
            thread.join(_TIMEOUT_S)
            if self._failure is not None:
                raise self._failure

    def _ask(self, stop: threading.Event) -> None:
        due = time.monotonic()
        try:
            while not stop.wait(max(due - time.monotonic(), 0.0)):
                due += _INTERVAL_S
                start = time.perf_counter()
                with generate(self._address, self._request, Access(), _TIMEOUT_S) as replies:
                    [completion] = gather(replies, 1)
                assert len(completion.tokens) == NEW_TOKENS
                self.answers_s.append(time.perf_counter() - start)
        except Exception as error:
            self._failure = error
