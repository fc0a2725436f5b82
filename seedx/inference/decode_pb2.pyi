from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("text", "tokens", "max_tokens", "temperature", "top_k", "top_p", "seed", "num_samples", "stop_tokens", "stop", "priority", "on_swap")
    class OnSwap(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CONTINUE: _ClassVar[GenerateRequest.OnSwap]
        FINISH: _ClassVar[GenerateRequest.OnSwap]
        RESTART: _ClassVar[GenerateRequest.OnSwap]
    CONTINUE: GenerateRequest.OnSwap
    FINISH: GenerateRequest.OnSwap
    RESTART: GenerateRequest.OnSwap
    class Tokens(_message.Message):
        __slots__ = ("ids",)
        IDS_FIELD_NUMBER: _ClassVar[int]
        ids: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ON_SWAP_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: GenerateRequest.Tokens
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    num_samples: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    on_swap: GenerateRequest.OnSwap
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Union[GenerateRequest.Tokens, _Mapping]] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., num_samples: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., on_swap: _Optional[_Union[GenerateRequest.OnSwap, str]] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("sample", "tokens", "logprobs", "raw_logprobs", "versions", "text", "finish_reason", "restarted")
    class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RUNNING: _ClassVar[GenerateReply.FinishReason]
        STOP: _ClassVar[GenerateReply.FinishReason]
        LENGTH: _ClassVar[GenerateReply.FinishReason]
        CANCELLED: _ClassVar[GenerateReply.FinishReason]
        DEADLINE: _ClassVar[GenerateReply.FinishReason]
        INTERRUPTED: _ClassVar[GenerateReply.FinishReason]
    RUNNING: GenerateReply.FinishReason
    STOP: GenerateReply.FinishReason
    LENGTH: GenerateReply.FinishReason
    CANCELLED: GenerateReply.FinishReason
    DEADLINE: GenerateReply.FinishReason
    INTERRUPTED: GenerateReply.FinishReason
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    RESTARTED_FIELD_NUMBER: _ClassVar[int]
    sample: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    raw_logprobs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: GenerateReply.FinishReason
    restarted: bool
    def __init__(self, sample: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., raw_logprobs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[GenerateReply.FinishReason, str]] = ..., restarted: bool = ...) -> None: ...

class Orders(_message.Message):
    __slots__ = ("version", "orders", "cancelled")
    class Order(_message.Message):
        __slots__ = ("id", "request")
        ID_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        id: int
        request: GenerateRequest
        def __init__(self, id: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    version: int
    orders: _containers.RepeatedCompositeFieldContainer[Orders.Order]
    cancelled: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., orders: _Optional[_Iterable[_Union[Orders.Order, _Mapping]]] = ..., cancelled: _Optional[_Iterable[int]] = ...) -> None: ...

class OrderReply(_message.Message):
    __slots__ = ("id", "completion")
    ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    id: int
    completion: GenerateReply
    def __init__(self, id: _Optional[int] = ..., completion: _Optional[_Union[GenerateReply, _Mapping]] = ...) -> None: ...

class FiguresRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FiguresReply(_message.Message):
    __slots__ = ("figures",)
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    figures: _containers.ScalarMap[str, float]
    def __init__(self, figures: _Optional[_Mapping[str, float]] = ...) -> None: ...

class JetStreamRequest(_message.Message):
    __slots__ = ("session_cache", "priority", "max_tokens", "text_content", "token_content")
    class TextContent(_message.Message):
        __slots__ = ("text",)
        TEXT_FIELD_NUMBER: _ClassVar[int]
        text: str
        def __init__(self, text: _Optional[str] = ...) -> None: ...
    class TokenContent(_message.Message):
        __slots__ = ("token_ids",)
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
    SESSION_CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_CONTENT_FIELD_NUMBER: _ClassVar[int]
    session_cache: str
    priority: int
    max_tokens: int
    text_content: JetStreamRequest.TextContent
    token_content: JetStreamRequest.TokenContent
    def __init__(self, session_cache: _Optional[str] = ..., priority: _Optional[int] = ..., max_tokens: _Optional[int] = ..., text_content: _Optional[_Union[JetStreamRequest.TextContent, _Mapping]] = ..., token_content: _Optional[_Union[JetStreamRequest.TokenContent, _Mapping]] = ...) -> None: ...

class JetStreamReply(_message.Message):
    __slots__ = ("initial_content", "stream_content")
    class InitialContent(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class StreamContent(_message.Message):
        __slots__ = ("samples",)
        class Sample(_message.Message):
            __slots__ = ("text", "token_ids")
            TEXT_FIELD_NUMBER: _ClassVar[int]
            TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
            text: str
            token_ids: _containers.RepeatedScalarFieldContainer[int]
            def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
        SAMPLES_FIELD_NUMBER: _ClassVar[int]
        samples: _containers.RepeatedCompositeFieldContainer[JetStreamReply.StreamContent.Sample]
        def __init__(self, samples: _Optional[_Iterable[_Union[JetStreamReply.StreamContent.Sample, _Mapping]]] = ...) -> None: ...
    INITIAL_CONTENT_FIELD_NUMBER: _ClassVar[int]
    STREAM_CONTENT_FIELD_NUMBER: _ClassVar[int]
    initial_content: JetStreamReply.InitialContent
    stream_content: JetStreamReply.StreamContent
    def __init__(self, initial_content: _Optional[_Union[JetStreamReply.InitialContent, _Mapping]] = ..., stream_content: _Optional[_Union[JetStreamReply.StreamContent, _Mapping]] = ...) -> None: ...

class HealthCheckRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthCheckReply(_message.Message):
    __slots__ = ("is_live",)
    IS_LIVE_FIELD_NUMBER: _ClassVar[int]
    is_live: bool
    def __init__(self, is_live: bool = ...) -> None: ...
