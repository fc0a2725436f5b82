"""Bodies of OpenAI's /v1/completions and /v1/chat/completions: what they ask for, and how wrong ones are refused.

The API as of its reference, https://platform.openai.com/docs/api-reference. A field that would change the result and
is not implemented is refused unless it has the value that changes nothing; `HARMLESS` ones are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_PROMPTS = 128  # in one body

HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
# Fields that are accepted with these values alone, beside null.
_NEUTRAL: Mapping[str, tuple] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_COMMON = frozenset(
    {"model", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "stream", "stream_options"}
    | {"logprobs"}
)
_DEFAULT_MAX_TOKENS = 16  # of /v1/completions


class ApiError(Exception):
    """A refusal, as HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """What a body asks for.

    Attributes:
        model: The model's name; None: whichever is served.
        prompts: Texts or token ids; empty for a chat.
        messages: Of a chat, each with role and content.
        max_tokens: None: to the end of the context.
        options: Of `scheduler.Request`: temperature, top_k, top_p, seed, stop, num_samples.
        stream: Whether the answer comes as server-sent events.
        include_usage: Whether a stream ends with how many tokens there were.
        logprobs: Whether tokens and their log-probabilities are shown.
    """

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[dict[str, str], ...]
    max_tokens: int | None
    options: dict[str, Any]
    stream: bool
    include_usage: bool
    logprobs: bool


def parse_completion(body: bytes) -> Asked:
    """What a body of /v1/completions asks for.

    Raises:
        ApiError: 400, names the field.
    """
    fields = _fields(body, frozenset({"prompt"}))
    logprobs = _integer(fields, "logprobs", minimum=0)
    if logprobs:
        raise _invalid(
            "logprobs", f"logprobs ({logprobs}) must be 0: of each position only the token that was taken is shown."
        )
    max_tokens = _integer(fields, "max_tokens")
    return _asked(
        fields,
        prompts=_prompts(fields.get("prompt")),
        messages=(),
        max_tokens=_DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=logprobs is not None,
    )


def parse_chat(body: bytes) -> Asked:
    """What a body of /v1/chat/completions asks for; the messages' content may be text or a list of text parts.

    Raises:
        ApiError: 400, names the field.
    """
    fields = _fields(body, frozenset({"messages", "max_completion_tokens"}))
    max_tokens, newer = _integer(fields, "max_tokens"), _integer(fields, "max_completion_tokens")
    if newer is not None and max_tokens not in (None, newer):
        raise _invalid("max_tokens", f"max_tokens ({max_tokens}) and max_completion_tokens ({newer}) differ; give one.")
    return _asked(
        fields,
        prompts=(),
        messages=_messages(fields.get("messages")),
        max_tokens=max_tokens if newer is None else newer,
        logprobs=bool(_boolean(fields, "logprobs")),
    )


def _asked(fields: Mapping[str, Any], **own: Any) -> Asked:
    stream = bool(_boolean(fields, "stream"))
    stream_options = fields.get("stream_options", {})
    if not isinstance(stream_options, dict) or stream_options.keys() - {"include_usage", "include_obfuscation"}:
        raise _invalid("stream_options", 'stream_options must be an object that has at most "include_usage".')
    options: dict[str, Any] = {
        "temperature": _number(fields, "temperature"),
        "top_p": _number(fields, "top_p"),
        "top_k": _integer(fields, "top_k"),
        "seed": _integer(fields, "seed", minimum=0, maximum=2**64 - 1),
        "num_samples": _integer(fields, "n"),
        "stop": _stop(fields.get("stop")),
    }
    return Asked(
        model=None if fields.get("model") is None else _text(fields["model"], "model"),
        options={name: value for name, value in options.items() if value is not None},
        stream=stream,
        include_usage=stream and bool(_boolean(stream_options, "include_usage", "stream_options.")),
        **own,
    )


def _fields(body: bytes, own: frozenset[str]) -> dict[str, Any]:
    """The body's fields without nulls, all of them known."""
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}.") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(fields).__name__}.")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, value in fields.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            allowed = " or ".join(json.dumps(neutral) for neutral in _NEUTRAL[name])
            raise _invalid(name, f"{name} is not implemented here; leave it out, or give {allowed}.")
        if name not in _COMMON and name not in own and name not in HARMLESS and name not in _NEUTRAL:
            raise _invalid(name[:100], f"{name[:100]!r} is no field of this request.")
    return fields


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or many, each text or token ids."""
    if value is None:
        raise _invalid("prompt", "prompt is missing; give a text, a list of token ids, or a list of either.")
    if isinstance(value, str):
        return (_text(value, "prompt"),)
    if not isinstance(value, list) or not value:
        raise _invalid("prompt", "prompt must be a text, a list of token ids, or a list of either, and not empty.")
    if all(map(_is_integer, value)):
        return (_token_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise _invalid("prompt", f"prompt has {len(value):,} prompts; at most {MAX_PROMPTS} go into one request.")
    prompts: list[str | tuple[int, ...]] = []
    for i, prompt in enumerate(value):
        if isinstance(prompt, list) and all(map(_is_integer, prompt)):
            prompts.append(_token_ids(prompt))
        else:
            prompts.append(_text(prompt, "prompt", f"prompt[{i}]"))
    return tuple(prompts)


def _token_ids(values: list[int]) -> tuple[int, ...]:
    for value in values:
        if not 0 <= value < 2**31:
            raise _invalid("prompt", f"prompt has token id {str(value)[:20]}; ids are not negative and below 2**31.")
    return tuple(values)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    """Messages whose content is one text; roles are the chat template's affair."""
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "messages must be a list of at least one message.")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise _invalid("messages", f"messages[{i}] must be an object with role and content.")
        given = {name for name, field in message.items() if field not in (None, [])}
        if unknown := given - {"role", "content"}:
            raise _invalid("messages", f"messages[{i}] has {sorted(unknown)[0][:100]!r}; role and content are known.")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_part(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content))
        role = _text(message.get("role"), "messages", f"messages[{i}].role")
        messages.append({"role": role, "content": _text(content, "messages", f"messages[{i}].content")})
    return tuple(messages)


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise _invalid("messages", f'{where} must be {{"type": "text", "text": ...}}: this model reads text alone.')
    return _text(part.get("text"), "messages", f"{where}.text")


def _stop(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list):
        raise _invalid("stop", f"stop must be a text or a list of texts, not {type(value).__name__}.")
    return tuple(_text(text, "stop") for text in values)


def _text(value: Any, param: str, where: str | None = None) -> str:
    if not isinstance(value, str):
        raise _invalid(param, f"{where or param} must be a text, not {type(value).__name__}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _invalid(param, f"{where or param} has half of a surrogate pair; it must be valid Unicode.") from None
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(fields: Mapping[str, Any], name: str, minimum: int = -(2**63), maximum: int = 2**63 - 1) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not _is_integer(value):
        raise _invalid(name, f"{name} must be an integer, not {type(value).__name__}.")
    if not minimum <= value <= maximum:
        raise _invalid(name, f"{name} must be an integer from {minimum} to {maximum}.")
    return value


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _invalid(name, f"{name} must be a number, not {type(value).__name__}.")
    try:
        return float(value)
    except OverflowError:
        raise _invalid(name, f"{name} is too large.") from None


def _boolean(fields: Mapping[str, Any], name: str, where: str = "") -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _invalid(f"{where}{name}", f"{where}{name} must be true or false, not {json.dumps(value)[:100]}.")
    return value


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param)
