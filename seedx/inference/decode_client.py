"""The decode server's command-line client: `python -m seedx.inference.client decode --prompt "..."`. No jax."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import grpc

from seedx import security
from seedx.checks import ConfigError, require
from seedx.inference import decode_pb2 as pb

_GENERATE = "/seedx.v1.DecodeService/Generate"
_EXIT_REFUSED = 2
# Least and most of the numbers that a message has room for.
_RANGES = {"max_tokens": (1, 2**31 - 1), "top_k": (0, 2**31 - 1), "seed": (0, 2**64 - 1), "n": (1, 2**31 - 1)}
_MAX_TIMEOUT_S = 1e9
# What a call's status means to whoever typed the command.
_REFUSALS = {
    grpc.StatusCode.UNAVAILABLE: "is not there, or takes no requests",
    grpc.StatusCode.INVALID_ARGUMENT: "refuses the request",
    grpc.StatusCode.UNAUTHENTICATED: "wants a token",
    grpc.StatusCode.UNIMPLEMENTED: "is no decode server",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "is full",
}


@dataclass
class Completion:
    """One completion as far as it has come; the lists have an entry for each token."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, reply: pb.GenerateReply) -> None:
        """Takes what came since the last reply."""
        if reply.restarted:
            self.__init__()
        self.text += reply.text
        self.tokens += reply.tokens
        self.logprobs += reply.logprobs
        self.raw_logprobs += reply.raw_logprobs
        self.versions += reply.versions
        if reply.finish_reason != pb.GenerateReply.RUNNING:
            self.finish_reason = pb.GenerateReply.FinishReason.Name(reply.finish_reason).lower()


def gather(replies: Iterable[pb.GenerateReply], num_samples: int) -> list[Completion]:
    """All completions, once they are done."""
    completions: dict[int, Completion] = defaultdict(Completion)
    for reply in replies:
        completions[reply.sample].add(reply)
    return [completions[i] for i in range(num_samples)]


@contextlib.contextmanager
def generate(
    server: str, request: pb.GenerateRequest, access: security.Credentials, timeout_s: float | None = None
) -> Iterator[Iterable[pb.GenerateReply]]:
    """Replies to a request as they come; leaving the block cancels what still runs.

    Args:
        server: unix:/path or host:port.
        request: What is asked for.
        access: Credentials.
        timeout_s: The call's deadline; None: none.

    Raises:
        ConfigError: the server's address is none, or credentials cannot be read.
    """
    with security.open_channel(server, access, []) as channel:
        method = channel.unary_stream(_GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateReply.FromString)
        call = method(request, timeout=timeout_s, metadata=security.call_metadata(access))
        try:
            yield call
        finally:
            call.cancel()


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit code."""
    flags = _parser().parse_args(argv)
    access = security.Access(tls_ca=flags.tls_ca, token_file=flags.token_file)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[missing-attribute]  a terminal may not know a character
    try:
        with generate(flags.server, _request(flags), access, flags.timeout_s) as replies:
            _show(flags, replies)
    except ConfigError as error:
        return _complain(str(error))
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
        complaint = f"the server at {flags.server} {_REFUSALS.get(code, 'failed')} ({code.name}): {details}"
        if "http1" in details:
            complaint += (
                "\nThat may be its HTTP port, --http-port; give the one of gRPC, 9000 unless --port says another."
            )
        elif code is grpc.StatusCode.UNAVAILABLE:
            complaint += "\nStart one with `python launch/serve.py --model smollm2`, or name another with --server."
        return _complain(complaint, _EXIT_REFUSED if code in _REFUSALS else 1)
    except BrokenPipeError:  # `| head`; the descriptor is replaced so that the flush at exit does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show(flags: argparse.Namespace, replies: Iterable[pb.GenerateReply]) -> None:
    if flags.json:
        for completion in gather(replies, flags.n):
            print(json.dumps(asdict(completion)))
    elif flags.n == 1 and not flags.no_stream:
        for reply in replies:
            print(reply.text, end="", flush=True)
        print()
    else:
        for i, completion in enumerate(gather(replies, flags.n)):
            print(f"--- {i}: {completion.finish_reason}\n{completion.text}" if flags.n > 1 else completion.text)


def _request(flags: argparse.Namespace) -> pb.GenerateRequest:
    """The request that the flags describe.

    Raises:
        ConfigError: a number has no place in a message, or a text is not UTF-8.
    """
    for name, (least, most) in _RANGES.items():
        value = getattr(flags, name)
        flag = f"--{name.replace('_', '-')}"
        require(value is None or least <= value <= most, f"{flag} ({value}) must be from {least} to {most}.")
    timeout_s = flags.timeout_s
    require(
        timeout_s is None or 0 < timeout_s <= _MAX_TIMEOUT_S,
        f"--timeout-s ({timeout_s}) must be above 0 and at most {_MAX_TIMEOUT_S:g} seconds.",
    )
    prompt = flags.prompt
    if prompt == "-":
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[missing-attribute]
        prompt = sys.stdin.read()
    for name, text in (("prompt", prompt), *(("stop", text) for text in flags.stop)):
        _require_utf8(f"--{name}", text)
    return pb.GenerateRequest(
        text=prompt,
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        seed=flags.seed,
        num_samples=flags.n,
        stop=flags.stop,
    )


def _require_utf8(flag: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"{text[error.start]!a} at character {error.start}"
        raise ConfigError(f"{flag} is not UTF-8: {place}. Give text in UTF-8.") from None


def _complain(message: str, code: int = _EXIT_REFUSED) -> int:
    print(f"decode: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m seedx.inference.client", description="Asks a seedx server.")
    decode = parser.add_subparsers(required=True, metavar="decode").add_parser(
        "decode", help="continue a prompt", description="Continues a prompt. Exit codes: 2 if the server refuses."
    )
    decode.add_argument("--prompt", required=True, help="text to continue; - reads it from standard input")
    decode.add_argument("--max-tokens", type=int, default=64, help="default 64")
    decode.add_argument("--server", default="127.0.0.1:9000", help="unix:/path or host:port; default 127.0.0.1:9000")
    decode.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token; default 1")
    decode.add_argument("--top-k", type=int, default=0, help="only the K likeliest tokens; default 0: all")
    decode.add_argument("--top-p", type=float, default=1.0, help="only the likeliest that hold P; default 1: all")
    decode.add_argument("--seed", type=int, help="the same seed gives the same tokens; default: random")
    decode.add_argument("--n", type=int, default=1, help="completions; default 1")
    decode.add_argument("--stop", action="append", default=[], help="text that ends a completion; may be repeated")
    decode.add_argument("--timeout-s", type=float, help="give up after so long; default: never")
    decode.add_argument("--no-stream", action="store_true", help="print the text when it is complete")
    decode.add_argument("--json", action="store_true", help="print each completion as a line of JSON")
    decode.add_argument("--token-file", help="file with the server's token")
    decode.add_argument("--tls-ca", help="PEM file of the authority, or certificate, to trust; without it no TLS")
    return parser
