from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "actor_id", "run_id", "groups", "envs_per_group", "evaluation", "spec_json")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ACTOR_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ENVS_PER_GROUP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    actor_id: int
    run_id: RunId
    groups: int
    envs_per_group: int
    evaluation: bool
    spec_json: str
    def __init__(self, protocol: _Optional[int] = ..., actor_id: _Optional[int] = ..., run_id: _Optional[_Union[RunId, _Mapping]] = ..., groups: _Optional[int] = ..., envs_per_group: _Optional[int] = ..., evaluation: bool = ..., spec_json: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "server_id")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    server_id: str
    def __init__(self, protocol: _Optional[int] = ..., server_id: _Optional[str] = ...) -> None: ...

class RunId(_message.Message):
    __slots__ = ("start_time_ns", "nonce")
    START_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    start_time_ns: int
    nonce: int
    def __init__(self, start_time_ns: _Optional[int] = ..., nonce: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("actor_id", "run_id", "group")
    ACTOR_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    actor_id: int
    run_id: RunId
    group: int
    def __init__(self, actor_id: _Optional[int] = ..., run_id: _Optional[_Union[RunId, _Mapping]] = ..., group: _Optional[int] = ...) -> None: ...

class ActRequest(_message.Message):
    __slots__ = ("attach", "timestep")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    TIMESTEP_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    timestep: bytes
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., timestep: _Optional[bytes] = ...) -> None: ...

class ActReply(_message.Message):
    __slots__ = ("action", "version")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    action: bytes
    version: int
    def __init__(self, action: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...
